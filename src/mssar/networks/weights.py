"""Trained weights from a file that says what it is of: safetensors, never a pickle.

A file that `mssar weights` wrote has a JSON note: network, recalibration and options, the data set
with its classes and the mean and deviation of its pixels (from 0 to 1), and the error with what it
was measured on; older files do not say on what.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mssar.networks import signature

NOTE = "mssar.weights"  # key of the note in the file's metadata
CHECKPOINT = "mssar"  # that of a run's progress, in a checkpoint of the lab
PREFIXES = ("average.", "model.")  # of the network's tensors there; the average, if there is one
PICKLES = (".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".bin", ".tar")

# Those that come with the package, by name; a file in the folder, with its card, is one more.
PRETRAINED = {
    path.stem: path for path in sorted((Path(__file__).parent / "pretrained").glob("*.safetensors"))
}


@dataclass(frozen=True)
class Weights:
    """A file's tensors under the names of a state dict, and its note; None if it has none."""

    path: Path
    tensors: dict[str, Tensor]
    note: dict[str, Any] | None

    @property
    def classes(self) -> int | None:
        """How many the network tells apart."""
        if self.note is not None and isinstance(self.note.get("classes"), list):
            return len(self.note["classes"])
        head = self.tensors.get("fc.weight")
        return len(head) if head is not None and head.ndim == 2 else None

    @property
    def holds(self) -> str:
        """The network that it is of, if the file says so."""
        if self.note is None:
            return ""
        return f"{self.note['network']} with {self.note['recalibration']!r}"

    @property
    def recalibration(self) -> str | None:
        """What the network has, if the file says so."""
        return None if self.note is None else self.note["recalibration"]

    def settled(
        self, network: str, recalibration: object, options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The options to build the network with: the file's, if it is what was asked for."""
        if self.note is None:
            return dict(options)
        if (self.note["network"], self.note["recalibration"]) != (network, recalibration):
            raise ValueError(
                f"{self.path} holds {self.holds}, not {network} with {recalibration!r}"
            )
        own = {k: tuple(v) if isinstance(v, list) else v for k, v in self.note["options"].items()}
        for name, value in options.items():
            given = tuple(value) if isinstance(value, list) else value
            if name in own and own[name] != given:
                raise ValueError(
                    f"{self.path} holds {self.holds} and {name}={own[name]}, not {name}={value}"
                )
        return own | dict(options)

    def put(self, model: nn.Module) -> None:
        """Into a network, in its own precision; one without a head leaves the file's."""
        state = self.tensors
        if isinstance(getattr(model, "fc", None), nn.Identity):
            state = {k: v for k, v in state.items() if not k.startswith("fc.")}
        require_finite(state, self.path)
        try:
            model.load_state_dict(state)
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{self.path} does not fit this network: {reason:.200}") from None


def located(source: str | Path) -> Path:
    """The file of a name in PRETRAINED; anything else is a path."""
    return PRETRAINED.get(str(source)) or Path(source)


def read(source: str | Path) -> Weights:
    """A file of `mssar weights`, one of ours by its name, a checkpoint of the lab, or any state
    dict in safetensors."""
    asked = f"weights is a safetensors file, or one of {', '.join(PRETRAINED)}"
    if not isinstance(source, (str, Path)):
        raise ValueError(f"{asked}; got {source!r}")
    path = located(source)
    if path.suffix.lower() in PICKLES:
        raise ValueError(f"{path} is a pickle, which may run anything; name a safetensors file")
    if not path.is_file():
        raise ValueError(f"there is no file {path}; {asked}")
    try:
        import safetensors
    except ImportError:
        raise ValueError("weights needs a package: pip install safetensors") from None
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            signature.require_good(path)
            notes = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(f"{path} is no safetensors file ({error!s:.200})") from None
    except ValueError as error:
        raise ValueError(f"{path} is {error}") from None
    if CHECKPOINT in notes:
        tensors = of_checkpoint(tensors)
    found = Weights(path, tensors, _note(notes, path))
    if found.note and found.classes and all(found.classes not in t.shape for t in tensors.values()):
        raise ValueError(f"{path}: its note has {found.classes:,} classes, and no tensor of it has")
    return found


def require_finite(tensors: Mapping[str, Tensor], source: object) -> None:
    """A ValueError names the first tensor that has a number that is none."""
    for name, tensor in tensors.items():
        wide = tensor if tensor.itemsize > 1 else tensor.float()  # of 8 bits few things are known
        if not wide.isfinite().all():
            raise ValueError(f"{source}: {name!r:.200} has numbers that are not finite")


def of_checkpoint(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The network among a checkpoint's tensors: what is tested of it, so its average if it has."""
    for prefix in PREFIXES:
        found = {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}
        if found:
            break
    return found


def _note(notes: Mapping[str, str], path: Path) -> dict[str, Any] | None:
    try:
        if NOTE in notes:
            found = json.loads(notes[NOTE])
        elif CHECKPOINT in notes:
            found = json.loads(notes[CHECKPOINT])["run"]
        else:
            return None
        if not isinstance(found["options"], dict):
            raise TypeError("options is no mapping")
        for name in ("network", "recalibration"):
            if not isinstance(found[name], str):
                raise TypeError(f"{name} is no name")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}: its note cannot be read ({error!r:.200})") from None
    return dict(found)
