"""Commands that write something, and what must be true of it, whatever befell them.

Each is known by what it makes undisturbed: ``sound`` holds at any time, ``done`` when the command
came to its end with a status of 0, ``tidy`` when nothing befell it then.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from faults import samples
from faults.nursery import Answer, Crew, Order
from mssar.lab import records, timings
from mssar.lab.data import cifar
from mssar.lab.engine import checkpoint, result

Look = Callable[[Path], str | None]  # None, or what is wrong with a folder
TRAIN = "train resnet8 --dataset cifar10 --epochs 2 --batch 8 --runs runs --device cpu --resume"
OLD = b"what was there before"


@dataclass(frozen=True)
class Job:
    """One command. ``root`` is its folder, and beside that lies ``data``."""

    name: str
    words: list[str]
    prepare: Callable[[Path], None]
    sound: Look
    done: Look
    tidy: Look = lambda _: None


def answer(crew: Crew, job: Job, root: Path, **fate: Any) -> Answer:
    return crew(Order(job.words, str(root), **fate))


def fresh(job: Job, home: Path, name: str) -> Path:
    """A folder for a job, with what it needs in it."""
    root = home / name / "root"
    root.mkdir(parents=True)
    job.prepare(root)
    return root


class Known:
    """What undisturbed commands made, in a folder that lasts as long as the suite."""

    def __init__(self, crew: Crew, home: Path) -> None:
        self.home, self._crew = home, crew
        self._jobs: dict[str, Job] = {}
        samples.put(home / "data")
        self.data = ["--data-dir", str(home / "data")]
        self.trained = self._made("trained", [*TRAIN.split(), "--seed", "0,1", *self.data])
        self.folders = {p.name: p for p in (self.trained / "runs").iterdir() if p.is_dir()}
        self.run = min(self.folders)

    def _made(self, name: str, words: list[str], put: Callable[[Path], None] | None = None) -> Path:
        root = self.home / name / "root"
        root.mkdir(parents=True)
        if put:
            put(root)
        made = self._crew(Order(words, str(root)))
        if made.status:
            raise RuntimeError(f"{' '.join(words)}: {made.status}\n{made.err}")
        return root

    # --- training ---

    def training(self, *more: str) -> Job:
        words = [*TRAIN.split(), "--seed", "0,1", *self.data, *more]
        return Job("train", words, lambda _: None, self._sound_runs, self.same_runs)

    def recording(self) -> Job:
        """Runs that are finished, and a file of records that lacks one of them."""
        kept, _ = (self.trained / "runs" / "records.jsonl").read_bytes().splitlines(keepends=True)

        def prepare(root: Path) -> None:
            shutil.copytree(self.trained / "runs", root / "runs")
            (root / "runs" / "records.jsonl").write_bytes(kept)

        def sound(root: Path) -> str | None:
            if not (root / "runs" / "records.jsonl").read_bytes().startswith(kept):
                return "the record that was there is lost"
            return self._sound_runs(root)

        return Job("record", self.training().words, prepare, sound, self.same_runs)

    def _sound_runs(self, root: Path) -> str | None:
        """What has a name can be read, and is what it was in the undisturbed run."""
        runs = root / "runs"
        for folder in sorted(p for p in runs.glob("*") if p.is_dir()):
            for path in checkpoint.checkpoints(folder):
                progress, tensors = checkpoint.load(path)
                other = self.folders[folder.name] / path.name
                if other.exists() and not _same(tensors, checkpoint.load(other)[1]):
                    return f"{path.name} is not as in the undisturbed run"
                if progress.step == 0 and progress.epoch != len(progress.history):
                    return f"{path.name} has {len(progress.history)} epochs in its history"
            result.finished(folder)
        ids = [record.id for record in records.read(runs / "records.jsonl")]
        return "a record is there twice" if len(set(ids)) < len(ids) else None

    def same_runs(self, root: Path) -> str | None:
        if trouble := self._sound_runs(root):
            return trouble
        found = {record.id: record for record in records.read(root / "runs" / "records.jsonl")}
        for name, folder in self.folders.items():
            mine = root / "runs" / name
            record, expected = result.finished(mine), result.finished(folder)
            assert expected is not None
            if record is None:
                return f"{name} has no record"
            if timeless(record) != timeless(expected):
                return f"{name}: its record differs: {timeless(record)} {timeless(expected)}"
            if found.pop(record.id, None) != record:
                return f"{name}: its record is not among the records"
            last = checkpoint.checkpoints(folder)[-1].name
            if not _same(checkpoint.load(mine / last)[1], checkpoint.load(folder / last)[1]):
                return f"{name}: other weights"
            if left := [p.name for p in mine.iterdir() if p.name.endswith(".part")]:
                return f"{name}: {left} are left"
        return f"records of nothing: {list(found)}" if found else None

    # --- files that are made of a run ---

    def writing(self, name: str, words: list[str], file: str) -> Job:
        """A command that writes one file, in the place of an older one."""
        if name in self._jobs:
            return self._jobs[name]
        source = str(self.folders[self.run])
        spoken = [source if word == "RUN" else word for word in words]
        made = _undated(self._made(name, spoken, self._put_runs) / file)

        def prepare(root: Path) -> None:
            self._put_runs(root)
            (root / file).write_bytes(OLD)

        def sound(root: Path) -> str | None:
            return None if _undated(root / file) in (OLD, made) else f"half of {file}"

        def done(root: Path) -> str | None:
            return None if _undated(root / file) == made else f"{file} is another"

        return self._jobs.setdefault(name, Job(name, spoken, prepare, sound, done))

    def _put_runs(self, root: Path) -> None:
        shutil.copytree(self.trained / "runs", root / "runs")

    def report(self) -> Job:
        words = ["report", "runs", "--no-maps", "-o", "page.html"]
        return self.writing("report", words, "page.html")

    def weights(self) -> Job:
        words = ["weights", "RUN", "out.safetensors", "--device", "cpu", *self.data]
        return self.writing("weights", words, "out.safetensors")

    def export(self) -> Job:
        return self.writing("export", ["export", "RUN", "out.onnx", *self.data], "out.onnx")

    def explain(self) -> Job:
        """Of a run that has layers to explain."""
        words = f"{TRAIN} --recalibration mssar".split()
        seen = self._made("seen", [*words, *self.data]) / "runs"
        run = str(next(p for p in seen.iterdir() if p.is_dir()))
        words = ["explain", run, "test:0", "-o", "out.png", *self.data]
        return self.writing("explain", words, "out.png")

    # --- timings ---

    def bench(self) -> Job:
        words = "bench resnet8 --recalibration none --what inference --batch 2 --seconds 0.001"
        spoken = [*words.split(), "--device", "cpu", "--records", "new/timings.jsonl"]

        def sound(root: Path) -> str | None:
            return "" if len(timings.read(root / "new" / "timings.jsonl")) > 1 else None

        def done(root: Path) -> str | None:
            # Again measured is again there, where the first failed after it had its name.
            count = len(timings.read(root / "new" / "timings.jsonl"))
            return None if count in (1, 2) else f"{count} timings"

        return Job("bench", spoken, lambda _: None, sound, done)

    def compare(self) -> Job:
        words = "compare resnet8 --modules none,se --seeds 1 --dataset cifar10 --epochs 1 --batch 8"
        more = "--seconds 0.001 --device cpu --runs runs"

        def sound(root: Path) -> str | None:
            records.read(root / "runs" / "records.jsonl")
            timings.read(root / "runs" / "timings.jsonl")
            page = root / "runs" / "report.html"
            whole = not page.exists() or page.read_bytes().rstrip().endswith(b"</html>")
            return None if whole else "half a page"

        def done(root: Path) -> str | None:
            found = [r.run["recalibration"] for r in records.read(root / "runs" / "records.jsonl")]
            times = {t.recalibration for t in timings.read(root / "runs" / "timings.jsonl")}
            if sorted(found) != ["none", "se"] or times != {"none", "se"}:
                return f"records of {found}, timings of {times}"
            return sound(root) if (root / "runs" / "report.html").exists() else "no page"

        spoken = [*words.split(), *more.split(), *self.data]
        return Job("compare", spoken, lambda _: None, sound, done)

    # --- data ---

    def fetching(self) -> Job:
        def sound(root: Path) -> str | None:
            with samples.installed():
                found = cifar.find("cifar10", root / "sets")
            half = found is not None and not samples.are_whole(root / "sets")
            return "half a data set is taken for a whole one" if half else None

        def done(root: Path) -> str | None:
            return None if samples.are_whole(root / "sets") else "the data set is not whole"

        def tidy(root: Path) -> str | None:
            left = {p.name for p in (root / "sets").iterdir()}
            left -= {".cifar10.lock", samples.layout().forms[0].folder}
            return f"{left} are left" if left else None

        words = ["data", "get", "cifar10", "--data-dir", "sets"]
        return Job("data get", words, lambda _: None, sound, done, tidy)


def _undated(file: Path) -> bytes:
    """What is in it, but for when a page was made."""
    return re.sub(rb"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?", b"", file.read_bytes())


def _same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], tensor) for name, tensor in expected.items()
    )


def timeless(record: records.Record) -> dict[str, Any]:
    """A record without what differs between two runs of the same thing."""
    found: dict[str, Any] = json.loads(record.as_line())
    for name in ("id", "seconds", "started", "finished", "interruptions", "command"):
        del found[name]
    del found["execution"]["together"]
    for epoch in found["epochs"]:
        del epoch["seconds"]
    return found
