"""Every kernel compiles for a GPU, sizes included that a compiler takes for constants."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
KERNELS = Path(HERE.parent, "src/mssar/kernels")


def test_every_kernel_compiles(tmp_path):
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, HERE / "compile_kernels.py"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # A kernel is launched by its name in brackets.
    launches = "".join(path.read_text() for path in KERNELS.glob("*.py"))
    wanted = set(
        re.findall(
            r"\b(?:maps|maps_backward|branches|branches_backward|dense|running|kernels)\.(\w+)\[",
            launches,
        )
    )
    assert len(wanted) > 12
    assert wanted <= set(done.stdout.split())
