"""The fuzzer finds what is wrong, and nothing in kernels that are right."""

import copy
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", minversion="3.4")
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from fuzzing import KINDS, cases, conditioning, draw, judge, memory  # noqa: E402
from fuzzing.cases import Case  # noqa: E402

from mssar.kernels.device import Device  # noqa: E402

pytestmark = pytest.mark.usefixtures("rounded_halves")
SMALL = Case(shape=(3, 5, 5, 4), scales=(1, 2), seed=1)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, ROOT / "tools/fuzz-kernels", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_a_gpu_it_says_so():
    done = run("--cases", "1")
    assert done.returncode == 2
    assert done.stderr == "fuzz-kernels: no CUDA device; --interpret runs tiny cases on the CPU\n"


def test_a_few_cases_by_the_interpreter():
    done = run(
        "--interpret", "--jobs", "2", "--cases", "6", "--each", "1", "--only", "layer,windows"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 cases, 0 wrong" in done.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_alone_are_run_and_nothing_else(monkeypatch, kind):
    """What a sanitizer watches: no modules in float64, no memory filled, nothing compared."""
    case = next(draw.family("5/1", (kind,), 1))
    ran, backends = [], []
    results = judge.results

    def watched(case, given, backend, wide=False):
        backends.append((backend, wide))
        ran.append(results(case, given, backend, wide))
        return ran[-1]

    monkeypatch.setattr(judge, "results", watched)
    monkeypatch.setattr(judge, "poison", lambda _: pytest.fail("poisoned"))
    judge.launched(case)
    assert backends == [("triton", False)]
    assert all(t.isfinite().all() for t in ran[0].values())


def test_one_case_by_what_it_printed():
    written = repr(SMALL)
    assert cases.parse(written) == SMALL
    done = run("--interpret", "--case", written)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 cases, 0 wrong" in done.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_says_which_cases(kind):
    first, again = (list(draw.family("5/1", (kind,), 4)) for _ in range(2))
    assert first == again
    assert len(set(first)) == 4 * draw.CONFIGURATIONS
    assert all(case.possible() and case.kind == kind for case in first)
    assert [cases.parse(repr(case)) for case in first] == first


@pytest.mark.parametrize("kind", ["tail", "layer"])
def test_sizes_of_a_configuration_share_their_kernels(monkeypatch, kind):
    plan = pytest.importorskip("mssar.kernels.tail.plan")
    monkeypatch.setattr(plan, "device_of", lambda _: Device(132, 227 << 10, (9, 0)))
    monkeypatch.setattr(draw, "device", lambda: "cuda")
    found = list(draw.family("3/1", (kind,), 8))
    for i in range(draw.CONFIGURATIONS):
        some = found[8 * i : 8 * i + 8]
        assert len({draw.kernels_of(case) for case in some}) == 1
        assert len({case.shape for case in some}) > 3


@pytest.mark.parametrize("form", cases.FORMS)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_numbers_are_the_same_wherever_they_lie(form, layout):
    x = torch.randn(2, 3, 4, 5)
    laid = cases.laid_out(x, form, layout)
    assert torch.equal(laid, x)
    if form == "offset":
        assert laid.data_ptr() % 16 == 4
    if form == "sliced":
        assert not laid.is_contiguous(memory_format=layout)


def test_it_finds_a_wrong_gradient(monkeypatch):
    maps = pytest.importorskip("mssar.kernels.triton.maps")
    assert judge.judged(SMALL) == []
    monkeypatch.setattr(maps, "RSTD", maps.SLOPE)
    wrong = judge.judged(SMALL)
    assert wrong
    assert all(line.startswith("gradient of x: ") for line in wrong)


def test_it_finds_a_wrong_statistic(monkeypatch):
    forward = pytest.importorskip("mssar.kernels.tail.forward")
    track = forward.track

    def twice(saved, tracked, *rest):
        track(saved, tracked._replace(momenta=[1.1 * m for m in tracked.momenta]), *rest)

    monkeypatch.setattr(forward, "track", twice)
    wrong = judge.judged(SMALL)
    assert any(line.startswith("norm.running_var: ") for line in wrong)


def test_it_finds_what_is_written_beside_its_place(monkeypatch):
    forward = pytest.importorskip("mssar.kernels.tail.forward")
    kernels = forward.forward

    def beyond(*args):
        out, saved = kernels(*args)
        room = torch.empty(0, dtype=out.dtype).set_(out.untyped_storage())
        room[out.storage_offset() + out.numel()] = 1.0
        return out, saved

    monkeypatch.setattr(forward, "forward", beyond)
    assert "wrote beside a buffer of (3, 5, 5, 4) torch.float32" in judge.judged(SMALL)


def test_it_finds_what_was_never_written(monkeypatch):
    prepare = pytest.importorskip("mssar.kernels.triton.prepare")
    # So that one of the tables' rows stays empty.
    monkeypatch.setattr(prepare, "BETA", prepare.GAMMA)
    assert any("not finite" in line for line in judge.judged(SMALL))


def test_it_finds_what_differs_between_two_runs(monkeypatch):
    forward = pytest.importorskip("mssar.kernels.tail.forward")
    kernels, calls = forward.forward, []

    def changing(*args):
        calls.append(args)
        out, saved = kernels(*args)
        return out.mul_(1 + 1e-6 * len(calls)), saved

    monkeypatch.setattr(forward, "forward", changing)
    assert judge.judged(SMALL)[0] == "output: differs between two runs"


def test_margins_keep_what_is_between_aligned():
    guards = memory.Guards()
    x = torch.empty(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    made = guards.make(torch.empty_like, x)
    assert made.stride() == x.stride()
    assert made.isnan().all()
    made.zero_()
    assert guards.broken() == []


def test_few_elements_far_off_are_wrong_where_pytorch_has_none():
    right, plain = judge.Distance(1e-6, 0.0, True), judge.Distance(1e-6, 0.0, True)
    assert judge.complaint(right, plain, "float32") is None
    assert judge.complaint(judge.Distance(1e-3, 0.02, True), plain, "float32")
    assert judge.complaint(judge.Distance(1e-3, 0.001, True), plain, "float32") is None
    assert judge.complaint(judge.Distance(0.2, 0.001, True), plain, "float32")  # but grossly
    assert judge.complaint(right._replace(finite=False), plain, "float32") == "not finite"


EDGE = 2  # the hidden channel that lies on its relu's edge
WEIGHT = "gradient of layer.branches.0.reduce.weight"


def on_the_edge(dtype, side=1.0):
    """Two samples; a hidden value of the first is on this side of 0, as near as may be."""
    case = Case(shape=(2, 24, 3, 3), scales=(1,), dtype=dtype, seed=4)
    made, hidden = cases.given(case), []
    wide = cases.set_backend(copy.deepcopy(made.module), "reference").double()
    wide.layer.branches[0].norm1.register_forward_hook(lambda *given: hidden.append(given[2]))
    wide(*(x.double() for x in made.inputs))
    with torch.no_grad():
        bias = made.module.layer.branches[0].norm1.bias
        edge = (bias[EDGE].double() - hidden[0][0, EDGE, 0, 0]).float()
        bias[EDGE] = edge.nextafter(torch.tensor(side * torch.inf))
    return case, made


def well_conditioned(dtype):
    case = Case(shape=(8, 24, 3, 3), scales=(1, 2), dtype=dtype, seed=4)
    return case, cases.given(case)


def expected(case, made):
    exact = cases.results(case, made, "reference", wide=True)
    return exact, {name: value.to(case.type).double() for name, value in exact.items()}


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_a_hidden_value_on_the_edge_is_on_neither_side_wrong(dtype):
    (case, above), (_, below) = on_the_edge(dtype), on_the_edge(dtype, -1.0)
    exact, plain = expected(case, above)
    found, _ = expected(case, below)
    ours = dict(zip(exact, judge.distances(found, exact, dtype), strict=True))
    assert judge.complaint(ours[WEIGHT], judge.Distance(0.0, 0.0, True), dtype)
    assert judge.complaints(case, above, found, plain, exact) == []


@pytest.mark.parametrize("side", [-1.0, 1.0])
def test_two_rows_that_agree_may_both_be_on_either_side(side):
    """Exactly, one is above 0 and the other below it by as much; rounded, they may be equal."""
    how = {"norm": False, "shortcut": False, "activation": None, "whole": True}
    case = Case(kind="layer", shape=(2, 27, 4, 5), scales=(1, 3), reduction=2, **how)
    case = replace(case, dtype="bfloat16", seed=14)
    made = cases.given(case)
    first, norm = made.module.layer.branches[0].reduce, made.module.layer.branches[0].norm1
    pools = made.inputs[0].double().mean((2, 3))
    apart, seen = pools[0] - pools[1], first.weight[EDGE].flatten().double()
    with torch.no_grad():
        seen -= (1 - 1e-3) * (seen @ apart) / (apart @ apart) * apart
        first.weight[EDGE] = seen.view(-1, 1, 1)
        norm.bias.zero_()
        exact, plain = expected(case, made)
        norm.bias[EDGE] = side * 0.01
        found, _ = expected(case, made)
        norm.bias[EDGE] = 0.0
    ours = dict(zip(exact, judge.distances(found, exact, "bfloat16"), strict=True))
    assert judge.complaint(ours[WEIGHT], judge.Distance(0.0, 0.0, True), "bfloat16")
    assert judge.complaints(case, made, found, plain, exact) == []


def test_what_a_norm_makes_irrelevant_is_rounding_and_not_wrong():
    """Of one channel, BN undoes Ω₁ whatever it is: its gradient is next to nothing."""
    case = Case(shape=(3, 1, 10, 10), scales=(4,), dtype="bfloat16", seed=601100183)
    made = cases.given(case)
    exact = cases.results(case, made, "reference", wide=True)
    plain, *others = (
        cases.results(case, conditioning.rounded(case, made, draw, 1), "reference")
        for draw in range(100, 105)
    )
    for found in others:
        assert judge.complaints(case, made, found, plain, exact) == []


def zeroed(grad):
    grad[:, 5] = 0


def scaled(grad):
    grad[EDGE + 1] *= 1.1


def all_a_little(grad):
    grad *= 1.05


def one_swapped(grad):
    grad[:2] = grad[:2].flip(0)


@pytest.mark.parametrize("make", [well_conditioned, on_the_edge])
@pytest.mark.parametrize("spoil", [zeroed, scaled, all_a_little, one_swapped])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_what_rounding_does_not_explain_is_wrong(dtype, spoil, make):
    case, made = make(dtype)
    exact, plain = expected(case, made)
    found = {name: value.clone() for name, value in plain.items()}
    assert judge.complaints(case, made, found, plain, exact) == []
    spoil(found[WEIGHT])
    (wrong,) = judge.complaints(case, made, found, plain, exact)
    assert wrong.startswith(f"{WEIGHT}: ")


@pytest.mark.parametrize("make", [well_conditioned, on_the_edge])
def test_bfloat16_hides_no_wrong_column(make):
    case, made = make("bfloat16")
    exact, plain = expected(case, made)
    found = plain | {WEIGHT: plain[WEIGHT].clone()}
    zeroed(found[WEIGHT])
    assert judge.complaints(case, made, found, plain, exact)


def test_the_edge_excuses_nothing_that_is_not_finite():
    case, made = on_the_edge("float32")
    exact, plain = expected(case, made)
    found = plain | {WEIGHT: plain[WEIGHT].clone()}
    found[WEIGHT][EDGE, 0] = float("nan")
    assert judge.complaints(case, made, found, plain, exact) == [f"{WEIGHT}: not finite"]
