"""What a page says, in plain values: made from records, shown by the page's script.

Errors and losses are as in records; errors in per cent. Text is text: nothing here is markup.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

# Recalibrations, as they are compared.
ORDER = ("none", "se", "eca", "cbam", "coord", "ela", "ge", "simam", "mssar")

Verdict = Literal["holds", "none", "reversed", "unclear", "open"]
# beyond chance · within it · the other way round, beyond it · too few to say · not yet run


@dataclass(frozen=True)
class Claim:
    """That one cell has a lower error than another."""

    against: str  # the other cell, as in "resnet20 none"
    published: float | None  # how much lower, in points
    gain: float | None  # ours
    margin: float | None  # of our gain: half of Welch's 95 % interval
    verdict: Verdict
    p: float | None = None  # how often chance alone would make such a gain, either way

    @property
    def lower(self) -> str:
        """The verdict where nobody claims anything: only which error is lower."""
        return {"holds": "lower", "reversed": "higher"}.get(self.verdict, self.verdict)


@dataclass(frozen=True)
class Row:
    """What we have of a cell of an experiment and what the paper has; or of other runs."""

    network: str
    recalibration: str
    options: str  # as in "scales=1,2"; mostly empty
    dataset: str
    mean: float | None  # of the last epoch's error over seeds; None: not run yet
    spread: float | None  # standard deviation over seeds; None with fewer than two
    n: int
    runs: tuple[str, ...]  # ids, keys of Page.provenance, one for each of the n
    claim: Claim | None  # None also where the other cell is not in the table
    experiment: str = ""  # of the paper; what follows is empty for other runs
    published: float | None = None
    published_spread: float | None = None
    difference: float | None = None  # ours less the paper's
    published5: float | None = None  # top-5, where the paper has it
    mean5: float | None = None
    additional: bool = False  # another reading of the paper's row
    remark: str = ""
    left: int = 0  # runs; one that is missing in two rows is left in both, and trained once
    seconds_left: float | None = None

    @property
    def outcome(self) -> str:
        """The verdict; where the paper claims nothing, only which error is lower."""
        if self.claim is None:
            return ""
        if self.claim.published is not None and not self.additional:
            return self.claim.verdict
        return self.claim.lower


@dataclass(frozen=True)
class Table:
    """One of the paper's tables, or the demo's."""

    name: str  # table3, …
    title: str
    note: str  # a sentence or two, for people who have not read the paper
    rows: tuple[Row, ...]
    left: int  # runs that are missing for three seeds everywhere


@dataclass(frozen=True)
class Difference:
    """How much lower the error of a network is with MS-SAR, or that of some in the mean."""

    network: str
    dataset: str
    claim: Claim  # with its interval
    runs: tuple[str, ...]  # with MS-SAR; ids
    remark: str = ""
    networks: tuple[str, ...] = ()  # those of a mean


@dataclass(frozen=True)
class Curve:
    """A configuration's course: mean, lowest and highest over its seeds, an entry an epoch."""

    label: str  # "resnet20 mssar"
    network: str
    recalibration: str
    options: str
    dataset: str
    n: int
    going: bool  # still being trained: shorter than the others
    epochs: int  # of the recipe
    mean: dict[str, list[float]]  # by train_loss, test_loss, train_error, test_error
    low: dict[str, list[float]]
    high: dict[str, list[float]]


@dataclass(frozen=True)
class Point:
    """A network's error over its cost, the paper's or ours."""

    network: str
    recalibration: str
    options: str
    dataset: str
    published: bool
    error: float
    spread: float | None
    n: int
    macs: float
    params: float | None


@dataclass(frozen=True)
class Timed:
    """How long an image takes, measured; and over that of the network without recalibration."""

    network: str
    recalibration: str
    options: str
    dataset: str  # or the size of the images, as in "32×32"
    what: Literal["training", "inference"]
    hardware: str
    batch: int
    precision: str  # and what else decides how, as in "bf16, compiled"
    ms: float  # a batch, median
    low: float  # 20th percentile
    high: float  # 80th
    ratio: float | None  # to the same with recalibration "none"; None where that is not measured
    source: str  # the command, and the version of what it ran


