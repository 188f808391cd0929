"""What inserted layers cost where a network is deployed: in onnxruntime, and as a program of
torch.export.

    python benchmarks/deploy.py --threads 1
    python benchmarks/deploy.py torchvision:resnet50 resnet20 --format onnx

Every network is exported without recalibration, with SE (our layer with scale 1) and with MS-SAR,
for images of any size. The three files take turns on one image; a row has the median without, and
how much longer the others take.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
from reporting import heading, percent
from torch import Tensor

import mssar
from mssar.export import SUFFIXES
from mssar.surgery.foreign import architecture, bare

NETWORKS = (
    *("torchvision:mobilenet_v2", "torchvision:efficientnet_b0", "torchvision:resnet18"),
    *("torchvision:resnet50", "torchvision:densenet121"),
)
SCALES = {"none": (), "se": (1,), "mssar": (1, 2, 4)}
WARM_UP = 5  # turns


def exported(net: str, scales: Sequence[int], format: str, folder: Path) -> Path:  # noqa: A002
    model = bare(net).eval()
    if scales:
        mssar.insert(model, scales)
    path = folder / f"{len(scales)}{SUFFIXES[format]}"
    return mssar.export(model, path, architecture(net).size).path


def running(path: Path, threads: int) -> Callable[[Tensor], object]:
    """A file as a function of an image."""
    if path.suffix == SUFFIXES["torch"]:
        made: Callable[[Tensor], object] = torch.export.load(path).module()
        return made
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # it has company
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda x: session.run(None, {"images": x.numpy()})


@torch.no_grad()
def in_turns(files: Sequence[Callable[[Tensor], object]], x: Tensor, turns: int) -> list[float]:
    """Median milliseconds of each."""
    taken: list[list[float]] = [[] for _ in files]
    for turn in range(WARM_UP + turns):
        for times, run in zip(taken, files, strict=True):
            begun = time.perf_counter()
            run(x)
            if turn >= WARM_UP:
                times.append(1e3 * (time.perf_counter() - begun))
    return [median(times) for times in taken]


def row(net: str, format: str, threads: int, turns: int) -> tuple[float, float, float]:  # noqa: A002
    """Milliseconds without, and by what share SE and MS-SAR take longer."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [exported(net, scales, format, Path(folder)) for scales in SCALES.values()]
        files = [running(path, threads) for path in paths]
        none, se, ours = in_turns(files, torch.randn(1, *architecture(net).size), turns)
    return none, se / none - 1, ours / none - 1


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("networks", nargs="*", default=NETWORKS, help="as `mssar train` names them")
    parser.add_argument("--format", choices=SUFFIXES, action="append", help="default: both")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=30)
    told = parser.parse_args(arguments)
    torch.set_num_threads(told.threads)
    what = f"one image, threads: {told.threads}, batch norms folded"
    print(heading(what, torch.device("cpu")))
    print("network                        file   none, ms        SE    MS-SAR")
    for net in told.networks:
        for kind in told.format or SUFFIXES:
            none, se, ours = row(net, kind, told.threads, told.turns)
            shares = f"{percent(se):>9} {percent(ours):>9}"
            print(f"{net:<30} {SUFFIXES[kind]:<6} {none:>8.1f} {shares}", flush=True)


if __name__ == "__main__":
    main()
