"""CIFAR's files: every form gives the same, and none is trusted."""

import os
import pickle
import tarfile
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import platformdirs
import pytest
import torch
from cifar_files import FORMS, Sample, tar
from hypothesis import given
from hypothesis import strategies as st

from mssar.lab.data import cifar, pickled, places, unpack
from mssar.lab.data.dataset import Arrays, Split


@pytest.fixture(params=["cifar10", "cifar100"])
def sample(request, monkeypatch):
    made = Sample(request.param)
    monkeypatch.setitem(cifar.LAYOUTS, request.param, made.layout)
    return made


@pytest.fixture
def small(monkeypatch):
    made = Sample("cifar10")
    monkeypatch.setitem(cifar.LAYOUTS, "cifar10", made.layout)
    return made


def one_line(error: pytest.ExceptionInfo[ValueError]) -> str:
    (line,) = str(error.value).splitlines()
    return line


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


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, link
    return made


HOSTILE = [
    (member("../evil"), "lies outside a folder"),
    (member("cifar-10-batches-bin/../../evil"), "lies outside a folder"),
    (member("/evil"), "lies outside a folder"),
    (member("c:\\evil"), "lies outside a folder"),
    (member("evil", tarfile.SYMTYPE, "/etc"), "is a symbolic link"),
    (member("evil", tarfile.LNKTYPE, "cifar-10-batches-bin/test_batch.bin"), "is a hard link"),
    (member("evil", tarfile.CHRTYPE), "is neither a file nor a folder"),
    (member("evil", tarfile.BLKTYPE), "is neither a file nor a folder"),
    (member("evil", tarfile.FIFOTYPE), "is neither a file nor a folder"),
]


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


class Runs:
    """A pickle of it runs a program, or calls a function, when it is loaded."""

    def __init__(self, call, *arguments) -> None:
        self.how = call, arguments

    def __reduce__(self):
        return self.how


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("form", ["python", "python packed"])
def test_a_hostile_pickle_is_refused_and_not_run(tmp_path, small, form, protocol):
    mark = tmp_path / "was_here"
    for hostile, asked in (
        (Runs(os.system, f"touch {mark}"), f"{os.system.__module__}.system"),
        (Runs(eval, f"open({str(mark)!r}, 'w').close()"), "eval"),
        (Runs(getattr, os, "system"), "getattr"),
        (Runs(np.load, str(mark)), "numpy.load"),
        (Runs(np.fromfile, str(mark)), "fromfile"),
    ):
        values = {"labels": [0], "data": hostile} if asked != "getattr" else None
        poison = pickle.dumps(values, protocol) if values else b"c__builtin__\ngetattr\n."
        contents = small.python() | {"data_batch_2": poison}
        place = small.layout.forms[1]
        if form == "python":
            (tmp_path / place.folder).mkdir(exist_ok=True)
            for file, content in contents.items():
                (tmp_path / place.folder / file).write_bytes(content)
        else:
            packed = tar({f"{place.folder}/{file}": c for file, c in contents.items()})
            (tmp_path / place.archive).write_bytes(packed)
        with pytest.raises(ValueError, match=asked) as error:
            cifar.load("cifar10", tmp_path)
        assert "data_batch_2" in one_line(error)
        assert "is refused: it asks for " in one_line(error)
        assert not mark.exists()


@pytest.mark.parametrize(
    "dtype", [object, "i1", "?", "f4", "i8", "S3", "M8[s]", [("a", "u1"), ("b", "O")]]
)
def test_an_array_of_anything_but_bytes_is_refused(dtype):
    with pytest.raises(ValueError, match="some file is refused: it holds an array"):
        pickled.batch(pickle.dumps({"data": np.zeros(3, dtype)}, 2), "some file")


def test_what_stands_for_numpy_cannot_be_turned_against_it():
    array = b"cnumpy.core.multiarray\n_reconstruct\n(NNNtR"
    byte = b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR"
    for state in (
        b"(K\x01(K\x08t" + byte + b"\x89U\x04abcdtb",  # more than there is
        b"(K\x01(J\xff\xff\xff\xffK\xfct" + byte + b"\x89U\x04abcdtb",  # negative
        b"(K\x01(K\x04t" + byte + b"\x89](K\x01K\x02etb",  # a list of objects
        b"(K\x01(K\x04tU\x01O\x89U\x04abcdtb",  # a dtype of its own
    ):
        with pytest.raises(ValueError, match="is refused: it holds an array"):
            pickled.batch(b"\x80\x02}(U\x01a" + array + state + b"u.", "it")
    with pytest.raises(ValueError, match="an encoding by 'rot13'"):
        pickled.batch(
            b"\x80\x02c_codecs\nencode\n(X\x01\x00\x00\x00aX\x05\x00\x00\x00rot13tR.", "it"
        )
    changed = b"}(U\x01acnumpy\ndtype\nN}X\x0c\x00\x00\x00__defaults__(]ts\x86bu."
    with pytest.raises(ValueError, match="it changes a Named"):
        pickled.batch(b"\x80\x02" + changed, "it")
    again = pickled.batch(pickle.dumps({"a": np.arange(3, dtype="u1")}, 2), "it")
    assert again["a"].tolist() == [0, 1, 2]


