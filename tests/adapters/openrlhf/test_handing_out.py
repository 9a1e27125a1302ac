"""OpenRLHF's generator over real Ray actors: an engine that hangs and is then killed holds up nobody, one whose agent
blocks it answers heartbeats all the same, and an agent whose own actor has died ends the run with that."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("openrlhf", reason="needs OpenRLHF's environment (make test-openrlhf)")
torch = pytest.importorskip("torch")

import ray  # noqa: E402
from hub_limits import AT_ONCE  # noqa: E402
from ray.exceptions import RayTaskError  # noqa: E402

from tensorhub_plugins.core import start_server  # noqa: E402
from tensorhub_plugins.openrlhf import engine, generation  # noqa: E402
from tensorhub_plugins.openrlhf.config import Options  # noqa: E402
from tensorhub_plugins.vllm.ray import health, owned  # noqa: E402

PROMPTS = 24
SAMPLES = 2
PER_ENGINE = 3

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300)]


def engine_class() -> Any:
    """Made in a function: Ray then sends it by value."""

    class Engine:
        """What the generator asks of an engine. One that hangs answers nothing, and counts what it was asked."""

        def __init__(self, hangs: bool) -> None:
            self.hangs = hangs
            self.asked: list[str] = []
            self.changed = asyncio.Condition()

        async def tensorhub_heartbeat(self) -> dict[str, Any]:
            return {"version": 0, "silent_s": 0.0, "requests_max": 256}

        async def generate_responses(
            self, prompt: str, num_samples: int, hf_tokenizer: str, **_: Any
        ) -> list[dict[str, Any]]:
            assert hf_tokenizer == "tokenizer"
            async with self.changed:
                self.asked.append(prompt)
                self.changed.notify_all()
            if self.hangs:
                await asyncio.Event().wait()
            sample = {
                "prompt": prompt,
                "label": "",
                "observation_tokens": [1, 2, 3],
                "action_ranges": [(1, 3)],
                "rollout_log_probs": None,
                "reward": 0.5,
                "scores": 0.5,
                "extra_logs": {},
            }
            return [sample] * num_samples

        async def wait_for(self, count: int) -> list[str]:
            async with self.changed:
                await self.changed.wait_for(lambda: len(self.asked) >= count)
                return list(self.asked)

    return Engine


@pytest.fixture
def cluster() -> Any:
    ray.init(address="local", num_cpus=4, include_dashboard=False, object_store_memory=100_000_000, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.parametrize("per_engine", [PER_ENGINE, None])
def test_what_an_engine_was_not_given_it_cannot_hold_up(cluster: None, per_engine: int | None) -> None:
    """None is the control: half of the batch hangs with it."""
    make = ray.remote(engine_class()).options(num_cpus=0, max_concurrency=1000).remote
    quick, hanging = make(hangs=False), make(hangs=True)
    # Of the others it is asked for all but those that hang; then the hanging one is killed.
    elsewhere = PROMPTS - (PER_ENGINE if per_engine else PROMPTS // 2)
    seen: dict[str, list[str]] = {}

    def kill_when_the_rest_is_done() -> None:
        seen["quick"] = ray.get(quick.wait_for.remote(elsewhere))
        seen["hanging"] = ray.get(hanging.wait_for.remote(PROMPTS - elsewhere))
        ray.kill(hanging)

    killer = threading.Thread(target=kill_when_the_rest_is_done)
    with start_server(limits=AT_ONCE) as server:
        generator = generator_of(server.address, [quick, hanging], per_engine)
        killer.start()
        samples, *_ = generator.generate_samples()
        killer.join()
        generator.reporter.stop()
        generator.target.client.close()
    assert Counter(sample.prompts[0] for sample in samples) == {f"p{i}": SAMPLES for i in range(PROMPTS)}
    assert len(seen["hanging"]) == PROMPTS - elsewhere
    assert Counter(ray.get(quick.wait_for.remote(PROMPTS))) == {f"p{i}": 1 for i in range(PROMPTS)}
    assert [member.answers for member in generator.engines.members] == [True, False]


def asking_class() -> Any:
    """Made in a function: Ray then sends it by value."""

    class Asking:
        """An engine whose agent asks an actor of its own, as one that keeps its environments there."""

        def __init__(self, environment: Any) -> None:
            self.environment, self.asked = environment, 0

        async def tensorhub_heartbeat(self) -> dict[str, Any]:
            return {"version": 0, "silent_s": 0.0, "requests_max": 256}

        async def generate_responses(self, **_: Any) -> list[dict[str, Any]]:
            self.asked += 1
            await self.environment.step.remote()
            raise AssertionError("it is dead")

        async def count(self) -> int:
            return self.asked

    return Asking


def environment_class() -> Any:
    """Made in a function: Ray then sends it by value."""

    class Environment:
        def step(self) -> None:
            os._exit(1)

    return Environment


def test_an_actor_of_the_agents_that_died_is_no_lost_engine(cluster: None) -> None:
    """OpenRLHF's own run ends with that. Ours said that engines were lost, and asked each prompt twenty times more."""
    environment = ray.remote(environment_class()).options(num_cpus=0).remote()
    one = ray.remote(asking_class()).options(num_cpus=0, max_concurrency=1000).remote(environment)
    with start_server(limits=AT_ONCE) as server:
        generator = generator_of(server.address, [one], 1)
        try:
            with pytest.raises(RayTaskError, match=r"(?s)generate_responses.*Environment"):
                generator.generate_samples()
        finally:
            generator.reporter.stop()
            generator.target.client.close()
    assert ray.get(one.count.remote()) == 1
    assert [member.answers for member in generator.engines.members] == [True]


