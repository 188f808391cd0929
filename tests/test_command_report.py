"""``mssar report`` as its users meet it, and the page that is served."""

import json
import socket
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from lab import Log, arrays, opened, tiny, trained
from test_cli import fail
from test_experiments import record_of, run_of
from test_records import changed
from typer.testing import CliRunner

from mssar.lab import cli, data, records
from mssar.lab.commands import demo as demo_command
from mssar.lab.engine import runner
from mssar.lab.recipes import DEMO, varied
from mssar.lab.report import build, page
from mssar.lab.report.collect import collect
from mssar.lab.report.phrases import wording
from mssar.lab.report.serve import Server, Source


@pytest.fixture(autouse=True)
def _small(monkeypatch, tmp_path):
    monkeypatch.setattr(data, "load", lambda _name, _data_dir=None: arrays(37, 24, 10))
    monkeypatch.chdir(tmp_path)


def invoke(*words):
    return CliRunner().invoke(cli.app, list(words))


def page_of(file):
    """The data in a page."""
    text = Path(file).read_text()
    _, _, rest = text.partition('<script type="application/json" id="data">')
    return json.loads(rest.partition("</script>")[0])


def put(*made):
    for one in made:
        records.append(Path("records/table3.jsonl"), one)


def test_a_page_is_made_of_what_lies_here():
    put(record_of(run_of(), 8.75), record_of(run_of(recalibration="mssar"), 7.5))
    result = invoke("report")
    assert result.exit_code == 0, result.output
    assert result.output == "report.html: 2 records\n"
    page = page_of("report.html")
    assert page["kind"] == "reproduction"
    rows = [row for row in page["tables"][0]["rows"] if row["n"]]
    assert [row["mean"] for row in rows] == [8.75, 7.5]
    assert rows[1]["claim"]["gain"] == 1.25
    assert {curve["label"] for curve in page["curves"]} == {"resnet20 none", "resnet20 mssar"}
    assert page["provenance"].keys() == {run for row in rows for run in row["runs"]}
    assert not page["live"]


def test_what_cannot_be_read_is_said_and_the_rest_is_shown():
    put(record_of(run_of(), 8.75))
    with Path("records/table3.jsonl").open("a") as file:
        file.write(changed(schema=9) + "\n" + '{"half')
    result = invoke("report")
    assert result.exit_code == 0
    problems = [line for line in result.stderr.splitlines() if line.startswith("mssar: ")]
    assert [line.partition(": ")[2].partition(":")[0] for line in problems] == [
        "records/table3.jsonl, line 2",
        "records/table3.jsonl, line 3",
    ]
    page = page_of("report.html")
    assert page["problems"] == [line.removeprefix("mssar: ") for line in problems]
    assert any(row["mean"] == 8.75 for row in page["tables"][0]["rows"])


def test_where_nothing_can_be_read_the_page_says_so():
    Path("records").mkdir()
    Path("records/x.jsonl").write_text("{")
    result = invoke("report")
    assert result.exit_code == 1
    assert "report.html: nothing was found to show" in result.output
    assert len(page_of("report.html")["problems"]) == 1


def test_what_layers_see_is_shown_of_runs_that_are_here():
    made = trained(tiny(recalibration="mssar"), arrays(37, 24, 10), Path("runs/one"))
    assert invoke("report", "runs", "-o", "with.html").exit_code == 0
    assert invoke("report", "runs", "-o", "without.html", "--no-maps").exit_code == 0
    (seen,) = page_of("with.html")["explained"]
    assert seen["label"].startswith("resnet8 mssar")
    assert page_of("without.html")["explained"] == []
    other = page_of("with.html")["tables"][-1]
    assert other["name"] == "others"
    assert other["rows"][0]["runs"] == [made.id]


def test_data_that_are_missing_cost_the_maps_alone(monkeypatch):
    trained(tiny(recalibration="mssar"), arrays(37, 24, 10), Path("runs/one"))

    def load(*_):
        raise ValueError("tiny is not here: mssar data get tiny")

    monkeypatch.setattr(data, "load", load)
    result = invoke("report", "runs")
    assert result.exit_code == 0
    assert "what its layers see is not shown: tiny is not here" in result.stderr
    assert page_of("report.html")["tables"][-1]["rows"][0]["n"] == 1


def test_the_demo_leaves_a_page(monkeypatch):
    quick = varied(DEMO, epochs=1, drops=())
    monkeypatch.setattr(demo_command, "DEMO", quick)
    monkeypatch.setattr(demo_command, "SECONDS", 0.01)
    result = invoke("demo")
    assert result.exit_code == 0, result.output
    assert "page:    runs/demo/report.html" in result.output
    page = page_of("runs/demo/report.html")
    assert page["kind"] == "demo"
    assert [row["recalibration"] for row in page["tables"][0]["rows"]] == ["none", "se", "mssar"]
    labels = [seen["label"] for seen in page["explained"]]
    *real, one, other = page["explained"]
    for label, seen, dataset in zip(labels, real, ("cifar10", "cifar100"), strict=False):
        assert (label, seen["dataset"]) == ("resnet56 mssar, seed 0", dataset)
        assert len(seen["images"]) == 10
        assert f"resnet56-mssar-{dataset}" in seen["note"]
    own = (one, other)
    here = [f"resnet8 {kind} epochs=1 drops=, seed 0" for kind in ("mssar", "se")]
    assert labels[2:] == here
    assert all("real" not in seen["note"] for seen in own)
    assert len(page["curves"]) == 3
    timed = [(t["what"], t["recalibration"]) for t in page["times"]]
    kinds = ("none", "se", "mssar")
    assert timed == [(what, kind) for what in ("training", "inference") for kind in kinds]
    assert page["times"][0]["ratio"] == 1
    place = Path("runs/demo/timings.jsonl")
    before = place.read_text()
    place.unlink()
    monkeypatch.setattr(demo_command, "SECONDS", 50.0)
    assert invoke("demo", "--time-budget", "2m").exit_code == 0
    assert not place.exists()  # it would take five minutes
    place.write_text(before)
    assert invoke("demo").exit_code == 0
    assert Path("runs/demo/timings.jsonl").read_text() == before  # measured once


