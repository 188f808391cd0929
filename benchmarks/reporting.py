"""What the benchmarks say, and the lines that they write."""

from __future__ import annotations

import json
import traceback
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from mssar.lab.engine import provenance


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:+.1f} %"


def verdict(share: float | None, goal: float) -> str:
    if share is None:
        return f"unknown without a base  goal {100 * goal:+.0f} %"
    return f"{percent(share)}  goal {100 * goal:+.0f} %: {'met' if share <= goal else 'missed'}"


def told(what: str, why: Exception) -> None:
    """Say that something failed, where the rest goes on."""
    traceback.print_exception(why, limit=-3)
    said = (str(why).strip() or "no reason given").splitlines()[0]
    print(f"{what} failed: {type(why).__name__}: {said}", flush=True)


def versions() -> dict[str, str]:
    found = {"torch": str(torch.__version__)}
    for name in ("triton", "timm"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def heading(what: str, device: torch.device) -> str:
    """What was measured, where, and with what."""
    with_ = ", ".join(f"{name} {number}" for name, number in versions().items())
    return f"{what}, {provenance.hardware(device)}, {with_}"


def append(path: Path | None, device: torch.device, records: Sequence[dict[str, Any]]) -> None:
    """A line a record, with where it comes from."""
    if path is None:
        return
    code = {k: v for k, v in provenance.code().items() if k != "version"}
    common = {"hardware": provenance.hardware(device), **versions(), **code}
    with path.open("a") as file:
        file.writelines(json.dumps(record | common) + "\n" for record in records)
