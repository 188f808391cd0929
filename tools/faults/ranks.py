"""Processes that train one network, of which one is killed, or stands still.

They are started as torchrun does it, or as a scheduler that sets the same variables. Each of them
is the command itself, on data in miniature.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from faults.suite import Row
from mssar.lab import records
from mssar.lab.engine import lookout

ROOT = Path(__file__).parents[2]
MINUTE = 60.0
COMMAND = """
import sys
import torch
from lab import arrays
from mssar.lab import cli, data
from mssar.lab.engine import lookout
lookout.PAUSE = float(sys.argv.pop(1))
made = arrays(96, 24)
data.load = lambda name, data_dir=None: made
torch.set_num_threads(1)
if __name__ == "__main__":
    cli.main()
"""
EPOCHS = 16
WORDS = ("train", "resnet8", "--recalibration", "mssar", "--dataset", "cifar10", "--batch", "12",
         "--lr", "0.02", "--padding", "1", "--device", "cpu", "--resume")  # fmt: skip


def soon() -> float:
    """A moment that processes can agree on."""
    return time.time() + 0.1


def until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.time()))


class Ranks:
    """So many processes of one training, with what each of them says in a file."""

    def __init__(self, place: Path, size: int, launcher: str, epochs: int, pause: float) -> None:
        self.place, self.size, self.launcher = place, size, launcher
        self.log = place / f"said-{size}.txt"
        script = place / "command.py"
        script.write_text(COMMAND)
        paths = [str(ROOT / "tests"), *sys.path]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        words = [str(script), str(pause), *WORDS, "--epochs", str(epochs), "--drops", "",
                 "--runs", str(place / "runs")]  # fmt: skip
        self.processes: list[subprocess.Popen[bytes]] = []
        with self.log.open("wb") as said:
            if launcher == "torchrun":
                torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
                alone = [sys.executable, *torchrun, str(size), *words]
                self._start(alone, env, said)
                return
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_port())}
            env["WORLD_SIZE"] = str(size)
            for rank in range(size):
                numbered = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                self._start([sys.executable, *words], env | numbered, said)

    def _start(self, words: list[str], env: dict[str, str], said: object) -> None:
        self.processes.append(
            subprocess.Popen(words, env=env, stdout=said, stderr=said, start_new_session=True)  # type: ignore[call-overload]
        )

    def ids(self) -> list[int]:
        """Of the processes that train, in the order of their ranks."""
        if self.launcher != "torchrun":
            return [process.pid for process in self.processes]
        children = Path(f"/proc/{self.processes[0].pid}/task/{self.processes[0].pid}/children")
        found = []
        for child in map(int, children.read_text().split()):
            environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            rank = [entry[5:] for entry in environment if entry.startswith(b"RANK=")]
            found += [(int(rank[0]), child)] if rank else []
        return [child for _, child in sorted(found)]

    def checkpointed(self, epoch: int) -> bool:
        """Wait until an epoch is kept; False if the training is over before."""
        end = time.monotonic() + 5 * MINUTE
        while time.monotonic() < end:
            kept = self.place.glob("runs/*/epoch-*.safetensors")
            if any(int(path.name[6:10]) >= epoch for path in kept):
                return True
            if any(process.poll() is not None for process in self.processes):
                return False
            time.sleep(0.05)
        return False

    def ended(self, within: float, but: int | None = None) -> list[int] | None:
        """The status of each process, but of one that was stopped; None if one is still there."""
        end, found = time.monotonic() + within, list[int]()
        for number, process in enumerate(self.processes):
            if number == but:
                continue
            try:
                found.append(process.wait(max(0.1, end - time.monotonic())))
            except subprocess.TimeoutExpired:
                return None
        return found

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGCONT)
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextmanager
def started(
    place: Path, size: int, launcher: str, epochs: int = EPOCHS, pause: float = lookout.PAUSE
) -> Iterator[Ranks]:
    found = Ranks(place, size, launcher, epochs, pause)
    try:
        yield found
    finally:
        found.close()


def _port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def lost(
    place: Path, size: int, launcher: str, epoch: int, draw: random.Random, *, stop: bool = False,
    pause: float = lookout.PAUSE,
) -> tuple[str, float]:  # fmt: skip
    """Kill one of the processes after an epoch, or stop it; what was wrong, and how long the
    others were still there."""
    with started(place, size, launcher, pause=pause) as team:
        if not team.checkpointed(epoch):
            return f"no epoch {epoch}: {team.said()[-2000:]}", 0.0
        time.sleep(draw.random() / 2)
        chosen, begun = draw.randrange(size), time.monotonic()
        os.kill(team.ids()[chosen], signal.SIGSTOP if stop else signal.SIGKILL)
        status = team.ended(MINUTE, chosen if stop else None)
        took, said = time.monotonic() - begun, team.said()
    what = f"rank {chosen} of {size} by {launcher}"
    if status is None:
        return f"{what}: others are there after a minute: {said[-2000:]}", took
    told = [line for line in said.splitlines() if line.startswith("mssar: process ")]
    clear = [line for line in told if line.endswith("with any number of processes")]
    if "/mssar/lab/" in said or len(clear) != len(told):
        return f"{what}: a traceback, or no clear line: {said[-2000:]}", took
    if launcher == "torchrun":  # which may end them before they can say a word
        return ("" if status == [1] else f"{what}: status {status}: {said[-2000:]}"), took
    survivors = [one for number, one in enumerate(status) if stop or number != chosen]
    if survivors != [1] * (size - 1) or len(told) != size - 1:
        return f"{what}: status {status}, {len(told)} lines: {said[-2000:]}", took
    return "", took


def dwindled(place: Path, launcher: str, draw: random.Random, sizes: tuple[int, ...]) -> Row:
    """One after the other is killed, until one process is left, which comes to the end."""
    wrong, longest = list[str](), 0.0
    for number, size in enumerate(sizes, 1):
        trouble, took = lost(place, size, launcher, number, draw)
        wrong += [trouble] if trouble else []
        longest = max(longest, took)
    with started(place, 1, "plain") as last:
        status = last.ended(5 * MINUTE)
        said = last.said()
    kept = records.read(place / "runs" / "records.jsonl")
    good = status == [0] and len(kept) == 1 and len(kept[0].epochs) == EPOCHS
    if not good or kept[0].interruptions != len(sizes):
        wrong.append(f"the last one: status {status}, {kept}: {said[-2000:]}")
    for line in wrong:
        print(f"wrong: {line}", file=sys.stderr)
    chain = " → ".join(map(str, [*sizes, 1]))
    return Row(
        f"a process of several killed by SIGKILL, started {'as' if launcher == 'plain' else 'by'} "
        f"{'a scheduler does' if launcher == 'plain' else launcher}",
        f"the others end with a line within a minute; resumed with fewer ({chain}), a record",
        len(sizes),
        len(wrong),
        f"{longest:.0f} s at most",
    )


def frozen(place: Path, draw: random.Random, pause: float) -> Row:
    """Nothing breaks off, and nothing comes any more: as from a machine that is taken away."""
    trouble, took = lost(place, 2, "plain", 1, draw, stop=True, pause=pause)
    if trouble:
        print(f"wrong: {trouble}", file=sys.stderr)
    promise = "the other ends with a line within a minute"
    return Row(
        "a process of two stopped (SIGSTOP)", promise, 1, int(bool(trouble)), f"{took:.0f} s"
    )


def check(effort: float, seed: int) -> Iterator[Row]:
    draw = random.Random(f"{seed}/ranks")
    whole = effort > 0.3
    for launcher in ("plain", "torchrun") if whole else ("plain",):
        with tempfile.TemporaryDirectory() as folder:
            yield dwindled(Path(folder), launcher, draw, (3, 2) if whole else (2,))
    with tempfile.TemporaryDirectory() as folder:
        yield frozen(Path(folder), draw, lookout.PAUSE if whole else 0.6)
