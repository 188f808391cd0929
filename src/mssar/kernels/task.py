"""A map and the settings of its tail, as launches tell kernels of them.  N batch, C channels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mssar.kernels import interpreted
from mssar.kernels.geometry import Geometry
from mssar.kernels.plan import Plan, Products, plan, products
from mssar.kernels.shapes import PER_SCALE, Epsilons, width

NUMBER: Any = {"dtype": torch.float32}


@dataclass(frozen=True)
class Task:
    """``x`` has no holes: all maps of a launch lie in memory as it does."""

    x: Tensor
    gamma: Tensor | None
    beta: Tensor | None
    params: Sequence[Tensor]
    geo: Geometry
    eps: Epsilons
    precision: str

    def __post_init__(self) -> None:
        assert self.x.stride() == torch.empty_like(self.x, device="meta").stride()

    @property
    def shape(self) -> tuple[int, int]:
        return self.x.shape[0], self.x.shape[1]

    @property
    def levels(self) -> int:
        return len(self.params) // PER_SCALE

    @property
    def norm(self) -> bool:
        return self.gamma is not None

    @cached_property
    def cut(self) -> Plan:
        return plan(self.x, self.geo, weighed=self.levels > 0)

    def whole(self, cells: int) -> bool:
        """Whether a program that takes so many cells at once has one sample, and all of it.

        What it keeps of them then fits in the registers of two warps, in small types.
        """
        fits = self.x.element_size() == 2 and self.cut.grouped_warps > 1
        return fits and self.levels > 0 and self.cut.nested and cells == self.geo.cells

    @cached_property
    def sizes(self) -> Products:
        rows, small = self.shape[0] * self.geo.branch_rows, self.precision == "bf16"
        return products(rows, self.shape[1], width(self.params), small=small)

    def split(self, params: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """Ω₁ of every scale, γ₁ of every scale, …"""
        return [tuple(params[i::PER_SCALE]) for i in range(PER_SCALE)]

    def grid(self) -> dict[str, Any]:
        scales = self.geo.grids if self.levels else ()
        return {
            "DOWN": tuple(down for down, _ in scales),
            "ACROSS": tuple(across for _, across in scales),
            "ROWS_AT": self.geo.rows_at if self.levels else (),
        }

    def map(self) -> dict[str, Any]:
        cut = self.cut
        return {
            "H": self.x.shape[2],
            "W": self.x.shape[3],
            "FH": self.geo.fine[0],
            "FW": self.geo.fine[1],
            "BW": cut.columns,
            "CT": cut.channels,
            "RAGGED": self.x.shape[2] % self.geo.fine[0] != 0,
            "EVEN": self.x.shape[1] % cut.channels == 0,
            "BIG": self.x.numel() >= 1 << 31,
        }

    def product(self) -> dict[str, Any]:
        """Products are taken in float32 as cuDNN's convolutions are told to take it."""
        precision = self.precision
        if precision == "fp32":
            precision = "tf32" if _allows_tf32() else "ieee"
        elif precision == "fp16":
            precision = "tf32"  # as exact, and nothing is too large or too small for it
        if interpreted():
            precision = "ieee"  # the interpreter takes bfloat16's bits for numbers
        return {"PRECISION": precision}


def _allows_tf32() -> bool:
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:  # it was set in the newer way, and PyTorch refuses to mix the two
        convolution: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
        return bool(convolution.fp32_precision == "tf32")


def laid_out(x: Tensor, like: Tensor) -> Tensor:
    """A map that lies in memory as another does."""
    if x.stride() == like.stride():
        return x
    copy = torch.empty_strided(like.shape, like.stride(), dtype=x.dtype, device=x.device)
    return copy.copy_(x)


def dense_map(x: Tensor) -> Tensor:
    """A map without holes; the kernels' own maps then lie in memory as it does."""
    return laid_out(x, torch.empty_like(x, device="meta"))


_streams: dict[tuple[torch.device, int], torch.cuda.Stream] = {}


def beside(device: torch.device) -> torch.cuda.Stream | None:
    """A second stream that has waited for the current one; every stream has its own."""
    if device.type != "cuda":
        return None
    current = torch.cuda.current_stream(device)
    key = device, current.cuda_stream
    if key not in _streams:
        _streams[key] = torch.cuda.Stream(device)
    _streams[key].wait_stream(current)
    return _streams[key]
