"""Files that would run a program if they were unpickled, wherever a file is taken from a user.

A canary tells whether anything ran: a folder that every one of these pickles would make.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import pickle
import random
import struct
import subprocess
import sys
import tarfile
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

import mssar
from faults.suite import Row, share
from faults.vision import has_torchvision
from mssar.lab import cli, records, timings
from mssar.lab.data import pictures
from mssar.surgery import foreign, initial

WHOLE = 540  # cases
SUFFIXES = (
    *(".safetensors", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".bin", ".tar", ".npy", ".npz"),
    *(".json", ".jsonl", ".PTH", ".pt2", ".onnx", ".png", ""),
)


class Runs:
    """A pickle of it calls a function when it is loaded."""

    def __init__(self, call: Callable[..., object], *arguments: object) -> None:
        self.how = call, arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.how


GADGETS: dict[str, Callable[[str], Runs]] = {
    "mkdir": lambda canary: Runs(os.mkdir, canary),
    "exec": lambda canary: Runs(exec, f"import os; os.mkdir({canary!r})"),
    "system": lambda canary: Runs(os.system, f"mkdir {canary}"),
    "popen": lambda canary: Runs(subprocess.check_call, ["mkdir", canary]),
}


def _saved(value: object, zipped: bool) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(value, file, _use_new_zipfile_serialization=zipped)
    return file.getvalue()


def _numpy(value: object, several: bool) -> bytes:
    file, array = io.BytesIO(), np.array([value], dtype=object)
    if several:
        np.savez(file, data=array, allow_pickle=True)
    else:
        np.save(file, array, allow_pickle=True)
    return file.getvalue()


def _tar(value: object) -> bytes:
    """As torch saved before it had a format of its own; also an archive of CIFAR's."""
    content, file = pickle.dumps(value, 2), io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name in ("pickle", "storages", "tensors", "cifar-10-batches-py/data_batch_1"):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


def _headed(value: object) -> bytes:
    """Behind a header as safetensors has it."""
    content = pickle.dumps(value, 4)
    return struct.pack("<Q", len(content)) + content


FORMS: dict[str, Callable[[object], bytes]] = {
    **{f"pickle {p}": lambda value, p=p: pickle.dumps(value, p) for p in (0, 2, 4, 5)},  # type: ignore[misc]
    "torch": lambda value: _saved(value, True),
    "old torch": lambda value: _saved(value, False),
    "state dict": lambda value: _saved({"state_dict": {"fc.weight": value}}, True),
    "npy": lambda value: _numpy(value, False),
    "npz": lambda value: _numpy(value, True),
    "tar": _tar,
    "gzip": lambda value: gzip.compress(pickle.dumps(value, 2)),
    "header": _headed,
}

Use = Callable[[Path, bytes, str], None]  # of an empty folder, a file's content, and its suffix


