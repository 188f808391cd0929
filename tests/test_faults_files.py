"""Torn and hostile files: a small part of the suite, and again what it has found."""

import io
import json
import os
import pickle
import struct
import sys
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).parents[1]
CORPUS = Path(__file__).parent / "corpus"
sys.path.insert(0, str(ROOT / "tools"))

from faults.files import check, families, mutation, networks, sandbox  # noqa: E402

import mssar  # noqa: E402
from mssar.lab import records, timings, values  # noqa: E402
from mssar.lab.data import pickled, pictures, unpack  # noqa: E402
from mssar.lab.engine import checkpoint, evaluate  # noqa: E402
from mssar.networks import signature, weights  # noqa: E402
from mssar.surgery import initial  # noqa: E402


def one_line(error):
    assert sandbox.unclear(error, ()) == ""
    return str(error)


def refusal(call, *args):
    with pytest.raises(ValueError, match=r".") as caught:
        call(*args)
    return one_line(caught.value)


def test_a_small_part_by_processes():
    rows = list(check(0.01, 5, "signed"))
    assert sum(row.tried for row in rows) == 54
    assert [row for row in rows if row.wrong] == []


@pytest.mark.parametrize(
    ("family", "numbers"),
    [
        *(("lines", 20), ("crafted", 10), ("folders", 8), ("batches", 12), ("archives", 8)),
        *(("package", 3), ("foreign", 12), ("odd", 20)),
    ],
)
def test_some_cases_in_this_process(family, numbers, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chosen = families(family)[family]
    layouts = dict(sandbox.sys.modules["mssar.lab.data.cifar"].LAYOUTS)
    try:
        found = list(sandbox.work(chosen, 7, range(numbers), tmp_path / "place"))
    finally:
        sandbox.sys.modules["mssar.lab.data.cifar"].LAYOUTS.update(layouts)
        os.chdir(tmp_path)
    assert [outcome for outcome in found if outcome.ended == "wrong"] == []


def fine(*_):
    pass


def family_of(attempt, mebibytes=64):
    return sandbox.Family("made", {"row": "promise"}, 3, mebibytes, fine, attempt)


def outcome_of(attempt, place):
    here = Path.cwd()
    try:
        (found,) = sandbox.work(family_of(attempt), 0, range(1), place)
    finally:
        os.chdir(here)
    return found


def raising(error):
    def attempt(_, case):
        case.begin("row", "what", "file.txt")
        raise error

    return attempt


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyError("x"), "KeyError"),
        (RecursionError("deep"), "RecursionError"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), "not ours"),
        (ValueError("file.txt\nis bad"), "not one line"),
        (ValueError("it is bad"), "does not name file.txt"),
        (ValueError("file.txt " * 200), "letters long"),
    ],
)
def test_the_sandbox_finds_what_is_no_clear_refusal(error, said, tmp_path):
    found = outcome_of(raising(error), tmp_path)
    assert found.ended == "wrong"
    assert said in found.said


def test_the_sandbox_finds_what_is_written_beside_its_folder(tmp_path):
    found = outcome_of(lambda _, case: case.payload.write_text("executed"), tmp_path / "a")
    assert (found.ended, "touched" in found.said) == ("wrong", True)
    found = outcome_of(lambda *_: Path("../beside/kept.txt").unlink(), tmp_path / "b")
    assert found.ended == "wrong"


def test_the_sandbox_measures_memory(tmp_path):
    found = outcome_of(lambda *_: bytes(b"x" * (200 << 20)) and None, tmp_path)
    assert found.ended == "wrong"
    assert "64 allowed" in found.said


@pytest.mark.parametrize("what", ["os._exit(3)", "__import__('time').sleep(99)"])
def test_a_process_that_crashes_or_hangs_is_one_wrong_case(what, monkeypatch):
    code = (
        "import os, sys, json\nfor n in range(*map(int, sys.argv[5:8])):\n"
        f"    if n == 1: {what}\n"
        "    print(json.dumps(dict(number=n, row='', what='', ended='read')), flush=True)\n"
    )
    monkeypatch.setattr(sandbox, "PATIENCE", 1.5)
    monkeypatch.setattr(sandbox, "START", 1.5)
    start = sandbox.subprocess.Popen

    def popen(command, **how):
        return start([sys.executable, "-c", code, *command[2:]], **how)

    monkeypatch.setattr(sandbox.subprocess, "Popen", popen)
    found = [outcome for _, outcome in sandbox.run([("any", 3)], 0, 1)]
    assert [(o.number, o.ended) for o in found] == [(0, "read"), (1, "wrong"), (2, "read")]


# What was found


