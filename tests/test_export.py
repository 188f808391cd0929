"""Files that need nothing of ours: what they compute, what they hold, and what is left alone."""

import copy
import json
import logging
import zipfile
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.testing import assert_close

SHAPES = [(1, 3, 12, 12), (5, 3, 9, 16), (2, 3, 30, 7), (1, 3, 4, 4)]  # even, ragged, the least


class Pooled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


def network(mssar, **options) -> nn.Sequential:
    """Convolutions, norms and the layer; the last map is two pixels smaller than the image."""
    made = nn.Sequential(
        nn.Conv2d(3, 6, 3, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        mssar.MSSAR(6, **options),
        Pooled(),
        nn.Linear(6, 4),
    )
    return disturbed(made)


def disturbed(model: nn.Module) -> nn.Module:
    """As after training: no norm is the identity."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d | nn.SyncBatchNorm):
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2)
            if module.affine:
                nn.init.uniform_(module.weight, 0.5, 2)
                nn.init.normal_(module.bias)
    return model


@pytest.fixture
def onnxruntime():
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name, reason="needs the extra export")
    import onnxruntime

    return onnxruntime


# --- What files compute and hold


def test_onnx_of_any_size_without_an_op_of_ours(unchecked, onnxruntime, tmp_path):
    import onnx

    model, file = network(unchecked), tmp_path / "net.onnx"
    said = {"classes": ["cat", "dög"], "mean": (1.5, 2.0, 3.0), "network": "net"}
    made = unchecked.export(model, file, (3, 12, 12), metadata=said)
    session = onnxruntime.InferenceSession(file)
    for shape in SHAPES:
        x = torch.randn(shape)
        (found,) = session.run(None, {"images": x.numpy()})
        assert_close(torch.from_numpy(found), model.eval()(x))
    proto = onnx.load(file)
    assert {node.domain for node in proto.graph.node} == {""}
    assert "BatchNormalization" not in {node.op_type for node in proto.graph.node}
    (taken,), (given,) = proto.graph.input, proto.graph.output
    axes = [d.dim_param or d.dim_value for d in taken.type.tensor_type.shape.dim]
    assert axes == ["batch", 3, "height", "width"]
    assert [d.dim_param or d.dim_value for d in given.type.tensor_type.shape.dim] == ["batch", 4]
    kept = {p.key: p.value for p in proto.metadata_props}
    assert json.loads(kept["mssar.classes"]) == said["classes"]
    assert json.loads(kept["mssar.mean"]) == [1.5, 2.0, 3.0]
    assert kept["mssar.network"] == "net"
    assert json.loads(kept["mssar.open"])["height"] == [4, None]
    assert str(Path(__file__).parent).encode() not in file.read_bytes()  # nor where it was made
    assert (made.folded, made.opset) == (7, proto.opset_import[0].version)
    assert made.open == {"batch": (1, None), "height": (4, None), "width": (4, None)}
    assert made.fixed is None
    assert made.bytes == file.stat().st_size
    assert made.difference < 1e-5
    assert [f for f in tmp_path.iterdir() if f != file] == []


def test_a_file_computes_on_the_smallest_maps_too(unchecked, onnxruntime, tmp_path):
    """Of one position, where torch.export says that it may have two at the least."""
    model, file = network(unchecked), tmp_path / "net.onnx"
    assert unchecked.export(model, file, (3, 12, 12)).open["height"] == (4, None)
    session = onnxruntime.InferenceSession(file)
    for size in ((3, 3), (3, 5), (5, 3)):
        x = torch.randn(2, 3, *size)
        (found,) = session.run(None, {"images": x.numpy()})
        assert_close(torch.from_numpy(found), model.eval()(x))


@pytest.mark.parametrize(
    ("scales", "most"),
    [
        # sums, means, a split; a branch each; joined, averaged, laid over the map, the product
        ((1, 2, 4), 3 + 2 + 4 * 3 + 3 + 2 + 1),
        ((1,), 1 + 4 + 1),  # SE
    ],
)
def test_what_a_layer_is_in_a_file(unchecked, onnxruntime, tmp_path, scales, most):
    """Every operation costs a runtime some microseconds, and one that gathers a map far more."""
    assert onnxruntime
    import onnx

    def operations(layers: int) -> list[str]:
        parts = [m for _ in range(layers) for m in (nn.Conv2d(6, 6, 1), unchecked.MSSAR(6, scales))]
        unchecked.export(nn.Sequential(*parts), tmp_path / "net.onnx", (6, 12, 12))
        return [node.op_type for node in onnx.load(tmp_path / "net.onnx").graph.node]

    one, two = operations(1), operations(2)
    assert len(two) - len(one) <= most + 1  # with its convolution
    assert not {"Gather", "GatherND", "Slice", "Transpose", "Expand"} & set(two[len(one) :])


@pytest.mark.parametrize("options", [{}, {"strategy": "sliding"}], ids=["regional", "sliding"])
def test_a_program_of_any_size(unchecked, tmp_path, options):
    model, file = network(unchecked, **options), tmp_path / "net.pt2"
    made = unchecked.export(model, file, (3, 12, 12), metadata={"classes": ["a", "b"]})
    extra = {"mssar.json": ""}
    program = torch.export.load(file, extra_files=extra)
    for shape in SHAPES:
        x = torch.randn(shape)
        assert_close(program.module()(x), model.eval()(x))
    assert not [n for n in program.graph.nodes if "mssar" in str(n.target)]
    assert json.loads(extra["mssar.json"])["classes"] == ["a", "b"]
    assert (made.opset, made.folded) == (None, 7)
    assert zipfile.is_zipfile(file)


def test_a_densenet_that_takes_its_weights_from_another_map(unchecked, onnxruntime, tmp_path):
    model = unchecked.networks.DenseNet(10, 4, recalibration=unchecked.MSSAR)
    model, file = disturbed(model), tmp_path / "dense.onnx"
    made = unchecked.export(model, file, (3, 16, 16))
    assert made.fixed is None
    x = torch.randn(3, 3, 19, 22)
    (found,) = onnxruntime.InferenceSession(file).run(None, {"images": x.numpy()})
    assert_close(torch.from_numpy(found), model.eval()(x))


def test_the_optimiser_is_not_given_what_layers_have_in_common(
    unchecked, torchvision, onnxruntime, tmp_path, monkeypatch
):
    """Its time is quadratic in nodes: twice as many would be four times as long."""
    assert onnxruntime
    given, optimise = [], torch.onnx.ONNXProgram.optimize

    def counted(program):
        for node in program.model.graph:
            if node.op_type != "Constant":
                inputs = [value and value.name for value in node.inputs]
                given.append(
                    f"{node.op_type} {inputs} {sorted(map(str, node.attributes.values()))}"
                )
        optimise(program)

    monkeypatch.setattr(torch.onnx.ONNXProgram, "optimize", counted)
    model = torchvision.models.DenseNet(4, (3,), 8, num_classes=2)
    unchecked.insert(model)
    unchecked.export(model, tmp_path / "dense.onnx", (3, 32, 32))
    assert "Range" in " ".join(given)  # the indices that all three have
    assert len(set(given)) == len(given)


def test_a_network_that_returns_its_images_too(unchecked, onnxruntime, tmp_path):
    class Both(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, 2 * x

    unchecked.export(Both(), tmp_path / "both.onnx", (3, 4, 4))
    x = torch.randn(1, 3, 4, 4)
    session = onnxruntime.InferenceSession(tmp_path / "both.onnx")
    same, double = session.run(None, {"images": x.numpy()})
    assert_close(torch.from_numpy(same), x)
    assert_close(torch.from_numpy(double), 2 * x)
    assert session.get_outputs()[0].name == "logits"


def test_the_network_is_left_as_it_was(unchecked, tmp_path):
    model = network(unchecked, backend="triton").train()
    model[1].eval()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    before, state = list(model.modules()), copy.deepcopy(model.state_dict())
    modes = [m.training for m in before]
    unchecked.export(model, tmp_path / "net.pt2", (3, 12, 12))
    assert list(model.modules()) == before
    assert [m.training for m in before] == modes
    assert model[3].backend == "triton"
    assert all(p.requires_grad for p in model.parameters())
    assert model[0].weight.grad.eq(1).all()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]), name


def test_a_compiled_network_is_exported_as_it_was_before(unchecked, tmp_path):
    model = network(unchecked)
    made = unchecked.export(torch.compile(model, backend="eager"), tmp_path / "a.pt2", (3, 12, 12))
    assert made.folded == 7


# --- What stays fixed, and why


def test_a_network_of_one_size_is_exported_at_that_and_says_why(unchecked, tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), unchecked.MSSAR(4), nn.Flatten(), nn.Linear(400, 2))
    made = unchecked.export(model, tmp_path / "a.pt2", (3, 12, 12))
    assert made.open == {"batch": (1, None)}
    assert made.fixed.startswith("images are 12×12: at 17×10 the network fails: ")
    assert "mat1 and mat2" in made.fixed
    assert {shape[2:] for shape in made.tried} == {(12, 12)}
    assert f"fixed: {made.fixed}" in str(made)
    found = torch.export.load(tmp_path / "a.pt2").module()(torch.ones(7, 3, 12, 12))
    assert_close(found, model.eval()(torch.ones(7, 3, 12, 12)))


def test_a_program_that_is_another_at_other_sizes_is_of_one(unchecked, tmp_path, caplog):
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.amax((2, 3)) if x.shape[2] % 2 else x.mean((2, 3))

    made = unchecked.export(Odd(), tmp_path / "a.pt2", (3, 16, 16))
    assert made.open == {"batch": (1, None)}
    assert made.fixed.startswith("height, width: torch.export specialises: Guard failed")
    loud = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert not loud  # a solver's tracebacks are not for users


@pytest.mark.parametrize("kind", ["none", "simam", "se", "mssar"])
@pytest.mark.parametrize(("name", "size", "least"), [("resnet8", 32, 5), ("resnet18", 64, 33)])
def test_sizes_are_open_from_the_least_that_is_taken(unchecked, tmp_path, kind, name, size, least):
    """Of a network without layers PyTorch says 2, and guards against less than this."""
    model, file = disturbed(unchecked.create_model(name, kind)), tmp_path / "net.pt2"
    made = unchecked.export(model, file, (3, size, size))
    assert made.fixed is None
    assert made.open["height"] == made.open["width"] == (least, None)
    program = torch.export.load(file).module()
    for height, width in ((least, least), (least, size + 5), (size + 30, least + 1)):
        x = torch.randn(2, 3, height, width)
        assert_close(program(x), model.eval()(x), atol=1e-4, rtol=1e-4)


def test_averaged_weights_are_exported(unchecked, tmp_path):
    """What wraps a network takes any arguments."""
    model = disturbed(unchecked.create_model("resnet8", "mssar"))
    made = unchecked.export(AveragedModel(model), tmp_path / "net.pt2", (3, 32, 32))
    assert made.open.keys() == {"batch", "height", "width"}
    x = torch.randn(3, 3, 40, 33)
    program = torch.export.load(tmp_path / "net.pt2").module()
    assert_close(program(x), model.eval()(x), atol=1e-4, rtol=1e-4)


def test_layers_on_maps_of_one_size_share_indices(unchecked, tmp_path):
    def counted(layers: int) -> int:
        parts = [m for _ in range(layers) for m in (nn.Conv2d(6, 6, 1), unchecked.MSSAR(6))]
        halved = nn.Conv2d(6, 6, 3, 2)
        unchecked.export(nn.Sequential(halved, *parts), tmp_path / "net.pt2", (6, 24, 24))
        nodes = torch.export.load(tmp_path / "net.pt2").graph.nodes
        return sum("arange" in str(node.target) for node in nodes)

    assert counted(3) == counted(1) > 0


def test_a_network_for_single_images_has_a_fixed_batch(unchecked, tmp_path):
    class Single(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) != 1:
                raise RuntimeError("one at a time")
            return x.mean((2, 3))

    made = unchecked.export(Single(), tmp_path / "a.pt2", (3, 8, 8))
    assert "batch" not in made.open
    assert made.fixed == "batch is 1: a batch of 3 fails: one at a time"
    assert {shape[0] for shape in made.tried} == {1}


# --- Mistakes


def test_a_file_that_disagrees_never_gets_its_name(unchecked, tmp_path, monkeypatch):
    module = import_module("mssar.export")
    file = tmp_path / "net.pt2"
    file.write_text("the one before")
    write = module._write_program

    def spoilt(program, *rest):
        program.state_dict["5.bias"] += 0.1
        write(program, *rest)

    monkeypatch.setattr(module, "_write_program", spoilt)
    with pytest.raises(ValueError, match=r"differs from PyTorch's output by .*net.pt2 was not"):
        unchecked.export(network(unchecked), file, (3, 12, 12))
    assert file.read_text() == "the one before"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("net", (3, 12, 12)), r"format is onnx \(.onnx\) or torch \(.pt2\); got a file 'net'"),
        (("net.onnx", (3, 12, 12), "tflite"), "got format 'tflite'"),
        (("net.onnx", (3, 12, 12), "torch"), r"a file of format torch ends in .pt2; got net.onnx"),
        (("net.pt2", (12, 12)), r"C, H, W of one image, such as \(3, 32, 32\); got \(12, 12\)"),
        (("none/net.pt2", (3, 12, 12)), "there is no folder"),
        (("folder.pt2", (3, 12, 12)), "folder.pt2 is a folder"),
        (("net.pt2", (1, 12, 12)), "the network does not take an image of 1×12×12: Given groups"),
    ],
)
def test_a_mistake_is_one_line(unchecked, tmp_path, words, message):
    (tmp_path / "folder.pt2").mkdir()
    name, *rest = words
    with pytest.raises(ValueError, match=message) as caught:
        unchecked.export(network(unchecked), tmp_path / name, *rest)
    assert len(str(caught.value).splitlines()) == 1
    assert [f.name for f in tmp_path.iterdir()] == ["folder.pt2"]


def test_what_cannot_be_written_is_said_before_it_is_tried(unchecked, tmp_path):
    traced = torch.jit.trace(nn.Conv2d(3, 4, 1), torch.randn(1, 3, 12, 12))
    with pytest.raises(ValueError, match="is a traced network; export the one it was traced fro"):
        unchecked.export(traced, tmp_path / "a.pt2", (3, 12, 12))
    with pytest.raises(ValueError, match="export needs a network with numbers; this one is on 'm"):
        unchecked.export(network(unchecked).to("meta"), tmp_path / "a.pt2", (3, 12, 12))


@pytest.mark.parametrize("name", ["a.onnx", "a.pt2"])
def test_metadata_that_is_no_json_is_a_mistake(unchecked, tmp_path, name):
    for wrong, words in (([1], "a mapping from names; got list"), ({"open": 1}, "'open' is taken")):
        with pytest.raises(ValueError, match=words):
            unchecked.export(nn.Conv2d(3, 4, 1), tmp_path / name, (3, 8, 8), metadata=wrong)
    with pytest.raises(ValueError, match=r"metadata is written as JSON: .*not JSON serializable"):
        unchecked.export(nn.Conv2d(3, 4, 1), tmp_path / name, (3, 8, 8), metadata={"a": object()})


def test_without_onnx_one_line_says_what_to_install(unchecked, tmp_path, monkeypatch):
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else real(name)
    )
    with pytest.raises(ValueError, match=r"needs onnxruntime: pip install '\.\[export\]' in"):
        unchecked.export(network(unchecked), tmp_path / "net.onnx", (3, 12, 12))


def test_what_onnxruntime_cannot_run_is_not_written(unchecked, onnxruntime, tmp_path):
    assert onnxruntime
    with pytest.raises(ValueError, match=r"NOT_IMPLEMENTED.*: try model.float\(\)"):
        unchecked.export(nn.Conv2d(3, 4, 1).double(), tmp_path / "net.onnx", (3, 4, 4))
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_module_or_cannot_be_traced(unchecked, tmp_path):
    with pytest.raises(ValueError, match="export takes a module; got str"):
        unchecked.export("resnet20", tmp_path / "net.pt2")

    class Decides(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum().item() > 1e9 else -x

    with pytest.raises(ValueError, match=r"torch.export cannot trace it: Could not guard"):
        unchecked.export(Decides(), tmp_path / "net.pt2", (3, 4, 4))
