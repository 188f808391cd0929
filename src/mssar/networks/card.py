"""A model card: what a shared network is, filled from a run's record where there is one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAMES = {"none": "no recalibration", "se": "SE", "mssar": "MS-SAR"}

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

net = mssar.from_pretrained("{place}")
```

## Configuration

| | |
|---|---|
| network | `{network}` |
| recalibration | `{recalibration}` |
{options}| classes | {classes} |
{training}"""

TRAINING = """
## Training

| | |
|---|---|
| data | {dataset}, `{checksum}` |
| recipe | {recipe} |
| seed | {seed} |
| error, last epoch | {error:.2f} % |
| top-5 error | {error5:.2f} % |
| parameters | {params:,} |
| multiply-adds an image | {macs:,} |
| hardware | {hardware}, torch {torch} |
| time | {seconds:,.0f} s |
| code | mssar {version}{commit} |
| command | `{command}` |

One run with one seed: another may differ by more than what is compared. The error is that of the
last epoch on the test images, never the best epoch's.
"""

UNTRAINED = """
How it was trained is not recorded here.
"""


def card(config: Mapping[str, Any], record: Mapping[str, Any] | None, place: str) -> str:
    """The card of a configuration, to be loaded from a place; a record of another network is an
    error."""
    kind = config["recalibration"]
    network = config["network"]
    options = "".join(f"| {k} | {_text(v)} |\n" for k, v in config["options"].items())
    title = f"{network}, {NAMES.get(kind, kind)}"
    facts = training = ""
    if record is not None:
        training, facts = _training(config, record)
        title += f", {record['run']['dataset']}"
    return CARD.format(
        facts=facts,
        title=title,
        network=network,
        recalibration=kind,
        kind=NAMES.get(kind, kind),
        classes=config["num_classes"],
        place=place,
        options=options,
        training=training or UNTRAINED,
    )


def _training(config: Mapping[str, Any], record: Mapping[str, Any]) -> tuple[str, str]:
    try:
        run, environment, code = record["run"], record["environment"], record["code"]
        if (run["network"], run["recalibration"]) != (config["network"], config["recalibration"]):
            raise ValueError(
                f"the record is of {run['network']} {run['recalibration']}, "
                f"and the network is {config['network']} {config['recalibration']}"
            )
        commit = str(code.get("commit") or "")[:12]
        recipe = run["recipe"]
        told = ", ".join(f"{k} {_text(v)}" for k, v in recipe.items() if not isinstance(v, dict))
        text = TRAINING.format(
            dataset=run["dataset"],
            checksum=record["data"]["checksum"],
            recipe=told,
            seed=run["seed"],
            error=record["error"],
            error5=record["error5"],
            params=record["params"],
            macs=record["macs"],
            hardware=environment["hardware"],
            torch=environment.get("torch", "?"),
            seconds=record["seconds"],
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
        f"    - type: accuracy\n      value: {100 - record['error']:.2f}\n"
    )
    return text, facts


def _without_paths(command: str) -> str:
    """The command line, of paths only the last part: the rest says where somebody works."""
    return " ".join(part.rpartition("/")[2] or part for part in str(command).split(" "))


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
