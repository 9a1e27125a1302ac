"""`tensorhub doctor check-sync` as a command: engines in processes that it starts itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("transformers")

from vllm_engines import make_model

from tensorhub_plugins.core.cli import main

pytestmark = pytest.mark.heavy


@pytest.mark.long
@pytest.mark.timeout(400)  # vLLM starts processes that import it anew
@pytest.mark.parametrize("workers", [1, 2])
def test_the_command_line_says_what_it_found(workers: int, tmp_path: Path) -> None:
    make_model("qwen2-tied", tmp_path, 1)
    command = [sys.executable, "-m", "tensorhub_plugins.core.cli", "doctor", "check-sync", "--model", str(tmp_path)]
    environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "0|1" if workers == 2 else "nobind"}
    ended = subprocess.run(
        [*command, "--tp", str(workers)], capture_output=True, text=True, timeout=390, env=environment
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert [line[:5] for line in ended.stdout.splitlines() if line[:5] in ("ok   ", "WRONG")] == ["ok   "] * 6


def test_a_folder_without_a_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "check-sync", "--model", str(tmp_path)]) == 1
    assert "holds no config.json: give the folder of a Hugging Face model" in capsys.readouterr().err
