"""The torch ops of dense steps with carried sums.

region_sums  a map's sums over the regions of all scales, as rows
dense_step   z · new with weights from the rows; and the rows with those of z · new
dense_eval   the same with running statistics; no gradient
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mssar.kernels.registration import register
from mssar.kernels.shapes import Epsilons, Step, grids, step_buffers

SETTINGS = "int[] scales, float[] eps, bool carry, str precision"


def _sums(x: Tensor, scales: Sequence[int]) -> Tensor:
    from mssar.kernels import dense_launch

    return dense_launch.sums(x, scales)


def _sums_shapes(x: Tensor, scales: Sequence[int]) -> Tensor:
    rows = x.shape[0] * grids(x, scales).pool_rows
    return x.new_empty((rows, x.shape[1]), dtype=torch.float32)


def _sums_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    ctx.save_for_backward(inputs[0])
    ctx.scales = inputs[1]


def _sums_differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (x,) = ctx.saved_tensors
    return torch.ops.mssar.region_sums_backward(grad, x, ctx.scales), None


def _sums_backward(grad: Tensor, like: Tensor, scales: Sequence[int]) -> Tensor:
    from mssar.kernels import dense_launch

    return dense_launch.sums_backward(grad, like, scales)


def _sums_backward_shapes(grad: Tensor, like: Tensor, scales: Sequence[int]) -> Tensor:
    del grad, scales
    return torch.empty_like(like)


def _step(
    x: Tensor,
    rows: Tensor,
    params: Sequence[Tensor],
    scales: Sequence[int],
    eps: Sequence[float],
    carry: bool,
    precision: str,
) -> tuple[Tensor, ...]:
    from mssar.kernels import dense_launch

    return dense_launch.forward(x, rows, params, scales, Epsilons(*eps), carry, precision)


def _step_shapes(
    x: Tensor,
    rows: Tensor,
    params: Sequence[Tensor],
    scales: Sequence[int],
    eps: Sequence[float],
    carry: bool,
    precision: str,
) -> tuple[Tensor, ...]:
    del eps, precision
    return step_buffers(x, rows, params, scales, carry)


def _step_backward(
    grad: Tensor,
    rows_grad: Tensor | None,
    x: Tensor,
    params: Sequence[Tensor],
    made: Sequence[Tensor],
    scales: Sequence[int],
    eps: Sequence[float],
    precision: str,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    from mssar.kernels import dense_launch

    kept = Step(*made)
    return dense_launch.backward(
        grad, rows_grad, x, params, kept, scales, Epsilons(*eps), precision
    )


def _step_backward_shapes(
    grad: Tensor,
    rows_grad: Tensor | None,
    x: Tensor,
    params: Sequence[Tensor],
    made: Sequence[Tensor],
    scales: Sequence[int],
    eps: Sequence[float],
    precision: str,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    del grad, rows_grad, eps, precision
    rows = x.shape[0] * grids(x, scales).pool_rows
    grad_rows = x.new_empty((rows, Step(*made).normal.shape[1]), dtype=torch.float32)
    return torch.empty_like(x), grad_rows, [torch.empty_like(p) for p in params]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, _, params, scales, eps, _, precision = inputs
    ctx.settings, ctx.params = (scales, eps, precision), len(params)
    ctx.save_for_backward(x, *params, *output[2:])
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, grad: Tensor | None, rows_grad: Tensor | None, *_: Any
) -> tuple[Any, ...]:
    if grad is None and rows_grad is None:
        return (None,) * 7
    x, *rest = ctx.saved_tensors
    params, made = rest[: ctx.params], rest[ctx.params :]
    if grad is None:
        grad = torch.zeros_like(x)
    # What came out is not needed to go back; two of what is there stand for it.
    d_x, d_rows, d_params = torch.ops.mssar.dense_step_backward(
        grad, rows_grad, x, params, [made[0], made[0], *made], *ctx.settings
    )
    return d_x, d_rows, d_params, None, None, None, None


def _eval(
    x: Tensor,
    rows: Tensor,
    params: Sequence[Tensor],
    hidden_running: Sequence[Tensor],
    gate_running: Sequence[Tensor],
    scales: Sequence[int],
    eps: Sequence[float],
    carry: bool,
    precision: str,
) -> tuple[Tensor, Tensor]:
    from mssar.kernels import dense_launch

    return dense_launch.evaluate(
        x, rows, params, hidden_running, gate_running, scales, Epsilons(*eps), carry, precision
    )


def _eval_shapes(
    x: Tensor,
    rows: Tensor,
    params: Sequence[Tensor],
    hidden_running: Sequence[Tensor],
    gate_running: Sequence[Tensor],
    scales: Sequence[int],
    eps: Sequence[float],
    carry: bool,
    precision: str,
) -> tuple[Tensor, Tensor]:
    del hidden_running, gate_running, eps, precision
    made = step_buffers(x, rows, params, scales, carry)
    return made.out, made.rows


register(
    "region_sums",
    "(Tensor x, int[] scales) -> Tensor",
    _sums,
    _sums_shapes,
    save=_sums_save,
    backward=_sums_differentiate,
)
register(
    "region_sums_backward",
    "(Tensor grad, Tensor like, int[] scales) -> Tensor",
    _sums_backward,
    _sums_backward_shapes,
)
register(
    "dense_step",
    f"(Tensor x, Tensor rows, Tensor[] params, {SETTINGS})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _step,
    _step_shapes,
    save=_save,
    backward=_differentiate,
)
register(
    "dense_step_backward",
    "(Tensor grad, Tensor? rows_grad, Tensor x, Tensor[] params, Tensor[] made, int[] scales, "
    "float[] eps, str precision) -> (Tensor, Tensor, Tensor[])",
    _step_backward,
    _step_backward_shapes,
)
register(
    "dense_eval",
    "(Tensor x, Tensor rows, Tensor[] params, Tensor[] hidden_running, Tensor[] gate_running, "
    f"{SETTINGS}) -> (Tensor, Tensor)",
    _eval,
    _eval_shapes,
)
