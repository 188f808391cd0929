"""The page's figures in Chromium: what they say, how they zoom, what their controls change."""

import base64
from dataclasses import replace
from typing import Any

import pages
import pytest
from browser import chart_at, hover, shown, until

from mssar.lab.report.content import Grid, Page

pytestmark = pytest.mark.browser


def finished(**changes: Any) -> Page:
    """With no run on its way, and of one data set."""
    of = pages.reproduction()
    curves = tuple(c for c in of.curves if not c.going)
    return replace(of, curves=curves, **changes)


def test_the_deepest_network_is_shown_first_where_its_curves_part(show: Any) -> None:
    more = [
        pages.curve(network, kind, "cifar100")
        for network in ("resnet56", "resnet20")
        for kind in pages.GAIN
    ]
    tab = show(replace(finished(), curves=(*finished().curves, *more)))
    curves = tab.locator("#curves")
    assert curves.get_by_label("Data set").input_value() == "cifar100"
    assert curves.get_by_label("resnet56", exact=True).is_checked()
    assert not curves.get_by_label("resnet20", exact=True).is_checked()
    assert extent(tab)[0] == "epochs 81–160"
    curves.get_by_label("resnet20", exact=True).check()
    assert extent(tab)[0] == "epochs 81–160"
    curves.get_by_role("button", name="Reset zoom").click()
    curves.get_by_label("Data set").select_option("cifar10")
    assert extent(tab)[0] == "epochs 1–160"


@pytest.mark.parametrize(("of", "epochs"), [(pages.reproduction, 160), (pages.demo, 12)])
def test_of_what_is_being_trained_and_in_the_demo_all_is_shown(
    show: Any, of: Any, epochs: int
) -> None:
    assert extent(show(of()))[0] == f"epochs 1–{epochs}"


def test_curve_says_its_values(show: Any) -> None:
    of = finished()
    tab = show(of)
    tab.get_by_label("resnet20", exact=True).check()
    tab.get_by_label("resnet56", exact=True).uncheck()
    tab.get_by_role("button", name="Reset zoom").click()
    plain, _, mssar = of.curves[:3]
    for epoch in (5, 100):
        value = plain.mean["test_error"][epoch - 1]
        said = hover(tab, "curves-chart", epoch, value)
        assert f"Epoch {epoch}" in said
        for curve in (plain, mssar):
            low, high = (side["test_error"][epoch - 1] for side in (curve.low, curve.high))
            assert f"{shown(curve.mean['test_error'][epoch - 1])} %" in said
            assert f"{shown(low)} … {shown(high)}" in said
    assert "One run only, so no band: SE." in tab.locator("#curves-note").inner_text()


def test_what_is_being_trained_is_shown(show: Any) -> None:
    of = pages.reproduction()
    more = [
        pages.curve("resnet56", "mssar", "cifar100"),
        pages.curve("resnet56", "mssar", "cifar100", options="reduction=3", done=9),
    ]
    tab = show(replace(of, curves=(*of.curves, *more)))
    curves = tab.locator("#curves")
    assert curves.get_by_label("Data set").input_value() == "cifar100"
    pressed = curves.locator(".chip[aria-pressed=true]").all_inner_texts()
    assert pressed == ["resnet20 MS-SAR", "resnet56 MS-SAR", "resnet56 MS-SAR, reduction=3"]
    assert "resnet56 MS-SAR, reduction=3 (epoch 9 of 160)" in tab.inner_text("#curves-note")


def test_axes_stay_when_nothing_is_chosen(show: Any) -> None:
    tab = show(finished())
    curves = tab.locator("#curves")
    pressed = curves.locator(".chip[aria-pressed=true]")
    while pressed.count():
        pressed.first.click()
    tab.get_by_role("button", name="Reset zoom").click()
    words, ticks = extent(tab)
    assert words == "epochs 1–160"
    assert {"160", "100", "0"} <= set(ticks)
    curves.get_by_label("loss", exact=True).check()
    curves.get_by_label("log", exact=True).check()
    assert "160" in extent(tab)[1]
    assert not [t for t in extent(tab)[1] if "N" in t or "e" in t.replace("epoch", "")]


