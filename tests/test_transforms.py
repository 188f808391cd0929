"""What PyTorch makes of the layer: compile, export, functional calls, vmap over models."""

import copy
import io
import shutil

import pytest
import torch
from torch import nn
from torch.func import functional_call, stack_module_state, vmap
from torch.testing import assert_close

LAYERS = [
    pytest.param({}, id="nested"),
    pytest.param({"scales": (2, 3)}, id="separate"),
    pytest.param({"strategy": "sliding"}, id="sliding"),
]
SIZES = [pytest.param((8, 8), id="even"), pytest.param((7, 9), id="ragged")]
FORMATS = [
    pytest.param(torch.contiguous_format, id="contiguous"),
    pytest.param(torch.channels_last, id="channels_last"),
]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()


def assert_agree(layer: nn.Module, other: nn.Module, x: torch.Tensor, **tolerance: float) -> None:
    """Two layers give the same map, gradients and statistics."""
    twins = [x.clone(memory_format=torch.preserve_format).requires_grad_() for _ in range(2)]
    found = [module(twin) for module, twin in zip((layer, other), twins, strict=True)]
    assert_close(found[1], found[0], **tolerance)
    assert found[1].stride() == found[0].stride()
    probe = torch.randn_like(found[0])
    for y in found:
        (y * probe).sum().backward()
    assert_close(twins[1].grad, twins[0].grad, **tolerance)
    for p, q in zip(layer.parameters(), other.parameters(), strict=True):
        assert_close(q.grad, p.grad, **tolerance)
    for b, c in zip(layer.buffers(), other.buffers(), strict=True):
        assert_close(c, b, **tolerance)


# Which way a mean goes depends on the size and the layout together; any two of the rest meet once.
COMPILED = [
    ({}, (8, 8), torch.contiguous_format, True),
    ({}, (8, 8), torch.channels_last, False),
    ({}, (7, 9), torch.contiguous_format, False),
    ({}, (7, 9), torch.channels_last, True),
    ({"scales": (2, 3)}, (8, 8), torch.channels_last, True),
    ({"scales": (2, 3)}, (7, 9), torch.contiguous_format, False),
    ({"strategy": "sliding"}, (8, 8), torch.channels_last, False),
    ({"strategy": "sliding"}, (7, 9), torch.contiguous_format, True),
]


@pytest.mark.parametrize(("options", "size", "memory_format", "train"), COMPILED, ids=str)
def test_compiles_whole(unchecked, options, size, memory_format, train):
    layer = unchecked.MSSAR(6, dtype=torch.float64, **options).train(train)
    compiled = torch.compile(copy.deepcopy(layer), fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 6, *size, dtype=torch.float64).contiguous(memory_format=memory_format)
    assert_agree(layer, compiled, x, atol=1e-12, rtol=1e-9)


@pytest.mark.skipif(shutil.which("c++") is None, reason="Inductor needs a C++ compiler")
@pytest.mark.parametrize("size", SIZES)
def test_compiles_to_machine_code(unchecked, size):
    layer = unchecked.MSSAR(6)
    compiled = torch.compile(copy.deepcopy(layer), fullgraph=True)
    x = torch.randn(4, 6, *size).contiguous(memory_format=torch.channels_last)
    assert_agree(layer, compiled, x, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("options", LAYERS)
def test_a_compiled_layer_takes_other_sizes(unchecked, options):
    layer = unchecked.MSSAR(6, dtype=torch.float64, **options).eval()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for size in ((8, 8), (7, 9)):
        x = torch.randn(2, 6, *size, dtype=torch.float64)
        assert_close(compiled(x), layer(x), atol=1e-12, rtol=0)


def test_a_compiled_layer_stays_on_the_device_of_its_map(unchecked):
    """Whatever the default is for tensors that are made."""
    layer = unchecked.MSSAR(6, dtype=torch.float64).eval()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 6, 7, 9, dtype=torch.float64)
    with torch.no_grad(), torch.device("meta"):
        assert_close(compiled(x), layer(x), atol=1e-12, rtol=0)


def test_whole_networks_compile(unchecked):
    networks = unchecked.networks
    for network in (
        networks.CifarResNet(8, recalibration=unchecked.MSSAR),
        networks.DenseNet(16, 6, recalibration=unchecked.MSSAR, stage="multi"),
    ):
        network.double()
        compiled = torch.compile(copy.deepcopy(network), fullgraph=True, backend="aot_eager")
        assert_agree(
            network, compiled, torch.randn(4, 3, 16, 16, dtype=torch.float64), atol=1e-9, rtol=1e-7
        )


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "loose"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("options", LAYERS)
def test_exports_for_any_batch(unchecked, options, size, strict):
    layer = unchecked.MSSAR(6, **options).eval()
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(
        layer, (torch.randn(4, 6, *size),), dynamic_shapes={"x": {0: batch}}, strict=strict
    )
    for n in (1, 7):
        x = torch.randn(n, 6, *size)
        assert_close(program.module()(x), layer(x))


