"""Which way a block's tail goes, and what it says about that."""

import copy
import re

import pytest
import torch
from tails import DEVICE, EVALUATED, TRAINED, Launched, block, launched, layer, maps
from torch import nn
from torch.nn.utils import parametrize
from torch.testing import assert_close

import mssar
from mssar.branch import Branch
from mssar.networks import BasicBlock, Bottleneck
from mssar.networks.recalibration import nothing
from mssar.tail import Nothing, tail

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("exact_products")


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


HOOKS = {
    "register_forward_pre_hook": lambda _, inputs: (inputs[0].square(),),
    "register_forward_hook": lambda _, __, out: out.square(),
    "register_full_backward_pre_hook": lambda _, grads: (2 * grads[0],),
    "register_full_backward_hook": lambda _, grads, __: (2 * grads[0],),
}


def hooked(name, register="register_forward_hook"):
    def change(net):
        getattr(net.get_submodule(name), register)(HOOKS[register])

    return change


def squared(name):
    """A subclass that gives the square, in its place."""

    def change(net):
        module = net.get_submodule(name)
        kind = type(module)
        own = {"forward": lambda self, x: kind.forward(self, x).square()}
        module.__class__ = type("Squared", (kind,), own)

    return change


def patched(name):
    def change(net):
        module = net.get_submodule(name)
        module.forward = lambda x: type(module).forward(module, x).square()

    return change


def parametrized(name):
    def change(net):
        parametrize.register_parametrization(net.get_submodule(name), "weight", nn.Tanh())

    return change


def wrapped(name):
    def change(net):
        owner, _, last = name.rpartition(".")
        setattr(net.get_submodule(owner), last, nn.Sequential(net.get_submodule(name)))

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
    *((hooked("bn2", hook), "unfused (BatchNorm2d has hooks)", TRAINED) for hook in HOOKS),
    (hooked("recalibrate"), "unfused (MSSAR has hooks)", TRAINED),
    (patched("bn2"), "unfused (BatchNorm2d has hooks)", TRAINED),
    (patched("recalibrate"), "unfused (MSSAR has hooks)", TRAINED),
    (squared("bn2"), "unfused (Squared is no plain BatchNorm2d)", TRAINED),
    (squared("recalibrate"), "unfused (recalibrated by Squared)", TRAINED),
    (wrapped("bn2"), "unfused (Sequential is no plain BatchNorm2d)", TRAINED),
    (wrapped("recalibrate"), "unfused (recalibrated by Sequential)", TRAINED),
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


def assert_by_modules(net, x, ops):
    """The same output and gradient as on the reference, whichever ops are called."""
    plain, x = copy.deepcopy(net), x.requires_grad_()
    for module in plain.modules():
        if hasattr(module, "backend"):
            module.backend = "reference"
    with Launched() as names:
        y = net(x)
    assert names == ops
    expected = plain(x)
    assert_close(y, expected, rtol=1e-5, atol=1e-5)
    probe = torch.randn_like(y)
    found, expected = (torch.autograd.grad(made, x, probe)[0] for made in (y, expected))
    assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("change", "said", "ops"), WAYS)
def test_what_cannot_be_fused_goes_the_other_way_and_says_why(change, said, ops):
    net, x = block(), maps()
    change(net)
    assert net.extra_repr() == f"tail={said}"
    assert f"tail={said}" in repr(net)
    assert_by_modules(net, x, ops)


IN_A_BRANCH = [
    (hooked(f"{BRANCH}.norm1"), "in a branch, BatchNorm2d has hooks"),
    (hooked(f"{BRANCH}.expand"), "in a branch, Conv2d is no plain product"),
    *((hooked(BRANCH, hook), "a branch has hooks") for hook in HOOKS),
    (patched(f"{BRANCH}.reduce"), "in a branch, Conv2d is no plain product"),
    (patched(BRANCH), "a branch has hooks"),
    (squared(f"{BRANCH}.norm2"), "in a branch, Squared is no plain BatchNorm2d"),
    (squared(f"{BRANCH}.expand"), "in a branch, Squared is no plain product"),
    (squared(BRANCH), "a branch is a Squared"),
    (wrapped(BRANCH), "a branch is a Sequential"),
    (parametrized(f"{BRANCH}.expand"), "in a branch, ParametrizedConv2d is no plain product"),
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
        replaced(BRANCH, lambda: Branch(12, 8, 12)),
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
    assert_by_modules(net, x, [])


def test_a_printed_network_says_which_block_goes_the_other_way():
    network = mssar.create_model("resnet8", "mssar", backend="triton")
    squared("layer2.0.recalibrate.branches.1")(network)
    network.layer3[0].bn2.register_forward_hook(lambda *_: None)
    assert re.findall(r"tail=(.*)", repr(network)) == [
        "fused on CUDA",
        "unfused (a branch is a Squared)",
        "unfused (BatchNorm2d has hooks)",
    ]


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
