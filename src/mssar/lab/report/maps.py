"""What a trained network's layers see in a few test images, as a page shows it.

N images, C channels, H W a map's or an image's size, h w the smallest grid that has all of a map.
"""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from PIL import Image
from torch import Tensor

from mssar.coordinates import CoordinateSet, Regional
from mssar.explain import Importance, explain
from mssar.lab.data import Data, pictures, transforms
from mssar.lab.data.dataset import Arrays
from mssar.lab.engine.evaluate import Trained, trained
from mssar.lab.engine.feed import Normalise
from mssar.lab.recipes import Photographs, Recipe
from mssar.lab.report.content import Block, Explained, Grid, Histogram, Seen
from mssar.lab.report.groups import named

if TYPE_CHECKING:
    from jaxtyping import Float, UInt8

BLOCKS = 16  # at most
CHANNELS = 3  # shown of each block, at most
ROOM = 250_000  # characters of JSON for the maps, about
SIDE = 160  # pixels of a picture on the page; larger ones are made smaller
BINS = 40
AT_ONCE = 2**16  # pixels, when many images are looked at
NOTE = "The pictures are the first test images of some classes, evenly from all."
NOTED = (
    "Six shapes stand on a circle; which two are next to the disc is the class. The pictures are "
    "test images with little noise, of different classes."
)


