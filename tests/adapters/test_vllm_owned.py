"""A real engine that its actor updates, as verl's and OpenRLHF's do: its core knows of every token which version made
it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("transformers")
pytest.importorskip("ray", reason="an actor's questions to vLLM go through its lifeline")

from vllm_engines import checkpoint, make_model

from tensorhub_plugins.core import Client, Server
from tensorhub_plugins.vllm.engine.follower import Follower
from tensorhub_plugins.vllm.engine.owned import OwnedEngine
from tensorhub_plugins.vllm.engine.spans import PREFIX
from tensorhub_plugins.vllm.ray.health import Lifeline

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]

REQUESTS, TOKENS, ALIKE = 48, 160, 4  # the last: tokens after a switch that are compared
STAGGERED = 3  # of so many requests each begins when the one before has had so many tokens


class Owner:
    """An actor that owns an engine."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.owned = engine, OwnedEngine(engine, Lifeline(engine, "r/0").rpc)
        self.came: dict[int, list[int]] = {}

    async def ask(self, number: int, prompt: list[int], tokens: int) -> tuple[list[int], Any]:
        from vllm import SamplingParams

        name = f"{PREFIX}{number:032x}"
        greedy = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=tokens, detokenize=False)
        async for answer in self.engine.generate({"prompt_token_ids": prompt}, greedy, name):
            self.came[number] = list(answer.outputs[0].token_ids)
        return self.came[number], await self.owned.spans(name, len(self.came[number]))


def test_every_token_has_the_version_that_it_came_from(
    tmp_path: Path, hub: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    models = [make_model("llama", tmp_path / str(seed), seed) for seed in (1, 2)]
    with Client(hub.address, run="r", model="actor", replica="trainer") as trainer:
        for version, model in enumerate(models, 1):
            trainer.publish(version, checkpoint(model))
        asyncio.run(_story(models[0], hub.address))


async def _story(model: Path, hub: str) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(model),
            worker_extension_cls="tensorhub_plugins.vllm.ray.health.OwnedWorkerExtension",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=256,
            max_num_seqs=REQUESTS,
            kv_cache_memory_bytes=256 << 20,
        )
    )
    try:
        owner = Owner(engine)
        await owner.owned.rpc("tensorhub_connect", {"hub": hub, "run": "r", "model": "actor", "replica": "r"}, None)
        assert (await owner.ask(1000, [7, 8], 2))[1] == ((0, 2),)  # of what it was started with
        follower = Follower(owner.owned, lambda *_, **__: 0, worker="r/0", timeout_s=60.0)
        await follower.update(1)
        asked = {number: [5 + number, 9, 3 + number] for number in range(REQUESTS)}
        answers = []
        for number, prompt in asked.items():
            answers.append(asyncio.create_task(owner.ask(number, prompt, TOKENS)))
            while number % STAGGERED == 0 and len(owner.came.get(number, ())) < 2:
                await asyncio.sleep(0.001)
        await follower.update(2)
        mixed = differing = 0
        for number, (tokens, spans) in enumerate(await asyncio.gather(*answers)):
            assert sum(count for _, count in spans) == TOKENS and {version for version, _ in spans} <= {1, 2}
            if [version for version, _ in spans] != [1, 2]:
                continue
            mixed += 1
            first = spans[0][1]
            again = await owner.ask(2000 + number, [*asked[number], *tokens[:first]], ALIKE)
            assert again == (tokens[first : first + ALIKE], ((2, ALIKE),)), number
            differing += (await owner.ask(3000 + number, [*asked[number], *tokens[: first - 1]], 1))[0] != [
                tokens[first - 1]
            ]
        assert mixed > REQUESTS // 2
        assert differing > mixed // 2, "control: the token before is of the version before"
    finally:
        engine.shutdown()
