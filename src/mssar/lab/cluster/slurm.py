"""A sweep as an array job of Slurm's, handed over by submitit.

What became of it is asked of ``squeue`` and of the runs' folders, so that no accounting is needed.
Where there is some it is asked, too, who was cancelled.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from mssar.extras import advice
from mssar.lab.cluster.sweep import Sweep

LEAST = 2  # minutes
LEAVING = 60.0  # seconds of a limit in which a task begins and leaves
WARNING = 30  # seconds before the limit: Slurm says so by a signal


def limit(budget: float) -> tuple[int, float]:
    """The minutes that Slurm gives a task, and the seconds that it trains for."""
    minutes = max(LEAST, math.ceil(budget / 60))
    return minutes, min(budget, 60 * minutes - LEAVING)


def parameters(
    name: str, minutes: int, gpu: bool, given: Iterable[str] = ()
) -> dict[str, str | int | bool]:
    """Options of sbatch for every task; what the user gave, as KEY=VALUE, counts most."""
    found: dict[str, str | int | bool] = {"job-name": name, "time": minutes, "requeue": True}
    if gpu:
        found["gpus-per-node"] = 1
    for words in given:
        if not (match := re.fullmatch(r"(?:--)?([a-z][a-z_-]*)(?:=(.*))?", words.strip())):
            raise ValueError(
                f"--sbatch is one of sbatch's options, as partition=gpu; got {words!r}"
            )
        key, value = match.groups()
        if key == "time":
            raise ValueError("--sbatch time: Slurm's limit is what --time-budget says")
        found[key.replace("_", "-")] = True if value is None else value
    return found


def submit(sweep: Sweep, tasks: Sequence[Callable[[], None]], options: dict[str, Any]) -> str:
    """Hand the tasks over; the job's number."""
    require()
    try:
        import submitit
    except ModuleNotFoundError:
        raise ValueError(f"--submit slurm needs submitit: {advice('cluster')}") from None

    executor = submitit.SlurmExecutor(folder=sweep.folder / "slurm")
    executor.update_parameters(
        time=options["time"],
        signal_delay_s=WARNING,
        array_parallelism=len(tasks),
        additional_parameters={key.replace("-", "_"): value for key, value in options.items()},
    )
    try:
        with executor.batch():
            jobs = [executor.submit(task) for task in tasks]
    except (submitit.core.utils.FailedJobError, subprocess.CalledProcessError) as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"Slurm did not take it: {said[-1]}") from None
    job = str(jobs[0].job_id).partition("_")[0]
    sweep.handed_to(slurm=job)
    return job


def require() -> None:
    for command in ("sbatch", "squeue", "scancel"):
        if shutil.which(command) is None:
            raise ValueError(
                f"--submit slurm needs Slurm's {command}, which is not here; "
                f"--submit local trains on this machine"
            )


def states(sweep: Sweep) -> dict[int, str]:
    """Of tasks that wait or are at work: what has ended is not among them."""
    if not (job := sweep.job.get("slurm")):
        return {}
    require()
    # -r: each task of an array on a line of its own. A plain job has no task's number: "N/A".
    done = _ask("squeue", "-h", "-r", "-j", job, "-o", "%K|%T|%N|%r")
    found = {}
    for line in done.splitlines():
        number, state, node, reason = line.split("|", 3)
        where = f" on {node}" if node else f" ({reason})" if reason != "None" else ""
        found[int(number) if number.isdigit() else 0] = state.lower() + where
    return found


def cancelled(sweep: Sweep) -> set[int]:
    """Tasks of which Slurm says so, whoever did it.

    The controller forgets a job minutes after its end; accounting does not, but there may be none.
    """
    job, said = sweep.job["slurm"], list[str]()
    for words in (
        ("squeue", "-h", "-r", "-j", job, "-t", "CANCELLED", "-o", "%i|%T"),
        ("sacct", "-X", "-n", "-P", "-j", job, "-o", "JobID,State"),
    ):
        with suppress(ValueError, OSError, subprocess.TimeoutExpired):
            said += _ask(*words).splitlines()
    found = set[int]()
    for line in said:
        name, _, state = line.partition("|")
        if state.startswith("CANCELLED"):  # sacct adds by whom
            found |= _tasks(name)
    return found


def _tasks(name: str) -> set[int]:
    """Of a job's name: 7_2, or 7_[2-4,6%8] and 7_[0-8:2] of those that waited; 7 is no array."""
    found, listed = set[int](), name.partition("_")[2].partition("%")[0]
    for first, last, step in re.findall(r"(\d+)(?:-(\d+)(?::(\d+))?)?", listed or "0"):
        found |= {*range(int(first), int(last or first) + 1, int(step or 1))}
    return found


def begins(sweep: Sweep) -> bool:
    """Whether this process is a task that Slurm has started for the first time."""
    own = os.environ.get("SLURM_ARRAY_JOB_ID") or os.environ.get("SLURM_JOB_ID")
    restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
    return own is not None and own == sweep.job.get("slurm") and restarts == "0"


def cancel(sweep: Sweep) -> None:
    """Ask the tasks to stop; they save, and those that wait are forgotten."""
    if job := sweep.job.get("slurm"):
        going = states(sweep)
        _ask("scancel", job)
        for task in going:
            sweep.mark_cancelled(task)


def requeue() -> None:
    """Have Slurm start this job again, to go on. It ends it first, at once."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    own = os.environ["SLURM_JOB_ID"]
    _ask("scontrol", "requeue", f"{array}_{task}" if array else own)


def _ask(*words: str) -> str:
    whole = {**os.environ, "SLURM_BITSTR_LEN": "0"}  # long lists of tasks would be cut
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, timeout=120, env=whole
    )
    forgotten = "invalid job id" in done.stderr.lower()  # it ended some time ago
    if done.returncode and not forgotten:
        raise ValueError(f"{words[0]}: {done.stderr.strip() or f'status {done.returncode}'}")
    return done.stdout
