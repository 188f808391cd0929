"""A block's tail in plain modules, which the kernels are held against, and how far apart they are.

Run by Triton's interpreter without a CUDA device; see ``conftest``.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mssar import MSSAR, fused
from mssar.branch import Branch
from mssar.kernels.tail.call import like
from mssar.networks import BasicBlock, Bottleneck
from mssar.networks.densenet import DenseStep
from mssar.tail import ACTIVATIONS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYOUTS = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last}
HALVES = [torch.bfloat16, torch.float16]
TRAINED, EVALUATED = ["tail", "track"], ["tail"]  # the ops of a tail, or of MSSAR alone
# What may be added to three times the modules' own distance.
SLACK = {torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 1e-3}
EDGE = 1e-5  # so near to 0 that rounding of float32 may turn a number
BEFORE_A_RELU = {Branch: ("norm1",), DenseStep: ("norm1", "norm2")}


@dataclass(frozen=True)
class Case:
    channels: int = 12
    size: tuple[int, int] = (8, 8)
    batch: int = 4
    scales: tuple[int, ...] = (1, 2, 4)
    norm: bool = True
    shortcut: bool = True
    activation: str | None = "relu"
    layout: str = "channels last"
    reduction: int = 1
    frozen: str = ""  # norms with given statistics: "front", "branches" or "all"

    def __str__(self) -> str:
        shape = "×".join(map(str, (self.batch, self.channels, *self.size)))
        parts = [name for name in ("norm", "shortcut") if getattr(self, name)]
        parts += [self.activation] if self.activation else []
        parts += [f"reduction={self.reduction}"] * (self.reduction > 1)
        parts += [f"frozen={self.frozen}"] if self.frozen else []
        return " ".join([shape, f"scales={','.join(map(str, self.scales))}", *parts, self.layout])

    def map(self) -> Tensor:
        x = torch.randn(self.batch, self.channels, *self.size, device=DEVICE) + 0.5
        return x.contiguous(memory_format=LAYOUTS[self.layout])

    def maps(self) -> list[Tensor]:
        """x, and the shortcut if there is one."""
        return [self.map() for _ in range(1 + self.shortcut)]


class Tail(nn.Module):
    """``activation(layer(norm(x)) + shortcut)``, with numbers as after some training."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        c, reduction = case.channels, case.reduction
        self.norm = nn.BatchNorm2d(c) if case.norm else None
        self.layer = MSSAR(c, case.scales, reduction=reduction, backend="reference")
        self.activation = case.activation
        self.to(DEVICE)
        for name, module in self.named_modules():
            if isinstance(module, nn.BatchNorm2d):
                # Large, so that BN of a few values is well-conditioned; each norm has its own.
                module.eps = {"norm": 1e-3, "norm1": 1e-2, "norm2": 3e-2}[name.split(".")[-1]]
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.normal_(module.bias, std=0.3)
                nn.init.normal_(module.running_mean, std=0.3)
                nn.init.uniform_(module.running_var, 0.5, 2.0)
        if case.frozen == "front":
            self.norm.eval()
        elif case.frozen:
            (self.layer if case.frozen == "branches" else self).eval()

    def forward(self, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
        """As PyTorch has it."""
        x = self.layer(x if self.norm is None else self.norm(x))
        return ACTIVATIONS[self.activation](x if shortcut is None else x + shortcut)

    def kernels(self, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
        self.layer.backend = "triton"  # an error where they cannot
        try:
            y = fused.tail(x, self.layer, self.norm, shortcut, self.activation)
        finally:
            self.layer.backend = "reference"
        assert y is not None
        return y

    def names(self, inputs: list[Tensor]) -> list[str]:
        """Of what :func:`differentiated` gives."""
        return ["out", *("x", "shortcut")[: len(inputs)], *(n for n, _ in self.named_parameters())]


@torch.no_grad()
def keep_off_zero(module: nn.Module, inputs: list[Tensor]) -> None:
    """Move BN's intercepts to where none of its values is so near to 0 that rounding turns it."""
    # Among few rows, one hidden value on the other side of its relu is a third of a gradient.
    wide, moved = copy.deepcopy(module).double(), dict[nn.Module, Tensor]()

    def move(norm: nn.Module, _: object, out: Tensor) -> Tensor:
        values = out.transpose(0, 1).flatten(1).sort().values
        quarter = values.shape[1] // 4  # at least so many stay on either side
        values = values[:, quarter : values.shape[1] - quarter]
        gap, at = values.diff().max(1, keepdim=True)
        moved[norm] = values.gather(1, at) + gap / 2
        return out - moved[norm][:, :, None]

    for owner in wide.modules():
        for name in BEFORE_A_RELU.get(type(owner), ()):
            owner.get_submodule(name).register_forward_hook(move)
    wide(*(x.double() for x in inputs))
    for ours, copied in zip(module.modules(), wide.modules(), strict=True):
        if copied in moved:
            ours.bias -= moved[copied].flatten()


@torch.no_grad()
def keep_off_edge(tail: Tail, inputs: list[Tensor], probe: Tensor) -> None:
    """Of float32: move the shortcut, or take no gradient, where rounding turns the tail's relu."""
    # In 3 million values some 20 are that near. One that turns moves a gradient by 1e-3 of itself,
    # a thousand times as much as all rounding else. Half types turn many, here and in the modules.
    if tail.activation != "relu" or inputs[0].dtype is not torch.float32:
        return
    wide = copy.deepcopy(tail).double()
    wide.activation = None
    before = wide(*(x.double() for x in inputs))
    near = before.abs() < EDGE * (1 + before.abs().mean())
    if len(inputs) > 1 and 0 not in inputs[1].stride():
        inputs[1] += torch.where(near, 3 * EDGE * before.sign(), 0.0)
    elif 0 not in probe.stride():
        probe.masked_fill_(near, 0.0)


def differentiated(
    call: Callable[..., Tensor], inputs: list[Tensor], module: nn.Module, probe: Tensor
) -> list[Tensor]:
    """The output and every gradient."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    y = call(*inputs)
    grads = torch.autograd.grad(y, [*inputs, *module.parameters()], probe.to(y.dtype))
    return [y.detach(), *grads]


def exactly(tail: Tail, inputs: list[Tensor], probe: Tensor) -> list[Tensor]:
    """The same in float64; and what that leaves in ``tail``'s running statistics."""
    wide = copy.deepcopy(tail).double()
    return differentiated(wide, [x.double() for x in inputs], wide, probe.double())


def apart(found: Tensor, expected: Tensor) -> float:
    """Of the expected tensor's norm."""
    assert found.shape == expected.shape
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())


def worst(found: list[Tensor], expected: list[Tensor], names: list[str]) -> tuple[float, str]:
    pairs = zip(found, expected, names, strict=True)
    return max((apart(ours, theirs), name) for ours, theirs, name in pairs)


def assert_as_good(tail: Tail, inputs: list[Tensor], probe: Tensor | None = None) -> None:
    """As near to float64 as plain modules come, the output and each gradient by itself."""
    dtype, kept = inputs[0].dtype, tail.layer.branches[0].reduce.weight.dtype
    probe = torch.randn_like(inputs[0]) if probe is None else probe
    keep_off_zero(tail, inputs)
    keep_off_edge(tail, inputs, probe)
    expected = exactly(tail, inputs, probe)
    with torch.autocast(DEVICE, dtype, enabled=dtype is not kept):
        theirs = differentiated(tail, inputs, tail, probe)
        ours = differentiated(tail.kernels, inputs, tail, probe)
    for name, a, b, c in zip(tail.names(inputs), ours, theirs, expected, strict=True):
        assert a.dtype is b.dtype, name
        ours_off, theirs_off = apart(a, c), apart(b, c)
        assert ours_off <= SLACK[dtype] + 3 * theirs_off, (name, ours_off, theirs_off)
    dense = like(inputs[0]).stride()
    assert ours[0].stride() == ours[1].stride() == dense


class Launched(TorchDispatchMode):
    """Which of this package's ops are called meanwhile."""

    def __enter__(self) -> list[str]:
        super().__enter__()
        self.names: list[str] = []
        return self.names

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, _, name = func.name().partition("::")
        if namespace == "mssar":
            self.names.append(name.removesuffix("_forward"))
        return func(*args, **(kwargs or {}))


def launched(call: Callable[..., object], *inputs: Tensor) -> list[str]:
    with Launched() as names:
        call(*inputs)
    return names


def layer(channels: int = 12, scales: tuple[int, ...] = (1, 2), **options: Any) -> MSSAR:
    return MSSAR(channels, scales, **{"backend": "triton", **options}).to(DEVICE)


def block(
    channels: int = 12,
    recalibration: Callable[[int], nn.Module] = layer,
    kind: type[BasicBlock] | type[Bottleneck] = BasicBlock,
) -> nn.Module:
    return kind(channels, channels // kind.expansion, 1, recalibration).to(DEVICE)


def maps(*shape: int) -> Tensor:
    x = torch.randn(shape or (4, 12, 6, 6), device=DEVICE)
    return x.contiguous(memory_format=torch.channels_last)
