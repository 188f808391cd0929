"""What an insertion does, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from torch import nn

from mssar import fusible
from mssar.branch import Branch
from mssar.layer import MSSAR
from mssar.surgery.ends import ACTIVATIONS
from mssar.surgery.families import Place
from mssar.surgery.measure import Times


@dataclass(frozen=True)
class Entry:
    """One layer."""

    name: str  # of the block or module it goes to
    kind: str
    channels: int
    hidden: int  # of each scale's branch
    params: int  # less those of what it replaces, and so of multiply-adds
    macs: int | None  # of one image; None where the network could not be run without numbers
    runs: str  # how, on a CUDA device
    note: str = ""  # where the network's output is not what it was


@dataclass(frozen=True)
class Plan:
    """What was put into a network, or would be."""

    network: str
    entries: tuple[Entry, ...]
    scales: tuple[int, ...]
    size: tuple[int, int, int]
    params_before: int
    macs_before: int | None
    done: bool
    before: Times | None = None
    after: Times | None = None
    uncounted: str = ""  # why there are no multiply-adds

    @property
    def params(self) -> int:
        """Parameters added."""
        return sum(e.params for e in self.entries)

    @property
    def macs(self) -> int | None:
        """Multiply-adds added, of one image."""
        counts = [e.macs for e in self.entries if e.macs is not None]
        return sum(counts) if len(counts) == len(self.entries) else None

    @property
    def names(self) -> list[str]:
        return [e.name for e in self.entries]

    def __str__(self) -> str:
        head = ("module", "kind", "channels", "hidden", "parameters", "multiply-adds", "on CUDA")
        rows = [
            (e.name or "(the network)", e.kind, f"{e.channels:,}", f"{e.hidden:,}",
             f"{e.params:,}", _number(e.macs), e.runs)
            for e in self.entries
        ]  # fmt: skip
        rows.append(("together", "", "", "", f"{self.params:,}", _number(self.macs), ""))
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        lines = [_line(head, widths), *(_line(row, widths) for row in rows), self._summary()]
        lines += dict.fromkeys(e.note for e in self.entries if e.note)
        if self.uncounted:
            shape = "×".join(map(str, self.size))
            lines.append(f"multiply-adds are not counted at {shape}: {self.uncounted}")
        if self.before and self.after:
            lines.append(_times(self.before, self.after))
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<Plan: {self._summary()}>"

    def _summary(self) -> str:
        verb = "put into" if self.done else "would go into"
        count = f"{len(self.entries)} layer{'s' * (len(self.entries) != 1)}"
        said = (
            f"{count} {verb} {self.network}: {_share(self.params, self.params_before)} parameters"
        )
        if self.macs is not None and self.macs_before:
            shape = "×".join(map(str, self.size))
            said += f", {_share(self.macs, self.macs_before)} multiply-adds at {shape}"
        return said


def entry(
    block: nn.Module,
    name: str,
    place: Place,
    layer: MSSAR,
    maps: Sequence[tuple[int, int]],
    note: str,
) -> Entry:
    """One layer, before it is put anywhere. ``maps`` has a size for every call."""
    hidden = cast("Branch", layer.branches[0]).norm1.num_features
    params = sum(p.numel() for p in layer.parameters())
    macs = sum(_macs(layer, hidden, size) for size in maps) if maps else None
    if place.replaces:
        params -= sum(p.numel() for p in block.parameters())
        macs = None if macs is None else macs - len(maps) * _squeezing(block)
    kind = type(block).__name__
    return Entry(name, kind, place.channels, hidden, params, macs, _runs(block, place, layer), note)


def _macs(layer: MSSAR, hidden: int, size: tuple[int, int]) -> int:
    seen = layer.context_channels or layer.channels
    cells = sum(h * w for h, w in (s.grid(size) for s in layer.sets.sets))
    return cells * hidden * (seen + layer.channels)


def _squeezing(block: nn.Module) -> int:
    """Multiply-adds of a squeeze-and-excitation: its products are of one vector a map."""
    return sum(p.numel() for p in block.parameters() if p.ndim > 1)


def _runs(block: nn.Module, place: Place, layer: MSSAR) -> str:
    norm = None if place.norm is None else block.get_submodule(place.norm)
    reason = fusible.running(layer, norm)
    if not reason.startswith("fused"):
        return reason
    if place.activation is None:
        return "fused with its norm" if norm is not None else "fused"
    behind = [m for m in (getattr(block, name, None) for name in place.between) if m is not None]
    kinds = [type(m).__name__ for m in behind if not isinstance(m, nn.Identity)]
    activation = getattr(block, place.activation) if place.activation else nn.ReLU()
    if type(activation) not in ACTIVATIONS:
        kinds.append(type(activation).__name__)
    if kinds:
        dropping = " in training" if kinds == ["DropPath"] else ""
        return f"fused with its norm; then {', '.join(kinds)}{dropping}"
    return "fused with norm, shortcut, activation"


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    sides = "<<>>>><"
    found = [f"{c:{s}{w}}" for c, s, w in zip(cells, sides, widths, strict=True)]
    return "  ".join(found).rstrip()


def _number(count: int | None) -> str:
    return "?" if count is None else f"{count:,}"


def _share(added: int, before: int) -> str:
    return f"{100 * added / before:+.1f} %" if before else f"+{added:,}"


def _times(before: Times, after: Times) -> str:
    return (
        f"batch of {before.batch}: inference {before.forward:.1f} → {after.forward:.1f} ms "
        f"({100 * (after.forward / before.forward - 1):+.0f} %), training step "
        f"{before.step:.1f} → {after.step:.1f} ms ({100 * (after.step / before.step - 1):+.0f} %)"
    )
