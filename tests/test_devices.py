"""Tails that are cut for other GPUs than the one that is here: their memory, their processors."""

import pytest
import torch
from tails import SLACK, Case, Tail, assert_as_good

from mssar.kernels import tiling
from mssar.kernels.dense import plan as dense
from mssar.kernels.device import Device
from mssar.kernels.tail import plan

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("exact_products", "rounded_halves")

DEVICES = {
    "sm_80": Device(108, 163 << 10, (8, 0)),  # A100
    "sm_86, sm_89, sm_120": Device(84, 99 << 10, (8, 6)),  # A40; L40 and RTX 5090 have more of it
    "sm_100": Device(148, 227 << 10, (10, 0)),  # B200
}


@pytest.fixture(params=DEVICES)
def other(request, monkeypatch):
    """The device that plans are made for."""
    found = DEVICES[request.param]
    made, usual = [], plan.Plan.__init__

    def noted(self, *args, **options):
        usual(self, *args, **options)
        made.append(self)

    monkeypatch.setattr(plan, "device_of", lambda _: found)
    monkeypatch.setattr(plan.Plan, "__init__", noted)
    caches = plan.plan, dense.step_plan, dense.means_plan
    for cache in caches:
        cache.cache_clear()
    yield found
    for cache in caches:
        cache.cache_clear()
    assert made
    assert all(one.device == found for one in made)


def test_products_are_as_deep_as_memory_allows():
    """Which is what tells them apart below."""
    stages = {
        name: [
            tiling.products(c, c // 3, kept, device).stages
            for c in (64, 256)
            for kept in (torch.bfloat16, torch.float32)
        ]
        for name, device in DEVICES.items()
    }
    assert stages["sm_80"] == [3, 3, 3, 2]
    assert stages["sm_86, sm_89, sm_120"] == [2, 1, 1, 1]
    assert stages["sm_100"] == [3, 3, 3, 3]


@pytest.mark.usefixtures("other")
def test_a_tiny_tail():
    case = Case(20, (3, 2), scales=(1,), batch=3)
    assert_as_good(Tail(case), case.maps())


@pytest.mark.gpu
@pytest.mark.usefixtures("other")
@pytest.mark.parametrize("dtype", SLACK, ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case(48, (9, 5), 33),
        Case(128, (28, 28), 48, layout="contiguous"),  # programs that take several tiles
        Case(256, (14, 14), 32, activation="silu"),
        Case(512, (7, 7), 33, reduction=4, layout="contiguous"),
        Case(64, (56, 56), 16),
        Case(140, (2, 2), 64, scales=(1,), frozen="all"),
    ],
    ids=str,
)
def test_tails(case, dtype):
    assert_as_good(Tail(case), [x.to(dtype) for x in case.maps()])
