"""``mssar cost``: parameters and multiply-adds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

import mssar
from mssar.lab.commands import options as opt
from mssar.lab.commands.console import console, print_json
from mssar.lab.commands.groups import grouped

if TYPE_CHECKING:
    from mssar.cost import Cost
    from mssar.lab.experiments import counts

T = TypeVar("T")
DEPTH = 1


@grouped
def cost(
    net: Annotated[str | None, typer.Argument(help="The network.", show_default=False)] = None,
    recalibration: Annotated[str | None, typer.Option(help="none (by default), se, mssar.")] = None,
    *,
    options: opt.Network,
    classes: Annotated[int | None, typer.Option(help="10 or 1000 by default.")] = None,
    size: Annotated[
        int | None, typer.Option(help="Side of the image; 32 or 224 by default.")
    ] = None,
    depth: Annotated[int, typer.Option(min=0, help="How deep to look into the modules.")] = DEPTH,
    paper: Annotated[
        bool, typer.Option("--paper", help="Beside the paper's: NET, or all.")
    ] = False,
    as_json: opt.AsJson = False,
) -> None:
    """Parameters and multiply-adds of a network, by module, the recalibration's share apart.

    \b
    mssar cost resnet20 --recalibration mssar
    mssar cost densenet100 --recalibration mssar --scales 1,4 --stage single
    mssar cost resnet20 --paper
    mssar cost --paper
    """
    import torch

    from mssar.lab.experiments import counts
    from mssar.lab.run import settled_options
    from mssar.networks.registry import architecture
    from mssar.surgery.foreign import is_foreign

    if paper:
        asked = {"recalibration": recalibration, "classes": classes, "size": size, **options}
        asked["depth"] = None if depth == DEPTH else depth
        for option in (name for name, value in asked.items() if value is not None):
            raise ValueError(f"--paper fixes the networks and takes no --{option}; it takes --json")
        rows = counts.compare(_tracked, net)
        print_json([row.as_dict() for row in rows]) if as_json else _print_paper(rows)
        return
    if net is None:
        raise ValueError(f"name a network ({', '.join(mssar.list_models())}), or pass --paper")
    if is_foreign(net):
        raise ValueError(
            f"{net} is not one of {', '.join(mssar.list_models())}; for any other network there is "
            "mssar.cost(model, (3, 224, 224)) in Python"
        )
    channels, *sides = architecture(net).size
    options = settled_options(net, recalibration or "none", options)
    side = sides[0] if size is None else size
    with torch.device("meta"):
        model = mssar.create_model(net, recalibration or "none", classes, **options)
    try:
        found = mssar.cost(model, (channels, side, side))
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{net} cannot take images of {side}×{side}: {reason}") from error
    print_json(asdict(found)) if as_json else _print_cost(found, depth)


def _print_cost(found: Cost, depth: int) -> None:
    table = Table("module", "kind", box=box.SIMPLE_HEAD)
    table.add_column("parameters", justify="right")
    table.add_column("multiply-adds", justify="right")
    for entry in found.table(depth):
        table.add_row(entry.name, entry.kind, f"{entry.params:,}", f"{entry.macs:,}")
    table.add_section()
    share = (found.recalibration_params, found.recalibration_macs)
    rest = (found.params - share[0], found.macs - share[1])
    table.add_row("without recalibration", "", *(f"{n:,}" for n in rest))
    percent = [f"{n:,} (+{n / m:.2%})" for n, m in zip(share, rest, strict=True)]
    table.add_row("recalibration", "", *percent)
    table.add_row("total", "", f"{found.params:,}", f"{found.macs:,}", style="bold")
    console().print(table)


def _print_paper(rows: list[counts.Row]) -> None:
    remarks = list(dict.fromkeys(row.remark for row in rows if row.remark))
    table = Table("table", "network", "", "scales", "r", box=box.SIMPLE_HEAD)
    for column in ("parameters", "ours", "differ", "multiply-adds", "ours", "differ", "note"):
        table.add_column(column, justify="right")
    for before, row in zip([None, *rows], rows, strict=False):
        if before and (before.table, before.network) != (row.table, row.network):
            table.add_section()
        table.add_row(
            row.table,
            row.network,
            row.recalibration,
            ",".join(map(str, row.scales or ())),
            str(row.reduction or ""),
            *_in_units(row.params),
            *_in_units(row.macs),
            str(remarks.index(row.remark) + 1) if row.remark else "",
        )
    out = console()
    out.print(table)
    for number, remark in enumerate(remarks, 1):
        out.print(f"{number:>3}  {remark}", highlight=False)


def _in_units(count: counts.Count) -> tuple[str, str, str]:
    unit, letter = (1e9, "G") if count.ours >= 1e9 else (1e6, "M")
    digits = 2 if unit == 1e9 or count.ours < 1e7 else 1
    own = f"{count.ours / unit:.{digits}f} {letter}"
    if count.published is None or count.difference is None:
        return "", own, ""
    published = f"{count.published / unit:.{digits}f} {letter}"
    difference = round(count.difference / unit, digits) + 0.0  # no minus before a zero
    return published, own, f"{difference:+.{digits}f}"


def _tracked(items: list[T]) -> Iterable[T]:
    """Progress on standard error: a bar, or one line where there is no terminal."""
    console = Console(stderr=True)
    if console.is_terminal:
        return track(items, "counting", console=console, transient=True)
    console.print(f"counting {len(items)} network{'s' * (len(items) != 1)}")
    return items
