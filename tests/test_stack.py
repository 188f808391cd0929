"""Networks that are trained as one: the same numbers as each by itself, but for rounding."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lab import assert_same
from torch import nn

import mssar
from mssar.lab.engine.stack import Stack, obstacle
from mssar.networks.peers import SimAM

CLASSES = (4, 7, 4)


def networks(kind: str | Callable[[int], nn.Module], **options: Any) -> list[nn.Module]:
    torch.manual_seed(0)
    made = [mssar.create_model("resnet8", kind, num_classes=d, **options) for d in CLASSES]
    for network in made:
        for p in network.parameters():
            nn.init.normal_(p, p.mean().item(), 0.2)  # nothing is zero or one
    return [network.double() for network in made]


KINDS = [
    ("none", {}),
    ("se", {"reduction": 2}),
    ("mssar", {}),
    ("mssar", {"strategy": "sliding"}),
    ("simam", {}),
]
TIMMS = ("eca", "cbam", "coord", "ela", "ge")


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_each_network_computes_what_it_would_by_itself(kind, options):
    assert_each_computes_as_alone(networks(kind, **options))


@pytest.mark.usefixtures("timm")
@pytest.mark.parametrize("kind", TIMMS)
def test_each_network_has_its_own_module_of_timms(kind):
    assert_each_computes_as_alone(networks(kind))


def assert_each_computes_as_alone(alone: list[nn.Module]) -> None:
    """Outputs, gradients and running statistics, in training and in evaluation."""
    stack = Stack(alone)
    stack.network.double()
    images = [torch.randn(5, 3, 16, 16, dtype=torch.float64) for _ in alone]
    labels = [torch.randint(4, (5,)) for _ in alone]
    empty = torch.randn(5, stack.channels - 9, 16, 16, dtype=torch.float64)  # nobody reads them
    assert stack.channels == 16
    for mode in (True, False):
        stack.network.train(mode)
        together = stack.network(torch.cat([*images, empty], 1)).split(CLASSES, 1)
        sum(F.cross_entropy(z, y) for z, y in zip(together, labels, strict=True)).backward()
        for parameter, mask in stack.masks():
            parameter.grad *= mask
        for which, network in enumerate(alone):
            network.train(mode)
            logits = network(images[which])
            torch.testing.assert_close(together[which], logits, rtol=1e-9, atol=1e-9)
            F.cross_entropy(logits, labels[which]).backward()
            grads = {name: p.grad for name, p in stack.network.named_parameters()}
            found = stack.parts(which, grads)
            assert found.keys() == dict(network.named_parameters()).keys()
            for name, p in network.named_parameters():
                torch.testing.assert_close(found[name], p.grad, rtol=1e-7, atol=1e-9)
            state = stack.state(which)
            assert state.keys() == network.state_dict().keys()
            for name, tensor in network.state_dict().items():
                torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("timm")
@pytest.mark.parametrize("kind", [*TIMMS, "simam"])
def test_a_stack_of_others_recalibrations_is_compiled_without_a_break(unchecked, kind):
    """As ``--compile`` does it on a GPU, block by block."""
    stack = importlib.import_module("mssar.lab.engine.stack")
    torch.manual_seed(0)
    made = stack.Stack([unchecked.create_model("resnet8", kind) for _ in range(2)])
    block, x = made.network.layer2[0], torch.randn(3, 32, 8, 8)
    expected = block(x)
    found = torch.compile(block, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", ["mssar", "simam-conv"])
def test_networks_are_left_as_they_are(kind):
    """What a stack learns, they do not."""
    own = {"mssar": "mssar", "simam-conv": lambda c: nn.Sequential(SimAM(c), nn.Conv2d(c, c, 1))}
    alone = [mssar.create_model("resnet8", own[kind]) for _ in range(2)]
    before = [{name: t.clone() for name, t in net.state_dict().items()} for net in alone]
    stack = Stack(alone)
    for tensor in stack.network.state_dict().values():
        tensor.zero_()
    for network, kept in zip(alone, before, strict=True):
        assert_same(network.state_dict(), kept)


def test_sequences_are_beside_each_other_too():
    """A grouped convolution is none that could be made wide as others are."""

    def own(c: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(c, c, 3, 1, 1, groups=c), nn.BatchNorm2d(c, affine=False))

    assert_each_computes_as_alone(networks(own))


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["resnet8", "resnet20"], "they are not of one kind"),
        (["densenet100", "densenet100"], "the network is a DenseNet"),
    ],
)
def test_what_cannot_be_one_is_said(names, reason):
    with torch.device("meta"):
        made = [mssar.create_model(name, "none") for name in names]
    with pytest.raises(ValueError, match=f"cannot be trained as one: {reason}"):
        Stack(made)


def test_a_module_that_mixes_channels_by_itself_is_no_part_of_a_stack():
    network = mssar.create_model("resnet8", "none")
    network.layer1[0].bn2 = nn.GroupNorm(4, 16)
    assert obstacle([network]) == "layer1.0.bn2 is a GroupNorm"


def test_networks_that_drop_at_random_are_not_one():
    """Each draws from a generator of its own, by its seed."""
    network = mssar.create_model("resnet8", lambda _: nn.Dropout(0.1))
    assert obstacle([network]) == "they drop at random"
    network = mssar.create_model("resnet8", lambda _: nn.Dropout(0.0))
    assert obstacle([network]) is None
