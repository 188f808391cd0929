"""How a kernel becomes a torch op: its schema, what it computes, its shapes, its gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor


def register(
    name: str,
    schema: str,
    compute: Callable[..., Any],
    shapes: Callable[..., Any] | None = None,
    *,
    mutates: Sequence[str] = (),
    save: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> None:
    """Make ``torch.ops.mssar.<name>``; a second copy of this package finds it there already."""
    if hasattr(torch.ops.mssar, name):
        return
    op = torch.library.custom_op(
        f"mssar::{name}", _there(compute), mutates_args=mutates, schema=schema
    )
    if shapes is not None:
        op.register_fake(shapes)
    if backward is not None:
        op.register_autograd(backward, setup_context=save)


def _there(compute: Callable[..., Any]) -> Callable[..., Any]:
    """On the device of its first tensor: Triton launches on the current one, whatever it gets."""

    @wraps(compute)
    def guarded(*args: Any) -> Any:
        flat = (t for arg in args for t in (arg if isinstance(arg, (list, tuple)) else (arg,)))
        first = next(t for t in flat if isinstance(t, Tensor))
        with torch.cuda.device_of(first):
            return compute(*args)

    return guarded
