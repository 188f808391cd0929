"""Fetching from a site that misbehaves, onto a disk that fills up: whole, or nothing at all."""

import errno
import io
import os
import shutil
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from cifar_files import HOSTILE, one_line, tar
from download_site import (  # fixtures too
    FOLDER,
    PART,
    _here_and_at_once,
    archive,
    assert_whole,
    fill_disk,
    left,
    nowhere,
    offer,
    root,
    sample,
    site,
)
from filelock import FileLock

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

from faults.calls import Fail, Watcher, watched

from mssar.lab.data import fetch
from mssar.lab.data.fetch import Source

__all__ = ["_here_and_at_once", "root", "sample", "site"]


def test_what_is_offered_is_fetched_once(root, sample, site):
    told, said = [], []
    place = fetch.get("cifar10", root, lambda *progress: told.append(progress), said.append)
    assert place == root / FOLDER
    assert_whole(root, sample)
    assert site.requests == [None]
    fetched = [done for what, done, total in told if what == "cifar-10-binary.tar.gz"]
    assert fetched == sorted(fetched)
    assert fetched[-1] == len(site.content)
    assert {total for what, _, total in told if what != "unpacking"} == {len(site.content)}
    assert told[-1] == ("unpacking", 6, 6)
    assert said == []
    assert fetch.get("cifar10", root, say=said.append) == place
    assert said == ["CIFAR-10 is there already, and good"]
    assert site.requests == [None]


def test_what_is_there_but_bad_is_not_touched(root, sample, site):
    root.mkdir()
    folder = sample.write(root, "binary")
    (folder / "test_batch.bin").write_bytes(b"mine")
    with pytest.raises(ValueError, match=r"test_batch\.bin has 4 bytes.* remove it and run"):
        fetch.get("cifar10", root)
    good = sample.labels["train"].copy()
    for labels, message in (
        (np.roll(good, 1), "training SHA-256 "),
        (0, "training images a class"),
    ):
        sample.labels["train"][:] = labels
        for file, content in sample.binary().items():
            (folder / file).write_bytes(content)
        with pytest.raises(ValueError, match=f"what is there is not CIFAR-10: {message}"):
            fetch.get("cifar10", root)
    with pytest.raises(ValueError, match="training images a class 0 to 50 instead of 5; remove it"):
        fetch.get("cifar10", root)
    assert site.requests == []


def test_a_broken_download_goes_on_where_it_broke(root, sample, site):
    site.breaks = [5000, 3000, 0, 1]
    said = []
    fetch.get("cifar10", root, say=said.append)
    assert site.requests == [None, "bytes=5000-", "bytes=8000-", "bytes=8000-", "bytes=8001-"]
    assert site.sent == len(site.content)  # nothing twice
    assert "broke off at 5,000 of" in said[0]
    assert said[0].endswith("; trying again")
    assert_whole(root, sample)


def test_where_no_length_is_told_the_checksum_finds_the_break(root, sample, site):
    site.breaks, site.length = [5000], False
    with pytest.raises(ValueError, match="has the SHA-256"):
        fetch.get("cifar10", root)
    assert left(root) == set()
    fetch.get("cifar10", root)
    assert_whole(root, sample)


def test_a_download_that_fails_for_good_is_resumed_by_the_next(root, sample, site):
    site.breaks = [5000, 0, 0, 0]
    with pytest.raises(ValueError, match=r"broke off at 5,000 of .* run it again") as error:
        fetch.get("cifar10", root)
    one_line(error)
    assert left(root) == {PART}
    assert (root / PART).read_bytes() == site.content[:5000]
    site.breaks = []
    fetch.get("cifar10", root)
    assert site.requests[-1] == "bytes=5000-"
    assert site.sent == len(site.content)
    assert_whole(root, sample)


def test_a_server_without_ranges_sends_all_of_it_again(root, sample, site):
    site.ranges, site.breaks = False, [5000]
    fetch.get("cifar10", root)
    assert site.requests == [None, "bytes=5000-"]
    assert_whole(root, sample)


def test_a_part_of_another_file_is_started_over(root, sample, site):
    root.mkdir()
    (root / PART).write_bytes(b"another file")
    said = []
    fetch.get("cifar10", root, say=said.append)
    assert site.requests == ["bytes=12-", None]
    assert said == ["the parts do not fit together, the file has changed: starting over"]
    assert_whole(root, sample)


