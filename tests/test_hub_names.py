"""Networks that timm makes from the Hub or from a folder, and what is said where none answers."""

import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from finetuning import ON, SMALL, _tree, folder_of, last_record, pytestmark
from lab import learnt
from test_cli import fail, run

import mssar
from mssar.lab.run import Run
from mssar.networks import hub
from mssar.surgery import foreign

__all__ = ["_tree", "pytestmark"]  # a fixture, and what is needed
NET = "timm:local-dir:published"
LONG = (
    "An error happened while trying to locate the file on the Hub and we cannot find the requested "
    "files in the local cache. Please check your connection and try again or make sure your "
    "Internet connection is on."
)


@pytest.fixture
def published() -> dict[str, torch.Tensor]:
    """A folder as on the Hub, of a network that is not quite timm's."""
    torch.manual_seed(1)
    state = foreign.bare("timm:test_resnet", 5).state_dict()
    colours = {"mean": [0.4, 0.4, 0.4], "std": [0.3, 0.3, 0.3]}
    names = {"first_conv": "conv1.0", "classifier": "fc", "tag": "mine"}
    config = {
        "architecture": "test_resnet",
        "num_classes": 5,
        "pretrained_cfg": {"input_size": [3, 32, 32], "num_classes": 5, **colours, **names},
    }
    Path("published").mkdir()
    Path("published/config.json").write_text(json.dumps(config))
    safetensors.torch.save_file(state, "published/model.safetensors")
    return state


def test_a_folder_of_timm_s_is_trained_and_shared(published):
    words = ("--weights", "pretrained", "--insert", "--lr", "1e-12", *ON, *SMALL)
    run("train", "--from", NET, *words)
    record = last_record()
    folder = folder_of(record)
    assert folder.name.startswith("imagefolder-timm-test_resnet-mssar-")
    assert record.run["network"] == "timm:test_resnet"
    assert record.run["weights"]["file"] == NET
    assert record.run["normalisation"] == {"mean": [0.4] * 3, "std": [0.3] * 3}
    found = learnt(folder)["model.conv1.0.weight"]
    torch.testing.assert_close(found, published["conv1.0.weight"])
    Path("published").rename("gone")  # a run needs it no more
    run("eval", str(folder), *ON[2:])
    run("weights", str(folder), "shared", *ON[2:])
    config = json.loads(Path("shared/config.json").read_text())
    assert config["network"] == "timm:test_resnet"
    assert mssar.from_pretrained("shared").fc.out_features == 2


def test_where_a_network_lies_is_not_told(published, tmp_path):
    """Neither in a folder to share nor in what is in its file."""
    there = f"timm:local-dir:{tmp_path}/published"
    timm = pytest.importorskip("timm")
    net = timm.create_model(there.removeprefix("timm:"), pretrained=True)
    assert net.state_dict().keys() == published.keys()
    mssar.insert(net)
    config = mssar.save_pretrained(net, "a", name=there)
    assert json.loads((config / "config.json").read_text())["source"] == NET
    run("train", "--from", there, "--weights", "pretrained", *ON, *SMALL)
    run("weights", str(folder_of(last_record())), "b", *ON[2:])
    for file in (*Path("a").iterdir(), *Path("b").iterdir()):
        assert str(tmp_path).encode() not in file.read_bytes(), file


def test_arguments_of_its_own_and_two_of_one_kind_are_refused(published, capsys, monkeypatch):
    both = fail(capsys, monkeypatch, "train", NET, "timm:test_resnet", *ON, *SMALL)
    assert f"{NET} and timm:test_resnet are both timm:test_resnet: train one at a time" in both
    file = Path("published/config.json")
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"model_args": {"stem_width": 24}}))
    line = fail(capsys, monkeypatch, "train", NET, *ON, *SMALL)
    assert "local-dir:published is a test_resnet with arguments of its own" in line
    assert published