def _command(*words: str, name: str = "file", keep: str = "") -> Use:
    """A verb, with FILE and FOLDER in its words. ``keep`` is what the file is always called."""

    def use(folder: Path, content: bytes, suffix: str) -> None:
        path = folder / (keep or f"{name}{suffix}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        put = {"FILE": str(path), "FOLDER": str(folder)}
        sys.argv = ["mssar", *(put.get(word, word) for word in words)]
        cli.main()

    return use


def _function(call: Callable[[Path], object], keep: str = "") -> Use:
    def use(folder: Path, content: bytes, suffix: str) -> None:
        path = folder / (keep or f"file{suffix}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        call(path)

    return use


def _shared(wanted: str) -> Callable[[Path], object]:
    """A folder of save_pretrained with one file of it exchanged."""

    def call(path: Path) -> object:
        content = path.read_bytes()
        mssar.create_model("resnet8").save_pretrained(path.parent)
        (path.parent / wanted).write_bytes(content)
        return mssar.from_pretrained(path.parent)

    return call


def _cached(path: Path) -> object:
    """As torchvision's cache has it. It looks at no checksum of what is there already."""
    os.environ["TORCH_HOME"] = str(path.parents[2])
    try:
        return foreign.pretrained("torchvision:squeezenet1_1")
    finally:
        del os.environ["TORCH_HOME"]


CHECKPOINT = "epoch-0001.safetensors"
CACHE = "a file in torchvision's cache"
PROMISE = "does not run; one line"
USES: dict[str, list[Use]] = {
    "weights": [
        _command("train", "resnet8", "--weights", "FILE", "--runs", "FOLDER"),
        _function(lambda path: mssar.create_model("resnet8", "mssar", weights=path)),
        _function(initial.read),
    ],
    "a run, a checkpoint": [
        *(_command(verb, "FILE") for verb in ("eval", "export")),
        _command("explain", "FILE", "test:0"),
        _command("weights", "FILE", "out.safetensors"),
        *(_command(verb, "FOLDER", keep=CHECKPOINT) for verb in ("eval", "export")),
        _command("weights", "FOLDER", "out.safetensors", keep=CHECKPOINT),
        _command("explain", "FOLDER", "test:0", keep=CHECKPOINT),
    ],
    "records and timings": [
        _command("report", "FILE"),
        _command("report", "FOLDER", keep="run/record.json"),
        _command("report", "FOLDER", keep="records.jsonl"),
        _command("report", "FOLDER", keep=f"run/{CHECKPOINT}"),
        _command("reproduce", "table3", "--list", "--records", "FOLDER", keep="table3.jsonl"),
        _function(records.read),
        _function(timings.read),
    ],
    "data": [
        _command("data", "check", "cifar10", "--data-dir", "FOLDER", keep=f"{part}/{file}")
        for part, file in (
            ("cifar-10-batches-py", "data_batch_1"),
            ("cifar-10-batches-bin", "data_batch_1.bin"),
        )
    ]
    + [
        _command("data", "check", "cifar10", "--data-dir", "FOLDER", keep="cifar-10-python.tar.gz"),
        _command("data", "check", "cifar100", "--data-dir", "FOLDER", keep="cifar-100-python/test"),
        _function(lambda path: pictures.decode(path.read_bytes())),
    ],
    "a network's folder": [
        _function(_shared(file), keep=file)
        for file in ("model.safetensors", "config.json", "pytorch_model.bin")
    ],
    CACHE: [
        _function(_cached, keep="hub/checkpoints/squeezenet1_1-b8a52dc0.pth"),
    ],
}


def attempt(use: Use, form: str, gadget: str, suffix: str) -> str:
    """What went wrong; nothing, if it was refused in a line."""
    with tempfile.TemporaryDirectory() as made, contextlib.chdir(made):
        canary, folder = Path(made, "canary"), Path(made, "given")
        folder.mkdir()
        content = FORMS[form](GADGETS[gadget](str(canary)))
        said, before = io.StringIO(), sys.argv
        escaped = ""
        try:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
                use(folder, content, suffix)
        except SystemExit as stop:
            lines = [line for line in said.getvalue().splitlines() if line.startswith("mssar: ")]
            if stop.code not in (0, None, 1, 2):
                escaped = f"status {stop.code}"
            elif stop.code and len(lines) != 1 and not all(", line " in line for line in lines):
                escaped = f"{len(lines)} lines: {said.getvalue()[-300:]!r}"
            elif stop.code and not lines:
                escaped = "not a word"
        except (ValueError, OSError) as error:
            if len(str(error).splitlines()) != 1:
                escaped = f"not one line: {error!r:.300}"
        except BaseException as error:
            escaped = f"{type(error).__name__}: {error!r:.300}"
        finally:
            sys.argv = before
        return "the program ran" if canary.exists() else escaped


def check(effort: float, seed: int) -> Iterator[Row]:
    dice = random.Random(seed)
    each = share(WHOLE, effort, sum(map(len, USES.values()))) // sum(map(len, USES.values()))
    for where, uses in USES.items():
        tried = wrong = 0
        if uses is USES[CACHE] and not has_torchvision():
            yield Row(f"a pickle that runs a program, as {where}", PROMISE, 0, 0, "no torchvision")
            continue
        for number, use in enumerate(uses):
            for _ in range(each):
                chosen = dice.choice([*FORMS]), dice.choice([*GADGETS]), dice.choice(SUFFIXES)
                trouble = attempt(use, *chosen)
                tried, wrong = tried + 1, wrong + bool(trouble)
                if trouble:
                    case = f"USES[{where!r}][{number}], *{chosen!r}"
                    print(f"intruders: attempt({case}): {trouble}", file=sys.stderr)
        yield Row(f"a pickle that runs a program, as {where}", PROMISE, tried, wrong)
