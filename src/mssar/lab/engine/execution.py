"""How a run is carried out: what may differ between two runs of the same thing."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import mssar
from mssar.lab.engine.world import launched

THREADS = 512  # at most: each is one of the system's
PROGRAMS = 256  # that one network class may be compiled into: depths, options, classes, batches
PRECISIONS = ("bf16", "tf32", "fp32")


@dataclass(frozen=True)
class Execution:
    """Where and how to compute."""

    device: torch.device
    precision: str = "fp32"  # bf16 (autocast), tf32 or fp32
    compile: bool = False  # torch.compile the network
    graph: bool = True  # on CUDA: the whole step as one CUDA graph
    deterministic: bool = False
    sync_bn: bool = True  # with several processes: BN over the global batch
    workers: int = 0  # processes that decode photographs
    decode: str = "auto"  # where: auto, workers or gpu
    unreadable: float = 0.01  # share of photographs that may be left out
    threads: int = 0  # of a CPU, for a run that begins; 0: as many as suit it
    compiled: frozenset[str] = frozenset()  # names of runs: these are compiled in any case

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            known = ", ".join(PRECISIONS)
            raise ValueError(f"precision is one of {known}; got {self.precision!r}")
        if self.decode not in ("auto", "workers", "gpu"):
            raise ValueError(f"--decode is auto, workers or gpu; got {self.decode!r}")
        if not 0 <= self.unreadable <= 1:
            raise ValueError(f"unreadable is a share, 0 to 1; got {self.unreadable}")
        if not 0 <= self.threads <= THREADS:
            raise ValueError(f"threads is 1 to {THREADS}, or 0; got {self.threads}")
        if self.precision == "tf32" and self.device.type != "cuda":
            raise ValueError("precision tf32 needs a CUDA device; a CPU has bf16 and fp32")

    def of(self, name: str) -> Execution:
        """That of one run."""
        compiles = self.compile or name in self.compiled
        return replace(self, compile=compiles, compiled=frozenset())

    @property
    def graphed(self) -> bool:
        return self.graph and self.device.type == "cuda"

    def autocast(self) -> AbstractContextManager[Any]:
        if self.precision != "bf16":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def as_dict(self) -> dict[str, Any]:
        found = {**asdict(self), "device": self.device.type, "graph": self.graphed}
        del found["threads"]  # how many there were is known of the run, and in its environment
        del found["compiled"]
        return found


def choose_device(wanted: str = "auto") -> torch.device:
    """The device asked for, if it is there; "auto": the GPU if there is one."""
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise ValueError(f"device is auto, cpu, cuda or cuda:N; got {wanted!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is auto, cpu, cuda or cuda:N; got {wanted!r}")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"no CUDA device is there, and {wanted!r} was asked for; try cpu")
        if device.index is not None and device.index >= torch.cuda.device_count():
            raise ValueError(f"there are {torch.cuda.device_count()} CUDA devices; got {wanted!r}")
        return torch.device("cuda", device.index or 0)
    return device


def execution_for(
    device: str = "auto",
    precision: str | None = None,
    workers: int | None = None,
    threads: int | None = None,
    **rest: Any,
) -> Execution:
    """How to compute, from what was asked for: what was not is chosen for this machine.

    Whether compiling pays depends on the runs (``compiling``): here it is off if not asked for.
    """
    if launched() and torch.cuda.is_available():
        if device.startswith("cuda:"):
            raise ValueError(f"each process takes a GPU of its own: --device cuda, not {device}")
        if device in ("auto", "cuda"):
            device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    where = choose_device(device)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    precision = precision or ("bf16" if where.type == "cuda" else "fp32")
    workers = (os.cpu_count() or 1) if workers is None else workers
    rest["compile"] = bool(rest.get("compile"))
    return Execution(where, precision, workers=workers, threads=threads or 0, **rest)


@contextmanager
def settings(execution: Execution) -> Iterator[None]:
    """PyTorch's global switches while runs are carried out, and as they were afterwards."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = (cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark, cudnn.deterministic)
    strict = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    reduced = execution.precision != "fp32"
    cudnn.allow_tf32 = matmul.allow_tf32 = reduced
    cudnn.deterministic = execution.deterministic
    cudnn.benchmark = not execution.deterministic  # shapes stay the same: worth a search
    if execution.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if execution.deterministic != strict or warn_only:  # it imports the compiler, which takes time
        torch.use_deterministic_algorithms(execution.deterministic)
    try:
        with _compiling() if execution.compile or execution.compiled else nullcontext():
            yield
    finally:
        cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark, cudnn.deterministic = before
        if torch.are_deterministic_algorithms_enabled() != strict or warn_only:
            torch.use_deterministic_algorithms(strict, warn_only=warn_only)


@contextmanager
def _compiling() -> Iterator[None]:
    """Runs of one network share what was compiled for the first. But networks of one class share
    a limit too, eight programs by default, beyond which all of them would run uncompiled."""
    from torch._dynamo import config

    names = ("recompile_limit", "cache_size_limit")  # before torch 2.7 the latter
    name = next(name for name in names if hasattr(config, name))
    every = "accumulated_" + name
    changes = {n: max(getattr(config, n), PROGRAMS) for n in (name, every)}
    with config.patch(**changes):
        yield


def keep_compiled(place: Path) -> None:
    """Have compiled kernels kept beneath a folder, where nobody said otherwise: whoever takes
    the data along to another machine takes them along too."""
    caches = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    for variable, name in caches.items():
        folder = place / "compiled" / mssar.__version__ / name
        with suppress(OSError):  # a folder that may not be written: they are kept elsewhere
            if _unnamed(os.environ.get(variable)):
                folder.mkdir(parents=True, exist_ok=True)
                os.environ[variable] = str(folder)


def _unnamed(place: str | None) -> bool:
    """Whether nobody chose it. A network that is built on "meta" has torch import its compiler,
    which puts its own default into the variable."""
    temporary = Path(tempfile.gettempdir())
    return place is None or (
        Path(place).parent == temporary and Path(place).name.startswith("torchinductor_")
    )
