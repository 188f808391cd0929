"""Which way a block's tail goes, what it says about that, and that both ways train alike."""

import copy
import math
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from tails import DEVICE, Case, Launched, Tail, apart, worst
from torch import nn
from torch.testing import assert_close

import mssar
from mssar.networks import BasicBlock, Bottleneck
from mssar.networks.recalibration import nothing
from mssar.tail import Nothing, tail

pytest.importorskip("triton")

TRAINED, EVALUATED = ["tail", "track"], ["tail_eval"]


@pytest.fixture(autouse=True)
def _exact_products(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def layer(channels=12, scales=(1, 2), **options):
    return mssar.MSSAR(channels, scales, **{"backend": "triton", **options}).to(DEVICE)


def block(channels=12, recalibration=layer, kind=BasicBlock):
    return kind(channels, channels // kind.expansion, 1, recalibration).to(DEVICE)


def maps(*shape):
    x = torch.randn(shape or (4, 12, 6, 6), device=DEVICE)
    return x.contiguous(memory_format=torch.channels_last)


def launched(call, *inputs):
    with Launched() as names:
        call(*inputs)
    return names


# --- Numbers


def test_running_statistics_as_batch_norm_keeps_them():
    case = Case(9, (5, 3), scales=(1, 3))
    ours = Tail(case)
    norms = [module for module in ours.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm, momentum in zip(norms, (0.3, 0.1, 1.0, 0.05, 0.0), strict=True):
        norm.momentum = momentum
    theirs, wide = copy.deepcopy(ours), copy.deepcopy(ours).double()
    for _ in range(3):
        inputs = case.maps()
        with torch.no_grad():
            ours.kernels(*inputs), theirs(*inputs), wide(*(x.double() for x in inputs))
    buffers = dict(ours.named_buffers())
    assert len(buffers) == 3 * len(norms)
    for (name, a), b, c in zip(buffers.items(), theirs.buffers(), wide.buffers(), strict=True):
        assert a.dtype is b.dtype, name
        if name.endswith("num_batches_tracked"):
            assert a == b == 3, name
        else:
            assert_close(a.double(), c, rtol=2e-6, atol=2e-6, msg=name)


def test_running_statistics_of_half_types():
    case = Case()
    ours, x = Tail(case).to(torch.bfloat16), [x.to(torch.bfloat16) for x in case.maps()]
    theirs = copy.deepcopy(ours)
    ours.kernels(*x), theirs(*x)
    for (name, a), b in zip(ours.named_buffers(), theirs.buffers(), strict=True):
        assert a.dtype is b.dtype, name
        assert_close(a.double(), b.double(), rtol=2**-6, atol=2**-6, msg=name)


@pytest.mark.parametrize("recalibration", ["mssar", "none"])
def test_a_networks_step_and_what_it_leaves(recalibration):
    """Loss, gradients and statistics: as near to float64 as the reference comes."""
    torch.manual_seed(1)
    ours = mssar.create_model("resnet8", recalibration, backend="triton").to(DEVICE)
    theirs = mssar.create_model("resnet8", recalibration, backend="reference").to(DEVICE)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    wide = copy.deepcopy(theirs).double()
    x, label = maps(6, 3, 8, 8), torch.arange(6, device=DEVICE)
    found = []
    with Launched() as names:
        for network in (ours, theirs, wide):
            images = x.double() if network is wide else x
            loss = F.cross_entropy(network(images), label)
            loss.backward()
            grads = [p.grad for p in network.parameters()]
            buffers = [b for b in network.buffers() if b.is_floating_point()]
            counts = [b for b in network.buffers() if not b.is_floating_point()]
            assert all(count == 1 for count in counts)
            found.append([loss.detach().reshape(1), *grads, *buffers])
    assert names == TRAINED * 3 + ["tail_backward"] * 3
    names = ["loss", *(n for n, _ in ours.named_parameters())]
    names += [n for n, b in ours.named_buffers() if b.is_floating_point()]
    for name, a, b, c in zip(names, *found, strict=True):
        assert apart(a, c) <= 1e-5 + 3 * apart(b, c), name

    ours.load_state_dict(theirs.state_dict(), strict=True)
    with torch.inference_mode():
        expected = theirs.eval()(x)
        assert launched(ours.eval(), x) == EVALUATED * 3
        assert_close(ours(x), expected, rtol=1e-4, atol=1e-5)


# --- Dispatch


@pytest.mark.parametrize("kind", [BasicBlock, Bottleneck])
@pytest.mark.parametrize("recalibration", [layer, lambda _: Nothing("triton")])
def test_a_block_is_fused_in_training_and_in_evaluation(recalibration, kind):
    channels = 12 if kind is BasicBlock else 64
    fused, x = block(channels, recalibration, kind), maps(4, channels, 4, 4)
    assert "tail=fused on CUDA" in fused.extra_repr()
    plain = copy.deepcopy(fused)
    plain.recalibrate.backend = "reference"
    assert launched(plain, x) == []
    with Launched() as names:
        y = fused(x)
    assert names == TRAINED
    assert_close(y, copy.deepcopy(plain)(x), rtol=1e-5, atol=1e-5)
    fused.eval(), plain.eval()
    with torch.inference_mode():
        assert launched(fused, x) == EVALUATED
    assert launched(fused, x) == [], "gradients are needed"
    with torch.no_grad():
        plain.load_state_dict(fused.state_dict(), strict=True)
        assert_close(fused(x), plain(x), rtol=1e-5, atol=1e-5)


def frozen(net):
    net.last_norm.eval()


def all_frozen(net):
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()


def replaced(name, make):
    def change(net):
        owner, _, last = name.rpartition(".")
        setattr(net.get_submodule(owner), last, make().to(DEVICE))

    return change


def changed(name, attribute, value):
    def change(net):
        setattr(net.get_submodule(name), attribute, value)

    return change


def hooked(name, register="register_forward_hook"):
    def change(net):
        getattr(net.get_submodule(name), register)(lambda *_: None)

    return change


def alike(_net):
    """Nothing changed."""


BRANCH = "recalibrate.branches.1"
WAYS = [
    (alike, "fused on CUDA", TRAINED),
    (changed("bn2", "momentum", 0.7), "fused on CUDA", TRAINED),
    (changed("bn2", "eps", 0.1), "fused on CUDA", TRAINED),
    (frozen, "fused on CUDA", TRAINED),  # MSSAR alone
    (all_frozen, "fused on CUDA", []),  # gradients are needed
    (hooked("bn2"), "unfused (BatchNorm2d has hooks)", TRAINED),
    (hooked("bn2", "register_full_backward_hook"), "unfused (BatchNorm2d has hooks)", TRAINED),
    (hooked("recalibrate"), "unfused (MSSAR has hooks)", TRAINED),
    (
        replaced("bn2", lambda: nn.GroupNorm(3, 12)),
        "unfused (GroupNorm is no plain BatchNorm2d)",
        TRAINED,
    ),
    (
        replaced("bn2", lambda: nn.SyncBatchNorm(12).eval()),
        "unfused (SyncBatchNorm is no plain BatchNorm2d)",
        TRAINED,
    ),
    (
        changed("bn2", "momentum", None),
        "unfused (a BatchNorm2d is not affine, or keeps no running statistics by momentum)",
        TRAINED,
    ),
    (
        replaced("bn2", lambda: nn.BatchNorm2d(12, affine=False)),
        "unfused (a BatchNorm2d is not affine, or keeps no running statistics by momentum)",
        TRAINED,
    ),
    (
        replaced("recalibrate", nn.Identity),
        "unfused (recalibrated by Identity)",
        [],
    ),
    (replaced("recalibrate", nothing.__get__(12)), "unfused (backend 'reference')", []),
]


@pytest.mark.parametrize(("change", "said", "ops"), WAYS)
def test_what_cannot_be_fused_goes_the_other_way_and_says_why(change, said, ops):
    """The same numbers, whichever way."""
    net, x = block(), maps()
    change(net)
    assert net.extra_repr() == f"tail={said}"
    assert f"tail={said}" in repr(net)
    plain = copy.deepcopy(net)
    plain.recalibrate.backend = "reference"
    with Launched() as names:
        y = net(x)
    assert names == ops
    assert_close(y, plain(x), rtol=1e-5, atol=1e-5)


IN_A_BRANCH = [
    (hooked(f"{BRANCH}.norm1"), "in a branch, BatchNorm2d has hooks"),
    (hooked(f"{BRANCH}.expand"), "in a branch, Conv2d is no plain product"),
    (hooked(BRANCH), "a branch has hooks"),
    (
        replaced(f"{BRANCH}.norm2", lambda: nn.GroupNorm(3, 12)),
        "in a branch, GroupNorm is no plain BatchNorm2d",
    ),
    (changed(f"{BRANCH}.norm2", "eps", 0.1), "the branches' norms differ in eps"),
    (
        replaced(f"{BRANCH}.reduce", lambda: nn.Conv2d(12, 6, 1)),
        "in a branch, Conv2d is no plain product",
    ),
    (
        replaced(f"{BRANCH}.reduce", lambda: nn.Conv2d(12, 6, 1, groups=2, bias=False)),
        "in a branch, Conv2d is no plain product",
    ),
    (
        replaced(BRANCH, lambda: mssar.layer.Branch(12, 8, 12)),
        "the branches differ in width",
    ),
    (
        lambda net: transpose(net.get_submodule(f"{BRANCH}.expand").weight),
        "in a branch, Conv2d is no plain product",
    ),
    (
        replaced("recalibrate", lambda: layer(scales=(3, 7))),
        "the scales need a grid finer than 16×16",
    ),
]


def transpose(weight):
    """The same numbers, column after column in memory."""
    weight.data = weight.data.transpose(0, 1).contiguous().transpose(0, 1)


@pytest.mark.parametrize(("change", "reason"), IN_A_BRANCH)
def test_a_layer_that_is_no_plain_one(change, reason, monkeypatch):
    """Asked for the kernels it refuses; left to choose, it does without."""
    net, x = block(), maps()
    change(net)
    assert net.extra_repr() == f"tail=unfused ({reason})"
    with pytest.raises(ValueError, match="cannot run this MSSAR") as raised:
        net(x)
    assert f"{reason}; use 'auto'" in str(raised.value)
    net.recalibrate.backend = "auto"
    for module in (mssar.layer, mssar.tail):  # as on a CUDA device
        monkeypatch.setattr(module, "chosen", lambda backend, _: backend != "reference")
    plain = copy.deepcopy(net)
    plain.recalibrate.backend = "reference"
    with Launched() as names:
        y = net(x)
    assert names == []
    assert_close(y, plain(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("context", [None, 5])
def test_sliding_windows_have_a_kernel_of_their_own(context):
    ours = layer(strategy="sliding", context_channels=context)
    theirs = copy.deepcopy(ours)
    theirs.backend = "reference"
    inputs = [maps().requires_grad_(), *([] if context is None else [maps(4, 5, 6, 6)])]
    probe, found = torch.randn_like(inputs[0]), []
    for module, ops in ((ours, ["window_means"]), (theirs, [])):
        with Launched() as names:
            y = module(*inputs)
        assert names == ops
        learnt = [inputs[0], *module.parameters()]
        found.append([y, *torch.autograd.grad(y, learnt, probe), *module.buffers()])
    for a, b in zip(*found, strict=True):
        assert_close(a, b, rtol=1e-4, atol=1e-5)
    net = block(12, lambda c: layer(c, strategy="sliding"))
    assert net.extra_repr() == "tail=unfused (windows slide)"


def test_weights_from_another_map_are_not_fused():
    net = block(12, lambda c: layer(c, context_channels=5))
    assert net.extra_repr() == "tail=unfused (the weights come from another map)"


def test_frozen_norms_do_not_hide_that_the_products_learn():
    """BN without statistics and parameters of its own to learn, as when fine-tuning."""
    ours = layer().eval()
    for name, parameter in ours.named_parameters():
        parameter.requires_grad_("norm" not in name)
    assert launched(ours, maps()) == []
    ours(maps()).sum().backward()
    assert all(branch.reduce.weight.grad.any() for branch in ours.branches)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[:, :5], "made for 12 channels"),
        (lambda x: x[0], "N C H W"),
        (lambda x: x[:, :, :0], "H and W at least 1"),
        (lambda x: x[:1], "BN cannot train on a single value per channel: scale 1"),
        (lambda x: x.double(), "kernels take torch.float32, .*got torch.float64: use .*reference"),
    ],
)
def test_maps_that_do_not_fit_are_refused_as_ever(unchecked, change, message):
    ours, x = unchecked.MSSAR(12, backend="triton").to(DEVICE), maps()
    with pytest.raises(ValueError, match=message):
        ours(change(x))


def test_a_tail_of_one_value_is_refused_as_ever():
    x = maps(1, 12, 1, 1)
    for backend in ("reference", "triton"):
        norm = nn.BatchNorm2d(12).to(DEVICE)
        with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
            tail(x, norm, Nothing(backend), x)
    y = tail(x, norm.eval(), Nothing("triton"), x)
    assert_close(y, (norm(x) + x).relu())


def test_a_batch_of_one_trains_where_every_norm_sees_more_values():
    x = maps(1, 12, 6, 6)
    net = block(12, lambda c: layer(c, scales=(2, 3)))
    assert launched(net, x) == TRAINED


@pytest.mark.usefixtures("unchecked")
def test_a_shortcut_that_broadcasts_is_added_all_the_same():
    from mssar.tail import Nothing, tail

    x, shortcut, norm = maps(), maps(4, 12, 1, 1), nn.BatchNorm2d(12).to(DEVICE)
    assert launched(tail, x, norm, Nothing("triton"), shortcut) == []
    assert launched(tail, x, norm, Nothing("triton"), x) == TRAINED
    expected = (copy.deepcopy(norm)(x) + shortcut).relu()
    assert_close(tail(x, norm, Nothing("triton"), shortcut), expected)


@pytest.mark.parametrize("make", [mssar.MSSAR, lambda _, backend: Nothing(backend)])
def test_back_ends_that_are_not_there(make):
    with pytest.raises(ValueError, match="one of auto, reference, triton; got 'cuda'"):
        make(12, backend="cuda")
    assert "backend" not in repr(make(12, backend="auto"))


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


# --- Compiled


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # Inductor's own
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_a_compiled_block_is_one_graph_with_the_same_numbers(unchecked, train, compiler):
    from mssar.networks.resnet import BasicBlock

    make = lambda c: unchecked.MSSAR(c, scales=(1, 2), backend="triton")  # noqa: E731
    net = BasicBlock(12, 12, 1, make).to(DEVICE).train(train)
    other, x = copy.deepcopy(net), maps()
    torch.compiler.reset()
    compiled = torch.compile(net, fullgraph=True, backend=compiler)
    if not train:
        with torch.inference_mode():
            assert_close(compiled(x), other(x), rtol=1e-5, atol=1e-5)
        return
    for _ in range(2):
        probe = torch.randn_like(x)
        ours, theirs = compiled(x), other(x)
        assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        found = torch.autograd.grad(ours, list(net.parameters()), probe)
        expected = torch.autograd.grad(theirs, list(other.parameters()), probe)
        assert worst(found, expected, [n for n, _ in net.named_parameters()])[0] < 1e-4
    for name, value in net.named_buffers():
        assert_close(value, other.get_buffer(name), rtol=1e-5, atol=1e-5, msg=name)
    torch.compiler.reset()


@pytest.mark.parametrize(
    "product", [lambda: nn.Conv2d(12, 6, 1), lambda: nn.Conv2d(12, 6, 1, groups=2, bias=False)]
)
def test_a_product_that_is_replaced_is_compiled_as_it_is(unchecked, product):
    ours = unchecked.MSSAR(12, (1, 2), backend="reference").eval()
    ours.branches[0].reduce = product()
    x = torch.randn(4, 12, 6, 6)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        assert_close(compiled(x), ours(x))


# --- On a GPU


def steps(net, x, optimiser, count):
    for _ in range(count):
        optimiser.zero_grad(set_to_none=True)
        loss = net(x).square().mean()
        loss.backward()
        optimiser.step()
    return loss


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_replays_as_a_graph(unchecked, dtype):
    from mssar.networks.resnet import BasicBlock

    torch.manual_seed(0)
    net, x = BasicBlock(64, 64, 1, unchecked.MSSAR).cuda(), maps(32, 64, 14, 14)
    net = net.to(memory_format=torch.channels_last)
    assert net.extra_repr() == "tail=fused on CUDA"
    other = copy.deepcopy(net)

    def step(network):
        network.zero_grad(set_to_none=False)
        with torch.autocast("cuda", dtype, enabled=dtype is not torch.float32):
            loss = network(x).square().mean()
        loss.backward()
        return loss

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(net)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(net)
    net.load_state_dict(other.state_dict())
    for _ in range(3):
        graph.replay()
        expected = step(other)
        assert_close(loss, expected, rtol=1e-5, atol=0)
        for (name, a), b in zip(net.named_parameters(), other.parameters(), strict=True):
            assert apart(a.grad, b.grad) < 1e-3, name
    for name, value in net.named_buffers():
        assert_close(value, other.get_buffer(name), rtol=1e-4, atol=1e-5, msg=name)
        assert not name.endswith("num_batches_tracked") or value == 3


@pytest.mark.gpu
@pytest.mark.parametrize("recalibration", ["mssar", "none"])
def test_no_step_waits_for_the_device(unchecked, recalibration):
    network = unchecked.create_model("resnet8", recalibration, backend="auto").cuda()
    assert "tail=fused on CUDA" in repr(network)
    x = maps(8, 3, 32, 32)
    optimiser = torch.optim.SGD(network.parameters(), 0.01)
    steps(network, x, optimiser, 3)
    with torch.inference_mode():
        network.eval()(x)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = steps(network.train(), x, optimiser, 2)
        with torch.inference_mode():
            network.eval()(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert math.isfinite(loss.item())


@pytest.mark.gpu
def test_auto_leaves_float64_to_the_reference():
    ours = mssar.MSSAR(12).cuda()
    assert launched(ours, maps()) == TRAINED
    assert launched(ours.double(), maps().double()) == []
