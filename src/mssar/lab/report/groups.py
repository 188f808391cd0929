"""Runs that differ in nothing but their seeds, and how their errors compare."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any, NamedTuple

from mssar.lab.engine.checkpoint import Progress
from mssar.lab.recipes import UNWRITTEN
from mssar.lab.records import Record, later
from mssar.lab.report.content import Claim, Compared, Row, Verdict
from mssar.lab.report.welch import margin, p_value
from mssar.lab.run import Run, text_of, usual_normalisation, usual_recipe
from mssar.surgery import foreign

ENOUGH = 3  # runs of either side, to judge by their spread; the paper's own number


@dataclass(frozen=True)
class Name:
    """What is trained, as text. A record may name networks that this version does not know."""

    network: str
    recalibration: str
    options: str  # those that are not the default
    dataset: str
    recipe: str  # where it is not the usual one; weights, colours; what else tells it apart

    @property
    def particulars(self) -> str:
        """All that is not as usual."""
        return " ".join(part for part in (self.options, self.recipe) if part)

    @property
    def label(self) -> str:
        return f"{self.network} {self.recalibration} {self.particulars}".rstrip()


@dataclass(frozen=True)
class Group:
    """Finished runs, one a seed."""

    name: Name
    run: Mapping[str, Any]  # with the first one's seed
    records: tuple[Record, ...]

    @property
    def conditions(self) -> tuple[str, str]:
        """Of all of them alike: the data's checksum and the precision."""
        return self.records[0].conditions

    @property
    def n(self) -> int:
        return len(self.records)

    @property
    def mean(self) -> float:
        return fmean(record.error for record in self.records)

    @property
    def spread(self) -> float | None:
        """The sample standard deviation; one run has none."""
        return stdev(record.error for record in self.records) if self.n > 1 else None


def named(run: Mapping[str, Any]) -> Name:
    """The name of a record's run."""
    network, recalibration = run["network"], run["recalibration"]
    options = options_of(network, recalibration, run["options"])
    return Name(network, recalibration, options, run["dataset"], _recipe(run))


def options_of(network: str, recalibration: str, options: Mapping[str, Any]) -> str:
    """Those that are not the default; all, of a network that is not known here."""
    try:
        found = Run(network, recalibration, options).particulars
    except (ValueError, TypeError, KeyError):  # of another version, or made by hand
        found = [f"{name}={_text(value)}" for name, value in options.items()]
    return " ".join(found)


def commit_of(code: Mapping[str, Any], digits: int = 40) -> str:
    """Of the code that made something, if that is known."""
    commit = str(code.get("commit") or "")[:digits]
    return f"{commit} with changes" if commit and code.get("changed") else commit


def _recipe(run: Mapping[str, Any]) -> str:
    recipe, weights = run["recipe"], run.get("weights")
    begun = [f"weights={weights.get('file')}"] if isinstance(weights, Mapping) else []
    usual = usual_recipe(run["network"], run["dataset"], begun=bool(begun)).as_dict()
    begun += _colours(run)
    if recipe == usual:
        return " ".join(begun)
    changed = _changed(recipe, usual)
    if "name" in changed:
        return " ".join([f"recipe={recipe['name']}", *begun])
    if isinstance(augmentation := changed.get("augmentation"), Mapping):
        del changed["augmentation"]
        changed |= _changed(augmentation, usual["augmentation"])
    return " ".join([*(f"{name}={_text(value)}" for name, value in changed.items()), *begun])


def _colours(run: Mapping[str, Any]) -> list[str]:
    """What pixels were normalised by, where that is not usual. Where the network's library is not
    here to say what is, it is the data set's own."""
    given = run.get("normalisation")
    try:
        made = usual_normalisation(run["network"], run["dataset"])
    except ValueError:
        made = None
    usual = {"mean": list(made.mean), "std": list(made.std)} if made else None
    if not isinstance(given, Mapping):
        given = usual and dict(zip(usual, foreign.IMAGENET, strict=True))  # photographs' own
    if given is None or given == usual:
        return []
    return [f"{name}={_text(given.get(name))}" for name in ("mean", "std")]


