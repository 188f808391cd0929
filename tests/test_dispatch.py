"""Which way a block's tail goes, and what it says about that."""

import copy
import pickle
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import MethodType

import pytest
import torch
from tails import DEVICE, EVALUATED, TRAINED, Launched, block, launched, layer, maps
from torch import nn
from torch.nn.utils import parametrize
from torch.testing import assert_close

import mssar
from mssar import fusible
from mssar.branch import Branch
from mssar.networks import BasicBlock, Bottleneck

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("exact_products")

automatic = partial(layer, backend="auto")


@pytest.fixture
def as_on_cuda(monkeypatch):
    """ "auto" takes the kernels, whatever the device."""
    for module in ("mssar.fused", "mssar.layer"):
        monkeypatch.setattr(f"{module}.chosen", lambda backend, _: backend != "reference")


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
        # A method, so that a copy has one of its own.
        module.forward = MethodType(lambda self, x: type(self).forward(self, x).square(), module)

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


def assert_by_modules(net, x, ops):
    """The same output, gradient and statistics as on the reference, whichever ops are called."""
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
    for name, buffer in net.named_buffers():
        assert_close(buffer, plain.get_buffer(name), rtol=1e-4, atol=1e-5, msg=name)


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


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[:, :5], "made for 12 channels"),
        (lambda x: x[0], "N C H W"),
        (lambda x: x[:, :, :0], "H and W at least 1"),
        (lambda x: x[:1], "BN cannot train on a single value per channel: scale 1"),
    ],
)
def test_maps_that_do_not_fit_are_refused_as_ever(unchecked, change, message, backend):
    ours, x = unchecked.MSSAR(12, backend=backend).to(DEVICE), maps()
    with pytest.raises(ValueError, match=message):
        ours(change(x))


def test_types_that_the_kernels_do_not_take():
    with pytest.raises(ValueError, match=r"take torch.float32, .*got torch.float64: use .*ref"):
        layer()(maps().double())


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_a_single_value_is_refused_as_ever(backend):
    """Regions are not more than there are positions."""
    x, norm = maps(1, 12, 1, 1), nn.BatchNorm2d(12).to(DEVICE)
    ours = layer(scales=(2,), backend=backend)
    with pytest.raises(ValueError, match="BN cannot train on a single value per channel: scale 2"):
        ours(x)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        mssar.tail(x, norm, ours, x)
    assert mssar.tail(x, norm.eval(), ours.eval(), x).isfinite().all()


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


def test_an_activation_that_is_not_there():
    with pytest.raises(ValueError, match="'relu', 'silu' or None; got 'gelu'"):
        mssar.tail(maps(), None, layer(), activation="gelu")


@pytest.mark.parametrize("activation", ["relu", "silu", None])
def test_a_tail_of_other_modules_is_theirs(activation):
    """No norm, no shortcut, and whatever module recalibrates."""
    x = maps()
    expected = {"relu": x.relu(), "silu": nn.functional.silu(x), None: x}[activation]
    found = mssar.tail(x, None, nn.Identity(), activation=activation)
    assert_close(found, expected)


# --- Asked for by name, the kernels run or say why not


def call(shortcut=None, norm=None, activation="relu", **options):
    def made(x):
        return mssar.fused.tail(x, layer(**options), norm, shortcut, activation)

    return made


def with_norm(change):
    norm = nn.BatchNorm2d(12).to(DEVICE)
    return call(norm=change(norm) or norm)


def on_another_device(x):
    return mssar.fused.tail(x, layer().to("meta"), None)


REFUSED = [
    (call(activation="gelu"), lambda x: x, "the activation is 'gelu'"),
    (call(context_channels=5), lambda x: x, "its weights come from another map"),
    (call(strategy="sliding"), lambda x: x, "windows slide"),
    (call(scales=(3, 7)), lambda x: x, "the scales need a grid finer than 16×16"),
    (with_norm(lambda _: nn.BatchNorm2d(5).to(DEVICE)), lambda x: x, "the norm is for 5 channels"),
    (with_norm(lambda _: nn.Identity()), lambda x: x, "Identity is no plain BatchNorm2d"),
    (with_norm(lambda n: n.to("meta")), lambda x: x, "x and the modules are on different devices"),
    (on_another_device, lambda x: x, "x and the modules are on different devices"),
    (
        call(shortcut=maps(4, 12, 1, 1)),
        lambda x: x,
        "the shortcut differs in shape, type or device",
    ),
    (
        call(shortcut=maps().bfloat16()),
        lambda x: x,
        "the shortcut differs in shape, type or device",
    ),
    (
        call(shortcut=maps().to("meta")),
        lambda x: x,
        "the shortcut differs in shape, type or device",
    ),
    (call(), lambda x: x.bfloat16(), "x is torch.bfloat16, the layer torch.float32"),
]


@pytest.mark.parametrize(("made", "change", "reason"), REFUSED)
def test_the_kernels_by_name_say_why_they_cannot(made, change, reason):
    with pytest.raises(ValueError, match="cannot run this MSSAR") as raised:
        made(change(maps()))
    assert str(raised.value) == f"backend='triton' cannot run this MSSAR: {reason}; use 'auto'"


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize(("made", "change", "reason"), REFUSED)
def test_left_to_choose_they_leave_it_to_the_modules(made, change, reason, monkeypatch):
    del reason
    monkeypatch.setattr("test_dispatch.layer", automatic)
    assert made(change(maps())) is None


