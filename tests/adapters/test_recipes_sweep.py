"""What a run leaves in shared memory is removed after it, and nothing else."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipes import sweep


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    for name in ("psm_left", "psm_mapped", "psm_old", "sem.mp-left", "of_a_stranger"):
        (tmp_path / name).write_bytes(bytes(mmap.PAGESIZE))
    os.utime(tmp_path / "psm_old", (1, 1))
    return tmp_path


def test_only_what_is_new_of_its_kind_and_not_in_use_goes(shared: Path) -> None:
    with (shared / "psm_mapped").open("r+b") as file, mmap.mmap(file.fileno(), 0):
        removed = sweep.sweep(str(shared / "run"), time.time() - 60, shared)
    assert {file.name for file in removed} == {"psm_left", "sem.mp-left"}
    assert {file.name for file in shared.iterdir()} == {"psm_mapped", "psm_old", "of_a_stranger"}


def test_it_waits_for_the_processes_of_the_run(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = str(shared / "run")
    command = [sys.executable, "-c", "print(flush=True); input()"]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "RUN": run}
    )
    assert child.stdin is not None and child.stdout is not None
    child.stdout.readline()
    waits = []

    def end(seconds: float) -> None:
        waits.append(seconds)
        child.communicate("\n")

    monkeypatch.setattr(sweep.time, "sleep", end)
    sweep.sweep(run, time.time() - 60, shared)
    assert len(waits) == 1 and child.returncode == 0


def test_it_does_not_wait_for_the_script_that_runs_it(tmp_path: Path) -> None:
    subprocess.run(
        ["bash", "-c", f'"{sys.executable}" -m recipes.sweep "$RUN" inf; exit'],
        env={**os.environ, "RUN": str(tmp_path)},
        cwd=Path(sweep.__file__).parents[1],
        timeout=sweep.WAIT_S / 2,
        check=True,
    )
