"""Full disks, a few; in one test, for what runs the command takes seconds to begin."""

import errno
import os
import random
import stat
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

from faults import disk, samples
from faults.calls import Call, Fail, Watcher, watched
from faults.jobs import Known, answer, fresh
from faults.nursery import crew
from faults.site import serving

from mssar.durable import write_whole


def test_where_nothing_can_be_written_it_says_so_and_goes_on_later(tmp_path, capsys):
    draw = random.Random(0)
    with crew(1) as people, serving(samples.archive()) as url:
        known = Known(people, tmp_path)
        for job, count in (
            (known.training("--tensorboard"), 2),
            (known.recording(), 1),
            (known.report(), 1),
            (known.fetching(), 2),
        ):
            row = disk.row(people, job.name, job, tmp_path, count, draw, url=url)
            assert (row.tried, row.wrong) == (count, 0), capsys.readouterr().err
        (limited,) = disk.limited(people, [(known.recording(), 1000)], tmp_path)
        assert limited.wrong == 0, capsys.readouterr().err

        # A program that writes in the place of a file is found out.
        job = known.report()
        root = fresh(job, tmp_path, "careless")
        calls = answer(people, job, root, careless=True).calls
        (number,) = (n for n, call in enumerate(calls, 1) if "write page.html" in call)
        made = answer(people, job, root, careless=True, fail=(number, errno.ENOSPC, True))
        assert disk.complaint(made, os.strerror(errno.ENOSPC)) is None
        assert job.sound(root) == "half of page.html"


def trying(file: Path) -> int | None:
    """The error that two writes end with."""
    try:
        write_whole(file, b"before")
        write_whole(file, b"after")
    except OSError as error:
        return error.errno
    return None


@pytest.mark.parametrize("code", disk.CODES, ids=errno.errorcode.get)
def test_every_call_of_a_write_may_fail(tmp_path, code):
    """Whatever fails, the file is as it was or as it is to be, and another try succeeds."""
    path, counted = tmp_path / "new" / "file", Watcher()
    with watched(tmp_path, counted):
        write_whole(path, b"before")
        write_whole(path, b"after")
    kinds = [call.kind for call in counted.calls]
    assert kinds.count("fsync") == 5  # twice a file and its folder, and the new folder's name
    for number in range(1, len(kinds) + 1):
        for half in (False, True):
            folder = tmp_path / f"{number}-{half}"
            folder.mkdir()
            file = folder / "new" / "file"
            with watched(folder, Fail(number, code, half=half)):
                failed = trying(file)
            assert failed == code
            assert not file.exists() or file.read_bytes() in (b"before", b"after")
            if code not in (errno.EROFS, errno.EACCES):  # which refuse to take away, too
                assert not list(folder.rglob("*.part"))
            write_whole(file, b"after")
            assert file.read_bytes() == b"after"


@pytest.mark.parametrize("kind", ["device", "pipe", "link"])
def test_what_is_no_file_is_not_replaced(tmp_path, kind):
    """As root, /dev/null would be an ordinary file for everybody afterwards."""
    path = tmp_path / "place"
    if kind == "device":
        try:
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("only root makes devices")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/null")
    before = path.lstat()
    with pytest.raises(ValueError, match="place is a device or a pipe, and not replaced"):
        write_whole(path, b"something")
    assert path.lstat() == before
    assert list(tmp_path.iterdir()) == [path]


def test_calls_are_seen_however_they_are_made(tmp_path):
    watcher = Watcher()
    path = tmp_path / "file"
    with watched(tmp_path, watcher):
        path.write_bytes(b"1")
        with open(path, "a") as file:
            file.write("22")
        with path.open("r+b", buffering=0) as raw:
            raw.truncate(1)
        os.close(os.open(path, os.O_RDWR))
        path.read_bytes()  # changes nothing
        path.rename(tmp_path / "other")
        (tmp_path / "other").unlink()
        (tmp_path.parent / "elsewhere").write_bytes(b"")
    assert watcher.calls == [
        Call("open", path, truncates=True),
        Call("write", path, data=b"1"),
        Call("open", path),
        Call("write", path, data=b"22", at=1),
        Call("open", path),
        Call("truncate", path, at=1),
        Call("open", path),
        Call("replace", path, tmp_path / "other"),
        Call("unlink", tmp_path / "other"),
    ]
    path.write_bytes(b"")
    assert len(watcher.calls) == 9
