"""Pages for tests: plausible, and all of it invented."""

from __future__ import annotations

import base64
import math
import random
import struct
import zlib
from dataclasses import fields, is_dataclass, replace
from typing import Any

from mssar.lab.report.content import (
    Block,
    Claim,
    Compared,
    Comparison,
    Curve,
    Difference,
    Explained,
    Grid,
    Histogram,
    Page,
    Point,
    Row,
    Seen,
    Table,
    Timed,
)
from mssar.lab.report.tables import WEIGHT_DECAY

GAIN = {"none": 0.0, "se": 0.5, "mssar": 0.9}
MACS = {"resnet20": 40.8e6, "resnet32": 69.1e6, "resnet56": 125.7e6, "densenet100": 287.9e6}
ERRORS = {"resnet20": 8.6, "resnet32": 7.5, "resnet56": 6.9, "densenet100": 5.6}
HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror="alert(2)">',
    "</script><script>alert(3)</script>",
    "{{constructor}} ${7*7} <!-- \u2028 '&amp;\\",
)


def curve(
    network: str,
    recalibration: str,
    dataset: str = "cifar10",
    *,
    options: str = "",
    epochs: int = 160,
    n: int = 3,
    done: int | None = None,
) -> Curve:
    """A course that falls at half and at three quarters of its epochs."""
    dice = random.Random(f"{network}{recalibration}{dataset}{options}")
    end = ERRORS.get(network, 8.0) * (4 if dataset == "cifar100" else 1) - GAIN[recalibration]
    mean: dict[str, list[float]] = {}
    low: dict[str, list[float]] = {}
    high: dict[str, list[float]] = {}
    shape = []
    for epoch in range(done or epochs):
        part = epoch / epochs
        level = 2.4 if part < 0.5 else 1.15 if part < 0.75 else 1.0
        shape.append(level + 7 * math.exp(-epoch / 4) + dice.gauss(0, 0.02 * level**3))
    for what, scale in (
        ("train_loss", 0.02 * end),
        ("test_loss", 0.045 * end),
        ("train_error", 0.4 * end),
        ("test_error", end),
    ):
        mean[what] = [min(90.0, scale * value) for value in shape]
        apart = [abs(dice.gauss(0.03, 0.01)) * value if n > 1 else 0.0 for value in mean[what]]
        low[what] = [m - a for m, a in zip(mean[what], apart, strict=True)]
        high[what] = [m + a for m, a in zip(mean[what], apart, strict=True)]
    label = " ".join(filter(None, (network, recalibration, options)))
    going = done is not None
    return Curve(label, network, recalibration, options, dataset, n, going, epochs, mean, low, high)


def row(network: str, recalibration: str, dataset: str = "cifar10", **changes: Any) -> Row:
    published = ERRORS[network] * (4 if dataset == "cifar100" else 1) - GAIN[recalibration]
    mean = round(published + 0.07, 4)
    claim = None
    if recalibration != "none":
        gain = GAIN[recalibration]
        claim = Claim(f"{network} none", gain + 0.1, gain, 0.31, "holds" if gain > 0.6 else "none")
    name = f"{network}-{recalibration}-{dataset}"
    found = Row(
        network=network,
        recalibration=recalibration,
        options="",
        dataset=dataset,
        published=published,
        published_spread=None,
        mean=mean,
        spread=0.21,
        n=3,
        difference=mean - published,
        published5=None,
        mean5=None,
        claim=claim,
        remark="",
        runs=tuple(f"{name}-{seed}" for seed in range(3)),
    )
    return replace(found, **changes)


def open_row(network: str, recalibration: str, dataset: str = "cifar10", **changes: Any) -> Row:
    """Not run yet."""
    of = row(network, recalibration, dataset)
    claim = of.claim and replace(of.claim, gain=None, margin=None, verdict="open")
    empty: dict[str, Any] = {"mean": None, "spread": None, "n": 0, "difference": None, "runs": ()}
    return replace(of, claim=claim, **(empty | changes))


