"""How a kernel becomes a torch op: its schema, what it computes, its shapes, its gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


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
    op = torch.library.custom_op(f"mssar::{name}", compute, mutates_args=mutates, schema=schema)
    if shapes is not None:
        op.register_fake(shapes)
    if backward is not None:
        op.register_autograd(backward, setup_context=save)
