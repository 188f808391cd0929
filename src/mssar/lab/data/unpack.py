"""Archives, read without trusting them."""

from __future__ import annotations

import gzip
import posixpath
import tarfile
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

AT_ONCE = 1 << 20  # bytes that are read from an archive
ROOM = 16 << 20  # bytes of an archive beside what is wanted of it
MEMBERS = 1000  # of an archive; those of data sets have ten


def members(archive: Path, wanted: Collection[str], limit: int) -> Iterator[tuple[str, bytes]]:
    """The wanted files of a tar archive, in its order, each at most ``limit`` bytes.

    An archive with anything that could reach outside a folder is refused, wanted or not. Nothing
    is written.
    """
    missing = set(wanted)
    try:
        with gzip.open(archive) as packed:
            stream = _Measured(packed, limit * len(wanted) + ROOM)
            with _damage():
                tar = tarfile.open(fileobj=stream, mode="r:")  # type: ignore[call-overload]  # noqa: SIM115
            for number, member in enumerate(_headers(tar)):
                if number == MEMBERS:
                    raise ValueError(f"{archive} holds more than {MEMBERS:,} members")
                _refuse_unsafe(archive, member)
                name = posixpath.normpath(member.name)
                if name not in wanted or member.isdir():
                    continue
                if name not in missing:
                    raise ValueError(f"{archive} holds {name} twice")
                if member.size > limit:
                    raise ValueError(
                        f"{name} in {archive} has {member.size:,} bytes, expected at most {limit:,}"
                    )
                missing.remove(name)
                file = tar.extractfile(member)
                assert file is not None  # it is a regular file
                with file:
                    yield name, b"".join(iter(partial(file.read, AT_ONCE), b""))
            while stream.read(AT_ONCE):  # to the end, where gzip's own checksum is
                pass
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(
            f"{archive} is truncated or damaged ({error}); remove it and fetch it again"
        ) from error
    if missing:
        raise ValueError(
            f"{archive} has no {', '.join(sorted(missing))}; remove it and fetch it again"
        )


class _Measured:
    """A compressed stream for tarfile, which would read any length that a header declares at once,
    and with it a small file that unpacks to whatever fills the memory."""

    def __init__(self, stream: gzip.GzipFile, longest: int) -> None:
        self._stream, self._longest = stream, longest
        self.tell = stream.tell

    def read(self, size: int) -> bytes:
        if size > AT_ONCE:
            raise tarfile.ReadError(f"a header of {size:,} bytes")
        found = self._stream.read(size)
        self._check(self.tell())
        return found

    def seek(self, place: int) -> int:
        self._check(place)
        return self._stream.seek(place)

    def _check(self, place: int) -> None:
        if place > self._longest:
            raise tarfile.ReadError(f"it unpacks to more than {self._longest:,} bytes")


def _headers(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    with _damage():
        yield from tar


@contextmanager
def _damage() -> Iterator[None]:
    """What a damaged header makes tarfile stumble over is an error of its own."""
    try:
        yield
    except (ValueError, ArithmeticError, LookupError, TypeError) as error:
        raise tarfile.ReadError(str(error)) from error


def _refuse_unsafe(archive: Path, member: tarfile.TarInfo) -> None:
    name = posixpath.normpath(member.name)
    if name.startswith(("/", "..")) or any(letter in name for letter in "\\:\0"):
        raise ValueError(f"{archive} is refused: its member {member.name!r} lies outside a folder")
    if not member.isdir() and member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
        kinds = {tarfile.SYMTYPE: "a symbolic link", tarfile.LNKTYPE: "a hard link"}
        kind = kinds.get(member.type, "neither a file nor a folder")
        raise ValueError(f"{archive} is refused: its member {member.name!r} is {kind}")
    try:  # a second opinion
        tarfile.data_filter(member, str(archive.parent))
    except tarfile.FilterError as error:
        raise ValueError(f"{archive} is refused: {error}") from error
