"""Which way a block's tail goes, and what it says about that."""

import copy
import re

import pytest
import torch
from changes import (
    BRANCH,
    HOOKS,
    assert_by_modules,
    automatic,
    changed,
    hooked,
    parametrized,
    patched,
    replaced,
    squared,
    wrapped,
)
from tails import DEVICE, EVALUATED, TRAINED, Launched, block, launched, layer, maps
from torch import nn
from torch.testing import assert_close

import mssar
from mssar.branch import Branch
from mssar.networks import BasicBlock, Bottleneck
from mssar.networks.densenet import DenseBlock

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("exact_products")


@pytest.mark.parametrize("kind", [BasicBlock, Bottleneck])
def test_a_block_is_fused_in_training_and_in_evaluation(kind):
    channels = 12 if kind is BasicBlock else 64
    fused, x = block(channels, kind=kind), maps(4, channels, 4, 4)
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
    assert launched(fused, x) == EVALUATED, "with gradients, too"
    with torch.no_grad():
        plain.load_state_dict(fused.state_dict(), strict=True)
        assert_close(fused(x), plain(x), rtol=1e-5, atol=1e-5)


def frozen(net):
    net.last_norm.eval()


def all_frozen(net):
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()


def alike(_net):
    """Nothing changed."""


WAYS = [
    (alike, "fused on CUDA", TRAINED),
    (changed("bn2", "momentum", 0.7), "fused on CUDA", TRAINED),
    (changed("bn2", "eps", 0.1), "fused on CUDA", TRAINED),
    (frozen, "fused on CUDA", TRAINED),
    (all_frozen, "fused on CUDA", EVALUATED),
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
        "fused on CUDA",
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
    (changed("recalibrate", "backend", "reference"), "unfused (backend 'reference')", []),
]


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("called", [False, True], ids=["at first", "after a call"])
@pytest.mark.parametrize(("change", "said", "ops"), WAYS)
def test_what_cannot_be_fused_goes_the_other_way_and_says_why(change, said, ops, called):
    net, x = block(recalibration=automatic), maps()
    if called:
        assert launched(net, x) == TRAINED
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
        changed(f"{BRANCH}.norm1", "training", False),
        "some of the branches' norms train and others do not",
    ),
    (
        changed(f"{BRANCH}.norm1", "momentum", None),
        "in a branch, a BatchNorm2d is not affine, or keeps no running statistics by momentum",
    ),
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


@pytest.mark.parametrize("called", [False, True], ids=["at first", "after a call"])
@pytest.mark.parametrize(("change", "reason"), IN_A_BRANCH)
def test_a_layer_that_is_no_plain_one(change, reason, called, request):
    """Asked for the kernels it refuses; left to choose, it does without."""
    net, x = block(), maps()
    if called:
        assert launched(net, x) == TRAINED
    change(net)
    assert net.extra_repr() == f"tail=unfused ({reason})"
    with pytest.raises(ValueError, match="cannot run this MSSAR") as raised:
        net(x)
    assert f"{reason}; use 'auto'" in str(raised.value)
    net.recalibrate.backend = "auto"
    request.getfixturevalue("as_on_cuda")
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


def test_in_a_dense_block_too():
    """Of the input, and of what each step but the last adds to it."""

    def made(channels, **kinds):
        return layer(channels, strategy="sliding", **kinds)

    dense = DenseBlock(3, 8, 4, made, "multi").to(DEVICE)
    assert launched(dense, maps(2, 8, 6, 6)) == ["window_means"] * 3


def test_weights_from_another_map_are_not_fused():
    net = block(12, lambda c: layer(c, context_channels=5))
    assert net.extra_repr() == "tail=unfused (its weights come from another map)"


def test_frozen_norms_do_not_hide_that_the_products_learn():
    """BN without statistics and parameters of its own to learn, as when fine-tuning."""
    ours = layer().eval()
    for name, parameter in ours.named_parameters():
        parameter.requires_grad_("norm" not in name)
    assert launched(ours, maps()) == EVALUATED
    ours(maps()).sum().backward()
    assert all(branch.reduce.weight.grad.any() for branch in ours.branches)


def test_a_batch_of_one_trains_where_every_norm_sees_more_values():
    x = maps(1, 12, 6, 6)
    net = block(12, lambda c: layer(c, scales=(2, 3)))
    assert launched(net, x) == TRAINED


def test_a_shortcut_that_broadcasts_is_added_all_the_same(unchecked, request):
    request.getfixturevalue("as_on_cuda")  # of the copy that is in use
    x, shortcut = maps(), maps(4, 12, 1, 1)
    norm, ours = nn.BatchNorm2d(12).to(DEVICE), unchecked.MSSAR(12, (1, 2)).to(DEVICE)
    expected = (copy.deepcopy(ours)(copy.deepcopy(norm)(x)) + shortcut).relu()
    with Launched() as names:
        found = unchecked.tail(x, norm, ours, shortcut)
    assert names == TRAINED, "MSSAR alone"
    assert norm.num_batches_tracked == 1
    assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", ["relu", "silu", None])
def test_a_tail_of_other_modules_is_theirs(activation):
    """No norm, no shortcut, and whatever module recalibrates."""
    x = maps()
    expected = {"relu": x.relu(), "silu": nn.functional.silu(x), None: x}[activation]
    found = mssar.tail(x, None, nn.Identity(), activation=activation)
    assert_close(found, expected)
