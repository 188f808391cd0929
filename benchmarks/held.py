"""What each scale does in a trained network: its test error when scales are held.

    python benchmarks/held.py resnet56-mssar-cifar100
    python benchmarks/held.py resnet56-mssar-cifar100 --json held.jsonl

On a CPU, in float32. A scale that is held no longer looks at the image: its weights are, channel by
channel, their means over training images. In the last row all scales look, but every position of an
image has the mean of its weights: no weight depends on where a neuron is. Nothing is trained anew:
this says what a network depends on, not what another one could do without. NET is a run's folder or
trained weights, with MS-SAR that takes its weights from its own map.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from reporting import append, heading
from torch import Tensor, nn

import mssar
from mssar.lab.data import load
from mssar.lab.data.dataset import Arrays, Split
from mssar.lab.engine.evaluate import Trained, trained
from mssar.lab.engine.feed import Normalise

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

FLAT = "flat"  # in lines that are written
BATCH = 50  # what fits in a cache
CPU = torch.device("cpu")


class Held(nn.Module):
    """A layer of which some scales have fixed weights, or all have one weight a map."""

    def __init__(
        self, layer: mssar.MSSAR, fixed: dict[int, Float[Tensor, "1 C 1 1"]], flat: bool = False
    ) -> None:
        super().__init__()
        self.layer, self.fixed, self.flat = layer, fixed, flat

    def forward(self, x: Float[Tensor, "N C H W"]) -> Float[Tensor, "N C H W"]:
        by_scale = zip(self.layer.scales, self.layer.importance(x, per_scale=True), strict=True)
        weights = [self.fixed[k].to(z) if k in self.fixed else z for k, z in by_scale]
        if self.flat:
            weights = [z.mean((2, 3), keepdim=True) for z in weights]
        return x * (sum(weights[1:], weights[0]) / len(weights))


def layers(model: nn.Module) -> dict[str, mssar.MSSAR]:
    """By their names."""
    return {name: m for name, m in model.named_modules() if isinstance(m, mssar.MSSAR)}


@torch.no_grad()
def means(
    chosen: Trained, images: Iterable[Float[Tensor, "n 3 H W"]]
) -> dict[str, dict[int, Tensor]]:
    """Of every layer's weights over some images and all positions, by layer and scale."""
    sums: dict[str, dict[int, Tensor]] = {name: {} for name in layers(chosen.model)}

    def watch(name: str) -> Any:
        def look(layer: mssar.MSSAR, inputs: tuple[Tensor, ...]) -> None:
            by_scale = layer.importance(*inputs, per_scale=True)
            for scale, z in zip(layer.scales, by_scale, strict=True):
                added = z.double().mean((2, 3)).sum(0)
                sums[name][scale] = sums[name].get(scale, torch.zeros_like(added)) + added

        return look

    watched = [m.register_forward_pre_hook(watch(n)) for n, m in layers(chosen.model).items()]
    chosen.model.eval()
    count = 0
    for some in images:
        chosen.model(some)
        count += len(some)
    for handle in watched:
        handle.remove()
    return {
        name: {scale: (total / count).float().view(1, -1, 1, 1) for scale, total in by.items()}
        for name, by in sums.items()
    }


def holding(
    chosen: Trained, found: dict[str, dict[int, Tensor]], held: Sequence[int], flat: bool = False
) -> nn.Module:
    """The network with these scales held, or with flat weights; the one given stays as it is."""
    model = copy.deepcopy(chosen.model).eval()
    for name, layer in layers(model).items():
        model.set_submodule(name, Held(layer, {k: found[name][k] for k in held}, flat))
    return model


def ways(scales: Sequence[int]) -> Iterator[tuple[Sequence[int], bool]]:
    """None held, then one, two and so on; at last flat weights."""
    for count in range(len(scales) + 1):
        yield from ((some, False) for some in combinations(scales, count))
    yield (), True


@torch.no_grad()
def judged(model: nn.Module, data: Arrays) -> tuple[Bool[Tensor, " N"], float]:
    """Which test images are taken for what they are, and the mean loss."""
    right, loss = [], 0.0
    labels = data.test.labels.split(BATCH)
    for x, y in zip(batches(data, data.test), labels, strict=True):
        logits = model(x)
        right.append(logits.argmax(1) == y)
        loss += float(F.cross_entropy(logits, y, reduction="sum"))
    return torch.cat(right), loss / len(data.test)


def batches(data: Arrays, split: Split) -> Iterator[Float[Tensor, "n 3 H W"]]:
    """Its images as a network is given them."""
    normalise = Normalise(data, CPU)
    return (normalise(some.permute(0, 3, 1, 2)) for some in split.images.split(BATCH))


def measured(net: str, chosen: Trained, data: Arrays) -> list[dict[str, Any]]:
    """A line for every way of holding, which are printed as they come."""
    mean, std = chosen.run.colours(data.mean, data.std)
    data = replace(data, mean=mean, std=std)
    kinds = {(m.scales, m.context_channels) for m in layers(chosen.model).values()}
    if len(kinds) != 1 or next(iter(kinds))[1] is not None:
        raise ValueError(
            f"{net} is no network with MS-SAR of the same scales everywhere that takes its "
            "weights from its own map"
        )
    ((scales, _),) = kinds
    found = means(chosen, batches(data, data.train))
    lines, base = list[dict[str, Any]](), torch.empty(0)
    for held, flat in ways(scales):
        right, loss = judged(holding(chosen, found, held, flat), data)
        base = base if lines else right
        error = 100 * (1 - right.double().mean().item())
        changed = {"lost": int((base & ~right).sum()), "won": int((right & ~base).sum())}
        counts = {"trained": len(data.train), "tested": len(data.test)}
        said = {"net": net, "held": FLAT if flat else list(held), "error": round(error, 4)}
        lines.append(said | {"loss": loss} | changed | counts)
        name = "positions" if flat else ", ".join(map(str, held)) or "nothing"
        told = f"{error:7.2f} %{loss:8.3f}{changed['lost']:7}{changed['won']:6}"
        print(f"  {name:14}{told}", flush=True)
    return lines


def first(split: Split, count: int | None) -> Split:
    return Split(split.images[:count], split.labels[:count])


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("nets", nargs="+", metavar="NET")
    add("--images", type=int, default=5000, help="training images, for the means; %(default)s")
    add("--tests", type=int, help="test images; all by default")
    add("--data-dir", type=Path, help="where data sets lie")
    add("--json", type=Path, metavar="FILE", help="append a line a row")
    wanted = parser.parse_args(argv)
    for net in wanted.nets:
        chosen = trained(Path(net))
        data = load(chosen.run.dataset, wanted.data_dir)
        if not isinstance(data, Arrays):
            parser.error(f"{net} was trained on photographs; this is for small images")
        some = replace(
            data, train=first(data.train, wanted.images), test=first(data.test, wanted.tests)
        )
        what = f"{net}: held, test error, test loss, images lost and won by it"
        print(heading(what, CPU), flush=True)
        append(wanted.json, CPU, measured(net, chosen, some))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