TWICE = b"K\x01" + b"".join(b"q%ch%c\x86" % (i, i) for i in range(60))  # twice itself, 60 times
BOMBS = {
    "a memory of 32 GiB": (b"}r\xff\xff\xff\x7f.", None),
    "a shape too long to show": (
        b"}U\x01acnumpy.core.multiarray\n_reconstruct\n(NNNtR(K\x01"
        + TWICE + b"cnumpy\ndtype\n(U\x02u1tR\x89U\x01atbs.",
        "of a shape that is none",
    ),
    "a dtype too long to show": (b"cnumpy\ndtype\n" + TWICE + b"\x85R.", "no function"),
    "a key too long to hash": (b"}" + TWICE + b"Ns.", "other things than names"),
    "bytes that are not there": (b"B\xff\xff\xff\x7fa.", "truncated or damaged"),
    "more bytes than can be": (b"\x8e" + b"\xff" * 8 + b"a.", "truncated or damaged"),
    "a huge number": (b"\x8b\x00\x00\x10\x00" + b"\x01" * (1 << 20) + b".", "8,388,60. bits"),
    "a deep list": (b"]" * 40_000 + b"a" * 39_999 + b".", "holds a list"),
    "no end of lists": (b"]" * 100_002 + b".", "more than 100,000 operations"),
    "a module's class": (b"(ios\nsystem\n.", "it asks for INST os system"),
    "an extension": (b"\x82\x01.", "it asks for EXT1 1"),
    "a name elsewhere": (b"Pelsewhere\n.", "it asks for PERSID elsewhere"),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_pickle_does_not_become_large(name, monkeypatch):
    monkeypatch.setattr(pickled, "OPERATIONS", 100_000)
    raw, message = BOMBS[name]
    tracemalloc.start()
    try:
        if message is None:
            assert pickled.batch(raw, "it") == {}
        else:
            with pytest.raises(ValueError, match=message) as error:
                pickled.batch(raw, "it")
            assert len(one_line(error)) < 300
        assert tracemalloc.get_traced_memory()[1] < 200 << 20
    finally:
        tracemalloc.stop()


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**100), 2**100) | st.text() | st.binary(min_size=1)
    | st.floats(allow_nan=False),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)  # fmt: skip


@given(st.dictionaries(st.text(), plain), st.integers(0, pickle.HIGHEST_PROTOCOL))
def test_plain_values_are_read_as_python_reads_them(values, protocol):
    read = pickled.batch(pickle.dumps(values, protocol), "it")
    assert read == values
    assert repr(read) == repr(values)  # of the same kinds


def test_arrays_by_columns_are_read_as_such():
    array = np.asfortranarray(np.arange(6, dtype=np.uint8).reshape(2, 3))
    assert (pickled.batch(pickle.dumps({"a": array}, 2), "it")["a"] == array).all()


@given(st.binary(max_size=60), st.booleans())
def test_rubbish_is_answered_in_one_line(rubbish, whole):
    start = pickle.dumps({"a": np.arange(3, dtype="u1")}, 2)
    try:
        pickled.batch(rubbish if whole else start[: len(rubbish)] + rubbish, "it")
    except ValueError as error:
        (line,) = str(error).splitlines()
        assert line.startswith("it ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": np.zeros((10, 3071), np.uint8)}, r"data of \(10, 3071\), expected \(10, 3072\)"),
        ({"data": None}, "data of NoneType"),
        ({"labels": [0] * 9}, "needs 10 whole numbers as labels"),
        ({"labels": [0.5] * 10}, "needs 10 whole numbers as labels"),
        ({"labels": [True] * 10}, "needs 10 whole numbers as labels"),
        ({"labels": [0] * 9 + [-1]}, "a label -1, expected 0 to 9"),
        ({"labels": [0] * 9 + [1 << 70]}, "a label 1180591620717411303424"),
    ],
)
def test_a_bad_pickle_is_named(tmp_path, small, change, message):
    folder = small.write(tmp_path, "python")
    file = folder / "data_batch_1"
    good = {"data": np.zeros((10, 3072), np.uint8), "labels": [0] * 10}
    file.write_bytes(pickle.dumps(good | change, 2))
    with pytest.raises(ValueError, match=message) as error:
        cifar.load("cifar10", tmp_path)
    assert str(file) in one_line(error)
    file.write_bytes(pickle.dumps([1], 2))
    with pytest.raises(ValueError, match="holds a list, expected a dictionary"):
        cifar.load("cifar10", tmp_path)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="data_batch_1 is truncated or damaged"):
        cifar.load("cifar10", tmp_path)


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
