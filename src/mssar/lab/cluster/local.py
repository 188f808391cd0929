"""A sweep's tasks as processes of this machine, one a GPU."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from mssar.lab.cluster.sweep import Sweep
from mssar.lab.engine.clock import Clock

LOOK = 0.5  # seconds between looks at them


def gpus() -> list[str]:
    """Each by the name that CUDA_VISIBLE_DEVICES has for it."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    every = [str(number) for number in range(torch.cuda.device_count())]
    return named.split(",")[: len(every)] if named else every


def work(
    sweep: Sweep,
    commands: Sequence[Sequence[str]],
    devices: Sequence[str],
    look: Callable[[], None],
    taken: Callable[[], None],
) -> tuple[list[int], int | None]:
    """Start a process for each task and wait for all; their exit statuses, and a signal that came.

    Signals are passed on. ``look`` is called while they work, and ``taken`` once, when all of them
    can be seen to work. They go on without this process.
    """
    clock, passed, starting = Clock(None), False, True
    with clock.listening():
        processes = [_start(sweep, task, words, devices) for task, words in enumerate(commands)]
        sweep.handed_to(host=platform.node())
        while any(process.poll() is None for process in processes):
            if clock.signal is not None and not passed:
                passed = True
                for task, process in enumerate(processes):
                    if process.poll() is None:
                        sweep.mark_cancelled(task)
                        process.terminate()
            if starting and all(
                sweep.is_taken(task) or process.poll() is not None
                for task, process in enumerate(processes)
            ):
                starting = False
                taken()
            look()
            time.sleep(LOOK)
    return [process.returncode for process in processes], clock.signal


def _start(
    sweep: Sweep, task: int, words: Sequence[str], devices: Sequence[str]
) -> subprocess.Popen[bytes]:
    own = {"CUDA_VISIBLE_DEVICES": devices[task % len(devices)]} if devices else {}
    with sweep.log(task).open("ab") as log:
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **own},
        )


def states(sweep: Sweep) -> dict[int, str]:
    """Of tasks that are at work: what has ended is not among them."""
    tasks = range(len(sweep.shares))
    where = f"running on {sweep.job.get('host', 'this machine')}"
    return {task: where for task in tasks if sweep.is_taken(task)}


def cancel(sweep: Sweep) -> None:
    """Ask the tasks that are at work to stop; they save."""
    pids = dict[int, int]()
    for task in states(sweep):
        if (holder := sweep.held_by(task)) is None:
            raise ValueError(
                f"task {task} of {sweep.name} does not say which process has it: it begins or ends "
                "just now (ask again), or another version started it"
            )
        host, pids[task] = holder
        if host != platform.node():
            raise ValueError(f"{sweep.name} works on {host}; cancel it there")
    for task, pid in pids.items():
        sweep.mark_cancelled(task)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
