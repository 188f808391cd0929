"""Other recalibrations to compare with: timm's modules by name, and SimAM.  N batch, H W map.

timm is imported when one of its modules is made, not before.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mssar.coordinates import require_count
from mssar.extras import advice

if TYPE_CHECKING:
    from jaxtyping import Float


def eca(channels: int) -> nn.Module:
    """ECA-Net's: the channels' means, convolved along the channels."""
    return _made("eca", "eca.EcaModule", channels)


def cbam(channels: int, reduction: int = 16) -> nn.Module:
    """CBAM: a weight for each channel, then one for each position."""
    require_count("reduction", reduction)
    return _made("cbam", "cbam.CbamModule", channels, rd_ratio=1 / reduction)


def coord(channels: int, reduction: int = 16) -> nn.Module:
    """Coordinate attention: a weight for each row and for each column, of every channel."""
    require_count("reduction", reduction)
    return _made("coord", "coord_attn.CoordAttn", channels, rd_ratio=1 / reduction)


def ela(channels: int) -> nn.Module:
    """Efficient local attention: rows and columns as well, each channel for itself."""
    return _made("ela", "coord_attn.EfficientLocalAttn", channels)


def ge(channels: int) -> nn.Module:
    """Gather-excite without parameters: a channel's own mean, through a sigmoid."""
    # With its MLP, or with parameters, it cannot be made by timm 1.0.30.
    return _made("ge", "gather_excite.GatherExcite", channels, use_mlp=False)


class SimAM(nn.Module):
    """A neuron weighs the more the further it is from its channel's mean; no parameters."""

    def __init__(self, channels: int, regularisation: float = 1e-4) -> None:
        super().__init__()
        self.channels = channels
        self.regularisation = regularisation

    def forward(self, x: Float[Tensor, "N C H W"]) -> Float[Tensor, "N C H W"]:
        apart = (x - x.mean((2, 3), keepdim=True)).square()
        variance = apart.sum((2, 3), keepdim=True) / max(x.shape[2] * x.shape[3] - 1, 1)
        return x * torch.sigmoid(apart / (4 * (variance + self.regularisation)) + 0.5)

    def extra_repr(self) -> str:
        return f"{self.channels}, regularisation={self.regularisation:g}"


def _made(name: str, place: str, channels: int, **options: Any) -> nn.Module:
    """The module at a place in ``timm.layers``."""
    try:
        import timm
    except ImportError as error:
        raise ValueError(
            f"{name!r} is timm's, which cannot be imported ({error}): {advice('timm')}"
        ) from None
    except RuntimeError as error:  # of a torchvision that does not fit the torch that is installed
        raise ValueError(f"{name!r} is timm's, which cannot be imported ({error})") from None
    file, kind = place.split(".")
    try:
        found = getattr(importlib.import_module(f"timm.layers.{file}"), kind)
    except (ImportError, AttributeError):
        raise ValueError(
            f"timm {timm.__version__} has no {kind} for {name!r}: pip install -U timm"
        ) from None
    made: nn.Module = found(channels, **options)
    return made
