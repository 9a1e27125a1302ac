"""A hub, two vLLM servers that follow, and a real run of TRL's AsyncGRPOTrainer: python -m recipes.trl_grpo

All on this machine, with a tiny model of random weights, in the folder out/trl_grpo. The second server has no weights
on its disk, and joins while TRL trains: it reads them from a peer. At the end both hold the last version.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from recipes.ranks import free_port
from recipes.vllm_serve.__main__ import ROOT, SERVER_OPTIONS, environment_for, holders, stop, until
from tensorhub_plugins.core import start_server

# How TRL finds the text of an answer, with a chat template that it does not know.
ANSWER = {
    "x-regex": r"^(?P<content>[\s\S]*?)(?:<eos>)?$",
    "type": "object",
    "properties": {"role": {"const": "assistant"}, "content": {"type": "string"}},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ROOT / "out")) / "trl_grpo")
    options = parser.parse_args()
    out = options.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    environment = environment_for(out)
    environment["PYTHONPATH"] += "".join(
        os.pathsep + each for each in (str(ROOT / "recipes/cpu/trl"), options.trl) if each
    )
    model, bare = out / "model", out / "model-without-weights"
    make = [sys.executable, "-m", "recipes.verl_grpo.make_model", str(model), "--size", "tiny"]
    subprocess.run(make, check=True, env=environment, cwd=ROOT)
    described = json.loads((model / "tokenizer_config.json").read_text()) | {"response_schema": ANSWER}
    (model / "tokenizer_config.json").write_text(json.dumps(described))
    shutil.copytree(model, bare, ignore=shutil.ignore_patterns("*.safetensors"))

    with ExitStack() as stack:
        hub = stack.enter_context(start_server())

        def start(name: str, *command: str) -> subprocess.Popen[bytes]:
            log = stack.enter_context(open(out / f"{name}.log", "wb"))
            started = [sys.executable, *command]
            process = subprocess.Popen(started, stdout=log, stderr=log, env=environment, cwd=ROOT, process_group=0)
            stack.callback(stop, process)
            return process

        def serve(name: str, folder: Path, port: int, disk: str) -> subprocess.Popen[bytes]:
            extra = {"hub": hub.address, "model": "actor", "replica": name, "follow": "now", "disk": disk}
            told = ["--load-format", "tensorhub", "--model-loader-extra-config", json.dumps(extra)]
            called = ["--port", str(port), "--served-model-name", str(model), *SERVER_OPTIONS]
            return start(name, "-m", "vllm.entrypoints.cli.main", "serve", str(folder), *told, *called)

        ports = [free_port(), free_port()]
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        told = ["--hub", hub.address, "--servers", *urls, "--steps", str(options.steps), "--out", str(out / "trained")]
        servers = [serve("server-0", model, ports[0], "fallback")]
        trainer = start("trainer", "recipes/trl_grpo/train.py", str(model), *told)
        log = out / "trainer.log"
        until(lambda: rewards(log), "TRL takes its first step", trainer, *servers)
        servers.append(serve("server-1", bare, ports[1], "never"))
        held = ["server-0/0", "server-1/0"]
        until(lambda: trainer.poll() is not None, "training ends", *servers)
        newest = options.steps + 1
        until(lambda: holders(hub.address, newest) == held, f"both servers hold version {newest}", *servers)
        found = rewards(log)
        checks = {
            "TRL ended well": trainer.returncode == 0,
            f"it has logged {options.steps} steps": len(found) == options.steps,
            "its reward has risen": sum(found[-4:]) / 4 > sum(found[:4]) / 4,
            f"both servers hold version {newest} and serve it": True,  # or `until` had raised
            "the second server started from a peer": "from server-0" in (out / "server-1.log").read_text(),
        }
    for check, holds in checks.items():
        print("ok   " if holds else "WRONG", check)
    print("rewards:", " ".join(f"{each:.2f}" for each in found))
    return 0 if all(checks.values()) else 1


def rewards(log: Path) -> list[float]:
    """Return the rewards that TRL has logged."""
    return [float(each) for each in re.findall(r"'reward': '?([-\d.e]+)", log.read_text(errors="replace"))]


if __name__ == "__main__":
    sys.exit(main())
