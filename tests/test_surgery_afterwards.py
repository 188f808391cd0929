"""What people do with an inserted network afterwards, or have done with it before."""

import copy
import functools
import re
from collections.abc import Callable

import pytest
import torch
from foreign import build, seeded
from test_surgery import SIZE, layers, same
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

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


@pytest.mark.usefixtures("torchvision")
def test_a_wrapped_module_may_have_a_gain_of_its_own():
    """As the convolutions of NFNets; where their weights have it already, ours is meant."""
    net = pytest.importorskip("timm").create_model("test_nfnet", num_classes=3)
    before = trained(net).state_dict()
    mssar.insert(net, where=["*.conv3"])
    other = copy.deepcopy(net)
    trained(net)
    assert str(other.load_state_dict(net.state_dict())) == "<All keys matched successfully>"
    assert differing(net, other) == []
    own = list(net.state_dict().items())
    for cut in range(1, len(own), 3):
        for part in (own[:cut], own[cut:]):
            other.load_state_dict(dict(part), strict=False)
        assert differing(net, other) == []
    found = other.load_state_dict(copy.deepcopy(before), strict=False)
    assert not found.unexpected_keys
    mssar.remove(other)
    assert all(torch.equal(before[name], t) for name, t in other.state_dict().items())


@pytest.mark.usefixtures("torchvision")
def test_weights_from_before_and_layers_beside_them_are_loaded_as_one():
    """As where layers alone were trained, and saved."""
    net = pytest.importorskip("timm").create_model("mobilenetv3_small_050", num_classes=3)
    before = copy.deepcopy(trained(net).state_dict())
    mssar.insert(net, scales=(1,))
    for layer in layers(net):
        trained(layer)
    whole = copy.deepcopy(net.state_dict())
    tuned = {name: t for name, t in whole.items() if "recalibrate" in name}
    other = copy.deepcopy(net)
    trained(other).load_state_dict(before | tuned, strict=False)
    assert differing(net, other) == []
    trained(other).load_state_dict(
        {name: 2 * t for name, t in before.items()} | whole, strict=False
    )
    assert differing(net, other) == []  # where both are there it is the network's own that count


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_a_wrapped_module_knows_older_names_of_its_own():
    old = nn.Sequential(torch.nn.utils.weight_norm(nn.Conv2d(3, 8, 3)))
    x = torch.randn(SIZE)
    expected = trained(old)(x)
    net = nn.Sequential(parametrizations.weight_norm(nn.Conv2d(3, 8, 3)))
    mssar.insert(net, where=["0"])
    found = net.load_state_dict(old.state_dict(), strict=False)
    assert not found.unexpected_keys
    torch.testing.assert_close(net(x), expected)


class Adapted(nn.Conv2d):
    """A convolution with another beside it, as adapters are."""

    def __init__(self) -> None:
        super().__init__(3, 8, 3)
        self.inner = nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = super().forward(x) + self.inner(x)
        return made


