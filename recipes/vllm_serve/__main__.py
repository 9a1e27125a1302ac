"""A hub, two vLLM servers that follow, and a training loop that publishes: python -m recipes.vllm_serve

All on this machine, with a tiny model of random weights, in the folder out/vllm_serve. The second server has no weights
on its disk and joins when the first one answers: it reads them from there. At the end both hold the last version and
give the same greedy answer.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

from recipes.ranks import free_port
from tensorhub_plugins.core import start_server
from tensorhub_plugins.core.cli import fetch_status

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 400.0  # for anything that is waited for
STOP_TIMEOUT_S = 20.0
SERVER_OPTIONS = ["--max-model-len", "256", "--max-num-seqs", "32", "--enforce-eager", "--kv-cache-memory-bytes", "64M"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ROOT / "out")) / "vllm_serve")
    options = parser.parse_args()
    out = options.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    environment = environment_for(out)
    model, bare = out / "model", out / "model-without-weights"
    make = [sys.executable, "-m", "recipes.verl_grpo.make_model", str(model), "--size", "tiny"]
    subprocess.run(make, check=True, env=environment, cwd=ROOT)
    shutil.copytree(model, bare, ignore=shutil.ignore_patterns("*.safetensors"))

    with ExitStack() as stack:
        hub = stack.enter_context(start_server())

        def start(name: str, *command: str) -> subprocess.Popen[bytes]:
            log = stack.enter_context(open(out / f"{name}.log", "wb"))
            started = [sys.executable, *command]
            process = subprocess.Popen(started, stdout=log, stderr=log, env=environment, cwd=ROOT, process_group=0)
            stack.callback(stop, process)
            return process

        def serve(name: str, folder: Path, port: int) -> subprocess.Popen[bytes]:
            extra = {"hub": hub.address, "model": "actor", "replica": name, "follow": "now"}
            told = ["--load-format", "tensorhub", "--model-loader-extra-config", json.dumps(extra)]
            called = ["--port", str(port), "--served-model-name", "actor", *SERVER_OPTIONS]
            return start(name, "-m", "vllm.entrypoints.cli.main", "serve", str(folder), *told, *called)

        ports = [free_port(), free_port()]
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        told = ["--hub", hub.address, "--servers", *urls, "--steps", str(options.steps)]
        trainer = start("trainer", "recipes/vllm_serve/train.py", str(model), *told)
        servers = [serve("server-0", model, ports[0])]
        until(lambda: answer(urls[0]), "the first server answers", trainer, *servers)
        servers.append(serve("server-1", bare, ports[1]))
        until(lambda: answer(urls[1]), "the second server answers", *servers)
        until(lambda: trainer.poll() is not None, "training ends", *servers)
        print((out / "trainer.log").read_text().strip().splitlines()[-1])

        newest = options.steps + 1
        held = ["server-0/0", "server-1/0"]
        until(lambda: holders(hub.address, newest) == held, f"both servers hold version {newest}", *servers)
        said = [answer(url) for url in urls]
        checks = {
            "the trainer ended well": trainer.returncode == 0,
            f"both servers hold version {newest} and serve it": True,  # or `until` had raised
            "they give the same greedy answer": said[0] == said[1] and said[0] is not None,
            "the second server started from the first": "from server-0" in (out / "server-1.log").read_text(),
        }
    for check, holds in checks.items():
        print("ok   " if holds else "WRONG", check)
    return 0 if all(checks.values()) else 1


def answer(url: str) -> str | None:
    """Return the greedy answer; None while the server is not up."""
    request = {"model": "actor", "prompt": "1 + 1 = ", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    try:
        headers = {"Content-Type": "application/json"}
        with urlopen(Request(f"{url}/v1/completions", json.dumps(request).encode(), headers), timeout=60) as reply:
            return str(json.load(reply)["choices"][0]["text"])
    except (URLError, ConnectionError, TimeoutError):
        return None


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


if __name__ == "__main__":
    sys.exit(main())