@pytest.fixture(scope="module")
def small():
    return networks.files({"fc.weight": torch.randn(10, 6), "fc.bias": torch.randn(10)})


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_changed_bit_of_a_signed_file_is_noticed(small, tmp_path_factory, data):
    place = tmp_path_factory.getbasetemp() / networks.NAME
    kind = data.draw(st.sampled_from(sorted(small)))
    content = small[kind]
    named = data.draw(st.booleans())  # in the names of the two, which made a file pass as unsigned
    names = [content.index(key.encode()) for key in (signature.HEADER, signature.NUMBERS)]
    at = data.draw(st.integers(0, 12)) + data.draw(st.sampled_from(names)) if named else None
    at = data.draw(st.integers(0, len(content) - 1)) if at is None else at
    place.write_bytes(content)
    networks.READ[kind](place)
    place.write_bytes(mutation.flip(content, at, data.draw(st.integers(0, 7))))
    assert networks.NAME in refusal(networks.READ[kind], place)


@pytest.mark.parametrize("path", sorted((CORPUS / "lines").glob("*.jsonl")), ids=lambda p: p.stem)
def test_lines_that_were_believed_or_raised(path):
    read = timings.read if path.stem.startswith("timing") else records.read
    assert path.name in refusal(read, path)


def test_json_nests_no_deeper_than_what_comes_after_it_bears():
    for text in (f'{{"a":{"[" * 60 + "]" * 60}}}', "[" * 100_000):
        assert refusal(values.decode, text, "record", 1) == "nested deeper than any record is"
    assert refusal(values.decode, '{"a": {"b": 1, "b": 2}}', "record", 1) == "b: said twice"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return networks.prepare(tmp_path_factory.mktemp("made")).whole


def crafted(data, key, change):
    file = networks.File.of(data)
    notes = file.header["__metadata__"]
    changed = notes | {key: mutation.text(change(json.loads(notes[key])))}
    made = networks.File({**file.header, "__metadata__": changed}, file.numbers)
    return made.data(signed=True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda note: {**note, "options": {"weights": "a"}}, "an option 'weights', of no network"),
        (lambda note: {**note, "options": {"name": "resnet8"}}, "an option 'name'"),
        (lambda note: {**note, "options": {"strategy": "spiral"}}, "strategy is one of"),
        (lambda note: {**note, "classes": ["a"] * 5000}, "5,000 classes, and no tensor"),
        (lambda note: {**note, "run": mutation.Deep(100_000)}, "its note cannot be read"),
    ],
)
def test_a_note_that_says_something_else(whole, change, said, tmp_path):
    file = tmp_path / "a.safetensors"
    file.write_bytes(crafted(whole["weights"], weights.NOTE, change))
    message = refusal(lambda: mssar.create_model("resnet8", "mssar", weights=file))
    assert str(file) in message
    assert said in message


@pytest.mark.parametrize(
    ("name", "value"), [("size", [3, 10**9, 1]), ("mean", [0.5]), ("std", "a"), ("classes", 7)]
)
def test_a_note_that_no_picture_could_be_fitted_to(whole, name, value, tmp_path):
    file = tmp_path / "a.safetensors"
    file.write_bytes(crafted(whole["weights"], weights.NOTE, lambda note: {**note, name: value}))
    assert f"its note has {'no ' if name != 'mean' else ''}"[:12] in refusal(evaluate.trained, file)


@pytest.mark.parametrize(
    "change",
    [{"history": [{"epoch": 1}]}, {"class_errors": ["a"]}, {"step": -1}, {"makers": 3}],
    ids=str,
)
def test_progress_of_another_kind(whole, change, tmp_path):
    file = tmp_path / "epoch-0001.safetensors"
    file.write_bytes(crafted(whole["checkpoint"], "mssar", lambda found: found | change))
    assert str(file) in refusal(checkpoint.progress, file)


def test_numbers_that_are_none_are_no_weights(tmp_path):
    net = mssar.create_model("resnet8", "mssar")
    state = net.state_dict()
    state["layer1.0.bn1.running_var"][3] = torch.nan
    for kind, data in networks.files(state).items():
        file = tmp_path / f"{kind}.safetensors"
        file.write_bytes(data)
        assert "not finite" in refusal(evaluate.trained, file)
    assert "not finite" in refusal(net.save_pretrained, tmp_path / "net")
    mssar.create_model("resnet8", "mssar").save_pretrained(tmp_path / "net")
    safetensors.torch.save_file(state, tmp_path / "net" / "model.safetensors")
    assert "not finite" in refusal(mssar.from_pretrained, tmp_path / "net")
    torch.save(state, tmp_path / "a.pt")
    good = mssar.create_model("resnet8", "mssar")
    assert "not finite" in refusal(
        initial.fit, good, initial.read(tmp_path / "a.pt").tensors, "a.pt"
    )