def provenance(tables: tuple[Table, ...]) -> dict[str, dict[str, str]]:
    return {
        run: {
            "seed": str(seed),
            "error": f"{(row.mean or 0) + 0.1 * (seed - 1):.2f} %",
            "command": f"mssar train {row.network} --dataset {row.dataset} --recalibration "
            f"{row.recalibration} --seed {seed}",
            "code": "mssar 0.0.0, commit 0123abcd0123abcd0123abcd0123abcd0123abcd",
            "hardware": "Imaginary GPU X1, torch 9.9",
            "data": "sha256:" + "6b3883dc" * 8,
        }
        for table in tables
        for row in table.rows
        for seed, run in enumerate(row.runs)
    }


def points(networks: tuple[str, ...], dataset: str = "cifar10") -> tuple[Point, ...]:
    return tuple(
        Point(
            network,
            kind,
            "",
            dataset,
            published,
            ERRORS[network] - GAIN[kind] + (0 if published else 0.07),
            None if published else 0.2,
            1 if published else 3,
            MACS[network] * (1 + 0.003 * nth),
            None if published else MACS[network] / 150,
        )
        for network in networks
        for nth, kind in enumerate(GAIN)
        for published in (True, False)
    )


def times(networks: tuple[str, ...]) -> tuple[Timed, ...]:
    made = []
    for hardware, slow in (("Imaginary GPU X1", 1.0), ("two imaginary cores", 40.0)):
        for network in networks:
            base = MACS[network] / 1e7 * slow
            for what, ratios in (("training", (1, 2.2, 4.1)), ("inference", (1, 1.2, 1.5))):
                for kind, ratio in zip(GAIN, ratios, strict=True):
                    r = 1 + (ratio - 1) * (1 if slow == 1 else 0.2)
                    ms = base * r * (1 if what == "training" else 0.3)
                    made.append(
                        Timed(
                            network,
                            kind,
                            "",
                            "cifar10",
                            what,  # type: ignore[arg-type]
                            hardware,
                            128,
                            "bf16" if slow == 1 else "fp32",
                            ms,
                            0.97 * ms,
                            1.05 * ms,
                            r,
                            "mssar bench",
                        )
                    )
    return tuple(made)


def png(side: int, hue: int) -> str:
    """A disc on a slope, as a data: URI."""
    lines = b""
    centre = (side * (0.3 + 0.07 * hue), side * (0.65 - 0.06 * hue))
    for y in range(side):
        lines += b"\0"
        for x in range(side):
            inside = math.dist((x, y), centre) < side / 4
            colour = (230, 60 + 30 * hue, 40) if inside else (40 + 3 * x, 90 + 2 * y, 150)
            lines += bytes(min(255, c) for c in colour)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    raw = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(lines))
    return "data:image/png;base64," + base64.b64encode(raw + chunk(b"IEND", b"")).decode()


RANGES = ((0.32, 0.63), (0.12, 0.93), (0.04, 0.71))  # of the mean and of two channels


def explained(label: str = "resnet20 mssar, seed 0", images: int = 4) -> Explained:
    dice = random.Random(label)
    blocks = tuple(
        Block(
            f"layer{stage}.{i}",
            3 * stage + i - 2,
            stage,
            8 * 2**stage,
            (1, 2, 4),
            (3, 11),
            RANGES,
        )
        for stage in (1, 2, 3)
        for i in range(3)
    )

    def grid(side: int) -> Grid:
        values = bytes(dice.randrange(20, 240) for _ in range(side * side))
        return Grid(side, side, base64.b64encode(values).decode())

    def maps() -> tuple[tuple[tuple[Grid, ...], ...], ...]:
        return tuple(tuple(tuple(grid(k) for k in (4, 1, 2, 4)) for _ in range(3)) for _ in blocks)

    names = ("disc left", "disc right", "disc low", "disc high", "two discs", "no disc")
    seen = tuple(
        Seen(png(32, i), 32, 32, names[i % 6], names[(i + (i == 2)) % 6], maps())
        for i in range(images)
    )
    return Explained(label, "cifar10", len(blocks), blocks, seen, histograms())


