"""How kernels become torch ops: schema, what is computed, shapes, gradient.

By the low-level library, since a ``custom_op`` looks at every tensor of every call for aliases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_library = torch.library.Library("mssar", "FRAGMENT")
_TAGS = [torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order]


def register(
    name: str,
    schema: str,
    compute: Callable[..., Any],
    shapes: Callable[..., Any],
    *,
    save: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
    traced: Callable[..., Any] | None = None,
) -> None:
    """Make ``torch.ops.mssar.<name>``; a second copy of this package finds it there already.

    A gradient is either a formula, ``save`` and ``backward``, which costs every call of the op some
    time, or ``traced``: what autograd sees instead of the op, made of ops that have none. Compiled
    graphs call these alone.
    """
    if hasattr(torch.ops.mssar, name):
        return
    _library.define(name + schema, tags=_TAGS)
    _library.impl(name, compute, "CompositeExplicitAutograd")
    if traced is not None:
        _library.impl(name, traced, "Autograd")
    torch.library.register_fake(f"mssar::{name}", shapes, lib=_library)
    if backward is not None:
        torch.library.register_autograd(
            f"mssar::{name}", backward, setup_context=save, lib=_library
        )
