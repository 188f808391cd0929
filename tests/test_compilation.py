"""Every kernel compiles for GPUs, and the tool that compiles them finds what is wrong with code."""

import ast
import importlib.machinery
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
TOOL = ROOT / "tools/compile-kernels"
KERNELS = ROOT / "src/mssar/kernels"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("compile_kernels", str(TOOL))
    module = importlib.util.module_from_spec(
        importlib.util.spec_from_loader("compile_kernels", loader)
    )
    sys.dont_write_bytecode, usual = True, sys.dont_write_bytecode  # none beside the tool
    loader.exec_module(module)
    sys.dont_write_bytecode = usual
    return module


def is_jitted(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and any(
        ast.unparse(decorator).startswith("triton.jit") for decorator in node.decorator_list
    )


def outside(node: ast.AST) -> Iterator[ast.AST]:
    """Everything but the insides of jitted functions."""
    if not is_jitted(node):
        yield node
        for child in ast.iter_child_nodes(node):
            yield from outside(child)


def launched() -> set[str]:
    """The jitted functions that Python names: the others are called by these."""
    trees = [(path.stem, ast.parse(path.read_text())) for path in KERNELS.rglob("*.py")]
    jitted = {(stem, f.name) for stem, tree in trees for f in tree.body if is_jitted(f)}
    found = set[tuple[str, str]]()
    for _, tree in trees:
        nodes = list(outside(tree))
        known = {  # what stands for a module
            alias.asname or alias.name: alias.name
            for node in nodes
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        for node in nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                found.add((known.get(node.value.id, ""), node.attr))
    return {name for _, name in found & jitted}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, TOOL, *arguments],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_kernel_compiles():
    pytest.importorskip("triton", minversion="3.4")
    done = run("--quick", "--jobs", "2", "sm_80", "sm_90")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"means", "adjoint", "track", "gather"} <= launched()
    for table in done.stdout.split("\n\n")[:2]:
        assert launched() <= {line.split()[1] for line in table.splitlines() if ":" in line}


def test_unknown_targets_are_one_line():
    done = run("sm_70")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "'sm_70' is not known; there are sm_80" in done.stderr


def sum_along(axis: int, lanes: str, layout: str = "#linear") -> str:
    """As Triton writes it."""
    return f"""
#blocked = #ttg.blocked<{{sizePerThread = [1, 4], threadsPerWarp = [4, 8]}}>
#linear = #ttg.linear<{{register = [[0, 1]], lane = [{lanes}], warp = [], block = []}}>
  %1 = "tt.reduce"(%0) <{{axis = {axis} : i32}}> ({{
  ^bb0(%arg0: f32, %arg1: f32):
    %2 = arith.addf %arg0, %arg1 : f32
    tt.reduce.return %2 : f32
  }}) : (tensor<16x4xf32, {layout}>) -> tensor<4xf32, #ttg.slice<{{dim = 0, parent = #linear}}>>
"""


def test_sums_over_lanes_apart_are_found(tool):
    apart = "[1, 0], [0, 2], [2, 0], [4, 0], [8, 0]"  # bits 0, 2, 3 and 4 of a lane's number
    assert tool.sums_over_lanes_apart(sum_along(0, apart)) == [("0", "#linear")]
    assert "lanes apart" in tool.objections(sum_along(0, apart), "")[0]
    assert tool.objections(sum_along(1, apart), "") == []  # one lane is beside itself
    beside = "[0, 2], [1, 0], [2, 0], [4, 0], [8, 0]"
    assert tool.objections(sum_along(0, beside), "") == []
    assert tool.objections(sum_along(0, apart, "#blocked"), "") == []


def test_sums_of_slices_are_along_the_axes_that_are_left(tool):
    lanes = "[1, 0, 0], [0, 1, 0], [2, 0, 0], [0, 2, 0], [0, 0, 1]"
    sliced = "#ttg.slice<{dim = 0, parent = #linear}>"
    assert tool.sums_over_lanes_apart(sum_along(0, lanes, sliced))  # axis 1 of the whole
    assert not tool.sums_over_lanes_apart(sum_along(1, lanes, sliced))  # axis 2


def test_sums_that_cannot_be_read_are_not_passed_over(tool):
    with pytest.raises(AssertionError, match="in another way"):
        tool.sums_over_lanes_apart('%1 = "tt.reduce"(%0) {axis = 0}')


def test_packed_additions_are_found(tool):
    assert "add.s16x2" in tool.objections("", "add.s16x2 \t%r1, %r2, -65537;")[0]
    assert tool.objections("", "add.s32 %r1, %r2, 1;\nfma.rn.bf16x2 %r1, %r2, %r3, %r4;") == []


def test_too_much_memory_is_found(tool):
    assert "the GPU has 101376" in tool.excesses(101_377, 99 << 10, 0, 16)[0]
    assert "17 bytes of stack" in tool.excesses(99 << 10, 99 << 10, 17, 16)[0]
    assert tool.excesses(99 << 10, 99 << 10, 16, 16) == []
    assert tool.excesses(0, 99 << 10, 1000, None) == []  # at an odd shape


def test_every_variant_is_compiled_once_and_for_each_target(tool):
    pytest.importorskip("triton", minversion="3.4")
    limits = [device.shared >> 10 for device in tool.TARGETS.values()]
    assert limits == [163, 99, 99, 227, 227, 99]
    shapes = {case.shape for case in tool.cases(quick=False) if case.common}
    assert shapes == {*tool.CIFAR, *tool.RESNET18, *tool.RESNEXT50}


def test_keys_come_from_what_is_called_first():
    """Or the key of a function would depend on what was compiled before it (``keys``)."""
    keys = pytest.importorskip("mssar.kernels.triton.keys")
    names = [module.__name__.split(".")[-1] for module in keys.MODULES]
    folder = KERNELS / "triton"
    assert sorted(names) == sorted(p.stem for p in folder.glob("[a-z]*.py") if p.stem != "keys")
    trees = [ast.parse((folder / f"{name}.py").read_text()).body for name in names]
    functions = [node for body in trees for node in body if is_jitted(node)]
    every, seen = {f.name for f in functions}, set[str]()
    assert len(every) == len(functions), "a name means one function"
    for function in functions:
        calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
        used = {called.id for called in calls if isinstance(called, ast.Name)}
        assert used & every <= seen, f"{function.name} comes before what it calls"
        seen.add(function.name)


ORDER = """
import random, sys
from mssar.kernels.triton import keys

keys.settle()
functions = [
    (f"{module.__name__}.{name}", value)
    for module in keys.MODULES for name, value in vars(module).items()
    if type(value).__name__ == "JITFunction" and value.__module__ == module.__name__
]
random.Random(sys.argv[1]).shuffle(functions)
print(*sorted(f"{name} {value.cache_key}" for name, value in functions), sep="\\n")
"""


def test_keys_are_the_same_whatever_is_compiled_first():
    """In Triton 3.6 they differ without ``settle``; in 3.9 they do not anyway."""
    pytest.importorskip("triton", minversion="3.4")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    one, other = (
        subprocess.run(
            [sys.executable, "-c", ORDER, seed],
            env=environment, capture_output=True, text=True, check=True,
        ).stdout
        for seed in "12"
    )  # fmt: skip
    assert one == other
    assert one.count("\n") > 50
