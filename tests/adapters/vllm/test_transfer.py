"""vLLM's own weight transfer drives our pulls; engines that follow by themselves. Weights and caches are one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("transformers")

from vllm_engines import PROMPTS, Engine, EngineError, checkpoint, wait_until

from tensorhub_plugins.core import Client, Server, UsageError
from tensorhub_plugins.vllm import names

pytestmark = pytest.mark.heavy

TIMEOUT_S = 30.0
KIND = "qwen2-tied"
CACHED = [[(7 * k) % 400 + 10 for k in range(130)]]  # four blocks of the prefix cache, and a bit
BLOCKS = {"block_size": 32, "enable_prefix_caching": True}
LABELLED = str(names.installed_version()) >= "0.27"  # older ones have no weight_version


@pytest.fixture(scope="module")
def answers(models: Any) -> Callable[[int], tuple[list[list[int]], list[list[int]], dict[str, str]]]:
    """What a fresh engine says to PROMPTS and CACHED with the weights of this seed, and its digests."""
    known: dict[int, Any] = {}

    def get(seed: int) -> Any:
        if seed not in known:
            extra = {"model_loader_extra_config": {"disk": "only"}, **BLOCKS}
            with Engine(models(KIND, seed), extension=None, load_format="tensorhub", **extra) as fresh:
                known[seed] = fresh.generate(), fresh.generate(CACHED)
        return known[seed]

    return get


@pytest.mark.smoke
def test_a_version_is_a_whole_number(weight_transfer: None) -> None:
    from tensorhub_plugins.vllm.weight_transfer import number_of

    for wrong in (1.7, "1.7", True, -1, None, "newest"):
        with pytest.raises(UsageError, match=re.escape(f"version is {wrong!r}: name a whole number, or 'latest'")):
            number_of(wrong)
    assert [number_of(version) for version in (7, "7")] == [7, 7]


@pytest.mark.smoke
@pytest.mark.parametrize("given", [{}, {"timeout_s": 5.0}])
def test_an_update_takes_as_long_as_it_advances_unless_it_may_not(weight_transfer: None, given: Any) -> None:
    from tensorhub_plugins.vllm.weight_transfer import TensorHubWeightTransferEngine, UpdateInfo

    asked: list[Any] = []

    class Updater:
        def resolve(self, timeout_s: float) -> int:
            asked.append(timeout_s)
            return 7

        def poll(self) -> dict[str, Any]:
            return {"version": 6, "broken": None}

        def update(self, version: int, timeout_s: float | None) -> dict[str, Any]:
            asked.append(timeout_s)
            return {"installed": True}

    engine = object.__new__(TensorHubWeightTransferEngine)
    engine.model = SimpleNamespace(tensorhub_updater=Updater())
    engine.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1))
    engine.receive_weights(UpdateInfo(**given))
    assert asked == [given.get("timeout_s", 60.0), given.get("timeout_s")]


def client(hub: Server, name: str) -> Client:
    return Client(hub.address, run="default", model="actor", replica=name)


def start(model: Path, hub: Server, extra: dict[str, Any], **options: Any) -> Engine:
    config = {"hub": hub.address, "model": "actor", **extra}
    settings = {**BLOCKS, "load_format": "tensorhub", "model_loader_extra_config": config, **options}
    return Engine(model, extension=None, own_core=True, **settings)


@pytest.fixture
def engine(weight_transfer: None, models: Any, hub: Server) -> Iterator[Engine]:
    """It was started from disk, knows no hub, and takes weights by vLLM's own calls."""
    options = {"load_format": "tensorhub", "model_loader_extra_config": {"disk": "only"}, **BLOCKS}
    with Engine(
        models(KIND, 1), extension=None, own_core=True, weight_transfer_config={"backend": "tensorhub"}, **options
    ) as started:
        yield started


def progress(engine: Engine) -> set[int]:
    """Tokens of the requests that were submitted; the engine steps by itself."""
    return set(engine.ask("progress").values())


def update(engine: Engine, version: int, **info: Any) -> None:
    engine.ask("own", "start_weight_update", ())
    engine.ask("own", "update_weights", ({"update_info": {"version": version, **info}},))
    engine.ask("own", "finish_weight_update", (str(version),))