def _changed(found: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    said = {name: value for name, value in UNWRITTEN.items() if name in usual} | {**found}
    return {name: value for name, value in said.items() if usual.get(name) != value}


def _text(value: object) -> str:
    return text_of(tuple(value) if isinstance(value, list) else value)


def grouped(records: Iterable[Record]) -> list[Group]:
    """In the order in which they come. Of a run recorded twice the later one counts: who begins
    anew throws away what was there. On other data, or in another precision, it is another run; a
    name says which, where a data set has several."""
    found: dict[tuple[str, tuple[str, str]], dict[int, Record]] = {}
    checksums, precisions = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for record in records:
        run = json.dumps({**record.run, "seed": 0}, sort_keys=True)
        later(found.setdefault((run, record.conditions), {}), record)
        checksums[record.run["dataset"]].add(record.conditions[0])
        precisions[record.run["dataset"]].add(record.conditions[1])
    groups = []
    for (_, (checksum, precision)), by_seed in found.items():
        ordered = tuple(by_seed[seed] for seed in sorted(by_seed))
        name = named(ordered[0].run)
        said = [name.recipe]
        if len(checksums[name.dataset]) > 1:
            said.append(f"data={checksum.rpartition(':')[2][:8]}")
        if len(precisions[name.dataset]) > 1:
            said.append(f"precision={precision}")
        name = replace(name, recipe=" ".join(said).strip())
        groups.append(Group(name, ordered[0].run, ordered))
    return groups


def claim(
    against: str, ours: Iterable[Record], theirs: Iterable[Record], published: float | None
) -> Claim:
    """Whether some runs have a lower error than others, beyond what seeds do by chance."""
    ours, theirs = list(ours), list(theirs)
    if not ours or not theirs:
        return Claim(against, published, None, None, "open")
    return judged(against, published, (side(ours), side(theirs)))


class Side(NamedTuple):
    """What is compared: errors of runs, of one of which there is no spread."""

    mean: float
    spread: float
    n: int


def side_of(row: Row | Compared) -> Side:
    """Of the runs behind a row."""
    return Side(row.mean or 0.0, row.spread or 0.0, row.n)


def side(records: Iterable[Record]) -> Side:
    errors = [record.error for record in records]
    return Side(fmean(errors), stdev(errors) if len(errors) > 1 else 0.0, len(errors))


def judged(against: str, published: float | None, *pairs: tuple[Side, Side]) -> Claim:
    """Ours and theirs; of several pairs the mean difference, to which all count alike."""
    gain = fmean(theirs.mean - ours.mean for ours, theirs in pairs)
    sides = [(side.spread, side.n) for pair in pairs for side in pair]
    # Runs that all came out alike do not say how far others would be apart.
    if min(n for _, n in sides) < ENOUGH or not any(spread for spread, _ in sides):
        return Claim(against, published, gain, None, "unclear")
    chance = margin(*sides)
    verdict: Verdict = "none" if abs(gain) <= chance else "holds" if gain > 0 else "reversed"
    return Claim(against, published, gain, chance, verdict, p_value(gain, *sides))


def known_mean(published: Sequence[float | None]) -> float | None:
    """The mean, if all are known."""
    known = [number for number in published if number is not None]
    return fmean(known) if len(known) == len(published) else None


def provenance(record: Record) -> dict[str, str]:
    """Where a number comes from, as text."""
    environment, code, run = record.environment, record.code, record.run
    software = (
        f"torch {environment.get('torch', '?')}",
        f"Python {environment.get('python', '?')}",
    )
    said = {
        "seed": str(run["seed"]),
        "error": f"{record.error:.2f}%, last of {len(record.epochs)} epochs",
        "command": record.command,
        "code": f"mssar {code.get('version', '?')}",
        "commit": commit_of(code),
        "source": str(code.get("source") or ""),
        "hardware": f"{environment['hardware']}, {', '.join(software)}",
        "precision": str(record.execution.get("precision", "")),
        "data": f"{run['dataset']}, {record.data['checksum']}",
        "recipe": json.dumps(run["recipe"]),
        "finished": record.finished,
        "time": f"{record.seconds:,.0f} s, {record.execution['together']:g} at once",
        "interruptions": str(record.interruptions),
        "begun by": _earlier(record),
    }
    return {name: text for name, text in said.items() if text}


def _earlier(record: Record) -> str:
    """What made the parts before the last, in turn, as far as it was not what made the last."""
    code = {"source": record.code.get("source"), "stacked": 1}
    last = {**code, **record.environment, **record.execution}
    parts = record.environment.get("earlier")
    told = []
    for part in parts if isinstance(parts, list) else []:
        if isinstance(part, Mapping):
            other = [
                f"{key} {_text(value)}" for key, value in part.items() if last.get(key) != value
            ]
            told += [", ".join(other)] if other else []
    return "; then ".join(told)


def on_their_way(progress: Progress) -> Name | None:
    """The name of an unfinished run; None where its checkpoint names none."""
    run = progress.run
    texts = ("network", "recalibration", "dataset")
    if not all(isinstance(run.get(name), str) for name in texts):
        return None
    if not isinstance(run.get("options"), dict) or not isinstance(run.get("recipe"), dict):
        return None
    return named(run)
