"""Keys of kernels in Triton's cache on disk, the same in every process.

A function's key holds the constants that are used by the functions it calls, but (in Triton 3.6;
3.9 has it right) only of those that were looked at before it. So the key depends on what was
compiled first, and where threads compile, on chance: a new process would not find kernels that are
there.
"""

from functools import cache
from types import ModuleType

from mssar.kernels.triton import (
    cells,
    common,
    dense,
    gates,
    maps,
    prepare,
    rows,
    rows_backward,
    track,
    windows,
)

# Whoever calls comes after what it calls, here and in each file.
MODULES: tuple[ModuleType, ...] = (
    common, cells, maps, prepare, rows, track, gates, rows_backward, dense, windows
)  # fmt: skip


@cache
def settle() -> None:
    """Look at every function, what is called first."""
    for module in MODULES:
        for value in vars(module).values():
            getattr(value, "cache_key", None)
