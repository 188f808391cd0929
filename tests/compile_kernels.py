"""Compile the kernels for a GPU where there is none: the interpreter takes what compilers do not.

    python tests/compile_kernels.py

Run by ``test_compilation`` in a process of its own, since the interpreter is on in the tests'.
"""

import ast
import re
import subprocess
import tempfile

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from mssar.kernels import dense_launch, launch, launch_backward, plan, windows
from mssar.kernels.shapes import PER_SCALE, Epsilons, grids

EPS = Epsilons(1e-5, 1e-5, 1e-5)
SHARED = 227 * 1024  # bytes that a program can have on an H100 or H200
PROCESSORS = 132  # of an H100 or H200
FRAME = 16  # bytes: some kernels need so few for other things
compiled: set[str] = set()
fits_in_registers = False  # whether that is asked for


class Driver:
    """A device that is not there."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return device


def compiling(kernel, grid):
    def launched(*args, **kwargs):
        made = kernel.run(*args, grid=grid, warmup=True, **kwargs)
        name = kernel.fn.__name__
        assert made.metadata.shared <= SHARED, name
        if fits_in_registers:
            assert frame(made.asm["cubin"]) <= FRAME, f"{name} has more numbers than registers"
        assert not sums_over_lanes_apart(made.asm["ttgir"]), f"{name}: Triton 3.6 adds up wrongly"
        compiled.add(name)

    return launched


def frame(binary):
    """Bytes of memory that a thread keeps numbers in which have no room in registers."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        told = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "-res-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        )
    return int(re.search(r"STACK:(\d+)", told.stdout)[1])


def sums_over_lanes_apart(code):
    """Reductions along an axis whose share of a warp's lanes does not lie side by side.

    Triton 3.6 takes it to do so, and adds up the wrong lanes (LOG.md).
    """
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.linear<.*)$", code, re.MULTILINE))
    reductions = re.findall(
        r'"tt\.reduce"\(.*?\) <\{axis = (\d+).*?\}\) : \(tensor<\w+, (.*?)>[,)]', code, re.DOTALL
    )
    found = []
    for axis, layout in reductions:
        name = re.findall(r"#\w+", layout)[-1]
        if name not in layouts:
            continue  # lanes lie side by side in the others
        lanes = ast.literal_eval(re.search(r"lane = (\[\[.*?\]\])", layouts[name])[1])
        axes = list(range(len(lanes[0])))
        for gone in reversed(re.findall(r"dim = (\d+)", layout)):
            axes.pop(int(gone))
        bits = [i for i, lane in enumerate(lanes) if lane[axes[int(axis)]]]
        if bits and bits != list(range(bits[0], bits[-1] + 1)):
            found.append((axis, layout))
    return found


def parameters(channels, seen, hidden, levels):
    shapes = [(hidden, seen, 1, 1), (hidden,), (hidden,), (channels, hidden, 1, 1)]
    shapes += [(channels,), (channels,)]
    assert len(shapes) == PER_SCALE
    return [torch.empty(shape) for _ in range(levels) for shape in shapes]


def tail(n, c, size, scales, dtype, precision, norm=True, layout=torch.channels_last):
    x = torch.empty(n, c, *size, dtype=dtype).contiguous(memory_format=layout)
    levels, j = len(scales), max(1, c // max(1, len(scales)))
    params = parameters(c, c, j, levels)
    gamma, beta = (torch.empty(c), torch.empty(c)) if norm else (None, None)
    grid = list(scales) or [4]
    made = launch.forward(x, x, gamma, beta, params, grid, EPS, True, precision)
    launch_backward.backward(x, x, gamma, beta, params, made, grid, EPS, True, norm, precision)
    running = [gamma, beta, gamma, beta] if norm else []
    hidden, gates = [torch.empty(j)] * 2 * levels, [torch.empty(c)] * 2 * levels
    launch.evaluate(x, x, running, params, hidden, gates, grid, EPS, True, precision)
    widths = [c] * norm + [j] * levels + [c] * levels
    rows = [torch.empty(width) for width in widths]
    counts = [torch.empty((), dtype=torch.int64) for _ in widths]
    moments = [made.moments, made.hidden_moments, made.gate_moments]
    lacking = params[::PER_SCALE] if norm else []
    launch.track(moments, lacking, rows, rows, counts, [0.1] * len(widths), [5] * len(widths))


def dense(n, k, c, size, dtype, precision, carry):
    x = torch.empty(n, k, *size, dtype=dtype).contiguous(memory_format=torch.channels_last)
    scales = [1, 2, 4]
    count = n * grids(x, scales).pool_rows
    rows, params = torch.empty(count, c), parameters(k, c, max(1, k // 3), 3)
    made = dense_launch.forward(x, rows, params, scales, EPS, carry, precision)
    grad = torch.empty(count, c + k) if carry else None
    dense_launch.backward(x, grad, x, params, made, scales, EPS, precision)
    hidden, gates = [params[1]] * 6, [params[4]] * 6
    dense_launch.evaluate(x, rows, params, hidden, gates, scales, EPS, carry, precision)
    main = torch.empty(n, c, *size, dtype=dtype)
    dense_launch.sums_backward(dense_launch.sums(main, scales), main, scales)


def main() -> None:
    global fits_in_registers
    driver.set_active(Driver())
    JITFunction.__getitem__ = compiling
    plan._processors = lambda _: PROCESSORS
    tail(4, 5, (7, 7), (1, 2, 4), torch.float32, "fp32")  # one hidden channel
    tail(41, 140, (2, 1), (1,), torch.bfloat16, "bf16", norm=False)  # one part of a weight
    tail(256, 64, (56, 56), (1, 2, 4), torch.float16, "fp16")
    # Their sums over regions once ran over lanes apart.
    tail(256, 48, (4, 4), (1, 2, 4), torch.bfloat16, "bf16", layout=torch.contiguous_format)
    tail(6, 1, (8, 8), (1, 2, 4, 8), torch.bfloat16, "bf16")
    fits_in_registers = True  # those that did not gave wrong numbers on an H200 (LOG.md)
    tail(256, 512, (7, 7), (1, 2, 4), torch.bfloat16, "bf16")
    tail(256, 512, (4, 4), (1, 2, 4), torch.bfloat16, "bf16")  # a sample is one tile
    tail(8, 2048, (7, 7), (1, 2), torch.bfloat16, "bf16")  # the largest tiles of products
    tail(64, 65, (15, 15), (3, 5), torch.bfloat16, "bf16")
    for layout in (torch.channels_last, torch.contiguous_format):
        tail(256, 256, (14, 14), (1, 2, 4), torch.float16, "fp16", layout=layout)
    dense(64, 12, 24, (32, 32), torch.bfloat16, "bf16", carry=True)
    fits_in_registers = False
    tail(4, 600, (7, 7), (1, 2), torch.bfloat16, "bf16")  # too many hidden ones for one program
    tail(8, 12, (3, 2), (), torch.bfloat16, "bf16")
    dense(3, 1, 1, (4, 4), torch.float32, "fp32", carry=False)
    x = torch.empty(2, 5, 7, 9)
    windows._adjoint(windows._means(x, [9, 2]), x, [9, 2])
    print(*sorted(compiled))


if __name__ == "__main__":
    main()
