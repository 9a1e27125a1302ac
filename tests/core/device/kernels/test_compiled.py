"""The kernels are programs of a GPU: the compiler says so, which needs none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).resolve().parents[3] / "support"
ROOT = SUPPORT.parents[1]


@pytest.mark.slow
def test_all_kernels_compile(tmp_path: Path) -> None:
    """To machine code. The interpreter knows neither types that change in a loop nor what a GPU has no instruction for.
    The control is a kernel that it would run."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(SUPPORT / "compile_kernels.py")]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=110)
    assert ran.returncode == 0, ran.stderr[-5000:]
    said = json.loads(ran.stdout)
    assert said["left_out"] == []
    assert {name: size for name, size in said["found"].items() if not isinstance(size, int)} == {}
    assert "Loop-carried variable" in str(said["control"])
