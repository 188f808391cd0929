"""``mssar explain``: what the layers of a run see in pictures."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from PIL import Image, ImageOps
from torch import Tensor

import mssar
from mssar.explain import Explanation, Importance
from mssar.lab import data
from mssar.lab.commands import options as opt
from mssar.lab.data import Data, pictures, transforms
from mssar.lab.data.dataset import Arrays, Split
from mssar.lab.data.imagefolder import MEAN, STD
from mssar.lab.engine import evaluate as engine
from mssar.lab.engine.checkpoint import write_whole
from mssar.lab.engine.feed import Normalise
from mssar.lab.recipes import Photographs
from mssar.lab.report import maps, overlay

if TYPE_CHECKING:
    from jaxtyping import UInt8


def explain(
    run: Annotated[
        Path, typer.Argument(help="A run's folder, a checkpoint, or a file of weights.")
    ],
    images: Annotated[
        list[str],
        typer.Argument(metavar="IMAGE...", help="Files, or test:17 for a test image by number."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The PNG to write.")] = Path(
        "explained.png"
    ),
    out: Annotated[Path | None, typer.Option(hidden=True)] = None,  # what it was called before
    block: Annotated[
        list[str] | None,
        typer.Option(help="Blocks by name, or all; the last of every stage by default."),
    ] = None,
    channel: Annotated[str, typer.Option(help="mean over channels, or a number.")] = "mean",
    as_json: Annotated[
        bool, typer.Option("--json", help="Also print the weights, by block, image and scale.")
    ] = False,
    data_dir: opt.DataDir = None,
) -> None:
    """Draw how much a network's layers weigh the parts of pictures, by scale and together.

    A picture is brought to the network's size as in testing: photographs by the run's recipe; for
    small images the shorter side is resized to that of the data set and the centre cut out.

    \b
    mssar explain runs/demo/arrangements-resnet8-mssar-seed0-8b83ba test:17 test:4
    mssar explain runs/cifar10-resnet20-mssar-seed0-0f3a51 cat.jpg --block layer3.2 -o cat.png
    mssar explain resnet20-mssar.safetensors cat.jpg
    """
    out = out or output
    _require_place(out)
    if not run.exists():
        raise ValueError(f"there is no {run}; a run's folder is what `mssar train` names")
    chosen = engine.trained(run, lambda line: typer.echo(line, err=True))
    found = _data(chosen, data_dir, images)
    maps.require_recalibrated(chosen, found)
    squares, truths = zip(*(_picture(name, found, chosen) for name in images), strict=True)
    normalise = Normalise(found, torch.device("cpu"))
    seen = mssar.explain(chosen.model, normalise(torch.stack(squares).permute(0, 3, 1, 2)))
    stages = dict(zip(seen.blocks, maps.stages_of(seen.blocks), strict=True))
    blocks = _blocks(seen, list(stages.values()), block)
    number = _channel(channel, blocks)
    shares, guesses = seen.logits.softmax(1).max(1)
    shown = [
        overlay.Picture(pixels, name, found.classes[guess], share, truth)
        for pixels, name, guess, share, truth in zip(
            squares, images, guesses.tolist(), shares.tolist(), truths, strict=True
        )
    ]
    layers = [overlay.layer_of(b, number) for b in blocks]
    of = "their mean over channels" if number is None else f"those of channel {number}"
    title = f"{chosen.run.label}, {chosen.run.dataset}, epoch {chosen.progress.epoch}"
    note = f"The weights that a block multiplies its map by, where they apply; {of}."
    write_whole(out, overlay.draw(shown, layers, title, note))
    if as_json:
        print(json.dumps(_plain(out, shown, blocks, layers, stages), indent=2))
        return
    for picture in shown:
        known = "" if picture.truth is None else f" (really {picture.truth})"
        if picture.truth == picture.guess:
            known = " (right)"
        print(f"{picture.name}: {picture.guess}, {picture.probability:.1%}{known}")
    print(f"{out}: {', '.join(layer.name for layer in layers)}")


def _require_place(out: Path) -> None:
    if out.suffix.lower() != ".png":
        raise ValueError(f"--output is a PNG, as in explained.png; got {out}")
    if not out.parent.is_dir():
        raise ValueError(f"there is no folder {out.parent} to write {out.name} into")
    if out.is_dir():
        raise ValueError(f"{out} is a folder")


def _data(chosen: engine.Trained, data_dir: Path | None, images: Sequence[str]) -> Data:
    """The run's data set, for its names, its colours' mean and its test images.

    A file of weights says as much of it as pictures of one's own need. Photographs are all
    normalised alike, so without theirs only the names are missing.
    """
    run, note = chosen.run, chosen.note
    try:
        return run.normalised(data.load(run.dataset, data_dir))
    except ValueError:
        photographs = isinstance(run.recipe.augmentation, Photographs)
        if not (photographs or note) or data_dir is not None or any(map(_numbered, images)):
            raise
    _, height, width = note["size"] if note else (3, 1, 1)
    labels = torch.zeros(0, dtype=torch.int64)
    none = Split(torch.zeros(0, height, width, 3, dtype=torch.uint8), labels)
    if note:
        mean, std = (tuple(255 * value for value in note[name]) for name in ("mean", "std"))
        return Arrays(run.dataset, tuple(note["classes"]), none, none, mean, std)
    classes = tuple(map(str, range(chosen.classes)))
    return Arrays(run.dataset, classes, none, none, *run.colours(MEAN, STD))


def _numbered(name: str) -> re.Match[str] | None:
    return re.fullmatch(r"test:(\d+)", name)


def _picture(
    name: str, found: Data, chosen: engine.Trained
) -> tuple[UInt8[Tensor, "H W 3"], str | None]:
    """An image as the network takes it, and its class where that is known."""
    if asked := _numbered(name):
        number, last = int(asked[1]), len(found.test) - 1
        if number > last:
            raise ValueError(f"test images of {found.name} are test:0 to test:{last}; got {name}")
        truth = found.classes[int(found.test.labels[number])]
        return maps.tested(found, chosen.run.recipe, number), truth
    try:
        image = pictures.decode(Path(name).read_bytes())
    except FileNotFoundError:
        raise ValueError(f"there is no picture {name}; test:0 is the first test image") from None
    except Exception as error:  # Pillow raises nearly anything on a broken file
        raise ValueError(f"{name} cannot be read: {pictures.reason_of(error)}") from None
    augmentation = chosen.run.recipe.augmentation
    if isinstance(augmentation, Photographs):
        return transforms.pixels(transforms.testing(image, augmentation)), None
    assert isinstance(found, Arrays)
    height, width = found.test.images.shape[1:3]
    return transforms.pixels(fitted(image, (width, height))), None


def fitted(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """The shorter side resized and the centre cut out; an image of this size stays as it is."""
    return ImageOps.fit(image, size, Image.Resampling.BILINEAR)


def _blocks(
    seen: Explanation, stages: Sequence[int], asked: Sequence[str] | None
) -> list[Importance]:
    if not asked:
        return [seen.blocks[i] for i in maps.thinned(stages, 1)]
    if list(asked) == ["all"]:
        return list(seen.blocks)
    short = {block.name.removesuffix(".recalibrate"): block for block in seen.blocks}
    for name in asked:
        if name.removesuffix(".recalibrate") not in short:
            raise ValueError(f"no block {name!r}; there are all, {', '.join(short)}")
    return [short[name.removesuffix(".recalibrate")] for name in asked]


def _channel(text: str, blocks: Sequence[Importance]) -> int | None:
    if text == "mean":
        return None
    if not text.isdecimal():
        raise ValueError(f"--channel is mean or a number; got {text!r}")
    for block in blocks:
        if int(text) >= block.channels:
            name, last = block.name.removesuffix(".recalibrate"), block.channels - 1
            raise ValueError(f"{name} has channels 0 to {last}; got {text}")
    return int(text)


def _plain(
    out: Path,
    shown: Sequence[overlay.Picture],
    blocks: Sequence[Importance],
    layers: Sequence[overlay.Layer],
    stages: dict[Importance, int],
) -> dict[str, object]:
    """What is in the figure, as JSON takes it; each map row by row."""
    return {
        "out": str(out),
        "images": [
            {"name": p.name, "guess": p.guess, "probability": p.probability, "label": p.truth}
            for p in shown
        ],
        "blocks": [
            {
                "name": block.name,
                "stage": stages[block],
                "channels": block.channels,
                "scales": block.scales,
                "low": layer.range[0],
                "high": layer.range[1],
                "weights": [
                    {name: weights[place].tolist() for name, weights in _named(block, layer)}
                    for place in range(len(shown))
                ],
            }
            for block, layer in zip(blocks, layers, strict=True)
        ],
    }


def _named(block: Importance, layer: overlay.Layer) -> Iterator[tuple[str, Tensor]]:
    """Z, which the last overlay has, and every scale by its number."""
    yield "Z", layer.overlays[-1].maps
    for scale, drawn in zip(block.scales, layer.overlays, strict=False):
        yield str(scale), drawn.maps
