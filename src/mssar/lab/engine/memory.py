"""Want of memory, of whatever kind: known without torch, which a command may do without."""

from __future__ import annotations

import errno
from collections.abc import Iterator

ADVICE = "a smaller --batch or --fleet needs less"
# A CPU's allocator, cuBLAS and the driver have no type of their own for it.
_SIGNS = ("out of memory", "can't allocate memory", "ALLOC_FAILED")


def lacking(error: BaseException) -> str | None:
    """What is said of memory that ran out, also where that broke a capture, which is then what is
    raised; None of other errors."""
    first = next((each for each in _causes(error) if _lacks(each)), None)
    return None if first is None else next(iter(str(first).splitlines()), "out of memory")


def _lacks(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
