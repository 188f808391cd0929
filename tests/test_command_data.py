"""``mssar data`` as its user meets it."""

import io
import re

import pytest
from cifar_files import Sample
from download_site import Site, archive, nowhere, offer, serving
from rich.console import Console
from typer.testing import CliRunner, Result

from mssar.lab.commands import data
from mssar.lab.data import cifar, fetch, places


def run(*words: object) -> Result:
    return CliRunner().invoke(data.app, [str(word) for word in words])


def lines(text: str) -> list[str]:
    """Without the tables' spaces."""
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


@pytest.fixture(autouse=True)
def _offline(monkeypatch, tmp_path):
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("PATH", str(tmp_path / "no programs"))
    monkeypatch.setattr(fetch, "PAUSES", (0.0,))
    monkeypatch.setattr(fetch, "SOURCES", {})
    monkeypatch.delenv(places.VARIABLE, raising=False)


@pytest.fixture
def sample(monkeypatch):
    made = Sample("cifar10")
    monkeypatch.setitem(cifar.LAYOUTS, "cifar10", made.layout)
    return made


def test_get_prints_the_place_and_tells_the_rest_apart(tmp_path, sample, monkeypatch):
    site = Site(archive(sample))
    monkeypatch.setattr(fetch, "SCHEMES", ("http",))  # it has no certificate
    with serving(site) as url:
        offer(monkeypatch, url, site.content)
        first = run("get", "cifar10", "--data-dir", tmp_path)
        second = run("get", "cifar10", "--data-dir", tmp_path)
    assert (first.exit_code, second.exit_code) == (0, 0)
    assert first.stdout == second.stdout == f"{tmp_path / 'cifar-10-batches-bin'}\n"
    assert first.stderr.splitlines()[0].startswith("cifar-10-binary.tar.gz ")
    assert second.stderr == "CIFAR-10 is there already, and good\n"
    assert site.requests == [None]


def test_get_without_the_site_says_what_to_do_in_one_line(tmp_path, monkeypatch):
    offer(monkeypatch, nowhere(), b"", "cifar100")
    result = run("get", "cifar100", "--data-dir", tmp_path)
    assert isinstance(result.exception, ValueError)
    (line,) = str(result.exception).splitlines()
    assert line.endswith(f"into {tmp_path} by hand")


def test_the_environment_names_the_folder(tmp_path, sample, monkeypatch):
    sample.write(tmp_path, "python packed")
    monkeypatch.setenv(places.VARIABLE, str(tmp_path))
    result = run("check", "cifar10")
    assert result.exit_code == 0
    assert lines(result.stdout)[-1] == f"as known: {tmp_path / 'cifar-10-python.tar.gz'}"


def test_check_shows_what_is_known_and_what_was_found(tmp_path, sample):
    sample.write(tmp_path, "binary")
    result = run("check", "cifar10", "--data-dir", tmp_path)
    assert result.exit_code == 0
    said = lines(result.stdout)
    assert "training images a class 5 5 ok" in said
    mean = f"{sample.layout.mean[0]:.3f}"
    assert f"mean red {mean} {mean} ok" in said


def test_a_check_that_fails_is_status_one_after_its_table(tmp_path, sample):
    sample.labels["test"][sample.labels["test"] == 0] = 1
    folder = sample.write(tmp_path, "binary")
    result = run("check", "cifar10", "--data-dir", tmp_path)
    assert result.exit_code == 1
    said = lines(result.stdout)
    assert "test images a class 1 0 to 2 differs" in said
    assert "training images a class 5 5 ok" in said
    assert said[-1] == f"not as known: {folder}"


def test_list_says_what_is_there_and_how_to_get_the_rest(tmp_path, sample):
    rows = {line.split()[0]: line for line in lines(run("list", "--data-dir", tmp_path).stdout)}
    assert rows["cifar10"] == "cifar10 no mssar data get cifar10"
    assert rows["arrangements"] == "arrangements yes made by the program, nothing to fetch"
    assert rows["imagefolder"].startswith("imagefolder no your own pictures: a tree train/CLASS/*")
    assert rows["looked"] == f"looked in {tmp_path}"
    folder = sample.write(tmp_path, "binary")
    for split in ("train", "val"):
        (tmp_path / "ilsvrc2012" / split).mkdir(parents=True)
    said = run("list", "--data-dir", tmp_path).stdout
    rows = {line.split()[0]: line for line in lines(said)}
    assert rows["cifar10"].startswith("cifar10 yes 0 MB")
    assert rows["ilsvrc2012"].startswith("ilsvrc2012 yes")
    assert rows["imagefolder"].startswith("imagefolder no")
    assert str(folder) in re.sub(r"\s", "", said)


@pytest.mark.parametrize("verb", ["get", "check"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cifar11", "no data set 'cifar11' of this kind; there are cifar10, cifar100"),
        ("imagefolder", "imagefolder: your own pictures: a tree train/CLASS/*"),
        ("ilsvrc2012", "ilsvrc2012: ImageNet, from image-net.org: a tree train/CLASS/*"),
    ],
)
def test_what_cannot_be_fetched_or_checked_is_one_line(tmp_path, verb, name, message):
    result = run(verb, name, "--data-dir", tmp_path)
    assert isinstance(result.exception, ValueError)
    (line,) = str(result.exception).splitlines()
    assert line.startswith(message)
    assert list(tmp_path.iterdir()) == []


def test_what_the_program_makes_needs_no_fetching():
    result = run("get", "arrangements")
    assert (result.exit_code, result.stdout) == (
        0,
        "arrangements: made by the program, nothing to fetch\n",
    )


@pytest.mark.parametrize("verb", ["get", "check", "list"])
def test_help_has_an_example_and_the_option(verb):
    result = run(verb, "--help")
    assert result.exit_code == 0
    assert f"mssar data {verb}" in result.output
    assert "--data-dir" in result.output


def test_without_a_terminal_there_is_a_line_now_and_then():
    stream, now = io.StringIO(), [0.0]
    with data.Meter(Console(file=stream, width=20), lambda: now[0]) as meter:
        for second in range(12):
            now[0] = float(second)
            meter("an archive with a long name", second * 10_000_000, 170_000_000)
        meter("unpacking", 0, 6)
        meter("npm", 0, None)
        meter.say("a [path] that is longer than the line")
    assert stream.getvalue().splitlines() == [
        "an archive with a long name 0 of 170 MB",
        "an archive with a long name 50 of 170 MB",
        "an archive with a long name 100 of 170 MB",
        "unpacking 0 of 6",
        "npm",
        "a [path] that is longer than the line",
    ]


def test_on_a_terminal_there_is_a_bar_that_goes_away():
    stream = io.StringIO()
    with data.Meter(Console(file=stream, force_terminal=True, width=80)) as meter:
        meter("archive", 85_000_000, 170_000_000)
        meter.bar.refresh()
        meter("unpacking", 3, 6)
        meter.bar.refresh()
        assert [task.description for task in meter.bar.tasks] == ["unpacking"]
    shown = stream.getvalue()
    assert "85 of 170 MB" in shown
    assert "3 of 6" in shown
    assert shown.endswith("\x1b[2K")  # the line is cleared


def test_a_place_that_is_a_file_is_a_mistake(tmp_path):
    file = tmp_path / "file"
    file.touch()
    result = run("list", "--data-dir", file)
    assert isinstance(result.exception, ValueError)
    assert str(result.exception) == f"{file} is a file; name the folder that holds the data sets"
