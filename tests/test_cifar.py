"""CIFAR's files: every form gives the same, and none is trusted."""

from dataclasses import replace
from pathlib import Path

import platformdirs
import pytest
import torch
from cifar_files import FORMS, HOSTILE, one_line, small, standing_in, tar

from mssar.lab.data import cifar, places, unpack
from mssar.lab.data.dataset import Arrays, Split

__all__ = ["small"]  # a fixture


@pytest.fixture(params=["cifar10", "cifar100"])
def sample(request, monkeypatch):
    return standing_in(request.param, monkeypatch)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same(tmp_path, sample, form):
    place = sample.write(tmp_path, form)
    found = cifar.load(sample.layout.name, tmp_path)
    for split in ("train", "test"):
        part = getattr(found, split)
        assert part.images.numpy().tobytes() == sample.images[split].tobytes()
        assert part.images.shape == sample.images[split].shape
        assert part.labels.tolist() == sample.labels[split].tolist()
    assert found.mean == pytest.approx(sample.layout.mean, abs=1e-9)
    assert found.std == pytest.approx(tuple(sample.std), abs=1e-9)
    if place.is_dir():  # its own folder will do as well
        assert cifar.load(sample.layout.name, place).checksum == found.checksum
    assert all(finding.ok for finding in cifar.check(found))
    where = cifar.find(sample.layout.name, tmp_path)
    files = place.iterdir() if place.is_dir() else [place]
    assert where.path == place
    assert where.size == sum(len(file.read_bytes()) for file in files)


def test_classes_are_the_official_ones_in_order():
    ten, hundred = (cifar.LAYOUTS[name].classes for name in ("cifar10", "cifar100"))
    assert ten == (
        *("airplane", "automobile", "bird", "cat", "deer"),
        *("dog", "frog", "horse", "ship", "truck"),
    )
    assert len(set(hundred)) == 100
    assert list(hundred) == sorted(hundred)  # theirs are in alphabetical order
    assert (hundred[0], hundred[41], hundred[99]) == ("apple", "lawn_mower", "worm")


def test_where_data_lies(tmp_path, monkeypatch):
    monkeypatch.delenv(places.VARIABLE, raising=False)
    assert places.folder() == Path(platformdirs.user_cache_dir("mssar"))
    monkeypatch.setenv(places.VARIABLE, str(tmp_path))
    assert places.folder() == tmp_path
    assert places.folder(tmp_path / "other") == tmp_path / "other"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert places.folder(Path("~/data")) == tmp_path / "data"
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file is a file; name the folder"):
        places.folder(tmp_path / "file")


def test_a_missing_data_set_names_the_place_and_the_command(tmp_path):
    with pytest.raises(ValueError, match="no CIFAR-100 in") as error:
        cifar.load("cifar100", tmp_path)
    line = one_line(error)
    for part in (str(tmp_path), "cifar-100-binary.tar.gz", "cifar-100-python"):
        assert part in line
    assert line.endswith(f"`mssar data get cifar100 --data-dir {tmp_path}`")
    with pytest.raises(ValueError, match="there are cifar10, cifar100"):
        cifar.load("cifar11", tmp_path)


def spoil_length(content: bytes) -> bytes:
    return content[:-1]


def spoil_label(content: bytes) -> bytes:
    return bytes([10]) + content[1:]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_length, "has 30,729 bytes, expected 30,730; remove it"),
        (lambda content: content * 3, "has 92,190 bytes, too many"),
        (spoil_label, "has a label 10, expected 0 to 9; remove it"),
    ],
)
def test_a_bad_binary_file_is_named(tmp_path, small, spoil, message):
    folder = small.write(tmp_path, "binary")
    file = folder / "data_batch_3.bin"
    file.write_bytes(spoil(file.read_bytes()))
    with pytest.raises(ValueError, match=message) as error:
        cifar.load("cifar10", tmp_path)
    assert str(file) in one_line(error)


def test_a_missing_file_is_named(tmp_path, small):
    folder = small.write(tmp_path, "binary")
    (folder / "test_batch.bin").unlink()
    with pytest.raises(
        ValueError, match=r"has no test_batch.bin; remove it and run `mssar data get"
    ):
        cifar.load("cifar10", tmp_path)


