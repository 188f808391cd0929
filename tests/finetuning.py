"""A folder of photographs, and a network of timm's, to fine-tune from the command line."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import safetensors.torch
import torch
from lab import plant
from torch import nn

from mssar.lab import records
from mssar.lab.run import run_from_dict
from mssar.surgery import foreign

pytestmark = [
    pytest.mark.usefixtures("torchvision"),
    pytest.mark.skipif(not find_spec("timm"), reason="needs the extra timm"),
]

SMALL = ("--size", "32", "--resize", "32", "--batch", "8", "--epochs", "2", "--workers", "0")
ON = ("--dataset", "imagefolder", "--data-dir", "tree", "--device", "cpu")
NET = "timm:test_resnet"


@pytest.fixture(autouse=True)
def _tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dark and bright pictures; 6 and 5 for training (8 and 3 a step), 3 and 2 for testing."""
    plant(tmp_path / "tree", (36, 40), train=(6, 5), val=(3, 2))
    monkeypatch.chdir(tmp_path)


def folder_of(record: records.Record) -> Path:
    return Path("runs") / run_from_dict(record.run).name


def last_record() -> records.Record:
    return records.read(Path("runs/records.jsonl"))[-1]


@pytest.fixture
def weights() -> Path:
    """Of a network for 5 classes, as after some training."""
    torch.manual_seed(1)
    model = foreign.build(NET, num_classes=5)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.running_var, 0.5, 2)
    path = Path("five.safetensors")
    safetensors.torch.save_file(model.state_dict(), path)
    return path
