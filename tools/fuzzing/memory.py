"""Memory that tells what is read before it is written, and what is written beside its place."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

MARGIN = 256  # bytes before and behind a buffer; what is aligned stays so
PATTERN = 0xA5
BLOCKS = {1 << 9: 32, 1 << 16: 8, 2 << 20: 4, 20 << 20: 2}  # bytes: how many, of the allocator's


def poison(scale: float = 1.0) -> None:
    """Fill memory that the allocator holds free with NaN."""
    if not torch.cuda.is_initialized():
        return
    held = [
        torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")
        for size, count in BLOCKS.items()
        for _ in range(max(1, int(count * scale)))
    ]
    del held


class Guards:
    """Buffers between margins that nobody may write to."""

    def __init__(self, poisoned: bool = True) -> None:
        self.poisoned = poisoned
        self._held: list[tuple[str, Tensor, int]] = []

    def make(self, usual: Any, *args: Any, **options: Any) -> Tensor:
        """What ``usual``, ``torch.empty`` or ``torch.empty_like``, would make."""
        like = usual(*args, **{**options, "device": "meta"})
        place = options.get("device") or getattr(args[0], "device", "cpu")
        count = like.numel() * like.itemsize
        room = torch.empty(count + 2 * MARGIN, dtype=torch.uint8, device=place)
        room[:MARGIN] = room[MARGIN + count :] = PATTERN
        if self.poisoned:
            room[MARGIN : MARGIN + count] = 0xFF
        self._held.append((f"{tuple(like.shape)} {like.dtype}", room, count))
        made = torch.empty(0, dtype=like.dtype, device=place)
        # Not a view: autograd treats those in their own way.
        return made.set_(room.untyped_storage(), MARGIN // like.itemsize, like.shape, like.stride())

    def broken(self) -> list[str]:
        """Which buffers' margins were written to."""
        if not self._held:
            return []
        intact = [
            (room[:MARGIN] == PATTERN).all() & (room[MARGIN + count :] == PATTERN).all()
            for _, room, count in self._held
        ]
        intact = torch.stack(intact).tolist()
        told = [name for (name, _, _), kept in zip(self._held, intact, strict=True) if not kept]
        self._held.clear()
        return told


class _Torch:
    """torch, but for where memory comes from."""

    def __init__(self, guards: Guards) -> None:
        self._guards = guards

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *args: Any, **options: Any) -> Tensor:
        return self._guards.make(torch.empty, *args, **options)

    def empty_like(self, *args: Any, **options: Any) -> Tensor:
        return self._guards.make(torch.empty_like, *args, **options)


@contextmanager
def guarded(guards: Guards) -> Iterator[None]:
    """Everything that the kernels' files allocate lies between margins meanwhile."""
    # By name, and not by a mode of torch's: gradients are computed in other threads.
    files: list[ModuleType] = [
        file
        for name, file in list(sys.modules.items())
        if name.startswith("mssar.kernels") and getattr(file, "torch", None) is torch
    ]
    for file in files:
        file.torch = _Torch(guards)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for file in files:
            file.torch = torch  # type: ignore[attr-defined]
