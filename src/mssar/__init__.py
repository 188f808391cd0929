"""MS-SAR: every neuron looks at its surroundings at several scales and is weighted by them."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = [
    "MSSAR",
    "Regional",
    "Sliding",
    "cost",
    "create_model",
    "explain",
    "export",
    "from_pretrained",
    "insert",
    "list_models",
    "push_to_hub",
    "remove",
    "save_pretrained",
    "tail",
    "warm",
]

if TYPE_CHECKING:
    from mssar.coordinates import Regional, Sliding
    from mssar.cost import cost
    from mssar.explain import explain
    from mssar.export import export
    from mssar.layer import MSSAR
    from mssar.networks import create_model, list_models
    from mssar.surgery import insert, remove
    from mssar.surgery.sharing import from_pretrained, push_to_hub, save_pretrained
    from mssar.tail import tail
    from mssar.warm import warm

# Imported when it is asked for: torch takes seconds, and `mssar --help` needs none of it.
_HOMES = {
    "MSSAR": "layer",
    "Regional": "coordinates",
    "Sliding": "coordinates",
    "cost": "cost",
    "create_model": "networks",
    "explain": "explain",
    "export": "export",
    "from_pretrained": "surgery.sharing",
    "insert": "surgery",
    "list_models": "networks",
    "push_to_hub": "surgery.sharing",
    "remove": "surgery",
    "save_pretrained": "surgery.sharing",
    "tail": "tail",
    "warm": "warm",
}
_MODULES = (  # that `import mssar` alone gives, too
    *("branch", "coordinates", "folding", "fused", "fusible", "kernels", "layer", "mosaic"),
    *("networks", "onnx", "partition", "scales", "surgery", "tracing"),
)


class _Package(ModuleType):
    """This module. Where a submodule and a function share a name, the name is the function's."""

    def __getattr__(self, name: str) -> object:
        if name in _MODULES:
            return import_module(f"{self.__name__}.{name}")
        if name not in _HOMES:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{self.__name__}.{_HOMES[name]}"), name)
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: object) -> None:
        # An import puts the submodule that it has loaded here.
        if _HOMES.get(name) == name and isinstance(value, ModuleType):
            value = getattr(value, name, value)
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package
