"""The layer of a network that classifies, whatever it is called."""

from __future__ import annotations

from typing import Any

from torch import nn


def head(model: nn.Module) -> str:
    """Its name: of what the network says it is, else of the last linear layer."""
    ask: Any = getattr(model, "get_classifier", None)
    said = ask() if callable(ask) else None
    modules: dict[str, nn.Module] = dict(model.named_modules())
    for name, module in modules.items():
        if module is said and isinstance(module, (nn.Linear, nn.Conv2d)):
            return name
    linear = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
    if not linear:
        raise ValueError(f"{type(model).__name__} has no linear layer that would classify")
    return linear[-1]


def classes(model: nn.Module) -> int:
    """How many a network tells apart."""
    layer = model.get_submodule(head(model))
    assert isinstance(layer, (nn.Linear, nn.Conv2d))
    return layer.weight.shape[0]
