"""What a GPU is given, as one CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def captured(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """On the run's own stream. Other threads may go on meanwhile, such as one that pins batches;
    but no garbage is collected: an old graph among it would break this one."""
    stream = torch.cuda.current_stream()
    gc.collect()
    collecting = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
            yield
    finally:
        if collecting:
            gc.enable()
