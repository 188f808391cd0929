"""A network as a file that needs nothing of ours: ONNX, or a program of torch.export.

A copy is taken to the CPU, its norms are folded, and its equations are traced as plain PyTorch: no
kernel ends up in a file. What was written is run, at several sizes, before it gets its name.
"""

from __future__ import annotations

import copy
import inspect
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mssar import onnx
from mssar.durable import whole
from mssar.folding import fold
from mssar.indices import share
from mssar.layer import MSSAR
from mssar.onnx import AXES, reason

SUFFIXES = {"onnx": ".onnx", "torch": ".pt2"}
LARGEST = 2**31 - 2**20  # bytes that an ONNX file may have

Say: TypeAlias = Callable[[str], None]
Program: TypeAlias = Any  # torch.export.ExportedProgram
Ranges: TypeAlias = dict[str, tuple[int, int | None]]  # by axis: the least, the most


@dataclass(frozen=True)
class Exported:
    """A file that was written, and what is known of it."""

    path: Path
    format: str
    bytes: int
    opset: int | None  # of ONNX
    folded: int  # norms that are part of a convolution now
    open: Ranges  # axes that may vary
    fixed: str | None  # why the others may not
    difference: float  # the largest from PyTorch's output, over the largest of that
    tried: tuple[tuple[int, ...], ...]  # the shapes where this was seen

    def __str__(self) -> str:
        kind = f"ONNX, opset {self.opset}" if self.opset else "torch.export"
        ranges = [
            f"{axis} from {low}" + ("" if high is None else f" to {high}")
            for axis, (low, high) in self.open.items()
        ]
        shapes = ", ".join("×".join(map(str, shape)) for shape in self.tried)
        said = [
            f"{self.path}: {kind}, {_size(self.bytes)}, {self.folded} norms folded",
            f"open: {', '.join(ranges) or 'nothing'}",
            f"agrees with PyTorch to {self.difference:.1e} of the largest output, at {shapes}",
        ]
        if self.fixed:
            said.insert(2, f"fixed: {self.fixed}")
        return "\n".join(said)


def export(
    model: nn.Module,
    path: str | os.PathLike[str],
    size: tuple[int, int, int] = (3, 224, 224),
    format: str | None = None,  # noqa: A002, that is its name
    *,
    metadata: Mapping[str, Any] | None = None,
    say: Say = lambda line: None,  # noqa: ARG005
) -> Exported:
    """Write a network to a file, and return what is known of it. The network is left as it is.

    Args:
        model: any module that takes images; MS-SAR layers in it are written as plain operations.
        path: the file. It is there when it has been checked, or not at all.
        size: C, H, W of the images it was made for. Batch, height and width stay open where the
            network takes others.
        format: "onnx" or "torch"; by default as the path ends, in .onnx or .pt2.
        metadata: travels along: in ONNX under ``mssar.NAME``, text as it is and all else as JSON,
            in a .pt2 as JSON in the extra file ``mssar.json``. ``open`` says which sizes it takes.
        say: is told what is being done; a large network takes a minute.
    """
    path = Path(path)
    kind = _format(path, format)
    _require(model, path, size, kind, metadata)
    plain = _copied(model)
    dtype = next((p.dtype for p in plain.parameters() if p.is_floating_point()), torch.float32)
    axes, fixed = _axes(plain, size, dtype)
    first = _images((2 if "batch" in axes else 1, *size), dtype)
    folded, norms = _folded(plain, first)
    say(f"{norms} norms folded; tracing")
    program, ranges, refused = _traced(folded, first, axes)
    shapes = _shapes(size, ranges)
    described = {**(metadata or {}), "open": ranges}
    with whole(path) as part:
        with _quiet():
            if kind == "onnx":
                say("translating it to ONNX")
                opset, run = onnx.write(program, part, described), onnx.running(part, dtype)
            else:
                _write_program(program, part, described)
                opset, run = None, torch.export.load(BytesIO(part.read_bytes())).module()
        say(f"running it at {len(shapes)} shapes")
        worst = max(_difference(run, plain, _images(shape, dtype)) for shape in shapes)
        _require_agreement(worst, dtype, path)
        written = part.stat().st_size
    return Exported(
        path, kind, written, opset, norms, ranges, fixed or refused, worst, tuple(shapes)
    )


def _format(path: Path, asked: str | None) -> str:
    by_suffix = {suffix: kind for kind, suffix in SUFFIXES.items()}
    found = asked or by_suffix.get(path.suffix)
    if found not in SUFFIXES:
        got = f"format {asked!r}" if asked else f"a file {path.name!r}"
        raise ValueError(f"format is onnx (.onnx) or torch (.pt2); got {got}")
    if path.suffix != SUFFIXES[found]:
        raise ValueError(f"a file of format {found} ends in {SUFFIXES[found]}; got {path.name}")
    return found


