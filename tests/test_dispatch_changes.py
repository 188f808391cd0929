"""What changes between a block's calls is seen by the next."""

import copy
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from changes import BRANCH, assert_by_modules, automatic, changed, replaced
from tails import EVALUATED, TRAINED, block, launched, layer, maps
from torch import nn

from mssar import fused

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("exact_products")


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
            bound = fused._bound(shared, None)
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
