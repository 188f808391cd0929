"""A model card: what a shared network is, filled from a run's record where there is one."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

NAMES = {"none": "no recalibration", "se": "SE", "mssar": "MS-SAR"}
ELSEWHERE = ("timm:local-dir:", "timm:hf-hub:")  # networks that timm makes from elsewhere

CARD = """\
---
library_name: mssar
pipeline_tag: image-classification
tags:
- mssar
- image-classification
{facts}---

# {title}

`{network}` with {kind}, {classes} classes, made by mssar.

```python
import mssar

net = {loading}
```

## Configuration

| | |
|---|---|
| network | `{network}` |
| recalibration | `{recalibration}` |
{options}| classes | {classes} |
{file}{training}"""

FILE = """
## This file

| | |
|---|---|
| weights | those of the last epoch, parameters in {precision} |
| error | {error:.2f} %, measured again with these weights{measured} |
{five}| images | {height} × {width} pixels, red, green and blue, each from 0 to 1 |
| mean, to subtract | {mean} |
| standard deviation, to divide by | {std} |

`net.note` has these numbers, and the names of the classes.
"""

TRAINING = """
## Training

| | |
|---|---|
| data | {dataset}, `{checksum}` |
{begun}| recipe | {recipe} |
| seed | {seed} |
| error, last epoch | {error:.2f} % |
{five}| parameters | {params:,} |
| multiply-adds an image | {macs:,} |
| hardware | {hardware}, torch {torch} |
| time | {seconds:,.0f} s{together} |
| code | mssar {version}{commit} |
| command | `{command}` |

One run with one seed: another may differ by more than what is compared. The error is that of the
last epoch on the test images, never the best epoch's.
"""

UNTRAINED = """
How it was trained is not recorded here.
"""


def card(
    config: Mapping[str, Any],
    record: Mapping[str, Any] | None,
    loading: str,
    note: Mapping[str, Any] | None = None,
    precision: str = "single precision",
) -> str:
    """The card of a configuration; a record of another network is an error.

    Args:
        config: as :mod:`mssar.networks.sharing` writes it.
        record: of the run that trained it.
        loading: the expression that loads it.
        note: what a file of `mssar weights` says of itself; see :mod:`mssar.networks.weights`.
        precision: of the parameters in that file.
    """
    kind = config["recalibration"]
    network = config["network"]
    options = "".join(f"| {k} | {_text(v)} |\n" for k, v in config["options"].items())
    title = f"{network}, {NAMES.get(kind, kind)}"
    facts = training = file = ""
    if record is not None:
        training, facts = _training(config, record, note or record)
        title += f", {record['run']['dataset']}"
    if note is not None:
        file = _file(note, precision)
    return CARD.format(
        facts=facts,
        title=title,
        network=network,
        recalibration=kind,
        kind=NAMES.get(kind, kind),
        classes=config["num_classes"],
        loading=loading,
        options=options,
        file=file,
        training=training or UNTRAINED,
    )


def _file(note: Mapping[str, Any], precision: str) -> str:
    _, height, width = note["size"]
    mean, std = (", ".join(f"{value:.4f}" for value in note[name]) for name in ("mean", "std"))
    return FILE.format(
        precision=precision,
        error=note["error"],
        measured=measured(note),
        five=_five(note["error5"], len(note["classes"])),
        height=height,
        width=width,
        mean=mean,
        std=std,
    )


def measured(note: Mapping[str, Any]) -> str:
    """On what, and in which precision; older files do not say."""
    how = note.get("measured")
    return f" on {how['hardware']} in {how['precision']}" if how else ""


def _training(
    config: Mapping[str, Any], record: Mapping[str, Any], tested: Mapping[str, Any]
) -> tuple[str, str]:
    """The section, and the facts for the Hub, whose accuracy is that of what was tested."""
    try:
        run, environment, code = record["run"], record["environment"], record["code"]
        network = config.get("source", config["network"])  # that may have another name, too
        trained = public(run["network"])
        if (trained, run["recalibration"]) != (network, config["recalibration"]):
            raise ValueError(
                f"the record is of {trained} {run['recalibration']}, "
                f"and the network is {network} {config['recalibration']}"
            )
        commit = str(code.get("commit") or "")[:12]
        recipe, together = run["recipe"], record.get("execution", {}).get("together", 1)
        text = TRAINING.format(
            dataset=run["dataset"],
            checksum=record["data"]["checksum"],
            begun=_begun(run.get("weights")),
            recipe=_recipe(recipe),
            seed=run["seed"],
            error=record["error"],
            five=_five(record["error5"], record["data"]["classes"]),
            params=record["params"],
            macs=record["macs"],
            hardware=environment["hardware"],
            torch=environment.get("torch", "?"),
            seconds=record["seconds"],
            together=f", {together:g} runs at once" if together > 1 else "",
            version=code.get("version", "?"),
            commit=f", commit {commit}" if commit else "",
            command=_without_paths(record["command"]),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"this is no record of a run: {error!r}") from None
    facts = (
        f"datasets:\n- {run['dataset']}\n"
        "model-index:\n"
        f"- name: {config['network']} {config['recalibration']}\n"
        "  results:\n"
        "  - task:\n      type: image-classification\n"
        f"    dataset:\n      type: {run['dataset']}\n      name: {run['dataset']}\n"
        "    metrics:\n"
        f"    - type: accuracy\n      value: {100 - tested['error']:.2f}\n"
    )
    return text, facts


def public(network: str) -> str:
    """A network's name, of a folder that it came from only the last part."""
    return re.sub(r"(:local-dir:).*/", r"\1", network)


def _begun(weights: Mapping[str, Any] | None) -> str:
    """Which weights were there before the first step; a row where there were any."""
    if weights is None:
        return ""
    return f"| begun with | {public(weights['file'])}, `sha256:{weights['sha256']}` |\n"


def _five(error: float, classes: int) -> str:
    """A row, but where none could be wrong."""
    return f"| top-5 error | {error:.2f} % |\n" if classes > 5 else ""


def _recipe(recipe: Mapping[str, Any]) -> str:
    """All of it; what consists of several things comes last."""
    plain = {k: v for k, v in recipe.items() if not isinstance(v, dict)}
    parts = [_listed(plain)]
    for name, of in recipe.items():
        if isinstance(of, dict):
            kind = {k: v for k, v in of.items() if k != "kind"}
            parts.append(f"{name} {of.get('kind', '')}: {_listed(kind)}")
    return "; ".join(parts)


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{k} ({_text(v)})" if isinstance(v, list | tuple) else f"{k} {_text(v)}"
        for k, v in values.items()
        if v not in ([], ())
    )


def _without_paths(command: str) -> str:
    """The command line, of paths only the last part: the rest says where somebody works."""
    try:
        parts = shlex.split(str(command))
    except ValueError:  # a quote without its other half
        parts = str(command).split()
    return shlex.join(map(_without_path, parts))


def _without_path(word: str) -> str:
    option, equals, given = word.partition("=") if word.startswith("--") else ("", "", word)
    bare = given.rstrip("/")
    short = public(bare) if bare.startswith(ELSEWHERE) else bare.rpartition("/")[2]
    return f"{option}{equals}{short or given}"


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)
