"""What is no file where one is looked for: pipes, devices, folders, dangling links, gigabytes.

Each is named and none is waited for.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import mssar
from faults.files.dataset import empty
from faults.files.sandbox import Case, Family, WrongError
from mssar.lab import records, timings
from mssar.lab.commands.pictures import picture
from mssar.lab.data import cifar, imagefolder, pictures
from mssar.lab.engine import checkpoint, evaluate, result
from mssar.lab.report.collect import collect
from mssar.surgery import initial

ROW = "pipe, device, folder or link in a file's place"
PROMISE = "named in one line, and not waited for"


def pipe(place: Path) -> None:
    os.mkfifo(place)


def linked_to(target: str) -> Callable[[Path], None]:
    return lambda place: place.symlink_to(target)


def linked_pipe(place: Path) -> None:
    os.mkfifo(place.with_name("pipe"))
    place.symlink_to(place.with_name("pipe"))


def sparse(place: Path) -> None:
    """2 GiB that take no room on the disk."""
    with place.open("wb") as file:
        file.truncate(2 << 30)


MADE: dict[str, Callable[[Path], None]] = {
    "a pipe": pipe,
    "a link to a pipe": linked_pipe,
    "a link to /dev/zero": linked_to("/dev/zero"),
    "a folder": lambda place: place.mkdir(),
    "a link to nothing": linked_to("nowhere"),
    "a link to itself": lambda place: place.symlink_to(place.name),
    "2 GiB of nothing": sparse,
}


def photographs(folder: Path) -> None:
    """A class's folder that has it beside a good one."""
    from PIL import Image

    for split in ("train", "val"):
        for name in ("a", "b"):
            (folder / split / name).mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(folder / split / name / "good.png")
    (folder / "file").rename(folder / "train" / "a" / "file.png")
    found = imagefolder.open_folder(folder)
    paths = [folder / path for path in found.train.paths if path.endswith("file.png")]
    for path in paths:
        try:
            pictures.decode(pictures.contents(path))
        except Exception as error:  # as a worker does
            raise ValueError(f"{path}: {pictures.reason_of(error)}") from None


def page(folder: Path, name: str) -> None:
    (folder / "run").mkdir()
    (folder / "file").rename(folder / "run" / name)
    found = collect([folder / "run"])
    if (folder / "run" / name).is_dir():  # that has nothing in it
        raise ValueError(f"{folder}: {found}")
    if not found.problems:
        raise WrongError("a page says nothing of it")
    raise ValueError("; ".join(found.problems))


def run_record(folder: Path) -> None:
    (folder / "file").rename(folder / result.NAME)
    if result.finished(folder) is None:
        raise ValueError(f"{folder} has none")


def pretrained(folder: Path, name: str) -> None:
    mssar.create_model("resnet8").save_pretrained(folder / "net")
    (folder / "net" / name).unlink()
    (folder / "file").rename(folder / "net" / name)
    mssar.from_pretrained(folder / "net")


def as_name(folder: Path, name: str) -> Path:
    (folder / "file").rename(folder / name)
    return folder / name


READERS: dict[str, Callable[[Path], object]] = {
    "records": lambda f: _some(records.read(as_name(f, "file.jsonl")), f),
    "timings": lambda f: _some(timings.read(as_name(f, "file.jsonl")), f),
    "folder of records": lambda f: (as_name(f, "file.jsonl"), _some(records.read(f), f)),
    "a run's record": run_record,
    "page, records": lambda f: page(f, "file.jsonl"),
    "page, checkpoint": lambda f: page(f, "epoch-0001.safetensors"),
    "checkpoint": lambda f: checkpoint.load(as_name(f, "epoch-0001.safetensors")),
    "newest checkpoint": lambda f: (
        as_name(f, "epoch-0001.safetensors"),
        checkpoint.newest(f, lambda _: None),
    ),
    "mssar eval": lambda f: evaluate.trained(as_name(f, "file.safetensors")),
    "create_model": lambda f: mssar.create_model(
        "resnet8", weights=as_name(f, "file.safetensors")
    ),
    "--weights of others": lambda f: initial.read(as_name(f, "file.pth")),
    "config.json": lambda f: pretrained(f, "config.json"),
    "model.safetensors": lambda f: pretrained(f, "model.safetensors"),
    "photographs": photographs,
    "a picture to explain": lambda f: picture(str(as_name(f, "file.png")), None, None),  # type: ignore[arg-type]
    "archive of a data set": lambda f: (
        as_name(f, "cifar-10-binary.tar.gz"),
        cifar.load("cifar10", f),
    ),
    "batch of a data set": lambda f: (
        (f / "cifar-10-batches-bin").mkdir(),
        (f / "file").rename(f / "cifar-10-batches-bin" / "test_batch.bin"),
        cifar.load("cifar10", f),
    ),
}  # fmt: skip


def _some(found: list[object], folder: Path) -> None:
    """A folder of none and a link to nothing have no records, and that is no mistake."""
    if found:
        raise WrongError(f"{found} in {folder}")
    raise ValueError(f"{folder} has none")


def attempt(_: object, case: Case) -> None:
    pairs = [(what, reader) for reader in READERS for what in MADE]
    what, reader = pairs[case.number * 11 % len(pairs)]  # 119 of them
    case.begin(ROW, f"{what} as {reader}", str(case.folder))
    empty(case.folder)
    MADE[what](case.folder / "file")
    try:
        READERS[reader](case.folder)
    except OSError as error:  # which the command says in one line, if it knows the file
        if error.errno is None or not error.filename:
            raise
        raise ValueError(f"{error.strerror}: {error.filename}") from None
    raise WrongError("taken for a file")


FAMILIES = (
    Family("special", {ROW: PROMISE}, len(MADE) * len(READERS), 256, lambda _: None, attempt),
)
