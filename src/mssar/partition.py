"""How means over runs of positions are taken.  N batch, C channels, H W map, h w cells.

An axis of n positions is cut into K ≤ n runs, position i lying in run ⌊i·K/n⌋; rows and columns so
cut make cells. A map is averaged over them (``mean``), and values, one a cell, are laid over a map
(``repeat``, ``combine``). There are several ways, which agree; which one is taken depends on the
device, the layout in memory and whether someone traces, and is decided in ``_way_to_mean``,
``_way_to_repeat`` and ``_way_to_combine``. Windows, which overlap, are at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:  # the tests set this, and so check every shape below
    from jaxtyping import Float, Int

Size: TypeAlias = tuple[int, int]
Op: TypeAlias = Callable[[Tensor, Tensor], Tensor]

ROWS, COLUMNS = 2, 3  # the spatial axes of N C H W


def symbolic(size: Size) -> bool:
    """Whether someone traces who leaves this size open.

    Arithmetic on such a size costs: what is asked of it becomes a guard, and a remainder one that
    takes seconds to solve. The ways named "by index" ask nothing and leave sums to tensors.
    """
    return is_open(size[0]) or is_open(size[1])


def is_open(length: int) -> bool:
    """Whether someone traces who leaves this length open."""
    if not torch.compiler.is_compiling():
        return type(length) is not int  # but torch.SymInt
    # Inside torch.compile a SymInt passes for an int. Imported here since sympy comes along.
    import torch.fx.experimental.symbolic_shapes as shapes

    if not hasattr(shapes, "has_static_value"):  # before torch 2.8 there is no way to ask
        return False
    return not shapes.has_static_value(length)


def accumulation(x: Tensor) -> torch.dtype:
    """The type sums are kept in: at least float32."""
    return torch.promote_types(x.dtype, torch.float32)


def as_type(x: Tensor, dtype: torch.dtype) -> Tensor:
    """As ``to``, which leaves three operations in an exported program where nothing is to do."""
    return x if x.dtype is dtype else x.to(dtype)


def runs(length: int, parts: int) -> list[int]:
    """How long the runs of an axis are."""
    if length % parts == 0:
        return [length // parts] * parts
    cuts = [-(-j * length // parts) for j in range(parts + 1)]
    return [end - start for start, end in pairwise(cuts)]


def areas(size: Size, grid: Size, like: Tensor) -> Float[Tensor, "1 1 h w"] | None:
    """How many positions the cells hold; None where they are known to hold equally many."""
    if symbolic(size):
        return areas_by_index(size, grid, like)
    (height, width), (h, w) = size, grid
    if height % h == 0 and width % w == 0:
        return None
    rows = torch.arange(h - 1, h * (height + 1), height, device=like.device) // h
    columns = torch.arange(w - 1, w * (width + 1), width, device=like.device) // w
    return _areas(rows, columns, like)


def areas_by_index(size: Size, grid: Size, like: Tensor) -> Float[Tensor, "1 1 h w"]:
    rows, columns = (
        _borders(length, parts, like.device) for length, parts in zip(size, grid, strict=True)
    )
    return _areas(rows, columns, like)


def _areas(rows: Int[Tensor, " j"], columns: Int[Tensor, " k"], like: Tensor) -> Tensor:
    heights, widths = rows[1:] - rows[:-1], columns[1:] - columns[:-1]
    return (heights[:, None] * widths)[None, None].to(accumulation(like))


def _borders(length: int, parts: int, device: torch.device) -> Int[Tensor, " j"]:
    """⌈j·n/K⌉ for j from 0 to K, made on the device: a copy from the host would wait for it."""
    return (torch.arange(parts + 1, device=device) * length + (parts - 1)) // parts


def is_channels_last(x: Tensor) -> bool:
    # By strides, since vmap cannot answer is_contiguous for a memory format.
    return x.shape[1] > 1 and x.stride(1) == 1


def _as_it_lies(x: Tensor) -> tuple[Tensor, int]:
    """A map with its axes in the order of memory, and which of them are the rows."""
    return (x.permute(0, 2, 3, 1), 1) if is_channels_last(x) else (x, ROWS)


def _as_named(x: Tensor, rows: int) -> Tensor:
    """Back to N C H W."""
    return x if rows == ROWS else x.permute(0, 3, 1, 2)


# --- Means over cells


def mean(x: Float[Tensor, "N C H W"], grid: Size) -> Float[Tensor, "N C h w"]:
    """The mean over each of h × w cells, summed in float32 at least; the layout in memory stays."""
    return _way_to_mean(x, grid)(x, grid)


def _way_to_mean(x: Tensor, grid: Size) -> Callable[[Tensor, Size], Tensor]:
    height, width = x.shape[-2:]
    if symbolic((height, width)):
        return mean_by_index
    compiling = torch.compiler.is_compiling()
    if height % grid[0] or width % grid[1] or not (x.is_cuda or compiling):
        return mean_by_runs
    if not compiling and not x.requires_grad and height * width <= 1024 * grid[0] * grid[1]:
        # A fifth of the time of what follows; but slow in going back, not fused by Inductor,
        # and one running sum a cell, which loses digits where cells are large.
        return mean_by_windows
    if is_channels_last(x) and not x.is_cuda:
        # Unflattened as it is, Inductor would have the map copied out of this layout.
        return mean_by_cells_last
    return mean_by_cells


def mean_by_runs(x: Tensor, grid: Size) -> Tensor:
    """Sums over rows, then over columns. Only these few are divided: going back, too."""
    (height, width), (h, w) = x.shape[-2:], grid
    if (height, width) == (h, w):
        return x
    y, rows = _as_it_lies(x)
    strips = _sum_runs(y, rows, runs(height, h))
    sums = _as_named(_sum_runs(strips, rows + 1, runs(width, w)), rows)
    held = areas((height, width), grid, x)
    return (sums / (height * width // (h * w) if held is None else held)).to(x.dtype)


def mean_by_windows(x: Tensor, grid: Size) -> Tensor:
    return F.avg_pool2d(x, _sides(x, grid))


def mean_by_cells(x: Tensor, grid: Size) -> Tensor:
    (h, w), (a, b) = grid, _sides(x, grid)
    return torch.unflatten(torch.unflatten(x, COLUMNS, (w, b)), ROWS, (h, a)).mean((3, 5))


def mean_by_cells_last(x: Tensor, grid: Size) -> Tensor:
    """The same, of a map whose channels lie side by side."""
    (h, w), (a, b) = grid, _sides(x, grid)
    y = x.permute(0, 2, 3, 1)
    cells = torch.unflatten(torch.unflatten(y, 2, (w, b)), 1, (h, a))  # N h a w b C
    return cells.mean((2, 4)).permute(0, 3, 1, 2)


def mean_by_index(x: Tensor, grid: Size) -> Tensor:
    return _applied(_Means, x, grid) if _differentiated(x) else _gather_means(x, grid)


def _sides(x: Tensor, grid: Size) -> Size:
    return x.shape[ROWS] // grid[0], x.shape[COLUMNS] // grid[1]


def _sum_runs(x: Tensor, axis: int, runs: list[int]) -> Tensor:
    """Sums over consecutive runs of an axis."""
    if len(runs) == x.shape[axis]:
        return x
    kind = accumulation(x)
    if _alike(runs):
        return torch.unflatten(x, axis, (len(runs), runs[0])).sum(axis + 1, dtype=kind)
    return torch.stack([run.sum(axis, dtype=kind) for run in x.split(runs, axis)], axis)


def _alike(runs: list[int]) -> bool:
    return all(run == runs[0] for run in runs)


# --- Values laid over cells


def repeat(z: Float[Tensor, "N C h w"], size: Size) -> Float[Tensor, "N C H W"]:
    """Give every position the value of its cell; the layout in memory stays."""
    return _way_to_repeat(z, size)(z, size)


def _way_to_repeat(z: Tensor, size: Size) -> Callable[[Tensor, Size], Tensor]:
    h, w = z.shape[-2:]
    if symbolic(size):
        return repeat_by_index
    compiled = torch.compiler.is_compiling() and z.device.type == "cpu"
    if compiled and (size[0] % h or size[1] % w) and not z.requires_grad:
        return repeat_by_index  # Inductor writes concatenated maps out, but reads through an index
    return repeat_by_runs


def repeat_by_runs(z: Tensor, size: Size) -> Tensor:
    grid = z.shape[-2:]
    y, rows = _as_it_lies(z)  # copies are along channels, where these are contiguous
    strips = _repeat_runs(y, rows + 1, runs(size[1], grid[1]))
    return _as_named(_repeat_runs(strips, rows, runs(size[0], grid[0])), rows)


def repeat_by_index(z: Tensor, size: Size) -> Tensor:
    return _applied(_Repeated, z, size) if _differentiated(z) else _gather(z, size)


def _repeat_runs(z: Tensor, axis: int, runs: list[int]) -> Tensor:
    """Repeat each entry of an axis over its run."""
    if len(runs) == sum(runs):
        return z
    if _alike(runs):
        shape = [*z.shape[: axis + 1], runs[0], *z.shape[axis + 1 :]]
        return z.unsqueeze(axis + 1).expand(shape).flatten(axis, axis + 1)
    shape = list(z.shape)
    pieces = []
    for entry, run in zip(z.split(1, axis), runs, strict=True):
        shape[axis] = run
        pieces.append(entry.expand(shape))
    return torch.cat(pieces, axis)


# --- Values combined with a map


def combine(
    op: Op, x: Float[Tensor, "N C H W"], z: Float[Tensor, "N C h w"]
) -> Float[Tensor, "N C H W"]:
    """``op(x, repeat(z))``, without making that map where the cells are of one size."""
    return _way_to_combine(x, z)(op, x, z)


def _way_to_combine(x: Tensor, z: Tensor) -> Callable[[Op, Tensor, Tensor], Tensor]:
    (height, width), (h, w) = x.shape[-2:], z.shape[-2:]
    if symbolic((height, width)):
        return combine_repeated
    if height % h or width % w:
        return combine_ragged
    return combine_by_rows if x.device.type == "cpu" else combine_by_cells


def combine_repeated(op: Op, x: Tensor, z: Tensor) -> Tensor:
    return op(x, repeat(z, (x.shape[ROWS], x.shape[COLUMNS])))


def combine_ragged(op: Op, x: Tensor, z: Tensor) -> Tensor:
    return combine_repeated(op, x, _laid_like(x, z))


def combine_by_rows(op: Op, x: Tensor, z: Tensor) -> Tensor:
    """The innermost loops run along memory: repeat z on the axis of columns (h/H of a map), and
    broadcast rows. Going back, sums are over one axis at a time."""
    h, a = z.shape[ROWS], x.shape[ROWS] // z.shape[ROWS]
    across = runs(x.shape[COLUMNS], z.shape[COLUMNS])
    y, rows = _as_it_lies(x)
    strips = _repeat_runs(z if rows == ROWS else z.permute(0, 2, 3, 1), rows + 1, across)
    made = op(torch.unflatten(y, rows, (h, a)), strips.unsqueeze(rows + 1))
    return _as_named(made.flatten(rows, rows + 1), rows)


def combine_by_cells(op: Op, x: Tensor, z: Tensor) -> Tensor:
    z = _laid_like(x, z)
    (h, w), (a, b) = z.shape[-2:], _sides(x, (z.shape[ROWS], z.shape[COLUMNS]))
    cells = torch.unflatten(torch.unflatten(x, ROWS, (h, a)), 4, (w, b))  # N C h a w b
    return op(cells, z[:, :, :, None, :, None]).flatten(4, 5).flatten(2, 3)


def _laid_like(x: Tensor, z: Tensor) -> Tensor:
    """z with its channels side by side where those of the map are, which is little work."""
    return z.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) if is_channels_last(x) else z


# --- By index: means over cells and values laid over them, each going back by way of the other.
# Autograd's own way back would scatter, which adds one number at a time and in any order.


class _Means(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, h: int, w: int) -> Tensor:
        return _gather_means(x, (h, w))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int, int], output: Tensor) -> None:  # noqa: ARG004
        ctx.size = inputs[0].shape[-2:]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        grid = gradient.shape[ROWS], gradient.shape[COLUMNS]
        share = (gradient / areas_by_index(ctx.size, grid, gradient)).to(gradient.dtype)
        return _applied(_Repeated, share, ctx.size), None, None


class _Repeated(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor, height: int, width: int) -> Tensor:
        return _gather(z, (height, width))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int, int], output: Tensor) -> None:  # noqa: ARG004
        ctx.grid = inputs[0].shape[-2:]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        size = gradient.shape[ROWS], gradient.shape[COLUMNS]
        sums = _applied(_Means, gradient, ctx.grid) * areas_by_index(size, ctx.grid, gradient)
        return sums.to(gradient.dtype), None, None


def _differentiated(x: Tensor) -> bool:
    """Whether somebody may ask for a gradient. Who traces as TorchScript does cannot take functions
    of autograd's, and fails."""
    return x.requires_grad and torch._C._get_tracing_state() is None


