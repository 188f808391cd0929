"""Every kernel compiles for a GPU, sizes included that a compiler takes for constants."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
KERNELS = Path(HERE.parent, "src/mssar/kernels")


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
    trees = {path.stem: ast.parse(path.read_text()) for path in KERNELS.glob("*.py")}
    jitted = {(stem, f.name) for stem, tree in trees.items() for f in tree.body if is_jitted(f)}
    found = set[tuple[str, str]]()
    for tree in trees.values():
        nodes = list(outside(tree))
        imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
        known = {  # what stands for a module, or for a function of one
            alias.asname or alias.name: ((node.module or "").rpartition(".")[2], alias.name)
            for node in imports
            for alias in node.names
        }
        for node in nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                _, module = known.get(node.value.id, ("", ""))
                found.add((module, node.attr))
            elif isinstance(node, ast.Name):
                found.add(known.get(node.id, ("", "")))
    return {name for _, name in found & jitted}


def test_every_kernel_compiles(tmp_path):
    pytest.importorskip("triton", minversion="3.4")
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, HERE / "compile_kernels.py"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert {"means", "adjoint", "track", "gather"} <= launched()
    assert launched() <= set(done.stdout.split())
