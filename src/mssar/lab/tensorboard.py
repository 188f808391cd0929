"""Curves for TensorBoard: one event file a run, in its folder."""

from __future__ import annotations

import os
import platform
import time
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import Any

from mssar.extras import advice
from mssar.lab.engine.observer import Observer
from mssar.lab.records import Epoch, Record
from mssar.lab.run import Run

_numbers = count()  # of files that this process writes


class Events(Observer):
    """An observer that writes every epoch's losses and errors, by epoch.

    Not by torch's writer, whose thread answers a full disk with a traceback of its own.
    """

    def __init__(self) -> None:
        try:
            import tensorboard.summary.writer.record_writer  # noqa: F401
        except ImportError:
            raise ValueError(f"--tensorboard needs a package: {advice('tensorboard')}") from None
        self._files: dict[Run, _File] = {}

    def began(self, run: Run, epoch: int, directory: Path) -> None:
        self._end(run)  # a run of a stack that came apart begins once more
        # What an earlier, interrupted part wrote beyond this epoch is not shown twice.
        self._files[run] = _File(directory, epoch + 1)

    def passed(self, run: Run, epoch: Epoch, left: float) -> None:  # noqa: ARG002
        values = {
            "loss/train": epoch.train_loss,
            "loss/test": epoch.test_loss,
            "error/train": epoch.train_error,
            "error/test": epoch.test_error,
            "error/test, top 5": epoch.test_error5,
            "lr": epoch.lr,
        }
        self._files[run].write(epoch.epoch, values)

    def ended(self, run: Run, record: Record) -> None:  # noqa: ARG002
        self._end(run)

    def failed(self, run: Run, reason: str) -> None:  # noqa: ARG002
        self._end(run)

    def _end(self, run: Run) -> None:
        if file := self._files.pop(run, None):
            file.close()

    def close(self) -> None:
        for run in [*self._files]:
            self._end(run)


class _File:
    """Events as TensorBoard reads them; nothing stays in memory."""

    def __init__(self, directory: Path, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog

        name = f"{int(time.time()):010}.{platform.node()}.{os.getpid()}.{next(_numbers)}"
        self._file = (directory / f"events.out.tfevents.{name}").open("wb", buffering=0)
        self._event(step=step, file_version="brain.Event:2")
        self._event(step=step, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, values: dict[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        shown = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._event(step=step, summary=Summary(value=shown))

    def _event(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        framed = BytesIO()
        RecordWriter(framed).write(Event(wall_time=time.time(), **fields).SerializeToString())
        rest = framed.getvalue()
        while rest:
            rest = rest[self._file.write(rest) :]

    def close(self) -> None:
        self._file.close()
