"""A block's tail: BN, recalibration, shortcut, relu.  N batch, C channels, H W map.

Alone each of them reads and writes the map. Where the kernels can stand in for all four, they take
the passes that BN, addition and relu take anyway.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn

from mssar.kernels import AVAILABLE, chosen, fused, require_backend
from mssar.layer import MSSAR

if TYPE_CHECKING:
    from jaxtyping import Float


class Nothing(nn.Identity):
    """No recalibration. A block's tail is PyTorch's own then, unless the back end is Triton."""

    def __init__(self, backend: str = "reference") -> None:
        super().__init__()
        require_backend(backend)
        self.backend = backend


def tail(
    y: Float[Tensor, "N C H W"],
    norm: nn.Module,
    recalibrate: nn.Module,
    shortcut: Float[Tensor, "N C H W"],
) -> Float[Tensor, "N C H W"]:
    """``relu(recalibrate(norm(y)) + shortcut)``."""
    if obstacle(norm, recalibrate) is None:
        layer = recalibrate if isinstance(recalibrate, MSSAR) else None
        backend = str(recalibrate.backend)
        if chosen(backend, y) and fused.fits(y, layer, norm, shortcut):
            return fused.run(y, layer, norm, shortcut, relu=True)
    return F.relu(recalibrate(norm(y)) + shortcut)


def obstacle(norm: nn.Module, recalibrate: nn.Module) -> str | None:
    """Why these two cannot be fused, if they cannot."""
    if type(recalibrate) not in (MSSAR, Nothing):
        return f"recalibrated by {type(recalibrate).__name__}"
    if fused.hooked(recalibrate):
        return f"{type(recalibrate).__name__} has hooks"
    if recalibrate.backend == "reference":
        return "backend 'reference'"
    if not AVAILABLE:
        return "Triton is not installed"
    if isinstance(recalibrate, MSSAR):
        if recalibrate.context_channels is not None:
            return "the weights come from another map"
        return fused.obstacle(recalibrate, norm)
    return fused.obstacle(None, norm)


def path(norm: nn.Module, recalibrate: nn.Module) -> str:
    """Which way a block goes, for its ``extra_repr``."""
    reason = obstacle(norm, recalibrate)
    return "tail=fused on CUDA" if reason is None else f"tail=unfused ({reason})"
