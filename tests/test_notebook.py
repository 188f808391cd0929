"""The notebook opens and runs as it is."""

import json
from pathlib import Path

import pytest
import torch

import mssar

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "first-look.ipynb"


def cells(kind: str) -> list[str]:
    notebook = json.loads(NOTEBOOK.read_text("utf-8"))
    assert (notebook["nbformat"], notebook["metadata"]["kernelspec"]["name"]) == (4, "python3")
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    return ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == kind]


@pytest.mark.usefixtures("torchvision")
def test_its_cells_run_in_order(capsys):
    namespace: dict[str, object] = {"__name__": "__main__"}
    for number, source in enumerate(cells("code")):
        if "steps = 800" in source:  # what it learns is shown there, not here
            source = source.replace("steps = 800", "steps = 50")
        exec(compile(source, f"cell {number}", "exec", dont_inherit=True), namespace)
    said = capsys.readouterr().out
    assert "[1, 4, 16] weights a channel" in said
    assert "the same output: True" in said
    shown = mssar.explain(namespace["net"], namespace["images"][:3])
    assert shown._repr_png_().startswith(b"\x89PNG")
    assert torch.isfinite(shown.logits).all()


def test_it_was_saved_without_outputs():
    notebook = json.loads(NOTEBOOK.read_text("utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