def generator_of(hub: str, engines: list[Any], per_engine: int | None) -> generation.SamplesGenerator:
    return generation.SamplesGenerator(
        options=Options(hub=hub, run="r", prompts_per_engine=per_engine),
        is_partial=True,
        is_sync=False,
        strategy=SimpleNamespace(args=arguments()),
        prompts_dataloader=[(["d"], [f"p{i}"], [""], [None]) for i in range(PROMPTS)],
        eval_dataloader=None,
        tokenizer="tokenizer",
        vllm_engines=engines,
    )


def arguments() -> SimpleNamespace:
    return SimpleNamespace(
        rollout=SimpleNamespace(n_samples_per_prompt=SAMPLES, batch_size=PROMPTS, vllm_generate_batch_size=None),
        algo=SimpleNamespace(
            advantage=SimpleNamespace(is_correction_level="off"),
            dynamic_filtering_enable=False,
            dynamic_filtering_range=(0.0, 1.0),
        ),
        vllm=SimpleNamespace(enable_sleep=False),
    )


BLOCKS_S = 12.0  # longer than a loop may take from one look to the next
SUPPORT = Path(__file__).parents[2] / "support"


def blocked_class() -> Any:
    """Made in a function: Ray then sends it by value."""

    class Blocked(engine.TensorHubEngine):
        """An engine whose agent awaits nothing for a while."""

        async def __init__(self) -> None:
            from openrlhf_fakes import make_engine

            self.__dict__ |= make_engine(None, is_partial=True).__dict__
            self.llm.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=8))
            self.owned.keep()
            self.told: list[str] = []
            health.STILL_TOLD_S = 6.0
            health.logger = SimpleNamespace(warning=lambda text, *given: self.told.append(text % given))  # type: ignore[assignment]

        async def generate_responses(self, **_: Any) -> Any:
            time.sleep(BLOCKS_S)
            return self.told

    return owned.actor_class(Blocked)


def test_an_agent_that_never_awaits_keeps_no_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenRLHF's own engines wait for such an agent; ours were taken for hanging, and ended with all that they had."""
    monkeypatch.setenv("PYTHONPATH", f"{SUPPORT}:{os.environ.get('PYTHONPATH', '')}")
    ray.init(address="local", num_cpus=4, include_dashboard=False, object_store_memory=100_000_000, log_to_driver=False)
    try:
        one = blocked_class().options(num_cpus=0, max_concurrency=1000).remote()
        ray.get(one.tensorhub_heartbeat.remote())
        answer, beats = one.generate_responses.remote(), 0
        while not ray.wait([answer], timeout=0.5)[0]:
            assert ray.get(one.tensorhub_heartbeat.remote(), timeout=BLOCKS_S / 2)["silent_s"] < 1.0
            beats += 1
        assert beats > BLOCKS_S / 2
        (told,) = ray.get(answer)
        assert "rollout-0/0: the agent, or what else runs in its actor, has awaited nothing for 6 s" in told
    finally:
        ray.shutdown()
