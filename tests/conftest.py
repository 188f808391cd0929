"""Triton's interpreter and shape checks, set up before what needs them is imported; what several
test files share."""

import os

import torch

if not torch.cuda.is_available():  # read when Triton is imported, which parts of torch do
    os.environ["TRITON_INTERPRET"] = "1"

import importlib
import importlib.util
import sys
import types
import typing
from collections.abc import Iterator

import pytest
import torch.nn.functional as F
from interpreting import hasten

# The library imports its shape annotations for type checkers only. Here it really does, and
# jaxtyping's hook then checks every annotated call. What it imports itself must be loaded before.
if importlib.util.find_spec("jaxtyping") and importlib.util.find_spec("beartype"):
    import beartype  # noqa: F401
    from jaxtyping import install_import_hook

    typing.TYPE_CHECKING = True
    with install_import_hook("mssar", "beartype.beartype"):
        import mssar
    typing.TYPE_CHECKING = False
else:
    import mssar  # noqa: F401

pytest_plugins = ["browser", "slurm"]

hasten()

# Four fifths of the time. Kernels in Triton's interpreter; compilers and exports; a browser and
# documents; several processes, clusters and faults on purpose.
SLOW = (
    *("compilation", "dense", "dispatch", "dispatch_changes", "dispatch_errors", "fuzz", "kernels"),
    *("kernels_evaluation", "kernels_numbers", "synchronised", "tail", "tail_compiled", "windows"),
    *("export", "surgery_uses", "symbolic", "transforms"),
    *("documents", "notebook", "page_browser", "page_figures", "page_tables"),
    *("distributed", "offline", "photograph_training", "stack", "stacked_runs"),
    *("submit_local", "submit_slurm"),
    *("faults_command", "faults_company", "faults_disk", "faults_kills"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem.removeprefix("test_") in SLOW:
            item.add_marker(pytest.mark.slow)
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


# The tests' tensors are small, and each worker of a parallel run has a core of its own.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of float32 on a GPU, too."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture
def smooth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Relus without their kink: on which side of it a number lies may be a matter of rounding,
    which is another on another processor."""
    monkeypatch.setattr(F, "relu", lambda x, **_: F.softplus(x))
    monkeypatch.setattr(torch.Tensor, "relu", lambda x: F.softplus(x))
    monkeypatch.setitem(sys.modules["mssar.tail"].ACTIVATIONS, "relu", F.softplus)


@pytest.fixture
def rounded_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter, too, which cuts bfloat16 off where a GPU rounds."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    tl = pytest.importorskip("triton.language")
    cut_off = interpreter._convert_float

    def convert(values, source, target, *rest):
        if (source, target) != (tl.float32, tl.bfloat16):
            return cut_off(values, source, target, *rest)
        exact = torch.from_numpy(values.view("float32").copy())
        return exact.bfloat16().view(torch.int16).numpy().view("uint16")

    monkeypatch.setattr(interpreter, "_convert_float", convert)


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """ "auto" takes the kernels, whatever the device."""
    for module in ("mssar.fused", "mssar.layer"):
        monkeypatch.setattr(f"{module}.chosen", lambda backend, _: backend != "reference")


@pytest.fixture(scope="session")
def torchvision() -> types.ModuleType:
    """torchvision, also where its compiled operators do not fit the torch that is installed."""
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    try:
        return importlib.import_module("torchvision")
    except RuntimeError:  # it asks for operators that its library would have registered
        for name in [name for name in sys.modules if name.startswith("torchvision")]:
            del sys.modules[name]
        _operators.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _operators.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return importlib.import_module("torchvision")


@pytest.fixture(scope="session")
def timm(torchvision: types.ModuleType) -> types.ModuleType:  # noqa: ARG001, timm imports it
    return pytest.importorskip("timm", reason="needs the extra timm")


_operators = torch.library.Library("torchvision", "FRAGMENT")  # lives as long as it is needed


def _ours() -> dict[str, types.ModuleType]:
    return {n: m for n, m in sys.modules.items() if n == "mssar" or n.startswith("mssar.")}


_plain: dict[str, types.ModuleType] = {}


@pytest.fixture
def unchecked() -> Iterator[types.ModuleType]:
    """The package without its shape checks.

    torch.compile and export cannot trace the checkers, and errors for wrong arguments are the
    library's own only without them.
    """
    checked = _ours()
    for name in checked:
        del sys.modules[name]
    sys.modules.update(_plain)
    try:
        package = importlib.import_module("mssar")
        for name in package.__all__:  # loaded now, not while a test has parts of it exchanged
            getattr(package, name)
        yield package
    finally:
        _plain.update(_ours())  # kept, so that it is imported once
        for name in _plain:
            sys.modules.pop(name, None)
        sys.modules.update(checked)
