"""What the engine tells whoever watches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mssar.lab.records import Epoch, Record
from mssar.lab.run import Run


@dataclass(frozen=True)
class Moment:
    """How a run stands in the middle of an epoch."""

    epoch: int  # from 1
    step: int
    steps: int
    loss: float
    images: int  # trained on since the start or the resumption
    seconds: float  # since then
    left: float  # seconds, estimated


class Observer:
    """Who wants to know how runs get on. What a subclass leaves out it does not want to know."""

    def began(self, run: Run, epoch: int, directory: Path) -> None: ...
    def moved(self, run: Run, moment: Moment) -> None: ...
    def passed(self, run: Run, epoch: Epoch, left: float) -> None: ...
    def ended(self, run: Run, record: Record) -> None: ...
    def failed(self, run: Run, reason: str) -> None: ...
    def said(self, message: str) -> None: ...
