"""Files that would run a program do not, wherever they are put; and the canary would tell."""

import os
import pickle
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from faults import intruders  # noqa: E402

from mssar.surgery import foreign  # noqa: E402


@pytest.mark.usefixtures("torchvision")
def test_nothing_runs(capsys):
    rows = list(intruders.check(0.001, seed=3))
    assert sum(row.wrong for row in rows) == 0, capsys.readouterr().err
    assert [row.tried for row in rows] == [len(uses) for uses in intruders.USES.values()]


@pytest.mark.parametrize("gadget", intruders.GADGETS)
def test_the_canary_tells(gadget):
    """Of every pickle, where it is loaded as one."""

    def trusting(_folder: Path, content: bytes, _suffix: str) -> None:
        pickle.loads(content)

    assert intruders.attempt(trusting, "pickle 2", gadget, "") == "the program ran"


@pytest.mark.parametrize("form", ["torch", "old torch", "state dict"])
def test_the_canary_tells_of_torchs_files(form):
    def trusting(folder: Path, content: bytes, _suffix: str) -> None:
        (folder / "x").write_bytes(content)
        torch.load(folder / "x", weights_only=False)

    assert intruders.attempt(trusting, form, "mkdir", "") == "the program ran"


def test_a_line_too_many_is_told():
    def talking(*_: object) -> None:
        raise ValueError("one\ntwo")

    assert intruders.attempt(talking, "tar", "exec", "").startswith("not one line")
    assert intruders.attempt(lambda *_: {}["x"], "tar", "exec", "").startswith("KeyError")


@pytest.mark.usefixtures("torchvision")
def test_a_library_reads_tensors_alone(tmp_path, monkeypatch):
    """torchvision would load a pickle from its cache whole."""
    (use,) = intruders.USES[intruders.CACHE]
    assert intruders.attempt(use, "state dict", "mkdir", "") == ""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    file = tmp_path / "hub/checkpoints/squeezenet1_1-b8a52dc0.pth"
    file.parent.mkdir(parents=True)
    torch.save({"weights": torch.ones(1), "more": print}, file)
    with pytest.raises(ValueError, match=r"torchvision cannot bring weights .*[Ww]eights.only"):
        foreign.pretrained("torchvision:squeezenet1_1")
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "0")
    whole = foreign.build("torchvision:squeezenet1_1").state_dict()
    torch.save(whole, file)
    found = foreign.pretrained("torchvision:squeezenet1_1")
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    assert os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] == "0"
