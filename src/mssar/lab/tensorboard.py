"""Curves for TensorBoard: one event file a run, in its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mssar.extras import advice
from mssar.lab.engine.observer import Observer
from mssar.lab.records import Epoch, Record
from mssar.lab.run import Run


class Events(Observer):
    """An observer that writes every epoch's losses and errors, by epoch."""

    def __init__(self) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ValueError(f"--tensorboard needs a package: {advice('tensorboard')}") from None
        self._open_writer: Any = SummaryWriter
        self._writers: dict[Run, Any] = {}

    def began(self, run: Run, epoch: int, directory: Path) -> None:
        # What an earlier, interrupted part wrote beyond this epoch is not shown twice.
        self._writers[run] = self._open_writer(str(directory), purge_step=epoch + 1)

    def passed(self, run: Run, epoch: Epoch, left: float) -> None:  # noqa: ARG002
        writer = self._writers[run]
        values = {
            "loss/train": epoch.train_loss,
            "loss/test": epoch.test_loss,
            "error/train": epoch.train_error,
            "error/test": epoch.test_error,
            "error/test, top 5": epoch.test_error5,
            "lr": epoch.lr,
        }
        for name, value in values.items():
            writer.add_scalar(name, value, epoch.epoch)
        writer.flush()

    def ended(self, run: Run, record: Record) -> None:  # noqa: ARG002
        self._writers.pop(run).close()

    def failed(self, run: Run, reason: str) -> None:  # noqa: ARG002
        self._writers.pop(run).close()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()
