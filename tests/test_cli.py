"""The command as its user meets it."""

import json
import os
import signal
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from test_records import record
from typer.testing import CliRunner

import mssar
from mssar.lab import cli, experiments
from mssar.lab.commands import reproduce
from mssar.lab.data import cifar, places
from mssar.lab.experiments import counts


def run(*words: str) -> str:
    result = CliRunner().invoke(cli.app, list(words))
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result.stdout


def fail(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    """The one line that a mistake is answered with."""
    monkeypatch.setattr(sys, "argv", ["mssar", *words])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    said = capsys.readouterr()
    assert stop.value.code == 2
    assert said.out == ""
    (line,) = said.err.splitlines()
    return line


def test_cost_shows_the_total_and_the_recalibrations_share():
    lines = run("cost", "resnet20", "--recalibration", "mssar").splitlines()
    by_name = {line.split()[0]: line.split()[1:] for line in lines if line.split()}
    assert by_name["total"] == ["306,530", "41,032,928"]
    assert by_name["recalibration"] == ["34,056", "(+12.50%)", "219,744", "(+0.54%)"]
    assert by_name["layer3.2.recalibrate"] == ["MSSAR", "8,574", "56,448"]
    assert "layer3.2.conv1" not in by_name
    deep = run("cost", "resnet20", "--depth", "3")
    assert "layer3.2.conv1" in deep


def test_cost_passes_every_option_on():
    words = ("--recalibration", "mssar", "--scales", "2,3", "--reduction", "2", "--stage", "single")
    said = run("cost", "densenet100", *words, "--classes", "7", "--size", "16", "--json")
    network = mssar.create_model(
        "densenet100", "mssar", 7, scales=(2, 3), reduction=2, stage="single"
    )
    found = json.loads(said)
    expected = mssar.cost(network, (3, 16, 16))
    assert (found["params"], found["macs"]) == (expected.params, expected.macs)
    assert found["modules"][0]["name"] == "conv1"
    slid = json.loads(
        run("cost", "resnet20", "--recalibration", "mssar", "--strategy", "sliding", "--json")
    )
    assert slid["macs"] > 41_032_928


def test_cost_of_the_paper_shows_both_numbers_and_remarks(monkeypatch):
    # A part of the tables; the documentation shows all of it, and is tested to.
    monkeypatch.setattr(counts, "TABLE3", counts.TABLE3[:6])
    monkeypatch.setattr(counts, "TABLE4", counts.TABLE4[:2])
    monkeypatch.setattr(counts, "ILSVRC2012", counts.ILSVRC2012[-1:])
    said = run("cost", "--paper")
    shown = [" ".join(line.split()) for line in said.splitlines()]
    assert "3 resnet20 mssar 1,2,4 3 0.28 M 0.28 M +0.00 40.9 M 40.9 M +0.0 2" in shown
    assert "3 resnet56 none 0.85 M 0.86 M +0.01 125.7 M 125.7 M +0.0 4" in shown
    assert "4 resnet56 mssar 1 3 0.89 M 125.7 M 125.8 M +0.1 2" in shown
    assert "4 the paper's table of architectures has 135.7 M, a misprint" in shown
    alone = run("cost", "resnet56", "--paper").splitlines()
    rows = [" ".join(line.split()) for line in alone if line.split()[:1] in (["3"], ["4"])]
    of_all = [line.rpartition(" ")[0] for line in shown if " resnet56 " in line]
    assert [row.rpartition(" ")[0] for row in rows if " resnet56 " in row] == of_all
    assert " resnet20 " not in "".join(alone)
    found = json.loads(run("cost", "--paper", "--json"))
    assert len(found) == 6 + 3 + 2 + 1 + 1  # and MS-SAR on CIFAR ResNets at two reductions
    expected = {"published": 280_000.0, "ours": 284_768, "difference": 4_768.0}
    assert found[2]["params"] == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("cost",), "name a network (resnet8, "),
        (("cost", "resnet8", "--paper"), "tables have no resnet8; they have resnet20, "),
        (("cost", "resnet21", "--paper"), "tables have no resnet21; they have resnet20, "),
        (
            ("cost", "resnet20", "--paper", "--depth", "2"),
            "--paper fixes the networks and takes no ",
        ),
        (("cost", "resnet21"), "no network 'resnet21'; there are resnet8, "),
        (("cost", "timm:resnet18"), "timm:resnet18 is not one of resnet8, "),
        (
            ("cost", "resnet20", "--scales", "1,2"),
            "its options: there are none",
        ),
        (("cost", "resnet20", "--recalibration", "mssar", "--scales", "1,x"), "got '1,x'"),
        (("cost", "resnet20", "--recalibration", "mssar", "--scales", "1,1"), "got (1, 1)"),
        (("cost", "resnet20", "--recalibration", "cbma"), "got 'cbma'"),
        (("cost", "resnet20", "--size", "0"), "C, H, W of one image"),
        (("cost", "resnet20", "--classes", "-1"), "got -1"),
        (
            ("cost", "--paper", "--scales", "1,2"),
            "--paper fixes the networks and takes no --scales",
        ),
        (("cost", "--paper", "--recalibration", "se"), "no --recalibration; it takes --json"),
        (("cost", "densenet100", "--size", "2"), "densenet100 cannot take images of 2×2: "),
        (("cost", "resnet20", "--size", "abc"), "Invalid value for '--size'"),
        (("cost", "resnet20", "--depth", "-1"), "Invalid value for '--depth'"),
        (("cost", "resnet20", "--foo"), "No such option: --foo"),
        (("cost", "resnet20", "resnet32"), "unexpected extra argument"),
        (("foo",), "No such command 'foo'"),
    ],
)
def test_a_mistake_is_one_line(capsys, monkeypatch, words, message):
    assert message in fail(capsys, monkeypatch, *words)


