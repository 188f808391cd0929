"""Blocks that are compiled one by one: which, how often, and that nothing is changed by it."""

import pytest
import torch
from lab import program
from torch import nn

import mssar
from mssar.lab.engine.blocks import Compiled, repeated
from mssar.networks.resnet import BasicBlock


@pytest.mark.parametrize(("network", "count"), [("resnet20", 9), ("resnet56", 27)])
def test_what_repeats_are_residual_blocks(network, count):
    found = repeated(mssar.create_model(network, "mssar"))
    assert len(found) == count
    assert all(type(block) is BasicBlock for block in found)


@pytest.mark.parametrize("network", ["resnet8", "densenet100"])
def test_blocks_that_all_differ_are_none(network):
    """One by one they would be as many programs as before."""
    with torch.device("meta"):
        assert repeated(mssar.create_model(network, "mssar")) == []


def test_a_forward_pass_of_ones_own_is_there_again():
    block, other = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))

    def own(x: torch.Tensor) -> torch.Tensor:
        return -x

    block.forward = own
    compiled = Compiled([block, other], backend="eager")
    with compiled():
        assert block.forward is not own
    assert block.forward is own
    assert "forward" not in vars(other)


COMPILING = """
import copy, sys
import torch
from torch._dynamo.testing import CompileCounter
import mssar
from mssar.lab.engine.blocks import Compiled, repeated
torch.manual_seed(0)
for kind in ("none", "mssar"):
    torch._dynamo.reset()
    net = mssar.create_model("resnet20", kind)
    twin, counter = copy.deepcopy(net), CompileCounter()
    compiled = Compiled(repeated(net), backend=counter, dynamic=False)
    x = torch.randn(4, 3, 16, 16)
    with compiled():
        y = net(x)
    y.square().sum().backward()
    z = twin(x)
    z.square().sum().backward()
    torch.testing.assert_close(y, z)
    for (name, p), q in zip(net.named_parameters(), twin.parameters()):
        torch.testing.assert_close(p.grad, q.grad, msg=name)
    torch.testing.assert_close(net.state_dict(), twin.state_dict())  # running statistics
    net(x)
    print(kind, counter.frame_count, flush=True)
"""


def test_nine_blocks_are_five_programs_and_compute_the_same():
    with program(COMPILING) as process:  # by itself: checked shapes cannot be traced
        said, _ = process.communicate(timeout=240)
    assert said.splitlines() == ["none 5", "mssar 5"]