@dataclass(frozen=True)
class Compared:
    """One recalibration in a comparison: error, counts and what was measured of it, together."""

    recalibration: str
    options: str
    mean: float  # of the last epoch's error over seeds
    spread: float | None  # standard deviation over seeds; None with fewer than two
    n: int
    claim: Claim | None  # of an error lower than none's; None where none was not run
    params: int
    macs: int
    ms: float | None  # a step of training, median; None: not measured
    low: float | None  # 20th percentile
    high: float | None  # 80th
    ratio: float | None  # to the step without recalibration
    peak: int | None  # bytes that a step holds at most; None on a CPU
    runs: tuple[str, ...]  # ids, keys of Page.provenance

    @property
    def outcome(self) -> str:
        return self.claim.lower if self.claim else ""


@dataclass(frozen=True)
class Comparison:
    """One network under one recipe with several recalibrations."""

    network: str
    dataset: str
    recipe: str  # where it is not the usual one
    measured: str  # on what and how, as in "GPU X1, batch 128, bf16"; empty: not measured
    made: str  # how each was trained, where that differs
    rows: tuple[Compared, ...]

    @property
    def base(self) -> Compared | None:
        """The one without recalibration."""
        return next((row for row in self.rows if row.recalibration == "none"), None)


@dataclass(frozen=True)
class Grid:
    """A map of weights, row by row in bytes: 0 and 255 are the ends of its view's range."""

    height: int
    width: int
    values: str  # base64


@dataclass(frozen=True)
class Block:
    """One recalibrated block of a network."""

    name: str  # as in the network
    number: int  # among all of the network's, from 1
    stage: int  # from 1
    channels: int
    scales: tuple[int, ...]
    shown: tuple[int, ...]  # channels that vary most over positions, and so are worth a look
    ranges: tuple[tuple[float, float], ...]  # of the weights of each view, over images and scales


@dataclass(frozen=True)
class Seen:
    """What the layers of a network made of one image.

    ``maps[block][view][scale]``: view 0 is the mean over channels, the others are the block's
    ``shown``; scale 0 is all scales together, Z, the others are the block's scales in turn.
    """

    image: str  # data: URI of a PNG
    height: int
    width: int
    label: str
    guess: str
    maps: tuple[tuple[tuple[Grid, ...], ...], ...]


@dataclass(frozen=True)
class Histogram:
    """How often which weight occurs in a stage: shares of ``bins`` equal parts of 0 … 1."""

    stage: int
    scale: int  # 0: all together
    shares: tuple[float, ...]


@dataclass(frozen=True)
class Explained:
    """What a trained network's layers see in a few test images."""

    label: str  # "resnet20 mssar, seed 0"
    dataset: str
    depth: int  # blocks of the network; these need not be all
    blocks: tuple[Block, ...]
    images: tuple[Seen, ...]
    histograms: tuple[Histogram, ...]
    note: str = ""  # which network and which images, in a sentence or two


@dataclass(frozen=True)
class Page:
    """All of it."""

    kind: Literal["reproduction", "demo", "comparison"]
    title: str
    made: str  # ISO 8601
    version: str
    findings: tuple[str, ...]  # what comes out of it, in sentences
    differences: tuple[Difference, ...] = ()
    tables: tuple[Table, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    curves: tuple[Curve, ...] = ()
    points: tuple[Point, ...] = ()
    times: tuple[Timed, ...] = ()
    explained: tuple[Explained, ...] = ()
    problems: tuple[str, ...] = ()  # what could not be read, file and line
    # A run's seed, error, command, commit, hardware, checksum and so on, as text by name.
    provenance: dict[str, dict[str, str]] = field(default_factory=dict)
    live: bool = False  # served from a folder that is trained into: look for news


def plain(page: Page) -> dict[str, Any]:
    """As JSON takes it."""
    return asdict(page)
