"""The page's tables in Chromium: sorted, filtered, folded, and where their numbers come from."""

import json
from dataclasses import replace
from typing import Any

import pages
import pytest
from browser import DESKTOP, PHONE, column, until, violations

from mssar.lab.report.content import Page

pytestmark = pytest.mark.browser


def test_tables_sort_both_ways_and_by_number(show: Any) -> None:
    tab = show(pages.reproduction())
    table = tab.locator("#tables article").nth(1)
    numbers = [float(t) for t in column(tab, "published", 1)]
    assert numbers != sorted(numbers)
    assert sorted(map(str, numbers)) != list(map(str, sorted(numbers)))  # text would not do
    head = table.get_by_role("columnheader", name="Published, %", exact=True)
    head.get_by_role("button").focus()
    tab.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "ascending"
    assert [float(t) for t in column(tab, "published", 1)] == sorted(numbers)
    tab.keyboard.press("Space")
    assert head.get_attribute("aria-sort") == "descending"
    assert [float(t) for t in column(tab, "published", 1)] == sorted(numbers, reverse=True)
    for other in table.locator("thead button").all():
        other.click()
    assert table.locator("[aria-sort]").count() == 1


def test_what_is_missing_is_last_either_way(show: Any) -> None:
    tab = show(pages.reproduction())
    press = tab.locator("#tables article").first.locator("th[data-key=mean] button")
    for _ in range(2):
        press.click()
        assert column(tab, "mean")[-1] == "not run yet"


def test_long_tables_can_be_filtered(show: Any) -> None:
    tab = show(pages.reproduction())
    short, long = tab.locator("#tables article").all()
    assert short.locator("select").count() == 0
    long.get_by_label("Network").select_option("resnet56")
    long.get_by_label("Data set").select_option("CIFAR-100")
    assert column(tab, "network", 1) == ["resnet56"] * 3
    assert "3 of 18 rows" in long.inner_text()


def test_provenance_by_keyboard(show: Any) -> None:
    tab = show(pages.reproduction())
    opener = tab.locator(".runs").first
    opener.focus()
    tab.keyboard.press("Enter")
    dialog = tab.get_by_role("dialog")
    assert dialog.get_by_role("heading", level=3).all_inner_texts() == [
        "Seed 0",
        "Seed 1",
        "Seed 2",
    ]
    text = dialog.inner_text()
    for part in (
        "--recalibration none --seed 2",
        "Imaginary GPU",
        "sha256:",
        "commit 0123",
        "8.57 %",
    ):
        assert part in text
    assert tab.evaluate("document.activeElement.closest('dialog') !== null")
    tab.keyboard.press("Escape")
    assert dialog.count() == 0
    assert opener.evaluate("(e) => e === document.activeElement")


def test_recipes_are_lists_and_hashes_short(show: Any) -> None:
    of = pages.reproduction()
    run = of.tables[0].rows[0].runs[0]
    recipe = {"epochs": 160, "weight_decay": 1e-4, "augmentation": {"kind": "crops", "mirror": 0.5}}
    known = of.provenance | {
        run: of.provenance[run] | {"recipe": json.dumps(recipe)},
        of.tables[0].rows[0].runs[1]: {"recipe": "{not JSON"},
    }
    tab = show(replace(of, provenance=known))
    tab.locator(".runs").first.click()
    first, second, _ = tab.get_by_role("dialog").locator("section").all()
    assert first.locator("li").all_inner_texts() == [
        "epochs 160",
        "weight decay 0.0001",
        "augmentation crops, mirror 0.5",
    ]
    assert "{not JSON" in second.inner_text()
    assert first.inner_text().count(run) == 1
    assert second.inner_text().count(of.tables[0].rows[0].runs[1]) == 1
    data = of.provenance[run]["data"].removeprefix("sha256:")
    assert data not in first.inner_text()
    assert first.get_by_title(data).inner_text() == f"{data[:10]}…"
    first.get_by_role("button", name="Copy: data").click()  # or it is at least marked
    until(tab, "/Copied|Marked/.test(document.querySelector('#provenance').innerText)")


def walls() -> Page:
    """Much that has not been run: all of the second table, most of the first."""
    of = pages.reproduction()
    networks = ("resnet20", "resnet32", "resnet56")
    rows = [
        pages.open_row(network, kind, dataset)
        for network in networks
        for dataset in ("cifar10", "cifar100")
        for kind in pages.GAIN
    ]
    some = [pages.row("resnet32", "none"), *rows[:6], pages.row("resnet20", "mssar"), *rows[7:]]
    tables = (
        replace(of.tables[0], rows=tuple(some)),
        replace(of.tables[1], rows=tuple(rows)),
        replace(of.tables[1], name="short", title="Short", rows=tuple(some[:8])),
    )
    return replace(of, tables=tables, provenance=pages.provenance(tables))


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
def test_what_is_not_run_is_folded_away(show: Any, width: int) -> None:
    tab = show(walls(), width)
    run, none, short = tab.locator("#tables article").all()
    assert column(tab, "network") == ["resnet32", "resnet20"]
    assert len(column(tab, "network", 1)) == 4
    assert len(column(tab, "network", 2)) == 8  # six that have not been run are no wall
    assert short.locator(".more-rows").count() == 0
    assert none.get_by_role("button", name="Show all 18 rows").count() == 1

    press = run.locator(".more-rows")
    assert press.inner_text() == "Show all 19 rows"
    assert press.get_attribute("aria-expanded") == "false"
    press.focus()
    tab.keyboard.press("Enter")
    assert len(column(tab, "network")) == 19
    assert press.get_attribute("aria-expanded") == "true"
    press.click()
    assert len(column(tab, "network")) == 2

    run.locator("th[data-key=network] button").click()
    assert column(tab, "network") == ["resnet20", "resnet32"]
    run.get_by_label("Network").select_option("resnet56")
    assert column(tab, "network") == ["resnet56"] * 6
    assert press.is_hidden()
    run.get_by_label("Network").select_option("")
    assert len(column(tab, "network")) == 2
    none.locator("th[data-key=published] button").click()
    published = sorted(row.published or 0 for row in walls().tables[1].rows)
    shown = [float(t.split()[-1]) for t in column(tab, "published", 1)]
    assert shown == pytest.approx(published[:4], abs=0.005)  # the lowest of all, not of four
    assert violations(tab) == []


def test_all_rows_are_there_without_scripts(show: Any) -> None:
    of = walls()
    tab = show(of, java_script_enabled=False)
    for number, table in enumerate(of.tables):
        assert len(column(tab, "network", number)) == len(table.rows)
