"""Kernels that are compiled before a network's first step, and nothing else that happens then."""

import copy
import gc
import importlib

import pytest
import torch
from tails import DEVICE, block, layer
from torch import nn

import mssar
from mssar import fused
from mssar.kernels import launch
from mssar.kernels.tail import plan
from mssar.networks.densenet import DenseBlock

pytest.importorskip("triton", minversion="3.4")
SIZE = (2, 12, 3, 3)


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch):
    """Nor planned, by any test before."""
    from mssar.kernels.dense import plan as dense

    monkeypatch.setattr(launch, "_kernels", {})
    caches = plan.plan, plan.tracker, dense.step_plan, dense.means_plan
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def counts(monkeypatch):
    """Of kernels that calls had compiled."""
    found = []

    def counting(kernels, device):
        found.append(launch.warm(kernels, device))
        return found[-1]

    monkeypatch.setattr(plan, "warm", counting)
    return found


def dense_block():
    def step(channels, context_channels):
        return layer(channels, context_channels=context_channels)

    return DenseBlock(2, 12, 4, step, "multi").to(DEVICE)


def halved(net):
    """With a map of autocast's type before it."""
    return nn.Sequential(nn.Conv2d(12, 12, 1, device=DEVICE), net)


def step(net, x, autocast=None):
    with torch.autocast(DEVICE, autocast, enabled=autocast is not None):
        y = net(x)
    if net.training:
        y.sum().backward()


@pytest.mark.parametrize(
    ("make", "last"), [(block, False), (block, True), (dense_block, True), (layer, False)]
)
def test_a_step_finds_all_of_its_kernels(make, last, counts):
    """As many as the first step would have compiled: both ways to them see the same."""
    net, form = make(), torch.channels_last if last else torch.contiguous_format
    made = mssar.warm(net, [SIZE], memory_format=form)
    step(net, torch.randn(SIZE, device=DEVICE).contiguous(memory_format=form))
    assert made > 8
    assert sum(counts) == 0
    assert mssar.warm(net, [SIZE], memory_format=form) == 0


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
def test_a_step_under_autocast_and_one_in_evaluation(autocast, counts):
    net, x = halved(block()), torch.randn(SIZE, device=DEVICE)
    assert mssar.warm(net, [SIZE], autocast=autocast) > 8
    step(net, x, autocast)
    assert sum(counts) == 0
    assert mssar.warm(net, [SIZE], autocast=autocast, training=False) > 0
    with torch.no_grad():
        step(net.eval(), x, autocast)
    assert sum(counts) == 0


def test_modes_and_gradients():
    net = block()
    forward = mssar.warm(net, [SIZE], backward=False)
    assert forward == 6
    assert mssar.warm(net, [SIZE]) == 6  # the way back
    net.bn2.eval()  # frozen: other kernels, and without train() it stays so
    assert mssar.warm(net, [SIZE]) > 0
    assert mssar.warm(net, [SIZE], training=True) == 0


def test_sizes_share_kernels_and_all_come_at_once(monkeypatch):
    calls = []
    file = importlib.import_module("mssar.warm")
    told = lambda some, where: calls.append((len(set(some)), where)) or 0  # noqa: E731
    monkeypatch.setattr(file, "compiled", told)
    mssar.warm(block(), [SIZE, (9, *SIZE[1:])])
    mssar.warm(block(), [SIZE, (4, 12, 40, 40)])
    assert [device.type for _, device in calls] == [DEVICE] * 2
    assert 12 == calls[0][0] < calls[1][0]


class Remembering(nn.Identity):
    def forward(self, x):
        self.last = x
        return x


def test_it_leaves_no_traces():
    net = nn.Sequential(halved(block()), nn.Dropout(0.5), Remembering())
    net[0][1].bn1.eval()
    before, modes = copy.deepcopy(net.state_dict()), [m.training for m in net.modules()]
    chance = torch.get_rng_state()
    tensors = [id(t) for t in (*net.parameters(), *net.buffers())]
    mssar.warm(net, [SIZE], training=True, autocast=torch.bfloat16)
    assert torch.equal(torch.get_rng_state(), chance)
    assert [m.training for m in net.modules()] == modes
    assert [id(t) for t in (*net.parameters(), *net.buffers())] == tensors
    assert all(p.grad is None for p in net.parameters())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert net[0][1].recalibrate not in fused._cache
    assert not hasattr(net[2], "last")
    assert not torch.is_autocast_enabled(DEVICE)


def test_it_leaves_none_when_the_network_raises_either():
    net = nn.Sequential(block(), nn.Linear(5, 5, device=DEVICE))
    forward = nn.SyncBatchNorm.forward
    with pytest.raises(RuntimeError, match=r"reduction dim|shape"):
        mssar.warm(net, [SIZE], training=False)
    assert net.training
    assert nn.SyncBatchNorm.forward is forward
    assert not fused._rehearsals


def test_who_runs_a_network_meanwhile_is_not_disturbed():
    net, x = block().eval(), torch.randn(SIZE, device=DEVICE)
    with fused.rehearsed():  # by another thread
        meanwhile = net(x)
    torch.testing.assert_close(meanwhile, net(x), rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_where_no_kernels_run_there_are_none(backend):
    net = block(recalibration=lambda c: mssar.MSSAR(c, backend=backend)).cpu()
    assert mssar.warm(net, [SIZE]) == 0


def test_on_a_cpu_nothing_is_run(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    net = block().cpu()
    net.forward = None  # not callable
    assert mssar.warm(net, [SIZE]) == 0


def test_synchronised_norms_and_what_wraps_a_network():
    net = nn.SyncBatchNorm.convert_sync_batchnorm(block())
    assert mssar.warm(nn.DataParallel(net), [SIZE]) == 12
    assert mssar.warm(torch.compile(net, backend="eager"), [SIZE]) == 0


@pytest.mark.parametrize(
    ("sizes", "got"), [(SIZE, "got 2"), ([(3, 224, 224)], "got (3, 224, 224)"), (7, "got 7")]
)
def test_what_is_no_shape_is_said(sizes, got, unchecked):
    with pytest.raises(ValueError, match="sizes are shapes N C H W") as said:
        unchecked.warm(unchecked.MSSAR(8), sizes)
    assert str(said.value).endswith(got)


def test_what_is_no_network_is_said(unchecked):
    with pytest.raises(ValueError, match="warm takes a network; got str"):
        unchecked.warm("resnet18", [SIZE])


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("name", ["resnet8", "resnet18", "densenet100"])
def test_a_network_finds_all_of_its_kernels(name, last, autocast, counts):
    form = torch.channels_last if last else torch.contiguous_format
    net = mssar.create_model(name, "mssar").to("cuda", memory_format=form)
    size = (8, 3, 64, 64)
    gc.collect()  # what tests before have left would go meanwhile
    held = torch.cuda.memory_allocated()
    assert mssar.warm(net, [size], autocast=autocast) > 8
    assert torch.cuda.memory_allocated() == held
    step(net, torch.randn(size, device="cuda"), autocast)
    assert sum(counts) == 0
