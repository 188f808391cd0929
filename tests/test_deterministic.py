"""``--deterministic`` on a CPU: the same records twice, but for times."""

from pathlib import Path

import pytest
import torch
from lab import arrays, assert_same, learnt, timeless
from typer.testing import CliRunner

from mssar.lab import cli, data, records
from mssar.lab.engine import fleet

SHORT = ("--epochs", "2", "--batch", "16", "--lr", "0.02", "--padding", "1", "--device", "cpu")
RUNS = ("train", "resnet8", "--recalibration", "none,mssar", "--seed", "0,1", *SHORT)
FLEET, ALONE = ("--fleet", "4"), ("--fleet", "1")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    made = arrays(37, 24, 10)
    monkeypatch.setattr(data, "load", lambda *_: made)


def trained(folder: Path, *words: str, status: int = 0) -> dict[str, tuple[object, object]]:
    """What every run left, by its folder: its record but for times, and what it learnt."""
    words = (*RUNS, "--deterministic", "--runs", str(folder), *words)
    done = CliRunner().invoke(cli.app, list(words))
    assert done.exit_code == status, done.output + repr(done.exception)
    assert not torch.are_deterministic_algorithms_enabled()  # as before
    kept = {}
    for record in records.read(folder / "records.jsonl"):
        assert record.execution["deterministic"]
        (name,) = {
            p.parent.name for p in folder.glob("*/record.json") if record.id in p.read_text()
        }
        kept[name] = timeless(record), learnt(folder / name)
    return kept


def assert_equal(found, expected):
    assert len(found) == 4
    assert found.keys() == expected.keys()
    for name, (record, weights) in expected.items():
        assert found[name][0] == record
        assert_same(found[name][1], weights)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        made = arrays(37, 24, 10)
        patch.setattr(data, "load", lambda *_: made)
        return trained(tmp_path_factory.mktemp("alone"), *ALONE)


@pytest.mark.parametrize("width", [ALONE, FLEET], ids=["alone", "fleet"])
def test_the_same_records_again(tmp_path, expected, width):
    assert_equal(trained(tmp_path, *width), expected)


@pytest.mark.parametrize("width", [ALONE, FLEET], ids=["alone", "fleet"])
def test_the_same_records_after_a_stop(tmp_path, monkeypatch, expected, width):
    """Out of time after a few turns, and resumed."""
    turns, expired = 0, fleet.Clock.expired

    def soon(self, needed):
        nonlocal turns
        turns += 1
        return turns > 9 or expired(self, needed)

    with monkeypatch.context() as patch:
        patch.setattr(fleet.Clock, "expired", soon)
        trained(tmp_path, *width, status=75)
    assert not (tmp_path / "records.jsonl").exists() or width is ALONE
    assert list(tmp_path.glob("*/epoch-*.safetensors"))
    assert_equal(trained(tmp_path, *width, "--resume"), expected)


def test_every_verb_that_trains_has_it():
    for verb in ("train", "reproduce", "compare", "demo"):
        said = CliRunner().invoke(cli.app, [verb, "--help"], env={"COLUMNS": "200"}).output
        assert "--deterministic" in said, verb
