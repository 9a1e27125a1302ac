"""A real `vllm serve` that follows: requests for a version, `/ready`, and its figures in vLLM's own `/metrics`."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("requests")

import requests
from vllm_engines import checkpoint
from vllm_servers import make_two_models, serving

from tensorhub_plugins.core import Client, Server
from tensorhub_plugins.vllm.exposition import DURATION, FIGURES, PREFIX

pytestmark = [pytest.mark.heavy, pytest.mark.long, pytest.mark.timeout(600)]


def figures(url: str) -> dict[str, float]:
    lines = requests.get(f"{url}/metrics", timeout=30).text.splitlines()
    found = [line.rpartition(" ") for line in lines if line.startswith(PREFIX)]
    return {name.partition("{")[0].removeprefix(PREFIX): float(value) for name, _, value in found}


@pytest.mark.parametrize("api_servers", [1, 2])
def test_a_request_waits_for_its_version(api_servers: int, hub: Server, tmp_path: Path) -> None:
    """Two API servers share the figures by files."""
    folders = make_two_models(tmp_path / "models")
    extra = {"hub": hub.address, "run": "r", "model": "actor", "replica": "server", "follow": "now"}
    with Client(hub.address, run="r", model="actor", replica="trainer") as trainer, ThreadPoolExecutor(1) as beside:
        trainer.publish(1, checkpoint(folders[0]))
        options = ["--max-model-len", "512", "--api-server-count", str(api_servers)]
        with serving(folders[0], tmp_path, extra, *options) as server:

            def ask(version: int, wait_s: float) -> Any:
                body = {"model": "actor", "prompt": [10, 11, 12], "max_tokens": 2, "min_version": version}
                headers = {"X-TensorHub-Wait": str(wait_s)}
                return requests.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=240)

            assert ask(1, 0).headers["X-TensorHub-Version"] == "1"
            late = ask(2, 0.5)
            assert late.status_code == 409 and late.json()["version"] == 1
            waits = beside.submit(ask, 2, 60)
            trainer.publish(2, checkpoint(folders[1]))
            answer = waits.result()
            assert answer.status_code == 200 and answer.headers["X-TensorHub-Version"] == "2", answer.text
            assert answer.headers["X-TensorHub-Version-First"] == answer.headers["X-TensorHub-Version-Last"] == "2"
            body = {"model": "actor", "input": "1+2", "max_output_tokens": 2}
            response = requests.post(f"{server.url}/v1/responses", json=body, timeout=240)
            assert response.headers.get("X-TensorHub-Version-Last") == "2", response.text
            body = {"model": "actor", "prompt": [10, 11, 12], "max_tokens": 2, "stream": True}
            stream = requests.post(
                f"{server.url}/v1/completions", json=body, headers={"X-TensorHub-Versions": "1"}, timeout=240
            )
            said = ": x-tensorhub-version-first: 2, x-tensorhub-version-last: 2\n\ndata: [DONE]"
            assert said in stream.text, stream.text
            ready = requests.get(f"{server.url}/ready", timeout=30)
            assert ready.status_code == 200 and ready.json()["version"] == 2, ready.text
            end = time.monotonic() + 60
            while (found := figures(server.url)).get("step") != 2 and time.monotonic() < end:
                pass
            assert set(found) == set(FIGURES) and (found["step"], found["lag_steps"], found["answers"]) == (2, 0, 1)
            assert found["pull_seconds"] > 0
            lines = requests.get(f"{server.url}/metrics", timeout=30).text.splitlines()
            counts = [line.split()[1] for line in lines if line.startswith(f'{DURATION}_count{{operation="finish"}}')]
            assert counts == ["1.0"], counts  # of one update after the start, also with two servers
