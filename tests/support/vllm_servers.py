"""Real `vllm serve` processes for tests, and how to talk to them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import requests

from recipes.ranks import free_port
from recipes.servers import SERVER_OPTIONS, environment_for, stop, until
from recipes.verl_grpo.make_model import make_model, make_tokenizer

ROOT = Path(__file__).resolve().parents[2]
REQUEST_TIMEOUT_S = 120.0
TOLD = ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL")  # what the other engines of the tests are told


def as_a_person(environment: dict[str, str]) -> dict[str, str]:
    """Return it without what the other engines of the tests are told."""
    return {name: value for name, value in environment.items() if name not in TOLD}


class Server:
    def __init__(self, url: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.url, self.process, self.log = url, process, log

    def post(self, route: str, body: Any, **options: Any) -> requests.Response:
        return requests.post(f"{self.url}/{route}", json=body, **{"timeout": REQUEST_TIMEOUT_S, **options})

    def complete(self, prompt: list[int], tokens: int, **options: Any) -> requests.Response:
        """Request a greedy completion that does not end early."""
        body = {"model": "actor", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        stream = bool(options.get("stream"))
        return self.post("v1/completions", {**body, "return_token_ids": True, "stream": stream}, **options)

    def running(self) -> float:
        metrics = requests.get(f"{self.url}/metrics", timeout=30).text
        pattern = r"^vllm:num_requests_(?:running|waiting)\S* (\S+)$"
        return sum(float(number) for number in re.findall(pattern, metrics, re.MULTILINE))

    def healthy(self) -> bool:
        try:
            return requests.get(f"{self.url}/health", timeout=5).ok
        except requests.RequestException:
            return False


def make_two_models(folder: Path) -> list[Path]:
    """Tiny ones of one architecture whose greedy tokens differ, below `folder`."""
    made = []
    for seed in (1, 2):
        tokenizer = make_tokenizer()
        model = make_model("tiny", tokenizer, seed)
        for parameter in model.parameters():
            parameter.data.mul_(10)  # so that other weights give other tokens
        made.append(folder / f"model-{seed}")
        tokenizer.save_pretrained(made[-1])
        model.save_pretrained(made[-1])
    return made


@contextmanager
def serving(
    folder: Path, out: Path, extra: dict[str, Any], *options: str, hosts: tuple[str, ...] = ()
) -> Iterator[Server]:
    """Run a server of the model in this folder that has its weights from the store. extra: keys of the loader.

    hosts: names of the hosts of this one engine, if there are several; each has its own processes, all on this machine.
    """
    with starting(folder, out, extra, *options, hosts=hosts) as (server, processes):
        until(server.healthy, f"vllm serve answers ({server.log})", *processes)
        yield server


@contextmanager
def starting(
    folder: Path, out: Path, extra: dict[str, Any], *options: str, hosts: tuple[str, ...] = ()
) -> Iterator[tuple[Server, list[subprocess.Popen[bytes]]]]:
    """Do the same without waiting; yield also a process of each host."""
    with ExitStack() as stack:
        port, meeting = free_port(), ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
        told = ["--load-format", "tensorhub", "--model-loader-extra-config", json.dumps(extra)]
        called = ["--port", str(port), "--served-model-name", "actor", *SERVER_OPTIONS, *options]
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder), *told, *called]
        environment = as_a_person(environment_for(out))
        started = []
        for number, host in enumerate(hosts or ("",)):
            log = out / (f"log-{number}" if number else "log")
            place = ["--nnodes", str(len(hosts)), "--node-rank", str(number), *meeting] if hosts else []
            also = {"TENSORHUB_HOST": host, "VLLM_HOST_IP": "127.0.0.1"} if hosts else {}
            whole = [*command, *place, *(["--headless"] if number else [])]
            written = stack.enter_context(open(log, "wb"))
            how: dict[str, Any] = {"env": {**environment, **also}, "cwd": ROOT, "process_group": 0}
            started.append(subprocess.Popen(whole, stdout=written, stderr=written, **how))
            stack.callback(stop, started[-1])
        yield Server(f"http://127.0.0.1:{port}", started[0], out / "log"), started
