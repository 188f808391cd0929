"""Image files to batches, decoded ahead by workers or on the GPU.

n images, S side of the square that comes out, b bytes.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.context
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mssar.lab.data import pictures, transforms
from mssar.lab.data.imagefolder import Files, Tally
from mssar.lab.data.transforms import Augmentation, Draw, Transform, finish_all

if TYPE_CHECKING:
    from jaxtyping import Int64, UInt8

IGNORED = -100  # the label that torch's cross-entropy passes over
ENOUGH = 8  # workers that keep up with a GPU's decoder
PART = 64  # images a worker returns at once: the first batch is soon there, stopping is quick


class _Part(NamedTuple):
    """Some images of a batch, on their way from a worker."""

    squares: UInt8[Tensor, "n R R 3"]  # black where an image has none; empty where all have none
    files: UInt8[Tensor, "b"]  # noqa: F821, UP037, contents for the GPU, one after another
    lengths: list[int]  # of these; 0 for an image that is in the squares, or unreadable
    draws: list[Draw | None]  # of each
    unreadable: dict[int, str]  # by place in the part


@dataclass(frozen=True)
class _Reader(Dataset[_Part]):
    """Numbers of images to their squares, or to parts of these where a GPU does the rest.

    Reading, decoding and cutting take different time for every image, and are done by workers one
    by one. To turn, mirror and jitter squares of one size is quick on a GPU, all at once; and so,
    where it can, is decoding.
    """

    files: Files
    root: Path
    transform: Transform
    finished: bool  # or for the GPU to finish
    encoded: bool  # and to decode

    @property
    def side(self) -> int:
        chosen = self.transform
        return chosen.augmentation.size if self.finished else chosen.side

    def __getitem__(self, part: list[int]) -> _Part:
        side, transform = self.side, self.transform
        square_of = transform.whole if self.finished else transform.cut
        squares = torch.zeros(len(part), side, side, 3, dtype=torch.uint8)
        contents, draws = [b""] * len(part), list[Draw | None]([None] * len(part))
        unreadable = {}
        for place, index in enumerate(part):
            try:
                data = pictures.contents(self.root / self.files.paths[index])
                header = pictures.plain_jpeg(data) if self.encoded else None
                image = header or pictures.decode(data)
            except Exception as error:  # Pillow raises nearly anything on a broken file
                unreadable[place] = pictures.reason_of(error)
                continue
            draws[place] = drawn = transform.draw(image, index)
            if header:
                contents[place] = data
            else:
                squares[place] = square_of(image, drawn)
        if all(contents):
            squares = squares.new_zeros(0, side, side, 3)  # nothing to send
        joined = torch.from_numpy(np.frombuffer(bytearray(b"".join(contents)), np.uint8))
        return _Part(squares, joined, [len(data) for data in contents], draws, unreadable)

    def decode_on(self, device: torch.device, part: _Part) -> _Part:
        """The part with its files decoded on the device, and their squares with the others.

        All at once; if the decoder refuses that, one by one, and then with Pillow.
        """
        pieces = dict(enumerate(part.files.split(part.lengths)))
        jpegs = {place: pieces[place] for place, length in enumerate(part.lengths) if length}
        squares = torch.zeros(
            len(part.lengths), self.side, self.side, 3, dtype=torch.uint8, device=device
        )
        if len(part.squares):
            squares.copy_(part.squares)
        unreadable = dict(part.unreadable)
        try:
            together = pictures.decode_jpegs([*jpegs.values()], device)
            decoded = dict(zip(jpegs, together, strict=True))
        except RuntimeError:
            decoded = {}
            for place, file in jpegs.items():
                try:
                    decoded[place] = _alone(file, device)
                except Exception as error:
                    unreadable[place] = pictures.reason_of(error)
        for place, image in decoded.items():
            squares[place] = self.transform.cut(image.to(device), part.draws[place])
        return part._replace(squares=squares, unreadable=unreadable)


def _alone(file: Tensor, device: torch.device) -> Tensor:
    try:
        return pictures.decode_jpegs([file], device)[0]
    except RuntimeError:
        image = pictures.decode(file.numpy().tobytes())
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def _context(device: torch.device) -> multiprocessing.context.BaseContext:
    """How workers start.

    Forking is quickest, and asks nothing of the script that trains; but a process that has used
    CUDA must not be forked, and from Python 3.12 on one with threads, which torch starts, should
    not be. A fork server has neither; it imports what workers need once for all of them.
    """
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    used = device.type == "cuda" or torch.cuda.is_initialized()
    if not used and sys.version_info < (3, 12):
        return multiprocessing.get_context("fork")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", __name__, "torchvision.transforms.v2"])
    return context


def _begin(_: int) -> None:
    """In a worker: Ctrl-C is the main process's to answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def choose_decoder(decode: str, device: torch.device, workers: int) -> str:
    """Workers where there are enough of them, or else the GPU, if it can; an error if gpu cannot.

    An H200's decoder, with the host's part in it, was worth 8 to 11 workers.
    """
    if decode == "workers" or (decode == "auto" and workers >= ENOUGH):
        return "workers"
    refusal = pictures.gpu_refuses(device)
    if refusal and decode == "gpu":
        raise ValueError(f"images cannot be decoded on the GPU: {refusal}; workers can, or auto")
    return "workers" if refusal else "gpu"


