"""What a GPU has, and whether the kernels run on it."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import NamedTuple

import torch

OLDEST = (8, 0)  # compute capability: bfloat16's products


class Device(NamedTuple):
    processors: int
    shared: int  # bytes that a program may have
    capability: tuple[int, int]


# What the interpreter stands for: few processors, whose programs come one after the other.
INTERPRETER = Device(4, 99 << 10, OLDEST)


def interpreted() -> bool:
    """Whether Triton was told to run kernels on the CPU, one program after the other."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@lru_cache(maxsize=64)
def _look(index: int | None) -> Device:
    found = torch.cuda.get_device_properties(index)
    shared = int(getattr(found, "shared_memory_per_block_optin", 0)) or 99 << 10
    return Device(found.multi_processor_count, shared, (found.major, found.minor))


def device_of(device: torch.device) -> Device:
    return _look(device.index) if device.type == "cuda" else INTERPRETER


def able(device: torch.device) -> bool:
    """Whether a CUDA device runs the kernels."""
    return torch.version.hip is None and device_of(device).capability >= OLDEST


# What torch.compiler.assume_constant_result does, which would import all of the compiler.
able._dynamo_marked_constant = True  # type: ignore[attr-defined]
