"""Options that several verbs share.

Here and in every verb, what needs torch is imported where it is used: help and a mistake in the
words are answered without.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from mssar.lab.commands.groups import Flag, changes
from mssar.options import OPTIONS

if TYPE_CHECKING:
    from mssar.lab.engine.execution import Execution

RUNS = Path("runs")

DataDir: TypeAlias = Annotated[
    Path | None,
    typer.Option(help="Where data sets lie; else $MSSAR_DATA, else the user's cache folder."),
]
Trained: TypeAlias = Annotated[
    Path, typer.Argument(help="A run's folder, a checkpoint, or weights: a file or a name.")
]
Runs: TypeAlias = Annotated[Path, typer.Option(help="Folder for runs, one folder each.")]
Budget: TypeAlias = Annotated[
    str | None, typer.Option("--time-budget", help="Stop in time, as in 9m or 1h30m, and save.")
]
Restart: TypeAlias = Annotated[
    bool, typer.Option("--restart", help="Delete these runs, finished ones too, and begin anew.")
]
Dataset: TypeAlias = Annotated[
    str, typer.Option(help="arrangements, cifar10, cifar100, imagefolder, ilsvrc2012.")
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON, numbers unrounded.")]
Open: TypeAlias = Annotated[bool, typer.Option("--open", help="Open the page in a browser.")]
Network: TypeAlias = Annotated[
    dict[str, Any],
    changes({name: Flag(o.kind, o.help, o.example) for name, o in OPTIONS.items()}),
]


def _how(text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel="How it is computed", **more)


@dataclass(frozen=True)
class How:
    """How to compute, as it was asked for: on this machine or another."""

    device: Annotated[str, _how("auto, cpu, cuda, cuda:1.")] = "auto"
    precision: Annotated[str | None, _how("bf16 (by default on a GPU), tf32, fp32.")] = None
    compile: Annotated[
        bool | None,
        _how(
            "torch.compile the network; by default in trainings on a GPU that are long enough.",
            "--compile/--no-compile",
        ),
    ] = None
    graph: Annotated[bool, _how("CUDA graphs.", "--graph/--no-graph")] = True
    deterministic: Annotated[bool, _how("The same bits every time.", "--deterministic")] = False
    fleet: Annotated[
        int | None,
        _how("Runs at once on a device; usually 4 on a GPU, 1 on a CPU, or whole stacks.", min=1),
    ] = None
    stack: Annotated[
        int,
        _how(
            "Runs of one network that are trained as a single wide one, which a GPU does faster.",
            min=1,
        ),
    ] = 1
    sync_bn: Annotated[
        bool,
        _how(
            "With several processes: BN over the global batch, or over each process's own.",
            "--sync-bn/--local-bn",
        ),
    ] = True
    workers: Annotated[int | None, _how("Processes that read photographs; one a core.", min=0)] = (
        None
    )
    decode: Annotated[str, _how("Where photographs are decoded: auto, workers, gpu.")] = "auto"
    unreadable: Annotated[float, _how("Share of photographs that may be unreadable.")] = 0.01
    threads: Annotated[
        int | None,
        _how(
            "Of a CPU, for each run; what is quickest at its beginning by default.",
            min=1,
            max=512,
        ),
    ] = None
    tensorboard: Annotated[bool, _how("Write event files.", "--tensorboard")] = False

    @property
    def settings(self) -> dict[str, Any]:
        """What ``execution_for`` takes."""
        apart = ("fleet", "stack", "tensorboard")
        return {name: value for name, value in asdict(self).items() if name not in apart}

    def execution(self) -> Execution:
        """The same, of this machine."""
        from mssar.lab.engine.execution import execution_for

        return execution_for(**self.settings)
