"""``mssar train``: networks on a data set, by a recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from rich.console import Console

from mssar.lab.commands import groups, parse
from mssar.lab.commands import options as opt
from mssar.lab.commands import submission as sub
from mssar.lab.commands.console import console
from mssar.lab.commands.groups import Flag, grouped, options_of
from mssar.lab.commands.leave import leave
from mssar.lab.recipes import AUGMENTATIONS, RECIPES, Recipe, varied

if TYPE_CHECKING:
    from mssar.lab.run import Initial, Normalisation, Run

RECIPE = "The recipe, field by field"


def _recipe() -> dict[str, Flag]:
    """Every field of a recipe and of either augmentation that says what it is."""
    found: dict[str, Flag] = {}
    for kind in (Recipe, *AUGMENTATIONS.values()):
        types = get_type_hints(kind)
        for field in fields(kind):
            if field.metadata:
                found[field.name] = Flag(types[field.name], **field.metadata)
    return found


@grouped
def train(
    *,
    nets: Annotated[
        list[str] | None,
        typer.Argument(
            help="One network or several; timm:NAME, torchvision:NAME too.", metavar="NET…"
        ),
    ] = None,
    from_: Annotated[
        str | None, typer.Option("--from", help="The same as NET.", show_default=False)
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            help="Weights to begin with: a file, a name of ours, or pretrained (the library's).",
            show_default=False,
        ),
    ] = None,
    mean: Annotated[
        str | None,
        typer.Option(
            help="Of the photographs' colours, 0 to 1; the network's or ImageNet's by default.",
            show_default=False,
        ),
    ] = None,
    std: Annotated[
        str | None, typer.Option(help="Their deviation, as 0.229,0.224,0.225.", show_default=False)
    ] = None,
    insert: Annotated[
        bool, typer.Option("--insert", help="The same as --recalibration mssar.")
    ] = False,
    recalibration: Annotated[
        str | None,
        typer.Option(
            help="none (by default), se, mssar, or several: none,mssar. Also those of "
            "`mssar compare`.",
            show_default=False,
        ),
    ] = None,
    where: Annotated[
        str | None,
        typer.Option(
            help="Where it is inserted: names of modules, as layer4.*,*.bn2; se: for every SE.",
            show_default=False,
        ),
    ] = None,
    dataset: Annotated[
        str,
        typer.Option(
            help="arrangements, cifar10, cifar100, imagefolder, ilsvrc2012; several: "
            "cifar10,cifar100."
        ),
    ] = "arrangements",
    seed: Annotated[str, typer.Option(help="One, or several: 0,1,2.")] = "0",
    options: opt.Network,
    recipe: Annotated[
        str | None,
        typer.Option(
            help=f"{', '.join(RECIPES)}; the paper's for the network, or finetune.",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where it was stopped.")] = False,
    restart: opt.Restart = False,
    data_dir: opt.DataDir = None,
    runs: opt.Runs = opt.RUNS,
    time_budget: opt.Budget = None,
    changes: Annotated[dict[str, Any], groups.changes(_recipe(), RECIPE)],
    how: Annotated[opt.How, options_of(opt.How)],
    submission: Annotated[sub.Submission, options_of(sub.Submission)],
) -> None:
    """Train networks; every combination of what is given is a run, several at once on a GPU.

    A finished run is a line in RUNS/records.jsonl. A run that is stopped by a signal or its time
    budget is saved; the exit status is then 128 + the signal, or 75.

    \b
    mssar train resnet20 --dataset cifar10 --recalibration none,mssar --seed 0,1,2
    mssar train resnet56 --dataset cifar100 --recalibration mssar --time-budget 9m --resume
    mssar train resnet56 --seed 0,1,2 --submit slurm --time-budget 4h --sbatch partition=gpu
    mssar train --from timm:resnet50 --weights FILE --insert --dataset imagefolder --data-dir DIR
    torchrun --nproc-per-node 8 -m mssar train resnet18 --dataset imagefolder --data-dir DIR
    """
    from mssar.lab.commands.beginning import colours, initial, settled
    from mssar.lab.engine.world import leads

    if submission.told(runs):
        return
    nets = [*(nets or []), *([from_] if from_ else [])]
    if not nets:
        raise ValueError("name a network, as in resnet20 or timm:resnet50")
    if insert and recalibration is not None:
        raise ValueError(f"--insert is --recalibration mssar; not {recalibration} as well")
    if where is not None:
        options = {**options, "where": parse.places(where)}
    kinds = "mssar" if insert else "none" if recalibration is None else recalibration
    seeds = parse.integers("seed", seed, "0,1,2")
    known = settled(nets)
    told = runs if resume else None
    begun = {net: initial(weights, net, told, said) for net, (said, _) in known.items()}
    asked = [
        run
        for name in dict.fromkeys(dataset.split(","))
        for run in combinations(
            [*known],
            kinds.split(","),
            options,
            name,
            seeds,
            recipe,
            changes,
            begun,
            {net: colours(mean, std, net, name, found) for net, (_, found) in known.items()},
        )
    ]
    asked.sort(key=lambda run: seeds.index(run.seed))  # a seed of everything before the next
    submission.check()
    if submission.submit and restart:
        raise ValueError("--restart is for this process alone; with --submit name other --runs")
    budget = parse.seconds(time_budget)
    if leads():
        _ask(asked, runs, resume, restart)
    outcome = sub.carry_out(
        asked,
        how,
        runs,
        submission,
        data_dir=data_dir,
        budget=budget,
        record_in=dict.fromkeys(asked, runs / "records.jsonl"),
        anew=restart,
    )
    if outcome is None:
        return
    if outcome.records:
        _show(console(), outcome.records, runs)
    if restart and not outcome.moved:
        again = "the same command"  # what has not begun may hold what it had before
    else:
        again = f"the same command with --resume{' instead of --restart' * restart}"
    leave(outcome, again)


def _show(out: Console, records: list[Any], runs: Path) -> None:
    from mssar.lab.display import results

    out.print(results(records, out.width))
    out.print(f"records: {runs / 'records.jsonl'}", highlight=False)


def combinations(
    nets: Sequence[str],
    recalibrations: Sequence[str],
    options: dict[str, Any],
    dataset: str,
    seeds: Sequence[int],
    recipe: str | None,
    changes: dict[str, Any],
    weights: Mapping[str, Initial | None] = {},
    seen: Mapping[str, Normalisation | None] = {},
) -> list[Run]:
    """Every combination; an option goes to those that take it, and somebody must."""
    from mssar.lab.run import Run, usual_options, usual_recipe

    if recipe is not None and recipe not in RECIPES:
        raise ValueError(f"no recipe {recipe!r}; there are {', '.join(RECIPES)}")
    if not seeds:
        raise ValueError("--seed takes whole numbers, as in 0,1,2; got none")
    found, untaken = list[Run](), set(options)
    for number, net, kind in product(seeds, nets, recalibrations):
        own = usual_options(net, kind)
        untaken -= own.keys()
        begun = weights.get(net)
        chosen = RECIPES[recipe] if recipe else usual_recipe(net, dataset, begun=begun is not None)
        mine = {k: v for k, v in options.items() if k in own}
        by = changed(chosen, changes)
        found.append(Run(net, kind, mine, dataset, by, number, begun, seen.get(net)))
    for option in untaken:
        whose = ": it says where mssar or se goes in networks of timm and torchvision"
        hint = whose if option == "where" else ""
        raise ValueError(f"nothing that is trained here takes --{option}{hint}")
    return list(dict.fromkeys(found))


def changed(recipe: Recipe, changes: dict[str, Any]) -> Recipe:
    """A recipe with some fields of its own."""
    given = changes.get("drops", ())
    if "epochs" in changes and "drops" not in changes:
        # A shorter training drops at the same shares of its length.
        drops = [round(drop * changes["epochs"] / recipe.epochs) for drop in recipe.drops]
        changes = {**changes, "drops": tuple(d for d in dict.fromkeys(drops) if d > 0)}
        changes.setdefault("warmup", recipe.warmup * changes["epochs"] / recipe.epochs)
    if changes.get("schedule") == "cosine":
        changes = {**changes, "drops": given}
    return varied(recipe, **changes)


def _ask(asked: list[Run], folder: Path, resume: bool, restart: bool) -> None:
    """What is there already is gone on with or thrown away, but only if that was said."""
    from mssar.lab.engine.checkpoint import checkpoints
    from mssar.lab.engine.result import finished

    if resume and restart:
        raise ValueError("--resume goes on and --restart throws away; say one of them")
    for run in () if resume or restart else asked:
        directory = folder / run.name
        if checkpoints(directory) or finished(directory):
            raise ValueError(
                f"{directory} holds this run already; --resume goes on, "
                "--restart begins all runs of the command anew, finished ones too"
            )
