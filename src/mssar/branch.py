"""One scale's function.  N batch, B channels in, C channels out, h w cells."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from jaxtyping import Float


class Branch(nn.Module):
    """One scale's recalibration function, without its sigmoid: Ω₁, BN, relu, Ω₂, BN."""

    def __init__(
        self,
        inputs: int,
        hidden: int,
        outputs: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kind: dict[str, Any] = {"device": device, "dtype": dtype}
        # No biases: BN follows each product.
        self.reduce = nn.Conv2d(inputs, hidden, 1, bias=False, **kind)
        self.norm1 = nn.BatchNorm2d(hidden, **kind)
        self.expand = nn.Conv2d(hidden, outputs, 1, bias=False, **kind)
        self.norm2 = nn.BatchNorm2d(outputs, **kind)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for product in (self.reduce, self.expand):
            nn.init.kaiming_normal_(product.weight, mode="fan_out", nonlinearity="relu")
        for norm in (self.norm1, self.norm2):
            norm.reset_parameters()

    @property
    def normalises_the_batch(self) -> bool:
        """Whether BN would take statistics of this batch alone; synchronised BN looks further."""
        norms = (self.norm1, self.norm2)
        return any(isinstance(norm, nn.BatchNorm2d) and norm.training for norm in norms)

    def forward(self, y: Float[Tensor, "N B h w"]) -> Float[Tensor, "N C h w"]:
        hidden = self.norm1(_product(self.reduce, y)).relu()
        gate: Tensor = self.norm2(_product(self.expand, hidden))
        return settled(gate)


def _product(weight: nn.Conv2d, y: Float[Tensor, "N B h w"]) -> Float[Tensor, "N C h w"]:
    """``weight(y)``."""
    compiling = torch.compiler.is_compiling() and y.device.type == "cpu"
    if not compiling or not is_product(weight):
        made: Tensor = weight(y)
        return made
    # Compiled, oneDNN would reorder the weights at every call, which takes longer than the product.
    rows = F.linear(y.permute(0, 2, 3, 1), weight.weight.flatten(1))
    return rows.permute(0, 3, 1, 2)


def settled(x: Float[Tensor, "N C H W"]) -> Float[Tensor, "N C H W"]:
    """``x``, whose gradient comes back with strides that BN of PyTorch's understands.

    Of a single image whose channels lie side by side, the stride of N may be anything. On a CPU
    BN's way back takes one for channels_last by one rule and not by another, and then reads its
    input or its gradient in the wrong order, without a word (seen up to torch 2.13). Inductor has
    a BN of its own.
    """
    if torch.compiler.is_compiling() or not isinstance(x, Tensor):  # torch.fx has proxies
        return x
    if x.device.type != "cpu" or not x.requires_grad or x.is_leaf:  # no BN is before a leaf
        return x
    # TorchScript notes that a size is read, and its check traces once more, without gradients.
    if torch._C._get_tracing_state() is not None:
        return x
    if type(x.shape[0]) is not int or x.shape[0] != 1:  # a tracer may leave it open
        return x
    x.register_hook(_understood)  # not a function of its own: x may be changed in its place
    return x


def _understood(gradient: Tensor) -> Tensor:
    if gradient.is_contiguous() or gradient.stride(0) == gradient[0].numel():
        return gradient
    return gradient.clone(memory_format=torch.contiguous_format)


def is_product(conv: nn.Module, shape: tuple[int, ...] | None = None) -> bool:
    """Whether it is nothing but a matrix that vectors are multiplied by, of this shape if given."""
    if type(conv) is not nn.Conv2d or conv.bias is not None or hooked(conv):
        return False
    if conv.stride != (1, 1) or conv.padding != (0, 0) or not conv.weight.is_contiguous():
        return False
    return conv.weight.shape == (shape or (conv.out_channels, conv.in_channels, 1, 1))


def hooked(module: nn.Module) -> bool:
    """Whether a call does anything besides the forward of its class."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__  # replaced on this module alone
    )
