"""The page as text: what is in it, and that nothing in the data can get out of its place."""

import json
import math
import re
from base64 import b64encode
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from html.parser import HTMLParser
from importlib.resources import files

import pages
import pytest

from mssar.lab.report import page
from mssar.lab.report.content import Claim, Page
from mssar.lab.report.tables import WEIGHT_DECAY


class Reader(HTMLParser):
    """Elements with their attributes and the text straight inside them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None], str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        if self.found:
            tag, attrs, text = self.found[-1]
            self.found[-1] = (tag, attrs, text + data)

    def all(self, *tags: str) -> list[tuple[str, dict[str, str | None], str]]:
        return [element for element in self.found if element[0] in tags]


PAGES = {
    "reproduction": pages.reproduction,
    "demo": pages.demo,
    "comparison": pages.comparison,
    "empty": pages.empty,
    "hostile comparison": lambda: pages.hostile(pages.comparison()),
    "hostile": lambda: pages.hostile(pages.reproduction()),
    "live": lambda: replace(pages.demo(), live=True),
}


@pytest.fixture(params=PAGES)
def made(request: pytest.FixtureRequest) -> tuple[Page, str]:
    of = PAGES[request.param]()
    return of, page.html(of)


def policy(text: str) -> dict[str, list[str]]:
    metas = Reader(text).all("meta")
    content = next(a["content"] for _, a, _ in metas if "http-equiv" in a)
    return {name: rest for name, *rest in (part.split() for part in (content or "").split("; "))}


def test_policy_names_the_scripts_and_the_style_that_are_there(made: tuple[Page, str]) -> None:
    of, text = made
    allowed = policy(text)
    inlined = re.findall(r"<script>(.*?)</script>", text, re.S)
    hashes = [f"'sha256-{b64encode(sha256(s.encode()).digest()).decode()}'" for s in inlined]
    assert allowed["script-src"] == hashes
    assert len(hashes) == 3
    [style] = re.findall(r"<style>(.*?)</style>", text, re.S)
    assert allowed["style-src"] == [
        f"'sha256-{b64encode(sha256(style.encode()).digest()).decode()}'"
    ]
    assert allowed["default-src"] == ["'none'"]
    assert allowed["connect-src"] == ["'self'" if of.live else "'none'"]


def test_markup_has_no_attribute_that_the_policy_would_stop(made: tuple[Page, str]) -> None:
    for _, attributes, _ in Reader(made[1]).found:
        assert not [name for name in attributes if name.startswith("on") or name == "style"]


def test_nothing_is_asked_from_elsewhere(made: tuple[Page, str]) -> None:
    for tag, attributes, _ in Reader(made[1]).found:
        for name in ("src", "href", "action", "poster", "data", "srcset"):
            address = attributes.get(name) or ""
            assert not address or address.startswith(("#", "data:")), (tag, address)
    assert "@import" not in made[1]
    assert not re.search(r"url\(\s*['\"]?(?!data:|#)\w+:", made[1].split("<script>")[0])


def test_data_is_the_page_and_news_is_the_same(made: tuple[Page, str]) -> None:
    of, text = made
    [inlined] = [t for _, a, t in Reader(text).all("script") if a.get("id") == "data"]
    assert not set(inlined) & set("<>&\u2028\u2029")
    data = json.loads(inlined)
    news = json.loads(page.news(of))
    assert news["page"] == data
    assert news["tables"] == page.tables(of)
    assert news["tables"] in text
    assert news["differences"] in text
    assert data["title"] == of.title
    assert [t["name"] for t in data["tables"]] == [t.name for t in of.tables]


def test_numbers_have_five_digits_and_are_numbers() -> None:
    first = pages.curve("resnet20", "none", epochs=4)
    lost = replace(first, mean=first.mean | {"test_loss": [math.nan, math.inf, 1 / 3, 20.0]})
    text = page.news(replace(pages.empty(), curves=(lost,)))
    assert '"test_loss":[null,null,0.33333,20]' in text
    assert "NaN" not in text


def test_same_page_same_text(made: tuple[Page, str]) -> None:
    assert page.html(made[0]) == made[1]


@pytest.mark.parametrize("of", [pages.reproduction, pages.comparison])
def test_hostile_text_stays_text(of: Callable[[], Page]) -> None:
    text = page.html(pages.hostile(of()))
    tame = page.html(of())
    kinds = [[tag for tag, _, _ in Reader(t).found] for t in (text, tame)]
    for tag in {"script", "img", "table", "tr", "button", "li", "style", "g", "text"}:
        assert kinds[0].count(tag) == kinds[1].count(tag), tag
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text


def test_half_characters_of_file_names_do_no_harm() -> None:
    of = replace(pages.empty(), problems=("records/\udcff.jsonl",))
    assert page.html(of).encode()
    assert page.news(of).encode()


def test_tables_say_it_in_words() -> None:
    text = page.tables(pages.reproduction())
    rows = re.findall(r"<tr [^>]*data-row.*?</tr>", text, re.S)
    plain = [re.sub(r"\s+", " ", re.sub("<.*?>", " ", row)) for row in rows]
    assert "8.67 ± 0.21 (n=3)" in plain[0]
    assert "8.17 (n=1)" in plain[1]
    assert "too few runs to say" in plain[1]
    assert "holds, beyond chance" in plain[2]
    assert "0.90 ± 0.31 below resnet20 none; published: 1.00" in plain[2]
    assert plain[4].count("not run yet") == 2
    assert "3 more runs would give every row three seeds." in text
    first, second = text.split("</article>")[:2]
    assert "Top-5" not in first
    assert "Data set</th>" not in first
    assert "Top-5" in second
    assert "Data set</th>" in second
    assert "Published" not in page.tables(pages.demo())


def test_labels_have_names_as_people_write_them() -> None:
    of = pages.reproduction()
    claim = Claim("resnet20 mssar scales=1, se", 0.1, None, None, "open")
    rows = (replace(pages.open_row("resnet20", "mssar"), claim=claim),)
    text = page.tables(replace(of, tables=(replace(of.tables[0], rows=rows),)))
    assert "against resnet20 MS-SAR scales=1, SE; published" in text


def test_a_remark_leads_to_the_documentation_only_beside_it() -> None:
    of = pages.reproduction()
    remark = WEIGHT_DECAY
    rows = (replace(of.tables[0].rows[2], remark=remark), *of.tables[0].rows[3:])
    of = replace(of, tables=(replace(of.tables[0], rows=rows),))
    linked = f'<a href="results-paper.html#a-larger-weight-decay">{remark}</a>'
    assert linked in page.html(of, home="index.html")
    assert linked not in page.html(of)
    assert f'<td role="cell" class="remark" data-value="{remark}">{remark}' in page.html(of)
    rows = (replace(rows[0], remark=f"its own; {remark}"), *rows[1:])
    of = replace(of, tables=(replace(of.tables[0], rows=rows), *of.tables[1:]))
    assert f">its own; {linked}<" in page.html(of, home="index.html")


def test_differences_are_said_to_those_who_do_not_see_them() -> None:
    of = pages.reproduction()
    text = page.html(of)
    [(_, figure, _)] = [e for e in Reader(text).all("svg") if "aria-labelledby" in e[1]]
    titles = {a["id"]: t for _, a, t in Reader(text).all("title", "desc") if "id" in a}
    assert list(titles) == (figure["aria-labelledby"] or "").split()
    assert "resnet56 on CIFAR-100 against resnet56 none: 0.90 ± 0.31, the paper 1.00" in " ".join(
        titles.values()
    )
    assert text.count('class="paper"') == text.count('class="ours"') == len(of.differences) + 1
    assert '<figure class="differences"' not in page.html(pages.demo())


def test_progress_counts_the_papers_results() -> None:
    of = pages.reproduction()
    others = replace(of.tables[1], name="others")
    text = page.html(replace(of, tables=(of.tables[0], others)))
    assert "5 of 6 results so far" in text
    assert 'max="6" value="5"' in text
    assert "results so far" not in re.sub(
        "<script.*?</script>", "", page.html(pages.demo()), flags=re.S
    )


@pytest.mark.parametrize("kind", ["reproduction", "demo", "comparison"])
def test_empty_page_says_what_would_fill_it(kind: str) -> None:
    text = page.html(pages.empty(kind))
    commands = ["mssar reproduce table3", "mssar report records runs"]
    own = {"demo": ["mssar demo"], "comparison": ["mssar compare"]}
    for command in own.get(kind, commands):
        assert f"<code>{command}</code>" in text


def test_large_page_stays_small() -> None:
    of = pages.large()
    assert sum(len(t.rows) for t in of.tables) == 100
    assert len(of.curves) == 60
    assert len(page.html(of).encode()) < 3_000_000


def test_bundle_has_its_licence_and_its_size() -> None:
    bundle = (files("mssar.lab.report") / "assets" / "echarts.min.js").read_text("utf-8")
    assert len(bundle.encode()) < 600_000
    assert bundle.startswith("/*!")
    for holder in ("Apache Software Foundation", "Baidu", "Mike Bostock", "Apache License"):
        assert holder in bundle[:3000]
    assert "</script" not in bundle