def histograms(bins: int = 40) -> tuple[Histogram, ...]:
    made = []
    for stage in (1, 2, 3):
        for scale in (0, 1, 2, 4):
            centre, width = 0.35 + 0.12 * stage, 0.05 + 0.02 * stage + 0.01 * scale
            raw = [math.exp(-(((i + 0.5) / bins - centre) ** 2) / width**2) for i in range(bins)]
            made.append(Histogram(stage, scale, tuple(v / sum(raw) for v in raw)))
    return tuple(made)


def reproduction() -> Page:
    """Some of everything."""
    few = ("resnet20", "resnet56")
    first = [row(network, kind) for network in few for kind in GAIN]
    first[1] = replace(first[1], spread=None, n=1, runs=first[1].runs[:1])
    first[1] = replace(first[1], claim=replace(first[1].claim, verdict="unclear", margin=None))  # type: ignore[type-var]
    first[4] = open_row("resnet56", "se")
    first[5] = replace(first[5], remark="The paper's text and its table differ by 0.1.")
    many = [
        row(network, kind, dataset)
        for network in ("resnet20", "resnet56", "densenet100")
        for dataset in ("cifar10", "cifar100")
        for kind in GAIN
    ]
    many[2] = replace(many[2], published5=0.41, mean5=0.38)
    tables = (
        Table("table3", "Table 3: ResNets on CIFAR-10", "Invented for tests.", tuple(first), 3),
        Table("table4", "Table 4: all of them", "Also invented.", tuple(many), 0),
    )
    curves = [curve(network, kind) for network in few for kind in GAIN]
    curves[1] = curve("resnet20", "se", n=1)
    curves.append(curve("resnet20", "mssar", options="scales=1,2"))
    curves.append(curve("resnet20", "mssar", "cifar100", done=43))
    return Page(
        kind="reproduction",
        title="MS-SAR, reproduced",
        made="2031-02-03T04:05:06+00:00",
        version="0.0.0",
        findings=(
            "On invented data MS-SAR lowers the error of ResNet-20 by 0.90 ± 0.31 points.",
            "Nothing on this page has been measured: it is made for tests.",
        ),
        differences=tuple(
            # The longest remark that there is, beside the longest name.
            Difference(row.network, row.dataset, row.claim, row.runs, WEIGHT_DECAY)
            for row in many
            if row.claim and row.recalibration == "mssar"
        ),
        tables=tables,
        curves=tuple(curves),
        points=points(tuple(ERRORS)),
        times=times(few),
        explained=(explained(), explained("resnet56 mssar, seed 1", 2)),
        problems=("records/table9.jsonl, line 7: no such field: lr",),
        provenance=provenance(tables),
    )


def demo() -> Page:
    """As after `mssar demo`: one network, one run each, nothing published."""
    alone = {"published": None, "difference": None, "spread": None, "n": 1}
    rows = [row("resnet20", kind, "arrangements", **alone) for kind in GAIN]
    rows = [replace(r, runs=r.runs[:1], mean5=0.2) for r in rows]
    rows = [
        replace(
            r, claim=r.claim and replace(r.claim, published=None, margin=None, verdict="unclear")
        )
        for r in rows
    ]
    tables = (Table("demo", "A small network, trained three ways", "Invented.", tuple(rows), 0),)
    kinds = tuple(GAIN)
    return Page(
        kind="demo",
        title="A layer that looks around",
        made="2031-02-03T04:05:06+00:00",
        version="0.0.0",
        findings=("With MS-SAR 7.77 % of the test pictures are named wrongly, without it 8.67 %.",),
        tables=tables,
        curves=tuple(curve("resnet20", k, "arrangements", epochs=12, n=1) for k in kinds),
        points=tuple(
            replace(p, n=1, spread=None, dataset="arrangements")
            for p in points(("resnet20",))
            if not p.published
        ),
        times=tuple(replace(t, dataset="arrangements") for t in times(("resnet20",))[-6:]),
        explained=(replace(explained(), dataset="arrangements"),),
        provenance=provenance(tables),
    )


KINDS = ("none", "se", "eca", "cbam", "coord", "ela", "ge", "simam", "mssar")


