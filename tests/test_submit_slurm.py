"""``--submit slurm`` with a real Slurm: two nodes on this machine, which may die."""

import re
import sys
from pathlib import Path

import pytest
from lab import assert_same, learnt, timeless, tiny_folder  # noqa: F401, a fixture
from lab import run_command as mssar
from slurm import Slurm, free_ports, until
from typer.testing import CliRunner

from mssar.lab import cli, records
from mssar.lab.cluster import status, sweep

SHORT = (
    "--dataset",
    "cifar10",
    "--batch",
    "16",
    "--lr",
    "0.02",
    "--device",
    "cpu",
    "--threads",
    "1",
)


pytestmark = pytest.mark.usefixtures("tiny_folder")


def words(seeds: str, epochs: int, *more: str) -> list[str]:
    found = ["train", "resnet8", "--seed", seeds, "--epochs", str(epochs), *SHORT]
    return [*found, "--submit", "slurm", "--time-budget", "5m", *more]


def submit(seeds: str, epochs: int, *more: str) -> sweep.Sweep:
    mssar(*words(seeds, epochs, *more))
    return sweep.sweeps(Path("runs"))[-1]


def again(seeds: str, epochs: int) -> str:
    return mssar(*words(seeds, epochs, "--resume", "--tasks", "3"))


def folder(made: sweep.Sweep, number: int) -> Path:
    return Path(made.order.runs) / made.runs[number].name


def epoch(place: Path) -> int:
    """The last one that is saved."""
    numbers = [int(re.findall(r"\d+", path.name)[0]) for path in place.glob("epoch-*")]
    return max(numbers, default=0)


def is_begun(place: Path, before: int = 2000) -> bool:
    return 0 < epoch(place) < before and not (place / "record.json").exists()


def collected() -> list[records.Record]:
    mssar("train", "--status")
    return records.read(Path("runs/records.jsonl"))


def logs(made: sweep.Sweep, slurm: Slurm) -> str:
    said = [path.read_text() for path in sorted(made.folder.glob("slurm/*.err"))]
    return "\n".join([slurm.ask("squeue", "-a", "-r"), *said, slurm.logs()])


def wait(made: sweep.Sweep, slurm: Slurm) -> None:
    """Until all of its tasks have ended, as often as they were queued again."""

    def ended() -> bool:
        slurm.hasten()
        return not status.states(made)

    until(ended, lambda: logs(made, slurm))


def test_a_node_is_killed_and_nothing_is_lost_or_doubled(slurm: Slurm):
    made = submit("0,1,2,3,4,5,6,7", 40, "--tasks", "2")
    assert [len(share) for share in made.shares] == [4, 4]
    second = [folder(made, number) for number in range(4, 8)]
    until(lambda: any(is_begun(place, 20) for place in second), lambda: logs(made, slurm))
    where = status.states(made)
    assert sorted(where.values()) == ["running on a", "running on b"]
    slurm.kill(where[1].removeprefix("running on "))
    wait(made, slurm)
    found = collected()
    assert sorted(record.run["seed"] for record in found) == [*range(8)], logs(made, slurm)
    assert sum(record.interruptions for record in found) >= 1
    assert collected() == found

    local = words("0,1,2,3,4,5,6,7", 40, "--submit", "local", "--tasks", "2", "--runs", "alone")
    mssar(*local)
    alone = {r.run["seed"]: r for r in records.read(Path("alone/records.jsonl"))}
    for record, run in zip(sorted(found, key=lambda r: r.run["seed"]), made.runs, strict=True):
        assert timeless(record) == timeless(alone[record.run["seed"]])
        assert_same(learnt(Path("runs", run.name)), learnt(Path("alone", run.name)))


def test_at_the_end_of_its_time_a_task_is_queued_again_and_goes_on(slurm: Slurm):
    made = submit("0", 2000, "--time-budget", "20s")
    until(lambda: bool(made.notes()), lambda: logs(made, slurm))
    assert made.notes()[0].left == 1
    before = epoch(folder(made, 0))

    def went_on() -> bool:
        slurm.hasten()
        return epoch(folder(made, 0)) > before

    until(went_on, lambda: logs(made, slurm))
    assert before > 0
    mssar("train", "--cancel")
    wait(made, slurm)


@pytest.mark.parametrize("how", ["warned", "preempted"])
def test_a_task_that_is_interrupted_saves_and_goes_on(slurm: Slurm, how: str):
    made = submit("0", 120)
    until(lambda: is_begun(folder(made, 0), 60), lambda: logs(made, slurm))
    if how == "warned":
        slurm.ask("scancel", "--signal", "USR1", made.job["slurm"])
    else:  # Slurm sends SIGTERM, and queues it again by itself
        slurm.ask("scontrol", "requeue", made.job["slurm"])
    until(lambda: bool(made.notes()), lambda: logs(made, slurm))
    assert made.notes()[0].left == 1
    wait(made, slurm)
    assert len(found := collected()) == 1, logs(made, slurm)
    assert found[0].interruptions == 1


