"""Runs beside other runs, processes beside others; and the suite finds what is wrong."""

import random
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from faults import company, ranks  # noqa: E402

from mssar.lab import records  # noqa: E402
from mssar.lab.engine import lookout  # noqa: E402
from mssar.lab.engine.fleet import _Fleet  # noqa: E402
from mssar.lab.engine.lookout import Lookout  # noqa: E402
from mssar.lab.engine.world import World, _in_touch  # noqa: E402

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, kills processes")


def test_a_fleet_for_a_while():
    found = company.long(96)
    assert found.wrong == 0, found.remark


def test_growing_memory_is_found(monkeypatch, capsys):
    leak = [(step, 10**8 + step * 5000) for step in range(0, 3000, 100)]
    assert company._slope(leak) == pytest.approx(5000)
    monkeypatch.setattr(company, "server", lambda: Told(leak))
    assert company.long(3000).wrong == 1
    assert "wrong: a fleet grows by 5000 bytes a step" in capsys.readouterr().err


class Told:
    """A pool whose processes have told this."""

    def __init__(self, answer):
        self.answer = answer

    def Pool(self, _):  # noqa: N802
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def apply(self, *_):
        return self.answer


def test_runs_that_fail_beside_others(capsys):
    found = company.failing(1, random.Random(0))
    assert found.wrong == 0, capsys.readouterr().err


def test_company_that_is_disturbed_is_found(monkeypatch, capsys):
    """Somebody who fails moves the others' weights a little."""
    lose = _Fleet._lose

    def careless(self, entry, active, error):
        lose(self, entry, active, error)
        for other in active:
            with torch.no_grad():
                next(other.training.learner.model.parameters()).mul_(1.0001)

    monkeypatch.setattr(_Fleet, "_lose", careless)
    assert company.failing(1, random.Random(0)).wrong == 1
    assert "wrong: {" in capsys.readouterr().err


def test_several_processes_on_one_folder():
    assert company.one_folder(1).wrong == 0


def test_several_processes_on_one_file():
    found = company.one_file(2, 6)
    assert (found.wrong, found.tried) == (0, 24)


def test_a_process_adds_its_own_records_and_those_that_all_have_once(tmp_path):
    for name in ("a", "b"):
        company.adding(tmp_path / "some.jsonl", name, 2)
    found = Counter(record.id for record in records.read(tmp_path / "some.jsonl"))
    assert found == Counter(["a-0", "a-1", "b-0", "b-1", "common-0", "common-1"])


def test_a_killed_process_and_the_rest_of_it(tmp_path, capsys):
    found = ranks.dwindled(tmp_path, "plain", random.Random(1), (2,))
    assert found.wrong == 0, capsys.readouterr().err


# --- Who is lost


class Store(Counter):
    """As several processes see it."""

    def add(self, name, number):
        self[name] += number
        return self[name]


def crew(size):
    store = Store()
    return [Lookout(World(rank, size), store) for rank in range(size)]


def rounds(everybody, talking, count):
    """What each of those who talk finds at last."""
    found = []
    for _ in range(count):
        for each in talking:
            each.talk()
        found = [each.look() for each in talking]
        for each, lost in zip(talking, found, strict=True):
            if lost is not None:
                each.tell(lost)
    assert len(everybody) >= len(talking)
    return found


def test_nobody_is_lost_while_all_count():
    everybody = crew(3)
    assert rounds(everybody, everybody, 5 * lookout.PATIENCE) == [None] * 3


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_one_that_is_silent_is_lost_for_all(lost):
    everybody = crew(3)
    rounds(everybody, everybody, 4)
    others = [each for each in everybody if each.world.rank != lost]
    assert rounds(everybody, others, lookout.PATIENCE - 1) == [None] * 2
    assert rounds(everybody, others, 3) == [lost] * 2


def test_one_that_left_in_good_order_is_not_lost():
    everybody = crew(3)
    rounds(everybody, everybody, 4)
    everybody[2].leave()
    assert rounds(everybody, everybody[:2], 3 * lookout.PATIENCE) == [None] * 2


def test_where_the_store_does_not_answer_its_keeper_is_lost():
    _, other = crew(2)
    other.store["0"] = 5
    other.talk()
    found = [other.look() for _ in range(lookout.PATIENCE + 2)]  # and never talks again
    assert found[0] is None
    assert found[-1] == 0


def test_whoever_was_frozen_with_the_others_finds_nobody_lost():
    """Looks are counted, not seconds."""
    everybody = crew(2)
    rounds(everybody, everybody, 3)
    assert [each.look() for each in everybody] == [None, None]
    assert rounds(everybody, everybody, 2) == [None, None]


GLOO = (
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
    "[127.0.0.1]:1968. This is typically caused by a remote worker hanging"
)


def test_a_broken_connection_is_one_line(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConnectionError) as found, _in_touch():
        raise RuntimeError(GLOO)
    assert str(found.value) == (
        "process 1 of 3 lost touch with the others (Connection closed by peer [127.0.0.1]:1968); "
        "what was saved is kept, and --resume goes on, with any number of processes"
    )
    with pytest.raises(ConnectionError, match="lost touch"), _in_touch():
        raise torch.distributed.DistBackendError("NCCL error in: x.cpp:1\nncclRemoteError")


def test_other_errors_are_what_they_are():
    with pytest.raises(RuntimeError, match=r"^mat1 and mat2"), _in_touch():
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
