"""``--submit``: whether runs are trained by this process, by others here or on a cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mssar.lab.commands.handing import hand_on
from mssar.lab.commands.options import How
from mssar.lab.commands.sweeps import tell

if TYPE_CHECKING:
    from mssar.lab.engine.fleet import Outcome
    from mssar.lab.run import Run

WAYS = ("slurm", "local")


def _there(text: str, *names: str, **more: Any) -> Any:
    return typer.Option(
        *names, help=text, rich_help_panel="On other machines, or in other processes", **more
    )


@dataclass(frozen=True)
class Submission:
    """Whether and how runs are handed on, and what is to be said of those that were."""

    submit: Annotated[
        str | None, _there("slurm, or local for processes of this machine, one a GPU.")
    ] = None
    tasks: Annotated[
        int | None,
        _there("Tasks that share the runs; one a fleet with slurm, one a GPU with local.", min=1),
    ] = None
    sbatch: Annotated[
        list[str] | None, _there("An option of sbatch's, as partition=gpu; more than once.")
    ] = None
    dry_run: Annotated[bool, _there("Say what would be submitted.", "--dry-run")] = False
    status: Annotated[bool, _there("Say what became of all that was submitted.", "--status")] = (
        False
    )
    cancel: Annotated[bool, _there("Stop what was submitted; it is saved.", "--cancel")] = False

    def told(self, folder: Path) -> bool:
        """Whether it is only to be said, as is done now, what became of what was submitted."""
        if self.status or self.cancel:
            tell(folder, cancel=self.cancel)
        return self.status or self.cancel

    def check(self) -> None:
        from mssar.lab.engine.world import launched

        if self.submit is None:
            given = {"tasks": self.tasks, "sbatch": self.sbatch, "dry-run": self.dry_run}
            for name in (name for name, value in given.items() if value):
                raise ValueError(f"--{name} goes with --submit slurm or --submit local")
            return
        if self.submit not in WAYS:
            raise ValueError(f"--submit is slurm or local; got {self.submit!r}")
        if self.sbatch and self.submit != "slurm":
            raise ValueError(f"--sbatch goes with --submit slurm, not {self.submit}")
        if launched():
            raise ValueError("--submit starts processes of its own: without torchrun")

    def checksum(
        self,
        dataset: str,
        data_dir: Path | None,
        say: Callable[[str], None] = lambda message: None,  # noqa: ARG005
    ) -> str | None:
        """Of a data set; None where a dry run does without it: then records of any data count."""
        from mssar.lab import data

        try:
            return data.load(dataset, data_dir).checksum
        except ValueError as error:
            if not self.dry_run:
                raise
            say(f"records of {dataset} count whatever data they are of: {error}")
            return None

    def settled(self, how: How) -> How:
        """With the precision that it will be, and the kind of device: known here, also of another
        machine's GPU."""
        if self.submit is None:
            return replace(how, precision=how.execution().precision)
        device = how.device
        if self.submit == "local":
            from mssar.lab.engine.execution import choose_device

            if ":" in device:
                raise ValueError(
                    f"--submit local takes every GPU of CUDA_VISIBLE_DEVICES; got {device!r}"
                )
            device = choose_device(device).type
        elif device == "auto":
            device = "cuda"
        elif device not in ("cpu", "cuda"):
            raise ValueError(f"on a cluster --device is cuda or cpu; got {device!r}")
        precision = how.precision or ("fp32" if device == "cpu" else "bf16")
        return replace(how, device=device, precision=precision)


def carry_out(
    runs: Sequence[Run],
    how: How,
    folder: Path,
    submission: Submission,
    *,
    data_dir: Path | None,
    budget: float | None,
    record_in: Mapping[Run, Path],
    anew: bool = False,
) -> Outcome | None:
    """Train runs here, or have them trained; None where that was only arranged."""
    if how.fleet and how.fleet < how.stack:
        raise ValueError(
            f"--stack {how.stack} needs a --fleet of {how.stack} or more; got {how.fleet}"
        )
    if submission.submit:
        assert not anew
        return hand_on(runs, how, folder, submission, data_dir, budget, record_in)
    from mssar.lab.display import watching
    from mssar.lab.engine import runner

    return runner.carry_out(
        runs,
        how.execution(),
        folder,
        watching=partial(watching, how.tensorboard),
        data_dir=data_dir,
        width=how.fleet,
        stack=how.stack,
        budget=budget,
        record_in=record_in,
        anew=anew,
        may_compile=how.compile is None,
    )