def explained(
    run: Path | Trained, data: Data, count: int = 5, *, over: int = 256, note: str = ""
) -> Explained:
    """What the layers of a run, its folder or itself, make of ``count`` test images.

    The images are of different classes, and the same every time; of ``arrangements`` those with
    little noise. ``note`` says which they are, if it is not that. How often which weight occurs is
    counted over more images, ``over`` of them, evenly from the test set, and over all blocks.

    A page must not grow with the network. Beyond 16 blocks, or where the maps would take more than
    some 250 KB (those of sliding windows are as large as the network's own), blocks are left out
    evenly within each stage, and then channels. The last block of every stage always stays.
    """
    chosen = run if isinstance(run, Trained) else trained(run)
    require_recalibrated(chosen, data)
    if count < 1 or over < 1:
        raise ValueError(f"numbers of images are 1 or more; got {count} and {over}")
    normalise = Normalise(chosen.run.normalised(data), torch.device("cpu"))
    read = list(islice(_readable(data, chosen.run.recipe, _worth_a_look(data, count)), count))
    if not read:
        raise ValueError(f"no test image of {data.name} can be read")
    images = torch.stack([image for _, image in read])
    seen = explain(chosen.model, normalise(images.permute(0, 3, 1, 2)))
    stages = stages_of(seen.blocks)
    drawn = [smallest(block) for block in seen.blocks]
    kept, channels = _affordable(stages, [sum(map(_length, maps)) for maps in drawn], len(read))
    shown = [liveliest(drawn[i][0], channels) for i in kept]
    views = [  # a block, a view, a scale; N h w
        [[m.mean(1) for m in drawn[i]], *([m[:, channel] for m in drawn[i]] for channel in lively)]
        for i, lively in zip(kept, shown, strict=True)
    ]
    blocks = tuple(
        Block(b.name, i + 1, stages[i], b.channels, b.scales, lively, tuple(map(_range, view)))
        for i, b, lively, view in zip(
            kept, [seen.blocks[i] for i in kept], shown, views, strict=True
        )
    )
    guesses = seen.logits.argmax(1).tolist()
    return Explained(
        label=f"{named(chosen.run.as_dict()).label}, seed {chosen.run.seed}",
        dataset=data.name,
        depth=len(seen.blocks),
        blocks=blocks,
        images=tuple(
            Seen(
                *_shown(image),
                label=data.classes[int(data.test.labels[number])],
                guess=data.classes[guesses[place]],
                maps=tuple(
                    tuple(
                        tuple(_grid(maps[place], *ends) for maps in view)
                        for view, ends in zip(own, block.ranges, strict=True)
                    )
                    for own, block in zip(views, blocks, strict=True)
                ),
            )
            for place, (number, image) in enumerate(read)
        ),
        histograms=_histograms(
            chosen, data, normalise, over, max(1, AT_ONCE // images[0, :, :, 0].numel())
        ),
        note=note or (NOTED if data.name == "arrangements" else NOTE),
    )


def require_recalibrated(chosen: Trained, data: Data) -> None:
    """A ValueError for a run that has no importance, or that was not trained on such data."""
    label = chosen.run.label
    if chosen.run.recalibration == "none":
        raise ValueError(f"{label} recalibrates nothing; take a run with se or mssar")
    if len(data.classes) != chosen.classes:
        raise ValueError(
            f"{label} was trained for {chosen.classes} classes; {data.name} has {len(data.classes)}"
        )


# Pictures


def tested(data: Data, recipe: Recipe, number: int) -> UInt8[Tensor, "H W 3"]:
    """A test image as a network of this recipe is given it, before it is normalised."""
    if isinstance(data, Arrays):
        return data.test.images[number]
    assert isinstance(recipe.augmentation, Photographs)
    path = data.root / data.test.paths[number]
    try:
        image = pictures.decode(pictures.contents(path))
    except Exception as error:  # Pillow raises nearly anything on a broken file
        raise ValueError(f"{path} cannot be read: {pictures.reason_of(error)}") from error
    return transforms.pixels(transforms.testing(image, recipe.augmentation))


def _readable(
    data: Data, recipe: Recipe, numbers: Iterable[int]
) -> Iterator[tuple[int, UInt8[Tensor, "H W 3"]]]:
    for number in numbers:
        try:
            yield number, tested(data, recipe, number)
        except ValueError:  # the run has named it
            continue


def _worth_a_look(data: Data, count: int) -> list[int]:
    """Numbers of test images: ``count`` classes, evenly from all, and each of them in turn."""
    labels = data.test.labels
    order = torch.arange(len(labels))
    if isinstance(data, Arrays) and data.name == "arrangements":
        order = _noise(data.test.images).argsort(stable=True)
    present = labels.unique().tolist()
    count = min(count, len(present))
    classes = [present[i * len(present) // count] for i in range(count)]
    in_turn = zip_longest(*(order[labels[order] == c].tolist() for c in classes))
    return [number for turn in in_turn for number in turn if number is not None]


def _noise(images: UInt8[Tensor, "N H W 3"]) -> Float[Tensor, " N"]:
    """How much a pixel differs from its neighbours, as a rule and not at edges."""
    x = images.float()
    for axis in (1, 2):
        x = x.diff(2, axis)
    return x.abs().flatten(1).median(1).values


def _shown(image: UInt8[Tensor, "H W 3"]) -> tuple[str, int, int]:
    """A picture for the page, its height and its width."""
    picture = Image.fromarray(image.numpy())
    picture.thumbnail((SIDE, SIDE))
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True)
    text = base64.b64encode(file.getvalue()).decode()
    return f"data:image/png;base64,{text}", picture.height, picture.width


# Blocks


def stages_of(blocks: Sequence[Importance]) -> list[int]:
    """The stage of every block, from 1: by its name, or else a new one wherever the map changes."""
    named = [re.match(r"(?:layer|block)(\d+)\.", block.name) for block in blocks]
    if all(named):
        return [int(found[1]) for found in named if found]
    stages, size = [0], blocks[0].size
    for block in blocks:
        stages.append(stages[-1] + (block.size != size or not stages[-1]))
        size = block.size
    return stages[1:]


def smallest(block: Importance) -> list[Float[Tensor, "N C _ _"]]:
    """Z, and the maps of its scales, each on the smallest grid of equal cells that has all of it.

    That is K × K for a scale that divides the map, and for Z the finest of them if they nest.
    Regions of unequal sides and sliding windows leave the map as it is.
    """
    steps = [tuple(_step(s, length) for length in block.size) for s in block.sets.sets]
    together = tuple(math.gcd(*along) for along in zip(*steps, strict=True))
    maps = zip([block.z, *block.per_scale], [together, *steps], strict=True)
    return [z[:, :, ::down, ::across] for z, (down, across) in maps]


def _step(within: CoordinateSet, length: int) -> int:
    """Where borders can be: at multiples of this."""
    return math.gcd(*within.runs(length)) if isinstance(within, Regional) else 1


def liveliest(z: Float[Tensor, "N C h w"], count: int) -> tuple[int, ...]:
    """Channels that vary most over positions; or over images, where none does, as in SE."""
    change = z.flatten(2).std(2, correction=0).mean(0)
    if change.max() < 1e-6:
        change = z.mean((2, 3)).std(0, correction=0)
    return tuple(change.topk(min(count, len(change))).indices.tolist())


def thinned(stages: Sequence[int], each: int) -> list[int]:
    """Places of at most so many blocks a stage, evenly from first to last; of one, the last."""
    kept = []
    for stage in dict.fromkeys(stages):
        places = [i for i, own in enumerate(stages) if own == stage]
        last, gaps = len(places) - 1, min(each, len(places)) - 1
        kept += [places[i * last // gaps] for i in range(gaps)] + [places[last]]
    return kept


def _affordable(
    stages: Sequence[int], lengths: Sequence[int], images: int
) -> tuple[list[int], int]:
    """Places of the blocks to show, and how many channels: all there is room for."""
    most = max(stages.count(stage) for stage in stages)
    for channels in range(CHANNELS, 0, -1):
        for each in range(most, 0, -1):
            kept = thinned(stages, each)
            length = images * (1 + channels) * sum(lengths[i] for i in kept)
            if len(kept) <= BLOCKS and length <= ROOM:
                return kept, channels
    return thinned(stages, 1), 1


# Maps


def _length(maps: Float[Tensor, "N C h w"]) -> int:
    """Of one image's grid, in JSON."""
    return 4 * -(-maps.shape[2] * maps.shape[3] // 3) + 42


def _range(maps: Sequence[Tensor]) -> tuple[float, float]:
    """The least and the greatest weight, to four digits outwards and never the same."""
    least, greatest = map(float, torch.cat([m.flatten() for m in maps]).aminmax())
    if not math.isfinite(least + greatest):
        raise ValueError("weights are not finite: the training of this network went wrong")
    low = math.floor(least * 1e4)
    return low / 1e4, max(math.ceil(greatest * 1e4), low + 1) / 1e4


def _grid(z: Float[Tensor, "h w"], low: float, high: float) -> Grid:
    steps = (z.double() - low) * (255 / (high - low))
    octets = steps.round().clamp(0, 255).to(torch.uint8).contiguous()
    height, width = z.shape
    return Grid(height, width, base64.b64encode(octets.numpy().tobytes()).decode())


def _histograms(
    chosen: Trained, data: Data, normalise: Normalise, over: int, at_once: int
) -> tuple[Histogram, ...]:
    """Over images from all of the test set, some at a time."""
    over = min(over, len(data.test))
    numbers = (i * len(data.test) // over for i in range(over))
    images = (image for _, image in _readable(data, chosen.run.recipe, numbers))
    counts: dict[tuple[int, int], Tensor] = {}
    while batch := list(islice(images, at_once)):
        seen = explain(chosen.model, normalise(torch.stack(batch).permute(0, 3, 1, 2)))
        for block, stage in zip(seen.blocks, stages_of(seen.blocks), strict=True):
            for scale, maps in zip((0, *block.scales), smallest(block), strict=True):
                found = maps.histc(BINS, 0, 1).double()
                counts[stage, scale] = counts.get((stage, scale), torch.zeros(BINS)) + found
    return tuple(
        Histogram(stage, scale, tuple((found / found.sum()).tolist()))
        for (stage, scale), found in sorted(counts.items())
    )
