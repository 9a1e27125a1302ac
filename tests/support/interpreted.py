"""Tests of computations that torch makes here, and that Triton makes once more, in its interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tensorhub_plugins.core.device.kernels import launch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def run_by_triton(file: str) -> None:
    """Run all tests of this file again, with Triton's interpreter in torch's place."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file]
    ran = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"}, timeout=110
    )
    assert ran.returncode == 0, ran.stdout[-5000:]


def was_triton() -> bool:
    """Return whether Triton computed anything."""
    return "tensorhub_plugins.core.device.kernels.by_triton" in sys.modules


@pytest.fixture(autouse=True)
def nothing_failed() -> Iterator[None]:
    yield
    assert launch._failures == []
    assert IS_INTERPRETED or not was_triton()
