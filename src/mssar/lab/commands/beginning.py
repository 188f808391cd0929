"""What a run begins with, from what a user says of it: weights, and the colours they know."""

from __future__ import annotations

import re
from pathlib import Path

from mssar.lab.engine import checkpoint
from mssar.lab.run import PHOTOGRAPHS, Colours, Initial, Normalisation, usual_normalisation
from mssar.networks.card import public
from mssar.networks.sharing import WEIGHTS
from mssar.networks.weights import PICKLES, located
from mssar.networks.weights import PRETRAINED as OURS
from mssar.surgery import foreign
from mssar.surgery.initial import digest_of

PRETRAINED = "pretrained"  # the word for a library's own
ENDINGS = "|".join(ending.removeprefix(".") for ending in (*PICKLES, ".safetensors"))
HUB = re.compile(  # owner/name, if it does not end as a file does
    rf"(?:timm:)?(?:hf[-_]hub:|https://huggingface\.co/)?(?!.*\.(?:{ENDINGS})$)([\w-][\w.-]*/[\w.-]+)"
)


def settled(nets: list[str]) -> dict[str, tuple[str, foreign.Foreign | None]]:
    """Networks by names that a record may have; what a user said, and what lies there if that says
    where timm finds it."""
    found: dict[str, tuple[str, foreign.Foreign | None]] = {}
    for net in dict.fromkeys(nets):
        there = foreign.elsewhere(net) if foreign.is_elsewhere(net) else None
        name = net if there is None else f"timm:{there.name}"
        if name in found:
            raise ValueError(f"{found[name][0]} and {net} are both {name}: train one at a time")
        found[name] = net, there
    return found


def initial(
    words: str | None, network: str, runs: Path | None, said: str | None = None
) -> Initial | None:
    """What ``--weights`` names, for a network; ``said`` is how a user named that.

    A run that is gone on with has its weights in its checkpoint: where the file is gone, its
    SHA-256 is that of a run of the same file's name among ``runs``.
    """
    if words is None:
        return None
    path = None if words == PRETRAINED else located(words)
    if path is not None and (path / WEIGHTS).is_file():  # what `mssar weights` wrote as a folder
        path /= WEIGHTS
    source = said or network
    name = public(source) if path is None else path.name
    try:
        if path is None:
            return Initial(name, digest_of(foreign.pretrained(source)), source=source)
        if not path.is_file():
            if found := HUB.fullmatch(words):
                raise ValueError(
                    f"there is no file {words}; what is on the Hub is --from "
                    f"timm:hf-hub:{found[1]} --weights {PRETRAINED}"
                )
            raise ValueError(
                f"there is no file {path}; --weights is a file, one of {', '.join(OURS)}, or "
                f"{PRETRAINED} for the library's"
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


def colours(
    mean: str | None,
    std: str | None,
    network: str,
    dataset: str,
    found: foreign.Foreign | None = None,
) -> Normalisation | None:
    """What ``--mean`` and ``--std`` say, else what is usual; None where that is the data set's."""
    if mean is None and std is None:
        return usual_normalisation(network, dataset, found)
    if mean is None or std is None:
        raise ValueError("--mean and --std belong together; give both")
    if dataset not in PHOTOGRAPHS:
        raise ValueError(f"--mean and --std are for photographs; {dataset} has its own")
    made = Normalisation(_three("mean", mean), _three("std", std))
    if min(made.std) <= 0:
        raise ValueError(f"--std is above 0; got {std!r}")
    if min(made.mean) < 0 or max(*made.mean, *made.std) > 1:
        raise ValueError(
            "--mean and --std are of colours from 0 to 1, those for 0 to 255 over 255; got "
            f"{mean!r} and {std!r}"
        )
    return None if (made.mean, made.std) == foreign.IMAGENET else made


def _three(name: str, text: str) -> Colours:
    try:
        red, green, blue = (float(part) for part in text.split(","))
    except ValueError:
        example = "0.485,0.456,0.406"
        raise ValueError(f"--{name} takes three numbers, as in {example}; got {text!r}") from None
    return red, green, blue