def test_a_part_longer_than_the_file_is_started_over(root, sample, site):
    root.mkdir()
    (root / PART).write_bytes(bytes(len(site.content) + 1))
    fetch.get("cifar10", root)
    assert site.requests == [f"bytes={len(site.content) + 1}-", None]
    assert_whole(root, sample)


def test_another_range_than_asked_for_is_not_appended(root, sample, site):
    root.mkdir()
    (root / PART).write_bytes(site.content[:100])
    site.shift = 1
    said = []
    fetch.get("cifar10", root, say=said.append)
    assert "sent another range than from 100" in said[0]
    assert site.requests == ["bytes=100-", None]
    assert_whole(root, sample)


def test_a_whole_part_is_not_fetched_again(root, sample, site):
    root.mkdir()
    (root / PART).write_bytes(site.content)
    fetch.get("cifar10", root)
    assert site.requests == []
    assert_whole(root, sample)


@pytest.mark.parametrize(("status", "times"), [(503, 2), (429, 1)])
def test_a_busy_server_is_asked_again(root, sample, site, status, times):
    site.statuses = [status] * times
    fetch.get("cifar10", root)
    assert len(site.requests) == times + 1
    assert_whole(root, sample)


def test_a_file_that_is_gone_is_asked_for_once(root, site):
    site.statuses = [404]
    with pytest.raises(ValueError, match="HTTP 404 Not Found"):
        fetch.get("cifar10", root)
    assert site.requests == [None]
    assert left(root) == set()


def test_a_server_that_stalls_is_left(root, sample, site, monkeypatch):
    monkeypatch.setattr(fetch, "TIMEOUT", 0.2)
    site.stalls = [0.5]
    said = []
    fetch.get("cifar10", root, say=said.append)
    assert "timed out; trying again" in said[0]
    assert_whole(root, sample)


@pytest.mark.usefixtures("site")
def test_a_wrong_checksum_is_refused_with_both(root, monkeypatch):
    source = fetch.SOURCES["cifar10"]
    monkeypatch.setitem(fetch.SOURCES, "cifar10", Source(source.url, "0" * 64))
    said = f"SHA-256 {source.sha256}, expected {'0' * 64}; .* try again"
    with pytest.raises(ValueError, match=said):
        fetch.get("cifar10", root)
    assert left(root) == set()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda content: content[: len(content) // 2], "is truncated or damaged"),
        (lambda _: tar({f"{FOLDER}/test_batch.bin": b""}), "has no cifar-10-batches-bin/data_b"),
        (lambda _: b"<html>", "is truncated or damaged"),
    ],
)
def test_a_bad_archive_with_the_right_checksum_leaves_nothing(
    root, site, monkeypatch, spoil, message
):
    site.content = spoil(site.content)
    offer(monkeypatch, fetch.SOURCES["cifar10"].url, site.content)
    with pytest.raises(ValueError, match=message) as error:
        fetch.get("cifar10", root)
    one_line(error)
    assert left(root) == set()


@pytest.mark.parametrize(("strange", "message"), HOSTILE, ids=lambda value: str(value)[:20])
def test_a_hostile_archive_leaves_nothing(root, sample, site, monkeypatch, strange, message):
    files = {f"{FOLDER}/{file}": content for file, content in sample.binary().items()}
    site.content = tar(files, strange)
    offer(monkeypatch, fetch.SOURCES["cifar10"].url, site.content)
    with pytest.raises(ValueError, match=message) as error:
        fetch.get("cifar10", root)
    assert repr(strange.name) in one_line(error)
    assert left(root) == set()
    assert {path.name for path in root.parent.iterdir()} == {"data"}
    assert not Path("/evil").exists()


def test_other_images_of_the_right_size_are_not_taken_for_the_data_set(
    root, sample, site, monkeypatch
):
    sample.images["train"] //= 2
    site.content = archive(sample)
    offer(monkeypatch, fetch.SOURCES["cifar10"].url, site.content)
    with pytest.raises(ValueError, match=r"not CIFAR-10: mean red 6\d\.\d+ instead of 12\d"):
        fetch.get("cifar10", root)
    assert left(root) == set()


