"""OpenRLHF's generator over real Ray actors: an engine that hangs and is then killed holds up nobody."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("openrlhf", reason="needs OpenRLHF's environment (make test-openrlhf)")
torch = pytest.importorskip("torch")

import ray  # noqa: E402

from tensorhub_plugins.core import start_server  # noqa: E402
from tensorhub_plugins.openrlhf import generation  # noqa: E402
from tensorhub_plugins.openrlhf.config import Options  # noqa: E402

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
    with start_server() as server:
        generator = generation.SamplesGenerator(
            options=Options(hub=server.address, run="r", prompts_per_engine=per_engine),
            is_partial=True,
            is_sync=False,
            strategy=SimpleNamespace(args=arguments()),
            prompts_dataloader=[(["d"], [f"p{i}"], [""], [None]) for i in range(PROMPTS)],
            eval_dataloader=None,
            tokenizer="tokenizer",
            vllm_engines=[quick, hanging],
        )
        killer.start()
        samples, *_ = generator.generate_samples()
        killer.join()
        generator.reporter.stop()
        generator.target.client.close()
    assert Counter(sample.prompts[0] for sample in samples) == {f"p{i}": SAMPLES for i in range(PROMPTS)}
    assert len(seen["hanging"]) == PROMPTS - elsewhere
    assert Counter(ray.get(quick.wait_for.remote(PROMPTS))) == {f"p{i}": 1 for i in range(PROMPTS)}
    assert [member.answers for member in generator.engines.members] == [True, False]


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
