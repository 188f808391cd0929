"""CIFAR's pickles: read without being believed; no file runs anything, or grows."""

import os
import pickle
import tracemalloc

import numpy as np
import pytest
from cifar_files import one_line, small, tar
from hypothesis import given
from hypothesis import strategies as st

from mssar.lab.data import cifar, pickled

__all__ = ["small"]  # a fixture


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
