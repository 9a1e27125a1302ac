"""The benchmark runs from end to end where there is no GPU, and says of every figure that it is not of one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu_place import NO_GPU

ROOT = Path(__file__).resolve().parents[2]


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "recipes.bench.gpu", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_it_runs_on_the_cpu(tmp_path):
    ran = bench("--device", "cpu", "--layers", "1", "--times", "1", "--json", str(tmp_path / "gpu.json"))
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert "NOT OF A GPU" in ran.stdout
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["of_a_gpu"] is False and min(found["limits_gb_s"].values()) > 0
    measured = [figure for figure in found["figures"] if not figure["not_run"]]
    assert {figure["limit"] for figure in measured} >= {"d2h", "h2d", "device_copy", "tcp", "memcpy"}
    assert all(figure["seconds"] > 0 and (not figure["limit"] or figure["ratio"] > 0) for figure in measured)
    for name in ("by a device copy", "first token after", "decode p99 beside", "engine start from a peer"):
        assert any(name in figure["name"] for figure in measured), name
    not_run = {figure["name"] for figure in found["figures"] if figure["not_run"]}
    assert "pins" in not_run and ("cuda_ipc" in not_run or torch.cuda.is_available())


def test_without_a_gpu_it_measures_nothing_and_ends_well():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    ran = bench()
    assert ran.returncode == 0 and "nothing was measured" in ran.stdout


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_on_a_gpu_a_small_model_is_measured(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip(NO_GPU)
    ran = bench("--layers", "2", "--times", "2", "--json", str(tmp_path / "gpu.json"))
    assert ran.returncode == 0, ran.stderr[-4000:]
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["of_a_gpu"] and all(not figure["not_run"] for figure in found["figures"])
