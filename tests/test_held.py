"""The benchmark of scales that are held: what a network computes without one of them."""

import json
from dataclasses import replace

import pytest
import torch
from lab import arrays, tiny, trained
from test_benchmark_scripts import load  # noqa: F401, a fixture
from torch import Tensor
from torch.testing import assert_close

import mssar
from mssar.lab.engine.evaluate import Trained
from mssar.lab.engine.feed import Normalise
from mssar.lab.run import Normalisation


@pytest.fixture
def held(load):  # noqa: F811
    return load("held")


def network(*scales: int) -> Trained:
    """One whose weights are far from even, and from each other."""
    run = replace(tiny(3, "mssar"), options={"scales": scales or (1, 2, 4)})
    model = run.build(4).eval()
    draw = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.weight.data.uniform_(1, 3, generator=draw)
            module.bias.data.uniform_(-1, 1, generator=draw)
    return Trained(run, None, model)


CPU = torch.device("cpu")
IMAGES = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def by_hand(chosen: Trained, images: Tensor, changed) -> Tensor:
    """Logits with every layer's weights a scale replaced by what ``changed`` makes of them."""

    def instead(layer: mssar.MSSAR, inputs: tuple[Tensor, ...], _: Tensor) -> Tensor:
        found = zip(layer.scales, layer.importance(*inputs, per_scale=True), strict=True)
        return inputs[0] * torch.stack([changed(layer, k, z) for k, z in found]).mean(0)

    layers = [m for m in chosen.model.modules() if isinstance(m, mssar.MSSAR)]
    handles = [layer.register_forward_hook(instead) for layer in layers]
    logits = chosen.model(images)
    for handle in handles:
        handle.remove()
    return logits


@torch.no_grad()
def test_with_no_scale_held_it_is_the_network(held):
    chosen = network()
    found = held.means(chosen, [IMAGES])
    before = {name: t.clone() for name, t in chosen.model.state_dict().items()}
    made = held.holding(chosen, found, ())
    assert_close(made(IMAGES), chosen.model(IMAGES))
    for name, tensor in chosen.model.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert not [m for m in chosen.model.modules() if isinstance(m, held.Held)]


@torch.no_grad()
def test_means_are_over_images_and_positions(held):
    """Of the network as it is, whose batches are of another size."""
    chosen, seen = network(), {}
    by_hand(chosen, IMAGES, lambda layer, k, z: seen.setdefault((layer, k), z))
    for size in (4, 6):
        found = held.means(chosen, IMAGES.split(size))
        assert not any(m._forward_pre_hooks for m in chosen.model.modules())
        for name, layer in held.layers(chosen.model).items():
            for scale in (1, 2, 4):
                expected = seen[layer, scale].mean((0, 2, 3)).view(1, -1, 1, 1)
                assert_close(found[name][scale], expected)


@pytest.mark.parametrize("scales", [(1,), (2, 4), (1, 2, 4)])
@torch.no_grad()
def test_a_scale_that_is_held_no_longer_looks(held, scales):
    chosen = network()
    found = held.means(chosen, [IMAGES])
    names = {layer: name for name, layer in held.layers(chosen.model).items()}
    made = held.holding(chosen, found, scales)(IMAGES)
    expected = by_hand(
        chosen,
        IMAGES,
        lambda layer, k, z: found[names[layer]][k].expand_as(z) if k in scales else z,
    )
    assert_close(made, expected)
    assert not torch.allclose(made, chosen.model(IMAGES), atol=1e-3)


@torch.no_grad()
def test_flat_weights_are_an_images_means(held):
    chosen = network()
    made = held.holding(chosen, held.means(chosen, [IMAGES]), (), True)(IMAGES)
    expected = by_hand(
        chosen,
        IMAGES,
        lambda layer, k, z: z.mean((2, 3), keepdim=True).expand_as(z),  # noqa: ARG005
    )
    assert_close(made, expected)
    assert not torch.allclose(made, chosen.model(IMAGES), atol=1e-3)
    alone = network(1)  # has flat weights already
    made = held.holding(alone, held.means(alone, [IMAGES]), (), True)(IMAGES)
    assert_close(made, alone.model(IMAGES))


@pytest.mark.parametrize("own", [None, Normalisation((0.9, 0.8, 0.7), (0.1, 0.2, 0.3))])
def test_every_way_is_a_line(held, own, tmp_path, monkeypatch, capsys):
    """Also of a run that normalises as it likes."""
    run = replace(tiny(recalibration="mssar"), normalisation=own)
    data, file = arrays(40, 40), tmp_path / "held.jsonl"
    record = trained(run, data, tmp_path / run.name)
    monkeypatch.setattr(held, "load", lambda *_: data)
    words = [str(tmp_path / run.name), "--images", "16", "--json", str(file)]
    assert held.main(words) == 0
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    ways = [[], [1], [2], [4], [1, 2], [1, 4], [2, 4], [1, 2, 4], "flat"]
    assert [line["held"] for line in lines] == ways
    assert {(line["trained"], line["tested"]) for line in lines} == {(16, 40)}
    assert lines[0]["error"] == pytest.approx(record.error)
    assert lines[0]["loss"] == pytest.approx(record.epochs[-1].test_loss, abs=1e-4)
    assert len({line["loss"] for line in lines}) == 9
    assert (lines[0]["lost"], lines[0]["won"]) == (0, 0)
    for line in lines:
        assert line["error"] - lines[0]["error"] == pytest.approx(
            100 * (line["lost"] - line["won"]) / 40
        )
    assert f"{'nothing':14}{record.error:7.2f} %" in capsys.readouterr().out


def test_means_are_of_images_to_train_with(held, tmp_path, monkeypatch):
    run, data, seen = tiny(recalibration="mssar"), arrays(40, 40), []
    trained(run, data, tmp_path / run.name)
    monkeypatch.setattr(held, "load", lambda *_: data)
    plain = held.means

    def watched(chosen: Trained, images):
        seen.extend(images := list(images))
        return plain(chosen, images)

    monkeypatch.setattr(held, "means", watched)
    file = tmp_path / "held.jsonl"
    words = [str(tmp_path / run.name), "--images", "16", "--tests", "10", "--json", str(file)]
    assert held.main(words) == 0
    assert_close(torch.cat(seen), Normalise(data, CPU)(data.train.images[:16].permute(0, 3, 1, 2)))
    assert {json.loads(line)["tested"] for line in file.read_text().splitlines()} == {10}


@pytest.mark.parametrize("kind", ["none", "simam", "context"])
def test_a_network_without_the_layer_is_refused(held, kind):
    run = tiny(recalibration="mssar" if kind == "context" else kind)
    model = run.build(4)
    if kind == "context":  # as in a DenseNet
        model.layer1[0].recalibrate = mssar.MSSAR(16, context_channels=8)
    with pytest.raises(ValueError, match="is no network with MS-SAR of the same scales everywhere"):
        held.measured("it", Trained(run, None, model), arrays(40, 40))
