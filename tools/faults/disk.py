"""Full disks, and disks that may not be written, wherever something is written.

By errors that are made up, at every call in turn; and by real ones: a limit on the size of files, a
small file system, one that is mounted anew to be read only, and a device that is always full.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from faults import samples
from faults.jobs import Job, Known, answer, fresh
from faults.kills import ended, looked, probe
from faults.nursery import Answer, Crew, crew
from faults.site import serving
from faults.suite import Row, share

CODES = (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO, errno.EDQUOT)
PROMISE = "one clear line; what was good stays; goes on once there is room"

Fault = tuple[int, int, bool]  # see calls.Fail


def complaint(made: Answer, *reasons: str) -> str | None:
    """What is wrong with how a command failed: it says one line, and why."""
    said = [line for line in made.err.splitlines() if line.startswith("mssar: ")]
    if made.status not in (1, 2) or "Traceback" in made.err or len(said) != 1:
        return f"status {made.status}, said {made.err[-600:]!r}"
    if made.err.splitlines()[-1] != said[0] or not any(reason in said[0] for reason in reasons):
        return f"does not say {' or '.join(reasons)}: {said[0]!r}"
    return None


def failed(crew: Crew, job: Job, home: Path, name: str, fault: Fault, **always: Any) -> str | None:
    """Fail, look, and go on without the fault."""
    root = fresh(job, home, name)
    try:
        made = answer(crew, job, root, fail=fault, **always)
        if made.status == 0:  # of what may fail, such as taking away what is not needed any more
            trouble = looked(job.done, root)
        else:
            trouble = complaint(made, os.strerror(fault[1])) or looked(job.sound, root)
        return trouble or again(crew, job, root, **always)
    finally:
        shutil.rmtree(root.parent, ignore_errors=True)


def again(crew: Crew, job: Job, root: Path, **always: Any) -> str | None:
    made = answer(crew, job, root, **always)
    if made.status:
        return f"does not go on: {made.status} {made.err[-300:]}"
    return ended(job, root)


def faults(calls: list[str], count: int, draw: random.Random) -> list[Fault]:
    """Every call in turn, by every error in turn; a write fails in its middle, too."""
    codes = draw.sample(CODES, len(CODES))
    ways = [(number, False) for number in range(1, len(calls) + 1)]
    ways += [(number, True) for number in range(1, len(calls) + 1) if "write" in calls[number - 1]]
    draw.shuffle(ways)
    turns = ((*way, turn) for turn in range(len(CODES)) for way in ways)
    return [
        (number, codes[(number + turn) % len(codes)], half)
        for number, half, turn in itertools.islice(turns, count)
    ]


def row(
    crew: Crew, fault: str, job: Job, home: Path, count: int, draw: random.Random, **always: Any
) -> Row:
    calls = probe(crew, job, home, **always).calls
    chosen = list(enumerate(faults(calls, count, draw)))

    def one(case: tuple[int, Fault]) -> str | None:
        return failed(crew, job, home, f"{job.name}-{case[0]}", case[1], **always)

    wrong = 0
    for (_, (number, code, half)), trouble in zip(chosen, crew.each(one, chosen), strict=True):
        if trouble:
            wrong += 1
            what = f"{errno.errorcode[code]} at call {number}{' in its middle' * half}"
            print(f"disk: {job.name}, {what}, {calls[number - 1]}: {trouble}", file=sys.stderr)
    return Row(fault, PROMISE, len(chosen), wrong, f"{len(calls)} calls")


def check(effort: float, seed: int) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as temporary, crew() as people:
        home = Path(temporary).resolve()
        known, draw = Known(people, home), random.Random(f"disk {seed}")
        with serving(samples.archive()) as url:
            for job, count, fate in (
                (known.training(), 70, {}),
                (known.training("--fleet", "2", "--tensorboard"), 12, {}),
                (known.recording(), 16, {}),
                (known.weights(), 8, {}),
                (known.report(), 8, {}),
                (known.explain(), 8, {}),
                (known.export(), 4, {}),
                (known.bench(), 11, {}),
                (known.compare(), 6, {}),
                (known.fetching(), 50, {"url": url}),
            ):
                fault = f"errors made up in `mssar {job.name}`"
                if "--tensorboard" in job.words:
                    fault += ", two runs, with --tensorboard"
                elif job.name == "record":
                    fault = "errors made up in a record's append"
                yield row(people, fault, job, home, share(count, effort), draw, **fate)
        sizes = (
            *((known.training(), n) for n in (1000, 100_000)),
            (known.recording(), 1000),
            (known.report(), 300_000),
            (known.weights(), 100_000),
            (known.fetching(), 10_000),
        )
        yield from limited(people, sizes, home)
        yield from _mounted(people, known, home)
        yield _always_full(people, known, home)


def _told(row: str, troubles: list[str | None], remark: str = "") -> Row:
    for trouble in filter(None, troubles):
        print(f"disk: {row}: {trouble}", file=sys.stderr)
    wrong = sum(trouble is not None for trouble in troubles)
    return Row(row, PROMISE, len(troubles), wrong, remark)


def limited(crew: Crew, sizes: Iterable[tuple[Job, int]], home: Path) -> Iterator[Row]:
    """A limit that the kernel keeps: files may not be larger."""
    troubles: list[str | None] = []
    for job, largest in sizes:
        root = fresh(job, home, f"limit-{job.name}-{largest}")
        with serving(samples.archive()) as url:
            made = answer(crew, job, root, largest=largest, url=url)
            troubles.append(
                complaint(made, os.strerror(errno.EFBIG))
                or looked(job.sound, root)
                or again(crew, job, root, url=url)
            )
        shutil.rmtree(root.parent)
    yield _told("files that may not grow (RLIMIT_FSIZE)", troubles)


@contextmanager
def _tmpfs(place: Path, size: str) -> Iterator[Callable[[str], None]]:
    """A small file system, and how to mount it anew; an OSError where that is not allowed."""
    place.mkdir(parents=True)

    def mount(*words: str) -> None:
        done = subprocess.run(
            ["mount", *words, str(place)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise OSError(done.stderr.strip())

    try:
        mount("-t", "tmpfs", "-o", f"size={size}", "none")
    except FileNotFoundError:
        raise OSError("there is no mount") from None
    try:
        yield lambda options: mount("-o", f"remount,{options}")
    finally:
        subprocess.run(["umount", str(place)], check=True)


def _mounted(crew: Crew, known: Known, home: Path) -> Iterator[Row]:
    small, fixed = "a real file system that is full", "a real file system that is read only"
    troubles: list[str | None] = []
    try:
        for job, size in (
            *((known.training(), size) for size in ("8k", "300k", "900k", "2m")),
            (known.fetching(), "32k"),
            (known.fetching(), "90k"),
        ):
            place = home / f"{job.name}-{size}"
            with _tmpfs(place, size) as mount, serving(samples.archive()) as url:
                root = place / "root"
                root.mkdir()
                # What a command says lies beside its folder, where there must be room.
                made = answer(crew, job, root, url=url, notes=str(home))
                trouble = complaint(made, os.strerror(errno.ENOSPC)) or looked(job.sound, root)
                mount("size=64m")
                troubles.append(trouble or again(crew, job, root, url=url))
        yield _told(small, troubles)
        troubles = []
        for job in (known.training(), known.recording(), known.report(), known.fetching()):
            place = home / f"{job.name}-ro"
            with _tmpfs(place, "64m") as mount, serving(samples.archive()) as url:
                root = place / "root"
                root.mkdir()
                job.prepare(root)
                mount("ro")
                made = answer(crew, job, root, url=url, notes=str(home))
                trouble = complaint(made, os.strerror(errno.EROFS)) or looked(job.sound, root)
                mount("rw")
                troubles.append(trouble or again(crew, job, root, url=url))
        yield _told(fixed, troubles)
    except OSError as error:
        yield Row(f"{small}, or read only", PROMISE, 0, remark=f"cannot be tried here: {error}")


def _always_full(crew: Crew, known: Known, home: Path) -> Row:
    """Where a command's own words go."""
    troubles: list[str | None] = []
    for job in (known.training(), known.report(), known.weights()):
        root = fresh(job, home, f"full-{job.name}")
        made = answer(crew, job, root, stdout="/dev/full")
        trouble = complaint(made, os.strerror(errno.ENOSPC))
        troubles.append(trouble or looked(job.sound, root) or again(crew, job, root))
        shutil.rmtree(root.parent)
    return _told("standard output on a full disk (/dev/full)", troubles)
