"""What a back end is: where the kernels are chosen, and where they are refused."""

import os
import subprocess
import sys

import pytest
import torch
from tails import DEVICE, EVALUATED, TRAINED, launched, maps
from torch import nn

import mssar
from mssar.kernels import products_in

pytest.importorskip("triton")

knows_exports = pytest.mark.skipif(
    not hasattr(torch.compiler, "is_exporting"), reason="since torch 2.7"
)


class Anywhere:
    """An attribute that is always true."""

    def __get__(self, *_):
        return True


@pytest.fixture
def on_cuda(monkeypatch):
    """When called, tensors are taken to be on a CUDA device of some compute capability."""

    def pretend(*capability):
        kernels = sys.modules["mssar.kernels"]  # of the copy of the package that is in use
        device, real = sys.modules["mssar.kernels.device"], kernels.chosen
        found = device.INTERPRETER._replace(capability=capability)
        monkeypatch.setattr(device, "device_of", lambda _: found)

        def chosen(backend, x):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.Tensor, "is_cuda", Anywhere())
                return real(backend, x)

        for name, module in list(sys.modules.items()):
            if name.startswith("mssar") and getattr(module, "chosen", None) is real:
                monkeypatch.setattr(module, "chosen", chosen)

    return pretend


@pytest.mark.parametrize(
    ("backend", "capability", "ops"),
    [
        ("auto", (9, 0), TRAINED),
        ("auto", (8, 0), TRAINED),
        ("auto", (7, 5), []),  # no bfloat16
        ("reference", (9, 0), []),
    ],
)
def test_auto_needs_a_device_with_the_kernels_types(on_cuda, backend, capability, ops):
    on_cuda(*capability)
    assert launched(mssar.MSSAR(12, (1, 2), backend=backend).to(DEVICE), maps()) == ops
    network = mssar.create_model("resnet8", "mssar", backend=backend).to(DEVICE)
    assert launched(network, maps(4, 3, 8, 8)) == 3 * ops


def test_an_old_device_is_named_when_the_kernels_are_asked_for(on_cuda, monkeypatch):
    on_cuda(7, 5)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    layer = mssar.MSSAR(12, (1, 2), backend="triton").to(DEVICE)
    with pytest.raises(ValueError, match=r"compute capability 8\.0 or newer; got Tesla T4: use"):
        layer(maps())


@knows_exports
@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("net", ["resnet8", "densenet100"])
def test_an_exported_network_has_no_kernels_in_it(unchecked, on_cuda, net):
    on_cuda(9, 0)
    network, channels = unchecked.create_model(net, "mssar").to(DEVICE).eval(), 3
    if net == "densenet100":
        network, channels = network.block1, 24
        network.steps = network.steps[:2]
    x = maps(2, channels, 8, 8)
    with torch.no_grad():
        assert net != "resnet8" or launched(network, x) == 3 * EVALUATED
        program = torch.export.export(network, (x,), strict=False)
        assert launched(program.module(), x) == []
        torch.testing.assert_close(program.module()(x), network(x), rtol=1e-4, atol=1e-5)


@knows_exports
@pytest.mark.parametrize("strict", [True, False])
def test_exports_are_told_from_other_calls(unchecked, strict):
    class Which(nn.Module):
        def forward(self, x):
            return -x if unchecked.kernels.exporting() else x

    x = torch.ones(2)
    assert torch.equal(Which()(x), x)
    assert torch.equal(torch.compile(Which(), backend="eager")(x), x)
    assert torch.equal(torch.export.export(Which(), (x,), strict=strict).module()(x), -x)


@pytest.mark.skipif(not hasattr(torch.backends.cudnn, "conv"), reason="since torch 2.9")
@pytest.mark.parametrize("recurrent", ["ieee", "tf32"])
@pytest.mark.parametrize("convolutions", ["ieee", "tf32"])
def test_products_are_taken_as_convolutions_in_the_newer_way_too(convolutions, recurrent):
    cudnn, before = torch.backends.cudnn, torch.backends.cudnn.allow_tf32
    try:
        cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision = convolutions, recurrent
        if "ieee" in (convolutions, recurrent):
            with pytest.raises(RuntimeError, match="allow_tf32"):
                _ = cudnn.allow_tf32
        assert products_in(torch.ones(1)) == convolutions
        assert products_in(torch.ones(1, dtype=torch.bfloat16)) == "bf16"
        assert products_in(torch.ones(1, dtype=torch.float16)) == "tf32"
    finally:
        cudnn.allow_tf32 = before


def test_back_ends_that_are_not_there():
    with pytest.raises(ValueError, match="one of auto, reference, triton; got 'cuda'"):
        mssar.MSSAR(12, backend="cuda")
    assert "backend" not in repr(mssar.MSSAR(12, backend="auto"))


def test_without_the_interpreter_a_cpu_has_no_kernels():
    program = """
import torch, mssar

for make in (lambda: mssar.MSSAR(8, backend="triton"), lambda: mssar.MSSAR(8)):
    try:
        make()(torch.randn(2, 8, 4, 4))
        print("ran")
    except ValueError as error:
        print(error)
"""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    refused, ran = done.stdout.splitlines()
    assert refused.startswith("backend='triton' needs a tensor on a CUDA device; got cpu: use")
    assert "TRITON_INTERPRET=1" in refused
    assert ran == "ran", "the reference"


def test_the_cost_does_not_depend_on_the_back_end():
    found = [
        mssar.cost(mssar.create_model("resnet8", "mssar", backend=backend), (3, 32, 32))
        for backend in ("reference", "triton", "auto")
    ]
    assert found[0] == found[1] == found[2]
    assert found[0].recalibration_macs > 0


@pytest.mark.gpu
@pytest.mark.parametrize("training", [True, False])
def test_auto_takes_the_kernels_when_compiled(unchecked, training):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    network = unchecked.create_model("resnet8", "mssar").cuda().train(training)
    with torch.set_grad_enabled(training):
        torch.compile(network, backend=backend, fullgraph=True)(maps(4, 3, 8, 8))
    (graph,) = graphs
    called = [str(node.target) for node in graph.graph.nodes if "mssar" in str(node.target)]
    assert sum("tail" in name for name in called) == 3


@pytest.mark.gpu
def test_auto_leaves_float64_to_the_reference():
    ours = mssar.MSSAR(12).cuda()
    assert launched(ours, maps()) == TRAINED
    assert launched(ours.double(), maps().double()) == []
