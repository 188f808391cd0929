"""What is trained: a network, a data set, a recipe and a seed.  How (on which device, in which
precision) is the engine's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from mssar.lab.recipes import CIFAR_DENSENET, CIFAR_RESNET, DEMO, ILSVRC2012, Recipe
from mssar.lab.recipes import recipe_from_dict as _recipe
from mssar.networks.classifier import Classifier
from mssar.networks.recalibration import DEFAULTS, OPTIONS, OURS
from mssar.networks.registry import architecture, create_model

_DEFAULTS = {"scales": (1, 2, 4), "strategy": "regional", "reduction": 1, "stage": "multi"}


@dataclass(frozen=True)
class Run:
    """One training, so described that it can be repeated. Options left out are filled in."""

    network: str
    recalibration: str = "none"
    options: Mapping[str, Any] = field(default_factory=dict)
    dataset: str = "arrangements"
    recipe: Recipe = CIFAR_RESNET
    seed: int = 0

    def __post_init__(self) -> None:
        whole = isinstance(self.seed, int) and not isinstance(self.seed, bool)
        if not whole or not 0 <= self.seed < 2**31:
            raise ValueError(f"a seed is a whole number from 0 to {2**31 - 1}; got {self.seed!r}")
        if not isinstance(self.dataset, str):
            raise ValueError(f"a data set has a name; got {self.dataset!r}")
        settled = settled_options(self.network, self.recalibration, self.options)
        object.__setattr__(self, "options", MappingProxyType(settled))

    def __hash__(self) -> int:  # the options' mapping has none
        return hash((self.network, self.recalibration, self.dataset, self.recipe, self.seed))

    def check(self) -> None:
        """Build it without memory, so that a mistake is found before anything is trained."""
        with torch.device("meta"):
            create_model(self.network, self.recalibration, **dict(self.options))

    def build(self, num_classes: int) -> Classifier:
        """The network, initialised by the seed alone and leaving the global generator be."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed)  # not those of GPUs
            return create_model(self.network, self.recalibration, num_classes, **self.options)

    @property
    def label(self) -> str:
        """Short, for people: ``resnet20 mssar scales=1,2``; only what is not the default."""
        return " ".join((self.network, self.recalibration, *self.particulars))

    @property
    def particulars(self) -> list[str]:
        """The options that differ from the network's defaults."""
        usual = settled_options(self.network, self.recalibration, {})
        return [f"{k}={text_of(v)}" for k, v in self.options.items() if v != usual[k]]

    @property
    def name(self) -> str:
        """For a folder: what it is, and a hash of all of it so that no two runs share one."""
        digest = hashlib.sha256(json.dumps(self.as_dict(), sort_keys=True).encode()).hexdigest()
        options = "".join(f"-{p.replace('=', '').replace(',', '.')}" for p in self.particulars)
        what = f"{self.dataset}-{self.network}-{self.recalibration}{options}"
        return f"{what}-seed{self.seed}-{digest[:6]}"

    def as_dict(self) -> dict[str, Any]:
        """All of it, as JSON has it; :func:`run_from_dict` reads it back."""
        options = {k: list(v) if isinstance(v, tuple) else v for k, v in self.options.items()}
        return {
            "network": self.network,
            "recalibration": self.recalibration,
            "options": options,
            "dataset": self.dataset,
            "recipe": self.recipe.as_dict(),
            "seed": self.seed,
        }


def run_from_dict(found: Mapping[str, Any]) -> Run:
    """What :meth:`Run.as_dict` wrote."""
    try:
        options = {k: tuple(v) if isinstance(v, list) else v for k, v in found["options"].items()}
        return Run(
            found["network"],
            found["recalibration"],
            options,
            found["dataset"],
            _recipe(found["recipe"]),
            found["seed"],
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"this describes no run: {error!r}") from error


def usual_recipe(network: str, dataset: str) -> Recipe:
    """The paper's recipe for a network on a data set; the demo's on the embedded one."""
    if dataset == "arrangements":
        return DEMO
    if dataset in ("imagefolder", "ilsvrc2012"):
        return ILSVRC2012
    return CIFAR_DENSENET if network.startswith("densenet") else CIFAR_RESNET


def settled_options(network: str, recalibration: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Every option, so that two ways of saying the same thing are the same."""
    chosen = architecture(network)
    if recalibration not in OPTIONS:
        known = ", ".join(OPTIONS)
        raise ValueError(f"recalibration is one of {known}; got {recalibration!r}")
    taken = OPTIONS[recalibration]
    if chosen.staged and recalibration in OURS:
        taken += ("stage",)
    for option in options.keys() - set(taken):
        raise ValueError(
            f"{network} with {recalibration!r} has no option {option!r}; "
            f"its options: {', '.join(taken) or 'there are none'}"
        )
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
    usual = {k: v for k, v in chosen.defaults.items() if k in taken}
    defaults = _DEFAULTS | DEFAULTS.get(recalibration, {})
    return {name: defaults[name] for name in taken} | usual | given


def text_of(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
