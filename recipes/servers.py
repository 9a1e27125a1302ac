"""vLLM servers that follow a hub, and their trainer, as processes of this host: for recipes and tests."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tensorhub_plugins.core import start_server
from tensorhub_plugins.core.cli import fetch_status

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 400.0  # for anything that is waited for
STOP_TIMEOUT_S = 20.0
SERVER_OPTIONS = ["--max-model-len", "256", "--max-num-seqs", "32", "--enforce-eager", "--kv-cache-memory-bytes", "64M"]


class Processes:
    """Processes with a log each in one folder, and a hub. model: a tiny one; bare: the same without its weights."""

    def __init__(self, out: Path, hub: str, environment: dict[str, str], stack: ExitStack) -> None:
        self.out, self.hub = out, hub
        self.model, self.bare = out / "model", out / "model-without-weights"
        self._environment, self._stack = environment, stack

    def start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        """Run Python with these arguments."""
        with open(self.log(name), "wb") as log:
            process = subprocess.Popen(
                [sys.executable, *command], stdout=log, stderr=log, env=self._environment, cwd=ROOT, process_group=0
            )
        self._stack.callback(stop, process)
        return process

    def serve(self, name: str, folder: Path, port: int, called: str, **extra: Any) -> subprocess.Popen[bytes]:
        """Run a server that follows. called: what requests call the model. extra: options of the load format."""
        joins = {"hub": self.hub, "model": "actor", "replica": name, "follow": "now", **extra}
        told = ["--load-format", "tensorhub", "--model-loader-extra-config", json.dumps(joins)]
        heard = ["--port", str(port), "--served-model-name", called, *SERVER_OPTIONS]
        return self.start(name, "-m", "vllm.entrypoints.cli.main", "serve", str(folder), *told, *heard)

    def log(self, name: str) -> Path:
        return self.out / f"{name}.log"


@contextmanager
def processes(out: Path, also: Sequence[Path] = ()) -> Iterator[Processes]:
    """Yield them, with a hub that runs; all end with the block. also: more folders with modules of Python."""
    out = out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    environment = environment_for(out)
    environment["PYTHONPATH"] = os.pathsep.join([environment["PYTHONPATH"], *map(str, also)])
    with ExitStack() as stack:
        made = Processes(out, stack.enter_context(start_server()).address, environment, stack)
        make = [sys.executable, "-m", "recipes.verl_grpo.make_model", str(made.model), "--size", "tiny"]
        subprocess.run(make, check=True, env=environment, cwd=ROOT)
        shutil.copytree(made.model, made.bare, ignore=shutil.ignore_patterns("*.safetensors"))
        yield made


def holders(hub: str, version: int) -> list[str]:
    """Return the engines that serve this version in their own layout."""
    models = fetch_status(hub)["models"]
    found = [v["layouts"] for model in models for v in model["versions"] if v["version"] == version]
    return sorted(
        w for layouts in found for layout, workers in layouts.items() if layout != "checkpoint" for w in workers
    )


def until(condition: Callable[[], Any], what: str, *alive: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        for process in alive:
            if process.poll() not in (None, 0):
                raise SystemExit(f"{what}: no, {process.args} has ended with {process.returncode}, see its log")
        if time.monotonic() > end:
            raise SystemExit(f"{what}: not within {TIMEOUT_S:.0f} s")
        time.sleep(0.2)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stop the process with everything that it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(timeout=STOP_TIMEOUT_S)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def environment_for(out: Path) -> dict[str, str]:
    """Return the environment with the settings that vLLM's CPU build needs, see recipes/cpu."""
    stand_ins = [sys.executable, "recipes/cpu/make_stand_ins.py", str(out / "stand_ins")]
    environment = {**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    made = subprocess.run(stand_ins, check=True, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT).stdout
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "recipes/cpu/stand_ins"), made.strip()])
    return environment


def report(checks: dict[str, bool]) -> int:
    """Print what holds; return the exit status."""
    for check, holds in checks.items():
        print("ok   " if holds else "WRONG", check)
    return 0 if all(checks.values()) else 1
