"""What an exported program computes once, and what must stay two."""

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.testing import assert_close

from mssar.indices import share


class Writes(nn.Module):
    """Ranges that begin alike, and what becomes of one of them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        one, two = torch.arange(x.shape[2]) * 1.0, torch.arange(x.shape[2]) * 1.0
        if self.how == "outputs":
            return one, two
        if self.how == "filled":
            one += 1
        elif self.how == "part":
            one[1:] = 2
        elif self.how == "image":
            one.copy_(x[0, 0, :, 0])
        elif self.how == "out":
            torch.add(x[0, 0, :, 0], 1, out=one)
        elif self.how == "alias":
            one[:, None].expand(-1, 1).unbind(1)[0].add_(x.amax())
        elif self.how == "as another":
            one.view_as(x[0, 0, :, 0]).mul_(3)
        elif self.how == "list":
            torch._foreach_add_([one], 1)
        elif self.how == "inner":
            with torch.autocast("cpu", enabled=False):
                one.add_(1)
        elif self.how == "random":
            one, two = torch.rand_like(one), torch.rand_like(two)
        return one + x.sum() * 0, two + x.sum() * 0


@pytest.mark.parametrize(
    "how",
    [
        *("filled", "part", "image", "out", "alias", "as another", "list", "inner", "random"),
        *("outputs", "read"),
    ],
)
def test_what_is_written_to_made_or_random_is_not_shared(how, tmp_path):
    dims = {0: Dim.DYNAMIC, 2: Dim.DYNAMIC, 3: Dim.DYNAMIC}
    x, model = torch.randn(2, 3, 5, 6), Writes(how)
    program = torch.export.export(model, (x,), dynamic_shapes=(dims,))
    before = sum("arange" in node.name for node in program.graph.nodes)
    share(program.graph_module)
    torch.export.save(program, tmp_path / "net.pt2")
    x = torch.randn(2, 3, 7, 6)
    one, two = torch.export.load(tmp_path / "net.pt2").module()(x)
    if how == "random":
        assert not torch.equal(one, two)
    else:
        assert_close((one, two), model(x))
    after = sum("arange" in node.name for node in program.graph.nodes)
    assert (before, after) == (2, 1 if how in ("outputs", "random", "read") else 2)
    assert one.data_ptr() != two.data_ptr()
