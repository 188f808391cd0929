"""What a run needs to go on: one safetensors file an epoch, whole or not there at all."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import safetensors
import torch
from filelock import FileLock, Timeout
from msgspec import Meta
from torch import Tensor

from mssar.durable import PART, make_folder, write_whole
from mssar.lab import lines, values
from mssar.lab.engine.execution import THREADS
from mssar.lab.records import Epoch
from mssar.lab.values import Natural
from mssar.networks import signature, weights

SCHEMA = 1
KEPT = 2
_TROUBLE = (
    *(OSError, KeyError, TypeError, ValueError, RecursionError, RuntimeError),
    safetensors.SafetensorError,
)
_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
Maker: TypeAlias = dict[str, str | int | bool]  # older ones: hardware and source alone
_Threads = Annotated[int, Meta(ge=0, le=THREADS)]
_NAME = re.compile(r"epoch-(\d{4,})(?:-step-(\d{5,}))?\.safetensors")


@dataclass
class Progress:
    """How far a run is. ``step`` counts within the epoch after the ``epoch`` finished ones."""

    run: dict[str, Any]
    data: str  # checksum
    precision: str
    id: str
    started: str
    epoch: Natural = 0
    step: Natural = 0
    seconds: float = 0.0  # of the unfinished epoch so far
    interruptions: Natural = 0
    history: list[dict[str, Any]] = field(default_factory=list)
    class_errors: list[float] = field(default_factory=list)
    makers: list[Maker] = field(default_factory=list)  # what computed it, in turn
    threads: _Threads = 0  # of a CPU, from its beginning to its end; 0: not known
    bn_over: list[int] = field(default_factory=list)  # images of a step that BN is over, in turn
    turns: Natural = 0  # since its beginning
    beside: Natural = 0  # the runs on the device, itself among them, summed over its turns
    schema: int = SCHEMA


def write(directory: Path, progress: Progress, state: Brought) -> Path:
    """Write a checkpoint of what was brought before, then let go of all but the last two."""
    step = f"-step-{progress.step:05}" if progress.step else ""
    path = directory / f"epoch-{progress.epoch:04}{step}.safetensors"
    write_whole(path, state.file({"mssar": json.dumps(asdict(progress))}, signed=True))
    for old in checkpoints(directory)[:-KEPT]:
        if old != path:  # later ones may lie there that cannot be read
            old.unlink(missing_ok=True)
    return path


class Brought:
    """Tensors on the CPU, one transfer a type: on a busy GPU each waits for its turn.

    They stay together in the file too. To write hundreds of small tensors one by one took most of
    the time that saving took, and at the end of an epoch a whole fleet waits for it.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._whole: list[tuple[dict[str, torch.Size], Tensor]] = []
        types = {t.dtype for t in tensors.values()}
        for dtype in sorted(types, key=lambda d: (-d.itemsize, str(d))):  # aligned in the file
            same = {name: t.detach() for name, t in tensors.items() if t.dtype == dtype}
            whole = torch.cat([t.reshape(-1) for t in same.values()]).cpu()
            self._whole.append(({name: t.shape for name, t in same.items()}, whole))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """By name; views of what is kept together."""
        for shapes, whole in self._whole:
            parts = whole.split([shape.numel() for shape in shapes.values()])
            for (name, shape), part in zip(shapes.items(), parts, strict=True):
                yield name, part.view(shape)

    def spoilt(self) -> str | None:
        """The first that has a number that is not finite."""
        if all(whole.isfinite().all() for _, whole in self._whole):
            return None
        return next(name for name, tensor in self.tensors() if not tensor.isfinite().all())

    def file(self, notes: Mapping[str, str], *, signed: bool = False) -> bytes:
        """All of it as a safetensors file: the header's length, a JSON header, the numbers.

        ``signed``: with their SHA-256; see :mod:`mssar.networks.signature`.
        """
        numbers = [whole.view(torch.uint8).numpy() for _, whole in self._whole]
        carried = signature.notes(some.data for some in numbers) if signed else {}
        header: dict[str, Any] = {"__metadata__": carried | dict(notes)}
        end = 0
        for shapes, whole in self._whole:
            for name, shape in shapes.items():
                begin, end = end, end + shape.numel() * whole.itemsize
                kind = {"dtype": _TYPES[whole.dtype], "shape": list(shape)}
                header[name] = {**kind, "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        if signed:
            text = signature.sign(text)
        return b"".join((len(text).to_bytes(8, "little"), text, *(some.data for some in numbers)))


def discard(directory: Path, *others: str) -> None:
    """Throw away a run's checkpoints, and what else of it has such a name."""
    for path in (*checkpoints(directory), *(p for name in others for p in directory.glob(name))):
        path.unlink(missing_ok=True)


def abandon(directory: Path) -> None:
    """Remove a folder that nothing was written to but the lock, unless another process has it."""
    with suppress(OSError, Timeout):
        with FileLock(directory / ".lock", blocking=False):
            (directory / ".lock").unlink()
        directory.rmdir()  # fails where there is more


def is_name(name: str) -> bool:
    """Whether a file of this name would be a checkpoint."""
    return _NAME.fullmatch(name) is not None


def checkpoints(directory: Path) -> list[Path]:
    """A run's checkpoints, the newest last."""
    found = [(_NAME.fullmatch(path.name), path) for path in directory.glob("epoch-*.safetensors")]
    ordered = sorted((int(m[1]), int(m[2] or 0), path) for m, path in found if m)
    return [path for _, _, path in ordered]


def epochs(directory: Path) -> int:
    """Those that the newest is after, by its name alone."""
    found = [_NAME.fullmatch(path.name) for path in checkpoints(directory)]
    return int(found[-1][1]) if found and found[-1] else 0


def newest(
    directory: Path, warn: Callable[[str], None]
) -> tuple[Progress, dict[str, Tensor]] | None:
    """The last checkpoint that can be read; None where there is none at all."""
    paths = checkpoints(directory)
    for path in reversed(paths):
        try:
            return load(path)
        except ValueError as error:
            if path != paths[0]:
                warn(f"{error}; going back to the checkpoint before it")
    if paths:
        # Not --restart: other runs of the command may be finished.
        raise ValueError(f"no checkpoint in {directory} can be read; remove it to begin anew")
    return None


def load(path: Path) -> tuple[Progress, dict[str, Tensor]]:
    """A checkpoint's progress and tensors. Nothing in it is ever executed."""
    with _opened(path, numbers=True) as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        weights.require_finite(found, "spoilt")
        return _progress(file), found


def progress(path: Path) -> Progress:
    """How far a checkpoint's run is; its tensors stay where they are."""
    with _opened(path, numbers=False) as file:
        return _progress(file)


@contextmanager
def _opened(path: Path, *, numbers: bool) -> Iterator[Any]:
    lines.require_regular(path)
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            signature.require_good(path, numbers=numbers)
            yield file
    except _TROUBLE as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} is no readable checkpoint ({reason:.200})") from error