def _require(
    model: nn.Module, path: Path, size: tuple[int, int, int], kind: str, metadata: object
) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"export takes a module; got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(
            f"a {type(model).__name__} is a traced network; export the one it was traced from"
        )
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise ValueError("export needs a network with numbers; this one is on 'meta'")
    whole = isinstance(size, tuple | list) and all(isinstance(n, int) and n > 0 for n in size)
    if not whole or len(size) != 3:
        raise ValueError(f"size is C, H, W of one image, such as (3, 32, 32); got {size!r}")
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent} to write {path.name} into")
    if path.is_dir():
        raise ValueError(f"{path} is a folder")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"the folder {path.parent} may not be written")
    if metadata is not None and not isinstance(metadata, Mapping):
        raise ValueError(f"metadata is a mapping from names; got {type(metadata).__name__}")
    if metadata and "open" in metadata:
        raise ValueError("metadata: 'open' is taken by the sizes that the file takes")
    try:
        json.dumps(dict(metadata or {}))
    except (TypeError, ValueError) as error:
        raise ValueError(f"metadata is written as JSON: {error}") from None
    if kind != "onnx":
        return
    onnx.require()
    held = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    if held > LARGEST:
        raise ValueError(f"an ONNX file holds 2 GB, the network has {_size(held)}: format='torch'")


def _copied(model: nn.Module) -> nn.Module:
    """On the CPU, in ``eval`` mode and of plain operations; compiled ones as they were before."""
    try:
        found: nn.Module = copy.deepcopy(getattr(model, "_orig_mod", model))
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"{type(model).__name__} cannot be copied, and is to be left as it is: {reason(error)}"
        ) from error
    found = found.cpu().eval().requires_grad_(False)
    for layer in found.modules():
        if isinstance(layer, MSSAR):
            layer.backend = "reference"
    return found


def _axes(model: nn.Module, size: tuple[int, int, int], dtype: torch.dtype) -> tuple[Any, Any]:
    """Those of which the network takes other lengths, and why it does not take the rest."""
    channels, height, width = size
    try:
        _run(model, _images((1, *size), dtype))
    except Exception as error:  # whatever a stranger's network raises
        shape = "×".join(map(str, size))
        raise ValueError(
            f"the network does not take an image of {shape}: {reason(error)}"
        ) from None
    found, why = [], []
    try:
        _run(model, _images((3, *size), dtype))
        found.append("batch")
    except Exception as error:
        why.append(f"batch is 1: a batch of 3 fails: {reason(error)}")
    try:
        for h, w in _others(height, width):
            _run(model, _images((1, channels, h, w), dtype))
        found += ["height", "width"]
    except Exception as error:
        why.append(f"images are {height}×{width}: at {h}×{w} the network fails: {reason(error)}")
    return tuple(found), "; ".join(why) or None