def test_curves_can_be_chosen(show: Any) -> None:
    of = pages.reproduction()
    tab = show(of)
    curves = tab.locator("#curves")
    curves.get_by_label("Data set").select_option("cifar10")
    curves.get_by_label("resnet56", exact=True).check()
    curves.get_by_label("training", exact=True).check()
    curves.get_by_label("loss", exact=True).check()
    curves.get_by_label("log", exact=True).check()
    said = hover(tab, "curves-chart", 50, of.curves[0].mean["test_loss"][49])
    for name in ("resnet20 none, testing", "resnet56 MS-SAR, training"):
        assert name in said
    assert shown(of.curves[5].mean["train_loss"][49], 4) in said
    chip = curves.get_by_role("button", name="resnet20 MS-SAR, scales=1,2")
    assert chip.get_attribute("aria-pressed") == "false"
    chip.click()
    assert chip.get_attribute("aria-pressed") == "true"
    curves.get_by_label("Data set").select_option("cifar100")
    assert "epoch 43 of 160" in tab.locator("#curves-note").inner_text()
    curves.locator("summary").click()
    assert "43 of 160" in curves.locator("table.small").inner_text()


def extent(tab: Any) -> tuple[str, list[str]]:
    """The epochs that are shown, in words and on the axis."""
    ticks = tab.evaluate(
        "[...document.querySelectorAll('#curves-chart svg text')].map((t) => t.textContent)"
    )
    return tab.locator("#epochs").inner_text(), ticks


@pytest.mark.parametrize(
    ("epochs", "inwards", "least", "last"),
    [(160, ["41–120", "61–100", "71–90"], "79–80", "121–160"), (8, ["3–6"], "4–5", "7–8")],
)
def test_zoom_is_exact(show: Any, epochs: int, inwards: list[str], least: str, last: str) -> None:
    of = replace(pages.demo(), curves=(pages.curve("resnet20", "none", epochs=epochs),))
    tab = show(of)

    def press(name: str) -> str:
        tab.get_by_role("button", name=name).click()
        return tab.locator("#epochs").inner_text().removeprefix("epochs ")

    found = [press("Zoom in") for _ in inwards]
    assert found == inwards
    outwards = [press("Zoom out") for _ in inwards]
    assert outwards == [*inwards[-2::-1], f"1–{epochs}"]
    assert press("Zoom out") == f"1–{epochs}"
    found = [press("Zoom in") for _ in range(8)]
    assert found[-1] == found[-2] == least
    assert press("Last quarter") == last
    assert press("Last quarter") == last
    count = epochs // 4
    assert press("Zoom out") == f"{epochs - 2 * count + 1}–{epochs}"
    assert press("Reset zoom") == f"1–{epochs}"


def test_zoom_and_back(show: Any) -> None:
    of = finished()
    tab = show(of)
    reset = tab.get_by_role("button", name="Reset zoom")
    reset.click()
    whole = extent(tab)
    assert whole[0] == "epochs 1–160"

    tab.get_by_role("button", name="Last quarter").click()
    last = extent(tab)
    assert last[0] == "epochs 121–160"
    assert last[1] != whole[1]
    reset.click()
    assert extent(tab) == whole

    left, top = chart_at(tab, "curves-chart", 80, 30)
    tab.mouse.move(left, top)
    tab.mouse.wheel(0, -1)  # scrolls the page, no more
    assert extent(tab) == whole
    left, top = chart_at(tab, "curves-chart", 80, 30)
    tab.mouse.click(left, top)
    tab.mouse.wheel(0, -400)
    until(tab, "document.getElementById('epochs').textContent !== 'epochs 1–160'")
    assert extent(tab)[1] != whole[1]
    reset.click()
    assert extent(tab) == whole

    box = tab.locator("#curves-chart").bounding_box()
    left, _ = chart_at(tab, "curves-chart", 1, 30)
    half, _ = chart_at(tab, "curves-chart", 80, 30)
    box = tab.locator("#curves-chart").bounding_box()
    bottom = box["y"] + box["height"] - 18
    tab.mouse.move(left, bottom)
    tab.mouse.down()
    tab.mouse.move(half, bottom, steps=5)
    tab.mouse.up()
    until(tab, "/^epochs (79|8.)–160$/.test(document.getElementById('epochs').textContent)")


