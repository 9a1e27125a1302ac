"""vLLM engines get their weights through the store: the same bytes and the same answers as a fresh start.

Also what must never happen: a failed update that answers with mixed weights, a reader that sees them change.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("transformers")

from vllm_engines import PROMPTS, Engine, EngineError, checkpoint, engines, wait_until

from tensorhub_plugins.core import Client, Server
from tensorhub_plugins.vllm.names import installed_version

pytestmark = pytest.mark.heavy
LONG, SMOKE = pytest.mark.long, pytest.mark.smoke

TIMEOUT_S = 30.0


def trainer(hub: Server, name: str = "trainer") -> Client:
    return Client(hub.address, run="test", model="actor", replica=name)


def connect(engine: Engine, hub: Server, replica: str, **options: Any) -> dict[str, Any]:
    config = {"hub": hub.address, "run": "test", "model": "actor", "replica": replica, **options}
    return engine.call("tensorhub_connect", config)


def fetch(engine: Engine, version: int) -> dict[str, Any]:
    engine.call("tensorhub_start_fetch", version, TIMEOUT_S)
    wait_until(lambda: engine.call("tensorhub_poll")["state"] != "fetching", "fetched")
    return engine.call("tensorhub_poll")


def install(engine: Engine, version: int) -> dict[str, Any]:
    engine.call("tensorhub_prepare_install", TIMEOUT_S)
    engine.ask("pause")
    result = engine.call("tensorhub_install", version, TIMEOUT_S)
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


def digest(tensor: Any) -> str:
    """What the core says of a tensor's bytes."""
    from tensorhub_plugins.core import Slab

    slab = Slab.adopt({"t": tensor})
    return slab.digest(0, slab.size_bytes).hex()


CONVERTED_BY = {"qwen2-tied": "copy", "qwen2-untied": "copy", "mixtral": "reload", "deepseek-mla": "reload"}


@pytest.mark.parametrize(
    "kind",
    [pytest.param("qwen2-tied", marks=SMOKE), "qwen2-untied", "mixtral", pytest.param("deepseek-mla", marks=LONG)],
)
def test_an_update_equals_a_fresh_start(kind: str, models: Any, hub: Server, tmp_path: Path) -> None:
    old, new = models(kind, 1), models(kind, 2)
    env = {"TENSORHUB_EVENTS": str(tmp_path)}
    with engines(new, old, old, env=env) as (fresh, first, second), trainer(hub) as publisher:
        expected, before = fresh.generate(), first.generate()
        assert expected != before
        layout = connect(fresh, hub, "fresh")["layout"]
        assert layout == connect(first, hub, "rollout-0")["layout"] == connect(second, hub, "rollout-1")["layout"]
        weights = checkpoint(new)
        # The first one has to convert the checkpoint, the second copies the converted bytes from it.
        published = publisher.publish(1, weights)
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
        if CONVERTED_BY[kind] == "reload":
            assert truth["checkpoint"] is None
        else:
            assert weights.keys() <= truth["checkpoint"].keys()
            of_trainer = {name: digest(tensor) for name, tensor in weights.items()}
            assert of_trainer.items() <= truth["checkpoint"].items()

    # The event log says the same, from what each worker read out of its own memory.
    lines = [json.loads(line) for file in tmp_path.iterdir() for line in file.read_text().splitlines()]
    assert [e["by"] for e in lines if e["event"] == "install" and "by" in e] == [CONVERTED_BY[kind]]
    roots = {(e["worker"], e["layout"]): e["digests"]["root"] for e in lines if e["event"] == "digests"}
    assert roots["rollout-0/0", "checkpoint"] == published.manifest.root().hex()
    assert roots["rollout-0/0", layout] == roots["rollout-1/0", layout]
    assert sorted(e["worker"] for e in lines if e["event"] == "serve") == ["rollout-0/0", "rollout-1/0"]
    assert {e["event"] for e in lines} == {"fetch", "install", "serve", "digests"}


@pytest.mark.parametrize("kind", ["qwen2-tied", "mixtral"])
def test_the_stock_reload_is_wrong_here(kind: str, models: Any) -> None:
    """The negative control of the test above: vLLM's own way, on its own CPU layers, gives other answers."""
    old, new = models(kind, 1), models(kind, 2)
    with engines(new, old, extension=None) as (fresh, engine):
        if not engine.ask("packs"):
            pytest.skip("on this CPU (no AVX-512) vLLM packs no layers, and its own way is right")
        if str(installed_version()).startswith("0.24."):
            pytest.skip("the own way of vLLM 0.24 is right")
        expected = fresh.generate()
        engine.ask("reload_stock", str(new))
        assert engine.generate() != expected


# --- one engine that generates while others come and go ---


