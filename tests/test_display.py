"""What people see of runs: every number that is told, on a terminal and without one."""

import gc
import io
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from lab import tiny
from rich.console import Console
from test_records import record as made

from mssar.lab.display import Board, Both, Lines, duration, results, watching
from mssar.lab.engine.observer import Moment, Observer
from mssar.lab.recipes import CIFAR_DENSENET
from mssar.lab.records import Epoch
from mssar.lab.run import Normalisation, Run
from mssar.lab.tensorboard import Events

RUN = tiny(3, "mssar", epochs=40)
EPOCH = Epoch(7, 0.1, 1.2345, 43.21, 1.5, 45.67, 1.0, 2.0)
MOMENT = Moment(8, 30, 120, 0.98765, 4000, 2.0, 200.0)


def plain(width: int = 200) -> Console:
    return Console(file=io.StringIO(), width=width)


def said(console: Console) -> str:
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (59.4, "59s"),
        (59.6, "1m 00s"),
        (200, "3m 20s"),
        (3599.7, "1h 00m"),
        (7500, "2h 05m"),
        (86399.9, "1d 00h"),
        (4 * 86400 + 3 * 3600 + 59 * 60, "4d 03h"),
    ],
)
def test_durations_are_short_and_never_say_60(seconds, text):
    assert duration(seconds) == text


def test_lines_say_everything_once_an_epoch():
    console = plain()
    lines = Lines(console)
    lines.began(RUN, 0, Path("runs/x"))
    lines.moved(RUN, MOMENT)
    lines.passed(RUN, EPOCH, 3720.0)
    lines.ended(RUN, made())
    lines.said("[bold] is no markup here")
    first, epoch, last, message = said(console).splitlines()
    assert first == "resnet8 mssar tiny seed 3  begins  in runs/x"
    assert epoch == (
        "resnet8 mssar tiny seed 3  epoch 7/40  loss 1.2345  training error 43.21%  "
        "test error 45.67%  2,000 images/s  1h 02m left"
    )
    assert last == "resnet8 mssar tiny seed 3  finished: 40.00% error in 5s"
    assert message == "[bold] is no markup here"


def test_lines_are_heard_of_in_a_long_epoch(monkeypatch):
    monkeypatch.setattr("mssar.lab.display.HEARTBEAT", -1.0)
    console = plain()
    lines = Lines(console)
    lines.began(RUN, 5, Path("runs/x"))
    lines.moved(RUN, MOMENT)
    first, line = said(console).splitlines()
    assert first == "resnet8 mssar tiny seed 3  goes on after epoch 5  in runs/x"
    assert line == (
        "resnet8 mssar tiny seed 3  epoch 8/40  step 30/120  loss 0.9877  2,000 images/s  "
        "3m 20s left"
    )


def shown(board: Board) -> list[str]:
    console = plain()
    console.print(board.table())
    return [" ".join(line.split()) for line in said(console).splitlines() if line.strip()]


def test_the_board_has_a_row_a_run_that_keeps_up():
    other, console = tiny(4, epochs=40), plain()
    board = Board(console)
    board.began(RUN, 0, Path("a"))
    board.began(other, 20, Path("b"))
    board.passed(RUN, EPOCH, 60.0)
    board.moved(RUN, MOMENT)
    assert board.rows[RUN].share == pytest.approx((7 + 30 / 120) / 40)
    assert board.rows[other].share == pytest.approx(0.5)
    _, _, mine, its = shown(board)
    assert mine.startswith("resnet8 mssar tiny seed 3 8/40 ")
    assert mine.endswith(" 0.9877 45.67% 2,000 3m 20s")
    assert its.startswith("resnet8 none tiny seed 4 20/40 ")
    board.ended(RUN, made())
    board.failed(other, "the loss is nan")
    _, _, mine, its = shown(board)
    assert mine.endswith("done in 5s")
    assert its.endswith("stopped")
    assert said(console) == ""  # the command says why, at its end


@pytest.mark.parametrize("width", [80, 120])
def test_nothing_is_cut_off(width):
    console = plain(width)
    board = Board(console)
    long = Run("densenet100", "mssar", {"scales": (1, 2)}, "cifar100", CIFAR_DENSENET)
    for run in (RUN, long):
        board.began(run, 0, Path("a"))
        board.passed(run, EPOCH, 60.0)
        board.moved(run, MOMENT)
    console.print(board.table())
    console.print(results([made(run=RUN.as_dict()), made(run=long.as_dict())], width))
    assert "…" not in said(console)
    assert said(console).count("45.67%") == 2
    assert said(console).count("40.00%") == 2
    assert max(len(line.rstrip()) for line in said(console).splitlines()) <= width


def test_without_a_terminal_there_are_lines():
    with watching() as observer:
        assert isinstance(observer, Lines)


def test_both_hear_of_everything():
    first, second = plain(), plain()
    both = Both(Lines(first), Both(Observer(), Lines(second)))
    both.began(RUN, 0, Path("a"))
    both.moved(RUN, MOMENT)
    both.passed(RUN, EPOCH, 1.0)
    both.ended(RUN, made())
    both.failed(RUN, "why")
    both.said("something")
    assert said(first) == said(second)
    assert len(said(first).splitlines()) == 5


def test_event_files_of_a_run_that_begins_again_are_closed(tmp_path):
    """As those of a stack that came apart; one that is forgotten warns, which is an error here."""
    pytest.importorskip("tensorboard")
    with closing(Events()) as events:
        for epoch in (0, 1):
            events.began(RUN, epoch, tmp_path)
            events.passed(RUN, EPOCH, 1.0)
    gc.collect()
    assert len([*tmp_path.iterdir()]) == 2


def test_results_stand_beside_the_network_without_recalibration():
    def row(kind: str, seed: int, error: float):
        run = tiny(seed, kind).as_dict()
        return made(f"{kind}{seed}", run=run, error=error, data={"classes": 6 - (kind == "none")})

    console = plain()
    console.print(results([row("none", 0, 40.0), row("mssar", 0, 38.5), row("mssar", 1, 10.0)]))
    rows = [line.split() for line in said(console).splitlines() if "tiny" in line]
    # Of five classes, nothing is not among the first five.
    assert rows[0][:6] == ["resnet8", "none", "tiny", "0", "40.00%", "10"]
    assert rows[1][:6] == ["resnet8", "mssar", "tiny", "0", "38.50%", "-1.50"]
    assert rows[2][4:6] == ["10.00%", "0.33%"]  # nothing to compare it with


def test_results_of_other_colours_are_not_beside_each_other():
    other = replace(tiny(), normalisation=Normalisation((0.5,) * 3, (0.5,) * 3))
    console = plain()
    for none in (tiny(), other):
        runs = ((none, 40.0), (tiny(recalibration="mssar"), 38.5))
        both = [made(f"{error}", run=one.as_dict(), error=error) for one, error in runs]
        console.print(results(both))
    assert said(console).count("-1.50") == 1


@pytest.mark.parametrize("classes", [5, 6])
def test_results_have_top_5_where_one_could_be_wrong(classes):
    console = plain()
    console.print(results([made(run=RUN.as_dict(), data={"classes": classes})]))
    assert ("top-5" in said(console)) == ("0.33%" in said(console)) == (classes > 5)
