"""Where a result comes from: code, versions, hardware, command."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch

import mssar
from mssar.lab.engine.checkpoint import Maker
from mssar.lab.engine.execution import Execution


@cache
def code() -> dict[str, Any]:
    """The package's version and a hash of its source; in a clone also the commit, and whether
    files differ from it."""
    package = Path(mssar.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package).as_posix()}\0".encode() + path.read_bytes())
    found: dict[str, Any] = {
        "version": mssar.__version__,
        "source": f"sha256:{digest.hexdigest()}",
        "commit": None,
        "changed": None,
    }
    # A package that merely lies somewhere below a repository is not that repository's.
    if _git(package, "ls-files", "--error-unmatch", "__init__.py"):
        found["commit"] = _git(package, "rev-parse", "HEAD")
        found["changed"] = bool(_git(package, "status", "--porcelain", "--", "."))
    return found


def maker(execution: Execution, processes: int, stacked: int) -> Maker:
    """What may round otherwise, in short: a resumed run may have had several."""
    return {
        "hardware": hardware(execution.device),
        "source": code()["source"],
        "torch": str(torch.__version__),
        "compile": execution.compile,
        "deterministic": execution.deterministic,
        "processes": processes,
        "stacked": stacked,
    }


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *words], cwd=folder, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def environment(device: torch.device) -> dict[str, Any]:
    """What computed it."""
    found: dict[str, Any] = {
        "hardware": hardware(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        found |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return found


def hardware(device: torch.device) -> str:
    """The device's name, as its maker gives it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()}, {os.cpu_count()} cores"


@cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        named = next(line for line in lines if line.startswith("model name"))
        return named.split(":", 1)[1].strip()
    except (OSError, StopIteration):
        return platform.processor() or platform.machine() or "unknown processor"


def command() -> str:
    """The command line that is running, ready to be repeated."""
    return shlex.join(["mssar", *sys.argv[1:]])
