"""Files that are whole or as they were before, whatever ends the program or the power.

A name is given to a file only when its content is on the disk itself, and the name follows.
"""

from __future__ import annotations

import errno
import glob
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PART = ".part"  # how the name of what is not finished ends
STALE = 24 * 3600.0  # seconds: nobody writes one file for so long
_CANNOT = (errno.EBADF, errno.EINVAL, errno.ENOTSUP)  # of file systems that sync no folders


def write_whole(path: Path, content: bytes) -> None:
    """A file with all of this in it, or the file as it was before: a full disk leaves no trace."""
    with whole(path) as part, part.open("xb") as file:
        file.write(content)


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A place to write a file at, which then takes the file's name.

    The place is nobody else's: two programs may write the same file, and the later one's stays.
    What is no file, such as a device, is not replaced, though root could.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):  # of a folder the disk says so
        raise ValueError(f"{path} is a device or a pipe, and not replaced by a file")
    make_folder(path.parent)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PART}")
    try:
        yield part
        sync(part)
        if path.is_file():
            part.chmod(stat.S_IMODE(path.stat().st_mode))
        part.replace(path)
    except BaseException as trouble:
        with suppress(OSError):
            part.unlink()
        if isinstance(trouble, OSError) and str(trouble.filename) in ("None", str(part)):
            trouble.filename = str(path)
        raise
    sync(path.parent)
    _sweep(path)


def _sweep(path: Path) -> None:
    """What a program that was killed left of this file long ago. Newer ones may be in use."""
    for part in path.parent.glob(f".{glob.escape(path.name)}.*{PART}"):
        with suppress(OSError):
            if time.time() - part.stat().st_mtime > STALE:
                part.unlink()


def make_folder(folder: Path) -> None:
    """And those above it; their names are on the disk, too."""
    if not folder.is_dir():
        make_folder(folder.parent)
        try:
            folder.mkdir(exist_ok=True)
        except FileExistsError:  # a file has its name
            code = errno.ENOTDIR
            raise NotADirectoryError(code, os.strerror(code), str(folder)) from None
        sync(folder.parent)


def sync(place: Path) -> None:
    """Have a file's content, or the names in a folder, on the disk itself."""
    names = place.is_dir()
    if names and os.name != "posix":
        return
    number = os.open(place, os.O_RDONLY if names else os.O_RDWR)
    try:
        os.fsync(number)
    except OSError as error:
        if not (names and error.errno in _CANNOT):
            error.filename = str(place)
            raise
    finally:
        os.close(number)
