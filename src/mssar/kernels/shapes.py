"""What the ops give and keep, by shape: all that is known without Triton.  N batch, C channels.

L scales; J hidden channels of a branch; rows as in ``geometry``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mssar.kernels.geometry import Geometry, geometry

PER_SCALE = 6  # Ω₁, γ₁, β₁, Ω₂, γ₂, β₂


class Epsilons(NamedTuple):
    norm: float = 0.0
    hidden: float = 0.0
    gate: float = 0.0


class Forward(NamedTuple):
    """What the tail gives, and what its gradient needs."""

    out: Tensor
    moments: Tensor  # 5 × C: BN's mean, variance and slope; a number near the mean; what BN's
    # output has more than normal · slope
    normal: Tensor  # rows × C: the scales' means, about that number
    hidden: Tensor  # rows × J, padded
    hidden_moments: Tensor  # 2 × L × J, padded
    gates: Tensor  # rows × C
    gate_moments: Tensor  # 2 × L × C
    counters: Tensor  # a scale and tile of channels; zeros before and after every launch
    packed: Tensor  # Ω₂, Ω₁ behind BN's slope, and Ω₁; rows are padded


def kept(x: Tensor) -> torch.dtype:
    """What rows are kept in between launches."""
    return torch.bfloat16 if x.dtype is torch.bfloat16 else torch.float32


def buffers(x: Tensor, params: Sequence[Tensor], scales: Sequence[int], norm: bool) -> Forward:
    """Their shapes."""
    geo = grids(x, scales)
    n, c = x.shape[:2]
    levels, j = len(params) // PER_SCALE, padded(width(params))
    number = torch.float32
    rows = n * geo.branch_rows if levels else 0, c
    return Forward(
        torch.empty_like(x),
        x.new_empty((5, c if norm else 0), dtype=number),
        x.new_empty(rows, dtype=kept(x)),
        x.new_empty((rows[0], j), dtype=kept(x)),
        x.new_empty((2, levels, j), dtype=number),
        x.new_empty(rows, dtype=kept(x)),
        x.new_empty((2, levels, c), dtype=number),
        x.new_empty(levels * (1 + max(c, j) // 16), dtype=torch.int32),
        x.new_empty(packed_size(params), dtype=kept(x)),
    )


def packed_size(params: Sequence[Tensor]) -> int:
    """Numbers of Ω₂, and twice of Ω₁, of all scales."""
    if not params:
        return 0
    j, c = width(params), params[0].shape[1]
    return len(params) // PER_SCALE * (c * padded(j) + 2 * j * padded(c))


def grids(x: Tensor, scales: Sequence[int]) -> Geometry:
    height, width = x.shape[2:]
    return geometry((int(height), int(width)), tuple(scales))


class Backward(NamedTuple):
    x: Tensor
    shortcut: Tensor
    gamma: Tensor
    beta: Tensor
    params: list[Tensor]


def gradients(x: Tensor, gamma: Tensor | None, params: Sequence[Tensor], write: bool) -> Backward:
    """Their shapes."""
    one = x.new_empty(0) if gamma is None else gamma
    return Backward(
        torch.empty_like(x),
        torch.empty_like(x) if write else x.new_empty(0),
        torch.empty_like(one),
        torch.empty_like(one),
        [torch.empty_like(p) for p in params],
    )


def width(params: Sequence[Tensor]) -> int:
    return int(params[0].shape[0]) if params else 0


def padded(numbers: int) -> int:
    """Numbers of a row that begins where whole vectors can be read."""
    return -(-numbers // 16) * 16


class Step(NamedTuple):
    """What a dense step gives, and what its gradient needs.  K new channels, C so far."""

    out: Tensor
    rows: Tensor  # rows × (C + K); nothing where they are not carried on
    normal: Tensor  # rows × C: the scales' means
    hidden: Tensor  # rows × J, padded
    hidden_moments: Tensor  # 2 × L × J, padded
    gates: Tensor  # rows × K
    gate_moments: Tensor  # 2 × L × K
    fine: Tensor  # rows of cells × K: sums of what came in
    counters: Tensor


def step_buffers(
    x: Tensor, rows: Tensor, params: Sequence[Tensor], scales: Sequence[int], carry: bool
) -> Step:
    """Their shapes."""
    geo = grids(x, scales)
    n, k = x.shape[:2]
    c = rows.shape[1]
    levels, j = len(params) // PER_SCALE, padded(width(params))
    number = torch.float32
    counters = levels * (1 + max(k, j) // 16)
    return Step(
        torch.empty_like(x),
        rows.new_empty((rows.shape[0], c + k) if carry else 0),
        x.new_empty((n * geo.branch_rows, c), dtype=kept(x)),
        x.new_empty((n * geo.branch_rows, j), dtype=kept(x)),
        x.new_empty((2, levels, j), dtype=number),
        x.new_empty((n * geo.branch_rows, k), dtype=kept(x)),
        x.new_empty((2, levels, k), dtype=number),
        x.new_empty((n * geo.cells, k), dtype=number),
        x.new_empty(counters, dtype=torch.int32),
    )
