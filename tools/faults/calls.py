"""Calls that change a file system, seen on their way.

Within :func:`watched` those beneath a folder go by a watcher, which lets them pass, makes them
fail, cuts a write short or ends the process. What compiled code writes by itself is not seen.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults.exchange import exchanged

CREATES = os.O_CREAT | os.O_TRUNC
CHANGES = CREATES | os.O_WRONLY | os.O_RDWR


@dataclass(frozen=True)
class Call:
    """One of them, before it is made."""

    kind: str  # open, write, truncate, fsync, replace, unlink, mkdir, rmdir, chmod
    path: Path
    target: Path | None = None  # of replace
    data: bytes = b""  # of write
    at: int = 0  # of write: where; of truncate: the length
    truncates: bool = False  # of open

    def __str__(self) -> str:
        more = f" to {self.target.name}" if self.target else f" {len(self.data)}" * bool(self.data)
        return f"{self.kind} {self.path.name}{more}"


class Watcher:
    """Sees calls and lets them pass; those of a sort are counted."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def before(self, call: Call) -> int | None:
        """May raise; of a write it returns how many bytes are to be written, or None for all."""
        self.calls.append(call)
        return None

    def after(self, call: Call) -> None:
        """It was made."""


class Fail(Watcher):
    """Errors from the n-th call on. A full disk goes on being full, and what frees room is let
    pass; a disk that may not be written refuses everything; an I/O error happens once."""

    FULL = (errno.ENOSPC, errno.EDQUOT)
    FREES = ("unlink", "rmdir", "replace", "truncate", "fsync", "chmod")

    def __init__(self, number: int, code: int, *, half: bool = False) -> None:
        super().__init__()
        self.number, self.code, self.half = number, code, half

    def before(self, call: Call) -> int | None:
        super().before(call)
        now = len(self.calls)
        if now < self.number or (self.code == errno.EIO and now > self.number):
            return None
        if now > self.number and self.code in self.FULL and call.kind in self.FREES:
            return None
        if now == self.number and self.half and len(call.data) > 1:
            self.number += 1
            return len(call.data) // 2  # and no more: the next is refused
        raise OSError(self.code, os.strerror(self.code), str(call.path))


class Kill(Watcher):
    """SIGKILL at the n-th call: before it, in the middle of what it writes, or after it."""

    def __init__(self, number: int, when: str) -> None:
        super().__init__()
        self.number, self.when = number, when

    def before(self, call: Call) -> int | None:
        super().before(call)
        if len(self.calls) == self.number:
            if self.when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.when == "half" and call.data:
                return len(call.data) // 2
        return None

    def after(self, call: Call) -> None:  # noqa: ARG002
        if len(self.calls) == self.number:
            os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def watched(root: Path, watcher: Watcher) -> Iterator[None]:
    """Have a watcher see what is done beneath a folder."""
    root = root.resolve()

    def inside(path: Any, folder: int | None = None) -> Path | None:
        """Where it really lies, if that is beneath the folder."""
        try:
            named = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else path
            base = os.readlink(f"/proc/self/fd/{folder}") if folder is not None else os.getcwd()
            found = Path(base, os.fsdecode(os.fspath(named)))
        except (OSError, TypeError, ValueError):
            return None
        if isinstance(path, int) and not named.startswith("/"):  # a pipe
            return None
        found = found.parent.resolve() / found.name
        return found if found.is_relative_to(root) else None

    class Raw(io.FileIO):
        """A file whose writes are seen."""

        def write(self, data: Any, /) -> int:
            path, content = inside(self.fileno()), bytes(data)
            if path is None:
                return super().write(content) or 0
            appends = "a" in self.mode
            at = os.fstat(self.fileno()).st_size if appends else self.tell()
            call = Call("write", path, data=content, at=at)
            allowed = watcher.before(call)
            written = super().write(content if allowed is None else content[:allowed]) or 0
            watcher.after(call)
            return written

        def truncate(self, size: int | None = None, /) -> int:
            path = inside(self.fileno())
            length = self.tell() if size is None else size
            if path is None:
                return super().truncate(size)
            call = Call("truncate", path, at=length)
            watcher.before(call)
            done = super().truncate(size)
            watcher.after(call)
            return done

    def opened(file: Any, mode: str = "r", *rest: Any, **more: Any) -> Any:
        path = None if isinstance(file, int) else inside(file)
        if path is None or not set(mode) & set("wax+") or more.get("opener"):
            return real["open"](file, mode, *rest, **more)
        names = ("buffering", "encoding", "errors", "newline")
        given = {**dict(zip(names, rest, strict=False)), **more}
        call = Call("open", path, truncates="w" in mode)
        watcher.before(call)
        raw = Raw(file, mode.replace("b", "").replace("t", ""))
        watcher.after(call)
        if given.get("buffering", -1) == 0:
            return raw
        kind = io.BufferedRandom if "+" in mode else io.BufferedWriter
        binary = kind(raw)  # type: ignore[arg-type]
        if "b" in mode:
            return binary
        text = {k: given[k] for k in names[1:] if k in given}
        return io.TextIOWrapper(binary, **text)

    def os_open(path: Any, flags: int, *rest: Any, dir_fd: int | None = None) -> int:
        where = inside(path, dir_fd)
        if where is None or not flags & CHANGES:
            return int(real["os.open"](path, flags, *rest, dir_fd=dir_fd))
        call = Call("open", where, truncates=bool(flags & os.O_TRUNC))
        watcher.before(call)
        number = int(real["os.open"](path, flags, *rest, dir_fd=dir_fd))
        watcher.after(call)
        return number

    def fsync(file: Any) -> None:
        number = file if isinstance(file, int) else file.fileno()
        path = inside(number)
        if path is None:
            real["os.fsync"](number)
            return
        call = Call("fsync", path)
        watcher.before(call)
        real["os.fsync"](number)
        watcher.after(call)

    def moving(name: str) -> Callable[..., None]:
        def move(source: Any, target: Any, **folders: Any) -> None:
            before, after = inside(source), inside(target)
            if before is None or after is None:
                real[name](source, target, **folders)
                return
            call = Call("replace", before, after)
            watcher.before(call)
            real[name](source, target, **folders)
            watcher.after(call)

        return move

    def plain(name: str, kind: str) -> Callable[..., None]:
        def change(path: Any, *rest: Any, dir_fd: int | None = None, **more: Any) -> None:
            folder = {} if dir_fd is None else {"dir_fd": dir_fd}
            where = inside(path, dir_fd)
            if where is None:
                real[name](path, *rest, **folder, **more)
                return
            call = Call(kind, where)
            watcher.before(call)
            real[name](path, *rest, **folder, **more)
            watcher.after(call)

        return change

    real: dict[str, Callable[..., Any]] = {"open": io.open}
    patches: list[tuple[Any, str, Any]] = [(io, "open", opened), (builtins, "open", opened)]
    mine: dict[str, Callable[..., Any]] = {
        "open": os_open,
        "fsync": fsync,
        "replace": moving("os.replace"),
        "rename": moving("os.rename"),
        "unlink": plain("os.unlink", "unlink"),
        "remove": plain("os.remove", "unlink"),
        "mkdir": plain("os.mkdir", "mkdir"),
        "rmdir": plain("os.rmdir", "rmdir"),
        "chmod": plain("os.chmod", "chmod"),
    }
    for name, function in mine.items():
        real[f"os.{name}"] = getattr(os, name)
        patches.append((os, name, function))
    with exchanged(patches):
        yield
