"""A network's mode, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
