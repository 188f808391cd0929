"""A block's end: norm, recalibration, shortcut, activation.  N batch, C channels, H W map.

Alone each of them reads and writes the map. Where the kernels can stand in for all of them, they
take the passes that norm, addition and activation take anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Proxy

from mssar import fused, fusible
from mssar.branch import hooked
from mssar.coordinates import require_tensor
from mssar.layer import MSSAR

if TYPE_CHECKING:
    from jaxtyping import Float

ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "silu": F.silu,
    None: lambda x: x,
}
_NAMES = tuple(ACTIVATIONS)  # in which also a list may be looked for


def tail(
    y: Float[Tensor, "N C H W"],
    norm: nn.Module | None,
    recalibrate: nn.Module,
    shortcut: Float[Tensor, "N C H W"] | None = None,
    activation: str | None = "relu",
) -> Float[Tensor, "N C H W"]:
    """``activation(recalibrate(norm(y)) + shortcut)``: a residual block's end, fused on CUDA.

    Args:
        y: what the last convolution made.
        norm: the norm after it; None if there is none.
        recalibrate: an :class:`mssar.MSSAR`, or any other module, which is then simply called.
        shortcut: what is added; None if nothing is.
        activation: "relu", "silu", or None.

    In a block of one's own, in ``forward``::

        return mssar.tail(self.conv2(x), self.bn2, self.recalibrate, shortcut)

    Traced by torch.fx, every step is a node.
    """
    if activation not in _NAMES:
        raise ValueError(f"activation is 'relu', 'silu' or None; got {activation!r}")
    if not isinstance(y, Tensor) or not (shortcut is None or isinstance(shortcut, Tensor)):
        _require_recording(y, shortcut)  # type: ignore[unreachable]
    elif type(recalibrate) is MSSAR and not hooked(recalibrate):
        made = fused.tail(y, recalibrate, norm, shortcut, activation)
        if made is not None:
            return made
    _require_module("recalibrate", recalibrate)
    if norm is not None:
        _require_module("norm", norm)
    y = recalibrate(y if norm is None else norm(y))
    return ACTIVATIONS[activation](y if shortcut is None else _sum(y, shortcut))


def _require_module(what: str, module: object) -> None:
    if isinstance(module, type) or not callable(module):
        raise ValueError(f"{what} is a module; got {module!r:.60}")


def _sum(y: Tensor, shortcut: Tensor) -> Tensor:
    try:
        return y + shortcut
    except RuntimeError:
        # Looked at only now: to compare the sizes that a compiler leaves open would settle them.
        pairs = zip(reversed(y.shape), reversed(shortcut.shape), strict=False)
        if all(a == b or 1 in (a, b) for a, b in pairs):
            raise
        raise ValueError(
            f"shortcut is added to a map of shape {tuple(y.shape)}; got {tuple(shortcut.shape)}"
        ) from None


def _require_recording(y: object, shortcut: object) -> None:
    """Nothing but torch.fx's proxies may stand for tensors."""
    if not isinstance(y, Proxy):
        require_tensor("y", y)
    if not isinstance(shortcut, Proxy | None):
        require_tensor("shortcut", shortcut)


def path(norm: nn.Module | None, recalibrate: nn.Module) -> str:
    """Which way :func:`tail` goes with these modules, for a block's ``extra_repr``."""
    if type(recalibrate) is not MSSAR:
        return f"tail=unfused (recalibrated by {type(recalibrate).__name__})"
    return f"tail={fusible.running(recalibrate, norm)}"
