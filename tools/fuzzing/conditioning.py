"""How far results move when what they are made of is rounded otherwise.

A hidden value within rounding of its relu's zero, two rows that nearly agree under a norm, a weight
that a norm makes irrelevant: then rounding decides, and two right ways to compute are far apart.
Where maps and parameters move by what the type can hardly tell, and float64 moves by as much, or
PyTorch in that type does, nobody in that type can be nearer.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from fuzzing.cases import Case, Given, results

DRAWS = 16
# A number is rounded about so often on its way: in a map, a mean, a hidden value and a gate.
ROUNDINGS = 4
# PyTorch rounds by itself; the kernels may be off by a few times as much.
TIMES = 3


def leeway(case: Case, made: Given, exact: dict[str, Tensor]) -> dict[str, Tensor]:
    """For every element, how far it may be from the exact one."""
    furthest = {name: torch.zeros_like(value) for name, value in exact.items()}
    for draw in range(DRAWS):
        for wide, roundings, times in ((True, ROUNDINGS, 1), (False, 1, TIMES)):
            other = rounded(case, made, draw, roundings)
            moved = results(case, other, "reference", wide=wide)
            for name, most in furthest.items():
                # What is no number says nothing about how far one may be.
                off = (moved[name] - exact[name]).abs().nan_to_num(0.0, 0.0, 0.0)
                furthest[name] = torch.maximum(most, times * off)
    return furthest


@torch.no_grad()
def rounded(case: Case, made: Given, draw: int, roundings: int) -> Given:
    """Every number up or down by some of the type's roundings."""
    module, where = copy.deepcopy(made.module), made.grad.device
    chance = torch.Generator(where).manual_seed(1 + draw)
    by = torch.finfo(case.type).eps / 2 * roundings

    def signs(shape: tuple[int, ...]) -> Tensor:
        return torch.randint(0, 2, shape, generator=chance, device=where) * 2 - 1

    def map_of(x: Tensor) -> Tensor:
        # A sample's channel as a whole in every other draw: as its mean is rounded, which roundings
        # of its elements would leave where it is.
        shape = x.shape if draw % 2 else (*x.shape[:-2], 1, 1)
        return (x.double() * (1 + by * signs(shape))).to(x.dtype)

    for owner in module.modules():
        for name, p in owner.named_parameters(recurse=False):
            # β is added to what was rounded, and is about as large as γ. Where two rows nearly
            # agree and β is 0, both may so come to lie on one side of a relu.
            size = owner.weight if name == "bias" else p
            p.copy_(p.double() + by * signs(p.shape) * size.double().abs())
    return Given(module, [map_of(x) for x in made.inputs], map_of(made.grad), made.forms)
