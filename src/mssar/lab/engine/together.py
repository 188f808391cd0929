"""What a step does to many small tensors, done to all of them at once: kernels are what a small
network spends its time on. In bf16 a ResNet-20 without recalibration takes 237 operations a step;
so 173, with the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.func import functional_call

from mssar.layer import MSSAR


class Lowered:
    """A network whose convolutions and linear layers use copies of their weights in half the bits.

    Autocast casts each weight by itself at every step, and each gradient back. Recalibrations keep
    their own: fused kernels read them as they are.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.model = model
        found = dict(_castable(model))
        self.names = list(found)
        self.weights: list[Tensor] = list(found.values())
        self.copies = [w.detach().to(dtype).requires_grad_() for w in self.weights]
        self.grads = [torch.empty_like(w) for w in self.weights]

    def __call__(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            torch._foreach_copy_(self.copies, self.weights)
        copies = dict(zip(self.names, self.copies, strict=True))
        logits: Tensor = functional_call(self.model, copies, (x,))
        return logits

    @torch.no_grad()
    def hand_back(self) -> None:
        """After going back: the weights get the gradients of their copies."""
        given = []
        for weight, copy, grad in zip(self.weights, self.copies, self.grads, strict=True):
            assert copy.grad is not None
            # Strides of a size of one mean nothing, but the fast way wants them equal.
            given.append(copy.grad.as_strided(grad.shape, grad.stride()))
            copy.grad, weight.grad = None, grad
        torch._foreach_copy_(self.grads, given)


def _castable(module: nn.Module, prefix: str = "") -> list[tuple[str, nn.Parameter]]:
    """The parameters that autocast would cast, by name."""
    if isinstance(module, MSSAR):
        return []
    if type(module) in (nn.Conv2d, nn.Linear):
        return [(prefix + name, p) for name, p in module.named_parameters()]
    return [
        found
        for name, child in module.named_children()
        for found in _castable(child, f"{prefix}{name}.")
    ]


class Counters:
    """The batches that norms have seen. Each would count by itself, and only checkpoints ask.

    In a forward pass a number on the host stands in for the counter; whoever has counted there is
    counted for. Norms that are fused with an MSSAR, and its own, are left to the kernels.
    """

    def __init__(self, model: nn.Module) -> None:
        self.norms = list(_counting(model))
        found = (norm.num_batches_tracked for norm in self.norms)
        self.counts = [count for count in found if count is not None]
        self.hosts = [torch.zeros((), dtype=torch.int64, device="cpu") for _ in self.counts]

    @contextmanager
    def together(self) -> Iterator[None]:
        """One forward pass."""
        for norm, host in zip(self.norms, self.hosts, strict=True):
            norm._buffers["num_batches_tracked"] = host.zero_()
        try:
            yield
        finally:
            for norm, count in zip(self.norms, self.counts, strict=True):
                norm._buffers["num_batches_tracked"] = count
        seen = [count for count, host in zip(self.counts, self.hosts, strict=True) if host]
        if seen:
            torch._foreach_add_(seen, 1)


def _counting(module: nn.Module) -> Iterator[nn.BatchNorm2d]:
    children = list(module.children())
    recalibrated = any(isinstance(child, MSSAR) for child in children)
    fused = getattr(module, "last_norm", None) if recalibrated else None
    for child in children:
        if type(child) is not nn.BatchNorm2d:
            yield from () if isinstance(child, MSSAR) else _counting(child)
        elif child is not fused and child.track_running_stats and child.momentum is not None:
            yield child
