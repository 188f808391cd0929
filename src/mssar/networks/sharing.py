"""Networks as folders that others can load: configuration, weights and a card that says what it is.

The layout is that of the Hugging Face Hub: ``config.json``, ``model.safetensors``, ``README.md``.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import torch

from mssar.durable import write_whole
from mssar.extras import advice
from mssar.networks.card import card
from mssar.networks.classifier import Classifier
from mssar.networks.registry import create_model
from mssar.networks.weights import require_finite

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
LONGEST = 1 << 24  # bytes of a configuration, or of one record

Place: TypeAlias = str | os.PathLike[str]
Record: TypeAlias = Mapping[str, Any] | Place | None  # what a run left behind, or where it lies


def save_pretrained(model: Classifier, folder: Place, record: Record = None) -> Path:
    """Write a network of :func:`mssar.create_model` into a folder.

    Args:
        model: the network, on any device.
        folder: where; made if it is not there, and files of these names are replaced.
        record: a run's record, or its file or folder, to fill the card from.
    """
    return _save(model, Path(folder), record, Path(folder).name)


def _save(model: Classifier, place: Path, record: Record, name: str) -> Path:
    """``name``: what the card tells to load it by."""
    safetensors = _needed("safetensors.torch", "save_pretrained")
    config = _config(model)
    text = card(config, _record(record), f'mssar.from_pretrained("{name}")')
    if place.exists() and not place.is_dir():
        raise ValueError(f"{place} is there and is no folder")
    state = {name: t.detach().cpu().contiguous() for name, t in model.state_dict().items()}
    write_whole(place / WEIGHTS, safetensors.save(state, {"format": "pt"}))
    write_whole(place / CONFIG, f"{json.dumps(config, indent=2)}\n".encode())
    write_whole(place / CARD, text.encode())
    return place


def from_pretrained(
    source: Place,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: Place | None = None,
    local_files_only: bool = False,
) -> Classifier:
    """A network from a folder of :func:`save_pretrained`, or by its name on the Hub; in ``eval``.

    Args:
        source: a folder, or ``owner/name``.
        revision, token, cache_dir, local_files_only: of the Hub's download.
    """
    safetensors = _needed("safetensors.torch", "from_pretrained")
    place = Path(source)
    if not place.is_dir():
        place = _fetched(
            str(source),
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
        )
    config = _read(place / CONFIG)
    try:
        with torch.device("meta"):  # whatever sizes it asks for, they take no memory yet
            described = _made(config)
    except Exception as error:  # it may say anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{place / CONFIG} describes no network of mssar: {reason:.200}") from None
    try:
        _require_regular(place / WEIGHTS)
        tensors = safetensors.load_file(place / WEIGHTS)
        described.load_state_dict(tensors, assign=True)
        require_finite(tensors, WEIGHTS)
        made = _made(config)
        made.load_state_dict(tensors)
    except FileNotFoundError:
        raise ValueError(f"there is no {WEIGHTS} in {place}") from None
    except Exception as error:  # of a file that is none, or of weights of another network
        reason = " ".join(str(error).split())
        raise ValueError(f"{place / WEIGHTS} does not fit {CONFIG}: {reason:.200}") from None
    return made.eval()


def push_to_hub(
    model: Classifier,
    repo_id: str,
    record: Record = None,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    message: str = "A network of mssar",
    revision: str | None = None,
    create_pr: bool = False,
) -> str:
    """Put a network on the Hub as ``owner/name``, and return the address of the commit."""
    hub = _needed("huggingface_hub", "push_to_hub")
    with tempfile.TemporaryDirectory() as folder:
        _save(model, Path(folder), record, repo_id)
        api = hub.HfApi(token=token)
        name = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        done = api.upload_folder(
            repo_id=name,
            folder_path=folder,
            commit_message=message,
            revision=revision,
            create_pr=create_pr,
        )
    return str(done)


def _needed(name: str, verb: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        package = name.split(".")[0]
        raise ValueError(f"{verb} needs {package}: {advice('hub')}") from None


def _config(model: Classifier) -> dict[str, Any]:
    if not isinstance(model, Classifier) or model.origin is None:
        raise ValueError(
            "only a network that create_model made by names can be made again from its "
            f"configuration; this {type(model).__name__} has a module or a class of its own in it"
        )
    config = {"library": "mssar", **model.origin, "num_classes": model.num_classes}
    with torch.device("meta"):
        again = _made(config)
    if _shapes(again) != _shapes(model):
        raise ValueError(
            f"this {type(model).__name__} was changed after create_model made it, and could not "
            "be made again from its configuration"
        )
    return config


def _made(config: Mapping[str, Any]) -> Classifier:
    options: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in config["options"].items()
    }
    network, kind, classes = config["network"], config["recalibration"], config["num_classes"]
    return create_model(network, kind, classes, config["in_chans"], weights=None, **options)


def _shapes(model: Classifier) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def _record(given: Record) -> Mapping[str, Any] | None:
    if given is None or isinstance(given, Mapping):
        return given
    path = Path(given)
    return _read(path / "record.json" if path.is_dir() else path)


def _read(path: Path) -> dict[str, Any]:
    try:
        _require_regular(path, LONGEST)
        found = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ValueError(f"there is no {path.name} in {path.parent}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is no JSON object")
    return found


def _require_regular(path: Path, longest: int | None = None) -> None:
    """A pipe would be waited for without end."""
    if path.exists() and not path.is_file():
        raise ValueError("not a regular file")
    if longest is not None and path.stat().st_size > longest:
        raise ValueError(f"{path.stat().st_size:,} bytes, and {longest:,} are read here")


def _fetched(name: str, **how: Any) -> Path:
    """The folder that a network on the Hub was downloaded into."""
    hub = _needed("huggingface_hub", f"{name!r} is no folder, and fetching it")
    try:
        return Path(hub.snapshot_download(name, allow_patterns=[CONFIG, WEIGHTS], **how))
    except Exception as error:  # of names, of the network, of rights
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"{name!r} is no folder here, and no network on the Hub that can be reached: {reason}"
        ) from None
