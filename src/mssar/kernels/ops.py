"""The torch ops of a block's tail: what autograd, torch.compile and export see of the kernels.

    tail           conv output → BN → recalibrate → add → relu, with the batch's statistics
    tail_backward  its gradients
    tail_eval      the same with running statistics; no gradient
    track          the running statistics of all norms of a tail

BN, the shortcut, the relu and the recalibration may each be absent: MSSAR alone is a tail too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mssar.kernels.registration import register
from mssar.kernels.shapes import Epsilons, Forward, buffers, gradients

SETTINGS = "int[] scales, float[] eps, bool relu, str precision"


def _tail(
    x: Tensor,
    shortcut: Tensor | None,
    gamma: Tensor | None,
    beta: Tensor | None,
    params: Sequence[Tensor],
    scales: Sequence[int],
    eps: Sequence[float],
    relu: bool,
    precision: str,
) -> tuple[Tensor, ...]:
    from mssar.kernels import launch

    return launch.forward(x, shortcut, gamma, beta, params, scales, Epsilons(*eps), relu, precision)


def _tail_shapes(
    x: Tensor,
    _shortcut: Tensor | None,
    gamma: Tensor | None,
    _beta: Tensor | None,
    params: Sequence[Tensor],
    scales: Sequence[int],
    _eps: Sequence[float],
    _relu: bool,
    _precision: str,
) -> tuple[Tensor, ...]:
    return buffers(x, params, scales, gamma is not None)


def _tail_backward(
    grad: Tensor,
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    params: Sequence[Tensor],
    made: Sequence[Tensor],
    scales: Sequence[int],
    eps: Sequence[float],
    relu: bool,
    precision: str,
    write: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    from mssar.kernels import launch_backward

    return launch_backward.backward(
        grad, x, gamma, beta, params, Forward(*made), scales, Epsilons(*eps), relu,
        write, precision,
    )  # fmt: skip


def _tail_backward_shapes(
    _grad: Tensor,
    x: Tensor,
    gamma: Tensor | None,
    _beta: Tensor | None,
    params: Sequence[Tensor],
    _made: Sequence[Tensor],
    _scales: Sequence[int],
    _eps: Sequence[float],
    _relu: bool,
    _precision: str,
    write: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    return gradients(x, gamma, params, write)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, shortcut, gamma, beta, params, scales, eps, relu, precision = inputs
    ctx.settings = scales, eps, relu, precision
    ctx.shortcut, ctx.params = shortcut is not None, len(params)
    kept = output if relu else (x, *output[1:])  # the relu's gradient is seen from its output
    ctx.save_for_backward(x, gamma, beta, *params, *kept)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 9
    x, gamma, beta, *rest = ctx.saved_tensors
    params, made = rest[: ctx.params], rest[ctx.params :]
    relu = ctx.settings[2]
    wanted = ctx.shortcut and ctx.needs_input_grad[1]
    write = wanted and relu
    dx, behind, d_gamma, d_beta, d_params = torch.ops.mssar.tail_backward(
        grad, x, gamma, beta, params, made, *ctx.settings, write
    )
    added = behind if write else (grad if wanted else None)
    if gamma is None:
        d_gamma = d_beta = None
    return dx, added, d_gamma, d_beta, d_params, None, None, None, None


def _tail_eval(
    x: Tensor,
    shortcut: Tensor | None,
    norm: Sequence[Tensor],
    params: Sequence[Tensor],
    hidden_running: Sequence[Tensor],
    gate_running: Sequence[Tensor],
    scales: Sequence[int],
    eps: Sequence[float],
    relu: bool,
    precision: str,
) -> Tensor:
    from mssar.kernels import launch

    return launch.evaluate(
        x, shortcut, norm, params, hidden_running, gate_running, scales, Epsilons(*eps), relu,
        precision,
    )  # fmt: skip


def _tail_eval_shapes(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


def _track(
    moments: Sequence[Tensor],
    lacking: Sequence[Tensor],
    means: Sequence[Tensor],
    variances: Sequence[Tensor],
    counts: Sequence[Tensor],
    momenta: Sequence[float],
    values: Sequence[int],
) -> None:
    from mssar.kernels import launch

    launch.track(moments, lacking, means, variances, counts, momenta, values)


register(
    "tail",
    f"(Tensor x, Tensor? shortcut, Tensor? gamma, Tensor? beta, Tensor[] params, {SETTINGS})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _tail,
    _tail_shapes,
    save=_save,
    backward=_differentiate,
)
register(
    "tail_backward",
    "(Tensor grad, Tensor x, Tensor? gamma, Tensor? beta, Tensor[] params, Tensor[] made, "
    f"{SETTINGS}, bool write) -> (Tensor, Tensor, Tensor, Tensor, Tensor[])",
    _tail_backward,
    _tail_backward_shapes,
)
register(
    "tail_eval",
    "(Tensor x, Tensor? shortcut, Tensor[] norm, Tensor[] params, Tensor[] hidden_running, "
    f"Tensor[] gate_running, {SETTINGS}) -> Tensor",
    _tail_eval,
    _tail_eval_shapes,
)
register(
    "track",
    "(Tensor[] moments, Tensor[] lacking, Tensor(a!)[] means, Tensor(b!)[] variances, "
    "Tensor(c!)[] counts, float[] momenta, int[] values) -> ()",
    _track,
    mutates=("means", "variances", "counts"),
)
