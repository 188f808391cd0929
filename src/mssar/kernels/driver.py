"""CUDA's driver, as far as launching goes: a compiled kernel is loaded, and handed its arguments.

Triton has a launcher for that, which up to 3.6 is a C module a signature, all of one name. Python
gives a module of its own only to the first that loads such a file; who loads it again gets the one
that was loaded last, whoever uses it, with the functions exchanged. So kernels that are loaded in
several threads may end up with each other's launchers. Here there is none to compile or to load.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Sequence
from functools import cache
from threading import get_ident
from typing import Any

# CUlaunchConfig: grid, block, bytes of shared memory, stream, attributes and how many.
CONFIG = "7IQQI"
SCRATCH = 2  # pointers that Triton puts after the arguments: none of our kernels uses them
WARP = 32
FREE_SHARED = 48 << 10  # bytes that a program has without asking
MAX_DYNAMIC_SHARED, PREFER_SHARED = 8, 1  # of the driver's enumerations
NO_CONTEXT = 201


class Function:
    """A kernel on a device. ``formats`` are of its arguments, as :mod:`struct` has them."""

    __slots__ = (
        "_block", "_formats", "_handle", "_launch", "_pack", "_shared", "_slots", "device", "name"
    )  # fmt: skip

    def __init__(self, device: int, made: Any, formats: Sequence[str]) -> None:
        """In the context of this device, of what Triton has made."""
        meta = made.metadata
        scratch = [getattr(meta, f"{kind}_scratch_size", 0) for kind in ("global", "profile")]
        if any(scratch) or getattr(meta, "num_ctas", 1) != 1:
            raise RuntimeError(f"{meta.name} was compiled in a way that it cannot be launched")
        self.device, self.name = device, str(meta.name)
        self._block, self._shared = WARP * int(meta.num_warps), int(meta.shared)
        self._formats = "".join(formats)
        self._pack = struct.Struct(f"@{CONFIG}{self._formats}{SCRATCH}Q").pack_into
        self._handle = _load(device, made.asm["cubin"], self.name, self._shared)
        self._launch = _driver().cuLaunchKernelEx
        _require_arguments(self._handle, self.name, formats)
        # Memory for arguments, a thread's own: packing and launching are two steps. A signal's
        # handler that launches the same kernel between them would be one too many.
        self._slots: dict[int, tuple[Any, int, int, Any]] = {}

    def _slot(self) -> tuple[Any, int, int, Any]:
        """Memory for the configuration and the arguments; where it is, and where its table is."""
        offsets, size = _offsets(self._formats)
        memory = ctypes.create_string_buffer(size)
        base = ctypes.addressof(memory)
        table = (ctypes.c_void_p * len(offsets))(*[base + at for at in offsets])
        made = memory, base, ctypes.addressof(table), table
        self._slots[get_ident()] = made
        return made

    def __call__(self, stream: int, grid: tuple[int, int], args: tuple[Any, ...]) -> None:
        memory, base, table, _ = self._slots.get(get_ident()) or self._slot()
        self._pack(
            memory, 0, grid[0], grid[1], 1, self._block, 1, 1, self._shared, stream, 0, 0,
            *args, 0, 0,
        )  # fmt: skip
        if status := self._launch(base, self._handle, table, None):
            self._again(status, base, table)

    def _again(self, status: int, base: int, table: int) -> None:
        """A thread that has not used the device yet has no context."""
        if status == NO_CONTEXT:
            _enter(self.device)
            status = self._launch(base, self._handle, table, None)
        _require(status, f"launch {self.name}")


def _offsets(formats: str) -> tuple[list[int], int]:
    """Where arguments lie after the configuration, and the size of it all."""
    every = f"{formats}{'Q' * SCRATCH}"
    ends = [struct.calcsize(f"@{CONFIG}{every[: i + 1]}") for i in range(len(every))]
    return [end - struct.calcsize(kind) for end, kind in zip(ends, every, strict=True)], ends[-1]


def _load(device: int, binary: bytes, name: str, shared: int) -> int:
    driver = _driver()
    _enter(device)
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    what = f"load {name}"
    _require(driver.cuModuleLoadData(ctypes.byref(module), binary), what)
    found = driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode())
    _require(found, what)
    if shared > FREE_SHARED:
        _require(driver.cuFuncSetCacheConfig(function, PREFER_SHARED), what)
        asked = driver.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED, shared)
        _require(asked, f"{what}, which takes {shared >> 10} KiB of shared memory")
    assert function.value is not None
    return function.value


def _require_arguments(handle: int, name: str, formats: Sequence[str]) -> None:
    """Whether the kernel takes what it will be given, where the driver can tell (CUDA 12.4)."""
    ask = getattr(_driver(), "cuFuncGetParamInfo", None)
    if ask is None:
        return
    at, size = ctypes.c_size_t(), ctypes.c_size_t()
    found: list[int] = []
    for number in range(len(formats)):  # beyond the last is an error, which sanitizers report
        index = ctypes.c_size_t(number)
        if ask(ctypes.c_void_p(handle), index, ctypes.byref(at), ctypes.byref(size)):
            break
        found.append(size.value)
    if reason := misfit(found, formats):
        raise RuntimeError(f"{name} {reason}")


def misfit(taken: list[int], formats: Sequence[str]) -> str | None:
    """Why a kernel that takes arguments of so many bytes cannot be given these."""
    given = [struct.calcsize(kind) for kind in formats]
    rest = taken[len(given) :]
    if taken[: len(given)] == given and rest in ([], [8], [8] * SCRATCH):
        return None
    return f"takes arguments of {taken} bytes; it would be given {given}"


def _enter(device: int) -> None:
    """Make PyTorch's context of the device this thread's, if it has none."""
    driver, context, number = _driver(), ctypes.c_void_p(), ctypes.c_int()
    if not driver.cuCtxGetCurrent(ctypes.byref(context)) and context.value:
        return
    _require(driver.cuDeviceGet(ctypes.byref(number), device), "find the device")
    what = "enter the device's context"
    _require(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), number), what)
    _require(driver.cuCtxSetCurrent(context), what)


def _require(status: int, what: str) -> None:
    if not status:
        return
    said = ctypes.c_char_p()
    _driver().cuGetErrorString(status, ctypes.byref(said))
    why = said.value.decode() if said.value else f"error {status}"
    raise RuntimeError(f"CUDA could not {what}: {why}; an earlier kernel may be to blame")


@cache
def _driver() -> Any:
    found = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    found.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    return found
