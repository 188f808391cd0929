"""Options that several verbs share, and what they mean.

Here and in every verb, what needs torch is imported where it is used: help and a mistake in the
words are answered without.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from mssar.lab.commands import groups
from mssar.lab.commands.groups import Flag
from mssar.options import OPTIONS

RUNS = Path("runs")

HOW = "How it is computed"

DataDir: TypeAlias = Annotated[
    Path | None,
    typer.Option(help="Where data sets lie; else $MSSAR_DATA, else the user's cache folder."),
]
Runs: TypeAlias = Annotated[Path, typer.Option(help="Folder for runs, one folder each.")]
Budget: TypeAlias = Annotated[
    str | None, typer.Option("--time-budget", help="Stop in time, as in 9m or 1h30m, and save.")
]
Device: TypeAlias = Annotated[
    str, typer.Option(help="auto, cpu, cuda, cuda:1.", rich_help_panel=HOW)
]
Precision: TypeAlias = Annotated[
    str | None,
    typer.Option(help="bf16 (by default on a GPU), tf32, fp32.", rich_help_panel=HOW),
]
Compile: TypeAlias = Annotated[
    bool, typer.Option("--compile", help="torch.compile the network.", rich_help_panel=HOW)
]
Graph: TypeAlias = Annotated[
    bool, typer.Option("--graph/--no-graph", help="CUDA graphs.", rich_help_panel=HOW)
]
Deterministic: TypeAlias = Annotated[
    bool, typer.Option("--deterministic", help="The same bits every time.", rich_help_panel=HOW)
]
Width: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--fleet",
        min=1,
        help="Runs at once on one device; 4 on a GPU, 1 on a CPU by default.",
        rich_help_panel=HOW,
    ),
]
Together: TypeAlias = Annotated[
    int,
    typer.Option(
        "--stack",
        min=1,
        help="Runs of one network that are trained as a single wide one, which a GPU does faster.",
        rich_help_panel=HOW,
    ),
]
SyncBN: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--sync-bn/--local-bn",
        help="With several processes: BN over the global batch, or over each process's own.",
        rich_help_panel=HOW,
    ),
]
Workers: TypeAlias = Annotated[
    int | None,
    typer.Option(min=0, help="Processes that read photographs; one a core.", rich_help_panel=HOW),
]
Decode: TypeAlias = Annotated[
    str,
    typer.Option(help="Where photographs are decoded: auto, workers, gpu.", rich_help_panel=HOW),
]
Threads: TypeAlias = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=512,
        help="Of a CPU, for each run; what is quickest at its beginning by default.",
        rich_help_panel=HOW,
    ),
]
Unreadable: TypeAlias = Annotated[
    float,
    typer.Option(help="Share of photographs that may be unreadable.", rich_help_panel=HOW),
]
Tensorboard: TypeAlias = Annotated[
    bool, typer.Option("--tensorboard", help="Write event files.", rich_help_panel=HOW)
]

Network: TypeAlias = Annotated[
    dict[str, Any],
    groups.changes({n: Flag(o.kind, o.help, o.example) for n, o in OPTIONS.items()}),
]


def settings(
    device: str,
    precision: str | None,
    compiled: bool,
    graph: bool,
    deterministic: bool,
    sync_bn: bool,
    workers: int | None,
    decode: str,
    unreadable: float,
    threads: int | None,
) -> dict[str, Any]:
    """What was asked for, as ``execution_for`` takes it, on this machine or another."""
    return dict(locals())
