"""A network's blocks, compiled one by one: those that are alike share what was compiled.

A whole network takes the compiler as long as it is deep, a ResNet-56 two minutes, although its
blocks are five programs. Calling these one by one costs the host more, which a CUDA graph hides.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

MOST = 0.8  # of a network must be in such blocks: the rest is not compiled
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def repeated(model: nn.Module) -> list[nn.Module]:
    """A network's blocks, of the kinds of which some have parameters of equal shapes."""
    several = Counter(type(module) for module in model.modules() if _is_block(module))
    blocks, inside = defaultdict[type[nn.Module], list[nn.Module]](list), set[nn.Module]()
    for module in model.modules():  # from the outside in
        if several[type(module)] > 1 and module not in inside:
            blocks[type(module)].append(module)
            inside.update(module.modules())
    alike = [some for some in blocks.values() if len(set(map(_shapes, some))) < len(some)]
    found = [block for some in alike for block in some]
    within = sum(map(_learning, found))
    return found if within >= MOST * _learning(model) else []


def _learning(module: nn.Module) -> int:
    """Modules in it that have parameters of their own."""
    return sum(next(one.parameters(recurse=False), None) is not None for one in module.modules())


def _is_block(module: nn.Module) -> bool:
    return next(module.children(), None) is not None and not isinstance(module, CONTAINERS)


def _shapes(module: nn.Module) -> tuple[Any, ...]:
    return tuple((name, t.shape) for name, t in module.state_dict().items())


class Compiled:
    """Blocks' compiled forward passes, for as long as they are wanted."""

    def __init__(self, blocks: list[nn.Module], **options: Any) -> None:
        self.forwards = {block: torch.compile(block.forward, **options) for block in blocks}

    @contextmanager
    def __call__(self) -> Iterator[None]:
        before = [vars(block).get("forward") for block in self.forwards]
        for block, forward in self.forwards.items():
            block.forward = forward
        try:
            yield
        finally:
            for block, own in zip(self.forwards, before, strict=True):
                del block.forward  # its class's again
                if own is not None:
                    block.forward = own
