"""The layer, given whatever a map may be, against its definition.  N C H W as everywhere.

    PYTHONPATH=tools python -m faults.layer "Case(shape=(2, 6, 7, 9), bad='nan', seed=3)"

tries again what was printed as wrong.
"""

from __future__ import annotations

import copy
import random
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from faults import definition
from faults.definition import Noise
from faults.layer_cases import BAD, FOLLOWED, Case, drawn, map_of, parse
from faults.suite import Row, share

DRAWS, TIMES = 4, 24  # of noise, and how much further off than with it nothing may be
EPSILON = 1e-2  # of BN: with 1e-5, of few values that are nearly alike only rounding is left
FLOOR = 64  # times the rounding: of what is compared, relative to its largest number
MAPS = {"regional": 1.5, "sliding": 10.0}  # memory beside the map, in maps: what docs/ promise


@dataclass(frozen=True)
class Strips:
    """A coordinate set of our own: parts from left to right."""

    scale: int

    def grid(self, size: tuple[int, int]) -> tuple[int, int]:
        return 1, min(self.scale, size[1])

    def pool(self, x: Tensor) -> Tensor:
        parts = x.tensor_split(min(self.scale, x.shape[3]), 3)
        return torch.cat([part.mean((2, 3), keepdim=True) for part in parts], 3)

    def spread(self, z: Tensor, size: tuple[int, int]) -> Tensor:
        sides = [len(part) for part in torch.arange(size[1]).tensor_split(z.shape[3])]
        wide = z.repeat_interleave(torch.tensor(sides), 3, output_size=sum(sides))  # compilers ask
        return wide.expand(-1, -1, *size)


class Given(NamedTuple):
    """A layer and its inputs, as a case has them."""

    layer: Any
    inputs: list[Tensor]
    state: dict[str, Tensor]  # in float64

    def exact(self) -> list[Tensor]:
        return [x.detach().double() for x in self.inputs]


def given(case: Case) -> Given:
    from mssar import MSSAR  # here, so that tests may have it with or without their shape checks

    draw = torch.Generator().manual_seed(case.seed)
    strategy = Strips if case.strategy == "strips" else case.strategy
    layer = MSSAR(case.shape[1], case.scales, strategy, case.reduction, case.context)
    with torch.no_grad():
        for name, value in layer.state_dict().items():
            if name.endswith("running_var"):
                value.uniform_(0.5, 2.0, generator=draw)
            elif value.is_floating_point():
                value.normal_(0.3, 0.7, generator=draw)
    for module in layer.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.eps = EPSILON
    layer = layer.train(case.training)
    if not case.autocast:
        layer = layer.to(case.type)
    inputs = [map_of(case, case.shape[1], draw)]
    if case.context:
        inputs.append(map_of(case, case.context, draw))
    state = {name: value.detach().double() for name, value in layer.state_dict().items()}
    return Given(layer, inputs, copy.deepcopy(state))