@pytest.fixture
def pair(models: Any, hub: Server) -> Iterator[Callable[..., tuple[Engine, Engine]]]:
    """Two engines with old weights, the first of which serves version 1 (the new weights) as its options say."""
    started: list[Any] = []

    def start(**options: Any) -> tuple[Engine, Engine]:
        extension = "vllm_faults.FaultyExtension"
        context = engines(models("qwen2-tied", 1), models("qwen2-tied", 1), extension=extension)
        first, second = context.__enter__()
        started.append(context)
        connect(first, hub, "rollout-0", **options)
        connect(second, hub, "rollout-1", **options)
        with trainer(hub) as publisher:
            publisher.publish(1, checkpoint(models("qwen2-tied", 2)))
            update(first, 1)
        return first, second  # the trainer has left: version 1 is to be had from the first engine only

    yield start
    for context in started:
        context.__exit__(None, None, None)


def freeze(engine: Engine) -> None:
    os.kill(engine.process.pid, signal.SIGSTOP)


def thaw(engine: Engine) -> None:
    os.kill(engine.process.pid, signal.SIGCONT)


@pytest.mark.parametrize("serve_from", [pytest.param("host", marks=SMOKE), "live"])
def test_it_generates_while_a_version_arrives_and_keeps_its_requests(
    serve_from: str, pair: Any, models: Any, hub: Server
) -> None:
    first, second = pair(serve_from=serve_from)
    expected = first.generate()
    freeze(first)  # a source that takes its time
    second.ask("submit", "long", PROMPTS, 200)
    second.call("tensorhub_start_fetch", 1, TIMEOUT_S)
    before = min(second.ask("progress").values())
    wait_until(lambda: min(second.ask("progress").values()) >= before + 20, "20 tokens")
    assert second.call("tensorhub_poll")["state"] == "fetching"
    thaw(first)
    wait_until(lambda: second.call("tensorhub_poll")["state"] == "ready", "ready")
    unfinished = second.ask("progress")
    assert max(unfinished.values()) < 200
    result = install(second, 1)
    assert result["installed"], result["error"]
    assert list(result["report"]["transports"]) == ["shm"]  # live weights by their addresses
    wait_until(lambda: set(second.ask("progress").values()) == {200}, "the requests that were in flight end")
    assert second.generate() == expected

    # Either of them can be read; then the next version replaces it, and readers see no byte change under them.
    with Client(hub.address, run="test", model="actor", replica="reader") as reader:
        layout = second.call("tensorhub_poll")["layout"]
        wait_until(lambda: not second.call("tensorhub_poll")["serving"], "served")
        first.kill()
        held = reader.fetch(1, (layout,), timeout_s=TIMEOUT_S)
        assert list(held.report.sources) == ["rollout-1/0"]
        digests = {name: digest(tensor) for name, tensor in held.tensors().items()}
        assert digests == second.call("tensorhub_digests")["runtime"]
    with trainer(hub, "trainer-2") as publisher:
        publisher.publish(2, checkpoint(models("qwen2-tied", 1)))
        update(second, 2)
        assert second.call("tensorhub_digests")["runtime"] != digests
        assert second.generate() != expected


def test_a_direct_install_reads_into_the_live_weights(pair: Any, models: Any, hub: Server) -> None:
    first, second = pair(install="direct")
    expected = first.generate()
    assert second.generate() != expected
    result = update(second, 1)
    assert result["layout"] == first.call("tensorhub_poll")["layout"]
    assert result["report"]["sources"].keys() == {"rollout-0/0"}
    assert second.generate() == expected
    assert second.call("tensorhub_digests") == first.call("tensorhub_digests")
    # Both serve in place: each of them is drained before it changes, and the other still has the version.
    with trainer(hub, "trainer-2") as publisher:
        publisher.publish(2, checkpoint(models("qwen2-tied", 1)))
        update(second, 2)
        update(first, 2)
    assert first.call("tensorhub_digests") == second.call("tensorhub_digests")


# --- failures ---


def test_a_direct_install_whose_source_has_died_converts_the_checkpoint(pair: Any, models: Any, hub: Server) -> None:
    first, second = pair(install="direct")
    with trainer(hub, "trainer-2") as publisher:
        publisher.publish(2, checkpoint(models("qwen2-tied", 3)))
        update(first, 2)
        expected = first.call("tensorhub_digests")["runtime"]
        assert fetch(second, 2)["report"] is None  # to be read in place, during the pause
        first.kill()
        second.ask("pause")
        result = second.call("tensorhub_install", 2, 8.0)
        assert result["installed"], result["error"]
        assert result["layout"] == "checkpoint"
        second.ask("resume")
        assert second.call("tensorhub_digests")["runtime"] == expected


