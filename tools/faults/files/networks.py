"""Checkpoints, files of weights, and folders that others can load."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

import mssar
from faults.files.mutation import Change, changed, flip, restructured, text
from faults.files.sandbox import Case, Family, WrongError
from mssar.lab.commands.pictures import data_for, picture
from mssar.lab.engine import checkpoint, evaluate
from mssar.lab.engine.checkpoint import Brought, Progress
from mssar.lab.recipes import DEMO
from mssar.lab.report import build, page
from mssar.lab.report.collect import collect
from mssar.lab.run import Run
from mssar.networks import weights
from mssar.networks.signature import HEADER, NUMBERS

NAME = "torn.safetensors"
NOTICED = "refused: a changed byte is noticed"
CLEAR = "one line that names the file, or the network as the file has it"
REGIONS = ("the header's length", "the header", "a SHA-256", "padding", "the numbers")
SIGNED = {f"signed file, one bit of {region}": NOTICED for region in REGIONS}
TORN, CRAFTED = "signed file, torn or mixed up", "checkpoint or weights, crafted header"
SPOILT = "checkpoint or weights, crafted numbers"
FOLDER = "folder of from_pretrained, changed"
_TYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
ODD = ("BF16", "F16", "F8_E4M3", "F4", "I8", "U64", "C64", "BOOL", "X", "", "f32")


class File(NamedTuple):
    """A safetensors file in its parts."""

    header: dict[str, Any]
    numbers: bytes

    @classmethod
    def of(cls, data: bytes) -> File:
        length = int.from_bytes(data[:8], "little")
        return cls(json.loads(data[8 : 8 + length]), data[8 + length :])

    def data(self, *, signed: bool) -> bytes:
        header = self.header
        notes = header.get("__metadata__") if isinstance(header, dict) else None
        if signed and isinstance(notes, dict):
            digest = hashlib.sha256(self.numbers).hexdigest()
            notes = notes | {HEADER: "0" * 64, NUMBERS: digest}
            header = header | {"__metadata__": notes}
        said = text(header).encode()
        said += b" " * (-len(said) % 8)
        if signed:
            said = said.replace(b"0" * 64, hashlib.sha256(said).hexdigest().encode(), 1)
        return len(said).to_bytes(8, "little") + said + self.numbers

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """A tensor, read with nothing but NumPy."""
        one = self.header[name]
        begin, end = one["data_offsets"]
        kind = _TYPES[one["dtype"]]
        return np.frombuffer(self.numbers[begin:end], kind).reshape(one["shape"])


class Made(NamedTuple):
    """Good files to begin with."""

    small: dict[str, bytes]  # a checkpoint and weights with few numbers, signed
    whole: dict[str, bytes]  # those of a network
    folder: dict[str, bytes]  # of save_pretrained


def progress() -> Progress:
    run = Run("resnet8", "mssar", {}, "cifar10", DEMO, 3).as_dict()
    epoch = {
        "epoch": 1,
        "lr": 0.1,
        "train_loss": 1.5,
        "train_error": 40.0,
        "test_loss": 1.25,
        "test_error": 30.0,
        "test_error5": 5.0,
        "seconds": 2.5,
    }
    made = Progress(run, "sha256:ab", "fp32", "0123456789abcdef", "2026-01-31T00:00:00+00:00")
    made.epoch, made.history, made.class_errors = 1, [epoch], [30.0] * 10
    made.makers = [{"hardware": "a CPU", "source": "cd"}]
    return made


def note() -> dict[str, Any]:
    run = progress().run
    return {
        "schema": 1,
        **{name: run[name] for name in ("network", "recalibration", "options", "dataset")},
        "classes": [f"class {i}" for i in range(10)],
        "size": [3, 32, 32],
        "mean": [0.5, 0.4, 0.3],
        "std": [0.2, 0.2, 0.25],
        "error": 30.0,
        "error5": 5.0,
        "recorded_error": 30.0,
        "epoch": 8,
        "data": "sha256:ab",
        "record": "0123456789abcdef",
        "run": run,
    }


def files(state: Mapping[str, Tensor]) -> dict[str, bytes]:
    """As `mssar train` and `mssar weights` write them."""
    learnt = {f"model.{name}": tensor for name, tensor in state.items()}
    run = {"mssar": json.dumps(asdict(progress()))}
    said = {"format": "pt", weights.NOTE: json.dumps(note())}
    return {
        "checkpoint": Brought(learnt).file(run, signed=True),
        "weights": Brought(state).file(said, signed=True),
    }


def prepare(place: Path) -> Made:
    torch.manual_seed(0)
    few = {"fc.weight": torch.randn(10, 3), "fc.bias": torch.randn(10), "n": torch.tensor([7])}
    net = mssar.create_model("resnet8", "mssar")
    net.save_pretrained(place / "net")
    folder = {p.name: p.read_bytes() for p in (place / "net").iterdir() if p.suffix != ".md"}
    state = {k: t.half() if k == "conv.weight" else t for k, t in net.state_dict().items()}
    made = Made(files(few), files(state), folder)
    file = place / NAME
    for some in (made.small, made.whole):  # unchanged they are read, or no refusal would say much
        for kind, data in some.items():
            file.write_bytes(data)
            READ[kind](file)
    opened(file)
    network(file)
    mssar.from_pretrained(place / "net")
    return made


READ: dict[str, Callable[[Path], object]] = {"checkpoint": checkpoint.load, "weights": weights.read}


def signed(made: Made, case: Case) -> None:
    """One byte after another of both files, each once; then all that else happens to files."""
    kind = ("checkpoint", "weights")[case.number % 2]
    data, number = made.small[kind], case.number // 2
    file = case.folder / NAME
    if number < len(data):
        place = number * 1009 % len(data)  # a prime: all places, and soon everywhere
        bit = case.random.randrange(8)
        case.begin(f"signed file, one bit of {region(data, place)}", f"{kind}, {place}.{bit}", NAME)
        file.write_bytes(flip(data, place, bit))
    else:
        what, torn = changed(case.random, data)
        case.begin(TORN, f"{kind}, {what}", NAME)
        file.write_bytes(torn)
    READ[kind](file)
    raise WrongError("not noticed")


def region(data: bytes, place: int) -> str:
    length = int.from_bytes(data[:8], "little")
    if place < 8:
        return REGIONS[0]
    if place >= 8 + length:
        return REGIONS[4]
    if place >= 8 + len(data[8 : 8 + length].rstrip()):
        return REGIONS[3]
    for key in (HEADER, NUMBERS):
        begin = data.index(f'"{key}": "'.encode()) + len(key) + 5
        if begin <= place < begin + 64:
            return REGIONS[2]
    return REGIONS[1]


def recrafted(random: Random, data: bytes) -> tuple[str, str, bytes]:
    """A file whose header or numbers say something else, whole and mostly signed anew."""
    file, sign = File.of(data), random.random() < 0.7
    way = random.choice(("notes", "notes", "notes", "tensors", "dtype", "shape", "numbers"))
    names = [name for name in file.header if name != "__metadata__"]
    name = random.choice(names)
    if way == "notes":
        key = next(k for k in file.header["__metadata__"] if k in ("mssar", weights.NOTE))
        what, value = restructured(random, json.loads(file.header["__metadata__"][key]))
        notes = file.header["__metadata__"] | {key: text(value)}
        return (
            CRAFTED,
            what,
            File({**file.header, "__metadata__": notes}, file.numbers).data(signed=sign),
        )
    if way == "numbers":
        spoil = random.choice((float("nan"), float("inf"), float("-inf"), 3e38))
        numbers = bytearray(file.numbers)
        begin, end = file.header[name]["data_offsets"]
        kind = _TYPES[file.header[name]["dtype"]]
        if issubclass(kind, np.floating) and end > begin:
            with np.errstate(over="ignore"):
                one = np.array([spoil], kind).tobytes()
            numbers[begin : begin + len(one)] = one
        else:
            numbers[begin:end] = random.randbytes(end - begin)
        return SPOILT, f"{name} {spoil}", File(file.header, bytes(numbers)).data(signed=sign)
    if way == "tensors":
        what, value = restructured(random, file.header)
        return CRAFTED, what, File(value, file.numbers).data(signed=sign)
    one = dict(file.header[name])
    if way == "dtype":
        one["dtype"] = random.choice(ODD)
    else:
        shape = one["shape"]
        one["shape"] = random.choice(
            [
                *([*shape, 1], shape[::-1], [1, *shape], [int(np.prod(shape))], shape[1:]),
                *([2**62, 4], [2**32, 2**32], [0, *shape], [-1], [10**30], [1.0], [2**63 - 1]),
            ]
        )
    what = f"{way} of {name}: {one}"
    return CRAFTED, what, File({**file.header, name: one}, file.numbers).data(signed=sign)


def crafted(made: Made, case: Case) -> None:
    kind = case.random.choice(list(made.whole))
    row, what, data = recrafted(case.random, made.whole[kind])
    case.begin(row, f"{kind}, {what}", NAME)
    _try_all(case, [lambda file: loaded(file, kind), opened, network, shown], data)


def _try_all(case: Case, ways: list[Callable[[Path], None]], data: bytes) -> None:
    """Every way that such a file can be read. Each is judged; the first refusal is shown."""
    file = case.folder / NAME
    file.write_bytes(data)
    refusals = []
    for way in ways:
        try:
            way(file)
        except ValueError as refusal:
            refusals.append(refusal)
            if type(refusal) is not ValueError or NAME not in str(refusal):
                raise
    if refusals:
        raise refusals[0]


def loaded(file: Path, kind: str) -> None:
    found = checkpoint.load(file)[1] if kind == "checkpoint" else weights.read(file).tensors
    said = File.of(file.read_bytes())
    prefix = "" if kind == "checkpoint" or "mssar" not in _notes(said) else "model."
    for name, tensor in found.items():
        if said.header[f"{prefix}{name}"]["dtype"] in _TYPES:
            _require_equal(tensor, said.array(f"{prefix}{name}"), name)


def _notes(said: File) -> dict[str, str]:
    return said.header.get("__metadata__") or {}


def opened(file: Path) -> None:
    """What `mssar eval`, `explain` and `export` open."""
    chosen = evaluate.trained(file)
    _require_network(chosen.model, File.of(file.read_bytes()))
    image = str(file.with_name("one.png"))
    Image.new("RGB", (40, 30), (10, 200, 90)).save(image)
    if chosen.note is not None and chosen.run.dataset == "cifar10":  # which is not there
        pixels, _ = picture(image, data_for(chosen, None, [image]), chosen)
        if pixels.shape != (*chosen.note["size"][1:], 3) or pixels.float().std((0, 1)).max() > 3:
            raise WrongError("a picture of one colour is none any more")


def shown(file: Path) -> None:
    """What a page is made of, if a folder has it: one line for what cannot be read."""
    folder = file.with_name("run")
    folder.mkdir(exist_ok=True)
    (folder / "epoch-0001.safetensors").write_bytes(file.read_bytes())
    found = collect([folder])
    if len(found.going) + len(found.problems) != 1:
        raise WrongError(f"the page says {found.problems}")
    page.html(build.side_by_side(found)).encode()


def network(file: Path) -> None:
    """What a program opens."""
    _require_network(
        mssar.create_model("resnet8", "mssar", weights=file), File.of(file.read_bytes())
    )


def _require_network(model: nn.Module, said: File) -> None:
    """It computes, and with the numbers that are in the file."""
    prefix = "model." if "mssar" in _notes(said) else ""
    for name, tensor in model.state_dict().items():
        if not tensor.isfinite().all():
            raise WrongError(f"{name} is not finite")
        one = said.header.get(f"{prefix}{name}")
        if one is not None and one["dtype"] in _TYPES:
            _require_equal(tensor, said.array(f"{prefix}{name}"), name)
    with torch.no_grad():
        model.eval()(torch.zeros(1, 3, 32, 32))  # of finite weights, however large they are


def _require_equal(tensor: Tensor, there: np.ndarray[Any, Any], name: str) -> None:
    if there.size == 1 and tensor.numel() == 1:  # PyTorch takes [1] for a number, as it once was
        there = there.reshape(tensor.shape)
    if tuple(tensor.shape) != there.shape:
        raise WrongError(f"{name} is {tuple(tensor.shape)}, in the file {there.shape}")
    mine = tensor.numpy()
    with np.errstate(all="ignore"):
        same = np.array_equal(mine, there.astype(mine.dtype), equal_nan=mine.dtype.kind == "f")
    if not same:
        raise WrongError(f"{name} has other numbers than the file")


def pretrained(made: Made, case: Case) -> None:
    name = case.random.choice(("config.json", "config.json", "model.safetensors"))
    data = made.folder[name]
    if name == "config.json" and case.random.random() < 0.8:
        what, value = restructured(case.random, json.loads(data))
        change = Change(what, text(value).encode())
    elif case.random.random() < 0.5 or name == "config.json":
        change = changed(case.random, data)
    else:
        _, what, torn = recrafted(case.random, _with_notes(data))
        change = Change(what, torn)
    case.begin(FOLDER, f"{name}, {change.what}", str(case.folder))
    for file, content in {**made.folder, name: change.data}.items():
        (case.folder / file).write_bytes(content)
    model = mssar.from_pretrained(case.folder)
    _require_network(model, File.of((case.folder / "model.safetensors").read_bytes()))


def _with_notes(data: bytes) -> bytes:
    file = File.of(data)
    notes = {"format": "pt", weights.NOTE: json.dumps(note())}
    return File({**file.header, "__metadata__": notes}, file.numbers).data(signed=False)


FAMILIES = (
    Family("signed", {**SIGNED, TORN: NOTICED}, 5400, 64, prepare, signed),
    Family("crafted", {CRAFTED: CLEAR, SPOILT: CLEAR}, 700, 256, prepare, crafted),
    Family("folders", {FOLDER: CLEAR}, 500, 256, prepare, pretrained),
)
