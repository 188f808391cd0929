"""The layer by its definition, in float64.  N batch, C channels, P positions, R regions.

Nothing here is mssar's. A region is a row of R × P truths, and its mean is over what is true in it:
chosen, not multiplied by nought, so that a number that is not finite stays where it is. With
``noise`` every intermediate result is off by as much as rounding may make it: two results that
differ by no more than such ones do are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

MOMENTUM = 0.1  # of batch normalisation, as in torch


def regional(height: int, width: int, scale: int) -> Tensor:
    """Position i of an axis of n lies in region ⌊i·K/n⌋; those without a position are none."""
    where = [(h * scale // height, w * scale // width) for h in range(height) for w in range(width)]
    return torch.tensor([[at == region for at in where] for region in sorted(set(where))])


def sliding(height: int, width: int, scale: int) -> Tensor:
    """All at most √(H·W) / K away, by rows and by columns."""
    reach = math.isqrt(height * width // scale**2)
    rows = (torch.arange(height)[:, None] - torch.arange(height)).abs() <= reach
    columns = (torch.arange(width)[:, None] - torch.arange(width)).abs() <= reach
    both = rows[:, None, :, None] & columns[None, :, None, :]
    return both.reshape(height * width, height * width)


def strips(height: int, width: int, scale: int) -> Tensor:
    """From left to right, the first ones wider where they cannot be alike; a set of our own."""
    parts = min(scale, width)
    sides = [width // parts + (i < width % parts) for i in range(parts)]
    of = [i for i, side in enumerate(sides) for _ in range(side)]
    return torch.tensor([[of[w] == i for _ in range(height) for w in range(width)]
                         for i in range(parts)])  # fmt: skip


SETS: dict[str, Callable[[int, int, int], Tensor]] = {
    "regional": regional,
    "sliding": sliding,
    "strips": strips,
}


def consulted(members: Tensor, strategy: str) -> Tensor:
    """By every position: its own window, or the region it lies in."""
    return torch.arange(len(members)) if strategy == "sliding" else members.int().argmax(0)


class Noise:
    """As rounding would add at every step, there and on the way back."""

    def __init__(self, size: float, draw: torch.Generator) -> None:
        self.size, self.draw = size, draw

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = _Noisy.apply(x, self)
        return y

    def added(self, x: Tensor) -> Tensor:
        off = torch.empty(x.shape, dtype=x.dtype).uniform_(-1, 1, generator=self.draw)
        return x * (1 + self.size * off)


class _Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, noise: Noise) -> Tensor:
        ctx.noise = noise
        return noise.added(x)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        return ctx.noise.added(slope), None


class Result(NamedTuple):
    y: Tensor
    statistics: dict[str, Tensor]  # that training leaves


def recalibrated(
    x: Tensor,
    context: Tensor | None,
    state: Mapping[str, Tensor],
    scales: tuple[int, ...],
    strategy: str,
    training: bool,
    epsilon: float,
    noise: Callable[[Tensor], Tensor] = lambda x: x,
) -> Result:
    """The whole layer, from the state of one."""
    source, statistics = x if context is None else context, dict[str, Tensor]()
    total: Tensor | float = 0.0

    def norm(v: Tensor, name: str) -> Tensor:
        mean, variance = state[f"{name}.running_mean"], state[f"{name}.running_var"]
        if training:
            count = v.shape[0] * v.shape[2]
            of_batch = noise(v.sum((0, 2)) / count)
            squares = (v - of_batch[:, None]).square().sum((0, 2))
            unbiased = squares / max(count - 1, 1)
            for key, old, new in (("mean", mean, of_batch), ("var", variance, unbiased)):
                statistics[f"{name}.running_{key}"] = (1 - MOMENTUM) * old + MOMENTUM * new
            mean, variance = of_batch, noise(squares / count)
        unit = noise(v - mean[:, None]) / (variance[:, None] + epsilon).sqrt()
        return noise(state[f"{name}.weight"][:, None] * unit + state[f"{name}.bias"][:, None])

    for number, scale in enumerate(scales):
        members = SETS[strategy](*x.shape[2:], scale)
        chosen = torch.where(members, source.flatten(2)[:, :, None], 0.0)  # N C R P
        v = noise(chosen.sum(3) / members.sum(1))
        branch = f"branches.{number}"
        v = noise(state[f"{branch}.reduce.weight"].flatten(1) @ v)
        v = norm(v, f"{branch}.norm1")
        v = torch.where(v < 0, 0.0, v)  # what is no number stays none
        v = noise(state[f"{branch}.expand.weight"].flatten(1) @ v)
        gate = noise(1 / (1 + (-norm(v, f"{branch}.norm2")).exp()))
        total = total + gate[:, :, consulted(members, strategy)]
    importance = noise(total / len(scales)).unflatten(2, x.shape[2:])
    return Result(noise(x * importance), statistics)