def comparison() -> Page:
    """As after `mssar compare`, on a GPU."""
    rows = tuple(
        Compared(
            recalibration=kind,
            options="reduction=2" if kind == "cbam" else "",
            mean=31.5 - place / 10,
            spread=0.2 + place / 50,
            n=3,
            claim=Claim("none", None, place / 10, 0.35, "none" if place < 4 else "holds", 0.01)
            if place
            else None,
            params=275_000 + 1_000 * place,
            macs=40_800_000 + 9_000 * place,
            ms=2 + place % 4 / 9,
            low=1.95 + place % 4 / 9,
            high=2.1 + place % 4 / 9,
            ratio=1 + place % 4 / 18,
            peak=(300 + place) * 2**20,
            runs=tuple(f"compared-{kind}-{seed}" for seed in range(3)),
        )
        for place, kind in enumerate(KINDS)
    )
    known = {run: {"seed": run[-1], "command": "mssar compare"} for r in rows for run in r.runs}
    beside = Comparison("resnet20", "cifar100", "", "Imaginary GPU X1, batch 128, bf16", "", rows)
    return Page(
        kind="comparison",
        title="Recalibrations compared",
        made="2031-02-03T04:05:06+00:00",
        version="0.0.0",
        findings=("Nothing of this was measured.",),
        comparisons=(beside,),
        times=times(("resnet20",)),
        provenance=known,
    )


def empty(kind: Any = "reproduction") -> Page:
    return Page(kind, "Nothing yet", "2031-02-03T04:05:06+00:00", "0.0.0", ())


def large() -> Page:
    """About as much as the whole reproduction: 100 rows, 60 curves of 160 to 300 epochs."""
    base = reproduction()
    rows = (*base.tables[1].rows, *base.tables[1].rows)[:20]
    tables = tuple(replace(base.tables[1], name=f"t{i}", rows=rows) for i in range(5))
    curves = [
        curve(f"{network}{extra}", kind, dataset, epochs=300 if "dense" in network else 160)
        for extra in ("", "-wide", "-thin")
        for network in ERRORS
        for kind in GAIN
        for dataset in ("cifar10", "cifar100")
    ]
    return replace(base, tables=tables, curves=tuple(curves[:60]), provenance=provenance(tables))


def hostile(page: Page) -> Page:
    """The page with markup in every text that is not an address, a number or a choice."""
    turn = 0
    kept = {"kind", "verdict", "what", "values", "image"}

    def spoil(value: Any, name: str = "") -> Any:
        nonlocal turn
        if is_dataclass(value) and not isinstance(value, type):
            changed = {f.name: spoil(getattr(value, f.name), f.name) for f in fields(value)}
            return replace(value, **changed)
        if isinstance(value, tuple):
            return tuple(spoil(inner, name) for inner in value)
        if isinstance(value, dict) and name == "provenance":
            return {spoil(k): {spoil(a): spoil(b) for a, b in v.items()} for k, v in value.items()}
        if isinstance(value, str) and name not in kept:
            turn += 1
            return f"{value} {HOSTILE[turn % len(HOSTILE)]}"
        return value

    spoilt: Page = spoil(page)
    # Runs are known by their id still.
    ids = {i: f"{i} {HOSTILE[0]}" for i in page.provenance}
    known = {
        ids[i]: {f"{k}{HOSTILE[0]}": v for k, v in p.items()}
        | {"seed": HOSTILE[1], "command": HOSTILE[2]}
        for i, p in page.provenance.items()
    }
    tables = tuple(
        replace(
            t,
            rows=tuple(
                replace(r, runs=tuple(ids[i] for i in o.runs))
                for r, o in zip(t.rows, u.rows, strict=True)
            ),
        )
        for t, u in zip(spoilt.tables, page.tables, strict=True)
    )
    beside = tuple(
        replace(
            c,
            rows=tuple(
                replace(r, runs=tuple(ids[i] for i in o.runs))
                for r, o in zip(c.rows, d.rows, strict=True)
            ),
        )
        for c, d in zip(spoilt.comparisons, page.comparisons, strict=True)
    )
    return replace(spoilt, tables=tables, comparisons=beside, provenance=known)
