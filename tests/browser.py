"""Chromium for the tests of the page.

Every test fails on any error in the console and on any request that leaves the page.
"""

import contextlib
import importlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mssar.lab.report import page as report
from mssar.lab.report.content import Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DESKTOP, PHONE = 1280, 390


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    lack = pytest.fail if os.environ.get("MSSAR_BROWSER") == "required" else pytest.skip
    try:
        playwright = importlib.import_module("playwright.sync_api")
    except ImportError:
        lack("playwright is not installed")
    with playwright.sync_playwright() as driver:
        own = driver.chromium.executable_path
        places = [os.environ.get("CHROMIUM"), *map(shutil.which, NAMES), own]
        found = next((place for place in places if place and Path(place).exists()), None)
        if found is None:
            lack(f"no Chromium: neither $CHROMIUM nor {', '.join(NAMES)} nor Playwright's")
        browser = driver.chromium.launch(executable_path=found)
        yield browser
        browser.close()


@pytest.fixture
def show(chromium: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Opens a page from its file, or from an address, and watches what it does."""
    wrong: list[str] = []

    def opened(of: Page | str, width: int = DESKTOP, scheme: str = "light", **more: Any) -> Any:
        if isinstance(of, Page):
            place = tmp_path / "report.html"
            place.write_text(report.html(of), encoding="utf-8")
            address = origin = place.as_uri()
        else:
            address = origin = of
        before = more.pop("before", None)
        context = contexts.enter_context(
            chromium.new_context(
                viewport={"width": width, "height": 900},
                color_scheme=scheme,
                reduced_motion="reduce",
                **more,
            )
        )

        def watch(request: Any) -> None:
            if not request.url.split("#")[0].startswith((origin, "data:")):
                wrong.append(f"asked for {request.url}")

        context.on("request", watch)
        if isinstance(of, Page):  # a route would also turn off the cache, which news rely on
            own = re.compile(f"^(?!{re.escape(origin)})")
            context.route(own, lambda asked: asked.abort())
        tab = context.new_page()
        tab.set_default_timeout(5000)
        bad = ("error", "warning")
        tab.on("console", lambda m: wrong.append(m.text) if m.type in bad else None)
        tab.on("pageerror", lambda e: wrong.append(str(e)))
        tab.on("dialog", lambda d: (wrong.append(f"dialog: {d.message}"), d.dismiss()))
        if before:
            before(tab)
        tab.goto(address)
        return tab

    with contextlib.ExitStack() as contexts:
        yield opened
    assert wrong == []


def chart_at(tab: Any, chart: str, x: float, y: float) -> tuple[float, float]:
    """Where a figure has a value, in the window."""
    found = tab.evaluate(
        """([id, x, y]) => {
          const element = document.getElementById(id);
          element.scrollIntoView({ block: "center", behavior: "instant" });
          const at = echarts.getInstanceByDom(element)
            .convertToPixel({ xAxisIndex: 0, yAxisIndex: 0 }, [x, y]);
          const box = element.getBoundingClientRect();
          return [box.left + at[0], box.top + at[1]];
        }""",
        [chart, x, y],
    )
    return found[0], found[1]


def until(tab: Any, true: str) -> None:
    """Wait for an expression. Playwright's own waiting is a script, which the page forbids."""
    for _ in range(250):
        if tab.evaluate(true):
            return
        tab.wait_for_timeout(20)
    pytest.fail(f"still not so: {true}")


def hover(tab: Any, chart: str, x: float, y: float) -> str:
    """What the figure says there."""
    left, top = chart_at(tab, chart, x, y)
    tab.mouse.move(left - 3, top - 3)
    tab.mouse.move(left, top)
    said = tab.locator(f"#{chart} .tip")
    said.wait_for()
    return str(said.inner_text())


def shown(value: float, places: int = 2) -> str:
    """A number as the page has it, which is rounded to five digits before."""
    return f"{float(f'{value:.5g}'):.{places}f}"


def overflow(tab: Any) -> int:
    return int(tab.evaluate("document.scrollingElement.scrollWidth"))


def cut_off(tab: Any) -> list[str]:
    """Words of figures that reach out of them."""
    found = tab.evaluate(
        """() => [...document.querySelectorAll("svg")].flatMap((svg) => {
          const edge = svg.getBoundingClientRect();
          const outside = (text) => {
            const box = text.getBoundingClientRect();
            return box.width > 0 && (box.right > edge.right + 1 || box.left < edge.left - 1);
          };
          return [...svg.querySelectorAll("text")].filter(outside).map((text) => text.textContent);
        })"""
    )
    return [str(words) for words in found]


def violations(tab: Any) -> list[str]:
    """What axe has against the page, unfolded, and against the dialog in front of it."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    only = {"resultTypes": ["violations"]}
    tab.evaluate("document.querySelectorAll('details').forEach((d) => (d.open = true))")
    found = axe.run(tab, options=only).response["violations"]
    if tab.locator(".runs").count():
        tab.locator(".runs").first.click()
        found += axe.run(tab, "#provenance", only).response["violations"]
    return [f"{v['id']}: {[n['html'][:200] for n in v['nodes']]}" for v in found]


def column(tab: Any, key: str, table: int = 0) -> list[str]:
    rows = tab.locator("#tables article").nth(table).locator("tbody tr:visible")
    return [str(t) for t in rows.locator(f".{key}").all_inner_texts()]
