"""The pages that quote results, against the records."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "docs/results.md", "src/mssar/lab/report/assets/words.toml")


def write_results(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    tool = root / "tools" / "write-results"
    return subprocess.run([sys.executable, tool, *words], capture_output=True, text=True)


@pytest.fixture
def copied(tmp_path):
    for name in (*PAGES, "tools/write-results", "records/table3.jsonl"):
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
