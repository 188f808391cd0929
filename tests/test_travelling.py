"""Weights say what they were trained for, and a layer made for something else refuses them."""

import io

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import mssar
from mssar import MSSAR

KEY = "layer1.0.recalibrate.coordinates"
OTHERS = [
    pytest.param({"scales": (4, 2, 1)}, "regional scales 4, 2, 1", id="other order"),
    pytest.param({"scales": (1, 2, 3)}, "regional scales 1, 2, 3", id="other scales"),
    pytest.param({"strategy": "sliding"}, "sliding scales 1, 2, 4", id="other strategy"),
]


def network(**options) -> nn.Module:
    return mssar.create_model("resnet8", "mssar", **options)


def older(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As it was saved before weights said anything."""
    return {name: value for name, value in state.items() if not name.endswith("coordinates")}


def by_torch(net: nn.Module, state: dict[str, torch.Tensor], tmp_path) -> None:
    torch.save(state, tmp_path / "state.pt")
    net.load_state_dict(torch.load(tmp_path / "state.pt"))


def by_safetensors(net: nn.Module, state: dict[str, torch.Tensor], tmp_path) -> None:
    safetensors.torch.save_file(state, tmp_path / "state.safetensors")
    safetensors.torch.load_model(net, tmp_path / "state.safetensors")


def loosely(net: nn.Module, state: dict[str, torch.Tensor], _) -> None:
    net.load_state_dict(state, strict=False)


def assigned(net: nn.Module, state: dict[str, torch.Tensor], _) -> None:
    net.load_state_dict(state, assign=True)


def halved(net: nn.Module, state: dict[str, torch.Tensor], _) -> None:
    net.load_state_dict({name: value.bfloat16() for name, value in state.items()})


@pytest.mark.parametrize("load", [by_torch, by_safetensors, loosely, assigned, halved])
@pytest.mark.parametrize(("options", "described"), OTHERS)
def test_weights_of_another_configuration_are_refused(options, described, load, tmp_path):
    net, state = network(), network(**options).state_dict()
    said = (
        f"{KEY}: the weights were trained for {described}, "
        "this MSSAR is made for regional scales 1, 2, 4"
    )
    with pytest.raises(RuntimeError) as refused:
        load(net, state, tmp_path)
    assert said in [line.strip() for line in str(refused.value).splitlines()]
    load(net, network().state_dict(), tmp_path)


@pytest.mark.parametrize("load", [by_torch, by_safetensors, loosely, assigned])
@pytest.mark.parametrize("meta", [False, True], ids=["made", "meta"])
def test_older_weights_load_as_before(load, meta, tmp_path):
    state, x = network().state_dict(), torch.randn(2, 3, 16, 16)
    net = network()
    if meta:
        with torch.device("meta"):
            net = network()
        if load is not assigned:
            net.to_empty(device="cpu")
    load(net, older(state), tmp_path)
    expected = network()
    expected.load_state_dict(state)
    torch.testing.assert_close(net(x), expected(x), rtol=0, atol=0)
    for name, value in net.state_dict().items():
        assert value.device.type == "cpu", name
    assert net.layer1[0].recalibrate.coordinates.tolist() == [0, 1, 2, 4]
    found = net.load_state_dict(older(state), strict=False)
    assert not found.missing_keys
    assert not found.unexpected_keys


def test_what_is_missing_besides_is_said():
    state = older(MSSAR(6).state_dict())
    del state["branches.1.norm2.bias"]
    assert MSSAR(6).load_state_dict(state, strict=False).missing_keys == ["branches.1.norm2.bias"]
    with pytest.raises(RuntimeError, match=r"coordinates.*expected torch.Tensor"):
        MSSAR(6).load_state_dict({**state, "coordinates": "regional"}, strict=False)


def test_a_strategy_that_is_not_known_yet_is_refused():
    state = MSSAR(6).state_dict() | {"coordinates": torch.tensor([7, 1, 2, 4])}
    with pytest.raises(RuntimeError, match=r"trained for strategy 7 scales 1, 2, 4, "):
        MSSAR(6).load_state_dict(state)


def test_what_is_no_number_is_refused():
    state = MSSAR(6).state_dict() | {"coordinates": torch.tensor([float("nan"), 1, 2, 4])}
    with pytest.raises(RuntimeError, match="coordinates: the weights were trained for"):
        MSSAR(6).load_state_dict(state)


class Own(mssar.Regional):
    """A set of one's own, whose code has more digits than floats have."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_state_that_was_cast_as_a_whole_is_still_of_that_configuration(dtype):
    state = {name: t.to(dtype) for name, t in MSSAR(6, strategy=Own).state_dict().items()}
    layer = MSSAR(6, strategy=Own)
    layer.load_state_dict(state)
    assert torch.equal(layer.coordinates, MSSAR(6, strategy=Own).coordinates)
    with pytest.raises(RuntimeError, match="this MSSAR is made for"):
        MSSAR(6, (4, 2, 1), strategy=Own).load_state_dict(state)


def test_meta_to_meta_says_nothing():
    with torch.device("meta"):
        for state in (network(scales=(4, 2, 1)).state_dict(), older(network().state_dict())):
            found = network().load_state_dict(state)  # what is on meta cannot be read
            assert (found.missing_keys, found.unexpected_keys) == ([], [])


def test_what_was_given_memory_can_begin_anew():
    layer = MSSAR(6, (1, 3), "sliding", device="meta").to_empty(device="cpu")
    for tensor in (*layer.parameters(), *layer.buffers()):
        tensor.data.fill_(9)
    layer.reset_parameters()
    assert layer.coordinates.tolist() == [1, 1, 3]
    assert layer.branches[1].norm2.weight.tolist() == [1] * 6
    assert layer.branches[1].reduce.weight.std() > 0


def test_averages_of_weights_are_still_of_that_configuration():
    layer = MSSAR(6, (1, 3))
    average = get_ema_multi_avg_fn(0.9995)  # 3 · 0.9995 + 3 · 0.0005, cut off, is 2
    mean = AveragedModel(layer, multi_avg_fn=average, use_buffers=True)
    for _ in range(3):
        mean.update_parameters(layer)
    assert mean.module.coordinates.tolist() == [0, 1, 2]
    MSSAR(6, (1, 3)).load_state_dict(mean.module.state_dict(), strict=True)
    assert mean.module.coordinates.tolist() == [0, 1, 3]


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64])
def test_no_type_changes_it(kind):
    layer = MSSAR(6).to(kind)
    assert layer.coordinates.dtype is torch.int64
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    assert torch.load(file, weights_only=False).coordinates.tolist() == [0, 1, 2, 4]


def test_an_exported_program_carries_it(unchecked):
    layer, x = unchecked.MSSAR(6).eval(), torch.randn(2, 6, 7, 9)
    program = torch.export.export(layer, (x,))
    assert program.state_dict["coordinates"].tolist() == [0, 1, 2, 4]
    torch.testing.assert_close(program.module()(x), layer(x))
