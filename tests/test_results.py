"""The pages that quote results, against the records; and ImageNet's, against measurements."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "docs/results.md", "src/mssar/lab/report/assets/words.toml")
MEASURED = ("docs/imagenet.md", "docs/performance.md", "docs/measurements.md", "tools/imagenet.py")


def write_results(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    tool = root / "tools" / "write-results"
    return subprocess.run([sys.executable, tool, *words], capture_output=True, text=True)


@pytest.fixture
def copied(tmp_path):
    for name in (*PAGES, *MEASURED, "tools/write-results", "records/table3.jsonl"):
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
    assert (copied / "docs" / "assets" / "courses.svg").read_text().count("<path") > 20


def test_hours_of_imagenet_follow_the_measurements(copied):
    """Twice the time of a step: twice the hours of a GPU that is fed by whatever it takes."""
    page, manual = copied / "docs" / "imagenet.md", copied / "docs" / "performance.md"
    row = "| ResNet-34 | none |"

    def hours() -> float:
        (line,) = (x for x in page.read_text().split("_hours -->")[1].splitlines() if row in x)
        return float(line.split("|")[3])

    before = hours()
    manual.write_text(manual.read_text().replace("| 20.77 |", "| 41.54 |"))
    done = write_results(copied, "--check")
    assert (done.returncode, done.stderr.split()[0]) == (1, "docs/imagenet.md")
    assert write_results(copied).returncode == 0
    assert hours() == pytest.approx(2 * before, abs=0.1)
