"""torch.fx calls modules with proxies that record what is done to them; the layer is one node."""

from __future__ import annotations

from torch import nn
from torch.fx import Proxy


def traced(x: object) -> bool:
    return isinstance(x, Proxy)


def recorded(layer: nn.Module, x: Proxy, *rest: object) -> Proxy:
    """A call of the layer by the name that it has in the network, whatever the tracer's leaves."""
    tracer = x.tracer
    name = tracer.path_of_module(layer)  # type: ignore[attr-defined]
    if not name:  # the layer is all that is traced: it needs something to have a name in
        around = nn.ModuleDict({"layer": layer}).train(layer.training)
        tracer.root, name = around, "layer"  # type: ignore[attr-defined]
    return tracer.create_proxy("call_module", name, (x, *rest), {})
