"""Statistics and sums of all processes together, between the launches.  L scales."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from mssar.kernels.tail.call import BETA, GAMMA, INTERCEPT, MEAN, RSTD, SLOPE, TABLE, VARIANCE

if TYPE_CHECKING:
    from mssar.kernels.tail.plan import Plan


class Group:
    """The processes that share their batches' statistics."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def _sum(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, group=self.group)
        return x

    def front(self, plan: Plan, small: Tensor) -> None:
        count = small.new_full((1,), plan.n * plan.height * plan.width, dtype=torch.float32)
        self._merge(_front(plan, small), _shares(plan, small)[:1], count, plan.settings.eps[0])

    def hidden(self, plan: Plan, small: Tensor) -> None:
        shares = _shares(plan, small)[1:]
        self._merge(_hidden(plan, small), shares, _counts(plan, small), plan.settings.eps[1])

    def gates(self, plan: Plan, small: Tensor) -> None:
        shares = _shares(plan, small)[1:]
        self._merge(_gates(plan, small), shares, _counts(plan, small), plan.settings.eps[2])

    def _merge(self, tables: Tensor, shares: Tensor, counts: Tensor, eps: float) -> None:
        """Tables (norms × rows × channels) of these processes' values together."""
        n = counts[:, None]
        local, width = tables[:, MEAN].clone(), tables.shape[2]
        sums = self._sum(torch.cat((local * n, n), 1))
        total, mean = sums[:, width:], sums[:, :width] / sums[:, width:]
        squares = n * (tables[:, VARIANCE] + (local - mean) ** 2)
        variance = self._sum(squares) / total
        rstd = (variance + eps).rsqrt()
        slope = tables[:, GAMMA] * rstd
        tables[:, MEAN], tables[:, VARIANCE], tables[:, RSTD] = mean, variance, rstd
        tables[:, SLOPE], tables[:, INTERCEPT] = slope, tables[:, BETA] - mean * slope
        shares.copy_(1 / total[:, 0])

    def gates_backward(self, plan: Plan, small: Tensor, grads: Tensor, memory: Tensor) -> None:
        levels, c = plan.levels, plan.c
        sums = plan.grads.view(grads, "vectors")[2 * c :].view(2, levels, c)
        lines = plan.backward.view(memory, "lines").view(levels, 3, plan.cs)
        self._lines(sums, _gates(plan, small), _shares(plan, small)[1:], lines)

    def hidden_backward(self, plan: Plan, small: Tensor, grads: Tensor, memory: Tensor) -> None:
        levels, j = plan.levels, plan.j
        sums = plan.grads.view(grads, "hidden_vectors").view(2, levels, j)
        lines = plan.backward.view(memory, "hidden_lines").view(levels, 3, plan.js)
        self._lines(sums, _hidden(plan, small), _shares(plan, small)[1:], lines)

    def _lines(self, sums: Tensor, tables: Tensor, shares: Tensor, lines: Tensor) -> None:
        """Gradients as lines; ``sums`` are grad · normal value, and grad, and stay as they are."""
        crossed, added = self._sum(sums.clone())
        width, share = sums.shape[2], shares[:, None]
        mean, rstd, slope = (tables[:, row, :width] for row in (MEAN, RSTD, SLOPE))
        p = -slope * rstd * crossed * share
        lines[:, 1, :width] = p
        lines[:, 2, :width] = -slope * added * share - p * mean

    def front_backward(self, plan: Plan, memory: Tensor) -> None:
        self._sum(plan.backward.view(memory, "sums"))


def _front(plan: Plan, small: Tensor) -> Tensor:
    return plan.saved.view(small, "norms")[: TABLE * plan.cs].view(1, TABLE, plan.cs)


def _hidden(plan: Plan, small: Tensor) -> Tensor:
    begin, size = TABLE * plan.cs, TABLE * plan.levels * plan.js
    return plan.saved.view(small, "norms")[begin : begin + size].view(plan.levels, TABLE, plan.js)


def _gates(plan: Plan, small: Tensor) -> Tensor:
    begin = TABLE * (plan.cs + plan.levels * plan.js)
    return plan.saved.view(small, "norms")[begin:].view(plan.levels, TABLE, plan.cs)


def _shares(plan: Plan, small: Tensor) -> Tensor:
    return plan.saved.view(small, "shares")


def _counts(plan: Plan, small: Tensor) -> Tensor:
    """Values a channel, a scale, in this process."""
    counts = [plan.n * plan.grids.regions(k) for k in range(plan.levels)]
    return torch.stack([small.new_full((), count, dtype=torch.float32) for count in counts])