@pytest.mark.smoke
def test_a_source_that_dies_leaves_the_old_version_whole(pair: Any) -> None:
    first, second = pair()
    before, answers = second.call("tensorhub_digests"), second.generate()
    freeze(first)
    second.call("tensorhub_start_fetch", 1, TIMEOUT_S)
    assert second.generate() == answers
    assert second.call("tensorhub_poll")["state"] == "fetching"  # so the kill hits in the middle
    first.kill()
    wait_until(lambda: second.call("tensorhub_poll")["state"] != "fetching", "the fetch ends")
    polled = second.call("tensorhub_poll")
    assert (polled["state"], polled["version"], polled["broken"]) == ("failed", 0, None)
    assert polled["error_kind"] in ("VersionGone", "NotPublished")
    result = second.call("tensorhub_install", 1, TIMEOUT_S)
    assert not result["installed"] and result["broken"] is None
    assert second.call("tensorhub_digests") == before
    assert second.generate() == answers


@pytest.mark.smoke
def test_an_install_that_fails_half_way_never_answers(pair: Any, models: Any, hub: Server) -> None:
    first, second = pair()
    expected = first.generate()
    old, new = (engine.call("tensorhub_digests")["runtime"] for engine in (second, first))
    assert fetch(second, 1)["state"] == "ready"
    second.call("tensorhub_test_fail_copy", 4)
    result = install(second, 1)
    assert not result["installed"] and "injected" in result["error"]
    mixed = second.call("tensorhub_digests")["runtime"]
    assert any(mixed[name] != old[name] for name in mixed) and any(mixed[name] != new[name] for name in mixed)
    polled = second.call("tensorhub_poll")
    assert polled["state"] == "broken" and polled["version"] == 0
    with pytest.raises(EngineError, match="BrokenWeights.*install a version before resuming"):
        second.call("tensorhub_guard")

    # The next install repairs it, with the same version.
    assert fetch(second, 1)["state"] == "ready"
    assert second.call("tensorhub_poll")["broken"] is not None
    assert install(second, 1)["installed"]
    second.call("tensorhub_guard")
    assert second.call("tensorhub_digests")["runtime"] == new
    assert second.generate() == expected

    # Whoever resumes a broken engine all the same gets an error and no token. Without the guard he gets some.
    with trainer(hub, "trainer-2") as publisher:
        publisher.publish(2, checkpoint(models("qwen2-tied", 3)))
        update(first, 2)
    fetch(second, 2)
    second.call("tensorhub_test_fail_copy", 4)
    assert install(second, 2)["broken"] is not None
    second.ask("resume")
    with pytest.raises(EngineError, match="BrokenWeights.*install a version before resuming"):
        second.generate()
    second.call("tensorhub_test_unhook", "execute_model")
    assert second.generate() not in (expected, first.generate())


@pytest.mark.parametrize("verify", [True, False])
def test_a_copy_that_forgets_a_tensor_is_noticed(verify: bool, pair: Any) -> None:
    first, second = pair(verify=verify)
    fetch(second, 1)
    second.call("tensorhub_test_forget", "model.norm.weight")
    assert install(second, 1)["installed"]
    wait_until(lambda: not second.call("tensorhub_poll")["serving"], "verified")
    assert (second.call("tensorhub_poll")["state"] == "broken") == verify
    assert second.call("tensorhub_digests")["runtime"] != first.call("tensorhub_digests")["runtime"]


def test_an_incomplete_checkpoint_is_refused_by_name(models: Any, hub: Server) -> None:
    with engines(models("qwen2-tied", 1)) as (engine,), trainer(hub) as publisher:
        connect(engine, hub, "rollout-0")
        weights = checkpoint(models("qwen2-tied", 2))
        for version, left_out in enumerate(("model.layers.1.self_attn.k_proj.weight", "model.norm.weight"), start=1):
            publisher.publish(version, {name: t for name, t in weights.items() if name != left_out})
            assert fetch(engine, version)["state"] == "ready"
            parameter = left_out.replace("k_proj", "qkv_proj")
            with pytest.raises(EngineError, match=f"VersionRefused: .* {parameter} "):
                engine.call("tensorhub_prepare_install", TIMEOUT_S)
            result = engine.call("tensorhub_install", version, TIMEOUT_S)
            assert not result["installed"] and result["broken"] is None
        publisher.publish(3, weights)
        update(engine, 3)


