"""The layer's equations as Triton kernels behind torch ops; kernels take tensors, not modules.

Nothing here imports Triton before a kernel is launched: the package works without it.
"""

from __future__ import annotations

import importlib.util
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from mssar.kernels.device import able, interpreted

BACKENDS = ("auto", "reference", "triton")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
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


def exporting() -> bool:
    """Whether torch.export makes a program."""
    # torch.compiler.is_exporting() says yes to torch.compile too, in torch 2.7 to 2.11.
    return bool(getattr(torch.compiler, "_is_exporting_flag", False))  # since torch 2.7


def leaving() -> bool:
    """A program for elsewhere, also by TorchScript, should need neither this package nor Triton."""
    return exporting() or torch._C._get_tracing_state() is not None


def require_backend(backend: str) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"backend is one of {', '.join(BACKENDS)}; got {backend!r}")


def chosen(backend: str, x: Tensor) -> bool:
    """Whether a tensor's work is for the kernels; asking for them where they cannot run raises."""
    if backend == "auto":
        usable = x.is_cuda and AVAILABLE and x.dtype in DTYPES and not leaving()
        return usable and able(x.device)
    if backend == "reference" or x.is_meta:  # without numbers nothing is computed
        return False
    if torch._C._get_tracing_state() is not None:
        raise ValueError("a TorchScript trace cannot hold the kernels: use backend='auto'")
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
    if x.is_cuda and not able(x.device):
        raise ValueError(
            "the kernels need an NVIDIA GPU of compute capability 8.0 or newer; got "
            f"{torch.cuda.get_device_name(x.device)}: use backend='auto' or 'reference'"
        )
    return True


def products_in(x: Tensor) -> str:
    """How the branches' products are taken: as exactly as the map is, float32's as cuDNN's are."""
    if x.dtype is torch.bfloat16:
        return "bf16"
    if x.dtype is torch.float16:
        return "tf32"  # as many digits, and nothing is too large or too small for it
    return "tf32" if _allows_tf32() else "ieee"


def _allows_tf32() -> bool:
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:  # it was set in the newer way, and PyTorch refuses to mix the two
        convolution: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
        return bool(convolution.fp32_precision == "tf32")
