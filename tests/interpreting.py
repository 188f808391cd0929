"""Triton's interpreter, without what it works out again and again or for nobody.

Each kernel still runs line by line, and every check that can fail still may.
"""

import dataclasses
import functools
import importlib
import importlib.util
import os
from types import ModuleType
from typing import Any

Dims = tuple[int, ...]


@functools.cache
def hasten() -> None:
    """Where it is on; once a process."""
    if os.environ.get("TRITON_INTERPRET") != "1" or not importlib.util.find_spec("triton"):
        return
    interpreter = importlib.import_module("triton.runtime.interpreter")
    _patch_the_language_once(interpreter)
    _leave_out_overflows(interpreter)
    _keep_types(interpreter)


def _patch_the_language_once(interpreter: ModuleType) -> None:
    """Every call of a device function does it anew; once a launch and file is enough."""
    patched: set[int] = set()

    def launch(self, *args, _run=interpreter.GridExecutor.__call__, **options):
        patched.clear()
        return _run(self, *args, **options)

    def call(self, *args, **options):
        file = id(self.fn.__globals__)
        if file not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(file)
        return self.rewrite()(*args, **options)

    interpreter.GridExecutor.__call__ = launch
    interpreter.InterpretedFunction.__call__ = call


def _leave_out_overflows(interpreter: ModuleType) -> None:
    """Whether integers overflow takes five more operations each, for ``device_assert`` to drop."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _keep_types(interpreter: ModuleType) -> None:
    """Every value has a type made for it, which unwraps and checks a shape's numbers each time."""
    core, semantic = interpreter.tl.core, type(interpreter.interpreter_semantic)
    arrays: dict[str, Any] = {}
    blocks: dict[Dims, dict[str, Any]] = {}
    names: dict[tuple[str, Dims], str] = {}
    sizes: dict[str, tuple[Any, Any]] = {}

    def array_type(kind, _find=interpreter._get_np_dtype):
        scalar = kind.scalar
        if scalar.name not in arrays:
            arrays[scalar.name] = _find(scalar)
        return arrays[scalar.name]

    def block_type(self, element_ty, shape, _make=core.block_type.__init__):
        dims = tuple([s.value if isinstance(s, core.constexpr) else s for s in shape])
        if any(type(n) is not int for n in dims):  # True would be taken for 1
            _make(self, element_ty, shape)
            return
        name = names.get((element_ty.name, dims))
        if name is None:
            _make(self, element_ty, shape)  # which refuses some shapes
            names[element_ty.name, dims] = self.name
            blocks.setdefault(dims, {"shape": self.shape, "numel": self.numel})
        self.__dict__.update(blocks[dims], element_ty=element_ty, name=name or self.name)

    def tensor(self, handle, kind, _make=core.tensor.__init__):
        size = sizes.get(kind.name)
        if size is None:
            _make(self, handle, kind)
            sizes[kind.name] = self.numel, self.shape
        else:
            self.handle, self.type, self.dtype = handle, kind, kind.scalar
            self.numel, self.shape = size

    def broadcast(self, lhs, rhs, _broadcast=semantic.broadcast_impl_value):
        a, b = lhs.type, rhs.type
        if a.is_block() and b.is_block() and a.shape is b.shape:
            return lhs, rhs
        return _broadcast(self, lhs, rhs)

    interpreter._get_np_dtype = array_type
    core.block_type.__init__, core.tensor.__init__ = block_type, tensor
    semantic.broadcast_impl_value = broadcast