def called(case: Case, layer: Any, inputs: Sequence[Tensor]) -> Tensor:
    if case.compiled:
        torch.compiler.reset()
        layer = torch.compile(layer, backend=case.compiled, fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
        y: Tensor = layer(*inputs)
    return y


def by_definition(case: Case, made: Given, inputs: list[Tensor], **how: Any) -> definition.Result:
    x, *rest = inputs
    context = rest[0] if rest else None
    return definition.recalibrated(
        x, context, made.state, case.scales, case.strategy, case.training, EPSILON, **how
    )


def judged(case: Case) -> list[str]:
    """What is wrong with a case."""
    return _judged_bad(case) if case.bad else _judged_good(case)


def _judged_good(case: Case) -> list[str]:
    """Output, gradients and statistics, each as near as noise of the rounding's size allows."""
    made = given(case)
    slope = torch.randn(case.shape, generator=torch.Generator().manual_seed(1)).double()
    inputs = [x.detach().requires_grad_() for x in made.inputs]
    y = called(case, made.layer, inputs)
    wrong = _form(case, y)
    parameters = dict(made.layer.named_parameters())
    slopes = torch.autograd.grad(y, [*inputs, *parameters.values()], slope.to(y.dtype))
    found = {"output": y.detach()}
    found |= dict(zip(["gradient of x", "gradient of context"], slopes, strict=False))
    if not case.context:
        found.pop("gradient of context", None)
    names = [f"gradient of {name}" for name in parameters]
    found |= dict(zip(names, slopes[len(inputs) :], strict=True))
    found |= {n: b for n, b in made.layer.named_buffers() if "running" in n}
    exact = _results(case, made, slope)
    draw = torch.Generator().manual_seed(case.seed)
    noisy = [_results(case, made, slope, Noise(case.rounding, draw)) for _ in range(DRAWS)]
    for name, right in exact.items():
        usual = max(float(right.abs().max()), 0.1)  # parts of it may cancel
        off = max(float((other[name] - right).abs().max()) for other in noisy)
        allowed = TIMES * off + FLOOR * case.rounding * usual
        distance = float((found[name].double() - right).abs().max())
        if not distance <= allowed:
            wrong.append(f"{name}: {distance:.2g} off, and rounding explains {allowed:.2g}")
    return wrong


def _results(
    case: Case, made: Given, slope: Tensor, noise: Noise | None = None
) -> dict[str, Tensor]:
    """By the definition, by the names of what is compared."""
    inputs = [x.requires_grad_() for x in made.exact()]
    parameters = {n: made.state[n] for n, _ in made.layer.named_parameters()}
    for value in parameters.values():
        value.requires_grad_()
    result = by_definition(case, made, inputs, **({"noise": noise} if noise else {}))
    named = ["gradient of x", "gradient of context"][: len(inputs)]
    named += [f"gradient of {name}" for name in parameters]
    slopes = torch.autograd.grad(result.y, [*inputs, *parameters.values()], slope)
    found = {"output": result.y.detach(), **dict(zip(named, slopes, strict=True))}
    kept = {n: v.detach() for n, v in made.state.items() if "running" in n}
    return found | kept | {n: v.detach() for n, v in result.statistics.items()}


def _form(case: Case, y: Tensor) -> list[str]:
    """Shape, type and layout are those of x."""
    wrong = []
    if y.shape != case.shape or y.dtype != case.type:
        wrong.append(f"output is {y.dtype} {tuple(y.shape)}")
    if case.layout == "channels_last" and not y.is_contiguous(memory_format=torch.channels_last):
        wrong.append(f"channels_last became strides {y.stride()}")
    if case.layout == "contiguous" and not y.is_contiguous():
        wrong.append(f"contiguous became strides {y.stride()}")
    return wrong


def _judged_bad(case: Case) -> list[str]:
    """One number of a map is not finite: which others may not be, and which stay as they were."""
    made, draw = given(case), random.Random(case.seed)
    spoilt = [x.clone() for x in made.inputs]  # clone keeps strides; expanded maps become dense
    which = draw.randrange(len(spoilt))
    n, _, h, w = case.shape
    at = draw.randrange(n), draw.randrange(spoilt[which].shape[1]), draw.randrange(h)
    at = (*at, draw.randrange(w))
    spoilt[which][at] = BAD[case.bad or "nan"]
    reached = _reached(case, at, source=which == len(spoilt) - 1, scaled=which == 0)
    with torch.no_grad():
        before = called(case, copy.deepcopy(made.layer), [x.clone() for x in made.inputs])
        after = called(case, made.layer, spoilt)
        expected = by_definition(case, made, [x.double() for x in spoilt]).y
    wrong = _form(case, after) if case.layout == "contiguous" else []
    if not torch.equal(after[~reached], before[~reached]):
        wrong.append(f"{case.bad} at {at} changed what does not consult it")
    for name, kind in (("nan", torch.isnan), ("inf", torch.isposinf), ("-inf", torch.isneginf)):
        if not torch.equal(kind(after), kind(expected)):
            count, right = int(kind(after).sum()), int(kind(expected).sum())
            wrong.append(f"{name} at {count} places, and by the definition at {right}")
    return wrong


def _reached(case: Case, at: tuple[int, ...], source: bool, scaled: bool) -> Tensor:
    """Where the output depends on one number of a map, by the coordinate sets alone.

    Of a map that weights come from, all positions of the sample that consult it at some scale, in
    all channels; in training all positions of all samples, by BN. Of one that is weighted, itself.
    """
    sample, channel, row, column = at
    where = torch.zeros(case.shape, dtype=torch.bool)
    if scaled:
        where[sample, channel, row, column] = True
    if source:
        h, w = case.shape[2:]
        for scale in case.scales:
            members = definition.SETS[case.strategy](h, w, scale)
            seen = members[definition.consulted(members, case.strategy), row * w + column]
            where[sample] |= seen.view(h, w)
        if case.training:
            where[:] = True
    return where


def check(effort: float, seed: int) -> Iterator[Row]:
    draw = random.Random(f"{seed}/layer")
    random_cases = [drawn(draw) for _ in range(share(1200, effort))]
    yield row("any shape, type, layout, scales, strategy, context, autocast",
              "output, gradients and BN's statistics by the definition", random_cases)  # fmt: skip
    small = [
        drawn(draw, shape=(draw.randint(2, 3), draw.randint(3, 8), *draw.choice([(1, 1), (2, 1)])))
        for _ in range(share(150, effort))
    ]
    yield row("maps of one or two positions, scales far above", "the same", small)
    compiled = [
        drawn(draw, compiled=backend, dtype="float32", shape=(draw.randint(2, 3), 6, 7, 9))
        for backend in ("eager", "aot_eager")
        for _ in range(share(6, effort))
    ]
    yield row("compiled by torch.compile", "the same", compiled)
    for training in (False, True):
        bad = [
            drawn(draw, bad=draw.choice(list(BAD)), training=training,
                  dtype=draw.choice(FOLLOWED))
            for _ in range(share(600, effort))
        ]  # fmt: skip
        reach = (
            "everything, by BN" if training else "where it is consulted, the same bits elsewhere"
        )
        mode = "training" if training else "evaluation"
        yield row(f"NaN or ±inf in a map, in {mode}", f"not finite as by the definition: {reach}",
                  bad)  # fmt: skip
    yield empty(draw, share(60, effort))
    if effort >= 0.1:
        yield large()


def row(fault: str, promise: str, cases: list[Case]) -> Row:
    wrong = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for case in cases:
            found = judged(case)
            wrong += bool(found)
            for line in found:
                print(f"wrong: {case!r}: {line}", file=sys.stderr)
    return Row(fault, promise, len(cases), wrong)


def empty(draw: random.Random, count: int) -> Row:
    """A batch of none: nothing comes of it, and nothing is learnt."""
    wrong = 0
    for _ in range(count):
        case = drawn(draw)
        made = given(case)
        inputs = [x[:0].detach().requires_grad_() for x in made.inputs]
        y = called(case, made.layer, inputs)
        y.sum().backward()
        slopes = [p.grad for p in made.layer.parameters()]
        after = {n: v.double() for n, v in made.layer.state_dict().items()}
        good = y.shape == (0, *case.shape[1:]) and y.dtype == case.type
        good &= all(slope is not None and not slope.any() for slope in slopes)
        good &= all(x.grad is not None and x.grad.shape == x.shape for x in inputs)
        good &= all(torch.equal(after[n], v) for n, v in made.state.items() if "tracked" not in n)
        if not good:
            wrong += 1
            print(f"wrong: a batch of none of {case!r}", file=sys.stderr)
    return Row("a batch of no images", "none, gradients of 0, statistics as before", count, wrong)


LARGE = """
import sys, torch
from mssar import MSSAR
strategy, channels, side = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)

def memory(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))

layer = MSSAR(channels, strategy=strategy).eval()
with torch.inference_mode():
    layer(torch.randn(1, channels, 64, 64))  # what a first call keeps
    x = torch.randn(1, channels, side, side)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the largest so far is forgotten
    before = memory("VmRSS")
    y = layer(x)
print((memory("VmHWM") - before) / (x.numel() * 4), bool(y.isfinite().all()))
"""


def large(channels: int = 64, side: int = 1024) -> Row:
    """How much memory a large map takes beside itself, in maps, its output among them."""
    wrong, told = 0, []
    for strategy, bound in MAPS.items():
        words = [sys.executable, "-c", LARGE, strategy, str(channels), str(side)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        maps, finite = done.stdout.split() if done.returncode == 0 else ("inf", "False")
        good = float(maps) <= bound and finite == "True"
        wrong += not good
        told.append(f"{strategy} {float(maps):.1f} of {bound} maps")
        if not good:
            print(f"wrong: {words[3:]}: {maps} maps {done.stderr[-300:]}", file=sys.stderr)
    size = channels * side * side * 4 >> 20
    fault = f"inference on a map of 1×{channels}×{side}×{side} ({size} MiB)"
    return Row(fault, "memory beside it bounded", len(MAPS), wrong, ", ".join(told))


if __name__ == "__main__":
    asked = [parse(word) for word in sys.argv[1:]]
    print(row("asked for", "as the definition has it", asked))