class Parts(nn.Module):
    """A module with parts of these names."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.out_channels = 8
        for at, name in enumerate(names):
            self.add_module(name, nn.Conv2d(8 if at else 3, 8, 3))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.children():
            x = part(x)
        return x


@pytest.mark.parametrize(
    "make",
    [
        Adapted,
        lambda: Parts("inner"),
        lambda: Parts("conv", "recalibrate"),
        lambda: Parts("inner", "recalibrate"),
    ],
)
def test_a_wrapped_module_may_have_a_part_with_our_name(make):
    net = nn.Sequential(make())
    before, x = copy.deepcopy(net.state_dict()), torch.randn(SIZE)
    expected = net(x)
    mssar.insert(net, where=["0"])
    own = copy.deepcopy(trained(net).state_dict())
    other = copy.deepcopy(net)
    net.load_state_dict(own)
    assert differing(net, other) == []
    for branch in net[0].recalibrate.branches:
        nn.init.zeros_(branch.norm2.weight)
        nn.init.zeros_(branch.norm2.bias)
    found = net.load_state_dict(copy.deepcopy(before), strict=False)
    assert not found.unexpected_keys
    torch.testing.assert_close(net(x), expected)
    mssar.remove(net)
    assert all(torch.equal(before[name], t) for name, t in net.state_dict().items())


def test_weights_from_before_are_doubled_though_the_block_has_gained_a_parameter(resnet):
    before = copy.deepcopy(resnet.state_dict())
    mssar.insert(resnet)
    resnet.layer1[0].register_parameter("scale", nn.Parameter(torch.ones(())))
    whole = resnet.state_dict()
    resnet.load_state_dict(before, strict=False)
    assert all(torch.equal(whole[name], t) for name, t in resnet.state_dict().items())


def test_a_networks_own_norms_are_loaded_as_they_are(resnet):
    mssar.insert(resnet)
    before = copy.deepcopy(trained(resnet))
    norms = {k: v for k, v in resnet.state_dict().items() if "bn" in k and "recal" not in k}
    resnet.load_state_dict(norms, strict=False)
    assert differing(before, resnet) == []


def twice(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *given: 2 * forward(*given)


def decorated(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return functools.wraps(forward)(twice(forward))


@pytest.mark.parametrize("which", ["a block", "all of a class", "as by a decorator"])
def test_a_block_keeps_the_forward_that_it_was_given(torchvision, resnet, monkeypatch, which):
    kind = torchvision.models.resnet.BasicBlock
    if which == "a block":
        resnet.layer2[0].forward = twice(resnet.layer2[0].forward)
    else:
        change = twice if which == "all of a class" else decorated
        monkeypatch.setattr(kind, "forward", change(kind.forward))
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


@pytest.mark.parametrize("checker", ["beartype.beartype", "jaxtyping.jaxtyped"])
def test_a_forward_whose_types_are_checked_is_the_classes_own(
    torchvision, resnet, monkeypatch, checker
):
    """Names and fusion stay what they are."""
    kind, (library, name) = torchvision.models.resnet.BasicBlock, checker.split(".")
    options = {"typechecker": None} if name == "jaxtyped" else {}
    watched = getattr(pytest.importorskip(library), name)(kind.forward, **options)
    assert watched is not kind.forward
    monkeypatch.setattr(kind, "forward", watched)
    plan = mssar.insert(resnet)
    assert {one.runs for one in plan.entries} == {"fused with norm, shortcut, activation"}
    assert not any("inner" in name for name in resnet.state_dict())


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_a_block_of_dense_steps_keeps_the_forward_that_it_was_given(
    torchvision, library, monkeypatch
):
    model = build(f"{library} densenet", torchvision)
    kind = type(next(m for m in model.modules() if type(m).__name__.endswith("DenseBlock")))
    monkeypatch.setattr(kind, "forward", twice(kind.forward))
    x = torch.randn(SIZE)
    before = seeded(model, x, False)
    mssar.insert(model)
    assert torch.equal(seeded(model, x, False), before)


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


@pytest.mark.parametrize(
    ("make", "name"),
    [
        ("torchvision resnet, basic", "layer2.0"),
        ("timm densenet", "features.denseblock1.denselayer1"),
        ("timm convnext", "stages.0.blocks.0.mlp"),
        ("resnet8", "layer2.0"),  # ours
    ],
)
def test_a_block_that_was_made_another_class_is_not_removed(torchvision, make, name):
    net = build(make, torchvision) if " " in make else mssar.create_model(make, "none")
    kind = type(net.get_submodule(name))
    mssar.insert(net)
    block = net.get_submodule(name)
    block.register_parameter("scale", nn.Parameter(torch.ones(())))
    parametrize.register_parametrization(block, "scale", nn.Identity())
    x = torch.randn(SIZE)
    before = seeded(net, x, False)
    with pytest.raises(ValueError, match=rf"^'{re.escape(name)}' is a Parametrized.*changed$"):
        mssar.remove(net)
    assert torch.equal(seeded(net, x, False), before)
    parametrize.remove_parametrizations(block, "scale")
    mssar.remove(net)
    assert type(net.get_submodule(name)) is kind


def test_a_block_of_dense_steps_that_was_made_another_class_is_not_removed(torchvision):
    net = build("timm densenet", torchvision)
    mssar.insert(net)
    block = net.features.denseblock1
    kind = type(block)
    block.__class__ = type("Sharded", (kind,), {"__module__": "elsewhere"})  # as fully_shard does
    with pytest.raises(ValueError, match=r"^'features\.denseblock1' is a Sharded of elsewhere by"):
        mssar.remove(net)
    assert len(holders(net)) > 1
    block.__class__ = kind
    mssar.remove(net)
    assert type(block).__module__ == "timm.models.densenet"


def test_hooks_are_no_hindrance_to_removal(resnet):
    before = copy.deepcopy(resnet.state_dict())
    mssar.insert(resnet)
    resnet.layer1[0].bn2.register_forward_hook(lambda *_: None)
    mssar.remove(resnet)
    assert all(torch.equal(before[name], t) for name, t in resnet.state_dict().items())


@pytest.mark.parametrize("name", ["torchvision resnet, basic", "timm mobilenet v3"])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("outer", ["", "backbone."])
def test_an_optimiser_of_named_parameters_learns_the_new_names(torchvision, name, frozen, outer):
    model = build(name, torchvision)
    last = list(model.parameters())[-2:]
    model.requires_grad_(not frozen)
    for parameter in last:
        parameter.requires_grad_(True)
    whole = nn.ModuleDict({"backbone": model}) if outer else model

    def named() -> dict[str, nn.Parameter]:
        return {name: p for name, p in whole.named_parameters() if p.requires_grad}

    optimizer = torch.optim.SGD([*named().items()], 0.1)
    before = copy.deepcopy(optimizer.state_dict())
    mssar.insert(model, optimizer=optimizer)
    assert len(optimizer.param_groups) == 1 + frozen
    found = {}
    for group in optimizer.param_groups:
        found |= dict(zip(group["param_names"], group["params"], strict=True))
    assert found.keys() == named().keys()
    assert all(found[name] is p for name, p in named().items())
    mssar.remove(model, optimizer)
    first, *rest = optimizer.state_dict()["param_groups"]
    assert [first] == before["param_groups"]
    assert [group["params"] for group in rest] == [[]] * frozen


def test_parameters_keep_names_of_the_users_own(resnet):
    mine = [(f"p{at}", p) for at, p in enumerate(resnet.parameters())]
    optimizer = torch.optim.SGD(mine, 0.1)
    mssar.insert(resnet, optimizer=optimizer)
    (group,) = optimizer.param_groups
    assert group["param_names"][: len(mine)] == [name for name, _ in mine]
    assert group["param_names"][len(mine)] == "layer1.0.recalibrate.branches.0.reduce.weight"


def test_one_name_of_the_users_own_is_no_prefix_for_all(resnet):
    mine = [(f"my.{n}" if n == "conv1.weight" else n, p) for n, p in resnet.named_parameters()]
    optimizer = torch.optim.SGD(mine, 0.1)
    mssar.insert(resnet, optimizer=optimizer)
    (group,) = optimizer.param_groups
    names = {id(p): n for n, p in resnet.named_parameters()}
    now = [names[id(p)] for p in group["params"]]
    assert group["param_names"] == ["my.conv1.weight", *now[1:]]


def test_what_was_added_to_a_group_of_names_by_hand_has_none(resnet):
    optimizer = torch.optim.SGD([*resnet.named_parameters()], 0.1)
    (group,) = optimizer.param_groups
    names, count = list(group["param_names"]), len(group["params"])
    group["params"].append(nn.Parameter(torch.ones(2)))
    mssar.insert(resnet, optimizer=optimizer)
    assert group["param_names"][: count + 1] == [*names, ""]
    found = dict(zip(group["param_names"], group["params"], strict=True))
    assert all(found[name] is p for name, p in resnet.named_parameters())


def test_an_empty_group_with_a_rate_of_its_own_is_not_for_layers(resnet):
    resnet.requires_grad_(False).fc.requires_grad_(True)
    groups = [{"params": [], "lr": 1e-6}, {"params": [*resnet.fc.parameters()]}]
    optimizer = torch.optim.SGD(groups, 0.1)
    mssar.insert(resnet, optimizer=optimizer)
    slow, fc, added = optimizer.param_groups
    assert (slow["params"], len(fc["params"]), added["lr"]) == ([], 2, 0.1)
    assert len(added["params"]) == sum(len([*layer.parameters()]) for layer in layers(resnet))


def test_groups_that_were_made_by_hand_stay(resnet):
    """Also where nothing but layers is in them: a scheduler may have a rate for each."""
    resnet.requires_grad_(False).layer1.requires_grad_(True)
    plan = mssar.insert(resnet, scales=(1,), where="layer2.0")
    both = [[*resnet.layer1.parameters()], [*layers(resnet)[0].parameters()]]
    optimizer = torch.optim.SGD([{"params": some} for some in both], 0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, min_lr=[1e-3, 1e-4])
    mssar.remove(resnet, optimizer)
    assert [len(group["params"]) for group in optimizer.param_groups] == [len(both[0]), 0]
    plateau.step(1.0)
    again = mssar.insert(resnet, scales=(1,), where="layer2.0", optimizer=optimizer)
    assert again.params == plan.params


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
