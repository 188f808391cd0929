"""Networks as folders that others can load: configuration, weights and a card that says what it is.

The layout is that of the Hugging Face Hub: ``config.json``, ``model.safetensors``, ``README.md``.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from mssar.durable import write_whole
from mssar.networks.card import card
from mssar.networks.classifier import Classifier
from mssar.networks.hub import line, needed, quiet, trouble
from mssar.networks.registry import create_model
from mssar.networks.weights import Weights, read, require_finite

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
LONGEST = 1 << 24  # bytes of a configuration, or of one record

Place: TypeAlias = str | os.PathLike[str]
Record: TypeAlias = Mapping[str, Any] | Place | None  # what a run left behind, or where it lies


def from_pretrained(source: Place, **how: Any) -> Classifier:
    """A network from a folder of :func:`save_pretrained`, or by its name on the Hub; in ``eval``.

    ``how`` are options of :func:`opened`.
    """
    return load(*opened(source, **how))


def load(place: Path, config: Mapping[str, Any]) -> Classifier:
    """The network of a folder."""
    try:
        if "arguments" in config:
            raise ValueError("it had layers inserted: mssar.from_pretrained loads it")
        with torch.device("meta"):  # whatever sizes it asks for, they take no memory yet
            described = _made(config)
    except Exception as error:  # it may say anything
        raise undescribed(place, error) from None
    with fitting(place):
        found = weights_of(place)
        described.load_state_dict(found.tensors, assign=True)
        require_finite(found.tensors, WEIGHTS)
        made = _made(config)
        made.load_state_dict(found.tensors)
    made.note = found.note
    return made.eval()


# What networks of ours have in common with those that layers were inserted into.


def contents(model: nn.Module) -> bytes:
    """A network's state as a file."""
    safetensors = needed("safetensors.torch", "save_pretrained")
    state = {name: t.detach().cpu().contiguous() for name, t in model.state_dict().items()}
    require_finite(state, "this network")
    made: bytes = safetensors.save(state, {"format": "pt"})
    return made


def save(
    model: nn.Module,
    place: Path,
    config: Mapping[str, Any],
    record: Mapping[str, Any] | None,
    repo_id: str | None,
    pushed: bool,
    how: Mapping[str, Any],
) -> Path:
    """Write a network's folder, and put it on the Hub where that is asked for."""
    if how and not pushed:
        raise ValueError(f"{next(iter(how))!r} is an option of push_to_hub=True, if it is any")
    content, name = contents(model), repo_id or place.resolve().name
    write(place, config, content, record, name)
    if pushed:
        push(name, config, content, record, **how)
    return place


def write(
    place: Path,
    config: Mapping[str, Any],
    content: bytes,
    record: Mapping[str, Any] | None,
    name: str,
    **more: Any,
) -> None:
    """Write a folder.

    Args:
        config: what the network is made from again.
        content: of the file of weights.
        record: of the run that trained it.
        name: what the card tells to load it by.
        more: that the card says; see :func:`mssar.networks.card.card`.
    """
    text = card(config, record, f'mssar.from_pretrained("{name}")', **more)
    if place.exists() and not place.is_dir():
        raise ValueError(f"{place} is there and is no folder")
    write_whole(place / WEIGHTS, content)
    write_whole(place / CONFIG, f"{json.dumps(config, indent=2)}\n".encode())
    write_whole(place / CARD, text.encode())


def push(
    repo_id: str,
    config: Mapping[str, Any],
    content: bytes,
    record: Mapping[str, Any] | None,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    commit_message: str = "A network of mssar",
    branch: str | None = None,
    create_pr: bool = False,
) -> str:
    """Put a folder on the Hub; the options are those of huggingface_hub's own ``push_to_hub``."""
    hub = needed("huggingface_hub", "push_to_hub")
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), config, content, record, repo_id)
        try:
            with quiet():
                api = hub.HfApi(token=token)
                name = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
                done = api.upload_folder(
                    repo_id=name,
                    folder_path=folder,
                    commit_message=commit_message,
                    revision=branch,
                    create_pr=create_pr,
                )
        except Exception as error:  # of names, of the network, of rights
            raise ValueError(f"{repo_id!r} cannot be put on the Hub: {trouble(error)}") from None
    return str(done)


def opened(
    source: Place,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: Place | None = None,
    local_files_only: bool = False,
    force_download: bool = False,
) -> tuple[Path, dict[str, Any]]:
    """A folder and its configuration.

    Args:
        source: a folder, or ``owner/name`` on the Hub.
        revision, token, cache_dir, local_files_only, force_download: of the Hub's download.
    """
    needed("safetensors.torch", "from_pretrained")
    if not isinstance(source, str | os.PathLike):
        raise ValueError(f"source is a folder, or owner/name; got a {type(source).__name__}")
    place = Path(source)
    if not place.is_dir() and (place.is_absolute() or str(source).startswith((".", "~"))):
        raise ValueError(f"there is no folder {source}")
    if not place.is_dir():
        place = _fetched(
            str(source),
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            force_download=force_download,
        )
    return place, _read(place / CONFIG)


def undescribed(place: Path, error: Exception) -> ValueError:
    """For a configuration that nothing can be made of."""
    reason = line(error) if type(error) is ValueError else f"{type(error).__name__}: {line(error)}"
    return ValueError(f"{place / CONFIG} describes no network of mssar: {reason}")


@contextmanager
def fitting(place: Path) -> Iterator[None]:
    """Whatever is wrong with a file of weights, or with both files together, in one line."""
    try:
        yield
    except FileNotFoundError:
        raise ValueError(f"there is no {WEIGHTS} in {place}") from None
    except Exception as error:  # of a file that is none, or of weights of another network
        raise ValueError(f"{place / WEIGHTS} does not fit {CONFIG}: {line(error)}") from None


def weights_of(place: Path) -> Weights:
    """A folder's tensors, and the note of `mssar weights` if there is one."""
    _require_regular(place / WEIGHTS)
    if not (place / WEIGHTS).exists():
        raise FileNotFoundError
    return read(place / WEIGHTS)


def recorded(given: Record) -> Mapping[str, Any] | None:
    if given is None or isinstance(given, Mapping):
        return given
    path = Path(given)
    return _read(path / "record.json" if path.is_dir() else path)


def config_of(model: Classifier) -> dict[str, Any]:
    if not isinstance(model, Classifier) or model.origin is None:
        raise ValueError(
            "only a network that create_model made by names can be made again from its "
            f"configuration; this {type(model).__name__} has a module, a pooling or a class of its "
            "own"
        )
    config = {"library": "mssar", **model.origin, "num_classes": model.num_classes}
    with torch.device("meta"):
        again = _made(config)
    if _shapes(again) != _shapes(model):
        raise ValueError(
            f"this {type(model).__name__} was changed after create_model made it, and could not "
            "be made again from its configuration; after insert take mssar.save_pretrained"
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
    hub = needed("huggingface_hub", f"{name!r} is no folder, and fetching it")
    try:
        with quiet():
            return Path(hub.snapshot_download(name, allow_patterns=[CONFIG, WEIGHTS], **how))
    except Exception as error:  # of names, of the network, of rights
        raise ValueError(
            f"{name!r} is no folder here, and no network on the Hub that can be reached: "
            f"{trouble(error)}"
        ) from None
