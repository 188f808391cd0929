"""How far the exact result itself moves when what it is made of is rounded otherwise.

A hidden value within rounding of its relu's zero, or two rows that nearly agree under a norm: then
rounding decides, and two right ways to compute are far apart. Float64 tells: where it moves by as
much when maps and parameters move by what the type cannot hold, nobody in that type can be nearer.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from fuzzing.cases import Case, Given, results

DRAWS = 16
# A number is rounded about so often on its way: in a map, a mean, a hidden value and a gate.
ROUNDINGS = 4


def leeway(case: Case, made: Given, exact: dict[str, Tensor]) -> dict[str, Tensor]:
    """For every element, the furthest that it moved."""
    furthest = {name: torch.zeros_like(value) for name, value in exact.items()}
    for draw in range(DRAWS):
        moved = results(case, rounded(case, made, draw), "reference", wide=True)
        for name, most in furthest.items():
            # What is no number says nothing about how far one may be.
            off = (moved[name] - exact[name]).abs().nan_to_num(0.0, 0.0, 0.0)
            furthest[name] = torch.maximum(most, off)
    return furthest


@torch.no_grad()
def rounded(case: Case, made: Given, draw: int) -> Given:
    """In float64: every number up or down by a few of the type's roundings, at most."""
    module = copy.deepcopy(made.module).double()
    where = next(iter(made.inputs)).device
    chance = torch.Generator(where).manual_seed(1 + draw)
    # From one to all of them: what is near an edge crosses it in some draws, and not in others.
    most = torch.finfo(case.type).eps / 2 * (1 + draw // 2 % ROUNDINGS)

    def turned(x: Tensor, shape: tuple[int, ...]) -> Tensor:
        sign = torch.randint(0, 2, shape, generator=chance, device=where) * 2 - 1
        return x.double() * (1 + most * sign)

    def map_of(x: Tensor) -> Tensor:
        # A sample's channel as a whole in every other draw: as its mean is rounded, which roundings
        # of its elements would leave where it is.
        return turned(x, x.shape if draw % 2 else (*x.shape[:-2], 1, 1))

    for p in module.parameters():
        p.copy_(turned(p, p.shape))
    return Given(module, [map_of(x) for x in made.inputs], map_of(made.grad), made.forms)
