"""New parameters join an optimiser, and leave it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer


def join(optimizer: Optimizer, new: Iterable[tuple[nn.Module, Iterable[nn.Parameter]]]) -> None:
    """Take in layers, each with the parameters it stands beside.

    Matrices go to the group of the last matrix beside them, vectors to that of the last vector.
    A group is added for layers beside frozen weights alone, and not once there is a scheduler,
    which has a rate for each group that was there (``initial_lr`` tells): then they go to the last
    group that has their like.
    """
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    strangers: list[nn.Parameter] = []
    for layer, beside in new:
        near: dict[bool, dict[str, Any]] = {}
        for parameter in beside:
            if id(parameter) in groups:
                near[parameter.ndim > 1] = groups[id(parameter)]
        for parameter in layer.parameters():
            group = near.get(parameter.ndim > 1) or near.get(parameter.ndim <= 1)
            (strangers if group is None else group["params"]).append(parameter)
    scheduled = any("initial_lr" in group for group in optimizer.param_groups)
    if scheduled:
        for parameter in strangers:
            _alike(optimizer, parameter)["params"].append(parameter)
    elif strangers:
        named = any("param_names" in group for group in optimizer.param_groups)
        unnamed = [(f"{number}", p) for number, p in enumerate(strangers)]  # see renaming
        optimizer.add_param_group({"params": unnamed if named else strangers})


def _alike(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
    """The last group with a matrix in it for a matrix, with a vector for a vector."""
    groups = optimizer.param_groups[::-1]
    matrix = parameter.ndim > 1
    return next((g for g in groups if any((p.ndim > 1) is matrix for p in g["params"])), groups[0])


def leave(optimizer: Optimizer, old: nn.Module) -> None:
    """Forget a layer's parameters, and what was remembered of them."""
    gone = {id(p) for p in old.parameters()}
    for group in optimizer.param_groups:
        group["params"][:] = [p for p in group["params"] if id(p) not in gone]
    for parameter in old.parameters():
        optimizer.state.pop(parameter, None)


@contextmanager
def renaming(optimizer: Optimizer | None, model: nn.Module) -> Iterator[None]:
    """An optimiser of named parameters calls them what they are called afterwards."""
    groups = [] if optimizer is None else optimizer.param_groups
    told = {
        id(p): name
        for group in groups
        for p, name in zip(group["params"], group.get("param_names", ()), strict=False)
    }
    before = {id(p): name for name, p in model.named_parameters()}
    yield
    outer = {
        p: told[p].removesuffix(n) for p, n in before.items() if told.get(p, "").endswith(n)
    }  # where the model is a part of what it trains
    usual = Counter(outer.values()).most_common(1)[0][0] if outer else ""
    found = {id(p): name for name, p in model.named_parameters()}
    now = {p: outer.get(p, usual) + n for p, n in found.items() if p in outer or p not in told}
    for group in () if optimizer is None else optimizer.param_groups:
        if "param_names" in group:
            group["param_names"][:] = [(told | now).get(id(p), "") for p in group["params"]]
