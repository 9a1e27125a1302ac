"""An engine whose weights came from a disk tries how to install updates before it is ready, not in its first pause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("transformers")

from vllm_engines import Engine, checkpoint, wait_until

from tensorhub_plugins.core import Client, Server

pytestmark = pytest.mark.heavy

TIMEOUT_S = 60.0
ENGINES = ["joined later", "a follower", "vLLM's weight transfer"]  # as OpenRLHF's; from a disk; by init_info


@pytest.fixture(scope="module")
def answers(models: Any) -> Callable[[str, int], Any]:
    """What an engine that has tried nothing answers with these weights."""
    known: dict[tuple[str, int], Any] = {}

    def get(kind: str, seed: int) -> Any:
        if (kind, seed) not in known:
            with Engine(models(kind, seed), extension="vllm_passes.WithoutTrial") as engine:
                assert engine.ask("rpc", "tensorhub_test_tried", ()) == [False]
                known[kind, seed] = engine.generate()
        return known[kind, seed]

    return get


def start(how: str, folder: Any, hub: Server, **options: Any) -> Engine:
    options = {"extension": "vllm_passes.Counts", **options}
    if how == "joined later":
        return Engine(folder, **options)
    extra = {"disk": "only"}
    options |= {"load_format": "tensorhub", "model_loader_extra_config": extra}
    if how == "a follower":
        extra |= {"hub": hub.address, "model": "actor"}
    else:
        options["weight_transfer_config"] = {"backend": "tensorhub"}
    return Engine(folder, **options)


def first_update(how: str, engine: Engine, hub: Server, version: int = 1) -> list[float]:
    """Install a version, the first one, in an engine that was started so; return the passes of each worker's pause."""
    joining = {"hub": hub.address, "run": "default", "model": "actor"}
    if how == "vLLM's weight transfer":
        engine.ask("own", "init_weight_transfer_engine", ({"init_info": joining},))
        engine.ask("rpc", "start_weight_update", ())
        found = engine.ask("rpc", "tensorhub_test_counted", ("update_weights", {"version": version}))
        return [passes for _, passes in found]
    if how == "joined later":
        engine.ask("rpc", "tensorhub_connect", ({**joining, "replica": "rollout"},))
    engine.ask("rpc", "tensorhub_start_fetch", (version, TIMEOUT_S))
    polls: list[Any] = []

    def ready() -> bool:
        polls[:] = engine.ask("rpc", "tensorhub_poll", ())
        return all(polled["state"] != "fetching" for polled in polls)

    wait_until(ready, "the version has come", TIMEOUT_S)
    engine.ask("rpc", "tensorhub_prepare_install", (TIMEOUT_S,))
    found = engine.ask("rpc", "tensorhub_test_counted", ("tensorhub_install", version, TIMEOUT_S))
    assert all(result["installed"] for result, _ in found), (found, polls)
    return [passes for _, passes in found]


@pytest.mark.parametrize("kind", ["qwen2-tied", "llama", "mixtral"])
@pytest.mark.parametrize("how", ENGINES)
def test_the_first_pause_has_no_trial(
    how: str, kind: str, models: Any, answers: Any, hub: Server, weight_transfer: None
) -> None:
    with Client(hub.address, run="default", model="actor", replica="trainer") as trainer:
        trainer.publish(1, checkpoint(models(kind, 2)))
        with start(how, models(kind, 1), hub) as engine:
            assert engine.ask("rpc", "tensorhub_test_tried", ()) == [True]
            assert engine.generate() == answers(kind, 1)
            (passes,) = first_update(how, engine, hub)
            assert passes < 2.0, passes  # experts that the CPU packs are loaded elsewhere, and copied
            assert engine.generate() == answers(kind, 2)


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_the_control_without_a_trial_at_the_start_it_is_in_the_pause(
    kind: str, models: Any, answers: Any, hub: Server
) -> None:
    with Client(hub.address, run="default", model="actor", replica="trainer") as trainer:
        trainer.publish(1, checkpoint(models(kind, 2)))
        with start("joined later", models(kind, 1), hub, extension="vllm_passes.WithoutTrial") as engine:
            (passes,) = first_update("joined later", engine, hub)
            assert passes > 2.5, passes
            assert engine.generate() == answers(kind, 2)


@pytest.mark.parametrize("fault", ["FailsHalfWay", "ChangesABit"])
def test_a_trial_that_fails_costs_no_weight_and_is_made_again(
    fault: str, models: Any, answers: Any, hub: Server
) -> None:
    with Client(hub.address, run="default", model="actor", replica="trainer") as trainer:
        trainer.publish(1, checkpoint(models("llama", 2)))
        with start("joined later", models("llama", 1), hub, extension=f"vllm_passes.{fault}") as engine:
            assert engine.ask("rpc", "tensorhub_test_tried", ()) == [False]
            assert engine.generate() == answers("llama", 1)
            (passes,) = first_update("joined later", engine, hub)
            assert passes > 2.5, passes
            assert engine.generate() == answers("llama", 2)


@pytest.mark.timeout(240)  # vLLM starts processes that import it anew
def test_workers_agree_on_a_trial_that_failed_in_one(models: Any, hub: Server) -> None:
    """The version is what they have read, so that its answers are those before: two workers round unlike one."""
    options: dict[str, Any] = {"workers": 2, "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}}
    with Client(hub.address, run="default", model="actor", replica="trainer") as trainer:
        trainer.publish(1, checkpoint(models("llama", 1)))
        with start("joined later", models("llama", 1), hub, extension="vllm_passes.FailsHalfWay", **options) as engine:
            assert engine.ask("rpc", "tensorhub_test_tried", ()) == [False, False]
            before = engine.generate()
            assert min(first_update("joined later", engine, hub)) > 2.5
            assert engine.generate() == before


def test_a_version_unlike_the_files_is_tried_in_its_pause(models: Any, answers: Any, hub: Server) -> None:
    with Client(hub.address, run="default", model="actor", replica="trainer") as trainer:
        trainer.publish(1, {name: tensor.float() for name, tensor in checkpoint(models("llama", 2)).items()})
        with start("joined later", models("llama", 1), hub) as engine:
            (passes,) = first_update("joined later", engine, hub)
            assert passes > 2.5, passes
            assert engine.generate() == answers("llama", 2)


def test_who_has_no_files_tries_nothing(models: Any, hub: Server) -> None:
    with start("joined later", models("llama", 1), hub, load_format="dummy") as engine:
        assert engine.ask("rpc", "tensorhub_test_tried", ()) == [False]
