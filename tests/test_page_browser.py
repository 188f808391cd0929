"""The page as people meet it: in Chromium, by mouse, by keys alone, on a phone, in the dark."""

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pages
import pytest
from browser import DESKTOP, PHONE, column, cut_off, hover, overflow, shown, violations

from mssar.lab.report import page as report
from mssar.lab.report.content import Page

pytestmark = pytest.mark.browser


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
@pytest.mark.parametrize(
    "of", [pages.reproduction, pages.demo, pages.comparison, pages.large, pages.empty]
)
def test_opens_quietly_and_fits(show: Any, of: Callable[[], Page], width: int) -> None:
    tab = show(of(), width)
    assert tab.locator("h1").inner_text() == of().title
    assert overflow(tab) <= width
    assert cut_off(tab) == []
    tab.evaluate("document.querySelectorAll('details').forEach((d) => (d.open = true))")
    assert overflow(tab) <= width


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("of", [pages.reproduction, pages.demo, pages.comparison])
def test_axe_finds_nothing(show: Any, of: Any, scheme: str, width: int) -> None:
    assert violations(show(of(), width, scheme)) == []


def test_axe_finds_nothing_where_there_is_nothing(show: Any) -> None:
    assert violations(show(pages.empty())) == []


def test_theme_is_chosen_and_remembered(show: Any) -> None:
    tab = show(pages.demo(), scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = tab.evaluate(ground)
    line = "document.getElementById('curves-chart').innerHTML"
    drawn = tab.evaluate(line)
    tab.locator("#theme").click()
    light = tab.evaluate(ground)
    assert light != dark
    assert tab.evaluate(line) != drawn
    for _ in range(5):  # Chromium writes it down in its own time
        tab.reload()
        if tab.evaluate(ground) == light:
            break
    else:
        pytest.fail("it is dark again")


@pytest.mark.parametrize("chosen", [False, True])
def test_prints_light_and_goes_back(show: Any, chosen: bool) -> None:
    tab = show(pages.demo(), scheme="light" if chosen else "dark")
    if chosen:
        tab.locator("#theme").click()
    root = tab.locator("html")
    drawn = "document.getElementById('curves-chart').innerHTML"
    before = (root.get_attribute("data-theme"), tab.evaluate(drawn))
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    tab.emulate_media(media="print")
    ground = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == "rgb(255, 255, 255)"
    on_paper = tab.evaluate(drawn)
    assert "#1c2024" in on_paper or "#565d66" in on_paper  # ink of the light page
    assert "#a9b0b8" not in on_paper
    slider = "echarts.getInstanceByDom(document.getElementById('curves-chart'))"
    assert tab.evaluate(f"{slider}.getOption().dataZoom[1].show") is False
    tab.emulate_media(media="screen")
    tab.evaluate("dispatchEvent(new Event('afterprint'))")
    assert (root.get_attribute("data-theme"), tab.evaluate(drawn)) == before


def test_empty_texts_are_printed_too(show: Any) -> None:
    tab = show(pages.empty())
    tab.emulate_media(media="print")
    assert tab.locator("#curves .empty:visible").count() == 1


def test_page_lives_without_storage(show: Any) -> None:
    refuse = "Object.defineProperty(window, 'localStorage', { get() { throw new Error('no') } })"
    tab = show(pages.demo(), before=lambda tab: tab.add_init_script(refuse))
    tab.locator("#theme").click()
    assert tab.locator("#curves-chart svg").count() == 1


@pytest.mark.parametrize("of", [pages.reproduction, pages.demo])
def test_hostile_names_are_only_names(show: Any, of: Callable[[], Page]) -> None:
    spoilt = pages.hostile(of())
    tab = show(spoilt, width=PHONE)
    assert tab.locator("h1").inner_text() == re.sub(r"\s+", " ", spoilt.title).strip()
    first = spoilt.tables[0].rows[0]
    assert tab.locator("tbody .network").first.text_content() == first.network
    assert tab.locator("main script, main img:not([src^='data:'])").count() == 0
    curve = max(spoilt.curves, key=lambda c: c.going)  # the first, if none is on its way
    tab.evaluate("document.querySelectorAll('details').forEach((d) => (d.open = true))")
    label = curve.label.replace("mssar", "MS-SAR")
    assert label in tab.locator("#curves table.small").text_content()
    said = hover(tab, "curves-chart", 3, curve.mean["test_error"][2])
    assert re.search(r"alert|constructor", said)
    point = spoilt.points[0]
    assert point.network.split()[0] in hover(tab, "points-chart", point.macs, point.error)
    tab.locator(".runs").first.click()
    dialog = tab.get_by_role("dialog")
    assert pages.HOSTILE[2] in dialog.inner_text()
    assert f"Seed {pages.HOSTILE[1]}" in dialog.inner_text()
    assert overflow(tab) <= PHONE
    assert tab.evaluate("document.scripts.length") == 5


def test_a_comparison_is_sorted_opens_its_runs_and_has_its_colours(show: Any) -> None:
    tab = show(pages.comparison(), width=PHONE)
    tab.get_by_role("button", name="Error, %").click()
    assert tab.locator("tbody th").first.inner_text() == "MS-SAR"
    hues = "[...document.querySelectorAll('.plane .point')].map((g) => getComputedStyle(g).fill)"
    assert len(set(tab.evaluate(hues))) == len(pages.KINDS)
    tab.locator(".comparison .runs").first.click()
    assert "mssar compare" in tab.get_by_role("dialog").inner_text()


def test_tables_can_be_read_without_scripts(show: Any) -> None:
    of = pages.reproduction()
    tab = show(of, java_script_enabled=False)
    text = tab.locator("body").inner_text()
    assert "8.67 ± 0.21 (n=3)" in text
    assert "holds, beyond chance" in text
    assert "scripts are off" in text
    assert tab.locator("table").count() == len(of.tables)
    assert tab.locator(".figure:visible").count() == 0
    assert tab.locator("#theme").is_hidden()


@pytest.mark.parametrize("kind", ["reproduction", "demo"])
def test_empty_sections_name_the_command(show: Any, kind: str) -> None:
    tab = show(pages.empty(kind))
    assert tab.locator(".figure:visible").count() == 0
    said = " ".join(tab.locator(".empty:visible").all_inner_texts())
    assert ("mssar demo" if kind == "demo" else "mssar bench resnet20 --records") in said


class Server(ThreadingHTTPServer):
    """The page and its news, as `mssar report` would serve them."""

    page: Page
    unchanged = 0

    def answer(self, path: str) -> tuple[str, str] | None:
        if path == "/":
            return "text/html; charset=utf-8", report.html(self.page)
        return ("application/json", report.news(self.page)) if path == "/data.json" else None


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        found = self.server.answer(self.path)
        kind, body = found or ("text/plain", "")
        tag = f'"{hashlib.sha256(body.encode()).hexdigest()}"'
        same = found is not None and self.headers.get("If-None-Match") == tag
        self.server.unchanged += same
        self.send_response(304 if same else 200 if found else 404)
        self.send_header("ETag", tag)
        self.send_header("Content-Type", kind)
        self.end_headers()
        if not same:
            self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def test_live_page_takes_news_and_keeps_choices(show: Any, server: Server) -> None:
    first = replace(pages.reproduction(), live=True)
    late = tuple(pages.open_row("resnet32", kind) for kind in pages.GAIN) * 3
    folded = replace(first.tables[1], rows=(*first.tables[1].rows, *late))
    first = replace(first, tables=(first.tables[0], folded))
    server.page = first
    tab = show(f"http://127.0.0.1:{server.server_port}/", before=lambda tab: tab.clock.install())
    article = tab.locator("#tables article").first
    article.locator("th[data-key=published] button").click()
    assert len(column(tab, "network", 1)) == 18
    tab.locator(".more-rows").click()
    assert tab.locator("#curves").get_by_label("Data set").input_value() == "cifar100"
    tab.locator("#scale").get_by_label("2×2").check()
    article.locator("th[data-key=mean] button").focus()
    assert "epoch 43 of 160" in tab.locator("#curves-note").inner_text()
    assert tab.locator("#news").inner_text() == "live"

    table = first.tables[0]
    more = replace(table, rows=(*table.rows, pages.row("resnet32", "none")))
    going = pages.curve("resnet20", "mssar", "cifar100", done=44)
    new = pages.curve("resnet56", "mssar", "cifar100", options="scales=1,2", done=7)
    server.page = replace(
        first,
        tables=(more, *first.tables[1:]),
        curves=(*first.curves[:-1], going, pages.curve("resnet56", "mssar", "cifar100"), new),
        findings=("Something `new`.",),
        differences=first.differences[:2],
    )
    tab.clock.fast_forward(3100)
    tab.locator("#news", has_text=re.compile(r"^updated \d\d:\d\d:\d\d$")).wait_for()
    assert "epoch 44 of 160" in tab.locator("#curves-note").inner_text()
    said = hover(tab, "curves-chart", 44, going.mean["test_error"][43])
    assert f"{shown(going.mean['test_error'][43])} %" in said
    published = [float(t) for t in column(tab, "published")]
    assert len(published) == 7
    assert published == sorted(published)
    assert tab.locator("#findings").inner_text() == "Something new."
    assert tab.locator("#differences > figure > svg .ours").count() == 2
    assert len(column(tab, "network", 1)) == 27
    assert tab.locator("#progress").inner_text() == "24 of 34 results so far"
    chip = tab.get_by_role("button", name="resnet56 MS-SAR, scales=1,2")
    assert chip.get_attribute("aria-pressed") == "true"  # it is on its way, so it is shown
    assert tab.locator("#curves").get_by_label("resnet56", exact=True).is_checked()
    assert tab.locator("#scale").get_by_label("2×2").is_checked()
    assert tab.evaluate("document.activeElement.closest('th').dataset.key") == "mean"

    before = server.unchanged
    for _ in range(50):
        tab.clock.fast_forward(3100)
        tab.wait_for_timeout(50)
        if server.unchanged > before:  # asked by ETag, and told that nothing has changed
            break
    else:
        pytest.fail("the page does not ask whether anything has changed")


def test_news_are_as_the_page_has_them(server: Server) -> None:
    server.page = pages.demo()
    kind, body = server.answer("/data.json") or ("", "")
    assert kind == "application/json"
    assert set(json.loads(body)) == {"page", "tables", "differences"}