def test_what_is_cancelled_is_saved_and_stays_so_until_it_is_submitted_again(slurm: Slurm):
    made = submit("0,1,2", 2000, "--tasks", "3")
    until(lambda: is_begun(folder(made, 0)), lambda: logs(made, slurm))
    assert "nothing is left to submit" in again("0,1,2", 2000)  # each is under way
    assert "cancelled" in mssar("train", "--cancel")
    wait(made, slurm)
    assert collected() == []
    said = mssar("train", "--status")
    assert "0 of 3 runs recorded" in said
    assert "task 0, stopped: 0 of 1, 1 begun" in said
    assert "task 2, cancelled: 0 of 1" in said  # it never came to a node

    before = epoch(folder(made, 0))
    again("0,1,2", 2000)
    until(lambda: epoch(folder(made, 0)) > before, lambda: logs(made, slurm))
    assert "nothing is left to submit" in again("0,1,2", 2000)
    mssar("train", "--cancel")
    wait(sweep.sweeps(Path("runs"))[-1], slurm)


def test_what_is_cancelled_by_scancel_is_not_lost_and_may_be_queued_again(slurm: Slurm):
    made = submit("0,1,2", 2000, "--tasks", "3")
    until(lambda: is_begun(folder(made, 0)), lambda: logs(made, slurm))
    slurm.ask("scancel", made.job["slurm"])
    wait(made, slurm)
    said = mssar("train", "--status")
    assert "task 0, stopped: 0 of 1, 1 begun" in said
    assert "task 2, cancelled: 0 of 1" in said  # it never came to a node
    assert made.is_cancelled(2)

    slurm.ask("scontrol", "requeue", f"{made.job['slurm']}_2")

    def goes_on() -> bool:
        slurm.hasten()
        return is_begun(folder(made, 2))

    until(goes_on, lambda: logs(made, slurm))
    assert "task 2, running on " in mssar("train", "--status")
    assert not made.is_cancelled(2)
    mssar("train", "--cancel")
    wait(made, slurm)
    assert "task 2, stopped: 0 of 1, 1 begun" in mssar("train", "--status")


def test_what_slurm_does_not_take_is_one_line(slurm: Slurm):  # noqa: ARG001
    result = CliRunner().invoke(cli.app, words("0", 1, "--sbatch", "partition=none"))
    assert isinstance(result.exception, ValueError)
    assert "Invalid partition" in str(result.exception)
    assert "\n" not in str(result.exception)
    assert "never submitted" in mssar("train", "--status")


def test_a_large_run_loses_a_node_and_goes_on_with_fewer_processes(slurm: Slurm):
    """By the script that the documentation has."""
    page = (Path(__file__).parents[1] / "docs/cluster.md").read_text("utf-8")
    (script,) = re.findall(r"^```sh\n(#!/bin/bash\n.*?)^```$", page, re.MULTILINE | re.DOTALL)
    run = " ".join(["resnet8", "--epochs", "60", *SHORT[:-2]])
    for before, after in (
        ("--gpus-per-node=8", "--output=large.log --open-mode=append"),
        ("srun torchrun", f"srun {sys.executable} -m torch.distributed.run"),
        ("--nproc-per-node 8", "--nproc-per-node 1"),
        ("$head:29500", f"127.0.0.1:{free_ports(1)[0]}"),  # the nodes' names are nobody's
        ("resnet18 --dataset ilsvrc2012 --data-dir DIR", run),
        ("23h50m", "5m"),
    ):
        assert script.count(before) == 1, before
        script = script.replace(before, after)
    Path("large.sh").write_text(script)

    def said() -> str:
        return Path("large.log").read_text() + slurm.logs()

    slurm.ask("sbatch", "large.sh")
    until(lambda: any(Path("runs").glob("*/epoch-*")), said)
    slurm.kill("b")
    until(lambda: "pending" in slurm.ask("squeue", "-h", "-o", "%T").lower(), said)
    assert not Path("runs/records.jsonl").exists(), said()
    slurm.ask("scancel", "-n", "resnet18")
    until(lambda: not slurm.ask("squeue", "-h"), said)
    slurm.ask("sbatch", "--nodes=1", "large.sh")
    until(lambda: not slurm.ask("squeue", "-h"), said)
    (record,) = records.read(Path("runs/records.jsonl"))
    assert record.interruptions >= 1, said()
    assert record.execution["processes"] == 1
