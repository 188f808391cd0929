"""Records, timings and the page that is made of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from faults.files.mutation import changed, restructured, text
from faults.files.sandbox import Case, Family, WrongError
from mssar.lab import records, timings
from mssar.lab.engine import result
from mssar.lab.report import build, page
from mssar.lab.report.collect import collect

ROOT = Path(__file__).parents[3]
KEPT = {"records": "table3.jsonl", "timings": "timings/h200.jsonl"}
TORN, CHANGED = "records and timings, bytes changed", "records and timings, other values"
PROMISES = {
    TORN: "one line that names the file, or what its JSON says; a page of what is left",
    CHANGED: "one line that names the file, or what its JSON says; a page of what is left",
}


class Kind(NamedTuple):
    read: Callable[[Path], list[Any]]
    lines: list[str]


def prepare(_: Path) -> dict[str, Kind]:
    read: dict[str, Callable[[Path], list[Any]]] = {
        "records": records.read,
        "timings": timings.read,
    }
    found = {}
    for name, file in KEPT.items():
        lines = (ROOT / "records" / file).read_text().splitlines()
        found[name] = Kind(read[name], [_short(line) for line in lines[:12]])
    return found


def _short(line: str) -> str:
    """A record of two epochs: so that a change hits what decides."""
    record = json.loads(line)
    if "epochs" in record:
        record["epochs"] = record["epochs"][:2]
        record["run"]["recipe"]["epochs"] = 2
        record["error"], record["error5"] = (
            record["epochs"][-1][name] for name in ("test_error", "test_error5")
        )
    return json.dumps(record, separators=(",", ":"))


def attempt(kinds: dict[str, Kind], case: Case) -> None:
    name = case.random.choice(list(kinds))
    kind = kinds[name]
    good, line = case.random.sample(kind.lines, 2)
    if case.random.random() < 0.35:
        what, data = changed(case.random, line.encode())
        case.begin(TORN, what, "torn.jsonl")
    else:
        what, value = restructured(case.random, json.loads(line))
        data = text(value).encode()
        case.begin(CHANGED, what, "torn.jsonl")
    file = case.folder / "torn.jsonl"
    file.write_bytes(data + b"\n" + good.encode() + b"\n")
    _require_a_page(file, often=case.random.random())
    if name == "records":
        _require_one_line_of_a_run(case.folder, data)
    for one in kind.read(file)[:-1]:
        _require_same(one, data.decode())


def _require_a_page(file: Path, often: float) -> None:
    """The good line is shown whatever is in the bad one, and the page can be written."""
    found = collect([file])
    if not found.records and not found.timings and "UTF-8" not in "".join(found.problems):
        raise WrongError(f"the good line is lost: {found.problems}")
    for line in found.problems:
        if "torn.jsonl" not in line or len(line.splitlines()) != 1 or len(line) > 1000:
            raise WrongError(f"the page says {line!r:.300}")
    if len(found.records) + len(found.timings) > 1 or often < 0.05:  # the bad line is believed
        page.html(build.side_by_side(found)).encode()
        if often < 0.1:  # which counts networks, and takes long
            page.html(build.reproduction(found)).encode()


def _require_one_line_of_a_run(folder: Path, data: bytes) -> None:
    """A run's own record, as a folder keeps it."""
    (folder / "run").mkdir(exist_ok=True)
    (folder / "run" / result.NAME).write_bytes(data)
    try:
        result.finished(folder / "run")
    except ValueError as error:
        if type(error) is not ValueError or result.NAME not in str(error):
            raise WrongError(f"a run's own: {error!r:.300}") from error


def _require_same(one: Any, data: str) -> None:
    """What was believed is what the line says, to the last digit that a float has."""
    said = [
        json.loads(line, object_pairs_hook=_once, parse_int=float)
        for line in data.split("\n")
        if line.strip()
    ]
    if json.loads(json.dumps(asdict(one)), parse_int=float) not in said:
        raise WrongError("believed something else than the line says")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise WrongError(f"believed an object that says {[k for k, _ in pairs][:5]} twice")
    return dict(pairs)


FAMILIES = (Family("lines", PROMISES, 2000, 64, prepare, attempt),)