def _progress(file: Any) -> Progress:
    found = json.loads((file.metadata() or {})["mssar"])
    if found["schema"] != SCHEMA:
        raise ValueError(f"its schema is {found['schema']!r:.60}, and {SCHEMA} is read here")
    values.check_numbers(found)
    made = values.fitted(Progress, found)
    for number, epoch in enumerate(made.history):
        values.fitted(Epoch, epoch, f"history[{number}].")
    return made


def put(found: dict[str, Tensor], into: dict[str, Tensor], directory: Path) -> None:
    """A checkpoint's tensors into those of a run, if they are of the same names and shapes."""
    # Older checkpoints do not say what a layer's weights are for; their run does.
    into = {n: t for n, t in into.items() if n in found or not n.endswith(".coordinates")}
    for name in found.keys() ^ into.keys():
        raise ValueError(f"{directory}: {name} is in only one of checkpoint and network")
    with torch.no_grad():
        for name, tensor in into.items():
            if tensor.shape != found[name].shape:
                shapes = f"{tuple(found[name].shape)}, here {tuple(tensor.shape)}"
                raise ValueError(f"{directory}: {name} is {shapes}")
            tensor.copy_(found[name])


def require_same(there: dict[str, object], here: dict[str, object], directory: Path) -> None:
    """A ValueError says where the run of a folder is another."""
    for path, a, b in _differences(there, here):
        raise ValueError(
            f"{directory} holds another run: {path:.80} is {a!r:.80} there and {b!r:.80} here; "
            "another --runs keeps both"
        )


def _differences(a: object, b: object, path: str = "") -> Iterator[tuple[str, object, object]]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in [*a, *(b.keys() - a.keys())]:
            yield from _differences(a.get(key), b.get(key), f"{path}.{key}".lstrip("."))
    elif a != b:
        yield path, a, b


class InUseError(ValueError):
    """Another process has a run's folder."""


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """A run's folder for this process alone. The lock ends with the process, however it ends."""
    make_folder(directory)
    try:
        with FileLock(directory / ".lock", blocking=False):
            for part in directory.glob(f".*{PART}"):  # of a process that was killed
                part.unlink()
            yield
    except Timeout:
        raise InUseError(f"{directory} is in use by another process; wait, or stop it") from None
