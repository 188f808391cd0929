"""Is what the kernels gave right: against float64, as plain PyTorch in the same type is."""

from __future__ import annotations

import importlib.util
import warnings
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from fuzzing.cases import Case, Given, device, exact_products, given, results
from fuzzing.conditioning import leeway
from fuzzing.memory import Guards, guarded, poison

# Of a tensor's norm: what nobody calls an error, whatever plain PyTorch's own is.
FLOOR = {"float32": 3e-5, "float16": 4e-3, "bfloat16": 2e-2}
# An element is far off by so much of itself and of the elements' usual size.
FAR = {"float32": 1e-3, "float16": 0.03, "bfloat16": 0.15}
TIMES, FAR_TIMES, FAR_SHARE = 4, 3, 0.005
GROSS_TIMES, GROSS = 20, 0.1


class Distance(NamedTuple):
    """From what is exact."""

    error: float  # of the norm
    far: float  # share of the elements
    finite: bool  # wherever the exact one is


Results: TypeAlias = dict[str, Tensor]


def distances(
    found: Results, exact: Results, dtype: str, leeway: Results | None = None
) -> list[Distance]:
    """All at once, for one wait; every element's beyond its leeway."""
    told = []
    for name in exact:
        ours, theirs = found[name].double(), exact[name].double()
        off = (ours - theirs).abs()
        if leeway is not None:
            off = (off - leeway[name]).clamp(min=0)
        usual = theirs.square().mean().sqrt()
        far = (~(off <= FAR[dtype] * (theirs.abs() + usual))).double().mean()
        error = (off.norm() / theirs.norm()).nan_to_num(0.0) if off.numel() else off.sum()
        finite = (ours.isfinite() | ~theirs.isfinite()).all().double()
        told.append(torch.stack([torch.where(off.norm() == 0, 0.0, error), far, finite]))
    return [Distance(e, f, bool(ok)) for e, f, ok in torch.stack(told).tolist()]


def complaint(ours: Distance, plain: Distance, dtype: str) -> str | None:
    """What is wrong with one tensor."""
    if not ours.finite:
        return "not finite"
    told = (
        f"{ours.error:.2g} off ({plain.error:.2g} in plain PyTorch) beyond rounding, "
        f"{ours.far:.1%} of elements far ({plain.far:.1%})"
    )
    off = ours.error > TIMES * plain.error + FLOOR[dtype]
    if off and ours.far > FAR_TIMES * plain.far + FAR_SHARE:
        return told
    return told if ours.error > GROSS_TIMES * plain.error + GROSS else None


def same_twice(case: Case) -> bool:
    """Whether two runs must agree in every bit: where nothing but the kernels runs."""
    if case.kind == "dense":
        return importlib.util.find_spec("mssar.kernels.dense") is not None
    return case.kind != "sliding"


def launched(case: Case) -> None:
    """Have the kernels run, once, for somebody else to watch."""
    with exact_products():
        results(case, given(case, judged=False), "triton")
        if device() == "cuda":
            torch.cuda.synchronize()


def judged(case: Case, poisoned: bool = True, scale: float = 1.0) -> list[str]:
    """What is wrong with a case."""
    with exact_products(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the interpreter's, of what is masked
        made = given(case)
        exact = results(case, made, "reference", wide=True)
        plain = results(case, made, "reference")
        runs, wrong = [], []
        for _ in range(1 + same_twice(case)):
            guards = Guards(poisoned)
            if poisoned:
                poison(scale)
            with guarded(guards):
                runs.append(results(case, made, "triton"))
            wrong += [f"wrote beside a buffer of {name}" for name in guards.broken()]
    found = runs[0]
    if found.keys() != exact.keys():
        return [f"gave {sorted(found)}, expected {sorted(exact)}"]
    names = list(exact)
    wrong += complaints(case, made, found, plain, exact)
    for name in names:
        if found[name].dtype != plain[name].dtype or found[name].shape != plain[name].shape:
            wrong.append(f"{name}: {found[name].dtype}, plain PyTorch {plain[name].dtype}")
    for again in runs[1:]:
        same = torch.stack([_same(found[n], again[n]) for n in names]).tolist()
        differing = [name for name, ok in zip(names, same, strict=True) if not ok]
        wrong += [f"{name}: differs between two runs" for name in differing]
    return wrong


def complaints(
    case: Case, made: Given, found: Results, plain: Results, exact: Results
) -> list[str]:
    """What is wrong beyond what the exact result itself moves by when numbers are rounded."""
    usual = Distance(FLOOR[case.dtype], 0.0, True)  # what plain PyTorch is off, as a rule
    if not any(complaint(ours, usual, case.dtype) for ours in distances(found, exact, case.dtype)):
        return []
    with exact_products():
        allowed = leeway(case, made, exact)
    ours, theirs = (distances(some, exact, case.dtype, allowed) for some in (found, plain))
    pairs = zip(exact, ours, theirs, strict=True)
    told = ((name, complaint(our, their, case.dtype)) for name, our, their in pairs)
    return [f"{name}: {what}" for name, what in told if what]


def _same(one: Tensor, other: Tensor) -> Tensor:
    return ((one == other) | (one.isnan() & other.isnan())).all()


def round_halves() -> None:
    """In Triton's interpreter, which cuts bfloat16 off where a GPU rounds."""
    import triton.language as tl
    from triton.runtime import interpreter

    assert device() == "cpu"
    cut_off = interpreter._convert_float

    def convert(values, source, target, *rest):
        if (source, target) != (tl.float32, tl.bfloat16):
            return cut_off(values, source, target, *rest)
        exact = torch.from_numpy(values.view("float32").copy())
        return exact.bfloat16().view(torch.int16).numpy().view("uint16")

    interpreter._convert_float = convert