def test_exports_for_any_size_that_divides_evenly(unchecked):
    layer = unchecked.MSSAR(6).eval()
    h, w = torch.export.Dim("h", min=2, max=64), torch.export.Dim("w", min=2, max=64)
    program = torch.export.export(
        layer, (torch.randn(2, 6, 8, 8),), dynamic_shapes={"x": {2: 4 * h, 3: 4 * w}}
    )
    x = torch.randn(2, 6, 16, 24)
    assert_close(program.module()(x), layer(x))


def test_exports_with_a_context(unchecked):
    layer = unchecked.MSSAR(6, context_channels=9).eval()
    x, context = torch.randn(2, 6, 7, 7), torch.randn(2, 9, 7, 7)
    program = torch.export.export(layer, (x, context))
    assert_close(program.module()(x + 1, context * 2), layer(x + 1, context * 2))


@pytest.mark.parametrize("options", LAYERS)
def test_functional_call_uses_the_parameters_it_is_given(unchecked, options):
    layer, other = (unchecked.MSSAR(6, **options).eval() for _ in range(2))
    x = torch.randn(2, 6, 8, 8)
    assert_close(functional_call(layer, other.state_dict(), (x,)), other(x))
    assert not torch.equal(layer(x), other(x))


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("options", LAYERS)
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_vmap_over_models(unchecked, train, options, size, memory_format):
    layers = [unchecked.MSSAR(6, **options).train(train) for _ in range(3)]
    parameters, buffers = stack_module_state(layers)
    skeleton = copy.deepcopy(layers[0]).to("meta")
    x = torch.randn(4, 6, *size).contiguous(memory_format=memory_format)
    found = vmap(lambda p, b, x: functional_call(skeleton, (p, b), (x,)), in_dims=(0, 0, None))(
        parameters, buffers, x
    )
    for i, layer in enumerate(layers):
        assert_close(found[i], layer(x), atol=1e-5, rtol=1e-5)
        for name, buffer in layer.named_buffers():  # after the call, which updates them in training
            assert_close(buffers[name][i], buffer, atol=1e-5, rtol=1e-5)


def test_vmap_over_whole_networks(unchecked):
    networks = [
        unchecked.networks.DenseNet(10, 6, recalibration=unchecked.MSSAR, stage="multi").eval()
        for _ in range(2)
    ]
    parameters, buffers = stack_module_state(networks)
    skeleton = copy.deepcopy(networks[0]).to("meta")
    x = torch.randn(2, 2, 3, 16, 16)  # each network its own images
    found = vmap(lambda p, b, x: functional_call(skeleton, (p, b), (x,)))(parameters, buffers, x)
    for i, network in enumerate(networks):
        assert_close(found[i], network(x[i]), atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("options", LAYERS)
@pytest.mark.parametrize("batch", [1, 2])
def test_torchscript_traces_it(unchecked, batch, options, size):
    """With gradients wanted, as of any network that was just made or loaded."""
    layer = unchecked.MSSAR(6, **options).eval()
    traced = torch.jit.trace(layer, torch.randn(batch, 6, *size))
    for other in ((batch, *size), (3, 8, 12), (2, 14, 14)):  # sizes stay open
        x = torch.randn(other[0], 6, *other[1:])
        assert_close(traced(x), layer(x))


@pytest.mark.filterwarnings(
    "ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning", "ignore::UserWarning"
)
def test_the_former_onnx_exporter_takes_it(unchecked):
    """Which knows fewer operations than the present one."""
    file, sizes = io.BytesIO(), {"x": {0: "n", 2: "h", 3: "w"}}
    layer = unchecked.MSSAR(6, scales=(1, 2)).eval()
    names = {"input_names": ["x"], "dynamic_axes": sizes, "dynamo": False}
    torch.onnx.export(layer, (torch.randn(1, 6, 7, 9),), file, **names)
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
    for shape in ((1, 6, 7, 9), (3, 6, 8, 12)):
        x = torch.randn(shape)
        (found,) = session.run(None, {"x": x.numpy()})
        assert_close(torch.from_numpy(found), layer(x).detach(), atol=1e-5, rtol=1e-5)


def test_a_trace_cannot_hold_the_kernels(unchecked):
    layer = unchecked.MSSAR(6, backend="triton").eval()
    with pytest.raises(ValueError, match="a TorchScript trace cannot hold the kernels: use backen"):
        torch.jit.trace(layer, torch.randn(1, 6, 8, 8))
