"""What importing the package does, and what it does not need."""

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import mssar
from mssar.surgery.foreign import LIBRARIES


def test_the_library_needs_nothing_but_torch():
    program = """
import sys

optional = "beartype huggingface_hub jaxtyping mssar.lab msgspec numpy onnx rich safetensors timm"
for name in f"{optional} torchvision triton typer".split():
    sys.modules[name] = None  # an import of it fails
import torch
import mssar

layer = mssar.MSSAR(8)
layer(torch.randn(2, 8, 7, 7)).sum().backward()
assert layer.branches[2].reduce.weight.grad.any()
print(mssar.cost(mssar.create_model("resnet20", "mssar"), (3, 32, 32)).params)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stdout == "306530\n", done.stderr


def test_importing_the_library_does_not_import_triton():
    """Where it is installed: it takes its time, and reads its settings only once."""
    program = "import sys, mssar; print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_names_are_imported_when_they_are_asked_for():
    program = """
import sys
import mssar

assert "torch" not in sys.modules
assert {*mssar.__all__} <= {*dir(mssar)}
from mssar.cost import Cost  # a module of a function's name does not take its place
import mssar.explain, mssar.tail
import mssar.export as export
import pickle

assert callable(export)
assert mssar.kernels.__name__ == "mssar.kernels"
assert mssar.networks.DenseNet
for name in mssar.__all__:
    assert callable(getattr(mssar, name)), name
    assert pickle.loads(pickle.dumps(getattr(mssar, name))) is getattr(mssar, name)
from mssar import *
assert isinstance(cost(MSSAR(4), (4, 8, 8)), Cost)
try:
    mssar.nothing
except AttributeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "module 'mssar' has no attribute 'nothing'\n", done.stderr


def test_without_triton_the_kernels_are_refused_and_nothing_else():
    program = """
import sys

sys.modules["triton"] = None  # neither found nor imported
import torch
import mssar

x = torch.randn(2, 8, 7, 7)
for backend in ("auto", "reference", "triton"):
    layer = mssar.MSSAR(8, backend=backend)
    network = mssar.create_model("resnet8", "mssar", backend=backend)
    assert mssar.cost(network, (3, 32, 32)).params == sum(p.numel() for p in network.parameters())
    for module, image in ((layer, x), (network, torch.randn(2, 3, 32, 32))):
        try:
            module(image).sum().backward()
            print(backend, "works")
        except ValueError as error:
            print(backend, error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    advice = "needs Triton 3.4 or newer: pip install -U triton, or backend='auto'"
    refused = f"triton backend='triton' {advice}\n" * 2
    assert done.stdout == "auto works\n" * 2 + "reference works\n" * 2 + refused, done.stderr


def test_public_names():
    assert mssar.__all__ == sorted(mssar.__all__)
    assert all(hasattr(mssar, name) for name in mssar.__all__)
    names = (
        "MSSAR Regional Sliding cost create_model explain export from_pretrained insert "
        "list_models push_to_hub remove save_pretrained tail warm"
    )
    assert mssar.__all__ == names.split()


def test_the_version_is_said_once():
    try:
        installed = importlib.metadata.version("mssar")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package is not installed, only on the path")
    assert installed == mssar.__version__
    cited = Path(__file__).parents[1] / "CITATION.cff"
    assert f"version: {mssar.__version__}\n" in cited.read_text()


def test_the_changelog_has_the_version():
    said = (Path(__file__).parents[1] / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## (.*)$", said, re.MULTILINE)
    form = r"\d+\.\d+\.\d+ \((unreleased|\d{4}-\d\d-\d\d)\)"
    assert all(re.fullmatch(form, heading) for heading in headings)
    assert headings[0].split()[0] == mssar.__version__


def test_the_wheel_has_all_that_the_command_needs(tmp_path):
    pytest.importorskip("hatchling")
    program = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
    made = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    wheel = tmp_path / made.stdout.split()[-1]
    assert wheel.name == f"mssar-{mssar.__version__}-py3-none-any.whl", made.stderr
    root = Path(mssar.__file__).parent
    sources = {
        f"mssar/{file.relative_to(root).as_posix()}"
        for file in root.rglob("*")
        if file.is_file() and file.suffix != ".pyc"
    }
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(tmp_path / "installed")
        assert sources <= {*packed.namelist()}
        (entry,) = [name for name in packed.namelist() if name.endswith("entry_points.txt")]
        assert "mssar = mssar.__main__:main" in packed.read(entry).decode()
    done = subprocess.run(
        [sys.executable, "-m", "mssar", "train", "--help"],
        cwd=tmp_path / "installed",  # comes first on the path
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
    )
    assert "mssar train resnet20" in done.stdout, done.stderr


def test_the_package_is_marked_typed():
    assert (Path(mssar.__file__).parent / "py.typed").exists()


def test_an_extra_is_advised_as_a_clone_has_it():
    """No index has the package; and every extra that is advised is there."""
    root = Path(mssar.__file__).parent
    sources = {file: file.read_text() for file in root.rglob("*.py")}
    assert [file.name for file, text in sources.items() if "mssar[" in text] == []
    advised = {
        extra for text in sources.values() for extra in re.findall(r"advice\('(\w+)'\)", text)
    } | set(LIBRARIES.values())
    project = tomllib.loads((root.parents[1] / "pyproject.toml").read_text())["project"]
    assert len(advised) > 4
    assert advised <= project["optional-dependencies"].keys()
