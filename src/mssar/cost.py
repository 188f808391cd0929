"""What a network costs: parameters, and multiply-adds of one image.

Multiply-adds are those of convolutions and matrix products, half of what
``torch.utils.flop_counter`` counts; sums, products by weights and activations are left out, as in
the papers. Nothing is computed: the network runs on tensors without storage.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.module_tracker import ModuleTracker

from mssar.layer import MSSAR
from mssar.mode import mode, unchanged


@dataclass(frozen=True)
class Entry:
    """One module with all that it holds."""

    name: str
    kind: str
    params: int
    macs: int
    recalibrates: bool


@dataclass(frozen=True)
class Cost:
    """Totals, the recalibration's share of them, and every module by name."""

    params: int
    macs: int
    recalibration_params: int
    recalibration_macs: int
    modules: tuple[Entry, ...]

    def __getitem__(self, name: str) -> Entry:
        for entry in self.modules:
            if entry.name == name:
                return entry
        raise KeyError(f"no module {name!r}")

    def table(self, depth: int = 1) -> list[Entry]:
        """The modules down to a depth in the tree, and every recalibration whatever its depth."""
        return [e for e in self.modules if e.recalibrates or e.name.count(".") < depth]

    def __str__(self) -> str:
        lines = [(e.name, e.kind, f"{e.params:,}", f"{e.macs:,}") for e in self.table()]
        share = f"{self.recalibration_params:,}", f"{self.recalibration_macs:,}"
        lines = [
            ("module", "kind", "parameters", "multiply-adds"),
            *lines,
            ("recalibration", "", *share),
            ("total", "", f"{self.params:,}", f"{self.macs:,}"),
        ]
        a, b, c, d = (max(map(len, column)) for column in zip(*lines, strict=True))
        return "\n".join(f"{m:<{a}}  {k:<{b}}  {p:>{c}}  {n:>{d}}" for m, k, p, n in lines)


def cost(model: nn.Module, size: tuple[int, int, int] = (3, 224, 224)) -> Cost:
    """Parameters and multiply-adds for one image of ``size`` C H W; the model is left as it is."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"cost counts a module; got {type(model).__name__}")
    flops = run_hollow(model, require_size(size))
    root = type(model).__name__
    within: tuple[str, ...] = ()  # the recalibrations met so far, so that none counts twice
    entries = []
    for name, module in model.named_modules():
        if not name:
            continue
        named = name.split(".")[-1] == "recalibrate" and not isinstance(module, nn.Identity)
        recalibrates = (named or isinstance(module, MSSAR)) and not name.startswith(within)
        if recalibrates:
            within += (f"{name}.",)
        macs = flops.get(f"{root}.{name}", 0) // 2
        entries.append(Entry(name, type(module).__name__, _count(module), macs, recalibrates))
    shares = [e for e in entries if e.recalibrates]
    if isinstance(model, MSSAR):
        shares = [Entry("", root, _count(model), flops.get("Global", 0) // 2, True)]
    return Cost(
        params=_count(model),
        macs=flops.get("Global", 0) // 2,
        recalibration_params=sum(e.params for e in shares),
        recalibration_macs=sum(e.macs for e in shares),
        modules=tuple(entries),
    )


def require_size(size: tuple[int, int, int]) -> tuple[int, int, int]:
    if not isinstance(size, Sequence) or len(size) != 3 or not all(map(_counts, size)):
        raise ValueError(f"size is C, H, W of one image, such as (3, 32, 32); got {_said(size)}")
    return size


def _said(size: object) -> str:
    """Of arrays the kind and shape: their numbers are many lines."""
    shape = getattr(size, "shape", None)
    found = f"{size!r:.60}" if shape is None else f"a {type(size).__name__} of shape {tuple(shape)}"
    return " ".join(found.split())


def run_hollow(model: nn.Module, size: tuple[int, int, int]) -> dict[str, int]:
    """Run one image through a network on tensors without storage: what each module does, in flops.

    Hooks see the shapes, those of the model's owner too; the model is left as it is.
    """
    from torch.utils.flop_counter import FlopCounterMode  # imports Triton

    hollow = {name: torch.empty_like(t, device="meta") for name, t in tensors(model)}
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    image = torch.empty(1, *size, device="meta", dtype=dtype)
    counter = FlopCounterMode(display=False)
    counter.mod_tracker = _Tracker()
    # Some write down what they made of the last image, which here has no numbers.
    with unchanged(model), mode(model, training=False), torch.no_grad(), counter:
        # Every slot is named once: PyTorch's own tying does not give a shared module its own back.
        functional_call(model, hollow, (image,), tie_weights=False)
    return {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}


class _Tracker(ModuleTracker):
    """Which modules run in this thread: PyTorch's takes those of all threads for one network's."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def _fw_pre_hook(self, *call: Any) -> None:
        if threading.get_ident() == self._thread:
            super()._fw_pre_hook(*call)

    def _fw_post_hook(self, *call: Any) -> None:
        if threading.get_ident() == self._thread:
            super()._fw_post_hook(*call)


def tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every module's own parameters and buffers, each module once, also where it is shared."""
    for name, module in model.named_modules():
        for own in (module._parameters, module._buffers):
            for key, tensor in own.items():
                if tensor is not None:
                    yield ".".join(filter(None, (name, key))), tensor


def _counts(n: object) -> bool:
    return isinstance(n, SupportsIndex) and not isinstance(n, bool) and operator.index(n) > 0


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
