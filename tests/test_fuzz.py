"""The fuzzer finds what is wrong, and nothing in kernels that are right."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", minversion="3.4")
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from fuzzing import cases, draw, judge, memory  # noqa: E402
from fuzzing.cases import Case  # noqa: E402

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


def test_one_case_by_what_it_printed():
    written = repr(SMALL)
    assert cases.parse(written) == SMALL
    done = run("--interpret", "--case", written)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 cases, 0 wrong" in done.stdout


@pytest.mark.parametrize("kind", cases.KINDS)
def test_a_seed_says_which_cases(kind):
    first, again = (list(draw.family("5/1", (kind,), 4)) for _ in range(2))
    assert first == again
    assert len(set(first)) == 4 * draw.CONFIGURATIONS
    assert all(case.possible() and case.kind == kind for case in first)
    assert [cases.parse(repr(case)) for case in first] == first


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
    rows = pytest.importorskip("mssar.kernels.triton.rows")
    monkeypatch.setattr(rows, "BETA", rows.GAMMA)  # so that one of the tables' rows stays empty
    assert any("not finite" in line for line in judge.judged(SMALL))


def test_it_finds_what_differs_between_two_runs(monkeypatch):
    op = pytest.importorskip("mssar.kernels.tail.op")
    usual, calls = op.run, []

    def changing(*args):
        calls.append(args)
        return usual(*args) * (1 + 1e-6 * len(calls))

    monkeypatch.setattr("mssar.fusible.run", changing)
    assert "output: differs between two runs" in judge.judged(SMALL)


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