def test_an_infinite_mask_of_a_network_stays_allowed():
    net, other = mssar.create_model("resnet8"), mssar.create_model("resnet8")
    for one in (net, other):
        one.register_buffer("mask", torch.full((2, 2), -torch.inf))
    initial.fit(net, other.state_dict(), "a")
    assert net.mask.isneginf().all()
    assert torch.equal(net.conv1.weight, other.conv1.weight)


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(1).expand(10**6, 10**6), torch.eye(4).to_sparse(), torch.empty(2, device="meta")],
    ids=["expanded", "sparse", "meta"],
)
def test_tensors_whose_numbers_are_not_in_the_file(tensor, tmp_path):
    torch.save({"a": tensor}, tmp_path / "a.pt")
    assert "has not its numbers in the file" in refusal(initial.read, tmp_path / "a.pt")


def test_a_deflated_file_of_torch_save(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/0", bytes(1 << 20))
    assert "would unpack to 1,048,576 bytes" in refusal(initial.read, tmp_path / "a.pt")


def test_bytes_in_a_file_of_torch_save(tmp_path):
    torch.save({"a": b"x" * 300}, tmp_path / "a.pt")
    assert "holds more than tensors" in refusal(initial.read, tmp_path / "a.pt")
    torch.save({(1,): torch.zeros(2)}, tmp_path / "a.pt")
    assert "a tuple is Tensor" in refusal(initial.read, tmp_path / "a.pt")


def tar_of(member, content=b""):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        archive.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def test_an_archive_reads_no_header_of_any_length(tmp_path):
    archive, name = tmp_path / "a.tar.gz", tarfile.TarInfo("././@LongLink")
    name.type, name.size = tarfile.GNUTYPE_LONGNAME, 2 << 20
    archive.write_bytes(tar_of(name, bytes(2 << 20)))
    assert "a header of 2,097,152 bytes" in refusal(list, unpack.members(archive, {"b"}, 10))


def test_an_archive_unpacks_to_no_more_than_it_could_hold(tmp_path, monkeypatch):
    monkeypatch.setattr(unpack, "ROOM", 1 << 20)
    archive, much = tmp_path / "a.tar.gz", tarfile.TarInfo("other")
    much.size = 4 << 20
    archive.write_bytes(tar_of(much, bytes(4 << 20)))
    assert "unpacks to more than" in refusal(list, unpack.members(archive, {"b"}, 10))


@pytest.mark.parametrize(
    "said", [{"path": "a\0b"}, {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}]
)
def test_an_archive_that_tarfile_stumbles_over(said, tmp_path):
    member = tarfile.TarInfo("b")
    member.pax_headers = said
    archive = tmp_path / "a.tar.gz"
    archive.write_bytes(tar_of(member))
    assert str(archive) in refusal(list, unpack.members(archive, {"b"}, 10))


ARRAY = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"\x80\x02Nr" + struct.pack("<I", 1 << 31) + b".", "holds a NoneType"),
        (b"Np2147483648\n.", "holds a NoneType"),
        (b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"x.", "truncated or damaged"),
        (b"\x80\x02}U\x04data" + ARRAY + b"s.", "truncated or damaged"),
        (b"}(N" + b"\x85" * 3000 + b"Nu.", "other things than names"),
        (
            b"\x80\x02c_codecs\nencode\nq\x00X\x64\0\0\0" + b"a" * 100
            + b"q\x01U\x06latin1q\x02](" + b"h\x00h\x01h\x02\x86R" * 20 + b"e.",
            "again and again",
        ),
    ],
)  # fmt: skip
def test_a_pickle_has_no_more_memory_than_its_own_bytes(raw, said):
    message = refusal(pickled.batch, raw, "a batch")
    assert "a batch" in message
    assert said in message


def test_good_pickles_are_read_as_before():
    for protocol in range(3, 6):
        found = pickled.batch(pickle.dumps({"labels": [1, 2], "b": b"x" * 300}, protocol), "a")
        assert found == {"labels": [1, 2], "b": b"x" * 300}


def test_a_pipe_is_no_picture(tmp_path):
    os.mkfifo(tmp_path / "a.png")
    assert refusal(pictures.contents, tmp_path / "a.png") == "not a regular file"
    with (tmp_path / "b.png").open("wb") as file:
        file.truncate(2 << 30)
    assert "more than any image" in refusal(pictures.contents, tmp_path / "b.png")


def test_a_configuration_gets_no_memory_before_its_weights_fit(tmp_path, monkeypatch):
    net = mssar.create_model("resnet8")
    net.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_classes": 3 * 10**7}))
    made, linear = [], torch.nn.Linear.__init__

    def noted(self, *args, **options):
        linear(self, *args, **options)
        made.append(self.weight.device.type)

    monkeypatch.setattr(torch.nn.Linear, "__init__", noted)
    assert "size mismatch for fc.weight" in refusal(mssar.from_pretrained, tmp_path)
    assert set(made) == {"meta"}


def test_a_seed_says_which_changes():
    data = bytes(range(256)) * 4
    first, again = ([mutation.changed(Random(n), data) for n in range(50)] for _ in range(2))
    assert first == again
    assert all(change.data != data for change in first)
    assert len({change.what.split()[0] for change in first}) > 5
    assert replace(family_of(fine), count=1).count == 1