def test_cost_and_time_say_their_values(show: Any) -> None:
    of = pages.reproduction()
    tab = show(of)
    ours = next(p for p in of.points if not p.published and p.network == "resnet32")
    said = hover(tab, "points-chart", ours.macs, ours.error)
    assert "resnet32, none" in said
    assert f"{ours.error:.2f} ± 0.20 %" in said
    tab.locator("#points summary").click()
    assert "69.1 M" in tab.locator("#points table.small").inner_text()
    tab.locator("#points").get_by_label("training time").check()
    of_plain = {"network": "resnet20", "recalibration": "none"}
    spent = next(t for t in of.times if of_plain.items() <= vars(t).items())
    plain = next(
        p for p in of.points if (of_plain | {"published": False}).items() <= vars(p).items()
    )
    assert spent.what == "training"
    micro = 1000 * spent.ms / spent.batch
    said = hover(tab, "points-chart", micro, plain.error)
    assert f"{float(f'{micro:.3g}'):g}" in said
    assert spent.hardware in said
    assert "µs an image, training" in tab.locator("#points table.small").inner_text()
    times = tab.locator("#times")
    times.get_by_label("Hardware").select_option("two imaginary cores")
    times.get_by_label("inference").check()
    times.locator("summary").click()
    slow = next(t for t in of.times[12:] if t.what == "inference" and t.recalibration == "mssar")
    assert f"{slow.ms:.4g} (" in times.locator("table.small").inner_text()
    head = times.locator("table.small thead th").all_inner_texts()
    assert [h.split()[0] for h in head] == ["Network", "Ratio", "ms", "Batch", "Images", "Measured"]
    drawn = tab.locator("#times-chart svg").evaluate("(s) => s.textContent")
    assert f"{slow.ratio:.2f} ×" in drawn


AT = "document.getElementById('overlay').getContext('2d').getImageData({}, {}, 1, 1).data"


def pixels(tab: Any) -> str:
    return str(tab.evaluate("document.getElementById('overlay').toDataURL()"))


def begin_with_the_first_block(tab: Any) -> None:
    tab.locator("#scale").get_by_label("all").check()
    tab.locator("#channel").get_by_label("mean").check()
    tab.get_by_label("Block", exact=True).focus()
    tab.keyboard.press("Home")


def test_the_block_with_most_to_see_is_shown_first(show: Any) -> None:
    of = pages.reproduction()
    flat, lively = (grid(4, [100] * 16), grid(4, [100] * 15 + [120]))
    explained = of.explained[0]
    images = [
        replace(
            seen,
            maps=tuple(
                ((lively if i == 5 else flat, *m[0][1:]), *m[1:]) for i, m in enumerate(seen.maps)
            ),
        )
        for seen in explained.images
    ]
    tab = show(replace(of, explained=(replace(explained, images=tuple(images)),)))
    shown = f"Block {explained.blocks[5].name} (stage 2, 6 of 9)"
    assert shown in tab.locator("#shown").inner_text()


def test_a_block_is_counted_among_all_of_the_network_not_among_those_shown(show: Any) -> None:
    of = pages.reproduction()
    kept = [0, 2, 3, 5, 6, 8]
    explained = replace(
        of.explained[0],
        blocks=tuple(of.explained[0].blocks[i] for i in kept),
        images=tuple(
            replace(seen, maps=tuple(seen.maps[i] for i in kept)) for seen in of.explained[0].images
        ),
    )
    tab = show(replace(of, explained=(explained,)))
    knob = tab.get_by_label("Block", exact=True)
    knob.focus()
    tab.keyboard.press("End")
    told = "9 of 9; 6 shown"
    assert f"Block layer3.2 (stage 3, {told})" in tab.locator("#shown").inner_text()
    assert knob.get_attribute("aria-valuetext") == f"layer3.2, {told}"


def test_that_colours_are_stretched_is_said_beside_them(show: Any) -> None:
    tab = show(pages.demo())
    beside = tab.locator(".stage").inner_text()
    assert "from the smallest to the largest weight of this block and channel, not from 0" in beside


def grid(side: int, values: list[int]) -> Grid:
    return Grid(side, side, base64.b64encode(bytes(values)).decode())


def test_overlay_follows_its_controls(show: Any) -> None:
    of = pages.reproduction()
    tab = show(of)
    until(tab, f"{AT.format(9, 9)}[3] === 255")  # the picture is there
    maps = tab.locator("#maps")
    begin_with_the_first_block(tab)
    seen = {pixels(tab)}
    said = {maps.locator("#shown").inner_text()}

    def changed() -> None:
        tab.wait_for_timeout(30)
        assert pixels(tab) not in seen
        seen.add(pixels(tab))
        assert maps.locator("#shown").inner_text() not in said
        said.add(maps.locator("#shown").inner_text())

    maps.get_by_role("button", name="Next block").click()
    changed()
    maps.get_by_label("Block", exact=True).focus()
    tab.keyboard.press("ArrowRight")
    changed()
    assert "layer1.2" in maps.locator("#shown").inner_text()
    scale = maps.locator("#scale")
    scale.get_by_label("all").focus()
    tab.keyboard.press("ArrowRight")
    changed()
    assert "scale 1×1" in maps.locator("#shown").inner_text()
    assert "everywhere" in maps.locator("#shown").inner_text()
    scale.get_by_label("2×2").check()
    changed()
    maps.get_by_label("#11").check()
    changed()
    maps.locator("#pictures").get_by_role("radio").nth(2).check()
    tab.wait_for_timeout(100)
    changed()
    assert "taken for" in maps.locator("#shown").inner_text()
    maps.get_by_label("Opacity").focus()
    before = pixels(tab)
    tab.keyboard.press("Home")
    assert pixels(tab) != before


