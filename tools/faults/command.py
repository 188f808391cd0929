"""The whole command over torn and hostile files: what it says, how it ends, what it leaves.

The files suite gives such files to functions, thousands of them. Here the real ``mssar`` is run in
a process of its own, on a sample of them, in the place where a command would look.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from unicodedata import category

import torch
from PIL import Image
from safetensors.torch import load_file

from faults.files.mutation import changed, restructured, text
from faults.files.networks import recrafted
from faults.files.sandbox import tree
from faults.jobs import OLD, TRAIN, Known, Look
from faults.kills import looked
from faults.nursery import Answer, Crew, Order, crew
from faults.suite import Row, share

ROOT = Path(__file__).parents[2]
PROMISE = "done, or one clear line and status 1 or 2; nothing is written elsewhere"
WEIGHTS = "some.safetensors"
LONGEST = 1500  # letters of a line
Change = Callable[[Random, bytes], tuple[str, bytes]]
Tree = dict[str, tuple[int, int, int]]


def torn(draw: Random, data: bytes) -> tuple[str, bytes]:
    return changed(draw, data)


def said(draw: Random, data: bytes) -> tuple[str, bytes]:
    """A line of JSON that says something else; or torn."""
    if draw.random() < 0.3:
        return changed(draw, data)
    lines = data.decode().splitlines()
    which = draw.randrange(len(lines))
    what, value = restructured(draw, json.loads(lines[which]))
    lines[which] = text(value)
    return what, "\n".join(lines).encode("utf-8", "surrogatepass") + b"\n"


def crafted(draw: Random, data: bytes) -> tuple[str, bytes]:
    """A file of weights that says something else, mostly signed anew; or torn."""
    if draw.random() < 0.3:
        return changed(draw, data)
    _, what, found = recrafted(draw, data)
    return what, found


@dataclass(frozen=True)
class Use:
    """A command, the file that is changed before it, and what it may write."""

    name: str
    words: list[str]
    file: str  # within the folder that it is run in
    change: Change
    count: int
    writes: str = ""  # a file, or a folder with all that is in it
    done: Look = lambda _: None  # after a status of 0
    without: tuple[str, ...] = ()  # files that are not there


def uses(known: Known) -> list[Use]:
    """All of them, for a folder as :func:`prepared` has it."""
    run, data = f"runs/{known.run}", ["--data-dir", "data"]
    last, computed = f"{run}/epoch-0002.safetensors", ["--device", "cpu", *data]
    again = [*TRAIN.split(), "--seed", "0,1", *data]
    with_recipe = ["resnet8", "--dataset", "cifar10", "--batch", "8"]
    first = ["train", *with_recipe, "--epochs", "1", "--runs", "new", "--weights"]
    pair = ["compare", *with_recipe, "--epochs", "2", "--modules", "none", "--seeds", "1"]
    timed = ["--seconds", "0.001", "--runs", "runs", *computed]
    shown = ["explain", "seen", "picture.png", "-o", "new.png", *data]
    new, begun = "new.safetensors", (f"{run}/record.json", "runs/records.jsonl")
    listed = ["reproduce", "table3", "--list", "--records", "published"]
    report, batch = ["report", "--no-maps", "-o", "page.html"], "data/cifar-10-batches-bin"
    return [
        Use("eval", ["eval", run, *computed], last, crafted, 16),
        Use("eval", ["eval", WEIGHTS, *computed], WEIGHTS, crafted, 16),
        Use("weights", ["weights", run, new, *computed], last, crafted, 12, new),
        Use("explain", shown, "seen/epoch-0002.safetensors", crafted, 12, "new.png"),
        Use("explain", shown, "picture.png", torn, 16, "new.png"),
        Use("export", ["export", run, "new.onnx", *data], last, crafted, 8, "new.onnx"),
        Use("train --resume", again, last, torn, 8, "runs", known.same_runs, begun),
        Use("train --resume", again, last, crafted, 10, "runs", without=begun),
        Use("train --resume", again, f"{run}/record.json", said, 8, "runs"),
        Use("train --resume", again, "runs/records.jsonl", said, 8, "runs"),
        Use("train --resume", again, f"{batch}/data_batch_1.bin", torn, 4, "runs", without=begun),
        Use("train --weights", [*first, "some.pth", *computed], "some.pth", torn, 8, "new"),
        Use("train --weights", [*first, WEIGHTS, *computed], WEIGHTS, crafted, 8, "new"),
        Use("report", [*report, "runs"], "runs/records.jsonl", said, 16, "page.html", _page),
        Use("report", [*report, "seen"], "seen/epoch-0002.safetensors", crafted, 8, "page.html"),
        Use("compare", [*pair, *timed], "runs/records.jsonl", said, 6, "runs"),
        Use("reproduce", listed, "published/table3.jsonl", said, 12),
        Use("data check", ["data", "check", "cifar10", *data], f"{batch}/test_batch.bin", torn, 12),
        Use("data get", ["data", "get", "cifar10", *data], f"{batch}/test_batch.bin", torn, 6),
    ]


def prepared(known: Known) -> Path:
    """A folder with something for every command to read."""
    known.weights()
    known.explain()
    folder = known.home / "prepared"
    shutil.copytree(known.trained / "runs", folder / "runs")
    (seen,) = (p for p in (known.home / "seen" / "root" / "runs").iterdir() if p.is_dir())
    shutil.copytree(seen, folder / "seen")
    shutil.copytree(known.home / "data", folder / "data")
    shutil.copy(known.home / "weights" / "root" / "out.safetensors", folder / WEIGHTS)
    torch.save(load_file(folder / WEIGHTS), folder / "some.pth")
    draw = Random(0)
    Image.frombytes("RGB", (40, 36), draw.randbytes(3 * 40 * 36)).save(folder / "picture.png")
    (folder / "published").mkdir()
    lines = (ROOT / "records" / "table3.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "published" / "table3.jsonl").write_bytes(b"".join(lines[:3]))
    (folder / "page.html").write_bytes(OLD)
    return folder


def _page(root: Path) -> str | None:
    whole = (root / "page.html").read_bytes().rstrip().endswith(b"</html>")
    return None if whole else "half a page"


def trouble(use: Use, made: Answer, root: Path, before: Tree, after: Tree) -> str | None:
    """What is not as promised."""
    if "Traceback" in made.err or any(category(x) == "Cc" for x in made.err.replace("\n", "")):
        return f"said {made.err[-600:]!r}"
    spoken = [line for line in made.err.splitlines() if line.startswith("mssar: ")]
    differs = use.name == "data check" and "not as known: " in made.out
    if made.status and not differs and (made.status not in (1, 2) or len(spoken) != 1):
        return f"status {made.status}, said {made.err[-600:]!r}"
    if any(len(line) > LONGEST for line in spoken):
        return f"a line of {max(map(len, spoken)):,} letters"
    allowed = root / use.writes if use.writes else None
    for name, _ in before.items() ^ after.items():
        if allowed is None or not Path(name).is_relative_to(allowed):
            return f"touched {name}"
    if made.status and use.writes not in ("", "runs", "new") and before != after:
        return f"left {use.writes} behind"
    if left := [name for name in after if name.endswith(".part")]:
        return f"left {left}"
    return None if made.status else looked(use.done, root)


def tried(crew: Crew, use: Use, source: Path, home: Path, name: str) -> tuple[str | None, Answer]:
    """Change the file, run the command, and look."""
    root = home / name / "root"
    shutil.copytree(source, root)
    draw = Random(name)
    what, data = use.change(draw, (root / use.file).read_bytes())
    (root / use.file).write_bytes(data)
    for other in use.without:
        (root / other).unlink()
    before = tree(root, Path())
    try:
        made = crew(Order(use.words, str(root)))
        wrong = trouble(use, made, root, before, tree(root, Path()))
        return wrong and f"{' '.join(use.words)}, {use.file}, {what:.200}: {wrong}", made
    finally:
        shutil.rmtree(root.parent)


def check(effort: float, seed: int) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as temporary, crew() as people:
        known = Known(people, Path(temporary).resolve())
        yield from rows(people, known, effort, seed)


def rows(crew: Crew, known: Known, effort: float, seed: int) -> Iterator[Row]:
    source, found = prepared(known), defaultdict[str, list[tuple[str | None, Answer]]](list)
    for number, use in enumerate(uses(known)):
        made = crew(Order(use.words, str(_copied(source, known.home / f"whole-{number}"))))
        if made.status:
            raise RuntimeError(f"{' '.join(use.words)}, undisturbed: {made.status} {made.err}")
        names = [f"{seed}-{number}-{case}" for case in range(share(use.count, effort))]
        found[use.name] += crew.each(
            lambda name, use=use: tried(crew, use, source, known.home, name), names
        )
    for name, cases in found.items():
        for wrong, _ in cases:
            if wrong:
                print(f"command: {wrong}", file=sys.stderr)
        done = sum(made.status == 0 for _, made in cases)
        remark = f"{len(cases) - done} refused, {done} done"
        bad = sum(wrong is not None for wrong, _ in cases)
        yield Row(f"`mssar {name}`, a file torn or changed", PROMISE, len(cases), bad, remark)


def _copied(source: Path, place: Path) -> Path:
    return Path(shutil.copytree(source, place / "root"))