@pytest.mark.parametrize("kept", [0.0, 0.05, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("form", ["binary packed", "python packed"])
def test_a_truncated_archive_is_named(tmp_path, small, form, kept):
    archive = small.write(tmp_path, form)
    content = archive.read_bytes()
    archive.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(ValueError, match="fetch it again") as error:
        cifar.load("cifar10", tmp_path)
    assert str(archive) in one_line(error)


def test_a_damaged_archive_is_named(tmp_path, small):
    archive = small.write(tmp_path, "binary packed")
    content = bytearray(archive.read_bytes())
    content[len(content) // 2] ^= 1  # a pixel's, most likely
    archive.write_bytes(content)
    with pytest.raises(ValueError, match="is truncated or damaged"):
        cifar.load("cifar10", tmp_path)
    archive.write_bytes(b"<html>not found</html>")
    with pytest.raises(ValueError, match="is truncated or damaged") as error:
        cifar.load("cifar10", tmp_path)
    one_line(error)


@pytest.mark.parametrize(("strange", "message"), HOSTILE, ids=lambda value: str(value)[:20])
def test_a_hostile_archive_is_refused_by_its_member(tmp_path, small, strange, message):
    archive = tmp_path / "cifar-10-binary.tar.gz"
    files = {f"cifar-10-batches-bin/{file}": c for file, c in small.binary().items()}
    archive.write_bytes(tar(files, strange))
    with pytest.raises(ValueError, match=message) as error:
        cifar.load("cifar10", tmp_path)
    assert repr(strange.name) in one_line(error)


def test_an_archive_has_each_file_once_and_no_longer_than_it_may_be(tmp_path):
    archive = tmp_path / "some.tar.gz"
    archive.write_bytes(tar({"a": b"12345", "./b": b"1", "unasked": b"9" * 99}))
    assert list(unpack.members(archive, {"a", "b"}, 5)) == [("a", b"12345"), ("b", b"1")]
    with pytest.raises(ValueError, match=r"a in .* has 5 bytes, expected at most 4"):
        list(unpack.members(archive, {"a", "b"}, 4))
    with pytest.raises(ValueError, match="has no c; remove it and fetch it again"):
        list(unpack.members(archive, {"a", "c"}, 5))
    archive.write_bytes(tar({"a": b"1", "./a": b"2"}))
    with pytest.raises(ValueError, match="holds a twice"):
        list(unpack.members(archive, {"a"}, 5))


def test_check_finds_what_differs(tmp_path, small):
    small.write(tmp_path, "binary")
    good = cifar.load("cifar10", tmp_path)

    def differing(arrays: Arrays, contents: bool = False) -> dict[str, tuple[str, str]]:
        found = {f.name: (f.expected, f.found) for f in cifar.check(arrays) if not f.ok}
        hashed = {name: found.pop(name) for name in list(found) if name.endswith("SHA-256")}
        return hashed if contents else found

    assert differing(good) == {}
    labels = good.test.labels.clone()
    labels[labels == 3] = 4
    unbalanced = replace(good, test=Split(good.test.images, labels))
    assert differing(unbalanced) == {"test images a class": ("1", "0 to 2")}
    fewer = Split(good.train.images[:-1], good.train.labels[:-1])
    assert differing(replace(good, train=fewer)) == {
        "training images": ("50", "49"),
        "training images a class": ("5", "4 to 5"),
    }
    red, green, blue = good.mean
    assert list(differing(replace(good, mean=(red + 0.011, green - 0.009, blue)))) == ["mean red"]
    assert differing(good, contents=True) == {}
    # Permuted labels and mirrored images have the same counts and mean.
    permuted = replace(good, train=Split(good.train.images, good.train.labels.roll(1)))
    assert differing(permuted) == {}
    assert list(differing(permuted, contents=True)) == ["training SHA-256"]
    mirrored = replace(good, test=Split(good.test.images.flip(2), good.test.labels))
    assert list(differing(mirrored, contents=True)) == ["test SHA-256"]
    # Another order is the same data set.
    order = torch.randperm(len(good.train))
    shuffled = Split(good.train.images[order], good.train.labels[order])
    assert differing(replace(good, train=shuffled), contents=True) == {}


def test_mean_and_deviation_are_exact_for_extreme_images(tmp_path, small):
    images = small.images["train"]
    images[:] = 255
    images[:, :16, :, 1] = 0
    small.write(tmp_path, "binary")
    found = cifar.load("cifar10", tmp_path)
    assert found.mean == (255.0, 127.5, 255.0)
    assert found.std == (0.0, 127.5, 0.0)
    assert isinstance(found.train.images, torch.Tensor)
