"""``mssar explain``: what the layers of a run see in pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import mssar
from mssar.lab.commands import options as opt
from mssar.lab.commands.console import print_json, say

if TYPE_CHECKING:
    from torch import Tensor

    from mssar.explain import Explanation, Importance
    from mssar.lab.report import overlay


def explain(
    run: opt.Trained,
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
    mssar explain runs/demo/arrangements-resnet8-mssar-seed0-2c979b test:17 test:4
    mssar explain runs/cifar10-resnet20-mssar-seed0-0f3a51 cat.jpg --block layer3.2 -o cat.png
    mssar explain resnet20-mssar.safetensors cat.jpg
    mssar explain resnet56-mssar-cifar100 cat.jpg
    """
    import torch

    from mssar.durable import write_whole
    from mssar.lab.commands.pictures import data_for, picture
    from mssar.lab.engine import evaluate as engine
    from mssar.lab.engine.feed import Normalise
    from mssar.lab.report import maps, overlay

    out = out or output
    _require_place(out)
    chosen = engine.trained(run, say)
    found = data_for(chosen, data_dir, images)
    maps.require_recalibrated(chosen, found)
    squares, truths = zip(*(picture(name, found, chosen) for name in images), strict=True)
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
        print_json(_plain(out, shown, blocks, layers, stages))
        return
    for one in shown:
        known = "" if one.truth is None else f" (really {one.truth})"
        if one.truth == one.guess:
            known = " (right)"
        print(f"{one.name}: {one.guess}, {one.probability:.1%}{known}")
    print(f"{out}: {', '.join(layer.name for layer in layers)}")


def _require_place(out: Path) -> None:
    if out.suffix.lower() != ".png":
        raise ValueError(f"--output is a PNG, as in explained.png; got {out}")
    if not out.parent.is_dir():
        raise ValueError(f"there is no folder {out.parent} to write {out.name} into")
    if out.is_dir():
        raise ValueError(f"{out} is a folder")


def _blocks(
    seen: Explanation, stages: Sequence[int], asked: Sequence[str] | None
) -> list[Importance]:
    from mssar.lab.report import maps

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
