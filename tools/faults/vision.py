"""torchvision, where it is installed."""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch

OPERATORS = torch.library.Library("torchvision", "FRAGMENT")  # lives as long as it is needed


@cache
def has_torchvision() -> bool:
    """Also where its compiled operators, of which none is used, do not fit the torch here."""
    if find_spec("torchvision") is None:
        return False
    try:
        import_module("torchvision")
    except RuntimeError:
        for name in [name for name in sys.modules if name.startswith("torchvision")]:
            del sys.modules[name]
        for name in ("nms", "qnms"):
            OPERATORS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import_module("torchvision")
    return True
