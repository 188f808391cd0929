"""Power cuts, a few of each: nothing is half there, and what forgets to sync is found out."""

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

from faults import power
from faults.calls import Call
from faults.disk_model import Disk, File, lay, seen
from faults.power import SCENES, cut

CUTS = 20  # states after a call


def draw() -> random.Random:
    return random.Random(0)


def test_whatever_is_left_is_the_state_before_or_after(capsys):
    rows = list(power.check(CUTS / power.STATES, seed=0))
    assert [row.wrong for row in rows] == [0] * len(SCENES), capsys.readouterr().err
    assert all(row.tried >= 40 for row in rows)


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)
@pytest.mark.parametrize("files", [True, False], ids=["files", "folders"])
def test_who_forgets_to_sync_is_found_out(scene, files):
    def forgotten(call: Call) -> bool:
        return call.kind == "fsync" and bool(call.path.suffix) == files

    assert any(cut(scene, CUTS, draw(), forgotten))


def test_a_call_that_is_not_seen_is_found_out():
    """As it would be if compiled code wrote the file."""
    first = SCENES[0]
    assert "the calls seen do not make what is there" in next(
        filter(None, cut(first, 1, draw(), lambda call: call.kind == "unlink"))
    )


def test_what_was_not_synced_may_be_half_there():
    file = File(b"old", [(0, None), (0, b"newer!")])
    assert set(file.possible()) == {
        *(b"old", b"", b"newer!"),
        *(b"new", b"\0\0\0er!", b"\0\0\0\0\0\0"),
    }


def test_names_come_in_any_order_but_a_rename_is_one(tmp_path):
    (tmp_path / "old").write_bytes(b"1")
    disk = Disk(tmp_path)
    disk.make(Call("open", tmp_path / "new"))
    disk.make(Call("replace", tmp_path / "old", tmp_path / "older"))
    found = {frozenset(tree) for tree in disk.after_a_cut(100, draw())}
    assert found == {
        *(frozenset({"old"}), frozenset({"older"})),
        *(frozenset({"old", "new"}), frozenset({"older", "new"})),
    }
    disk.make(Call("fsync", tmp_path))
    assert [set(tree) for tree in disk.after_a_cut(100, draw())] == [{"older", "new"}]


def test_a_tree_is_laid_as_it_was_seen(tmp_path):
    tree = {"a/": b"", "a/b": b"1", "c": b"2"}
    lay(tree, tmp_path)
    assert seen(tmp_path) == tree == Disk(tmp_path).now()
