"""Weights that a network begins with, from a file: safetensors, or what torch.save wrote of
tensors alone."""

from __future__ import annotations

import hashlib
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mssar.networks import weights
from mssar.surgery.ends import LAYER
from mssar.surgery.heads import head

WRAPPERS = ("state_dict", "model")  # what others keep a state dict under
WRAPPED = "module."  # what DistributedDataParallel puts before every name
COUNTERS = (".num_batches_tracked", ".coordinates")  # older files have none
ZIP = b"PK\x03\x04"  # how a file of torch.save begins
OLD = bytes.fromhex("80028a0a6cfc9c46f9206aa850192e")  # and how it did before PyTorch 1.6
BYTES = b"_codecs\nencode\n"  # how a pickle says bytes
PIECE = 1 << 20  # bytes that are looked at at once
FEW = 3


def read(path: Path) -> weights.Weights:
    """The state dict of a file. Nothing in it is ever executed."""
    if path.suffix.lower() not in weights.PICKLES:
        return weights.read(path)
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    try:
        _require_stored(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise ValueError(
            f"{path} holds more than tensors, and to unpickle it may run anything; save its "
            "state_dict() alone, or as safetensors"
        ) from None
    except Exception as error:  # of a zip, a pickle, a disk
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path} is no file of torch.save ({reason:.100})") from None
    return weights.Weights(path, _state(found, path), None)


def _require_stored(path: Path) -> None:
    """torch.save compresses nothing and says no bytes; a small file of much does."""
    with path.open("rb") as file:
        first = file.read(len(OLD))
        if not first.startswith(ZIP) and first != OLD:
            raise ValueError("it does not begin as one")
        if first.startswith(ZIP):
            with zipfile.ZipFile(file) as archive:
                entries = archive.infolist()
            size = sum(entry.file_size for entry in entries)
            if size > path.stat().st_size or any(entry.compress_type for entry in entries):
                raise ValueError(f"it would unpack to {size:,} bytes")
        file.seek(0)
        end = b""
        while piece := file.read(PIECE):
            if BYTES in end + piece:  # one text may be asked for as bytes again and again
                raise pickle.UnpicklingError
            end = piece[-len(BYTES) :]


def _state(found: Any, path: Path) -> dict[str, Tensor]:
    for name in WRAPPERS:
        if isinstance(found, Mapping) and isinstance(found.get(name), Mapping):
            found = found[name]
    if not isinstance(found, Mapping) or not found:
        raise ValueError(f"{path} holds no state dict, but {type(found).__name__}")
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            called = f"{name!r:.60}" if isinstance(name, str | int) else f"a {type(name).__name__}"
            raise ValueError(
                f"{path} holds no state dict: {called} is {type(value).__name__}; it may be "
                f"under {' or '.join(map(repr, WRAPPERS))}"
            )
        if not _plain(value) or value.nbytes > path.stat().st_size:
            raise ValueError(f"{path}: {name!r:.60} has not its numbers in the file, one by one")
    if all(name.startswith(WRAPPED) for name in found):
        return {name.removeprefix(WRAPPED): tensor for name, tensor in found.items()}
    return dict(found)


def _plain(tensor: Tensor) -> bool:
    """Numbers in memory: not sparse, quantised or nested, and on a device."""
    dense = tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_nested
    return dense and tensor.device.type == "cpu"


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of tensors and their names, whatever file they came in."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def recalibrated(tensors: Mapping[str, Tensor] | None) -> bool:
    """Whether they are of a network with layers of ours in it."""
    return any(LAYER in name.split(".") for name in tensors or ())


def fit(
    model: nn.Module, tensors: Mapping[str, Tensor], source: str, otherwise: str | None = None
) -> None:
    """Put tensors into a network. A head for another number of classes stays as it is, fresh; all
    else must be there, and alike. Where it is not, ``otherwise`` is said instead of names."""
    own = model.state_dict()
    last = f"{head(model)}."
    heads = [name for name in own if name.startswith(last)]
    fresh = any(n in tensors and tensors[n].shape != own[n].shape for n in heads)
    needed = [n for n in own if not (fresh and n in heads)]
    missing = [n for n in needed if n not in tensors and not n.endswith(COUNTERS)]
    extra = [n for n in tensors if n not in own]
    other = [
        f"{n} {tuple(tensors[n].shape)}, here {tuple(own[n].shape)}"
        for n in needed
        if n in tensors and tensors[n].shape != own[n].shape
    ]
    said = [
        f"{what} {_few(names)}"
        for what, names in (("lacks", missing), ("has besides", extra), ("differs in", other))
        if names
    ]
    if said:
        why = f"{type(model).__name__}: it {'; it '.join(said)}"
        raise ValueError(f"{source} does not fit {otherwise or why}")
    taken = {n: tensors[n] for n in needed if n in tensors}
    # A buffer of a network may be infinite, as a mask is; then that of a file may be too.
    weights.require_finite({n: t for n, t in taken.items() if own[n].isfinite().all()}, source)
    try:
        model.load_state_dict(taken, strict=False)
    except RuntimeError as error:  # a layer of ours refuses what was trained for other scales
        reason = " ".join(str(error).split())
        why = f"{type(model).__name__}: {reason:.300}"
        raise ValueError(f"{source} does not fit {otherwise or why}") from None


def _few(names: list[str]) -> str:
    more = f" and {len(names) - FEW} more" if len(names) > FEW else ""
    return ", ".join(map(readable, names[:FEW])) + more


def readable(name: str) -> str:
    """A stranger's text, if it is fit to be printed; else what it begins with."""
    return name if name.isprintable() and len(name) < 200 else f"{name!r:.80}"
