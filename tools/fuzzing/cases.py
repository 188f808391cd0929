"""A case: modules, numbers, and how the numbers lie in memory.  N batch, C channels, H W map."""

from __future__ import annotations

import ast
import copy
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import mssar
from mssar.branch import Branch
from mssar.networks.densenet import DenseBlock, DenseStep

MODES = (
    "training",
    "evaluation",
    "evaluation with gradients",
    "front norm frozen",
    "branches frozen",
    "training without gradients",
)
WITHOUT_GRADIENTS = ("evaluation", "training without gradients")
FORMS = ("plain", "sliced", "offset", "transposed", "other layout", "expanded")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# So near to 0 that rounding may put a number on the other side of a relu.
NEAR = {"float32": 1e-4, "bfloat16": 0.05, "float16": 0.01}
BEFORE_A_RELU = {Branch: ("norm1",), DenseStep: ("norm1", "norm2")}
FEW, FEWEST = 64, 8  # rows: behind so few, BN is steep


def device() -> str:
    return "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


@dataclass(frozen=True, repr=False)
class Case:
    kind: str = "tail"
    shape: tuple[int, int, int, int] = (4, 12, 8, 8)
    scales: tuple[int, ...] = (1, 2, 4)
    reduction: int = 1
    dtype: str = "float32"
    whole: bool = False  # parameters are of this type, too; otherwise autocast
    last: bool = True  # channels_last
    mode: str = "training"
    norm: bool = True
    shortcut: bool = True
    activation: str | None = "relu"
    x: str = "plain"  # how these lie in memory
    added: str = "plain"
    grad: str = "plain"
    op: bool = False  # by the op that compilers see
    steps: int = 2  # of a dense block
    growth: int = 4
    seed: int = 0

    def __repr__(self) -> str:
        """What differs from the defaults."""
        told = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)
            if getattr(self, field.name) != field.default
        ]
        return f"Case({', '.join(told)})"

    @property
    def type(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def layout(self) -> torch.memory_format:
        return torch.channels_last if self.last else torch.contiguous_format

    @property
    def trains(self) -> tuple[bool, bool]:
        """Whether the front norm, and whether the branches take statistics of the batch."""
        front = self.mode in ("training", "branches frozen", "training without gradients")
        return front, self.mode.startswith("training") or self.mode == "front norm frozen"

    @property
    def rows(self) -> int:
        """That the coarsest scale's norms see, and that may differ."""
        n, _, h, w = self.shape
        if self.kind in ("windows", "sliding"):  # of which some may all be the whole map
            everything = any(max(h, w) <= math.isqrt(h * w // k**2) + 1 for k in self.scales)
            return n if everything else n * h * w
        return n * min(min(k, h) * min(k, w) for k in self.scales)

    def possible(self) -> bool:
        """Whether such modules can be made, and BN can train."""
        n, c, h, w = self.shape
        outputs = self.growth if self.kind == "dense" else c
        if outputs < len(self.scales) or min(self.shape) < 1:
            return False
        front, branches = self.trains
        return (self.rows > 1 or not branches) and (n * h * w > 1 or not front)


def parse(written: str) -> Case:
    """A case from what ``repr`` gave."""
    call = ast.parse(written.strip(), mode="eval").body
    if not isinstance(call, ast.Call):
        raise ValueError(f"a case is written Case(…); got {written!r}")
    return Case(**{word.arg: ast.literal_eval(word.value) for word in call.keywords})


class Tail(nn.Module):
    """A block's end, or the layer alone."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        c = case.shape[1]
        self.norm = nn.BatchNorm2d(c) if case.norm and case.kind == "tail" else None
        self.layer = mssar.MSSAR(c, case.scales, reduction=case.reduction)
        self.case = case

    def forward(self, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
        if self.case.kind == "layer":
            return self.layer(x)
        return mssar.tail(x, self.norm, self.layer, shortcut, self.case.activation)


class Windows(nn.Module):
    """Means over windows, and with ``whole`` what becomes of them."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        c = case.shape[1]
        self.layer = mssar.MSSAR(c, case.scales, "sliding", reduction=case.reduction)
        self.whole = case.kind == "sliding"
        if not self.whole:
            self.layer.branches.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if self.whole else torch.stack(self.layer.pool(x).maps)


def dense_block(case: Case) -> nn.Module:
    recalibration = partial(mssar.MSSAR, scales=case.scales, reduction=case.reduction)
    return DenseBlock(case.steps, case.shape[1], case.growth, recalibration, "multi")


MODULES = {
    "tail": Tail, "layer": Tail, "dense": dense_block, "windows": Windows, "sliding": Windows,
}  # fmt: skip


def module_of(case: Case) -> nn.Module:
    """With numbers as after some training."""
    module = MODULES[case.kind](case).to(device())
    for name, norm in module.named_modules():
        if isinstance(norm, nn.BatchNorm2d):
            if case.rows < FEW:
                norm.eps = {"norm1": 1e-2, "norm2": 3e-2}.get(name.split(".")[-1], 1e-3)
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.normal_(norm.bias, std=0.3)
            nn.init.normal_(norm.running_mean, std=0.3)
            nn.init.uniform_(norm.running_var, 0.5, 2.0)
    front, branches = case.trains
    module.train(front)
    for layer in module.modules():
        if isinstance(layer, mssar.MSSAR):
            layer.train(branches)
    return module


@dataclass
class Given:
    """What a case is about, in its type; ``forms`` is how it is to lie in memory."""

    module: nn.Module
    inputs: list[Tensor]
    grad: Tensor
    forms: list[str]


@torch.no_grad()
def given(case: Case, judged: bool = True) -> Given:
    """Numbers that rounding does not decide about; where nothing is ``judged``, any."""
    torch.manual_seed(case.seed)
    module, kind = module_of(case), case.type
    if case.whole:
        module.to(kind)
    n, c, h, w = case.shape
    about = torch.randn(1, c, 1, 1, device=device()) + torch.randn(n, c, 1, 1, device=device())
    x = torch.randn(case.shape, device=device()) * (0.5 + torch.rand_like(about)) + about
    inputs = [x.to(kind)]
    if case.shortcut and case.kind == "tail":
        count = 1 if case.added == "expanded" else n
        inputs.append(torch.randn(count, c, h, w, device=device()).to(kind).expand(case.shape))
    if judged and case.rows < FEWEST:
        _flatten(module, inputs)
    if judged:
        _keep_off_zero(module, inputs)
    wide = copy.deepcopy(module).to(device() if judged else "meta", torch.float64)
    if isinstance(wide, Tail):
        wide.case = copy.copy(case)
        object.__setattr__(wide.case, "activation", None)
    whole = next(wide.parameters())
    before = set_backend(wide, "reference")(*(t.to(whole) for t in inputs))
    spread = (1,) * before.ndim if case.grad == "expanded" else before.shape
    grad = torch.randn(spread, device=device()).to(kind).expand(before.shape)
    if judged and case.kind == "tail" and case.activation == "relu":
        near = before.abs() < NEAR[case.dtype] * (1 + before.abs().mean())
        if len(inputs) > 1 and case.added != "expanded":
            inputs[1] = (inputs[1] + near * 4 * NEAR[case.dtype] * before.sign()).to(kind)
        else:
            grad = grad.masked_fill(near, 0)
    return Given(module, inputs, grad, [*(case.x, case.added)[: len(inputs)], case.grad])


def _flatten(module: nn.Module, inputs: list[Tensor]) -> None:
    """Give norms an eps as large as variances are."""
    # Of few values, BN with a small one leaves their order and no gradient: whatever is left of
    # that is rounding.
    wide = copy.deepcopy(module).double()

    def measure(norm: nn.Module, given: tuple[Tensor, ...]) -> None:
        norm.eps = max(norm.eps, float(given[0].var((0, 2, 3), correction=0).mean()))

    for norm in wide.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.register_forward_pre_hook(measure)
    set_backend(wide, "reference")(*(x.double() for x in inputs))
    for ours, copied in zip(module.modules(), wide.modules(), strict=True):
        if isinstance(ours, nn.BatchNorm2d):
            ours.eps = copied.eps
        if isinstance(ours, mssar.MSSAR):  # its branches share theirs
            for name in ("norm1", "norm2"):
                norms = [getattr(branch, name) for branch in copied.branches]
                mean = sum(norm.eps for norm in norms) / len(norms)
                for norm in norms:
                    norm.eps = mean


def _keep_off_zero(module: nn.Module, inputs: list[Tensor]) -> None:
    """Move BN's intercepts to where few of its values are so near to 0 that rounding turns them."""
    # Among few rows, one hidden value on the other side of its relu is a third of a gradient.
    wide, moved = copy.deepcopy(module).double(), dict[nn.Module, Tensor]()

    def move(norm: nn.Module, _: object, out: Tensor) -> Tensor:
        values = out.transpose(0, 1).flatten(1).sort().values
        quarter = (values.shape[1] - 1) // 4  # at least so many stay on either side
        values = values[:, quarter : values.shape[1] - quarter]
        if values.shape[1] < 2:
            moved[norm] = torch.where(values.abs() < 0.1, -0.2, 0.0).to(values)
        else:
            gap, at = values.diff().max(1, keepdim=True)
            moved[norm] = values.gather(1, at) + gap / 2
        return out - moved[norm][:, :, None]

    for owner in wide.modules():
        for name in BEFORE_A_RELU.get(type(owner), ()):
            owner.get_submodule(name).register_forward_hook(move)
    set_backend(wide, "reference")(*(x.double() for x in inputs))
    for ours, copied in zip(module.modules(), wide.modules(), strict=True):
        if copied in moved:
            ours.bias -= moved[copied].flatten().to(ours.bias)


def set_backend(module: nn.Module, backend: str) -> nn.Module:
    for layer in module.modules():
        if isinstance(layer, mssar.MSSAR):
            layer.backend = backend
    return module


def laid_out(x: Tensor, form: str, layout: torch.memory_format) -> Tensor:
    """The same numbers, elsewhere; what lies between them is no number."""
    if x.ndim != 4:  # windows of several scales
        layout = torch.contiguous_format
    if form == "expanded":
        return x if 0 in x.stride() else x.contiguous(memory_format=layout)
    if form == "other layout" and x.ndim == 4:
        last = layout is torch.channels_last
        layout = torch.contiguous_format if last else torch.channels_last
    if form == "transposed":
        return x.mT.contiguous(memory_format=layout).mT
    x = x.contiguous(memory_format=layout)
    if form == "sliced":
        margins = (1, 1, 0, 0, 2, 1)
        room = torch.nn.functional.pad(x, margins, value=float("nan"))
        room = room.contiguous(memory_format=layout) if x.ndim == 4 else room
        return room[..., 2 : 2 + x.shape[-3], :, 1 : 1 + x.shape[-1]]
    if form == "offset":
        room = x.new_full((x.numel() + 1,), float("nan"))
        return room.as_strided(x.shape, x.stride(), 1).copy_(x)
    return x


class Seen(TorchDispatchMode):
    """Does nothing, but where one is on, ops are called as ops."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def results(case: Case, given: Given, backend: str, wide: bool = False) -> dict[str, Tensor]:
    """The output, every gradient and running statistic; with ``wide`` in float64."""
    module = set_backend(copy.deepcopy(given.module), backend)
    inputs, grad = [*given.inputs], given.grad
    if wide:
        module.double()
        inputs, grad = [t.double() for t in inputs], grad.double()
    forms = given.forms
    if backend == "reference" or case.kind == "dense":
        # PyTorch's own norms stop at maps that are not aligned, where kernels of ours do not.
        forms = ["plain" if form == "offset" else form for form in forms]
    *inputs, grad = (
        laid_out(t, form, case.layout) for t, form in zip([*inputs, grad], forms, strict=True)
    )
    needed = case.mode not in WITHOUT_GRADIENTS
    inputs = [t.detach().requires_grad_(needed) for t in inputs]
    half = case.type is not torch.float32 and not case.whole and not wide
    watched = Seen() if case.op and backend == "triton" else nullcontext()
    typed = torch.autocast(device(), case.type, enabled=half)
    with typed, torch.set_grad_enabled(needed), watched:
        out = module(*inputs)
    found = {"output": out.detach()}
    parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
    if needed:
        names = ["gradient of x", "gradient of the shortcut"][: len(inputs)]
        names += [f"gradient of {name}" for name in parameters]
        wanted = [*inputs, *parameters.values()]
        grads = torch.autograd.grad(out, wanted, grad.to(out.dtype), allow_unused=True)
        found |= {n: g for n, g in zip(names, grads, strict=True) if g is not None}
    return found | {n: b for n, b in module.named_buffers() if case.kind != "windows"}


@contextmanager
def exact_products() -> Iterator[None]:
    """Of float32 on a GPU, too; and convolutions that give the same twice."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32, cudnn.deterministic
    cudnn.allow_tf32, matmul.allow_tf32, cudnn.deterministic = False, False, True
    try:
        yield
    finally:
        cudnn.allow_tf32, matmul.allow_tf32, cudnn.deterministic = before
