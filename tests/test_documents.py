"""The documents keep their word: code runs, commands print what is shown, links lead somewhere."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCUMENTS = (README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))


class Block(NamedTuple):
    """A fenced block of a document, and the line its text begins on."""

    document: Path
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


class Command(NamedTuple):
    """A line after a ``$`` and what the document says it prints."""

    place: str
    text: str
    shown: list[str]


def blocks(document: Path, language: str) -> list[Block]:
    lines = enumerate(document.read_text(encoding="utf-8").splitlines(), 1)
    found = []
    for number, line in lines:
        if line.startswith("```"):
            body = takewhile(lambda numbered: not numbered[1].startswith("```"), lines)
            text = "\n".join(inside for _, inside in body)
            found.append(Block(document, number + 1, line.removeprefix("```"), text))
    return [block for block in found if block.language == language]


def commands() -> Iterator[Command]:
    for block in (block for document in DOCUMENTS for block in blocks(document, "console")):
        command = None
        for number, line in enumerate(block.text.splitlines(), block.line):
            if line.startswith("$ "):
                command = Command(f"{block.document.name}:{number}", line[2:], [])
                yield command
            else:
                assert command, f"{block.place}: a console block begins with a command"
                command.shown.append(line)


def prose(document: Path) -> str:
    """The document without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", document.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)


COMMANDS = list(commands())
OURS = [command for command in COMMANDS if command.text.startswith("mssar ")]


# --- code ---


def announced(block: Block) -> list[str]:
    """What the comments behind a block's prints say will be printed."""
    return re.findall(r"^ *print\(.*\)  # (.*)$", block.text, re.MULTILINE)


def execute(block: Block, namespace: dict[str, object]) -> None:
    """Run a block; tracebacks name the document and its lines."""
    try:
        code = "\n" * (block.line - 1) + block.text
        exec(compile(code, str(block.document), "exec", dont_inherit=True), namespace)
    except Exception as error:
        error.add_note(f"in the block at {block.place}")
        raise


@pytest.mark.usefixtures("running", "torchvision")  # commands run beside; a page imports it
@pytest.mark.parametrize(
    "document", [d for d in DOCUMENTS if blocks(d, "python")], ids=lambda d: str(d.name)
)
def test_code_runs_and_prints_what_its_comments_say(
    document: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(document, "python"):
        execute(block, namespace)
        assert capsys.readouterr().out.splitlines() == announced(block), block.place


def test_a_failing_block_is_named_by_file_and_line() -> None:
    block = Block(README, 40, "python", "a = 1\nraise KeyError(a)")
    with pytest.raises(KeyError) as caught:
        execute(block, {})
    assert caught.traceback[-1].path == README
    assert caught.traceback[-1].lineno + 1 == 41
    assert caught.value.__notes__ == ["in the block at README.md:40"]


# --- commands ---


def start(*arguments: str) -> "subprocess.Popen[str]":
    """Python in a process of its own: free of the shape checks, which would double the time."""
    colours = ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
    environment = {k: v for k, v in os.environ.items() if k not in colours}
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        env=environment | {"PYTHONUTF8": "1"},
    )


COUNT = """
import json, torch, mssar
from mssar.networks.registry import NETWORKS

counts = {}
with torch.device("meta"):
    for name, architecture in NETWORKS.items():
        for recalibration in ("none", "se", "mssar"):
            found = mssar.cost(mssar.create_model(name, recalibration), architecture.size)
            counts[f"{name} {recalibration}"] = found.params, found.macs
print(json.dumps(counts))
"""


