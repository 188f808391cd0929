"""The processes that train one network together: one, or as many as torchrun started."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mssar.lab.engine import lookout

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True)
class World:
    """This process among the others. One by itself needs no communication."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this process is the one that writes."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, flag: bool, device: torch.device) -> bool:
        """Whether any process says so; all get the same answer."""
        if self.size == 1:
            return flag
        return bool(self.sum(torch.tensor([float(flag)], device=device)).item())

    def union(self, names: Iterable[str]) -> set[str]:
        """What any process has; all get the same answer."""
        if self.size == 1:
            return set(names)
        found: list[list[str]] = [[] for _ in range(self.size)]
        dist.all_gather_object(found, list(names))
        return set().union(*found)

    def wait(self) -> None:
        """Until everybody is here."""
        if self.size > 1:
            dist.barrier()

    def share(self, tensors: list[Tensor]) -> None:
        """Everybody gets the leader's values."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, 0)


def launched() -> bool:
    """Whether torchrun, or something like it, started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def leads() -> bool:
    """Whether this process is the one that writes, asked before the world is joined."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def joined(device: torch.device) -> Iterator[World]:
    """The world torchrun's environment describes; by itself, without it."""
    if not launched():
        yield World()
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    bound = device if device.type == "cuda" else None
    with _in_touch():
        dist.init_process_group(backend, timeout=timedelta(minutes=30), device_id=bound)
        try:
            world = World(dist.get_rank(), dist.get_world_size())
            with lookout.kept(world):
                yield world
        finally:
            dist.destroy_process_group()


@contextmanager
def _in_touch() -> Iterator[None]:
    """What is said when a connection breaks is one line."""
    try:
        yield
    except RuntimeError as error:
        said = str(error).partition("\n")[0] or type(error).__name__
        if not isinstance(error, dist.DistError) and "gloo" not in said.lower():
            raise
        said = re.sub(r"^\[[^]]*\] ", "", said).partition(". ")[0]  # the place in its source
        who = f"process {os.environ.get('RANK', '?')} of {os.environ['WORLD_SIZE']}"
        raise ConnectionError(
            f"{who} lost touch with the others ({said:.160}); {lookout.KEPT}"
        ) from error


class _Sum(torch.autograd.Function):
    """A sum over processes. Every process's result depends on every input: so do gradients."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        total = grad.contiguous().clone()
        dist.all_reduce(total)
        return total


class SynchronisedBatchNorm2d(nn.BatchNorm2d):
    """BN over the global batch, on any device: torch.nn.SyncBatchNorm refuses CPUs."""

    def forward(self, x: Float[Tensor, "N C H W"]) -> Float[Tensor, "N C H W"]:
        if not (self.training and dist.is_initialized()):
            return super().forward(x)
        rank, size = dist.get_rank(), dist.get_world_size()
        values = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        variance, mean = torch.var_mean(values, (0, 2, 3), correction=0)
        count = torch.full_like(mean, x.numel() / x.shape[1])
        # A sum in which each process fills its own row gathers all, and its gradient is a sum too.
        rows = torch.stack([mean, variance, count]).expand(size, -1, -1)
        mine = torch.arange(size, device=x.device) == rank
        rows = torch.where(mine[:, None, None], rows, torch.zeros_like(rows))
        rows = cast("Tensor", _Sum.apply(rows))  # type: ignore[no-untyped-call]
        means, variances, counts = rows.unbind(1)
        total = counts.sum(0)
        share = counts / total
        mean = (share * means).sum(0)
        variance = (share * (variances + (means - mean).square())).sum(0)
        self._track(mean.detach(), variance.detach(), total)
        scale = (variance + self.eps).rsqrt() * self.weight
        shape = (1, -1, 1, 1)
        y = (values - mean.view(shape)) * scale.view(shape) + self.bias.view(shape)
        return y.to(x.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, total: Tensor) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        rate = self.momentum
        if rate is None:
            rate = 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), rate)
        unbiased = variance * total / (total - 1).clamp(min=1)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), rate)


def synchronise_norms(model: nn.Module, device: torch.device) -> nn.Module:
    """Every BN of a network over the global batch; the same parameters under the same names."""
    # timm has norms with an activation in them, which torch would leave out without a word.
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    active = any(type(m).__module__.startswith("timm.") for m in norms)
    if device.type == "cuda":
        library: Any = import_module("timm.layers") if active else nn.SyncBatchNorm
        return cast("nn.Module", library.convert_sync_batchnorm(model))
    if active:
        raise ValueError("on CPUs norms of timm's cannot run over the global batch: --local-bn")
    for module in model.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = SynchronisedBatchNorm2d  # the same state, another forward
    return model
