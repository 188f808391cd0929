"""Weights of others: files of torch.save, which are pickles, given to ``--weights``."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import mssar
from faults.files.mutation import changed
from faults.files.payloads import payloads
from faults.files.sandbox import Case, Family, WrongError
from mssar.networks import weights
from mssar.surgery import initial

TORN, SPOILT = "file of torch.save, torn or changed", "file of torch.save, strange tensors"
PAYLOAD = "pickle with a payload, under every ending"
BOMB = "file of torch.save that unpacks to 400 MiB"
CLEAR = "one line that names the file, or the numbers as they were"
NOTHING = "one line that names the file; nothing runs"
ENDINGS = (*weights.PICKLES, ".safetensors", ".PTH", ".npz", ".json", "")


class Made(NamedTuple):
    state: dict[str, Tensor]
    files: dict[str, bytes]
    model: nn.Module


def saved(value: Any, *, zipped: bool = True) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, _use_new_zipfile_serialization=zipped)
    return stream.getvalue()


def prepare(place: Path) -> Made:
    torch.manual_seed(0)
    model = mssar.create_model("resnet8", "none")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    small = {name: t for name, t in state.items() if t.numel() < 200}
    files = {"zip": saved(state), "old": saved(state, zipped=False)}
    files |= {"few": saved(small), "old few": saved(small, zipped=False)}
    files["wrapped"] = saved({"state_dict": {f"module.{k}": v for k, v in small.items()}})
    made = Made(state, files, model)
    (place / "a").mkdir(parents=True)
    for kind in ("zip", "old"):  # unchanged they are read, number by number
        found = take(Case(Random(0), 0, place / "a"), "a.pt", files[kind], made)
        assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    return made


def take(case: Case, name: str, data: bytes, made: Made) -> dict[str, Tensor]:
    """All that is done with such a file: read, told apart by its contents, put into a network."""
    file = case.folder / name
    file.write_bytes(data)
    case.names = (str(file),)
    found = initial.read(file).tensors
    initial.digest_of(found)
    initial.fit(made.model, found, str(file))
    for key, tensor in made.model.state_dict().items():
        if not tensor.isfinite().all():
            raise WrongError(f"{key} is not finite")
    return found


def torn(made: Made, case: Case) -> None:
    kind = case.random.choice(list(made.files))
    data = made.files[kind]
    what, torn = changed(case.random, data)
    if case.random.random() < 0.5 and "old" not in kind:  # in the pickle, with a right checksum
        what, torn = repacked(case, data)
    case.begin(TORN, f"{kind}, {what}")
    take(case, "a" + case.random.choice(weights.PICKLES), torn, made)


def repacked(case: Case, data: bytes) -> tuple[str, bytes]:
    """A zip one of whose entries is changed, left out, doubled or compressed."""
    stream, what = io.BytesIO(), ""
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(stream, "w") as new:
        names = old.namelist()
        chosen = next(n for n in names if n.endswith("data.pkl"))
        chosen = case.random.choice([chosen, chosen, case.random.choice(names)])
        for name in names:
            content = old.read(name)
            if name == chosen:
                if case.random.random() < 0.15:
                    what = f"without {name}"
                    continue
                what, content = changed(case.random, content) if content else ("as it is", b"x")
                what = f"{name}, {what}"
            new.writestr(name, content)
    return what, stream.getvalue()


def strange(made: Made) -> dict[str, Callable[[], bytes]]:
    state = made.state
    some = "layer1.0.conv1.weight"
    one = state[some]

    def with_one(tensor: Any) -> Callable[[], bytes]:
        return lambda: saved({**state, some: tensor})

    variance = torch.full((16,), torch.nan)
    spoilt = {value: torch.full_like(one, value) for value in map(float, ("nan", "inf", "-inf"))}
    found = {f"a weight of {value}": with_one(tensor) for value, tensor in spoilt.items()}
    found |= {
        "a variance of NaN": lambda: saved({**state, "bn1.running_var": variance}),
        "one number as 10^12": with_one(torch.zeros(1).expand(10**6, 10**6)),
        "one number as 300 million": with_one(torch.zeros(1).expand(300_000_000)),
        "sparse": with_one(one.to_sparse()),
        "on no device": with_one(one.to("meta")),
        "complex": with_one(one.to(torch.complex64)),
        "whole numbers": with_one(one.to(torch.int64)),
        "half": with_one(one.half()),
        "eight bits": with_one(one.to(torch.float8_e4m3fn)),
        "another shape": with_one(one.reshape(-1)),
        "no tensor": with_one([1, 2]),
        "nothing in it": lambda: saved({}),
        "a tensor alone": lambda: saved(one),
        "a list": lambda: saved([one]),
        "numbers for names": lambda: saved({1: one}),
        "wrapped in itself twice": lambda: saved({"state_dict": {"model": {"model": state}}}),
        "a name with an end of line": lambda: saved({**state, "a\nb\x1b[2J": one}),
        "a long name": lambda: saved({**state, "a" * 100_000: one}),
        "10,000 more": lambda: saved({**state, **{f"n{i}": one[0, 0, 0] for i in range(10_000)}}),
        "quantised": with_one(torch.quantize_per_tensor(one, 0.1, 0, torch.qint8)),
        "nested": with_one(torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])),
    }  # fmt: skip
    return found


def pickles(made: Made, case: Case) -> None:
    """Payloads under every ending, strange tensors, and small files of much."""
    way = case.number % 4
    if way == 0:
        kinds = strange(made)
        what = list(kinds)[case.number // 4 % len(kinds)]
        case.begin(SPOILT, what)
        take(case, "a.pt", kinds[what](), made)
        return
    if way == 1 and case.number % 40 == 1:
        case.begin(BOMB, "deflated")
        take(case, "a.pt", bomb(made.files["zip"]), made)
        raise WrongError("taken as good")
    kinds = payloads(case.payload)
    what, ending = case.random.choice(list(kinds)), case.random.choice(ENDINGS)
    data = kinds[what]()
    if case.random.random() < 0.5:
        data = in_zip(made.files["zip"], data)
    case.begin(PAYLOAD, f"{what}, as {ending or 'no ending'}")
    take(case, f"a{ending}", data, made)
    raise WrongError("taken as good")


def in_zip(data: bytes, pickled: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(stream, "w") as new:
        for name in old.namelist():
            new.writestr(name, pickled if name.endswith("data.pkl") else old.read(name))
    return stream.getvalue()


@cache
def bomb(data: bytes) -> bytes:
    """The numbers as 400 MiB of zeros, deflated."""
    stream = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(data)) as old,
        zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as new,
    ):
        for name in old.namelist():
            if name.endswith("/data/0"):
                with new.open(name, "w") as entry:
                    for _ in range(400):
                        entry.write(bytes(1 << 20))
            else:
                new.writestr(name, old.read(name))
    return stream.getvalue()


FAMILIES = (
    Family("foreign", {TORN: CLEAR}, 800, 256, prepare, torn),
    Family(
        "pickles",
        {PAYLOAD: NOTHING, SPOILT: CLEAR, BOMB: "one line that names the file"},
        *(400, 256, prepare, pickles),
    ),
)
