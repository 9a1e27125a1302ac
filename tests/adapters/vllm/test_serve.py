"""`vllm serve` itself: vLLM's HTTP routes drive our pulls in every pause mode; the recipe; the README, as typed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("transformers")
pytest.importorskip("requests")

import requests
from vllm_engines import Engine, checkpoint
from vllm_servers import as_a_person, make_two_models

from recipes.ranks import free_port
from recipes.servers import SERVER_OPTIONS, environment_for, stop, until
from tensorhub_plugins.core import Client, start_server, version_of

pytestmark = [pytest.mark.heavy, pytest.mark.long, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[3]
PROMPT = [10, 11, 12, 13, 14, 15]
SHORT, LONG = 64, 1500  # tokens; a long request is still running when the engine is paused
ALIKE = 16  # tokens that are the same, compiled or not
CONTEXT = {"max_model_len": 2048}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_two_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def expected(models: list[Path]) -> list[list[int]]:
    """What fresh engines answer to PROMPT."""
    answers = []
    for model in models:
        options = {"load_format": "tensorhub", "model_loader_extra_config": {"disk": "only"}, **CONTEXT}
        with Engine(model, extension=None, **options) as engine:
            answers += engine.generate([PROMPT], SHORT)
    assert answers[0] != answers[1]
    return answers


class Server:
    def __init__(self, url: str, hub: str) -> None:
        self.url, self.hub = url, hub

    def post(self, route: str, body: Any = None, **query: str) -> requests.Response:
        return requests.post(f"{self.url}/{route}", json=body, params=query, timeout=120)

    def request(self, tokens: int = SHORT) -> dict[str, Any]:
        body = {"model": "actor", "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        reply = self.post("v1/completions", {**body, "return_token_ids": True})
        reply.raise_for_status()
        return dict(reply.json()["choices"][0])

    def running(self) -> float:
        metrics = requests.get(f"{self.url}/metrics", timeout=30).text
        return sum(float(n) for n in re.findall(r"^vllm:num_requests_running\S* (\S+)$", metrics, re.MULTILINE))

    def update(self, version: int) -> requests.Response:
        self.post("start_weight_update").raise_for_status()
        reply = self.post("update_weights", {"update_info": {"version": version, "timeout_s": 5.0}})
        if reply.ok:
            self.post("finish_weight_update", {"weight_version": str(version)}).raise_for_status()
        return reply


@pytest.fixture(scope="module")
def serving(
    weight_transfer: None, models: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Client]]:
    """A server that started from version 1 of the store, and the trainer that published it."""
    out = tmp_path_factory.mktemp("serve")
    with ExitStack() as stack:
        hub = stack.enter_context(start_server())
        trainer = stack.enter_context(Client(hub.address, run="default", model="actor", replica="trainer"))
        trainer.publish(1, checkpoint(models[0]))
        port, log = free_port(), stack.enter_context(open(out / "log", "wb"))
        extra = {"hub": hub.address, "model": "actor", "replica": "server"}
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(models[0]), "--port", str(port)]
        command += ["--load-format", "tensorhub", "--model-loader-extra-config", json.dumps(extra)]
        command += [*SERVER_OPTIONS, "--max-model-len", str(CONTEXT["max_model_len"])]
        command += ["--weight-transfer-config", '{"backend": "tensorhub"}', "--served-model-name", "actor"]
        command += ["--worker-extension-cls", "vllm_faults.FaultyExtension"]
        environment = {**as_a_person(environment_for(out)), "VLLM_SERVER_DEV_MODE": "1"}
        environment["PYTHONPATH"] += f"{os.pathsep}{ROOT / 'tests/support'}"
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=ROOT, process_group=0)
        stack.callback(stop, process)
        server = Server(f"http://127.0.0.1:{port}", hub.address)

        def healthy() -> bool:
            try:
                return bool(requests.get(f"{server.url}/health", timeout=5).ok)
            except requests.RequestException:
                return False

        until(healthy, f"vllm serve answers ({out / 'log'})", process)
        yield server, trainer


@pytest.mark.parametrize(("mode", "version"), [("keep", 2), ("wait", 3), ("abort", 4)])
def test_every_pause_mode_ends_requests_as_vllm_says(
    mode: str, version: int, serving: tuple[Server, Client], models: list[Path], expected: list[list[int]]
) -> None:
    server, trainer = serving
    before, after = (version - 2) % 2, (version - 1) % 2
    assert server.request()["token_ids"] == expected[before]
    trainer.publish(version, checkpoint(models[after]))
    choice: dict[str, Any] = {}
    request = threading.Thread(target=lambda: choice.update(server.request(LONG)))
    request.start()
    until(server.running, "the request runs")
    server.post("pause", mode=mode).raise_for_status()
    server.update(version).raise_for_status()
    server.post("resume").raise_for_status()
    request.join(timeout=60)
    tokens = choice["token_ids"]
    assert choice["finish_reason"] == ("abort" if mode == "abort" else "length")
    if mode == "wait":
        assert tokens[:SHORT] == expected[before] and len(tokens) == LONG  # it was over before the weights changed
    else:
        assert len(tokens) < LONG if mode == "abort" else len(tokens) == LONG
    assert server.request()["token_ids"] == expected[after]
    assert requests.get(f"{server.url}/weight_info", timeout=30).json() == {"weight_version": str(version)}


def test_a_failed_update_is_an_error_and_the_server_lives(
    serving: tuple[Server, Client], expected: list[list[int]]
) -> None:
    server, _ = serving
    before = server.request()["token_ids"]
    assert before in expected
    assert server.update(99).status_code == 500
    assert server.request()["token_ids"] == before


def test_a_broken_server_says_so_and_is_mended(
    serving: tuple[Server, Client], models: list[Path], expected: list[list[int]]
) -> None:
    """It holds its requests, a client that gives up does no harm, and the next version mends it."""
    server, trainer = serving
    before = expected.index(server.request()["token_ids"])
    health = f"{server.url}/health"
    assert requests.get(health, timeout=30).status_code == 200
    trainer.publish(50, checkpoint(models[1 - before]))
    server.post("collective_rpc", {"method": "tensorhub_test_fail_conversion_on", "args": [0]}).raise_for_status()
    server.post("pause", mode="keep").raise_for_status()
    assert server.update(50).status_code == 500
    assert requests.get(health, timeout=30).status_code == 503
    assert not server.post("resume").ok
    with pytest.raises(requests.exceptions.ReadTimeout):
        body = {"model": "actor", "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
        requests.post(f"{server.url}/v1/completions", json=body, timeout=1)
    assert requests.get(health, timeout=30).status_code == 503  # alive, and truthful
    server.update(50).raise_for_status()
    server.post("resume").raise_for_status()
    assert requests.get(health, timeout=30).status_code == 200
    assert server.request()["token_ids"] == expected[1 - before]


def test_vllms_own_trainer_factory_updates_the_server(
    serving: tuple[Server, Client], models: list[Path], expected: list[list[int]]
) -> None:
    """Over HTTP, with vLLM's client: init, start, update, finish."""
    import torch
    from transformers import AutoModelForCausalLM
    from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient, ModuleSource, WeightTransferTrainerFactory

    from tensorhub_plugins.vllm.weight_transfer import TensorHubTrainerInitInfo

    server, _ = serving
    before = server.request()["token_ids"]
    new = 1 - expected.index(before)
    source = ModuleSource(AutoModelForCausalLM.from_pretrained(models[new], dtype=torch.bfloat16))
    init = TensorHubTrainerInitInfo(hub=server.hub, model="actor", replica="factory", rank=0)
    client = HTTPVLLMWeightSyncClient(server.url)
    engine = WeightTransferTrainerFactory.trainer_init(init, client=client, source=source)
    assert server.request()["token_ids"] == before
    engine.send_weights(version=100)
    assert server.request()["token_ids"] == expected[new]
    assert requests.get(f"{server.url}/weight_info", timeout=30).json() == {"weight_version": str(version_of(1, 100))}
    engine.shutdown()


