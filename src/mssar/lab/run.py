"""What is trained: a network, a data set, a recipe and a seed.  How (on which device, in which
precision) is the engine's."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from mssar.cost import cost
from mssar.lab import values
from mssar.lab.data import Data
from mssar.lab.recipes import (
    CIFAR_DENSENET,
    CIFAR_RESNET,
    DEMO,
    FINETUNE,
    ILSVRC2012,
    UNWRITTEN,
    Photographs,
    Recipe,
    recipe_from_dict,
)
from mssar.networks.recalibration import RECALIBRATIONS
from mssar.networks.registry import architecture
from mssar.options import defaults
from mssar.surgery import foreign, initial

Colours: TypeAlias = tuple[float, float, float]
LONGEST = 100  # bytes of a network's name, and of its options, in a folder's (255 at most)
_NAME = r"[a-zA-Z0-9][\w.-]{0,29}"  # of a data set
PHOTOGRAPHS = ("imagefolder", "ilsvrc2012")
USUAL_PLACE = foreign.WHERE
GENERATOR = threading.RLock()  # held by whoever seeds torch's own; runs may be side by side


@dataclass(frozen=True)
class Initial:
    """Weights that a run begins with: what they are; where they lie is no part of that."""

    file: str  # its name, or that of a network whose library has them
    sha256: str
    path: Path | None = field(default=None, compare=False)  # None for a library's, or not known
    source: str | None = field(default=None, compare=False)  # of a library's, where timm finds them

    @classmethod
    def of(cls, path: Path) -> Initial:
        """Those of a file."""
        if not path.is_file():
            raise ValueError(f"there is no file {path} with weights to begin with")
        return cls(path.name, initial.digest(path), path)

    def read(self) -> tuple[dict[str, Tensor], str, dict[str, Any] | None]:
        """They themselves, if they are still what they were; what they are called; their note."""
        note: dict[str, Any] | None = None
        if self.path is None and not foreign.is_foreign(self.file):
            raise ValueError(f"this run begins with {self.file}: name that file with --weights")
        if self.path is None:
            found, called = foreign.pretrained(self.source or self.file), self.file
            now = initial.digest_of(found)
        else:
            read = initial.read(self.path)
            found, note = read.tensors, read.note
            called = f"{self.path} ({read.holds})" if read.holds else str(self.path)
            now = initial.digest(self.path)
        if now != self.sha256:
            raise ValueError(f"{self.path or self.file} is not what it was: its SHA-256 is {now}")
        return found, called, note


@dataclass(frozen=True)
class Normalisation:
    """What pixels from 0 to 1 are normalised by, where that is not the data set's own."""

    mean: Colours
    std: Colours


