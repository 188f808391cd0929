"""What MS-SAR gains when it is put into a pretrained network that is then fine-tuned.

    python benchmarks/finetune.py --data DIR mobilenet_v2=FILE resnet50=FILE
    python benchmarks/finetune.py --data DIR mobilenet_v2=FILE --seeds 5 --records errors.jsonl

DIR has train/CLASS/* and val/CLASS/*. The networks are torchvision's, the files their weights as
safetensors, the recipe is `mssar train`'s for fine-tuning. Every network is trained as it is and
with MS-SAR inserted, from the same weights and in the same order of photographs for each seed, by
the lab: what was stopped goes on. Prints test errors by epoch, and at the end the difference with
Welch's 95 % interval. A network's errors are those of the last epoch.

resnet50-v1 is torchvision's ResNet-50 with a stage's stride in its first 1×1 convolution, BN's eps
at 1e-3, and colours less their mean but not scaled, as weights of Keras's ResNet50 want it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from torch import nn

from mssar.lab.display import watching
from mssar.lab.engine.execution import execution_for
from mssar.lab.engine.runner import carry_out
from mssar.lab.recipes import FINETUNE, varied
from mssar.lab.records import Record
from mssar.lab.report.welch import margin
from mssar.lab.run import Initial, Normalisation, Run

KINDS = ("none", "mssar")
EPOCHS = (1, 2, 5, 10, 15, 20)
KERAS = Normalisation((123.68 / 255, 116.779 / 255, 103.939 / 255), (1.0, 1.0, 1.0))


@dataclass(frozen=True)
class EarlyStrides(Run):
    """ResNet-50 as it was first published, which torchvision's differs from."""

    def _built(self, num_classes: int, **begin: Any) -> nn.Module:
        made = super()._built(num_classes, **begin)
        for stage in ("layer2", "layer3", "layer4"):
            first: Any = made.get_submodule(stage)[0]  # type: ignore[index]
            first.conv1.stride, first.conv2.stride = (2, 2), (1, 1)
        own = {name for name, _ in made.named_modules() if "bn" in name.rpartition(".")[2]}
        own |= {f"layer{k}.0.downsample.1" for k in range(1, 5)}
        for name in own:
            norm: Any = made.get_submodule(name)
            norm.eps = 1e-3
        return made

    __hash__ = Run.__hash__


def run_of(network: str, kind: str, file: Path, seed: int, changes: dict[str, Any]) -> Run:
    recipe, weights = varied(FINETUNE, **changes), Initial.of(file)
    if network == "resnet50-v1":
        early = "torchvision:resnet50"
        return EarlyStrides(early, kind, {}, "imagefolder", recipe, seed, weights, KERAS)
    return Run(f"torchvision:{network}", kind, {}, "imagefolder", recipe, seed, weights)


def line(name: str, records: Sequence[Record], epochs: Sequence[int]) -> str:
    """Mean errors by epoch, and the last one's spread."""
    means = [fmean(r.epochs[epoch - 1].test_error for r in records) for epoch in epochs]
    ends = [r.error for r in records]
    spread = f" ± {stdev(ends):.2f}" if len(ends) > 1 else ""
    by_epoch = "".join(f"{mean:8.2f}" for mean in means)
    return f"{name:<22}{by_epoch}   {fmean(ends):.2f}{spread} (n={len(ends)})"


def gained(plain: Sequence[Record], ours: Sequence[Record]) -> str:
    """How many points lower the error is with MS-SAR."""
    a, b = ([r.error for r in some] for some in (plain, ours))
    gain = fmean(a) - fmean(b)
    if min(len(a), len(b)) < 2:
        return f"{gain:.2f} points lower with MS-SAR; too few runs to say more"
    half = margin(stdev(b), len(b), stdev(a), len(a))
    chance = "which may be chance" if abs(gain) <= half else "beyond chance"
    return f"{gain:.2f} ± {half:.2f} points lower with MS-SAR, {chance}"


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("networks", nargs="+", metavar="NETWORK=FILE")
    add("--data", type=Path, required=True)
    add("--seeds", type=int, default=3, help="of every network; %(default)s")
    add("--epochs", type=int, default=FINETUNE.epochs, help="%(default)s")
    add("--size", type=int, help="side of a photograph; the recipe's by default")
    add("--batch", type=int, default=FINETUNE.batch, help="%(default)s")
    add("--runs", type=Path, default=Path("runs"), help="folder for runs; %(default)s")
    add("--records", type=Path, help="a file to add their records to")
    add("--fleet", type=int, default=None, help="runs at once")
    add("--workers", type=int, default=None, help="processes that read photographs")
    add("--seconds", type=float, help="stop in time, and save")
    wanted = parser.parse_args(words)
    pairs = [word.partition("=") for word in wanted.networks]
    wanted.networks = {name: Path(file) for name, _, file in pairs}
    if not all(name and file for name, _, file in pairs):
        parser.error("networks are given as resnet50=FILE")
    return wanted


def main(words: Sequence[str] | None = None) -> int:
    wanted = parsed(words)
    changes: dict[str, Any] = {"epochs": wanted.epochs, "batch": wanted.batch}
    if wanted.size:
        changes |= {"size": wanted.size, "resize": wanted.size * 256 // 224}
    named = {
        (name, kind): [run_of(name, kind, file, seed, changes) for seed in range(wanted.seeds)]
        for name, file in wanted.networks.items()
        for kind in KINDS
    }
    # A seed of everything before the next seed.
    runs = [some[seed] for seed in range(wanted.seeds) for some in named.values()]
    outcome = carry_out(
        runs,
        execution_for(workers=wanted.workers),
        wanted.runs,
        watching=watching,
        data_dir=wanted.data,
        width=wanted.fleet,
        budget=wanted.seconds,
        record_in=dict.fromkeys(runs, wanted.records) if wanted.records else {},
    )
    for reason in outcome.failures:
        print(reason)
    epochs = [epoch for epoch in EPOCHS if epoch <= wanted.epochs]
    print(f"{'test error, %, epoch':<22}{''.join(f'{epoch:8}' for epoch in epochs)}   the last")
    for name in wanted.networks:
        made = [
            [r for r in outcome.records if r.run in [run.as_dict() for run in named[name, kind]]]
            for kind in KINDS
        ]
        for kind, some in zip(KINDS, made, strict=True):
            if some:
                print(line(f"{name} {kind}", some, epochs))
        if all(made):
            print(f"{'':22}{gained(*made)}")
    return 1 if outcome.failures or outcome.left else 0


if __name__ == "__main__":
    raise SystemExit(main())