def test_the_recipe_trains_and_both_servers_follow(weight_transfer: None, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "recipes.vllm_serve", "--steps", "4", "--out", str(tmp_path / "out")]
    environment = as_a_person(dict(os.environ))
    ended = subprocess.run(command, capture_output=True, text=True, timeout=800, cwd=ROOT, env=environment)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("ok   ") == 4


def test_the_readme_works_as_typed(models: list[Path], expected: list[list[int]], tmp_path: Path) -> None:
    """Its commands, with the ports and the model's name replaced, in a shell."""
    text = (ROOT / "README.md").read_text().split("## Use it with vLLM alone")[1]
    typed = text.split("```")[1]
    ports = [free_port(), free_port()]
    hub = f"tcp://127.0.0.1:{ports[0]}"
    assert typed.count("tcp://127.0.0.1:7070") == 2 and typed.count("vllm serve MODEL") == 1
    typed = typed.replace("tcp://127.0.0.1:7070", hub)
    typed = typed.replace("vllm serve MODEL", f"vllm serve {models[0]} --port {ports[1]} --served-model-name actor")
    environment = as_a_person(environment_for(tmp_path))
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    environment["VLLM_CPU_KVCACHE_SPACE"] = "1"
    server = Server(f"http://127.0.0.1:{ports[1]}", hub)
    with open(tmp_path / "log", "wb") as log:
        shell = subprocess.Popen(
            ["bash", "-c", typed], stdout=log, stderr=log, env=environment, cwd=tmp_path, process_group=0
        )
        try:
            until(lambda: _answers(server), f"vllm serve answers ({tmp_path / 'log'})", shell)
            # Compiled, as typed: its answers part from those of an engine that is not compiled at some token.
            assert server.request()["token_ids"][:ALIKE] == expected[0][:ALIKE] != expected[1][:ALIKE]
            with Client(hub, run="default", model="actor", replica="trainer") as trainer:
                trainer.publish(2, checkpoint(models[1]))
                until(lambda: server.request()["token_ids"][:ALIKE] == expected[1][:ALIKE], "it follows", shell)
        finally:
            stop(shell)


def _answers(server: Server) -> bool:
    try:
        return bool(server.request(1))
    except requests.RequestException:
        return False
