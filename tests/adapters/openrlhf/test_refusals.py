"""Command lines that cannot work end with one sentence and no hang, by our launcher and by OpenRLHF's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("openrlhf", reason="needs OpenRLHF's environment (make test-openrlhf)")

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 300  # importing OpenRLHF, vLLM and DeepSpeed takes half a minute on a busy machine

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(TIMEOUT_S + 60)]


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
    assert sentence in refused(module, flag)


@pytest.mark.parametrize("package", ["openrlhf", "vllm"])
def test_versions_that_were_not_tested_end_the_run_with_one_sentence(package: str, tmp_path: Path) -> None:
    """Metadata of another version, found before the real ones."""
    metadata = tmp_path / f"{package}-99.0.dist-info/METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 99.0\n")
    said = refused("tensorhub_plugins.openrlhf.train_ppo_ray", "tensorhub", tmp_path)
    assert f"{package} 99.0 was not tested with this adapter: install {package}" in said


def refused(module: str, flag: str, *found_first: Path) -> str:
    """The one sentence with which this command line ends."""
    path = os.pathsep.join(map(str, [*found_first, ROOT, ROOT / "recipes/cpu/openrlhf"]))
    environment = {**os.environ, "PYTHONPATH": path, "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-W", "ignore", "-m", module, "--vllm.sync_backend", flag]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    assert ended.returncode != 0
    (said,) = [line for line in ended.stderr.splitlines() if line.startswith("tensorhub: ")]
    assert "Traceback" not in ended.stderr
    return said
