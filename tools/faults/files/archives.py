"""Data sets as people download them: archives, torn, changed or made to harm."""

from __future__ import annotations

import struct
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random

from faults.files.dataset import NAME, Made, compressed, empty, packed, prepare, require_fine
from faults.files.mutation import changed
from faults.files.sandbox import Case, Family, WrongError
from mssar.lab.data import cifar, fetch

HOSTILE_TAR, TORN_TAR = "archive made to harm", "archive, torn or changed"
OURS = "one line that names the archive; nothing beside the folder is touched"
PROMISES = {HOSTILE_TAR: OURS, TORN_TAR: f"{OURS}, or the images as they were"}
BOMB = 400 << 20  # bytes that a small file unpacks to


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
        data = compressed(tar[:start] + block + tar[start + 512 :])
    elif within:
        what, torn = changed(case.random, tar)
        data = compressed(torn)
    else:
        what, data = changed(case.random, compressed(tar))
    case.begin(TORN_TAR, f"{form.archive}, {what}", str(case.folder))
    empty(case.folder)
    (case.folder / form.archive).write_bytes(data)
    require_fine(cifar.load(NAME, case.folder), made, same=not within)


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
        return lambda: compressed(packed(made.binary, form.folder, (member, content)))

    first = f"{form.folder}/test_batch.bin"
    names = ("../x", "../../x", f"{form.folder}/../../x", str(outside / "x"), "..", "a/../../b")
    names += ("..\\x", "C:\\x", "c:x", "\\\\host\\x", "a/..\\..\\x", "//x", f"/{first}")
    found = {f"member {name!r}": with_member(_member(name), b"x") for name in names}
    kinds = {"symbolic link": tarfile.SYMTYPE, "hard link": tarfile.LNKTYPE}
    for kind, code in kinds.items():
        for link in ("../../x", str(outside / "kept.txt"), first, ".", "/etc/passwd"):
            found[f"{kind} to {link}"] = with_member(_member(f"{form.folder}/l", code, link))
            found[f"{kind} to {link} as a wanted file"] = lambda code=code, link=link: compressed(
                packed({}, form.folder, (_member(first, code, link), b""))
            )
    devices = {"FIFO": b"6", "character device": b"3", "block device": b"4", "contiguous": b"7"}
    for kind, code in (*devices.items(), ("sparse", b"S"), ("unknown", b"Z"), ("volume", b"V")):
        found[f"{kind}"] = with_member(_member(f"{form.folder}/d", code))
        found[f"{kind} as a wanted file"] = lambda code=code: compressed(
            packed({}, form.folder, (_member(first, code), b""))
        )
    found["a file twice"] = with_member(_member(first), made.binary["test_batch.bin"])
    found["a folder as a wanted file"] = lambda: compressed(
        packed({}, form.folder, (_member(first, tarfile.DIRTYPE), b""))
    )
    longs = {"long name": b"L", "long link": b"K", "extension": b"x", "extension of all": b"g"}
    for name, code in longs.items():
        found[f"{name} of 400 MiB"] = lambda code=code: _long(code, BOMB)
    found["400 MiB of zeros"] = lambda: _long(b"0", BOMB)
    found["400 MiB of zeros after the end"] = lambda: (
        compressed(packed(made.binary, form.folder)) + _long(b"0", BOMB)
    )
    for said in (
        {"size": "9" * 30}, {"size": "-1"}, {"size": "x"}, {"path": "../x"}, {"path": "a\0b"},
        {"path": "a" * 100_000}, {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"},
        {"GNU.sparse.size": "9" * 20}, {"GNU.sparse.map": "0,9,9"}, {"hdrcharset": "BINARY"},
        {"GNU.sparse.realsize": str(BOMB), "GNU.sparse.major": "1", "GNU.sparse.minor": "0"},
    ):  # fmt: skip
        found[f"extension {str(said)[:60]}"] = lambda said=said: compressed(_pax(said))
    found["gzip within gzip"] = lambda: compressed(compressed(packed(made.binary, form.folder)))
    found["nothing"] = lambda: b""
    found["an empty archive"] = lambda: compressed(bytes(10240))
    found["100,000 members"] = lambda: compressed(_member("a").tobuf() * 100_000)
    found["a header that never ends"] = lambda: b"\x1f\x8b\x08\x08" + b"\0" * 6 + b"a" * (1 << 20)
    return found


def hostile_archive(made: Made, case: Case) -> None:
    """As it is loaded, and as `mssar data get` unpacks what it fetched."""
    kinds = hostile_archives(made, case.folder.parent / "beside")
    what = list(kinds)[case.number % len(kinds)]
    case.begin(HOSTILE_TAR, what, str(case.folder))
    layout = cifar.LAYOUTS[NAME]
    empty(case.folder)
    archive = case.folder / layout.forms[0].archive
    archive.write_bytes(kinds[what]())
    if case.number // len(kinds) % 2:
        fetch._unpack(archive, layout, case.folder / "new", lambda *_: None)
    else:
        cifar.load(NAME, case.folder)
    raise WrongError("it was taken as good")


FAMILIES = (
    Family("archives", {TORN_TAR: PROMISES[TORN_TAR]}, 500, 256, prepare, torn_archive),
    Family("bombs", {HOSTILE_TAR: PROMISES[HOSTILE_TAR]}, 160, 256, prepare, hostile_archive),
)
