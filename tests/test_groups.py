"""Options that a verb takes as one value: typer sees each of them, the verb what they make."""

from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from mssar.lab.commands.groups import Flag, changes, grouped, options_of

seen: list[Any] = []


@dataclass(frozen=True)
class Size:
    width: Annotated[int, typer.Option(help="From side to side.", min=1)] = 3
    tall: Annotated[bool, typer.Option("--tall/--flat")] = True
    depth: Annotated[int, typer.Option()] = 5


FLAGS = {
    "drops": Flag(tuple[int, ...], "After which.", "80,120"),
    "weight_decay": Flag(float, "On all."),
    "nesterov": Flag(bool, "Or plain."),
    "area": Flag(tuple[float, float], "Share.", "0.08,1"),
}


@grouped
def verb(
    name: str,
    *,
    size: Annotated[Size, options_of(Size)],
    given: Annotated[dict[str, Any], changes(FLAGS, "Field by field")],
    last: int = 0,
) -> None:
    """What it does."""
    seen[:] = [name, size, given, last]


@grouped
def narrow(
    *,
    one: Annotated[Size, options_of(Size, "width")],
) -> None:
    seen[:] = [one]


@grouped
def flat(
    *,
    rest: Annotated[Size, options_of(Size, but="width")],
) -> None:
    seen[:] = [rest]


def call(function: Any, *words: str) -> Any:
    app = typer.Typer()
    app.command()(function)
    return CliRunner().invoke(app, list(words), catch_exceptions=True)


def test_a_verb_gets_what_its_groups_make():
    assert call(verb, "me").exit_code == 0
    assert seen == ["me", Size(), {}, 0]
    words = ["--width", "7", "--flat", "--drops", "1,2", "--no-nesterov", "--area", "0.5,1"]
    assert call(verb, "me", *words, "--weight-decay", "0", "--last", "9").exit_code == 0
    given = {"drops": (1, 2), "weight_decay": 0.0, "nesterov": False, "area": (0.5, 1.0)}
    assert seen == ["me", Size(7, False), given, 9]


def test_help_has_every_option_in_its_place():
    said = call(verb, "--help").output
    words = ["What it does.", "--width", "From side to side.", "--depth", "--last"]
    words += ["Field by field", "--drops", "--weight-decay", "--no-nesterov", "--area", "Share."]
    assert sorted(words, key=said.index) == words


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--drops", "x"), "--drops takes whole numbers, as in 80,120; got 'x'"),
        (("--area", "1"), "--area takes two numbers, as in 0.08,1; got '1'"),
    ],
)
def test_numbers_that_are_none_are_refused_with_an_example(words, message):
    assert str(call(verb, "me", *words).exception) == message


def test_a_verb_may_take_some_of_a_group():
    assert call(narrow, "--width", "2").exit_code == 0
    assert seen == [Size(2)]
    assert call(narrow, "--flat").exit_code == 2
    assert call(flat, "--flat").exit_code == 0
    assert seen == [Size(tall=False)]
    assert call(flat, "--width", "2").exit_code == 2
