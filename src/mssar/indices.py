"""What follows from sizes alone in an exported program, and is alike for layers on equal maps."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


def share(made: torch.fx.GraphModule) -> None:
    """Change a program of torch.export so that it computes this once."""
    first: dict[str, torch.fx.Node] = {}
    for node in _indices(made):
        same = f"{node.target} {node.args} {node.kwargs}"  # where inputs are shared already
        other = first.setdefault(same, node)
        kept = not all(map(_computes, node.users))  # as what the program makes
        if other is not node and not kept:
            node.replace_all_uses_with(other)
            made.graph.erase_node(node)
    made.recompile()


def _indices(made: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """Sizes, and what is computed from ranges and sizes; none where something writes to these."""
    inner = [m for m in made.modules() if isinstance(m, torch.fx.GraphModule) and m is not made]
    if any(_computes(node) and _writes(node) for m in inner for node in m.graph.nodes):
        return []
    found: dict[torch.fx.Node, None] = {}
    memory: set[int] = set()
    for node in made.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            found[node] = None
        elif isinstance(node.target, torch._ops.OpOverload):
            if any(not memory.isdisjoint(_memory(given)) for given in _writes(node)):
                return []
            begins = "arange" in node.target._schema.name
            tensors = [i for i in node.all_input_nodes if isinstance(i.meta.get("val"), Tensor)]
            alone = all(i in found for i in node.all_input_nodes) and (tensors or begins)
            checks = value is None and node.target.namespace == "aten"  # that it has its type
            random = torch.Tag.nondeterministic_seeded in node.target.tags
            if alone and not random and not _writes(node) and (checks or isinstance(value, Tensor)):
                found[node] = None
                memory |= _memory(node)
    return list(found)


def _computes(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) or node.target in vars(operator).values()


def _writes(node: torch.fx.Node) -> list[Any]:
    """The arguments whose memory an operation changes."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    asked = node.target._schema.arguments
    given = [*node.args, *[None] * (len(asked) - len(node.args))]
    return [
        node.kwargs.get(one.name, value)
        for one, value in zip(asked, given, strict=True)
        if one.alias_info is not None and one.alias_info.is_write
    ]


def _memory(given: Any) -> set[int]:
    """Of the tensors that nodes stand for, in lists or alone."""
    nodes = [n for n in tree_leaves(given) if isinstance(n, torch.fx.Node)]
    values = tree_leaves([node.meta.get("val") for node in nodes])
    return {t.untyped_storage()._cdata for t in values if isinstance(t, Tensor)}