@pytest.mark.smoke
def test_vllms_own_round_drives_the_pull(engine: Engine, models: Any, answers: Any, hub: Server) -> None:
    old, new = answers(1), answers(2)
    assert engine.generate() == old[0] and engine.generate(CACHED) == old[1] != new[1]
    with pytest.raises(EngineError, match="call init_weight_transfer_engine first"):
        engine.ask("own", "start_weight_update", ())
    init = {"init_info": {"hub": hub.address, "model": "actor"}}
    with pytest.raises(EngineError, match="has no option 'modell': did you mean 'model'"):
        engine.ask("own", "init_weight_transfer_engine", ({"init_info": {"modell": "actor"}},))
    engine.ask("own", "init_weight_transfer_engine", (init,))
    engine.ask("own", "init_weight_transfer_engine", (init,))  # again, as a trainer that was started anew does
    with client(hub, "trainer") as trainer:
        trainer.publish(1, checkpoint(models(KIND, 2)))
        # Nobody has paused it and nobody resets its prefix cache, which holds the whole prompt.
        update(engine, 1)
        assert engine.ask("own", "get_weight_version", ()) == "1"
        assert engine.generate(CACHED) == new[1]
        assert engine.generate() == new[0]

        # A failed update ends the round, and the old version goes on.
        with pytest.raises(EngineError, match="version=7"):
            update(engine, 7, timeout_s=0.2)
        assert engine.ask("own", "get_weight_version", ()) == "1" and engine.generate() == new[0]

        # Requests that are running are kept, and end under the new weights.
        trainer.publish(2, checkpoint(models(KIND, 1)))
        engine.ask("submit", "long", PROMPTS, 200)
        wait_until(lambda: min(progress(engine)) >= 20, "they run")
        update(engine, 2)
        wait_until(lambda: progress(engine) == {200}, "they end")
        assert engine.generate() == old[0] and engine.generate(CACHED) == old[1]


def test_without_us_a_stale_prefix_cache_answers(models: Any, answers: Any, bare: Any, hub: Server) -> None:
    """The negative control of the test above: the same weights, swapped behind the scheduler's back."""
    with client(hub, "trainer") as trainer:
        trainer.publish(1, checkpoint(models(KIND, 1)))
        with start(bare(KIND), hub, {}) as engine:
            assert engine.generate(CACHED) == answers(1)[1]
            trainer.publish(2, checkpoint(models(KIND, 2)))
            engine.call("tensorhub_start_fetch", 2, TIMEOUT_S)
            wait_until(lambda: engine.call("tensorhub_poll")["state"] == "ready", "ready")
            assert engine.call("tensorhub_install", 2, TIMEOUT_S)["installed"]
            assert engine.generate() == answers(2)[0]
            assert engine.generate(CACHED) != answers(2)[1]


@pytest.mark.usefixtures("weight_transfer")
def test_an_update_that_fails_half_way_is_not_resumed(models: Any, answers: Any, hub: Server, bare: Any) -> None:
    with client(hub, "trainer") as trainer:
        trainer.publish(1, checkpoint(models(KIND, 1)))
        options = {
            "worker_extension_cls": "vllm_faults.FaultyExtension",
            "weight_transfer_config": {"backend": "tensorhub"},
        }
        with start(bare(KIND), hub, {}, **options) as engine:
            trainer.publish(2, checkpoint(models(KIND, 2)))
            engine.ask("core", "pause_scheduler", ("keep",))
            engine.call("tensorhub_test_fail_conversion_on", 0)
            with pytest.raises(EngineError, match="injected"):
                update(engine, 2)
            with pytest.raises(EngineError, match="install a version before resuming"):
                engine.ask("core", "resume_scheduler", ())
            update(engine, 2)
            engine.ask("core", "resume_scheduler", ())
            assert engine.generate() == answers(2)[0]


@pytest.mark.parametrize("when", ["now", pytest.param("idle", marks=pytest.mark.smoke)])
def test_an_engine_follows_by_itself(when: str, models: Any, answers: Any, bare: Any, hub: Server) -> None:
    with client(hub, "trainer") as trainer:
        trainer.publish(1, checkpoint(models(KIND, 1)))
        with start(bare(KIND), hub, {"follow": when}) as engine:
            assert engine.generate(CACHED) == answers(1)[1]
            engine.ask("submit", "long", PROMPTS, 200)
            wait_until(lambda: min(progress(engine)) >= 20, "they run")
            trainer.publish(2, checkpoint(models(KIND, 2)))

            def version() -> int:
                return int(engine.call("tensorhub_poll")["version"])

            wait_until(lambda: version() == 2, "switched")
            wait_until(lambda: progress(engine) == {200}, "they end")
            assert engine.generate(CACHED) == answers(2)[1]
            if LABELLED:
                assert engine.ask("own", "get_weight_version", ()) == "2"
            # Paused by somebody else, it stays as it is, and switches once it is resumed.
            engine.ask("core", "pause_scheduler", ("keep",))
            trainer.publish(3, checkpoint(models(KIND, 1)))
            with pytest.raises(AssertionError, match="switched"):
                wait_until(lambda: version() == 3, "switched", 2.5)
            engine.ask("core", "resume_scheduler", ())
            wait_until(lambda: version() == 3, "switched")
            assert engine.generate(CACHED) == answers(1)[1]
