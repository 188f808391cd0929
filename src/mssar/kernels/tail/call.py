"""What a call of a tail is: its settings, its shape, and how its maps lie.

N batch, C channels. What regions' means are of has CX channels: C, but for a layer that looks at
another map.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

ACTIVATIONS = {None: 0, "relu": 1, "silu": 2}
TABLE = 7  # rows of a norm's table
MEAN, VARIANCE, RSTD, SLOPE, INTERCEPT, GAMMA, BETA = range(TABLE)


class Settings(NamedTuple):
    """Of a tail, whatever its map."""

    scales: tuple[int, ...]
    eps: tuple[float, float, float]  # of the front norm, the hidden layers', the gates'
    activation: str | None
    norm: bool  # there is one before the layer
    fixed: bool  # with given statistics
    branches_fixed: bool
    precision: str  # of products: "bf16", "tf32" or "ieee"

    @property
    def tensors(self) -> int:
        """That the kernels take, parameters and given statistics."""
        return 4 * self.norm + (6 + 4 * self.branches_fixed) * len(self.scales)

    def written(self) -> str:
        """As an op takes them."""
        # Of a float that Dynamo leaves open (dynamic=True, or another eps before), `str` would
        # break the graph; `hex` does not.
        lists = [
            ",".join([str(n) for n in self.scales]),
            ",".join([float(n).hex() for n in self.eps]),
        ]
        flags = [str(int(flag)) for flag in (self.norm, self.fixed, self.branches_fixed)]
        return " ".join([*lists, self.activation or "none", *flags, self.precision])


@lru_cache(maxsize=1024)
def read(settings: str) -> Settings:
    scales, eps, activation, *flags, precision = settings.split(" ")
    front, hidden, gates = map(float.fromhex, eps.split(","))
    norm, fixed, branches_fixed = (flag == "1" for flag in flags)
    return Settings(
        tuple(map(int, scales.split(","))), (front, hidden, gates),
        None if activation == "none" else activation, norm, fixed, branches_fixed, precision,
    )  # fmt: skip


class Shape(NamedTuple):
    """Of a call: what kernels are compiled and cut for."""

    map: tuple[int, int, int, int]
    last: bool  # channels lie side by side
    dtype: torch.dtype
    device: torch.device
    hidden: int
    shortcut: bool
    types: tuple[torch.dtype, ...]  # of the front norm's and the branches' tensors
    context: int = 0  # CX, where weights come from another map


def shape_of(
    x: Tensor,
    hidden: int,
    shortcut: bool,
    types: tuple[torch.dtype, ...],
    last: bool,
    context: int = 0,
) -> Shape:
    n, c, h, w = x.shape
    return Shape((n, c, h, w), last, x.dtype, x.device, hidden, shortcut, types, context)


def is_last(x: Tensor) -> bool:
    """Whether a map's channels lie side by side, or will once it has no holes."""
    if x.is_contiguous(memory_format=torch.channels_last):
        return True
    return bool(x.stride(1) == 1 and not x.is_contiguous())  # of open sizes, too


def dense(x: Tensor, last: bool) -> Tensor:
    """``x`` without holes, in this layout, where vectors can be read."""
    laid = x.is_contiguous(memory_format=torch.channels_last) if last else x.is_contiguous()
    if laid and not (x.is_cuda and x.data_ptr() % 16):
        return x
    form = torch.channels_last if last else torch.contiguous_format
    return torch.empty_like(x, memory_format=form).copy_(x)


def like(x: Tensor) -> Tensor:
    """Room for a map that is laid out as ``dense`` lays this one out."""
    form = torch.channels_last if is_last(x) else torch.contiguous_format
    kept = x.is_contiguous(memory_format=form)  # then strides of no consequence stay as they are
    return torch.empty_like(x, memory_format=torch.preserve_format if kept else form)