def batches(
    files: Files,
    root: Path,
    orders: Sequence[Tensor],
    augmentation: Augmentation,
    *,
    train: bool,
    seed: int,
    epoch: int,
    device: torch.device,
    workers: int,
    decode: str = "auto",
    tally: Tally,
) -> Iterator[tuple[UInt8[Tensor, "n 3 S S"], Int64[Tensor, "n"]]]:  # noqa: F821, UP037
    """Images and labels of each order, a batch each, on the device and channels-last.

    What is drawn for an image depends on the seed, the epoch and its number alone. One that cannot
    be read is left out: in training the next of its batch that can be stands in for it, so that no
    norm sees a black square and the loss is a mean over images; in testing, or where none can, it
    is black, with a label that cross-entropy ignores. Closing it ends the workers.
    """
    if workers < 0:
        raise ValueError(f"workers is a number of processes, 0 or more; got {workers}")
    pictures.torchvision_module("torchvision.transforms.v2")  # say so now, not from a worker
    encoded = choose_decoder(decode, device, workers) == "gpu"
    transform = Transform(augmentation, train, seed, epoch)
    finished = not train or device.type != "cuda"
    reader = _Reader(files, root, transform, finished, encoded)
    return _batches(reader, orders, device, workers, tally)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for all epochs: there are few, and others train on theirs."""
    return torch.cuda.Stream(device)


def _batches(
    reader: _Reader, orders: Sequence[Tensor], device: torch.device, workers: int, tally: Tally
) -> Iterator[tuple[Tensor, Tensor]]:
    parts = (part for order in orders for part in order.split(PART) if len(part))
    workers = min(workers, sum(-(-len(order) // PART) for order in orders))
    on_cuda = device.type == "cuda"
    loader = iter(
        DataLoader(
            reader,
            batch_size=None,  # the reader makes its parts itself
            sampler=(part.tolist() for part in parts),
            num_workers=workers,
            collate_fn=_as_is,
            pin_memory=on_cuda and not reader.encoded,
            multiprocessing_context=_context(device) if workers else None,
            worker_init_fn=_begin,
            prefetch_factor=4 if workers else None,
            generator=torch.Generator(),  # the global one stays as it is
        )
    )
    # A stream of its own: copies and transforms run beside training. torchvision's decoder writes
    # into new memory from yet another stream, without waiting for who used that memory before; in
    # this one's pool that is only we ourselves.
    stream = _stream(device) if on_cuda else None
    try:
        for order in orders:
            with torch.cuda.stream(stream) if stream else nullcontext():
                images, labels = _batch(reader, order.cpu(), loader, device, stream, tally)
            if stream:
                torch.cuda.current_stream(device).wait_stream(stream)
                for made in (images, labels):
                    made.record_stream(torch.cuda.current_stream(device))
            yield images.permute(0, 3, 1, 2), labels
        tally.judge()
    finally:
        if workers:
            loader._shutdown_workers()  # type: ignore[attr-defined]  # now, not when collected


def _batch(
    reader: _Reader,
    order: Tensor,
    loader: Iterator[_Part],
    device: torch.device,
    stream: torch.cuda.Stream | None,
    tally: Tally,
) -> tuple[UInt8[Tensor, "n S S 3"], Int64[Tensor, "n"]]:  # noqa: F821, UP037
    size = reader.transform.augmentation.size
    images = torch.zeros(len(order), size, size, 3, dtype=torch.uint8, device=device)
    labels = reader.files.labels[order]
    lacking = set[int]()
    for start in range(0, len(order), PART):
        numbers = order[start : start + PART].tolist()
        part = _next(loader)
        if reader.encoded:
            if stream:
                stream.synchronize()
            part = reader.decode_on(device, part)
        squares = part.squares.to(device, non_blocking=True)
        if not reader.finished:
            draws = torch.tensor([transforms.packed(drawn) for drawn in part.draws]).pin_memory()
            squares = finish_all(squares, draws.to(device, non_blocking=True), size)
        images[start : start + PART].copy_(squares, non_blocking=True)
        lacking |= {start + place for place in part.unreadable}
        paths = (reader.root / reader.files.paths[numbers[place]] for place in part.unreadable)
        tally.add(len(numbers), zip(paths, part.unreadable.values(), strict=True))
    there = [place for place in range(len(order)) if place not in lacking]
    for place in sorted(lacking):
        if reader.transform.train and there:
            other = next((later for later in there if later > place), there[0])
            images[place].copy_(images[other])
            labels[place] = labels[other]
        else:
            labels[place] = IGNORED
    return images, (labels.pin_memory() if stream else labels).to(device, non_blocking=True)


def _next(loader: Iterator[_Part]) -> _Part:
    try:
        return next(loader)
    except (RuntimeError, ConnectionError, EOFError) as error:  # torch's, or before it noticed
        if isinstance(error, RuntimeError) and not str(error).startswith("DataLoader worker (pid"):
            raise
        raise RuntimeError(
            "a process that reads images died, perhaps for want of memory, of which /dev/shm is a "
            f"part; fewer workers need less ({error})"
        ) from error


def _as_is(part: Any) -> Any:
    return part