def test_the_demo_shows_the_real_effect_before_it_trains(monkeypatch):
    """On the console and as a page; one that is there already stays."""

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "carry_out", interrupted)
    result = invoke("demo")
    said = wording()["demo"]["headline"]
    assert said in " ".join(result.stderr.split("\n"))
    page = page_of("runs/demo/report.html")
    assert page["findings"] == [said]
    assert [(one["dataset"], one["claim"]["against"]) for one in page["differences"]] == [
        *(("cifar10", "none"), ("cifar10", "se"), ("cifar100", "none"), ("cifar100", "se")),
    ]
    assert [seen["dataset"] for seen in page["explained"]] == ["cifar10", "cifar100"]
    file = Path("runs/demo/report.html")
    assert '<figure class="differences">' in file.read_text()
    file.write_text("another")
    invoke("demo")
    assert file.read_text() == "another"


def test_mistakes_are_answered_in_a_line(capsys, monkeypatch):
    said = fail(capsys, monkeypatch, "report")
    assert said.startswith("mssar: there is neither records nor runs here")
    said = fail(capsys, monkeypatch, "report", "nowhere")
    assert said == "mssar: there is no nowhere; name files of records, or folders"
    put(record_of(run_of(), 8.75))
    said = fail(capsys, monkeypatch, "report", "-o", "no/such/page.html")
    assert said == "mssar: there is no folder no/such for page.html"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = fail(capsys, monkeypatch, "report", "--serve", "--port", str(port))
    assert said == f"mssar: port {port} is in use; --port 0 takes any that is free"


def test_a_page_that_cannot_be_written_leaves_the_old_one(monkeypatch):
    put(record_of(run_of(), 8.75))
    Path("report.html").write_text("old")

    def broken(_page):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(page, "html", broken)
    assert isinstance(invoke("report").exception, OSError)
    assert Path("report.html").read_text() == "old"
    assert {path.name for path in Path().iterdir()} == {"records", "report.html"}


@pytest.mark.parametrize("content", ["not a record\n", ""])
def test_what_is_no_record_leaves_the_old_page(capsys, monkeypatch, content):
    Path("report.html").write_text("old")
    Path("notes.txt").write_text(content)
    said = fail(capsys, monkeypatch, "report", "notes.txt")
    assert said.startswith("mssar: nothing to show: notes.txt")
    assert said.endswith("; report.html stays as it is")
    fail(capsys, monkeypatch, "report", "notes.txt", "-o", "new.html")
    Path("runs").mkdir()
    fail(capsys, monkeypatch, "report", "runs")
    assert Path("report.html").read_text() == "old"
    assert not Path("new.html").exists()


# --- served ---


@pytest.fixture
def served():
    """A server for the folder runs."""
    place = Path("runs")
    place.mkdir()
    made = []

    def make():
        made.append(1)
        return build.reproduction(collect([place]), live=True)

    with Server(Source([place], make)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server, made
        server.shutdown()
        thread.join()


def get(url, **headers):
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
        return answer.read().decode(), answer.headers


def test_a_folder_that_is_trained_into_is_followed(served):
    server, made = served
    text, headers = get(server.url)
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert "connect-src 'self'" in text
    url = f"{server.url}data.json"
    first, headers = get(url)
    assert json.loads(first)["page"]["curves"] == []
    with pytest.raises(urllib.error.HTTPError) as unchanged:
        get(url, **{"If-None-Match": headers["ETag"]})
    assert unchanged.value.code == 304
    assert len(made) == 1  # nothing changed: nothing was made again
    log = Log()
    with opened(tiny(epochs=3), arrays(), Path("runs/one"), log) as training:
        for _ in training.work():
            if log.epochs:
                (curve,) = json.loads(get(url)[0])["page"]["curves"]
                assert curve["going"]
                found = curve["mean"]["test_error"]
                assert found == pytest.approx([e.test_error for _, e in log.epochs], rel=1e-4)
    (curve,) = json.loads(get(url)[0])["page"]["curves"]
    assert not curve["going"]
    assert len(curve["mean"]["test_error"]) == 3
    assert len(made) > 2


def test_only_this_machine_is_answered_and_only_with_the_page(served):
    server, _ = served
    assert server.server_address[0] == "127.0.0.1"
    for path, headers, status in (
        ("", {"Host": "evil.example:80"}, 403),
        ("", {"Host": "127.0.0.1.evil.example:80"}, 403),
        ("records.jsonl", {}, 404),
        ("../../etc/passwd", {}, 404),
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            get(server.url + path, **headers)
        assert refused.value.code == status
    assert get(server.url, Host=f"localhost:{server.server_address[1]}")[0]