def _others(height: int, width: int) -> list[tuple[int, int]]:
    """Ragged sizes: no stage divides them evenly."""
    return [(height + 5, width - width // 8 - (width > 1)), (height + height // 4 + 1, width + 3)]


def _images(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@torch.no_grad()
def _run(model: nn.Module, x: Tensor) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(model(x)) if isinstance(leaf, Tensor)]


def _folded(model: nn.Module, x: Tensor) -> tuple[nn.Module, int]:
    """A copy with its norms folded, if it then computes the same; else as it is."""
    made = copy.deepcopy(model)
    count = fold(made, x)
    try:
        agree = _difference(made, model, x) <= _tolerance(x.dtype)
    except Exception:  # a network that looks into its own norms
        agree = False
    return (made, count) if agree else (model, 0)


def _traced(
    model: nn.Module, x: Tensor, axes: tuple[str, ...]
) -> tuple[Program, Ranges, str | None]:
    """The program, with the axes that could be left open, and why the others could not."""
    tries = [axes, tuple(a for a in axes if a == "batch"), ()]
    size = x.shape[1], x.shape[2], x.shape[3]
    first, *_ = inspect.signature(model.forward).parameters.values()
    several = first.kind is first.VAR_POSITIONAL  # of what wraps a network, as averages of weights
    refusal: Exception | None = None
    for names in dict.fromkeys(tries):
        dims = {n: torch.export.Dim.DYNAMIC for n, axis in AXES.items() if axis in names}
        try:
            with _quiet(), torch.no_grad():
                shapes: Any = ((dims,),) if several else (dims,)
                program = torch.export.export(model, (x,), dynamic_shapes=shapes, strict=False)
                ranges = _taken(program, size, _ranges(program, names), x.dtype)
        except Exception as error:
            refusal = error
            continue
        _require_plain(program)
        share(program.graph_module)
        said = None
        if refusal:
            lost = ", ".join(axis for axis in axes if axis not in names)
            said = f"{lost}: torch.export specialises: {reason(refusal)}"
        return program, ranges, said
    assert refusal
    raise ValueError(f"torch.export cannot trace it: {reason(refusal)}") from refusal


def _taken(
    program: Program, size: tuple[int, int, int], ranges: Ranges, dtype: torch.dtype
) -> Ranges:
    """The sizes that it does take: it may guard against smaller ones than it says, and more."""
    run = program.module()

    def takes(height: int, width: int) -> bool:
        try:
            run(_images((_within(2, ranges.get("batch", (1, 1))), size[0], height, width), dtype))
        except Exception:  # a guard's, or what a network makes of so small an image
            return False
        return True

    found = dict(ranges)
    if "height" in ranges:
        _, height, width = size
        found["height"] = _from_least(lambda length: takes(length, width), ranges["height"], height)
        found["width"] = _from_least(lambda length: takes(height, length), ranges["width"], width)
    for shape in _shapes(size, found):
        run(_images(shape, dtype))
    return found


def _from_least(
    takes: Callable[[int], bool], limits: tuple[int, int | None], length: int
) -> tuple[int, int | None]:
    """Limits that begin with the least length that is taken, as all above it are."""
    low, high = limits
    if takes(low):
        return limits
    refused = low
    while length - refused > 1:
        middle = (refused + length) // 2
        refused, length = (refused, middle) if takes(middle) else (middle, length)
    return length, high


def _require_plain(program: Program) -> None:
    ours = [str(n.target) for n in program.graph.nodes if str(n.target).startswith("mssar")]
    assert not ours, ours


def _ranges(program: Program, axes: tuple[str, ...]) -> Ranges:
    placed = next(
        n for n in program.graph.nodes if n.name == program.graph_signature.user_inputs[0]
    )
    lengths, found = placed.meta["val"].shape, {}
    for number, axis in AXES.items():
        if axis in axes:
            range_ = program.range_constraints[lengths[number].node.expr]
            low, high = range_.lower, range_.upper
            # Traced with 2: 1 is never what begins a range, and is run below.
            least = 1 if axis == "batch" else int(low)
            found[axis] = (least, int(high) if high.is_finite and high < 2**31 else None)
    return found


def _shapes(size: tuple[int, int, int], ranges: Ranges) -> list[tuple[int, int, int, int]]:
    """Batches and sizes to try it at: its own, ragged ones, and the least it takes."""
    channels, height, width = size
    sizes = [(height, width)]
    if "height" in ranges:
        low = (ranges["height"][0], ranges["width"][0])
        sizes += [*_others(height, width), low]
    wanted = [(1, *sizes[0]), (3, *sizes[0]), *((2, *other) for other in sizes[1:])]
    tried = [
        (
            _within(batch, ranges.get("batch", (1, 1))),
            channels,
            _within(h, ranges.get("height", (h, h))),
            _within(w, ranges.get("width", (w, w))),
        )
        for batch, h, w in wanted
    ]
    return list(dict.fromkeys(tried))


def _within(length: int, limits: tuple[int, int | None]) -> int:
    low, high = limits
    return max(low, length if high is None else min(length, high))


def _write_program(program: Program, path: Path, metadata: Mapping[str, Any]) -> None:
    # By way of memory: torch's own writer calls a full disk an error of the program.
    written = BytesIO()
    torch.export.save(program, written, extra_files={"mssar.json": json.dumps(metadata)})
    path.write_bytes(written.getbuffer())


def _difference(run: Callable[[Tensor], Any], model: nn.Module, x: Tensor) -> float:
    """The largest between two outputs, over the largest number in the second's."""
    with torch.no_grad():
        ours = [leaf for leaf in tree_leaves(run(x)) if isinstance(leaf, Tensor)]
    right = _run(model, x)
    if [y.shape for y in ours] != [y.shape for y in right]:
        return float("inf")
    pairs = [(a.double(), b.double()) for a, b in zip(ours, right, strict=True) if b.numel()]
    differences = [float((a - b).abs().max() / b.abs().max().clamp(min=1e-6)) for a, b in pairs]
    return max((d if d == d else float("inf") for d in differences), default=0.0)  # NaN is wrong


def _tolerance(dtype: torch.dtype) -> float:
    """Of the largest output: libraries add up in orders of their own."""
    return {torch.float64: 1e-6, torch.float32: 1e-4}.get(dtype, 1e-2)


def _require_agreement(worst: float, dtype: torch.dtype, path: Path) -> None:
    allowed = _tolerance(dtype)
    if worst > allowed:
        raise ValueError(
            f"what was exported differs from PyTorch's output by {worst:.1e} of it, and "
            f"{allowed:.0e} is allowed; {path.name} was not written"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporters' warnings about themselves, and their solver's tracebacks."""
    solver = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    level = solver.level
    solver.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        solver.setLevel(level)


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"
