"""Archives and pickles, read without trusting them."""

from __future__ import annotations

import gzip
import io
import math
import pickle
import pickletools
import posixpath
import tarfile
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


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


class RefusedError(ValueError):
    """A pickle asks for what no data file holds."""


def batch(pickled: bytes, source: str) -> dict[str, Any]:
    """The dictionary in a pickle of numbers, strings, lists and arrays of bytes; nothing else.

    Nothing that a pickle names is ever imported or called: stand-ins take the place of what NumPy
    writes, so that a pickle can neither run code nor make an array of objects.
    """
    try:
        _require_own_bytes(pickled)
        found = _Unpickler(pickled).load()
        plain = _plain(found) if isinstance(found, dict) else None
    except RefusedError as refused:
        raise ValueError(f"{source} is refused: {refused}; no such data file does") from refused
    except Exception as error:  # a damaged pickle can raise nearly anything
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"{source} is truncated or damaged ({reason}); remove it and fetch it again"
        ) from error
    if plain is None:
        raise ValueError(f"{source} holds a {type(found).__name__}, expected a dictionary")
    return plain


def _plain(found: dict[Any, Any]) -> dict[str, Any]:
    return {
        key.decode("latin1") if isinstance(key, bytes) else str(key): (
            value.array if isinstance(value, _Array) else value
        )
        for key, value in found.items()
    }


def _require_own_bytes(pickled: bytes) -> None:
    """An unpickler makes room for all that is announced, before it looks whether it is there: for
    lengths, which pickletools compares with what follows, and for numbers of what is kept."""
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name.endswith("PUT") and int(argument or 0) > len(pickled):
            _refuse(f"it keeps something as number {argument:,}")


class _Unpickler(pickle.Unpickler):
    def __init__(self, pickled: bytes) -> None:
        super().__init__(io.BytesIO(pickled), encoding="bytes")
        self._left = len(pickled)  # letters that it can have as bytes, as each is there once

    def _encode(self, text: object, encoding: object) -> bytes:
        """How Python 3 writes bytes in the old protocols."""
        if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
            _refuse(f"it asks for an encoding by {encoding!r:.60}")
        self._left -= len(text)
        if self._left < 0:
            _refuse("it asks for the same bytes again and again")
        return text.encode("latin1")

    def find_class(self, module: str, name: str) -> Any:
        # A new function each time: a pickle may set attributes of what it gets.
        allowed: dict[tuple[str, str], Callable[..., Any] | None] = {
            ("numpy.core.multiarray", "_reconstruct"): lambda *_: _Array(),
            ("numpy._core.multiarray", "_reconstruct"): lambda *_: _Array(),
            ("numpy", "dtype"): lambda kind, *_: _Byte(kind),
            ("numpy", "ndarray"): None,  # only ever an argument of _reconstruct
            ("_codecs", "encode"): lambda text, encoding: self._encode(text, encoding),
        }
        if (module, name) not in allowed:
            _refuse(f"it asks for {f'{module}.{name}'!r:.80}")
        return allowed[module, name]


def _refuse(why: str) -> NoReturn:
    raise RefusedError(why)


class _Byte:
    """Stands for the one dtype that there is."""

    __slots__ = ()

    def __init__(self, kind: object) -> None:
        if kind not in ("u1", b"u1"):
            _refuse(f"it holds an array of dtype {kind!r:.60}")

    def __setstate__(self, state: object) -> None:
        pass  # byte order and fields, of which a byte has none


class _Array:
    """Stands for an array until its bytes come."""

    array: NDArray[np.uint8]

    def __setstate__(self, state: object) -> None:
        match state:
            case (int(), tuple(shape), _Byte(), bool() | 0 | 1 as by_columns, bytes(raw)):
                whole = all(type(n) is int and n >= 0 for n in shape)
                if not whole or math.prod(shape) != len(raw):
                    _refuse(f"it holds an array of shape {shape!s:.60} with {len(raw):,} bytes")
                array = np.frombuffer(raw, np.uint8)
                self.array = array.reshape(shape, order="F" if by_columns else "C")
            case _:
                _refuse("it holds an array other than of bytes")
