"""A real engine that has an owner, as verl's and OpenRLHF's have: it follows when that says how, and its core knows of
every token which version made it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("transformers")
pytest.importorskip("ray", reason="an actor's questions to vLLM go through its lifeline")

from vllm_engines import checkpoint, make_model

from tensorhub_plugins.core import Client, Server, UsageError
from tensorhub_plugins.core.cli import fetch_status
from tensorhub_plugins.vllm.config import FollowConfig
from tensorhub_plugins.vllm.engine.spans import PREFIX
from tensorhub_plugins.vllm.ray.owned import OwnedEngine

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]

REQUESTS, TOKENS, ALIKE = 48, 160, 4  # the last: tokens after a switch that are compared
STAGGERED = 3  # of so many requests each begins when the one before has had so many tokens


class Owner:
    """An actor that owns an engine."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.owned = engine, OwnedEngine(engine, "r/0")
        self.came: dict[int, list[int]] = {}

    async def ask(self, number: int, prompt: list[int], tokens: int) -> tuple[list[int], Any]:
        from vllm import SamplingParams

        name = f"{PREFIX}{number:032x}"
        greedy = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=tokens, detokenize=False)
        async for answer in self.engine.generate({"prompt_token_ids": prompt}, greedy, name):
            self.came[number] = list(answer.outputs[0].token_ids)
        return self.came[number], await self.owned.spans(name, len(self.came[number]))

    async def ask_from(self, version: int) -> Any:
        """The versions of an answer to a prompt that begins with this one or a later one."""
        async with self.owned.answering(version):
            return (await self.ask(1001, [7, 8], 2))[1]


def test_every_token_has_the_version_that_it_came_from(
    tmp_path: Path, hub: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    models = [make_model("llama", tmp_path / str(seed), seed) for seed in (1, 2)]
    with Client(hub.address, run="r", model="actor", replica="trainer") as trainer:
        trainer.publish(1, checkpoint(models[0]))
        asyncio.run(_story(models[0], hub.address, trainer, checkpoint(models[1])))


def _workers(address: str) -> set[str]:
    return {worker["worker"] for model in fetch_status(address)["models"] for worker in model["workers"]}


async def _story(model: Path, hub: str, trainer: Client, second: Any) -> None:
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
        await owner.owned.warm_up()  # as a spare
        assert not engine.output_processor.has_unfinished_requests()
        assert (await owner.ask(1000, [7, 8], 2))[1] == ((0, 2),)  # of what it was started with
        joining = {"hub": hub, "run": "r", "model": "actor", "replica": "r"}
        with pytest.raises(UsageError, match="no option 'hubb'"):
            await owner.owned.follow({**joining, "hubb": hub}, None, FollowConfig())
        await owner.owned.follow(joining, None, FollowConfig(worker="r/0", timeout_s=60.0, catches_up=True))
        watching = asyncio.create_task(owner.owned.watch())
        await owner.owned.caught_up()
        assert owner.owned.status.version == 1 and set(owner.owned.status.last.sources) == {"trainer/0"}
        asked = {number: [5 + number, 9, 3 + number] for number in range(REQUESTS)}
        answers = []
        for number, prompt in asked.items():
            answers.append(asyncio.create_task(owner.ask(number, prompt, TOKENS)))
            while number % STAGGERED == 0 and len(owner.came.get(number, ())) < 2:
                await asyncio.sleep(0.001)
        assert await owner.owned.hold(0) == 1
        await asyncio.to_thread(trainer.publish, 2, second)
        early = asyncio.create_task(owner.ask_from(2))
        await asyncio.sleep(0)
        assert owner.owned.status.version == 1 and not early.done()
        await owner.owned.release()
        assert await early == ((2, 2),)
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
        assert "r/0" in _workers(hub)
        watching.cancel()
        await owner.owned.leave()
        assert "r/0" not in _workers(hub)
    finally:
        engine.shutdown()