def test_overlay_has_the_colours_of_its_bytes(show: Any) -> None:
    of = pages.reproduction()
    tab = show(of)
    begin_with_the_first_block(tab)
    tab.get_by_label("Opacity").focus()
    tab.keyboard.press("End")
    found = tab.evaluate(f"[...{AT.format(200, 70)}]")
    ramp = tab.evaluate(
        "[...document.getElementById('ramp').getContext('2d').getImageData(0, 0, 256, 1).data]"
    )
    grid = of.explained[0].images[0].maps[0][0][0]
    byte = base64.b64decode(grid.values)[1]  # 200 of 512 is in the second of four columns
    assert found == ramp[4 * byte : 4 * byte + 4]
    canvas = tab.locator("#overlay")
    box = canvas.bounding_box()
    canvas.hover(position={"x": box["width"] * 0.4, "y": box["height"] * 0.1})
    low, high = of.explained[0].blocks[0].ranges[0]
    weight = low + byte / 255 * (high - low)
    assert f"{weight:.2f}" in tab.locator("#probe").inner_text()
    assert tab.locator("#bar-low").inner_text() == f"{low:.2f}"
    tab.get_by_label("#11").check()
    ends = [tab.locator(f"#bar-{end}").inner_text() for end in ("low", "high")]
    assert ends == [f"{end:.2f}" for end in of.explained[0].blocks[0].ranges[2]]


def test_every_picture_is_shown_at_every_scale(show: Any) -> None:
    of = pages.reproduction()
    tab = show(of)
    until(tab, f"{AT.format(9, 9)}[3] === 255")
    begin_with_the_first_block(tab)
    entries = tab.locator("#gallery figure")
    images = of.explained[0].images
    assert entries.locator("figcaption").all_inner_texts() == [
        f"{seen.label}, named correctly"
        if seen.guess == seen.label
        else f"{seen.label}, taken for {seen.guess}"
        for seen in images
    ]
    assert entries.first.locator("span").all_inner_texts() == [
        *("picture", "all", "1×1", "2×2", "4×4")
    ]
    tab.get_by_label("Opacity").focus()
    tab.keyboard.press("End")  # then a region has the colour of its weight
    tab.get_by_label("Block", exact=True).focus()
    tab.keyboard.press("ArrowRight")
    tab.get_by_label("#11").check()
    ramp = tab.evaluate(
        "[...document.getElementById('ramp').getContext('2d').getImageData(0, 0, 256, 1).data]"
    )
    for number, seen in enumerate(images):
        for place, grid in enumerate(seen.maps[1][2]):
            middles = []  # of regions, among 256×256 pixels, which all take seconds to hand over
            for i in range(grid.width**2):
                row, column = divmod(i, grid.width)
                y, x = (256 * (2 * at + 1) // (2 * grid.width) for at in (row, column))
                middles.append(4 * (256 * y + x))
            found = tab.evaluate(
                """([number, place, middles]) => {
                  const figure = document.querySelectorAll("#gallery figure")[number];
                  const to = figure.querySelectorAll("canvas")[place].getContext("2d");
                  const pixels = to.getImageData(0, 0, 256, 256).data;
                  return middles.map((at) => [...pixels.slice(at, at + 4)]);
                }""",
                [number, place, middles],
            )
            values = base64.b64decode(grid.values)
            assert found == [ramp[4 * byte : 4 * byte + 4] for byte in values]


def test_the_same_network_on_other_data_is_another_and_each_has_its_note(show: Any) -> None:
    of = pages.reproduction()
    first = replace(of.explained[0], note="The first has `code`.")
    second = replace(pages.explained(images=2), dataset="cifar100", note="Another.")
    tab = show(replace(of, explained=(first, second)))
    which, note = tab.locator("#maps-which"), tab.locator("#maps-note")
    assert which.locator("label").all_inner_texts() == [
        "resnet20 MS-SAR, seed 0 on CIFAR-10",
        "resnet20 MS-SAR, seed 0 on CIFAR-100",
    ]
    assert note.inner_text() == "The first has code."
    assert note.locator("code").inner_text() == "code"
    assert tab.locator("#gallery figure").count() == 4
    which.get_by_role("radio").nth(1).check()
    assert note.inner_text() == "Another."
    assert tab.locator("#gallery figure").count() == 2
    assert "on CIFAR-100" in tab.locator("#shown").inner_text()
