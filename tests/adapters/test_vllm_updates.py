"""vLLM engines get their weights through the store: the same bytes and the same answers as a fresh start."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("transformers")

from vllm_engines import Engine, checkpoint, engines, make_model

from tensorhub_plugins.core import Client, Server, start_server

pytestmark = pytest.mark.heavy

DEADLINE_S = 30.0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    made: dict[tuple[str, int], Path] = {}

    def get(kind: str, seed: int) -> Path:
        if (kind, seed) not in made:
            made[kind, seed] = make_model(kind, tmp_path_factory.mktemp(f"{kind}-{seed}"), seed)
        return made[kind, seed]

    return get


@pytest.fixture
def hub() -> Iterator[Server]:
    server = start_server()
    yield server
    server.close()


def trainer(hub: Server, name: str = "trainer") -> Client:
    return Client(hub.address, run="test", model="actor", replica=name)


def connect(engine: Engine, hub: Server, replica: str, **options: Any) -> dict[str, Any]:
    config = {"hub": hub.address, "run": "test", "model": "actor", "replica": replica, **options}
    return engine.call("tensorhub_connect", config)


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {deadline_s} s: {what}"
        time.sleep(0.005)


def fetch(engine: Engine, version: int) -> dict[str, Any]:
    engine.call("tensorhub_begin_fetch", version, DEADLINE_S)
    wait_until(lambda: engine.call("tensorhub_poll")["state"] != "fetching", "fetched")
    return engine.call("tensorhub_poll")


def install(engine: Engine, version: int) -> dict[str, Any]:
    engine.call("tensorhub_prepare_install", DEADLINE_S)
    engine.ask("pause")
    result = engine.call("tensorhub_install", version, DEADLINE_S)
    if result["installed"]:
        engine.ask("resume")
    return result


def update(engine: Engine, version: int) -> dict[str, Any]:
    """One whole update, until the engine serves what it installed."""
    polled = fetch(engine, version)
    assert polled["state"] == "ready", polled["error"]
    result = install(engine, version)
    assert result["installed"], result["error"]
    wait_until(lambda: not engine.call("tensorhub_poll")["serving"], "served")
    assert engine.call("tensorhub_poll")["served_version"] == version
    return result


@pytest.mark.parametrize("kind", ["qwen2-tied", "qwen2-untied", "mixtral"])
def test_an_update_equals_a_fresh_start(kind: str, models: Any, hub: Server) -> None:
    old, new = models(kind, 1), models(kind, 2)
    with engines(new, old, old) as (fresh, first, second), trainer(hub) as publisher:
        expected, before = fresh.generate(), first.generate()
        assert expected != before
        layout = connect(fresh, hub, "fresh")["layout"]
        assert (
            layout
            == connect(first, hub, "rollout-0")["layout"]
            == connect(second, hub, "rollout-1")["layout"]
        )
        weights = checkpoint(new)
        publisher.publish(1, weights)

        # The first one has to convert the checkpoint, the second copies the converted bytes from it.
        assert update(first, 1)["layout"] == "checkpoint"
        assert first.generate() == expected
        result = update(second, 1)
        assert result["layout"] == layout
        assert list(result["report"]["sources"]) == ["rollout-0/0"]
        assert list(result["report"]["transports"]) == ["shm"]
        assert second.generate() == expected

        truth = fresh.call("tensorhub_digests")
        assert len(truth["runtime"]) > 20
        for engine in (first, second):
            digests = engine.call("tensorhub_digests")
            assert digests["version"] == 1
            assert digests["runtime"] == truth["runtime"]
            assert digests["checkpoint"] == truth["checkpoint"]
        # What the trainer published can be compared with the engine by name, where it can be told apart.
        if kind == "mixtral":
            assert truth["checkpoint"] is None
        else:
            assert weights.keys() <= truth["checkpoint"].keys()
            assert {name: slab_digest(tensor) for name, tensor in weights.items()}.items() <= truth[
                "checkpoint"
            ].items()


def slab_digest(tensor: Any) -> str:
    """What the core says of a tensor's bytes."""
    from tensorhub_plugins.core import Slab

    slab = Slab.adopt({"t": tensor})
    return slab.digest(0, slab.size_bytes).hex()


@pytest.mark.parametrize("kind", ["qwen2-tied", "mixtral"])
def test_the_stock_reload_is_wrong_here(kind: str, models: Any) -> None:
    """The negative control of the test above: vLLM's own way, on its own CPU layers, gives other answers."""
    old, new = models(kind, 1), models(kind, 2)
    with engines(new, old, extension=None) as (fresh, engine):
        expected = fresh.generate()
        engine.ask("reload_stock", str(new))
        assert engine.generate() != expected
