"""Which cases: a family shares most of its kernels, which take longer to compile than to run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import torch

from fuzzing.cases import FORMS, MODES, Case, device

SCALES = [
    (1, 2, 4), (1, 2, 4), (1, 2, 4), (1,), (4,), (2,), (1, 2), (2, 3), (3, 5), (1, 2, 4, 8), (1, 3),
]  # fmt: skip
KIND_WEIGHTS = {"tail": 10, "layer": 4, "dense": 2, "windows": 2, "sliding": 1}
ELEMENTS = {"tail": 2_000_000, "layer": 2_000_000, "dense": 200_000, "windows": 1_000_000,
            "sliding": 300_000}  # fmt: skip
TINY = 300  # elements, for the interpreter
CONFIGURATIONS = 3  # of a family
BATCH, CHANNELS, SIDE = 70, 520, 160


def family(seed: str, kinds: tuple[str, ...], each: int) -> Iterator[Case]:
    """``CONFIGURATIONS`` of kernels, each the last one with something changed, × ``each`` sizes."""
    draw = Random(seed)
    first = configuration(draw, kinds)
    for i in range(CONFIGURATIONS):
        if i:
            first = changed(draw, first)
        yield first
        for _ in range(each - 1):
            yield varied(draw, first)


def configuration(draw: Random, kinds: tuple[str, ...]) -> Case:
    while True:
        kind = draw.choices(kinds, [KIND_WEIGHTS[k] for k in kinds])[0]
        case = Case(
            kind=kind,
            scales=draw.choice(SCALES),
            reduction=draw.choice([1, 1, 1, 2, 4, draw.randint(1, 16)]),
            last=draw.random() < 0.6,
            steps=draw.randint(1, 4),
            growth=draw.choice([4, 8, 12, draw.randint(1, 40)]),
        )
        case = _typed(draw, _ended(draw, case))
        case = sized(draw, replace(case, mode=mode(draw, kind)))
        if case.possible():
            return lying(draw, case)


def mode(draw: Random, kind: str) -> str:
    if kind in ("windows", "dense", "sliding"):
        return draw.choice(MODES[:3])
    return draw.choices(MODES, [8, 3, 2, 2, 1, 1])[0]


def _typed(draw: Random, case: Case) -> Case:
    dtype = draw.choice(["float32", "bfloat16", "bfloat16", "float16"])
    return replace(case, dtype=dtype, whole=dtype != "float32" and draw.random() < 0.3)


def _ended(draw: Random, case: Case) -> Case:
    if case.kind != "tail":
        return replace(case, norm=False, shortcut=False, activation=None)
    return replace(
        case,
        norm=draw.random() < 0.8,
        shortcut=draw.random() < 0.7,
        activation=draw.choice(["relu", "relu", "silu", None]),
    )


def side(draw: Random) -> int:
    least, most = draw.choice([(1, 5), (4, 16), (4, 16), (16, 40), (16, 40), (40, SIDE)])
    return draw.randint(least, most)


def channels(draw: Random) -> int:
    some = [draw.randint(1, CHANNELS), 16 * draw.randint(1, 32), 8 * draw.randint(1, 64)]
    return draw.choice([*some, 2 ** draw.randint(0, 9), draw.randint(1, 40)])


def sized(draw: Random, case: Case) -> Case:
    """With a new shape."""
    h = side(draw)
    w = h if draw.random() < 0.3 else side(draw)
    if draw.random() < 0.05:
        h, w = draw.choice([(1, 1), (1, w), (h, 1)])
    most = TINY if device() == "cpu" else ELEMENTS[case.kind]
    if device() == "cpu":
        h, w = min(h, 9), min(w, 9)
    area = h * w
    c = min(channels(draw), max(len(case.scales), most // (2 * area)))
    if case.kind == "dense":
        c = min(c, 64)
    return replace(case, shape=(batch(draw, c * area, most), c, h, w))


def batch(draw: Random, sample: int, most: int) -> int:
    fit = max(2, most // sample)
    return min(draw.choice([draw.randint(1, BATCH), draw.randint(1, 8)]), fit)


def lying(draw: Random, case: Case) -> Case:
    """Other numbers, elsewhere in memory."""
    usual = len(FORMS) * ["plain"]
    case = replace(
        case,
        x=draw.choice([*usual, "sliced", "offset", "transposed"]),
        added=draw.choice([*usual, *FORMS]),
        grad=draw.choice([*usual, *FORMS]),
        op=draw.random() < 0.15 and case.kind in ("tail", "layer"),
        seed=draw.randrange(1 << 30),
    )
    free = case.activation != "relu" or (case.shortcut and case.added != "expanded")
    return case if free or case.grad != "expanded" else replace(case, grad="plain")


def changed(draw: Random, case: Case) -> Case:
    """Something is different, and so are some of its kernels."""
    changes = [
        lambda c: replace(c, mode=mode(draw, c.kind)),
        lambda c: replace(c, mode=mode(draw, c.kind)),
        lambda c: _ended(draw, c),
        lambda c: sized(draw, c),
        lambda c: sized(draw, c),
        lambda c: replace(c, last=not c.last),
    ]
    while True:
        found = draw.choice(changes)(case)
        if found.possible():
            return lying(draw, found)


def varied(draw: Random, case: Case) -> Case:
    """Of another size, with the same kernels."""
    _, c, h, w = case.shape
    most = TINY if device() == "cpu" else ELEMENTS[case.kind]
    wanted = kernels_of(case)
    for _ in range(40):
        height, width = (max(1, s + draw.randint(-(s // 4), s // 4)) for s in (h, w))
        # Channels of which kernels know the same: that they are a multiple of this.
        by = math.gcd(16, c)
        wide = c if draw.random() < 0.3 else by * draw.randint(1, max(1, 2 * c // by))
        if wide > CHANNELS or wide * height * width > most // 2:
            continue
        found = replace(case, shape=(batch(draw, wide * height * width, most), wide, height, width))
        if found.possible() and kernels_of(found) == wanted:
            return lying(draw, found)
    found = replace(case, shape=(batch(draw, c * h * w, most), c, h, w))
    return lying(draw, found if found.possible() else case)


def kernels_of(case: Case) -> Any:
    """What tells which kernels are compiled for a case; under the interpreter none are."""
    if device() == "cpu":
        return None
    if case.kind in ("windows", "sliding"):
        n, c, h, w = case.shape
        return n * c % 16 == 0, c % 16, h % 16, w % 16, min(h, 8), max(w - 1, 1).bit_length()
    from mssar.kernels.tail.call import Settings, Shape
    from mssar.kernels.tail.plan import Plan

    n, c, h, w = case.shape
    outputs = case.growth if case.kind == "dense" else c
    levels = len(case.scales)
    hidden = max(1, outputs // (levels * case.reduction))
    front, branches = case.trains
    types = (torch.float32,) * (4 * case.norm + 6 * levels + 4 * levels * (not branches))
    precision = {"float32": "ieee", "bfloat16": "bf16", "float16": "tf32"}[case.dtype]
    shape = Shape(
        (n, c, h, w), case.last, case.type, torch.device("cuda", 0), hidden, case.shortcut, types
    )
    settings = Settings(
        case.scales, (1e-5,) * 3, case.activation, case.norm, case.norm and not front,
        not branches, precision,
    )  # fmt: skip
    return frozenset(map(id, Plan(shape, settings).kernels(forward=True, backward=True)))
