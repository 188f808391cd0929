"""How a network is told what to recalibrate its maps with: a factory from channels to a module."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from torch import nn

from mssar.layer import MSSAR
from mssar.networks import peers

Recalibration: TypeAlias = Callable[..., nn.Module]  # channels → module


def nothing(_channels: int) -> nn.Module:
    """No recalibration: the map as it is."""
    return nn.Identity()


def recalibrator(recalibration: Recalibration, channels: int, **context: int) -> nn.Module:
    """What a factory makes, if that is a module."""
    made = recalibration(channels, **context)
    if not isinstance(made, nn.Module):
        raise ValueError(
            f"a recalibration makes a module for so many channels; {recalibration!r} "
            f"made {type(made).__name__} for {channels}"
        )
    return made


# What each can be told: mssar/options.py.
RECALIBRATIONS: dict[str, Recalibration] = {
    "none": nothing,
    "se": partial(MSSAR, scales=(1,)),
    "mssar": MSSAR,
    "eca": peers.eca,
    "cbam": peers.cbam,
    "coord": peers.coord,
    "ela": peers.ela,
    "ge": peers.ge,
    "simam": peers.SimAM,
}
OURS = ("se", "mssar")  # which take a context and have a ``backend``
