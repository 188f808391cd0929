"""``mssar weights``: a finished run's network as a file for others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from mssar.lab.commands import options as opt
from mssar.lab.commands.groups import grouped, options_of


@grouped
def weights(
    *,
    run: Annotated[Path, typer.Argument(help="A finished run's folder.")],
    file: Annotated[str, typer.Argument(help="The safetensors file to write, or a folder.")],
    half: Annotated[
        bool, typer.Option("--half", help="Parameters in half precision, statistics not.")
    ] = False,
    data_dir: opt.DataDir = None,
    how: Annotated[opt.How, options_of(opt.How, "device", "precision", "workers")],
) -> None:
    """Write the last epoch's weights of a run, for `mssar.create_model(…, weights=FILE)`.

    The file says what it is of. Its error is measured anew, after conversion. A FILE without an
    ending, or that ends in /, is a folder to share, for `mssar.from_pretrained`: the weights, a
    configuration and a model card.

    \b
    mssar weights runs/cifar10-resnet20-mssar-seed0-1a2b3c resnet20-mssar.safetensors --half
    mssar weights runs/cifar10-resnet20-mssar-seed0-1a2b3c resnet20-mssar
    """
    from dataclasses import asdict

    from mssar.durable import write_whole
    from mssar.lab import data
    from mssar.lab.engine import weights as engine
    from mssar.networks.card import measured
    from mssar.networks.sharing import CARD, CONFIG, WEIGHTS, write
    from mssar.surgery.sharing import described

    place, shared = _place(file)
    chosen, record = engine.last(run)
    recorded = asdict(record)
    config = described(chosen.model, recorded, chosen.run.network) if shared else {}
    found = data.load(chosen.run.dataset, data_dir)
    state = engine.convert(chosen, half=half)
    execution = how.execution()
    score = engine.measured(chosen, found, execution)
    note = engine.note(chosen, record, found, score, execution)
    content = engine.file(state, note)
    kind = "half precision" if half else "single precision"
    name = place.resolve().name
    if shared:
        write(place, config, content, recorded, name, note=note, precision=kind)
    else:
        write_whole(place, content)
    print(f"{place}: {chosen.run.label}, {found.name}, {kind}, {len(content):,} bytes")
    if shared:
        files = f"{WEIGHTS}, {CONFIG} and {CARD}"
        print(f"a folder to share, with {files}; {name}.safetensors would be a single file")
    print(f"error {score.error:.2f}% measured again{measured(note)}, {record.error:.2f}% recorded")


def _place(file: str) -> tuple[Path, bool]:
    """Where to write, and whether that is a folder to share."""
    place = Path(file)
    shared = file.endswith("/") or place.is_dir() or not place.suffix
    if not shared and place.suffix != ".safetensors":
        raise ValueError(
            "FILE ends in .safetensors, or is a folder without an ending or with a / at the end; "
            f"got {file}"
        )
    if shared and place.exists() and not place.is_dir():
        raise ValueError(f"{place} is there and is no folder")
    if not place.parent.is_dir():
        raise ValueError(f"there is no folder {place.parent} to write {place.name} into")
    if place.is_dir() and not _replaceable(place):
        raise ValueError(f"{place} holds other things, and no network of mssar: name a new folder")
    return place, shared


def _replaceable(folder: Path) -> bool:
    """Whether it is empty but for hidden files, or a folder of ours."""
    from mssar.networks.sharing import CONFIG

    if all(one.name.startswith(".") for one in folder.iterdir()):
        return True
    try:
        found = json.loads((folder / CONFIG).read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get("library") == "mssar"
