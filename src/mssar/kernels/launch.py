"""Lean launching: kernels by their compiled handles, pointers as numbers, compiled side by side.

Triton's own way to a kernel looks at every argument of every launch, which takes longer than small
kernels do. Here the types of arguments are said beforehand (``Kernel``), no number is specialised,
and a launch hands addresses to the driver. Under Triton's interpreter, tensors go the ordinary way.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from mssar.kernels.device import interpreted
from mssar.kernels.driver import Function

# Of an argument: a pointer's element type, int, float, or a tuple of these.
Kind: TypeAlias = Any
Pointer: TypeAlias = Any  # an address, or under the interpreter a tensor
THREADS = 16  # that compile, at most
ALIGNED = 32  # bytes: where sections of memory begin


class Kernel:
    """A kernel for arguments of these types and these constants, compiled once a device.

    It is called with its arguments one after the other, those of tuples too.
    """

    __slots__ = ("_functions", "constants", "function", "kinds", "stages", "warps")

    def __init__(
        self,
        function: Any,
        kinds: Sequence[Kind],
        constants: dict[str, Any],
        warps: int,
        stages: int = 1,
    ) -> None:
        self.function = function
        self.kinds = tuple(kinds)
        self.constants = constants
        self.warps = warps
        self.stages = stages
        names = [p.name for p in getattr(function, "params", ())]
        if names:  # not under the interpreter
            assert names[len(kinds) :] == list(constants), (function, names[len(kinds) :])
        self._functions: dict[int, Function] = {}

    @property
    def formats(self) -> list[str]:
        """Of its arguments, as :mod:`struct` has them."""
        return [_format(kind) for kind in _flat(self.kinds)]

    def warm(self, device: int) -> Function:
        found = self._functions.get(device)
        if found is None:
            with torch.cuda.device(device):
                found = self._functions[device] = Function(device, self.compile(), self.formats)
        return found

    def compile(self) -> Any:
        from mssar.kernels.triton import keys

        keys.settle()
        args = [_example(kind) for kind in self.kinds]
        made = self.function.warmup(
            *args, grid=(1,), **self.constants, num_warps=self.warps, num_stages=self.stages,
            enable_fp_fusion=True,  # Triton 3.10 has another default
        )  # fmt: skip
        return made.result() if hasattr(made, "result") else made

    def __call__(self, where: Where, grid: tuple[int, int], *args: Any) -> None:
        if where.stream is None:
            self.function[grid](*_nested(iter(args), self.kinds), **self.constants)
            return
        found = self._functions.get(where.device) or self.warm(where.device)
        found(where.stream, grid, args)


_kernels: dict[Any, Kernel] = {}


def kernel(
    function: Any, kinds: Sequence[Kind], constants: dict[str, Any], warps: int, stages: int = 1
) -> Kernel:
    """The one for these; others that need the same share it."""
    key = (id(function), tuple(kinds), tuple(constants.items()), warps, stages)
    found = _kernels.get(key)
    if found is None:
        found = _kernels.setdefault(key, Kernel(function, kinds, constants, warps, stages))
    return found


def _flat(kinds: Iterable[Kind]) -> Iterator[Kind]:
    for kind in kinds:
        if isinstance(kind, tuple):
            yield from _flat(kind)
        else:
            yield kind


def _nested(args: Iterator[Any], kinds: Sequence[Kind]) -> tuple[Any, ...]:
    """Arguments as the kernel's code has them."""
    return tuple([_nested(args, k) if isinstance(k, tuple) else next(args) for k in kinds])


def _format(kind: Kind) -> str:
    return "Q" if isinstance(kind, torch.dtype) else "f" if kind is float else "i"


def _example(kind: Kind) -> Any:
    """An argument of this type."""
    if isinstance(kind, tuple):
        return tuple(_example(one) for one in kind)
    if isinstance(kind, torch.dtype):
        from triton.runtime.jit import MockTensor

        return MockTensor(kind)
    return 0.5 if kind is float else 7


_compiling = Lock()


def warm(kernels: Iterable[Kernel], device: torch.device) -> int:
    """Compile those that are not, side by side; how many. The interpreter's are counted alone."""
    if interpreted():
        index = -1
    elif device.type != "cuda":
        return 0
    else:
        index = torch.cuda.current_device() if device.index is None else device.index
    missing = [k for k in dict.fromkeys(kernels) if index not in k._functions]
    if not missing:
        return 0
    if index < 0:
        for k in missing:
            k._functions[index] = k.function
        return len(missing)
    from mssar.kernels.triton import keys

    keys.settle()  # before threads come in any order
    with _compiling:
        workers = max(1, min(THREADS, len(missing), os.cpu_count() or 1))
        with ThreadPoolExecutor(workers) as pool:
            for done in [pool.submit(k.warm, index) for k in missing]:
                done.result()
    return len(missing)


class Where(NamedTuple):
    """A device and its stream; none under the interpreter."""

    device: int
    stream: int | None


def where(x: Tensor) -> Where:
    if not x.is_cuda:
        return Where(-1, None)
    index = x.get_device()
    return Where(index, torch._C._cuda_getCurrentRawStream(index))


def pointer(x: Tensor) -> Pointer:
    return x.data_ptr() if x.is_cuda else x


def pointers(tensors: Sequence[Tensor]) -> tuple[Pointer, ...]:
    """Of tensors of one device."""
    return tuple(map(Tensor.data_ptr, tensors) if tensors[0].is_cuda else tensors)


class Layout:
    """Sections of one allocation, by name; each begins where whole vectors can be read."""

    __slots__ = ("_type", "bytes", "offsets", "sections")

    def __init__(self, kind: Any, sections: Sequence[tuple[torch.dtype, int]]) -> None:
        self._type, self.sections, self.bytes = kind, tuple(sections), 0
        offsets = []
        for dtype, count in sections:
            offsets.append(self.bytes)
            self.bytes += -(-count * dtype.itemsize // ALIGNED) * ALIGNED
        self.offsets = tuple(offsets)

    def view(self, memory: Tensor, name: str) -> Tensor:
        """One section of this memory."""
        i = self._type._fields.index(name)
        (dtype, count), at = self.sections[i], self.offsets[i]
        return memory.view(torch.uint8)[at : at + count * dtype.itemsize].view(dtype)

    def place(self, memory: Tensor) -> Any:
        """Where the sections lie in this memory."""
        if memory.is_cuda:
            base = memory.data_ptr()
            return self._type(*[base + offset for offset in self.offsets])
        return self._type(*[self.view(memory, name) for name in self._type._fields])