def test_an_engine_that_was_not_started_for_the_store_is_refused(models: Any, hub: Server) -> None:
    """Its layers compute with packed copies: every update would be lost, silently."""
    with (
        engines(models("qwen2-untied", 1), extension="vllm_faults.LateExtension") as (engine,),
        pytest.raises(EngineError, match="UsageError: .* computes with a packed copy of its weights"),
    ):
        connect(engine, hub, "rollout-0")
    with engines(models("qwen2-untied", 1)) as (engine,):
        with pytest.raises(EngineError, match="UsageError: not connected"):
            engine.call("tensorhub_poll")
        with pytest.raises(EngineError, match="HubUnreachable"):
            engine.call(
                "tensorhub_connect",
                {
                    "hub": "tcp://127.0.0.1:9",
                    "run": "r",
                    "model": "m",
                    "replica": "p",
                    "connect_timeout_s": 0.2,
                },
            )
        assert connect(engine, hub, "rollout-0")["shard_count"] == 1
        assert connect(engine, hub, "rollout-0")["shard_count"] == 1  # again, as after a restart of the server


def test_others_that_change_the_weights_do_not_change_what_is_served(models: Any, hub: Server) -> None:
    new = models("qwen2-tied", 2)
    with engines(models("qwen2-tied", 1)) as (engine,), trainer(hub) as publisher:
        layout = connect(engine, hub, "rollout-0", serve_from="live")["layout"]
        publisher.publish(1, checkpoint(new))
        update(engine, 1)
        served = engine.call("tensorhub_digests")["runtime"]
        with Client(hub.address, run="test", model="actor", replica="reader") as reader:
            assert layout in reader.versions()[-1].layouts
            engine.ask("reload_stock", str(models("qwen2-tied", 3)))
            assert engine.call("tensorhub_digests")["runtime"] != served
            assert engine.call("tensorhub_poll")["version"] == 0
            # Version 1 is retained: its last copy in this layout was moved away before the weights changed.
            held = reader.versions()[-1].layouts.get(layout)
            if held:
                copy = reader.fetch(1, (layout,), timeout_s=TIMEOUT_S)
                assert {name: digest(tensor) for name, tensor in copy.tensors().items()} == served


@pytest.mark.smoke
@pytest.mark.timeout(240)  # vLLM starts processes that import it anew
def test_two_workers_of_an_engine_update_both_or_none(models: Any, hub: Server) -> None:
    """Tensor parallel, with vLLM's own processes: one shard each, one version, one layout."""
    old, new = checkpoint(models("qwen2-tied", 1)), checkpoint(models("qwen2-tied", 2))
    two_cores = {"extension": "vllm_faults.FaultyExtension", "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}}
    with Engine(models("qwen2-tied", 1), workers=2, **two_cores) as engine:
        config = {"hub": hub.address, "run": "test", "model": "actor", "replica": "rollout-0"}
        places = engine.ask("rpc", "tensorhub_connect", (config,))
        assert [place["shard"] for place in places] == [0, 1]
        assert len({place["layout"] for place in places}) == 1
        started_with = engine.ask("rpc", "tensorhub_digests", ())
        assert started_with[0]["runtime"] != started_with[1]["runtime"]
        answers = engine.generate()
        with trainer(hub) as publisher:
            publisher.publish(1, new)
            fetch_all(engine, 1)
            engine.ask("rpc", "tensorhub_test_discard_on", (1,))
            results = engine.ask("rpc", "tensorhub_install", (1, TIMEOUT_S))
            assert [result["installed"] for result in results] == [False, False]
            assert [result["broken"] for result in results] == [None, None]
            assert engine.ask("rpc", "tensorhub_digests", ()) == started_with
            assert engine.generate() == answers

            fetch_all(engine, 1)
            results = engine.ask("rpc", "tensorhub_install", (1, TIMEOUT_S))
            assert [result["installed"] for result in results] == [True, True]
            assert engine.generate() != answers

            # One that fails half way breaks both: the other one's new weights are no use without its.
            publisher.publish(2, old)
            fetch_all(engine, 2)
            engine.ask("rpc", "tensorhub_test_fail_conversion_on", (1,))
            results = engine.ask("rpc", "tensorhub_install", (2, TIMEOUT_S))
            assert [result["installed"] for result in results] == [False, False]
            assert all(result["broken"] for result in results)
            assert "another worker" in results[0]["error"] and "injected" in results[1]["error"]
            fetch_all(engine, 2)
            results = engine.ask("rpc", "tensorhub_install", (2, TIMEOUT_S))
            assert [result["installed"] for result in results] == [True, True]
            for before, after in zip(started_with, engine.ask("rpc", "tensorhub_digests", ()), strict=True):
                assert before["runtime"] == after["runtime"]
            assert engine.generate() == answers


def fetch_all(engine: Engine, version: int) -> None:
    engine.ask("rpc", "tensorhub_start_fetch", (version, TIMEOUT_S))

    def states() -> set[str]:
        return {polled["state"] for polled in engine.ask("rpc", "tensorhub_poll", ())}

    wait_until(lambda: states() == {"ready"}, "ready on all workers")
