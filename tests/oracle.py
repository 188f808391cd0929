"""MS-SAR by its definition, to be checked by eye.  N batch, C channels, H W map, R regions.

Slow on purpose: loops over positions in whole numbers, float64, nothing from the package. Only N
and C are vectors, and autograd goes through all of it.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

EPSILON = 1e-5  # of batch normalisation, as in torch
MOMENTUM = 0.1


class Regions(NamedTuple):
    """The coordinate sets of a map; positions are numbered h·W + w."""

    members: list[list[int]]  # of every region, the positions it holds
    of: list[int]  # of every position, the region it consults
    grid: tuple[int, int]  # regions down and across; they are listed row by row


@cache
def regional(size: tuple[int, int], scale: int) -> Regions:
    """Position (h, w) lies in region (⌊h·K/H⌋, ⌊w·K/W⌋); a region without positions is none."""
    height, width = size
    found: dict[tuple[int, int], list[int]] = {}
    for h in range(height):
        for w in range(width):
            found.setdefault((h * scale // height, w * scale // width), []).append(h * width + w)
    regions = sorted(found)
    of = [0] * (height * width)
    for number, region in enumerate(regions):
        for position in found[region]:
            of[position] = number
    grid = len({row for row, _ in regions}), len({column for _, column in regions})
    return Regions([found[region] for region in regions], of, grid)


@cache
def sliding(size: tuple[int, int], scale: int) -> Regions:
    """Position (h, w) consults all (i, j) of the map with max(|h − i|, |w − j|) ≤ √(H·W) / K."""
    height, width = size
    members = []
    for h in range(height):
        for w in range(width):
            window = [
                i * width + j
                for i in range(height)
                for j in range(width)
                if (max(abs(h - i), abs(w - j)) * scale) ** 2 <= height * width
            ]
            members.append(window)
    return Regions(members, list(range(height * width)), size)


STRATEGIES = {"regional": regional, "sliding": sliding}


def pool(x: Tensor, regions: Regions) -> Tensor:
    """The mean over each region: N C H W to N C R."""
    positions = x.flatten(2)
    means = [positions[:, :, members].sum(2) / len(members) for members in regions.members]
    return torch.stack(means, 2)


def spread(z: Tensor, regions: Regions, size: tuple[int, int]) -> Tensor:
    """Every position takes the value of the region it consults: N C R to N C H W."""
    return torch.stack([z[:, :, region] for region in regions.of], 2).unflatten(2, size)


def normalise(
    v: Tensor, name: str, state: Mapping[str, Tensor], training: bool, updates: dict[str, Tensor]
) -> Tensor:
    """Batch normalisation of N C R: every region of every sample is one vector and counts once."""
    count = v.shape[0] * v.shape[2]
    mean, variance = state[f"{name}.running_mean"], state[f"{name}.running_var"]
    if training:
        squares = (v - (v.sum((0, 2)) / count)[:, None]).square().sum((0, 2))
        for key, old, new in (
            ("running_mean", mean, v.sum((0, 2)) / count),
            ("running_var", variance, squares / (count - 1)),  # unbiased; the batch's own is not
        ):
            updates[f"{name}.{key}"] = ((1 - MOMENTUM) * old + MOMENTUM * new).detach()
        updates[f"{name}.num_batches_tracked"] = state[f"{name}.num_batches_tracked"] + 1
        mean, variance = v.sum((0, 2)) / count, squares / count
    unit = (v - mean[:, None]) / (variance[:, None] + EPSILON).sqrt()
    return state[f"{name}.weight"][:, None] * unit + state[f"{name}.bias"][:, None]


class Result(NamedTuple):
    y: Tensor  # x ⊙ Z
    importance: Tensor  # Z
    per_scale: list[Tensor]  # Z of each scale alone
    updates: dict[str, Tensor]  # what training leaves in the running statistics, by name


def mssar(
    x: Tensor,
    context: Tensor | None,
    state: Mapping[str, Tensor],
    *,
    scales: Sequence[int],
    strategy: str,
    training: bool,
) -> Result:
    """The whole layer, from the state_dict of one."""
    size = x.shape[2], x.shape[3]
    source = x if context is None else context
    per_scale, updates = [], {}
    for number, scale in enumerate(scales):
        regions = STRATEGIES[strategy](size, scale)
        branch = f"branches.{number}"
        omega1 = state[f"{branch}.reduce.weight"].flatten(1)
        omega2 = state[f"{branch}.expand.weight"].flatten(1)
        v = omega1 @ pool(source, regions)
        v = normalise(v, f"{branch}.norm1", state, training, updates)
        v = omega2 @ torch.where(v > 0, v, 0.0)
        v = normalise(v, f"{branch}.norm2", state, training, updates)
        per_scale.append(spread(1 / (1 + torch.exp(-v)), regions, size))
    importance = sum(per_scale[1:], per_scale[0]) / len(per_scale)
    return Result(x * importance, importance, per_scale, updates)


def window_means(x: Tensor, scale: int) -> Tensor:
    """From an integral image; in float64 its cancellation stays far below 1e-8 here."""
    height, width = x.shape[2:]
    radius = math.isqrt(height * width // scale**2)
    integral = F.pad(x.double(), (1, 0, 1, 0)).cumsum(2).cumsum(3)
    top, left = ((torch.arange(n) - radius).clamp(min=0) for n in (height, width))
    bottom = (torch.arange(height) + radius + 1).clamp(max=height)
    right = (torch.arange(width) + radius + 1).clamp(max=width)
    sums = (
        integral[:, :, bottom][..., right]
        - integral[:, :, top][..., right]
        - integral[:, :, bottom][..., left]
        + integral[:, :, top][..., left]
    )
    return sums / ((bottom - top)[:, None] * (right - left))
