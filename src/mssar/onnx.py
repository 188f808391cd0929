"""A program of torch.export as an ONNX file, and such a file run by onnxruntime."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mssar.extras import advice

AXES = {0: "batch", 2: "height", 3: "width"}  # that may be open
NEEDED = ("onnx", "onnxscript", "onnxruntime")


def require() -> None:
    """All that is needed, or one line that says what is missing."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"ONNX needs {', '.join(missing)}: {advice('export')}")


def write(program: Any, path: Path, metadata: Mapping[str, Any]) -> int:
    """The opset. Files and lines of whoever wrote the network are left out."""
    import onnx

    made = torch.onnx.export(program, dynamo=True, verbose=False)
    assert made is not None
    ends = made.model.graph
    ends.inputs[0].name, ends.outputs[0].name = "images", "logits"  # now, when they are two values
    proto: Any = made.model_proto
    graph = proto.graph
    dims = graph.input[0].type.tensor_type.shape.dim
    names = {dims[n].dim_param: axis for n, axis in AXES.items() if dims[n].dim_param}
    for value in (*graph.input, *graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param = re.sub(r"\w+", lambda m: names.get(m[0], m[0]), dim.dim_param)
    del graph.value_info[:]
    for part in (graph, *graph.node, *graph.input, *graph.output, *graph.initializer):
        del part.metadata_props[:]
    domains = {node.domain for node in graph.node} - {"", "ai.onnx"}
    assert not domains, domains  # an operation that only we have
    for name, said in metadata.items():
        text = said if isinstance(said, str) else json.dumps(said, ensure_ascii=False)
        proto.metadata_props.add(key=f"mssar.{name}", value=text)
    onnx.checker.check_model(proto)
    path.write_bytes(proto.SerializeToString())
    return int(next(one.version for one in proto.opset_import if one.domain in ("", "ai.onnx")))


def running(path: Path, dtype: torch.dtype) -> Callable[[Tensor], list[Tensor]]:
    """The file as a function of images."""
    import onnxruntime

    quiet = onnxruntime.SessionOptions()
    quiet.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(path, quiet, providers=["CPUExecutionProvider"])
    except Exception as error:  # its exceptions have no common base
        advice = "" if dtype is torch.float32 else ": try model.float()"
        said = f"onnxruntime cannot run what was exported: {reason(error)}{advice}"
        raise ValueError(said) from error
    return lambda x: [torch.from_numpy(y) for y in session.run(None, {"images": x.numpy()})]


def reason(error: Exception) -> str:
    """An error's first line that says something, without advice about torch."""
    lines = [line.strip(" -") for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith("You marked")]
    said = (telling or lines or [type(error).__name__])[0]
    return said.split(". If ")[0][:200]
