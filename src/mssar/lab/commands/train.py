"""``mssar train``: networks on a data set, by a recipe."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer
from rich.console import Console

from mssar.lab.commands import options as opt
from mssar.lab.commands import parse
from mssar.lab.commands import submission as sub
from mssar.lab.commands.console import console
from mssar.lab.commands.groups import grouped
from mssar.lab.commands.leave import leave
from mssar.lab.recipes import RECIPES, Recipe, varied

if TYPE_CHECKING:
    from mssar.lab.run import Initial, Normalisation, Run

RECIPE = "The recipe, field by field"
Whole: TypeAlias = int | None
Number: TypeAlias = float | None


def _field(help_text: str, **more: Any) -> Any:
    return typer.Option(help=help_text, rich_help_panel=RECIPE, show_default=False, **more)


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
            help="Weights to begin with: a file, or pretrained for the library's own.",
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
        str,
        typer.Option(
            help="none, se, mssar, or several: none,mssar. Also those of `mssar compare`."
        ),
    ] = "none",
    dataset: Annotated[
        str, typer.Option(help="arrangements, cifar10, cifar100, imagefolder, ilsvrc2012.")
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
    restart: Annotated[bool, typer.Option("--restart", help="Throw away what was begun.")] = False,
    data_dir: opt.DataDir = None,
    runs: opt.Runs = opt.RUNS,
    time_budget: opt.Budget = None,
    epochs: Annotated[Whole, _field("Epochs.")] = None,
    batch: Annotated[Whole, _field("Images a step, over all processes.")] = None,
    lr: Annotated[Number, _field("Learning rate at first.")] = None,
    drops: Annotated[str | None, _field("After which epochs it drops: 80,120.")] = None,
    factor: Annotated[Number, _field("What a drop multiplies it by.")] = None,
    momentum: Annotated[Number, _field("Of gradient descent.")] = None,
    nesterov: Annotated[bool | None, _field("Nesterov's momentum, or plain.")] = None,
    weight_decay: Annotated[Number, _field("On all parameters.")] = None,
    schedule: Annotated[str | None, _field("Of the learning rate: steps or cosine.")] = None,
    warmup: Annotated[Number, _field("Epochs in which it rises.")] = None,
    smoothing: Annotated[Number, _field("Of labels: the share of all classes alike.")] = None,
    ema: Annotated[Number, _field("Test the weights' average; what a step leaves of it.")] = None,
    padding: Annotated[Whole, _field("Small images: zeros around, before the crop.")] = None,
    mirror: Annotated[Number, _field("Probability of a mirror image.")] = None,
    size: Annotated[Whole, _field("Photographs: side of what is cut out.")] = None,
    resize: Annotated[Whole, _field("Photographs: shorter side before the test's crop.")] = None,
    area: Annotated[str | None, _field("Photographs: share cut out, as 0.08,1.")] = None,
    ratio: Annotated[str | None, _field("Photographs: width over height, as 0.75,1.33.")] = None,
    rotation: Annotated[Number, _field("Photographs: degrees, either way.")] = None,
    jitter: Annotated[Number, _field("Photographs: of brightness, contrast, saturation.")] = None,
    device: opt.Device = "auto",
    precision: opt.Precision = None,
    compiled: opt.Compile = False,
    graph: opt.Graph = True,
    deterministic: opt.Deterministic = False,
    fleet: opt.Width = None,
    stack: opt.Together = 1,
    sync_bn: opt.SyncBN = True,
    workers: opt.Workers = None,
    decode: opt.Decode = "auto",
    unreadable: opt.Unreadable = 0.01,
    threads: opt.Threads = None,
    tensorboard: opt.Tensorboard = False,
    submit: sub.Submit = None,
    tasks: sub.Tasks = None,
    sbatch: sub.Sbatch = None,
    dry_run: sub.DryRun = False,
    status: sub.Status = False,
    cancel: sub.Cancel = False,
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
    from mssar.lab.commands.beginning import colours, initial
    from mssar.lab.engine.world import leads

    if status or cancel:
        sub.tell(runs, cancel=cancel)
        return
    nets = [*(nets or []), *([from_] if from_ else [])]
    if not nets:
        raise ValueError("name a network, as in resnet20 or timm:resnet50")
    if insert and recalibration != "none":
        raise ValueError(f"--insert is --recalibration mssar; not {recalibration} as well")
    changes = {
        "epochs": epochs,
        "batch": batch,
        "lr": lr,
        "drops": None if drops is None else parse.integers("drops", drops, "80,120"),
        "factor": factor,
        "momentum": momentum,
        "nesterov": nesterov,
        "weight_decay": weight_decay,
        "schedule": schedule,
        "warmup": warmup,
        "smoothing": smoothing,
        "ema": ema,
        "padding": padding,
        "mirror": mirror,
        "size": size,
        "resize": resize,
        "area": None if area is None else parse.pair("area", area, "0.08,1"),
        "ratio": None if ratio is None else parse.pair("ratio", ratio, "0.75,1.33"),
        "rotation": rotation,
        "jitter": jitter,
    }
    asked = _runs(
        nets,
        ["mssar"] if insert else recalibration.split(","),
        options,
        dataset,
        parse.integers("seed", seed, "0,1,2"),
        recipe,
        {k: v for k, v in changes.items() if v is not None},
        {net: initial(weights, net, runs if resume else None) for net in nets},
        {net: colours(mean, std, net, dataset) for net in nets},
    )
    handing = sub.asked(submit, tasks, sbatch, dry_run)
    if handing and restart:
        raise ValueError("--restart is for this process alone; with --submit name other --runs")
    how = opt.settings(
        device,
        precision,
        compiled,
        graph,
        deterministic,
        sync_bn,
        workers,
        decode,
        unreadable,
        threads,
    )
    budget = parse.seconds(time_budget)
    if leads():
        _ask(asked, runs, resume, restart)
    outcome = sub.carry_out(
        asked,
        how,
        runs,
        handing,
        data_dir=data_dir,
        width=fleet,
        stack=stack,
        budget=budget,
        tensorboard=tensorboard,
        record_in=runs / "records.jsonl",
        anew=restart,
    )
    if outcome is None:
        return
    if outcome.records:
        _show(console(), outcome.records, runs)
    leave(outcome, "the same command with --resume")


def _show(out: Console, records: list[Any], runs: Path) -> None:
    from mssar.lab.display import results

    out.print(results(records, out.width))
    out.print(f"records: {runs / 'records.jsonl'}", highlight=False)


def _runs(
    nets: list[str],
    recalibrations: list[str],
    given: dict[str, Any],
    dataset: str,
    seeds: tuple[int, ...],
    recipe: str | None,
    changes: dict[str, Any],
    weights: dict[str, Initial | None],
    seen: dict[str, Normalisation | None],
) -> list[Run]:
    """Every combination; an option goes to those that take it, and somebody must."""
    from mssar.lab.run import Run, usual_options, usual_recipe

    if recipe is not None and recipe not in RECIPES:
        raise ValueError(f"no recipe {recipe!r}; there are {', '.join(RECIPES)}")
    if not seeds:
        raise ValueError("--seed takes whole numbers, as in 0,1,2; got none")
    found, untaken = list[Run](), set(given)
    for number, net, kind in product(seeds, nets, recalibrations):
        own = usual_options(net, kind)
        untaken -= own.keys()
        begun = weights[net]
        chosen = RECIPES[recipe] if recipe else usual_recipe(net, dataset, begun=begun is not None)
        mine = {k: v for k, v in given.items() if k in own}
        by = changed(chosen, changes)
        found.append(Run(net, kind, mine, dataset, by, number, begun, seen[net]))
    for option in untaken:
        raise ValueError(f"nothing that is trained here takes --{option}")
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
    for run in asked:
        directory = folder / run.name
        there = checkpoints(directory) or finished(directory)
        if there and not (resume or restart):
            raise ValueError(
                f"{directory} holds this run already; --resume goes on, --restart begins anew"
            )