@dataclass(frozen=True)
class Run:
    """One training, so described that it can be repeated. Options left out are filled in."""

    network: str
    recalibration: str = "none"
    options: Mapping[str, Any] = field(default_factory=dict)
    dataset: str = "arrangements"
    recipe: Recipe = CIFAR_RESNET
    seed: int = 0
    weights: Initial | None = None
    normalisation: Normalisation | None = None

    def __post_init__(self) -> None:
        whole = isinstance(self.seed, int) and not isinstance(self.seed, bool)
        if not whole or not 0 <= self.seed < 2**31:
            raise ValueError(f"a seed is a whole number from 0 to {2**31 - 1}; got {self.seed!r}")
        # It goes into the names of folders and files, and may come from a stranger's file.
        named = isinstance(self.dataset, str) and re.fullmatch(_NAME, self.dataset, re.ASCII)
        if not named:
            raise ValueError(
                "a data set's name begins with a letter or a digit, and has up to 30 of these "
                f"and of _ . -; got {self.dataset!r:.120}"
            )
        settled = settled_options(self.network, self.recalibration, self.options)
        object.__setattr__(self, "options", MappingProxyType(settled))
        self._require_ours_from_scratch()

    def _require_ours_from_scratch(self) -> None:
        """Where it is said how the network is initialised."""
        if (init := self.recipe.init) == UNWRITTEN["init"]:
            return
        whose = f"init={init} is for networks of this package that begin from scratch"
        if foreign.is_foreign(self.network):
            raise ValueError(f"{whose}; {self.network} is another library's: leave out --init")
        if self.weights is not None:
            raise ValueError(f"{whose}; this one begins with {self.weights.file}: leave out --init")

    def __hash__(self) -> int:  # the options' mapping has none
        return hash((self.network, self.recalibration, self.dataset, self.recipe, self.seed))

    def check(self) -> None:
        """Build it without memory, so that a mistake is found before anything is trained."""
        with torch.device("meta"):
            made = foreign.build(self.network, self.recalibration, **dict(self.options))
        if not foreign.is_foreign(self.network):
            return
        size, augmentation = foreign.architecture(self.network).size, self.recipe.augmentation
        if isinstance(augmentation, Photographs):
            size = (3, augmentation.size, augmentation.size)
        try:
            cost(made, size)  # as its record will
        except Exception as error:  # of a network that we know nothing of
            reason = " ".join(str(error).split())
            shape = "×".join(map(str, size))
            raise ValueError(f"{self.network} cannot take {shape}: {reason:.200}") from None

    def build(self, num_classes: int, **begin: Any) -> nn.Module:
        """The network, initialised by the seed alone and leaving the global generator be."""
        with GENERATOR, torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed)  # not those of GPUs
            kind, options = self.recalibration, dict(self.options)
            network = foreign.build(self.network, kind, num_classes, **begin, **options)
            if self.recipe.init != UNWRITTEN["init"]:
                begin_as_in_torch(network)
            return network

    def begun(self, num_classes: int) -> nn.Module:
        """The network that the run begins with: its initial weights are in it, if it has any."""
        begin: dict[str, Any] = {}
        if self.weights is not None:
            begin["tensors"], begin["source"], begin["note"] = self.weights.read()
        made = self.build(num_classes, **begin)
        for name, tensor in made.state_dict().items():
            if tensor.device.type != "meta" and not tensor.isfinite().all():
                raise ValueError(
                    f"{self.network} begins with a {name} that is not finite, as no checkpoint of "
                    "the lab may be; a buffer that is not persistent may"
                )
        return made

    def normalised(self, data: Data) -> Data:
        """A data set whose pixels are normalised as the run has it."""
        mean, std = self.colours(data.mean, data.std)
        return data if self.normalisation is None else replace(data, mean=mean, std=std)

    def colours(self, mean: Colours, std: Colours) -> tuple[Colours, Colours]:
        """What pixels from 0 to 255 are normalised by; the data set's own are given."""
        if self.normalisation is None:
            return mean, std
        return _bytes(self.normalisation.mean), _bytes(self.normalisation.std)

    def __str__(self) -> str:
        return f"{self.label} {self.dataset} seed {self.seed}"

    @property
    def label(self) -> str:
        """Short, for people: ``resnet20 mssar scales=1,2``; only what is not the default."""
        return " ".join((self.network, self.recalibration, *self.particulars))

    @property
    def particulars(self) -> list[str]:
        """The options that differ from the network's defaults."""
        usual = usual_options(self.network, self.recalibration)
        return [f"{k}={text_of(v)}" for k, v in self.options.items() if v != usual[k]]

    @property
    def name(self) -> str:
        """For a folder: what it is, and a hash of all of it so that no two runs share one."""
        digest = hashlib.sha256(json.dumps(self.as_dict(), sort_keys=True).encode()).hexdigest()
        said = "".join(f"-{p.replace('=', '').replace(',', '.')}" for p in self.particulars)
        # In ASCII, where a character is a byte; patterns are no names of folders.
        options = re.sub(r"[^\w.-]", "", said, flags=re.ASCII)[:LONGEST]
        network = re.sub(r"[^\w.+-]+", "-", self.network, flags=re.ASCII)[-LONGEST:].lower()
        what = f"{self.dataset}-{network}-{self.recalibration}{options}"
        return f"{what}-seed{self.seed}-{digest[:6]}"

    def differs_in_seed_or_data(self, other: Run) -> bool:
        """Whether it is another run of what the other one trains, and nothing else is different."""
        return self != other and replace(self, seed=other.seed, dataset=other.dataset) == other

    def as_dict(self) -> dict[str, Any]:
        """All of it, as JSON has it; :func:`run_from_dict` reads it back."""
        options = {k: list(v) if isinstance(v, tuple) else v for k, v in self.options.items()}
        found: dict[str, Any] = {
            "network": self.network,
            "recalibration": self.recalibration,
            "options": options,
            "dataset": self.dataset,
            "recipe": self.recipe.as_dict(),
            "seed": self.seed,
        }
        # Left out where there are none, so that they do not enter the hash.
        if self.weights is not None:
            found["weights"] = {"file": self.weights.file, "sha256": self.weights.sha256}
        if self.normalisation is not None:
            mean, std = self.normalisation.mean, self.normalisation.std
            found["normalisation"] = {"mean": list(mean), "std": list(std)}
        return found


