"""The layer's equations as Triton kernels behind torch ops; the modules are their reference.

Nothing here imports Triton before a kernel is launched: the package works without it.
"""

from __future__ import annotations

import importlib.util
import os
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

BACKENDS = ("auto", "reference", "triton")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHARED = 227 * 1024  # bytes: what Hopper has, H100 and H200
OLDEST = (3, 4)  # Triton: earlier ones do not compile the kernels


def _available() -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        numbers = version("triton").split(".")[:2]
    except PackageNotFoundError:  # under another name: no way to know
        return True
    return tuple(int(n) for n in numbers if n.isdecimal()) >= OLDEST


AVAILABLE = _available()


def interpreted() -> bool:
    """Whether Triton was told to run kernels on the CPU, one program after the other."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def roomy(device: torch.device) -> bool:
    """Whether a program may have as much shared memory as the largest kernels were made for."""
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 0)) >= SHARED


# What torch.compiler.assume_constant_result does, which would import all of the compiler.
roomy._dynamo_marked_constant = True  # type: ignore[attr-defined]


def exporting() -> bool:
    """An exported program should need neither this package nor Triton."""
    # torch.compiler.is_exporting() says yes to torch.compile too, in torch 2.7 to 2.11.
    exported = getattr(torch.compiler, "_is_exporting_flag", False)  # since torch 2.7
    return bool(exported) or torch.onnx.is_in_onnx_export()


def require_backend(backend: str) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"backend is one of {', '.join(BACKENDS)}; got {backend!r}")


def chosen(backend: str, x: Tensor) -> bool:
    """Whether a tensor's work is for the kernels; asking for them where they cannot run raises."""
    if backend == "auto":
        usable = x.is_cuda and AVAILABLE and x.dtype in DTYPES and not exporting()
        return usable and roomy(x.device)
    if backend == "reference" or x.is_meta:  # without numbers nothing is computed
        return False
    if not AVAILABLE:
        raise ValueError(
            "backend='triton' needs Triton 3.4 or newer: pip install -U triton, or backend='auto'"
        )
    if x.dtype not in DTYPES:
        names = ", ".join(str(dtype) for dtype in DTYPES)
        raise ValueError(f"the kernels take {names}; got {x.dtype}: use backend='reference'")
    if not x.is_cuda and not interpreted():
        raise ValueError(
            f"backend='triton' needs a tensor on a CUDA device; got {x.device}: use "
            "backend='auto' or 'reference', or TRITON_INTERPRET=1 to try the kernels on a CPU"
        )
    return True
