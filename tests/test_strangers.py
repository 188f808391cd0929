"""Records from strangers: whatever stands in any of their fields, or in a file's name, is text."""

import json
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from test_experiments import record_of, run_of
from test_records import record
from test_timings import timing

from mssar.lab import records
from mssar.lab.report import build
from mssar.lab.report import page as report
from mssar.lab.report.collect import collect

MARK = "stranger"
HOSTILE = (
    f"<script>alert('{MARK}')</script>",
    f'"><img src=x onerror="alert(1)" title={MARK}>',
    f"</script></style><svg onload=alert(2)>{MARK}",
    f"' onfocus='alert(3)' autofocus='{MARK}",
    f"`{MARK}`<a href=javascript:alert(4)>x</a>&lt;b&gt;\u2028",
)


def spoilt(value: Any, text: str) -> Iterator[Any]:
    """The value with one of its texts, or of its objects' names, exchanged at a time."""
    if isinstance(value, str):
        yield text
    elif isinstance(value, dict):
        for name, inner in value.items():
            for other in spoilt(inner, text):
                yield value | {name: other}
        yield value | {text: text}
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            for other in spoilt(inner, text):
                yield [*value[:place], other, *value[place + 1 :]]


class Elements(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: set[str] = set()
        self.scripts = 0
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.scripts += tag == "script"
        for name, value in attrs:
            self.attributes.add(name)
            if name in ("href", "src", "action", "srcdoc", "formaction"):
                self.addresses.append(value or "")


def given(folder: Path, texts: tuple[str, ...] = HOSTILE) -> tuple[int, int]:
    """Files with every field spoilt in turn; how many lines are records, and how many are not."""
    name = "<img src=x onerror=alert(5)> & 'name'.jsonl"
    good = bad = 0
    lines = []
    for text in texts:
        for one in (record(), record_of(run_of(), 8.75)):
            for number, found in enumerate(spoilt(json.loads(one.as_line()), text)):
                if isinstance(found["id"], str) and MARK not in found["id"]:
                    found["id"] = f"{found['id']}-{number}-{len(lines)}"
                line = json.dumps(found)
                try:
                    records.parse(line)
                    good += 1
                except ValueError:
                    bad += 1
                lines.append(line)
        lines += map(json.dumps, spoilt(json.loads(timing().as_line()), text))
        lines.append(text)
    (folder / name).write_text("\n".join(lines))
    odd = folder / "<svg onload=alert(6)>"
    odd.mkdir()
    (odd / "epoch-0001.safetensors").write_bytes(b"<script>alert(7)</script>")
    (odd / "record.json").write_text("<script>alert(8)</script>")
    return good, bad


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder = tmp_path_factory.mktemp("records")
    good, bad = given(folder)
    assert good > 100
    assert bad > 20
    clean = tmp_path_factory.mktemp("clean")
    for one in (record(), record_of(run_of(), 8.75)):
        records.append(clean / "a.jsonl", one)
    (clean / "b.jsonl").write_text(f"{timing().as_line()}\nno record\n")
    return tuple(build.reproduction(collect([place])) for place in (folder, clean))


def test_what_strangers_write_is_text(page):
    spoilt_page, clean_page = page
    text = report.html(spoilt_page)
    found, clean = Elements(text), Elements(report.html(clean_page))
    assert text.count(MARK) > 200  # it is there
    assert len(spoilt_page.problems) > 20
    assert found.names - clean.names <= {"br", "small", "code", "li", "ul"}
    assert not {name for name in found.attributes if name.startswith("on") or name == "style"}
    assert found.scripts == clean.scripts == 5
    assert {a.partition(":")[0] for a in found.addresses if ":" in a} <= {"data"}
    assert not {"autofocus", "title"} & (found.attributes - clean.attributes)
    told = json.loads(report.news(spoilt_page))
    assert Elements(told["tables"]).scripts == 0
    assert Elements(told["tables"]).names <= found.names


@pytest.mark.browser
def test_and_a_browser_thinks_so_too(tmp_path, show):
    """Every test there fails on a dialog, an error in the console, and a request elsewhere."""
    folder = tmp_path / "given"
    folder.mkdir()
    given(folder, HOSTILE[1:3])
    tab = show(build.reproduction(collect([folder])))
    tab.evaluate("document.querySelectorAll('details').forEach((d) => (d.open = true))")
    assert (
        tab.locator("main script, main img:not([src^='data:']), main a[href^='java']").count() == 0
    )
    assert tab.evaluate("document.scripts.length") == 5
    assert tab.locator("#curves-chart svg").count() == 1
    tab.locator(".runs").first.click()
    assert MARK in tab.locator("body").text_content()
