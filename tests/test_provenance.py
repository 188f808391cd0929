"""What computed a run, where its parts were computed otherwise."""

from dataclasses import replace

import pytest
import torch
from lab import CPU, Log, arrays, opened, tiny, trained

from mssar.lab.engine import checkpoint, fleet, provenance
from mssar.lab.records import parse

RUN = tiny(5, epochs=3)


def part(folder, epochs, execution=CPU):
    """Train to so many epochs, save and stop."""
    with opened(RUN, arrays(), folder, execution=execution) as training:
        for _ in training.work():
            if training.progress.epoch == epochs:
                training.save()
                return


def test_hardware_that_a_run_comes_back_to_is_named_each_time(tmp_path, monkeypatch):
    for epochs, machine in enumerate("AB", 1):
        monkeypatch.setattr(provenance, "hardware", lambda _, name=machine: name)
        part(tmp_path, epochs)
    monkeypatch.setattr(provenance, "hardware", lambda _: "A")
    environment = trained(RUN, arrays(), tmp_path).environment
    assert environment["hardware"] == "A"
    assert [one["hardware"] for one in environment["earlier"]] == ["A", "B"]


def test_what_rounds_otherwise_is_kept_of_every_part(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.6.0")
        part(tmp_path, 1)
    part(tmp_path, 2)
    record = trained(RUN, arrays(), tmp_path, execution=replace(CPU, deterministic=True))
    first, second = record.environment["earlier"]
    assert first | {"torch": str(torch.__version__)} == second
    assert (first["torch"], first["deterministic"]) == ("2.6.0", False)
    assert (record.environment["torch"], record.execution["deterministic"]) == (
        torch.__version__,
        True,
    )
    assert first["processes"] == first["stacked"] == 1
    assert first["compile"] is False
    assert parse(record.as_line()) == record


def test_a_run_that_was_stacked_at_first_says_so(tmp_path):
    class Full(Log):
        def passed(self, run, epoch, left):
            super().passed(run, epoch, left)
            if run.seed == 1:
                raise OSError(28, "full")

    runs, data = [tiny(seed) for seed in (0, 1)], arrays()
    with pytest.raises(OSError, match="full"):
        fleet.train(runs, lambda _: data, CPU, tmp_path, Full(), width=2, stack=2)
    for record in fleet.train(runs, lambda _: data, CPU, tmp_path, Log()).records:
        assert "stacked" not in record.execution
        assert [one["stacked"] for one in record.environment["earlier"]] == [2]


def test_a_run_made_in_one_way_has_nothing_earlier(tmp_path):
    part(tmp_path, 1)
    assert "earlier" not in trained(RUN, arrays(), tmp_path).environment


def test_makers_of_older_checkpoints_are_kept_as_they_are(tmp_path):
    part(tmp_path, 1)
    progress, tensors = checkpoint.load(checkpoint.checkpoints(tmp_path)[-1])
    progress.makers = [{"hardware": "A", "source": "sha256:0"}]
    checkpoint.write(tmp_path, progress, checkpoint.Brought(tensors))
    earlier = trained(RUN, arrays(), tmp_path).environment["earlier"]
    assert earlier == [{"hardware": "A", "source": "sha256:0"}]
