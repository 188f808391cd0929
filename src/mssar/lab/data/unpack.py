"""Archives, read without trusting them."""

from __future__ import annotations

import gzip
import posixpath
import tarfile
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path


def members(archive: Path, wanted: Collection[str], limit: int) -> Iterator[tuple[str, bytes]]:
    """The wanted files of a tar archive, in its order, each at most ``limit`` bytes.

    An archive with anything that could reach outside a folder is refused, wanted or not. Nothing
    is written.
    """
    missing = set(wanted)
    try:
        with gzip.open(archive) as stream, tarfile.open(fileobj=stream, mode="r:") as tar:
            for member in tar:
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
                    yield name, file.read()
            while stream.read(1 << 20):  # to the end, where gzip's own checksum is
                pass
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(
            f"{archive} is truncated or damaged ({error}); remove it and fetch it again"
        ) from error
    if missing:
        raise ValueError(
            f"{archive} has no {', '.join(sorted(missing))}; remove it and fetch it again"
        )


def _refuse_unsafe(archive: Path, member: tarfile.TarInfo) -> None:
    name = posixpath.normpath(member.name)
    if name.startswith(("/", "..")) or "\\" in name or ":" in name:
        raise ValueError(f"{archive} is refused: its member {member.name!r} lies outside a folder")
    if not member.isdir() and member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
        kinds = {tarfile.SYMTYPE: "a symbolic link", tarfile.LNKTYPE: "a hard link"}
        kind = kinds.get(member.type, "neither a file nor a folder")
        raise ValueError(f"{archive} is refused: its member {member.name!r} is {kind}")
    try:  # a second opinion
        tarfile.data_filter(member, str(archive.parent))
    except tarfile.FilterError as error:
        raise ValueError(f"{archive} is refused: {error}") from error