def _applied(function: type[torch.autograd.Function], x: Tensor, size: Size) -> Tensor:
    result: Tensor = function.apply(x, *size)
    return result


def _gather(z: Tensor, size: Size) -> Tensor:
    (height, width), (h, w) = size, z.shape[-2:]
    rows = torch.arange(height, device=z.device) * h // height
    columns = torch.arange(width, device=z.device) * w // width
    # What is expanded Inductor computes first, so z is not made anew at every position.
    return z.unsqueeze(4).expand(*z.shape, 2)[:, :, rows[:, None], columns, 0]


def _gather_means(x: Tensor, grid: Size) -> Tensor:
    index, inside, sides = _members(x.shape[ROWS], grid[0], x.device)
    # Chosen, not multiplied by nought: a neighbour may be infinite.
    rows = torch.where(inside[:, :, None], x[:, :, index], 0)  # N C h a W
    strips = rows.sum(3, dtype=accumulation(x)) / sides[:, None]
    index, inside, sides = _members(x.shape[COLUMNS], grid[1], x.device)
    columns = torch.where(inside, strips[..., index], 0)  # N C h w b
    return (columns.sum(4) / sides).to(x.dtype)


def _members(length: int, parts: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Where each run's positions are, which of these are its own, and how many are."""
    borders = _borders(length, parts, device)
    # No run is longer; and this is never 1, which broadcasting would ask about.
    offsets = torch.arange(length // parts + 1, device=device)
    index = borders[:-1, None] + offsets  # h a
    return index.clamp(max=length - 1), index < borders[1:, None], borders[1:] - borders[:-1]


# --- Means over windows, which overlap


def window_mean(x: Tensor, axis: int, radius: int) -> Tensor:
    """Means over windows that reach ``radius`` to each side along an axis, clipped at its ends."""
    length = x.shape[axis]
    if radius >= length - 1:
        return x.mean(axis, keepdim=True).expand_as(x)
    if radius == 0:
        return x
    positions = torch.arange(length, device=x.device)
    held = (positions + radius).clamp(max=length - 1) - (positions - radius).clamp(min=0) + 1
    return (_window_sum(x.movedim(axis, -1), radius) / held).movedim(-1, axis)


def window_mean_by_index(x: Tensor, axis: int, radius: Int[Tensor, ""]) -> Tensor:
    """The same with a radius that is not known, by an integral image, whose differences cancel.

    So it is summed in float64, and costs more than blocks do where the radius is known.
    """
    length = x.shape[axis]
    positions = torch.arange(length, device=x.device)
    ends = (positions + radius + 1).clamp(max=length)
    starts = (positions - radius).clamp(min=0)
    sums = F.pad(_running_sum(x.movedim(axis, -1).double()), (1, 0))  # before each position
    means = (sums[..., ends] - sums[..., starts]) / (ends - starts)
    return means.to(accumulation(x)).movedim(-1, axis)


def _window_sum(x: Tensor, radius: int) -> Tensor:
    """Sums over windows of the last axis, without the cancellation of an integral image.

    The axis is cut into blocks as long as a window. Then a window is the end of one block and the
    beginning of the next: a running sum from the right plus one from the left, nothing subtracted.
    """
    length, window = x.shape[-1], 2 * radius + 1
    blocks = (length - 1) // window + 2
    padded = F.pad(x, (radius, blocks * window - length - radius))
    parts = torch.unflatten(padded, -1, (blocks, window))
    ends = _running_sum(parts.flip(-1)).flip(-1)  # from an entry to its block's end
    beginnings = F.pad(_running_sum(parts)[..., :-1], (1, 0))  # from its start to just before
    return (ends[..., :-1, :] + beginnings[..., 1:, :]).flatten(-2)[..., :length]


def _running_sum(x: Tensor) -> Tensor:
    if x.is_cuda and torch.are_deterministic_algorithms_enabled():
        # CUDA's cumsum refuses in this mode. Doubling steps take log₂ of the window, no atomics.
        step = 1
        while step < x.shape[-1]:
            x = x + F.pad(x[..., :-step], (step, 0))
            step *= 2
        return x
    return x.cumsum(-1)
