"""Which weights a run begins with, from what a user says of them."""

from __future__ import annotations

from pathlib import Path

from mssar.lab.engine import checkpoint
from mssar.lab.run import Initial
from mssar.surgery import foreign
from mssar.surgery.initial import digest_of

PRETRAINED = "pretrained"


def initial(words: str | None, network: str, runs: Path | None) -> Initial | None:
    """What ``--weights`` names, for a network.

    A run that is gone on with has its weights in its checkpoint: where the file is gone, its
    SHA-256 is that of a run of the same file's name among ``runs``.
    """
    if words is None:
        return None
    path = None if words == PRETRAINED else Path(words)
    name = network if path is None else path.name
    try:
        if path is None:
            return Initial(name, digest_of(foreign.pretrained(network)))
        if not path.is_file():
            raise ValueError(
                f"there is no file {path}; --weights is a file, or {PRETRAINED} for the library's"
            )
        return Initial.of(path)
    except ValueError:
        known = {} if runs is None else _known(runs, network, name)
        if not known:
            raise
        if len(known) > 1:
            few = ", ".join(folder.name for folder in known.values())
            raise ValueError(f"runs that began with different files called {name}: {few}") from None
        return Initial(name, next(iter(known)))


def _known(runs: Path, network: str, file: str) -> dict[str, Path]:
    """The SHA-256 of files of this name that runs of a network began with, and a run of each."""
    found: dict[str, Path] = {}
    for folder in sorted(path for path in runs.glob("*/") if path.is_dir()):
        for path in checkpoint.checkpoints(folder)[-1:]:
            try:
                run = checkpoint.progress(path).run
            except ValueError:
                continue  # whoever goes on with it will say so
            weights = run.get("weights")
            if run.get("network") == network and weights and weights.get("file") == file:
                found[weights["sha256"]] = folder
    return found