def run_from_dict(found: Any) -> Run:
    """What :meth:`Run.as_dict` wrote."""
    given = values.converted(found, dict[str, Any], "a run")
    for name in ("network", "recalibration", "options", "dataset", "recipe", "seed"):
        if name not in given:  # nothing is filled in: the file is not what was written
            raise ValueError(f"{name}: missing")
    made: dict[str, Any] = {"recipe": recipe_from_dict(given["recipe"])}
    for name, kind in (("weights", Initial), ("normalisation", Normalisation)):
        if given.get(name) is not None:
            made[name] = values.fitted(kind, given[name], f"{name}.")
    return values.fitted(Run, given, **made)


def _bytes(colours: Colours) -> Colours:
    red, green, blue = (255 * value for value in colours)
    return red, green, blue


def usual_normalisation(
    network: str, dataset: str, found: foreign.Foreign | None = None
) -> Normalisation | None:
    """That of the network, for photographs, if it is not ImageNet's; None otherwise.

    ``found`` is what is known of it where it lies, instead of what its library says.
    """
    if not foreign.is_foreign(network) or dataset not in PHOTOGRAPHS:
        return None
    chosen = found or foreign.architecture(network)
    assert isinstance(chosen, foreign.Foreign)
    same = (chosen.mean, chosen.std) == foreign.IMAGENET
    return None if same else Normalisation(chosen.mean, chosen.std)


def usual_recipe(network: str, dataset: str, *, begun: bool = False) -> Recipe:
    """The paper's recipe for a network on a data set; the demo's on the embedded one.

    Photographs are for fine-tuning where a network is another library's, or was ``begun``.
    """
    if dataset == "arrangements":
        return DEMO
    if dataset in PHOTOGRAPHS:
        return FINETUNE if begun or foreign.is_foreign(network) else ILSVRC2012
    return CIFAR_DENSENET if network.startswith("densenet") else CIFAR_RESNET


def usual_options(network: str, recalibration: str) -> dict[str, Any]:
    """Every option that a network has with a recalibration, as it is where nobody says.

    Of another library's network without asking that library: a record can be read without it.
    """
    if foreign.is_foreign(network):
        foreign.require_library(network)
        foreign.require_insertable(network, recalibration)
        own, staged = foreign.DEFAULTS, False
    else:
        chosen = architecture(network)
        own, staged = chosen.defaults, chosen.staged
    if recalibration not in RECALIBRATIONS:
        known = ", ".join(RECALIBRATIONS)
        raise ValueError(f"recalibration is one of {known}; got {recalibration!r}")
    found = defaults(recalibration, staged=staged)
    found |= {k: v for k, v in own.items() if k in found}
    inserted = foreign.is_foreign(network) and recalibration != "none"
    return found | {"where": USUAL_PLACE} if inserted else found


def settled_options(network: str, recalibration: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Every option, so that two ways of saying the same thing are the same."""
    usual = usual_options(network, recalibration)
    for option in options.keys() - usual.keys():
        raise ValueError(
            f"{network} with {recalibration!r} has no option {option!r}; "
            f"its options: {', '.join(usual) or 'there are none'}"
        )
    settled = usual | {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
    # The usual place is left out, so that it does not enter the hash.
    if "where" in settled and (where := _places(settled.pop("where"))) != USUAL_PLACE:
        settled["where"] = where
    return settled


def _places(where: Any) -> str | tuple[str, ...]:
    """As :func:`mssar.insert` takes it, but what a record can say."""
    if where in (USUAL_PLACE, "se"):
        return str(where)
    names = (where,) if isinstance(where, str) else where
    if not names or not isinstance(names, tuple) or not all(isinstance(n, str) for n in names):
        raise ValueError(f"where of a run is 'blocks', 'se' or names of modules; got {where!r:.60}")
    return names


def begin_as_in_torch(module: nn.Module) -> None:
    """Draw what a network begins with anew, by PyTorch's own rules; a recalibration has its own."""
    for name, child in module.named_children():
        if name == "recalibrate":
            continue
        if isinstance(child, (nn.Conv2d, nn.Linear)):
            child.reset_parameters()
        begin_as_in_torch(child)


def text_of(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
