"""Pages that quote results and measurements: what `tools/write-results` puts into them."""

import importlib
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from mssar.networks.weights import PRETRAINED

ROOT = Path(__file__).parent.parent
WORDS = "src/mssar/lab/report/assets/words.toml"
OF_SE = tuple(f"docs/results{of}.md" for of in ("-comparisons", "-modules", "-runs", "-scales", ""))
PAGES = ("README.md", *OF_SE, WORDS)  # that say something of SE
CARDS = [f"src/mssar/networks/pretrained/{name}.md" for name in PRETRAINED]
WEIGHTS = ("docs/networks.md", *CARDS)
OTHERS = ("docs/finetune.md",)
MEASURED = ("docs/imagenet.md", "docs/measurements.md", "docs/performance.md")
TOOLS = (
    *("tools/write-results", "tools/costs.py", "tools/courses.py", "tools/gains.py"),
    *("tools/imagenet.py", "tools/modules.py", "tools/recipes.py", "tools/rounding.py"),
    "tools/scales.py",
)
DATA = tuple(
    f"records/{name}"
    for name in (
        *("table3.jsonl", "table4.jsonl", "strategy.jsonl", "recipe.jsonl"),
        *("compare.jsonl", "weight_decay.jsonl", "fruit.jsonl", "costs.toml"),
        *("timings/h200.jsonl", "held.ndjson", "gradients.ndjson"),
    )
)


def write_results(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    tool = root / "tools" / "write-results"
    return subprocess.run([sys.executable, tool, *words], capture_output=True, text=True)


@pytest.fixture
def copied(tmp_path):
    for name in (*PAGES, *WEIGHTS, *OTHERS, *MEASURED, *TOOLS, *DATA):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "docs" / "assets").mkdir()
    return tmp_path


def test_pages_quote_the_records():
    done = write_results(ROOT, "--check")
    assert done.returncode == 0, done.stderr


def test_a_page_that_is_behind_is_named_and_then_mended(copied):
    expected = {name: (copied / name).read_text() for name in PAGES}
    lines = (copied / "records" / "table3.jsonl").read_text().splitlines()
    (copied / "records" / "table3.jsonl").write_text(
        "\n".join([line for line in lines if not ('"se"' in line and '"seed":2' in line)]) + "\n"
    )
    done = write_results(copied, "--check")
    assert done.returncode == 1
    assert [line.split()[0] for line in done.stderr.splitlines()] == list(PAGES)
    assert {name: (copied / name).read_text() for name in PAGES} == expected
    (copied / "records" / "table3.jsonl").write_text("\n".join(lines) + "\n")
    page = copied / "docs" / "results.md"
    page.write_text(page.read_text().replace("(n=3)", "(n=9)"))
    assert write_results(copied).returncode == 0
    assert {name: (copied / name).read_text() for name in PAGES} == expected
    for figure in ("courses", "gains", "scales"):
        assert (copied / "docs" / "assets" / f"{figure}.svg").read_text().count("<path") > 15


def test_the_list_and_the_cards_of_weights_follow_the_records(copied):
    expected = {name: (copied / name).read_text() for name in WEIGHTS}
    for card in CARDS[1:]:
        (copied / card).unlink()
    (copied / CARDS[0]).write_text(expected[CARDS[0]].replace("7.66 %", "7.56 %"))
    page = copied / WEIGHTS[0]
    page.write_text(page.read_text().replace("| 27.96 |", "| 27.06 |"))
    done = write_results(copied, "--check")
    assert done.returncode == 1
    assert [line.split()[0] for line in done.stderr.splitlines()] == list(WEIGHTS)
    assert write_results(copied).returncode == 0
    assert {name: (copied / name).read_text() for name in WEIGHTS} == expected


def remeasured(root: Path, row: str, what: str, value: str) -> list[str]:
    """The pages that are written once a measurement has changed."""
    file = root / "records" / "costs.toml"
    number = re.compile(rf"^({row} = .*?\b{what} = )[-\d._]+", re.MULTILINE)
    text, count = number.subn(rf"\g<1>{value}", file.read_text())
    assert count == 1
    file.write_text(text)
    done = write_results(root)
    assert done.returncode == 0, done.stderr
    return done.stdout.removeprefix("written: ").split("; ")[0].split(", ")


def test_a_cost_stands_once_and_changes_on_every_page(copied):
    now = tomllib.loads((copied / "records" / "costs.toml").read_text())["overhead"]
    se, before = (now["resnet18-eager-train"][name] for name in ("se", "before"))
    assert remeasured(copied, "resnet18-eager-train", "mssar", "9.87") == [
        "README.md", "docs/measurements.md", "docs/performance.md"
    ]  # fmt: skip
    row = "| eager, batch 256, training |"
    for name, rest in (
        ("README.md", f" +{se} % | +9.87 % |"),
        ("docs/performance.md", f" +9.87 % | +{se} % |"),
        ("docs/measurements.md", f" +{before} % | +9.87 % | +{se} % | +8 %, missed |"),
    ):
        assert f"{row}{rest}\n" in (copied / name).read_text()


def test_a_number_in_a_sentence_is_written_too(copied):
    written = remeasured(copied, "all", "cases", "98_765")
    assert written == ["README.md", "docs/measurements.md"]
    for name in written:
        assert "-->98,765<!--" in (copied / name).read_text()


def test_hours_of_imagenet_follow_the_measurements(copied):
    """Twice the time of a step: twice the hours of a GPU that is fed by whatever it takes."""
    page, row = copied / "docs" / "imagenet.md", "| ResNet-34 | none |"

    def hours() -> float:
        (line,) = (x for x in page.read_text().split("_hours -->")[1].splitlines() if row in x)
        return float(line.split("|")[3])

    before = hours()
    now = tomllib.loads((copied / "records" / "costs.toml").read_text())["overhead"]
    twice = 2 * now["resnet34-train"]["without_ms"]
    assert remeasured(copied, "resnet34-train", "without_ms", f"{twice:.2f}") == [*MEASURED]
    assert hours() == pytest.approx(2 * before, abs=0.1)


def test_goals_are_those_of_the_benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    costs = tomllib.loads((ROOT / "records" / "costs.toml").read_text())
    overhead, first_step = map(importlib.import_module, ("overhead", "first_step"))
    wanted = {name: work.goal for name, work in overhead.WORKLOADS.items()}
    wanted["resnet18-eager-train-memory"] = overhead.MEMORY_GOAL
    for name, row in costs["overhead"].items():
        if name in wanted:
            assert row["goal"] == pytest.approx(100 * wanted[name]), name
    _, _, batch, size = first_step.SETTING
    for case in first_step.cases(batch, size):
        assert costs["first_step"][case.name.replace(" ", "-")].get("goal") == case.goal
    for file in (ROOT / "benchmarks").glob("*.py"):
        sys.modules.pop(file.stem, None)
