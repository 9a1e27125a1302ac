"""Real vLLM engines on the device: one that starts from another that captures, and one that sleeps between versions.

Without a GPU the same lines run on vLLM's CPU build, in `make test-heavy`: nothing is captured there, and nothing
leaves its memory."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gpu_place
import pytest
import torch
from gpu_place import NO_GPU
from hub_limits import AT_ONCE

from tensorhub_plugins.core import CHECKPOINT, Client, Deadline, Server, start_server

pytestmark = [pytest.mark.timeout(900)]

TIMEOUT_S = 60.0
KIND = "qwen2-untied"
KV_BYTES = 1 << 30
JOINING = {"run": "default", "model": "actor", "replica": "fresh"}


@pytest.fixture(params=[pytest.param("gpu", marks=pytest.mark.gpu), pytest.param("cpu", marks=pytest.mark.heavy)])
def is_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    pytest.importorskip("vllm")
    pytest.importorskip("transformers")
    import vllm_engines

    is_gpu = request.param == "gpu"
    if is_gpu != torch.cuda.is_available():
        pytest.skip(NO_GPU if is_gpu else "vLLM's CPU build is where there is no GPU")
    monkeypatch.setattr(vllm_engines, "START_TIMEOUT_S", 600)
    return is_gpu


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Two models with weights, and one without."""
    from vllm_engines import make_model

    made = [make_model(KIND, tmp_path / str(seed), seed) for seed in (1, 2)]
    bare = shutil.copytree(made[0], tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    return [*made, Path(bare)]


@pytest.fixture
def hub() -> Iterator[Server]:
    with start_server(limits=AT_ONCE) as server:
        yield server


@pytest.fixture
def trainer(hub: Server) -> Iterator[Client]:
    with client(hub, "trainer") as made:
        yield made


def client(hub: Server, name: str, **options: Any) -> Client:
    return Client(hub.address, run="default", model="actor", replica=name, **options)


def start(folder: Path, hub: Server, is_gpu: bool, **options: Any) -> Any:
    """Start an engine that has its weights from the store, and serves what it computes with."""
    from vllm_engines import Engine

    extra = {"hub": hub.address, "model": "actor", "transports": ["shm", "tcp"]}
    settings = {"extension": None, "load_format": "tensorhub", "model_loader_extra_config": extra}
    if is_gpu:
        settings |= {"enforce_eager": False, "gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": KV_BYTES}
    return Engine(folder, **{**settings, **options})


def install(engine: Any, version: int) -> dict[str, Any]:
    engine.call("tensorhub_start_fetch", version, TIMEOUT_S)
    until(lambda: engine.call("tensorhub_poll")["state"] != "fetching")
    engine.ask("pause")
    result: dict[str, Any] = engine.call("tensorhub_install", version, TIMEOUT_S)
    if result["installed"]:
        engine.ask("resume")
    until(lambda: not engine.call("tensorhub_poll")["serving"])
    return result


def until(condition: Any) -> None:
    deadline = Deadline.after(TIMEOUT_S)
    while not condition():
        assert not deadline.expired


def runtime_of(trainer: Client, version: int) -> dict[str, tuple[str, ...]]:
    """Return who has which layout of an engine's."""
    layouts = next((info.layouts for info in trainer.versions() if info.version == version), {})
    return {layout: tuple(sorted(held)) for layout, held in layouts.items() if layout != CHECKPOINT}


def test_an_engine_starts_from_one_that_captures(
    is_gpu: bool, folders: list[Path], hub: Server, trainer: Client
) -> None:
    """Its live weights are announced before it captures its graphs, and are read then, as in a fleet that starts."""
    from vllm_engines import checkpoint

    *_, bare = folders
    trainer.publish(1, checkpoint(folders[0]))
    answers = []
    with ThreadPoolExecutor(1) as pool:
        for _ in range(20 if is_gpu else 1):
            starting = pool.submit(start, bare, hub, is_gpu)
            until(lambda starting=starting: runtime_of(trainer, 1) or starting.done())
            with start(bare, hub, is_gpu) as second, starting.result() as first:
                report = second.call("tensorhub_poll")["report"]
                assert "trainer/0" not in report["sources"] and report["losses"] == [], report
                answers += [first.generate(), second.generate()]
            until(lambda: not runtime_of(trainer, 1))
    assert all(answer == answers[0] for answer in answers)


def test_an_engine_sleeps_between_versions(is_gpu: bool, folders: list[Path], hub: Server, trainer: Client) -> None:
    """Its weights are served where they lie, by shm and tcp; while it sleeps their memory is another's (A13)."""
    from vllm_engines import checkpoint

    *models, bare = folders
    trainer.retain(0)
    trainer.publish(1, checkpoint(models[0]))
    options: dict[str, Any] = {"enable_sleep_mode": True} if is_gpu else {}
    answers: list[Any] = []
    with start(bare, hub, is_gpu, **options) as engine, client(hub, "peer") as peer:
        for version in range(1, 7 if is_gpu else 4):
            if version > 1:
                trainer.publish(version, checkpoint(models[(version - 1) % 2]))
                result = install(engine, version)
                assert result["installed"], result["error"]
                trainer.unpublish(version - 1)
            expected = engine.call("tensorhub_digests")["runtime"]
            ((layout, held),) = runtime_of(trainer, version).items()
            for transport in ("shm", "tcp"):
                with client(hub, f"by {transport}", transports=(transport,)) as reader:
                    fetched = reader.fetch(version, (layout,), timeout_s=TIMEOUT_S)
                    assert list(fetched.report.sources) == list(held)
                    check(fetched.tensors(), expected)
            answers.append(engine.generate())
            if len(answers) > 2:
                assert answers[-1] == answers[-3] != answers[-2]
            free = gpu_place.free_bytes() if is_gpu else 0
            level = 2 if version % 3 == 0 else 1
            engine.ask("rpc", "sleep", (level,))
            assert not runtime_of(trainer, version)
            if is_gpu:
                assert gpu_place.free_bytes() - free > KV_BYTES * 9 // 10
            engine.ask("rpc", "wake_up", ())
            until(lambda: not engine.call("tensorhub_poll")["serving"])
            if level == 2 and is_gpu:
                assert "level=2" in engine.call("tensorhub_poll")["broken"] and not runtime_of(trainer, version)
            else:
                assert engine.call("tensorhub_digests")["runtime"] == expected
                assert engine.generate() == answers[-1]
                check(peer.fetch(version, (layout,), timeout_s=TIMEOUT_S).tensors(), expected)
                peer.unpublish(version)


def test_an_engine_starts_again_that_was_killed_in_mid_install(
    is_gpu: bool, folders: list[Path], hub: Server, trainer: Client
) -> None:
    """kill -9 while its weights are mixed (A19): the next one is refused no memory that the driver still frees, and
    starts from the version in the midst of which the first one died."""
    from vllm_engines import checkpoint

    *models, bare = folders
    options: dict[str, Any] = {"gpu_memory_utilization": 0.92, "kv_cache_memory_bytes": None} if is_gpu else {}
    trainer.publish(1, checkpoint(models[0]))
    with start(bare, hub, is_gpu, extension="vllm_faults.FaultyExtension", **options) as engine:
        old = engine.generate()
        if is_gpu:
            assert gpu_place.free_bytes() < 0.12 * torch.cuda.mem_get_info()[1], "the control: it has the memory"
        trainer.publish(2, checkpoint(models[1]))
        engine.call("tensorhub_test_die_in_copy", 3)
        with pytest.raises((EOFError, ConnectionError)):
            install(engine, 2)
    with start(bare, hub, is_gpu, **options) as again:
        assert again.call("tensorhub_poll")["version"] == 2
        assert again.generate() != old
        expected = again.call("tensorhub_digests")["runtime"]
    with start(models[1], hub, is_gpu, model_loader_extra_config={"disk": "only"}) as fresh:
        assert fresh.call("tensorhub_connect", JOINING | {"hub": hub.address})["shard"] == 0
        assert fresh.call("tensorhub_digests")["runtime"] == expected


def check(found: dict[str, torch.Tensor], digests: dict[str, str]) -> None:
    """AssertionError unless these are the bytes with these digests."""
    from tensorhub_plugins.vllm.worker import weights

    assert {name: weights.digest(tensor) for name, tensor in found.items()} == digests
