"""Norms synchronised over processes, fused: the same as one process with all of the batch.

Two processes by gloo live for the whole file. PyTorch's own SyncBatchNorm refuses to run on a CPU;
what is expected is plain BN of the whole batch.
"""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from interpreting import hasten
from lab import Crew
from tails import DEVICE, Case, Launched, Tail, apart, block, differentiated, keep_off_zero
from torch import Tensor, nn

import mssar
from mssar import fusible
from mssar.lab.engine.world import World

pytest.importorskip("triton")
hasten()  # in the two processes as well, which import this file and no conftest
pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="the interpreter is off")

CASES = [
    (Case(batch=5), 3),
    (Case(batch=4, scales=(1, 2), norm=False, activation="silu", layout="contiguous"), 1),
    (Case(24, (3, 2), batch=3, scales=(2,), shortcut=False, activation=None), 2),
    (Case(batch=3, scales=(1, 3), frozen="front"), 1),
    (Case(batch=3, size=(3, 2), scales=(1, 2), frozen="branches"), 2),
    (Case(batch=3, size=(1, 1), scales=(1,)), 2),  # one process has a single value
    (Case(6, (8, 8), batch=18), 9),  # more values than a byte counts
]


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with contextlib.closing(Crew(2)) as found:
        yield found


def prepared(case: Case) -> tuple[Tail, list[Tensor], Tensor]:
    """The same in every process."""
    torch.manual_seed(3)
    tail, inputs = Tail(case), case.maps()
    probe = torch.randn_like(inputs[0])
    keep_off_zero(tail, inputs)
    return tail, inputs, probe


def shared(world: World, case: Case, first: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """A step on a part of the batch, its norms synchronised; and what it leaves."""
    tail, inputs, probe = prepared(case)
    part = slice(0, first) if world.leads else slice(first, None)
    modes = {name: module.training for name, module in tail.named_modules()}
    tail = nn.SyncBatchNorm.convert_sync_batchnorm(tail)
    for name, module in tail.named_modules():
        module.training = modes[name]
    inputs = [x[part] for x in inputs]
    found = differentiated(tail.kernels, inputs, tail, probe[part])
    return found, dict(tail.named_buffers())


def whole(case: Case, dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Tensor]]:
    tail, inputs, probe = prepared(case)
    tail = tail.to(dtype)
    inputs = [x.to(dtype) for x in inputs]
    return differentiated(tail, inputs, tail, probe.to(dtype)), dict(tail.named_buffers())


@pytest.mark.parametrize(("case", "first"), CASES, ids=str)
def test_a_step_of_two_processes_is_one_of_the_whole_batch(crew, case, first):
    """Outputs, gradients and running statistics, with other numbers of images here and there."""
    tail, inputs, _ = prepared(case)
    (one, buffers), (two, others) = crew(shared, case, first)
    expected, statistics = whole(case, torch.float64)
    plain, _ = whole(case, torch.float32)
    maps = 1 + len(inputs)  # the output and the inputs' gradients; then sums over all images
    found = [torch.cat(pair) for pair in zip(one[:maps], two[:maps], strict=True)]
    found += [a + b for a, b in zip(one[maps:], two[maps:], strict=True)]
    for name, a, b, c in zip(tail.names(inputs), found, plain, expected, strict=True):
        assert apart(a, c) <= 1e-5 + 3 * apart(b, c), name
    for name, value in statistics.items():
        assert torch.equal(buffers[name], others[name]), name
        torch.testing.assert_close(
            buffers[name].double(), value.double(), rtol=1e-5, atol=1e-5, msg=name
        )


def twice(world: World, case: Case) -> bool:
    first, second = (shared(world, case, 2) for _ in range(2))
    return all(torch.equal(a, b) for a, b in zip(first[0], second[0], strict=True))


def test_the_same_bits_again(crew):
    assert crew(twice, Case(batch=3, scales=(1, 2))) == [True, True]


def partly(_world: World, case: Case) -> str:
    tail, inputs, _ = prepared(case)
    tail.norm = nn.SyncBatchNorm.convert_sync_batchnorm(tail.norm)
    with pytest.raises(ValueError, match="cannot run this MSSAR") as raised:
        tail.kernels(*inputs)
    return str(raised.value)


def test_norms_that_look_at_other_batches_than_the_rest(crew):
    for said in crew(partly, Case(scales=(1,))):
        assert "some norms are synchronised with others than the rest" in said


def watched(_world: World, case: Case) -> str:
    tail, inputs, _ = prepared(case)
    tail = nn.SyncBatchNorm.convert_sync_batchnorm(tail)
    with Launched(), pytest.raises(ValueError, match="cannot run this MSSAR") as raised:
        tail.kernels(*inputs)
    return str(raised.value)


def test_modes_that_look_on_are_told(crew):
    for said in crew(watched, Case(scales=(1,))):
        assert "does not see how norms are synchronised" in said


def evaluated(_world: World, case: Case) -> Any:
    tail, inputs, _ = prepared(case)
    expected = copy.deepcopy(tail).eval()(*inputs)
    tail = nn.SyncBatchNorm.convert_sync_batchnorm(tail).eval()
    return apart(tail.kernels(*inputs), expected)


def test_evaluation_asks_nobody(crew):
    assert max(crew(evaluated, Case(scales=(1, 2)))) < 1e-6


def warmed(world: World) -> int:
    net = nn.SyncBatchNorm.convert_sync_batchnorm(block(20))
    return mssar.warm(net, [(2, 20, 3, 3)]) if world.leads else -1


def test_kernels_are_compiled_without_the_others(crew):
    """One process alone, whose first norm would wait for the other's."""
    made, none = crew(warmed)
    assert made > 0
    assert none == -1


def test_one_process_needs_nobody():
    """Neither a group nor the modules, which refuse a CPU."""
    case = Case(scales=(1, 2))
    tail, inputs, probe = prepared(case)
    other = copy.deepcopy(tail)
    expected = differentiated(other.kernels, inputs, other, probe)
    synchronised = nn.SyncBatchNorm.convert_sync_batchnorm(tail)
    assert fusible.obstacle(synchronised.layer, synchronised.norm) is None
    found = differentiated(synchronised.kernels, inputs, synchronised, probe)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