@pytest.fixture(scope="module")
def running() -> Iterator[dict[str, "subprocess.Popen[str]"]]:
    """Every process that this module waits for, started together: some take a while."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # they have the other cores
    with ExitStack() as stack:
        started = {"counts": stack.enter_context(start("-c", COUNT))}
        for command in OURS:
            process = start("-m", *shlex.split(command.text, comments=True))
            started[command.place] = stack.enter_context(process)
        yield started
        for process in started.values():
            process.kill()
    torch.set_num_threads(threads)


def same(shown: list[str], printed: list[str]) -> bool:
    """Line by line, but for spaces at line ends and blank lines around; … is any lines."""
    pattern = "".join(
        r"(?:.*\n)*?" if line == "…" else re.escape(line) + r"\n" for line in _trimmed(shown)
    )
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in _trimmed(printed))) is not None


def _trimmed(lines: list[str]) -> list[str]:
    return "\n".join(line.rstrip() for line in lines).strip("\n").split("\n")


def test_output_is_compared_line_by_line() -> None:
    assert same(["", " a", "b  "], [" a  ", "b", ""])
    assert not same(["a", "b"], ["a", "", "b"])
    assert not same(["a.c"], ["abc"])
    assert same(["a", "…", "d"], ["a", "b", "c", "d"])
    assert same(["a", "…", "d"], ["a", "d"])
    assert not same(["a", "…", "d"], ["a", "b"])
    assert not same([], ["a"])


@pytest.mark.parametrize("command", OURS, ids=lambda command: command.place)
def test_command_prints_what_is_shown(
    command: Command, running: dict[str, "subprocess.Popen[str]"]
) -> None:
    process = running[command.place]
    out, err = process.communicate()
    mistaken = command.shown[:1] and command.shown[0].startswith("mssar: ")
    printed = err if mistaken else out  # progress is on stderr too
    assert same(command.shown, printed.splitlines()), (
        f"{command.place} does not show what `{command.text}` prints:\n{printed}"
    )
    assert process.returncode == (2 if mistaken else 0), err


def test_commands_ask_make_for_targets_that_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    asked = [c.text for c in COMMANDS if c.text.startswith("make ")]
    asked += [found for d in DOCUMENTS for found in re.findall(r"`(make [^`]+)`", prose(d))]
    assert {"make demo", "make test", "make docs"} <= set(asked)
    for text in asked:
        named = {word for word in shlex.split(text, comments=True)[1:] if "=" not in word}
        assert named <= targets, f"`{text}`: {named - targets} not in the Makefile"


# --- numbers, links, formulas ---

INTEGER, PERCENT = r"([\d,]+)", r"\+([\d.]+)%"
README_ROW = (
    rf"^\| `(\w+)` \| {INTEGER} → {INTEGER} \| {PERCENT} \| {INTEGER} → {INTEGER} \| {PERCENT} \|$"
)
NETWORKS_ROW = (
    rf"^\| `(\w+)` \| (\w+) \| {INTEGER} \| (?:{PERCENT})? ?\| {INTEGER} \| (?:{PERCENT})? ?\|$"
)


@pytest.fixture
def counts(running: dict[str, "subprocess.Popen[str]"]) -> dict[str, tuple[int, int]]:
    out, err = running["counts"].communicate()
    assert out, err
    return {name: tuple(found) for name, found in json.loads(out).items()}


def test_tables_of_counts_are_exact(counts: dict[str, tuple[int, int]]) -> None:
    def row(name: str, kind: str) -> tuple[str, ...]:
        cells: list[str] = []
        for own, without in zip(counts[f"{name} {kind}"], counts[f"{name} none"], strict=True):
            cells += [f"{own:,}", "" if kind == "none" else f"{100 * own / without - 100:.2f}"]
        return (name, kind, *cells)

    shown = re.findall(NETWORKS_ROW, (ROOT / "docs/networks.md").read_text("utf-8"), re.MULTILINE)
    assert shown == [row(*key.split()) for key in counts]

    brief = re.findall(README_ROW, README.read_text("utf-8"), re.MULTILINE)
    assert len(brief) >= 3
    for name, *cells in brief:
        _, _, params, _, macs, _ = row(name, "none")
        _, _, more_params, percent, more_macs, macs_percent = row(name, "mssar")
        assert cells == [params, more_params, percent, macs, more_macs, macs_percent], name


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_no_paragraph_begins_with_a_comment(document: Path) -> None:
    """It would be taken for HTML up to its end, links and all."""
    assert not re.findall(r"^<!--.*-->.+$", prose(document), re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_relative_links_lead_to_files(document: Path) -> None:
    text = prose(document)
    links = re.findall(r"\]\(([^)\s]+)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)
    assert links or document.name == "CONTRIBUTING.md", "no link was found"
    for link in links:
        if not re.match(r"[a-z]+:|#", link):
            assert (document.parent / link.split("#")[0]).is_file(), f"{document.name}: {link}"


def test_the_readme_has_code_and_the_picture_and_is_short() -> None:
    assert blocks(README, "python")
    assert "docs/assets/mssar.svg" in README.read_text("utf-8")
    assert len(README.read_text("utf-8").splitlines()) <= 150
    assert len([d for d in DOCUMENTS if blocks(d, "python")]) >= 5


@pytest.fixture(scope="module")
def mathml() -> ModuleType:
    pytest.importorskip("latex2mathml", reason="formulas need the extra docs")
    pytest.importorskip("mkdocs", reason="formulas need the extra docs")
    spec = importlib.util.spec_from_file_location("mathml", ROOT / "docs/hooks/mathml.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_formulas_become_mathml(mathml: ModuleType) -> None:
    page = mathml.replace(
        r'<p><span class="arithmatex">\(a &lt; b\)</span></p><div class="arithmatex">'
        "\n\\[\n\\frac{1}{L}\n\\]\n</div>"
    )
    assert "<mo>&#x0003C;</mo>" in page
    assert '<div class="formula" tabindex="0"><math' in page
    assert "<mfrac><mrow><mn>1</mn></mrow><mrow><mi>L</mi></mrow></mfrac>" in page
    assert "arithmatex" not in page


@pytest.mark.parametrize(
    "latex", [r"\nonsense{x}", r"\frac{1}", r"x_", r"{x", r"a & b", "", r"\begin{nothing} x"]
)
def test_what_does_not_convert_fails_the_build(mathml: ModuleType, latex: str) -> None:
    with pytest.raises(ValueError, match=r"braces|converted|unknown|lacks"):
        mathml.mathml(latex, display=True)
