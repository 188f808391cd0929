"""The layer of a network that classifies, whatever it is called."""

from __future__ import annotations

from typing import Any

from torch import nn


def head(model: nn.Module) -> str:
    """Its name: what the network says, else the last linear layer's."""
    ask: Any = getattr(model, "get_classifier", None)
    said = ask() if callable(ask) else None
    modules: dict[str, nn.Module] = dict(model.named_modules())
    for name, module in modules.items():
        if module is said and isinstance(module, (nn.Linear, nn.Conv2d)):
            return name
    for kind in (nn.Linear, nn.Conv2d):  # a few end in a convolution
        found = [name for name, module in modules.items() if isinstance(module, kind)]
        if found:
            return found[-1]
    raise ValueError(f"{type(model).__name__} has no layer that would classify")


def classes(model: nn.Module) -> int:
    """How many a network tells apart."""
    layer = model.get_submodule(head(model))
    assert isinstance(layer, (nn.Linear, nn.Conv2d))
    return layer.weight.shape[0]
