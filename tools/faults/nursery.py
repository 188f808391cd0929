"""Processes that run the command, cheaply: one that has imported all of it forks one for each.

An order is a line of JSON on its standard input, and so is the answer on its standard output.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Queue
from typing import Any, TypeVar

LONGEST = 180.0  # seconds that anything here may take
T = TypeVar("T")
R = TypeVar("R")

HUNG = -1  # the status of what took longer


@dataclass(frozen=True)
class Order:
    """A command to be run, and what is to befall it. Calls are those beneath ``root``."""

    words: list[str]
    root: str
    after: float | None = None  # seconds until a signal
    signal: int = signal.SIGKILL
    kill: tuple[int, str] | None = None  # at which call, and when: see calls.Kill
    fail: tuple[int, int, bool] | None = None  # at which call, by which error: see calls.Fail
    largest: int | None = None  # bytes that a file may have
    url: str | None = None  # of the data set's archive
    stdout: str | None = None
    careless: bool = False  # files are written in their place: to see that a suite notices
    notes: str | None = None  # a folder for what it says; the one above by default


@dataclass(frozen=True)
class Answer:
    status: int  # as a shell has it: 128 + the signal
    seconds: float
    out: str
    err: str
    calls: list[str] = field(default_factory=list)


class Nursery:
    """The process that forks; one order at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from faults import nursery; nursery.serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self.environment(),
        )

    @staticmethod
    def environment() -> dict[str, str]:
        """For a program that finds this package, computes in one thread and asks no proxy."""
        paths = [str(Path(__file__).parents[1]), *sys.path]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "no_proxy": "*",
        }

    def __call__(self, order: Order) -> Answer:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(order)) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the process that forks has ended")
        return Answer(**json.loads(answer))

    def close(self) -> None:
        self._process.communicate()
        self._process.wait()


class Crew:
    """Several, that share what there is to do."""

    def __init__(self, size: int) -> None:
        self._free: Queue[Nursery] = Queue()
        self._threads = ThreadPoolExecutor(size)
        for _ in range(size):
            self._free.put(Nursery())

    def __call__(self, order: Order) -> Answer:
        one = self._free.get()
        try:
            return one(order)
        finally:
            self._free.put(one)

    def each(self, job: Callable[[T], R], cases: Iterable[T]) -> Iterator[R]:
        """What a job makes of cases, in their order, side by side."""
        yield from self._threads.map(job, cases)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        while not self._free.empty():
            self._free.get().close()


@contextlib.contextmanager
def crew(size: int = 2) -> Iterator[Crew]:
    made = Crew(size)
    try:
        yield made
    finally:
        made.close()


def serve() -> None:
    """Orders, to the end of standard input."""
    import_all()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints does not disturb
    for line in sys.stdin:
        order = Order(**json.loads(line))
        answers.write(json.dumps(asdict(carry_out(order))) + "\n")
        answers.flush()


def import_all() -> None:
    """What the commands import when they are run. Nothing is computed: torch must not have begun
    a thread when it is forked."""
    import matplotlib.figure  # noqa: F401
    import torch._dynamo
    import torch.export
    import torch.utils.tensorboard  # noqa: F401

    import mssar.export
    import mssar.lab.cli
    import mssar.lab.data.fetch
    import mssar.lab.display
    import mssar.lab.engine.fleet
    import mssar.lab.engine.timing
    import mssar.lab.engine.weights
    import mssar.lab.report.build
    import mssar.lab.report.overlay
    import mssar.lab.report.page
    import mssar.lab.tensorboard  # noqa: F401
    from faults import samples
    from mssar.lab.run import Run

    samples.archive()
    Run("resnet8", "mssar").check()


def carry_out(order: Order) -> Answer:
    place = Path(order.notes or Path(order.root).parent)
    files = [place / f"{name}.txt" for name in ("out", "err", "calls")]
    for file in files:
        file.write_bytes(b"")
    begun = time.monotonic()
    child = os.fork()
    if child == 0:
        _be_the_command(order, *files)
    status = _wait(child, order)
    took = time.monotonic() - begun
    out, err, calls = (file.read_text("utf-8", "replace") for file in files)
    return Answer(status, took, out, err, calls.splitlines())


def _wait(child: int, order: Order) -> int:
    ends = [(LONGEST, signal.SIGKILL)]
    if order.after is not None:
        ends.insert(0, (order.after, signal.Signals(order.signal)))
    begun = time.monotonic()
    for after, number in ends:
        while (left := begun + after - time.monotonic()) > 0:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(status)
                return 128 - code if code < 0 else code
            time.sleep(min(0.002, left))
        os.kill(child, number)  # not yet waited for, so nobody else has its number
    os.waitpid(child, 0)
    return HUNG


def _be_the_command(order: Order, out: Path, err: Path, calls: Path) -> None:
    status = 70
    try:
        streams = [Path(order.stdout) if order.stdout else out, err]
        for number, file in enumerate(streams, 1):
            os.dup2(os.open(file, os.O_WRONLY), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        os.chdir(order.root)
        seen = open(calls, "w", buffering=1)  # noqa: SIM115
        status = _run(order, seen)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


@contextlib.contextmanager
def _in_its_place(path: Path) -> Iterator[Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    yield path


def _run(order: Order, seen: Any) -> int:
    from faults import samples
    from faults.calls import Call, Fail, Kill, Watcher, watched
    from mssar import durable
    from mssar.__main__ import main

    if order.largest is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (order.largest, resource.RLIM_INFINITY))
    watcher: Watcher = Watcher()
    if order.kill:
        watcher = Kill(*order.kill)
    elif order.fail:
        number, code, half = order.fail
        watcher = Fail(number, code, half=half)
    plain = watcher.before

    def before(call: Call) -> int | None:
        seen.write(f"{call}\n")
        return plain(call)

    watcher.before = before  # type: ignore[method-assign]
    if order.careless:
        durable.whole = _in_its_place  # type: ignore[assignment]
    sys.argv = ["mssar", *order.words]
    with samples.installed(order.url or "https://127.0.0.1/"), watched(Path(order.root), watcher):
        try:
            main()
        except SystemExit as stop:
            if not isinstance(stop.code, int | None):
                print(stop.code, file=sys.stderr)
                return 1
            status = stop.code or 0
        else:
            status = 0
        try:
            sys.stdout.flush()
        except OSError:  # what the interpreter does at its end
            return 120
        sys.stderr.flush()
    return status
