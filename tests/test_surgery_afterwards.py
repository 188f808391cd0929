"""What people do with an inserted network afterwards, or have done with it before."""

import copy
from collections.abc import Callable

import pytest
import torch
from foreign import build, seeded
from test_surgery import SIZE, layers, same
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import mssar
from mssar.surgery.ends import InPlace
from mssar.surgery.insertion import holders


@pytest.fixture
def resnet(torchvision):
    return build("torchvision resnet, basic", torchvision)


def trained(model: nn.Module) -> nn.Module:
    """With numbers everywhere that a loading may change."""
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


def differing(model: nn.Module, other: nn.Module) -> list[str]:
    ours, theirs = model.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]


@pytest.mark.parametrize(
    "name",
    [
        *("torchvision resnet, basic", "timm resnet, basic", "timm regnet", "timm densenet"),
        *("torchvision mobilenet v2", "timm convnext"),
    ],
)
def test_weights_in_two_parts_are_the_networks_own_wherever_they_are_cut(torchvision, name):
    model = build(name, torchvision)
    mssar.insert(model)
    other = copy.deepcopy(trained(model))
    whole = list(model.state_dict().items())
    first = next(at for at, (key, _) in enumerate(whole) if "recalibrate" in key)
    for cut in range(first - 12, first + 60):  # in the first block, and around it
        for part in (whole[:cut], whole[cut:]):
            other.load_state_dict(dict(part), strict=False)
        assert differing(model, other) == []


def test_a_networks_own_norms_are_loaded_as_they_are(resnet):
    mssar.insert(resnet)
    before = copy.deepcopy(trained(resnet))
    norms = {k: v for k, v in resnet.state_dict().items() if "bn" in k and "recal" not in k}
    resnet.load_state_dict(norms, strict=False)
    assert differing(before, resnet) == []


def twice(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *given: 2 * forward(*given)


@pytest.mark.parametrize("which", ["a block", "all of a class"])
def test_a_block_keeps_the_forward_that_it_was_given(torchvision, resnet, monkeypatch, which):
    kind = torchvision.models.resnet.BasicBlock
    if which == "a block":
        resnet.layer2[0].forward = twice(resnet.layer2[0].forward)
    else:
        monkeypatch.setattr(kind, "forward", twice(kind.forward))
    x = torch.randn(SIZE)
    before = seeded(resnet, x, False)
    plan = mssar.insert(resnet)
    assert torch.equal(seeded(resnet, x, False), before)
    kept = ["layer2.0"] if which == "a block" else [f"layer{stage}.0" for stage in (1, 2, 3, 4)]
    found = [one.name for one in plan.entries if one.runs == "fused with its norm"]
    assert found == kept
    seeded(resnet, x, True).square().mean().backward()
    assert all(layer.branches[0].norm2.weight.grad.abs().sum() > 0 for layer in layers(resnet))
    mssar.remove(resnet)
    assert type(resnet.layer2[0]) is kind


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_a_dense_step_whose_forward_was_replaced_is_refused(torchvision, library):
    model = build(f"{library} densenet", torchvision)
    before = copy.deepcopy(model)
    (step, *_) = [m for m in model.modules() if type(m).__name__ in ("DenseLayer", "_DenseLayer")]
    step.forward = twice(step.forward)
    with pytest.raises(ValueError, match="Layer's forward was replaced; insert before that"):
        mssar.insert(model)
    del step.forward
    same(model, before)


class Added(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight + 0.0


class Adapter(nn.Module):
    """Around a linear layer, whose weight it shows as its own."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.added = base, nn.Linear(base.in_features, base.out_features)

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    @property
    def bias(self) -> Tensor:
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.base(x) + self.added(x)
        return made


def adapted(mlp: nn.Module) -> None:
    mlp.fc2 = Adapter(mlp.fc2)


def quantised(mlp: nn.Module) -> None:
    mlp.fc2 = torch.ao.nn.quantized.dynamic.Linear(mlp.fc2.in_features, mlp.fc2.out_features)


@pytest.mark.parametrize(
    "change",
    [
        lambda mlp: prune.l1_unstructured(mlp.fc2, "weight", amount=0.0),
        lambda mlp: parametrize.register_parametrization(mlp.fc2, "weight", Added()),
        adapted,
        quantised,
    ],
    ids=["pruned", "parametrised", "adapter", "quantised"],
)
@pytest.mark.filterwarnings("ignore:.*quantiz")
@pytest.mark.usefixtures("torchvision")
def test_what_was_doubled_and_is_another_since_is_not_removed(change):
    small = {"depths": (1, 1, 1, 1), "dims": (8, 16, 16, 16)}
    model = pytest.importorskip("timm").create_model("convnext_tiny", num_classes=10, **small)
    mssar.insert(model)
    last = list(holders(model).values())[-1]
    change(last.inner)
    before = {name: t.clone() for name, t in model.state_dict().items() if torch.is_tensor(t)}
    with pytest.raises(ValueError, match=r"has no longer the .* that insert doubled.*changed$"):
        mssar.remove(model)
    assert len(holders(model)) == 4
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_hooks_are_no_hindrance_to_removal(resnet):
    before = copy.deepcopy(resnet.state_dict())
    mssar.insert(resnet)
    resnet.layer1[0].bn2.register_forward_hook(lambda *_: None)
    mssar.remove(resnet)
    assert all(torch.equal(before[name], t) for name, t in resnet.state_dict().items())


@pytest.mark.parametrize("frozen", [False, True])
def test_an_optimiser_of_named_parameters_learns_the_new_names(resnet, frozen):
    if frozen:
        resnet.requires_grad_(False).fc.requires_grad_(True)
    named = [(name, p) for name, p in resnet.named_parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(named, 0.1)
    before = copy.deepcopy(optimizer.state_dict())
    mssar.insert(resnet, optimizer=optimizer)
    assert len(optimizer.param_groups) == 1 + frozen
    wanted = {name: p for name, p in resnet.named_parameters() if p.requires_grad}
    found = {}
    for group in optimizer.param_groups:
        found |= dict(zip(group["param_names"], group["params"], strict=True))
    assert found.keys() == wanted.keys()
    assert all(found[name] is wanted[name] for name in wanted)
    mssar.remove(resnet, optimizer)
    assert optimizer.state_dict() == before
    optimizer.load_state_dict(before)


def test_replaced_squeezes_are_not_trained_on_and_come_back_only_from_this_network(
    torchvision, tmp_path
):
    model = build("timm mobilenet v3", torchvision)
    x = torch.randn(SIZE)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.1)
    seeded(model, x, True).square().mean().backward()
    mssar.insert(model, where="se", optimizer=optimizer)
    kept = [h.replaced for h in holders(model).values() if isinstance(h, InPlace)]
    before = copy.deepcopy(nn.ModuleList(kept).state_dict())
    for _ in range(2):
        model.zero_grad()  # which knows nothing of what was replaced
        seeded(model, x, True).square().mean().backward()
        optimizer.step()
    after = nn.ModuleList(kept).state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)

    again = mssar.from_pretrained(mssar.save_pretrained(model, tmp_path / "net"))
    with pytest.raises(ValueError, match="was not saved with this network, and cannot be put back"):
        mssar.remove(again)
    assert len(holders(again)) == len(kept)
    mssar.remove(model)
    assert not holders(model)