def test_vectors_with_gaps_are_left_to_the_modules():
    norm, layers = nn.BatchNorm2d(12).to(DEVICE), layer()
    norm.weight = nn.Parameter(torch.rand(12, 2, device=DEVICE)[:, 0])
    assert fusible.obstacle(layers, norm) == "a BatchNorm2d has parameters with gaps between them"
    plain = nn.BatchNorm2d(12).to(DEVICE)
    assert fusible.obstacle(layers, plain) is None
    x = maps()
    mssar.tail(x, plain, layers, x)
    plain.weight.data = torch.rand(12, 2, device=DEVICE)[:, 0]  # after a call, too
    with pytest.raises(ValueError, match="gaps between them"):
        mssar.tail(x, plain, layers, x)


def test_a_sample_of_more_numbers_than_an_int_counts():
    x = maps().as_strided((2, 12, 1 << 14, 1 << 14), (0, 0, 0, 0))
    with pytest.raises(ValueError, match="a sample has 2³¹ numbers or more, or 2²⁰ positions"):
        layer()(x)


# --- What changes after a call


def with_parameter(name):
    def change(net):
        owner, _, last = name.rpartition(".")
        old = net.get_parameter(name)
        setattr(net.get_submodule(owner), last, nn.Parameter(torch.rand_like(old) + 0.5))

    return change


def with_buffer(name):
    def change(net):
        owner, _, last = name.rpartition(".")
        setattr(net.get_submodule(owner), last, torch.rand_like(net.get_buffer(name)) + 0.5)

    return change


def with_data(name):
    def change(net):
        parameter = net.get_parameter(name)
        parameter.data = torch.rand_like(parameter) + 0.5

    return change


def loaded(net):
    state = {k: torch.rand_like(v) + 0.5 if v.is_floating_point() else v.clone() + 3
             for k, v in net.state_dict().items() if not k.endswith("coordinates")}  # fmt: skip
    net.load_state_dict(state, assign=True)


def evaluated(net):
    net.eval()


def there_and_back(net):
    net.eval()(maps())
    net.train()


def bound_elsewhere(net):
    """Other modules of the same kind in their places."""
    other = copy.deepcopy(net)
    loaded(other)
    net.bn2, net.recalibrate.branches = other.bn2, other.recalibrate.branches


AFTER = [
    (with_parameter("bn2.weight"), TRAINED),
    (with_parameter(f"{BRANCH}.reduce.weight"), TRAINED),
    (with_parameter(f"{BRANCH}.norm2.bias"), TRAINED),
    (with_data("bn2.bias"), TRAINED),
    (with_data(f"{BRANCH}.expand.weight"), TRAINED),
    (with_buffer("bn2.running_mean"), TRAINED),
    (with_buffer(f"{BRANCH}.norm1.running_var"), TRAINED),
    (loaded, TRAINED),
    (evaluated, EVALUATED),
    (there_and_back, TRAINED),
    (bound_elsewhere, TRAINED),
    (replaced("bn2", lambda: nn.BatchNorm2d(12, eps=0.1, momentum=0.5)), TRAINED),
    (replaced("recalibrate", lambda: automatic(scales=(1, 3))), TRAINED),
    (changed(f"{BRANCH}.norm1", "momentum", 0.9), TRAINED),
    (changed("recalibrate", "backend", "reference"), []),
]


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize(("change", "ops"), AFTER)
def test_what_changes_after_a_call_is_seen_by_the_next(change, ops):
    net, x = block(recalibration=automatic), maps()
    for _ in range(2):
        assert launched(net, x) == TRAINED
    net.eval()
    assert launched(net, x) == EVALUATED
    net.train()
    change(net)
    assert_by_modules(net, x, ops)
    assert_by_modules(net, x, ops)


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(
    "name", ["bn2", "recalibrate", BRANCH, f"{BRANCH}.norm1", f"{BRANCH}.expand"]
)
def test_hooks_that_come_and_go_between_calls(name, mode):
    net, x, seen = block(recalibration=automatic).train(mode), maps(), []
    ops = TRAINED if mode else EVALUATED
    for _ in range(2):
        assert launched(net, x) == ops
        before = len(seen)
        handle = net.get_submodule(name).register_forward_hook(lambda *_: seen.append(1))
        net(x)
        net(x)
        assert len(seen) == before + 2, "they are called"
        handle.remove()
        assert launched(net, x) == ops, "and are gone"
        assert len(seen) == before + 2


@pytest.mark.parametrize(
    "again",
    [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))],
    ids=["deepcopy", "pickle"],
)
def test_a_copy_made_after_a_call_is_a_network_of_its_own(again):
    net, x = block(), maps()
    net(x)
    state = copy.deepcopy(net.state_dict())
    other = again(net)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1)
    assert_by_modules(other, x.clone(), TRAINED)
    for name, value in net.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert_by_modules(net, x.clone(), TRAINED)


def test_threads_that_share_a_layer_find_its_plan_whole():
    """Once tensors have moved, one thread must not meet what another has half replaced."""
    x, interval = maps(2, 12, 2, 2), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(60):
            shared = layer(scales=(1,)).eval()
            bound = mssar.fused._bound(shared, None)
            begin = threading.Barrier(4)

            def look(bound=bound, begin=begin):
                begin.wait()
                plan, given = bound.plan(x, None, None)
                return not isinstance(plan, str) and len(given)

            with ThreadPoolExecutor(4) as pool:
                found = [pool.submit(look) for _ in range(4)]
            assert [one.result() for one in found] == [10] * 4
    finally:
        sys.setswitchinterval(interval)
