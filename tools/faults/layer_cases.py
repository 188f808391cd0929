"""Cases of the layer: shapes, types and layouts that maps may come in.  N C H W as everywhere."""

from __future__ import annotations

import ast
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DTYPES = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
# Those in which a NaN is followed. A CPU's convolution in bfloat16 (torch 2.13, channels_last, more
# than one image) takes channels in pairs, an odd last one with the next position's first times 0.
FOLLOWED = ("float32", "float64")
LAYOUTS = (
    *("contiguous", "channels_last", "strided", "expanded"),
    *("offset", "sliced", "transposed", "hwc"),
)
STRATEGIES = ("regional", "sliding", "strips")
SCALES = ((1, 2, 4), (1,), (4, 1, 2), (2, 3), (1, 3, 6), (7,), (5, 2), (16, 1))
BAD = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}
SIZES = ((1, 1), (1, 5), (6, 1), (2, 3), (7, 7), (8, 8), (7, 9), (12, 4), (13, 11), (3, 16))


@dataclass(frozen=True)
class Case:
    """A layer and what it is given; ``repr`` is all that is needed to try it again."""

    shape: tuple[int, int, int, int]
    scales: tuple[int, ...] = (1, 2, 4)
    strategy: str = "regional"
    reduction: int = 1
    context: int | None = None
    training: bool = False
    dtype: str = "float32"
    layout: str = "contiguous"
    autocast: bool = False
    compiled: str | None = None  # by which of torch's backends
    bad: str | None = None  # a number that is not finite, somewhere in a map
    seed: int = 0

    @property
    def type(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def rounding(self) -> float:
        """Of the coarsest arithmetic that is in it."""
        return DTYPES["bfloat16" if self.autocast else self.dtype]

    @property
    def possible(self) -> bool:
        """BN takes no statistics of a single value, a layer has a channel a scale, and autocast
        leaves float64 as it is."""
        if self.autocast and self.dtype not in ("float32", "bfloat16"):
            return False
        n, c, h, w = self.shape
        fewest = min(self.scales)
        rows = {"regional": min(fewest, h), "sliding": h, "strips": 1}[self.strategy]
        columns = w if self.strategy == "sliding" else min(fewest, w)
        return c >= len(self.scales) and not (self.training and n * rows * columns < 2)


def parse(written: str) -> Case:
    """A case from what ``repr`` gave."""
    call = ast.parse(written.strip(), mode="eval").body
    assert isinstance(call, ast.Call), written
    return Case(**{str(word.arg): ast.literal_eval(word.value) for word in call.keywords})


def drawn(draw: random.Random, **fixed: Any) -> Case:
    """Any case that can be."""
    while True:
        size = draw.choice(SIZES) if draw.random() < 0.5 else _size(draw)
        given: dict[str, Any] = {
            "shape": (draw.choice([1, 1, 2, 3, 4]), draw.randint(1, 9), *size),
            "scales": draw.choice(SCALES),
            "strategy": draw.choice(STRATEGIES),
            "reduction": draw.randint(1, 3),
            "context": draw.choice([None, None, draw.randint(1, 7)]),
            "training": draw.random() < 0.5,
            "dtype": draw.choice([*DTYPES, "float32"]),
            "layout": draw.choice(LAYOUTS),
            "autocast": draw.random() < 0.2,
            "seed": draw.randrange(1 << 30),
        }
        case = Case(**given | fixed)
        if case.possible:
            return case


def _size(draw: random.Random) -> tuple[int, int]:
    return draw.randint(1, 14), draw.randint(1, 14)


def map_of(case: Case, channels: int, draw: torch.Generator) -> Tensor:
    """Numbers that the case's type has, in its layout; whatever lies between them is no number."""
    n, _, h, w = case.shape
    x = torch.randn(n, channels, h, w, generator=draw, dtype=torch.float64).to(case.type)
    if case.layout == "expanded":
        axis = case.seed % 4
        return x.narrow(axis, 0, 1).expand(x.shape)
    return laid_out(x, case.layout)


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same numbers, elsewhere."""
    n, c, h, w = x.shape
    nan = float("nan")
    if layout == "strided":
        return x.new_full((n, c, 2 * h, 3 * w), nan)[:, :, ::2, 1::3].copy_(x)
    if layout == "offset":
        return x.new_full((x.numel() + 3,), nan).as_strided(x.shape, x.stride(), 3).copy_(x)
    if layout == "sliced":
        room = x.new_full((n + 1, c + 3, h + 1, w + 2), nan)
        return room[1:, 2 : 2 + c, :h, 1 : 1 + w].copy_(x)
    if layout == "hwc" and n == 1:  # as an image comes; the stride of N is then that of W
        return x[0].permute(1, 2, 0).contiguous().permute(2, 0, 1)[None]
    if layout == "hwc":
        layout = "channels_last"
    if layout == "channels_last":
        return x.contiguous(memory_format=torch.channels_last)
    if layout == "transposed":
        return x.mT.contiguous().mT
    return x