@pytest.mark.parametrize("words", [(), ("--help",), ("cost", "--help")])
def test_help_has_an_example_and_every_option(words):
    said = CliRunner().invoke(cli.app, list(words)).output
    assert "Usage:" in said
    if "cost" in words:
        assert "mssar cost resnet20 --recalibration mssar" in said
        for option in ("--scales", "--strategy", "--reduction", "--stage", "--paper", "--json"):
            assert option in said


@pytest.mark.parametrize("verb", ["train", "compare", "reproduce", "explain", "export", "demo"])
def test_help_flows(verb):
    """A line ends where the next word would not fit, or its paragraph or an example does."""
    width = 60
    said = CliRunner().invoke(cli.app, [verb, "--help"], env={"COLUMNS": f"{width}"}).output
    words = said.partition("\n")[2].partition("╭")[0]  # below the usage, above the options
    lines = [line.strip() for line in words.splitlines()]
    assert f"mssar {verb}" in words
    prose = lines[: next(at for at, line in enumerate(lines) if line.startswith("mssar "))]
    assert len(prose) > 3
    for line, below in pairwise(prose):
        if line and below:
            assert len(f"{line} {below.split()[0]}") > width - 2, line


def test_examples_keep_their_lines_without_colours_too():
    done = subprocess.run(
        [sys.executable, "-m", "mssar", "compare", "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "TYPER_USE_RICH": "0", "COLUMNS": "60"},
    )
    examples = [x for x in done.stdout.splitlines() if x.startswith("  mssar compare ")]
    assert len(examples) == 3
    assert "\b" not in done.stdout


def test_success_is_status_zero(monkeypatch, capsys):
    for words, expected in (((), "Usage: mssar"), (("cost", "resnet20"), "272,474")):
        monkeypatch.setattr(sys, "argv", ["mssar", *words])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert not stop.value.code
        assert expected in capsys.readouterr().out


def test_the_version_is_the_packages():
    assert run("--version").startswith(f"mssar {mssar.__version__}, torch ")


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        (torch.OutOfMemoryError("CUDA: none left.\nSee also"), "CUDA: none left."),
        (RuntimeError("[enforce fail] can't allocate memory: 12 TB\n"), "[enforce fail] can't"),
        (MemoryError(), "out of memory"),
    ],
)
def test_want_of_memory_is_one_line_of_any_kind(monkeypatch, capsys, trouble, said):
    def app(**_):
        raise trouble

    monkeypatch.setattr(cli, "app", app)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"mssar: {said}")
    assert line.endswith("; a smaller --batch or --fleet needs less")