class Full(io.BytesIO):
    def write(self, _: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_while_fetching_leaves_nothing(root, site, monkeypatch):
    opened = Path.open

    def full(self: Path, mode: str = "r", *rest: object, **more: object) -> object:
        file = opened(self, mode, *rest, **more)
        if self.name != PART or mode == "rb":
            return file
        file.close()
        return Full()

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(OSError, match="No space left") as error:
        fetch.get("cifar10", root)
    assert error.value.errno == errno.ENOSPC
    assert site.requests == [None]  # it is not the network's fault
    assert left(root) == set()


@pytest.mark.usefixtures("site")
def test_a_full_disk_while_unpacking_leaves_nothing(root, monkeypatch):
    fill_disk(monkeypatch)
    with pytest.raises(OSError, match="No space left"):
        fetch.get("cifar10", root)
    assert left(root) == set()


@pytest.mark.parametrize("during", ["cifar-10-binary.tar.gz", "unpacking"])
def test_an_interrupt_leaves_only_what_can_be_resumed(root, sample, site, during):
    def interrupt(what: str, done: int, _: int | None) -> None:
        if what == during and done >= 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch.get("cifar10", root, interrupt)
    assert left(root) == {PART}
    kept = (root / PART).stat().st_size
    assert 0 < kept <= len(site.content)
    fetch.get("cifar10", root)
    assert site.requests[1:] == ([f"bytes={kept}-"] if kept < len(site.content) else [])
    assert_whole(root, sample)


def test_what_a_killed_process_left_is_cleared(root, sample, site):
    dead = root / ".cifar10.unpacking" / FOLDER
    dead.mkdir(parents=True)
    (dead / "data_batch_1.bin").write_bytes(b"half")
    fetch.get("cifar10", root)
    assert site.requests == [None]
    assert_whole(root, sample)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.usefixtures("site")
def test_what_could_not_be_taken_away_the_next_takes_away(root, sample, code):
    """Whichever call of the clean-up fails first, once or from then on."""
    calls = Watcher()
    with watched(root.parent, calls):
        fetch.get("cifar10", root)
    kinds = [call.kind for call in calls.calls]
    moved = len(kinds) - kinds[::-1].index("replace") + 1  # and its folder's sync
    assert kinds[moved:] == ["rmdir", "unlink"]
    for number in range(moved + 1, len(kinds) + 1):
        shutil.rmtree(root)
        said = []
        with watched(root.parent, Fail(number, code)):
            place = fetch.get("cifar10", root, say=said.append)
        assert place == root / FOLDER
        assert all(line.endswith(os.strerror(code)) for line in said)
        assert len(said) == len(left(root) - {FOLDER})
        assert said or code == errno.EIO  # once failed, the folder is tried again
        fetch.get("cifar10", root)
        assert_whole(root, sample)


@pytest.mark.usefixtures("site")
def test_what_another_process_uses_is_left_to_it(root, sample):
    fetch.get("cifar10", root)
    (root / PART).write_bytes(b"of another")
    with FileLock(root / ".cifar10.lock"):
        fetch.get("cifar10", root)
    assert left(root) == {FOLDER, PART}
    fetch.get("cifar10", root)
    assert_whole(root, sample)


def test_what_is_in_the_way_is_named(root, site):
    root.mkdir()
    (root / ".cifar10.unpacking").write_bytes(b"a file")
    with pytest.raises(NotADirectoryError) as error:
        fetch.get("cifar10", root)
    assert error.value.filename == root / ".cifar10.unpacking"
    assert site.requests == []


def test_two_at_once_fetch_it_once(root, sample, site):
    site.stalls = [0.3]
    said, places = [], []
    both = [
        threading.Thread(target=lambda: places.append(fetch.get("cifar10", root, say=said.append)))
        for _ in range(2)
    ]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert places == [root / FOLDER] * 2
    assert site.requests == [None]
    assert "another process is fetching it: waiting" in said
    assert_whole(root, sample)


def test_without_the_site_cifar100_is_put_there_by_hand(root, monkeypatch):
    offer(monkeypatch, nowhere(), b"", "cifar100")
    with pytest.raises(ValueError, match=r"cannot fetch .*Connection refused") as error:
        fetch.get("cifar100", root)
    line = one_line(error)
    archives = "cifar-100-binary.tar.gz or cifar-100-python.tar.gz"
    assert line.endswith(f"put {archives} into {root} by hand")


def test_a_site_that_sends_without_end_is_left(root, site, monkeypatch):
    monkeypatch.setattr(fetch, "LARGEST", 5000)
    for told in (True, False):
        site.length = told
        with pytest.raises(ValueError, match="more than the 5,000 bytes that may be") as error:
            fetch.get("cifar10", root)
        one_line(error)
        assert left(root) == set()
    assert len(site.requests) == 2  # asked once each
