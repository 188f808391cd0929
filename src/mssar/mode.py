"""What a network is, for a while, and was."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def mode(model: nn.Module, training: bool | None) -> Iterator[None]:
    """Training or evaluation, None for as it is; afterwards each module is as it was by itself."""
    before = [(module, module.training) for module in model.modules()]
    try:
        if training is not None:
            model.train(training)
        yield
    finally:
        for module, was in before:
            module.training = was


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Whatever its forward writes down is gone afterwards: each module has the attributes that it
    had, and the dictionaries and lists among them hold what they held."""
    held: list[Any] = [module.__dict__ for module in model.modules()]
    held += [v for own in held for v in own.values() if type(v) in (dict, OrderedDict, list)]
    before = [container.copy() for container in held]
    try:
        yield
    finally:
        for container, was in zip(held, before, strict=True):
            if _ids(container) != _ids(was):
                container.clear()
                container.extend(was) if isinstance(container, list) else container.update(was)


def _ids(container: Any) -> list[tuple[Any, int]]:
    found = container.items() if isinstance(container, dict) else enumerate(container)
    return [(key, id(value)) for key, value in found]
