"""The average of a network's weights over the steps of its training, the latest counting most."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import nn


class Average:
    """A copy of a network whose numbers follow the original's.

    After every step a share ``decay`` of each is what it was, and the rest what the original has
    now; BN's statistics as well. Whole numbers are copied. The tensors stay where they are, so
    that a graph may hold the update, and another a test.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = deepcopy(model).requires_grad_(False).eval()
        self.rate = 1 - decay
        pairs = list(
            zip(self.model.state_dict().values(), model.state_dict().values(), strict=True)
        )
        self._following = [pair for pair in pairs if pair[0].is_floating_point()]
        self._copied = [pair for pair in pairs if not pair[0].is_floating_point()]

    @torch.no_grad()
    def update(self) -> None:
        """Issue an update: on a GPU, whatever the number of tensors, a few launches."""
        mine, theirs = zip(*self._following, strict=True)
        torch._foreach_lerp_(mine, theirs, self.rate)
        if self._copied:
            mine, theirs = zip(*self._copied, strict=True)
            torch._foreach_copy_(mine, theirs)
