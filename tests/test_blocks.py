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


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)


def test_a_network_that_is_mostly_something_else_is_compiled_whole():
    """Two small parts that repeat would leave the rest as it is."""
    parts = [Part() for _ in range(8)]
    assert repeated(nn.Sequential(*parts, nn.Linear(2, 2))) == parts
    assert repeated(nn.Sequential(*parts, *[nn.Linear(2, 2) for _ in range(3)])) == []


STEPS = """
from dataclasses import replace
from lab import *
from mssar.lab.engine.blocks import Compiled, repeated
torch.set_num_threads(1)
data, run, calls = arrays(), replace(tiny(0), network="resnet20"), []
def step(compiled):
    learner = Learner(run.build(4), feed(data, run), run.recipe, CPU, World())
    if compiled:
        def backend(graph, _):
            def called(*inputs):
                calls.append(len(inputs[0]) if inputs[0].ndim == 4 else 0)
                return graph.forward(*inputs)
            return called
        learner.blocks = Compiled(repeated(learner.model), backend=backend, dynamic=False)
    learner.begin(0, 0, 0.1)
    for number in (0, 2):
        learner.step(number)
    return learner.state()
plain, compiled = step(False), step(True)
for name, tensor in plain.items():
    torch.testing.assert_close(compiled[name], tensor, msg=name)
print(len(calls), feed(data, run).sizes)
"""


def test_whole_batches_are_compiled_and_the_last_is_not():
    with program(STEPS) as process:
        said, _ = process.communicate(timeout=240)
    assert said.strip() == "9 [16, 16, 5]"  # nine blocks of the first step


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
