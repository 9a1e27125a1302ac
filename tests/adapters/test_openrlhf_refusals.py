"""Command lines that cannot work end with one sentence and no hang, by our launcher and by OpenRLHF's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("openrlhf", reason="needs OpenRLHF's environment (make test-openrlhf)")

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 300  # importing OpenRLHF, vLLM and DeepSpeed takes half a minute on a busy machine

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(DEADLINE_S + 60)]


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ("tensorhub://127.0.0.1:9", "no hub answers at tcp://127.0.0.1:9"),
        ("tensorhub://127.0.0.1", "lacks a host or a port"),
        ("tensorhub:?kep=1", "did you mean 'keep'"),
    ],
)
@pytest.mark.parametrize("module", ["tensorhub_plugins.openrlhf.train_ppo_ray", "openrlhf.cli.train_ppo_ray"])
def test_a_wrong_flag_ends_the_run_with_one_sentence(module: str, flag: str, sentence: str) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'recipes/cpu/openrlhf'}", "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-W", "ignore", "-m", module, "--vllm.sync_backend", flag]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=environment)
    assert ended.returncode != 0
    said = [line for line in ended.stderr.splitlines() if line.startswith("tensorhub: ")]
    assert len(said) == 1 and sentence in said[0], ended.stderr[-2000:]
    assert "Traceback" not in ended.stderr
