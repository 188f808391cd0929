"""New parameters join an optimiser, and leave it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer


def join(optimizer: Optimizer, new: Iterable[tuple[str, nn.Module, nn.Module]]) -> None:
    """Take in layers, each with its name and the block it stands in.

    Matrices go to the group of the block's last matrix, vectors to that of its last vector. A
    group is added for layers beside frozen weights alone, and not once there is a scheduler, which
    has a rate for each group that was there: then they go to the last group that has their like.
    """
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    strangers: list[tuple[str, nn.Parameter]] = []
    for name, layer, block in new:
        near: dict[bool, dict[str, Any]] = {}
        for parameter in block.parameters():
            if id(parameter) in groups:
                near[parameter.ndim > 1] = groups[id(parameter)]
        for own, parameter in layer.named_parameters(prefix=name):
            group = near.get(parameter.ndim > 1) or near.get(parameter.ndim <= 1)
            if group is None:
                strangers.append((own, parameter))
            else:
                _add(group, own, parameter)
    if any("initial_lr" in group for group in optimizer.param_groups):
        for own, parameter in strangers:
            _add(_alike(optimizer, parameter), own, parameter)
    elif strangers:
        named = "param_names" in optimizer.param_groups[0]
        optimizer.add_param_group({"params": strangers if named else [p for _, p in strangers]})


def _add(group: dict[str, Any], name: str, parameter: nn.Parameter) -> None:
    group["params"].append(parameter)
    if "param_names" in group:  # made of named parameters
        group["param_names"].append(name)


def _alike(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
    """The last group with a matrix in it for a matrix, with a vector for a vector."""
    groups = optimizer.param_groups[::-1]
    matrix = parameter.ndim > 1
    return next((g for g in groups if any((p.ndim > 1) is matrix for p in g["params"])), groups[0])


def leave(optimizer: Optimizer, old: nn.Module) -> None:
    """Forget a layer's parameters, what was remembered of them, and a group that had no others."""
    gone = {id(p) for p in old.parameters()}
    for group in list(optimizer.param_groups):
        stays = [id(p) not in gone for p in group["params"]]
        if not any(stays) and stays and "initial_lr" not in group:
            optimizer.param_groups.remove(group)
            continue
        for what in {"params", "param_names"} & group.keys():
            group[what][:] = [one for one, kept in zip(group[what], stays, strict=True) if kept]
    for parameter in old.parameters():
        optimizer.state.pop(parameter, None)