def test_the_module_runs_as_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "mssar", "cost", "resnet20", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)["params"] == 272_474


def test_help_is_shown_in_any_encoding():
    done = subprocess.run(
        [sys.executable, "-m", "mssar", "train", "--help"],
        capture_output=True,
        check=True,
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
    )
    assert "--time-budget" in done.stdout.decode("latin-1")
    assert done.stderr == b""


def test_help_and_typos_are_answered_without_torch():
    """Which takes seconds to import."""
    program = """
import sys

sys.modules["torch"] = None  # an import of it fails
from mssar.__main__ import main

helped = "|data|data get|data check|data list|demo|train|eval|weights|explain|export|reproduce|"
helped += "compare|report|cost|bench"
mistakes = "tarin|train resnet20 --foo|data chekc"
asked = [f"{words} --help" for words in helped.split("|")] + mistakes.split("|")
for words in asked:
    sys.argv = ["mssar", *words.split()]
    try:
        main()
    except SystemExit as stop:
        print(words, "→", stop.code)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    ends = [line for line in done.stdout.splitlines() if " → " in line]
    assert len(ends) == 19, done.stderr
    assert all(line.endswith("--help → 0") for line in ends[:16]), done.stderr
    assert all(line.endswith(" → 2") for line in ends[16:])
    assert done.stdout.count("Usage: mssar") == 16
    assert len(done.stderr.splitlines()) == 3


def test_the_words_of_help_are_those_of_the_lab():
    """Some are written down again, since what has them needs torch."""
    assert tuple(experiments.EXPERIMENTS) == reproduce.EXPERIMENTS
    said = run("data", "check", "--help")
    assert f"{' or '.join(cifar.LAYOUTS)}." in said
    assert f"${places.VARIABLE}" in said


# What stands for a module, says that it is reached, and takes its time.
SLOW = """
import time

def wait(*_):
    print("here", flush=True)
    time.sleep(60)
"""
SWALLOWED = """
try:
    wait()
except BaseException:
    pass
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals are others there")
@pytest.mark.parametrize(
    ("module", "rest", "words"),
    [
        ("typer", "wait()", ("cost", "resnet20")),
        ("torch", SWALLOWED, ("cost", "resnet20")),
        ("webbrowser", "open = wait", ("report", "a.jsonl", "--no-maps", "--open")),
    ],
)
def test_ctrl_c_is_one_line_however_early(tmp_path, module, rest, words):
    """While the command is imported, while torch is, and in a verb."""
    (tmp_path / f"{module}.py").write_text(SLOW + rest)
    (tmp_path / "a.jsonl").write_text(record().as_line())
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a child would ignore it too
    with subprocess.Popen(
        [sys.executable, "-m", "mssar", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), *sys.path))},
    ) as process:
        while process.stdout.readline() not in ("here\n", ""):
            pass
        signal.signal(signal.SIGINT, before)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 130, said
    assert said == "mssar: interrupted\n"


@pytest.mark.parametrize("name", ["typer", "filelock", "torch"])
def test_without_the_lab_the_command_says_what_to_install(tmp_path, name):
    (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError(name={name!r})")
    done = subprocess.run(
        [sys.executable, "-m", "mssar", "cost", "resnet20"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), *sys.path))},
    )
    assert done.returncode == 1
    advice = "pip install '.[lab]' in a clone of mssar"
    assert done.stderr == f"mssar: the command needs {name}: {advice}\n"