def test_names_of_the_hub_are_passed_on(published, monkeypatch):
    timm = pytest.importorskip("timm")
    create, asked = timm.create_model, []

    def bring(name: str, **options: Any) -> Any:
        asked.append(name)
        return create(name.replace("hf-hub:me/net", "local-dir:published"), **options)

    monkeypatch.setattr(timm, "create_model", bring)
    before = torch.random.get_rng_state()
    chosen = foreign.elsewhere("timm:hf-hub:me/net")  # it is built, to be looked at
    assert torch.equal(torch.random.get_rng_state(), before)
    assert chosen.name == "test_resnet"
    assert (chosen.num_classes, chosen.size, chosen.mean) == (5, (3, 32, 32), (0.4, 0.4, 0.4))
    assert foreign.pretrained("timm:hf-hub:me/net").keys() == published.keys()
    assert asked == ["hf-hub:me/net", "test_resnet", "hf-hub:me/net"]
    assert len(Run(f"timm:{'网' * 100}").name.encode()) < 200


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("timm:local-dir:nowhere",), "timm cannot make local-dir:nowhere: Config file not found"),
        (("timm:local-dir:empty",), "local-dir:empty: its configuration has no 'architecture'"),
        (("timm:ftp:me/net",), "timm cannot make ftp:me/net: Unknown model source 'ftp'"),
        (
            ("timm:timm/resnet50.a1_in1k",),
            "no network 'timm/resnet50.a1_in1k'; one of the Hub is timm:hf-hub:timm/resnet50.a1_in",
        ),
        *(
            (
                ("timm:test_resnet", "--weights", f"{before}timm/resnet50.a1_in1k"),
                f"there is no file {before}timm/resnet50.a1_in1k; what is on the Hub is --from "
                "timm:hf-hub:timm/resnet50.a1_in1k --weights pretrained",
            )
            for before in ("", "hf-hub:", "timm:hf-hub:", "https://huggingface.co/")
        ),
        (("timm:test_resnet", "--weights", "a/b.pth"), "no file a/b.pth; --weights is a file"),
    ],
)
def test_a_mistake_is_one_line(capsys, monkeypatch, words, line):
    Path("empty").mkdir()
    Path("empty/config.json").write_text("{}")
    assert line in fail(capsys, monkeypatch, "train", *words, *ON, *SMALL)


@pytest.fixture
def noise() -> Iterator[list[logging.LogRecord]]:
    """What huggingface_hub tells by its logger, which keeps it from others."""
    told: list[logging.LogRecord] = []
    handler, logger = logging.Handler(), logging.getLogger("huggingface_hub")
    handler.emit = told.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    yield told
    logger.removeHandler(handler)


class LocalEntryNotFoundError(FileNotFoundError):
    pass


def unreachable(*_: Any, **__: Any) -> None:
    """As the Hub is without a network: retries that are told, and an error of another error."""
    logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s [Retry 1/5].")
    try:
        raise socket.gaierror(-2, "Name or service not known")
    except OSError as error:
        raise LocalEntryNotFoundError(LONG) from error


@pytest.mark.parametrize("net", ["timm:test_resnet", "timm:hf-hub:me/net"])
def test_without_a_connection_there_is_one_line(noise, monkeypatch, net):
    pytest.importorskip("huggingface_hub", reason="needs the extra hub")
    timm = pytest.importorskip("timm")
    monkeypatch.setattr(timm, "create_model", unreachable)
    with pytest.raises(ValueError, match=r"no connection \(\[Errno -2\] Name or") as caught:
        foreign.pretrained(net)
    assert noise == []
    line = str(caught.value)
    assert line.endswith("not known); a file of weights needs none")


def test_messages_of_others_are_cut_between_words():
    assert hub.line(ValueError("a\n b")) == "a b"
    assert hub.line(KeyError()) == "KeyError"
    assert hub.trouble(OSError(LONG)) == LONG
    cut = hub.line(ValueError("word " * 100))
    assert cut.endswith("word …")
    assert len(cut) <= hub.LONGEST + 2
    for said in (f"timm has no network {'x' * 400}", "x" * 400):
        assert hub.line(ValueError(said)) == f"{said[: hub.LONGEST]}…"
    whole = f"{'a ' * 140}{'x' * 20} next"  # a word that just fits
    assert hub.line(ValueError(whole)) == f"{whole[:300]} …"
    error = ValueError("x")
    error.__context__ = other = ValueError("y")
    other.__context__ = error  # round and round
    assert hub.trouble(error) == "x"


def test_pushing_without_a_connection_is_one_line(monkeypatch, noise):
    huggingface_hub = pytest.importorskip("huggingface_hub", reason="needs the extra hub")
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", unreachable)
    said = (
        r"^'me/net' cannot be put on the Hub: no connection \(\[Errno -2\] Name or service not kn"
    )
    net = mssar.create_model("resnet8")
    for push in (net.push_to_hub, lambda name: mssar.push_to_hub(net, name)):
        with pytest.raises(ValueError, match=said):
            push("me/net")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ValueError, match=r"'me/net' is no folder here, .* reached: no connection"):
        mssar.from_pretrained("me/net")
    assert noise == []
