"""MS-SAR: every neuron looks at its surroundings at several scales and is weighted by them."""

from mssar.coordinates import Regional, Sliding
from mssar.cost import cost
from mssar.explain import explain
from mssar.export import export
from mssar.layer import MSSAR
from mssar.networks import create_model, from_pretrained, list_models
from mssar.surgery import insert, remove
from mssar.tail import tail
from mssar.warm import warm

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
    "remove",
    "tail",
    "warm",
]
