"""Compile what a network will launch before its first step.  N batch, C channels, H W image.

The network runs once a size on tensors without storage, so nothing is computed, allocated or left
behind; of the ops that it calls, ours say which kernels they would launch. All kernels of all
blocks are then compiled side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

from mssar import fused
from mssar.cost import tensors
from mssar.kernels.dense import op as dense
from mssar.kernels.device import interpreted
from mssar.kernels.launch import warm as compiled
from mssar.kernels.tail import op
from mssar.kernels.tail.plan import Plan
from mssar.mode import mode, unchanged

PLANS: dict[str, Callable[..., Plan]] = {
    "mssar::tail": op.plan_of,
    "mssar::tail_forward": op.plan_of,
    "mssar::dense_step": dense.plan_of,
    "mssar::dense_step_forward": dense.plan_of,
    "mssar::region_means": dense.means_plan_of,
}


def warm(
    model: nn.Module,
    sizes: Iterable[Sequence[int]],
    *,
    training: bool | None = None,
    backward: bool | None = None,
    autocast: torch.dtype | None = None,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> int:
    """Compile the kernels of a network for images of these sizes, all at once; how many these were.

    None are where all are there already, and where no kernels run: on a CPU, without Triton, or
    with ``backend="reference"``. The network is left as it is.

    Args:
        model: a network that is called with one batch of images, on the device it will run on.
        sizes: N C H W of batches, such as ``[(256, 3, 224, 224)]``.
        training: with the norms as ``train()`` or as ``eval()`` sets them; by default as they are.
        backward: the gradients' kernels too; by default where the network trains.
        autocast: as under ``torch.autocast`` to this type; by default as it is here.
        memory_format: of the images.

    The windows of ``strategy="sliding"`` are compiled when they are first launched.
    """
    model = _itself(model)
    shapes = [_require_shape(size) for size in _require_sizes(sizes)]
    first = next((p for p in model.parameters() if p.is_floating_point()), None)
    if first is None or not (first.is_cuda or (interpreted() and first.device.type == "cpu")):
        return 0
    trains = model.training if training is None else training
    kernels = []
    for plan in _plans(model, shapes, first, training, autocast, memory_format):
        needed = plan.kernels(forward=True, backward=trains if backward is None else backward)
        kernels += [(plan.shape.device, kernel) for kernel in needed]
    kernels.sort(key=lambda pair: str(pair[0]))
    return sum(
        compiled([kernel for _, kernel in some], where)
        for where, some in groupby(kernels, key=lambda pair: pair[0])
    )


class _Seen(TorchDispatchMode):
    """Which of our ops are called, and what they would launch."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.plans: dict[Plan, None] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        planned = PLANS.get(func._schema.name)
        if planned is not None:
            self.plans[planned(*args)] = None
        return func(*args, **(kwargs or {}))


def _plans(
    model: nn.Module,
    shapes: list[tuple[int, ...]],
    first: Tensor,
    training: bool | None,
    autocast: torch.dtype | None,
    memory_format: torch.memory_format,
) -> list[Plan]:
    from torch._subclasses import FakeTensorMode

    hollow, seen = FakeTensorMode(), _Seen()
    typed = nullcontext() if autocast is None else torch.autocast(first.device.type, autocast)
    with (
        unchanged(model),
        mode(model, training),
        fused.rehearsed(),
        _unsynchronised(),
        torch.no_grad(),
    ):
        for shape in shapes:
            state: dict[str, Tensor] = {name: hollow.from_tensor(t) for name, t in tensors(model)}
            with hollow, typed, seen:
                images = torch.empty(shape, dtype=first.dtype, device=first.device)
                images = images.contiguous(memory_format=memory_format)
                functional_call(model, state, (images,), tie_weights=False)
    return list(seen.plans)


def _itself(model: nn.Module) -> nn.Module:
    """What ``torch.compile`` or a wrapper that trains over processes was given."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"warm takes a network; got {type(model).__name__}")
    wrappers = nn.DataParallel, nn.parallel.DistributedDataParallel
    while True:
        if isinstance(model, wrappers):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def _require_sizes(sizes: Iterable[Sequence[int]]) -> list[Sequence[int]]:
    said = "sizes are shapes N C H W, such as [(256, 3, 224, 224)]"
    if not isinstance(sizes, Iterable):
        raise ValueError(f"{said}; got {sizes!r}")
    return list(sizes)


def _require_shape(size: Sequence[int]) -> tuple[int, ...]:
    whole = isinstance(size, Sequence) and len(size) == 4
    if not whole or not all(type(n) is int and n > 0 for n in size):
        raise ValueError(f"sizes are shapes N C H W, such as [(256, 3, 224, 224)]; got {size!r}")
    return tuple(size)


@contextmanager
def _unsynchronised() -> Iterator[None]:
    """Other processes have nothing to say about what is launched, and may not be asking."""
    usual = nn.SyncBatchNorm.forward
    nn.SyncBatchNorm.forward = _BatchNorm.forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.SyncBatchNorm.forward = usual  # type: ignore[method-assign]
