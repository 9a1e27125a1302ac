"""Streaming-input sessions of a real engine: they stay open across updates, and go on under the new weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("transformers")

from vllm_engines import checkpoint, make_model

from tensorhub_plugins.core import Client, Server

pytestmark = [pytest.mark.heavy, pytest.mark.long, pytest.mark.timeout(600)]

FIRST, SECOND, THIRD = [5, 6, 7, 8, 9, 10, 11, 12] * 5, [100, 101, 102], [300, 7, 21, 44]
TOKENS = 4
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [make_model("llama", folder / str(seed), seed) for seed in (1, 2)]


class Session:
    """One request whose inputs come one by one."""

    def __init__(self, engine: Any, name: str) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        greedy = {"temperature": 0.0, "ignore_eos": True, "max_tokens": TOKENS, "output_kind": RequestOutputKind.DELTA}
        self._inputs: asyncio.Queue[list[int] | None] = asyncio.Queue()
        self._answers = engine.generate(self._stream(), SamplingParams(**greedy), name)

    async def _stream(self) -> AsyncIterator[Any]:
        from vllm.engine.protocol import StreamingInput

        while (prompt := await self._inputs.get()) is not None:
            yield StreamingInput(prompt={"prompt_token_ids": list(prompt)})  # vLLM adds to it

    async def ask(self, prompt: list[int]) -> list[int]:
        self._inputs.put_nowait(prompt)
        got: list[int] = []
        while len(got) < TOKENS:
            answer = await asyncio.wait_for(anext(self._answers), TIMEOUT_S)
            got += answer.outputs[0].token_ids
        return got

    async def close(self) -> None:
        self._inputs.put_nowait(None)
        async for _ in self._answers:
            pass


@pytest.mark.parametrize("way", ["follow", "update_weights"])
def test_an_open_session_neither_keeps_an_engine_from_an_update_nor_its_kv(
    way: str, models: list[Path], hub: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Following stood still for as long as a session was open; the other way raised, with new weights and old KV."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    with Client(hub.address, run="r", model="actor", replica="trainer") as trainer:
        trainer.publish(1, checkpoint(models[0]))
        told = asyncio.run(
            _story(way, models, hub, lambda version: trainer.publish(version, checkpoint(models[version % 2 == 0])))
        )
    prompts, expected = [FIRST, SECOND, THIRD], []
    for model, before in ((models[0], []), (models[1], told[:1]), (models[0], told[:2])):
        # vLLM drops the last token of an answer, which was sampled and never computed.
        whole = [token for prompt, answer in zip(prompts, before, strict=False) for token in (*prompt, *answer[:-1])]
        asked = [*whole, *prompts[len(before)]]
        expected.append(asyncio.run(_fresh(model, asked)))
    assert told == expected
    assert expected[1] != asyncio.run(_fresh(models[0], [*FIRST, *told[0][:-1], *SECOND])), "control: they differ"


async def _fresh(model: Path, prompt: list[int]) -> list[int]:
    """What an engine answers that has never had other weights."""
    engine = _engine(model)
    try:
        return await Session(engine, "fresh").ask(prompt)
    finally:
        engine.shutdown()


def _engine(model: Path, **options: Any) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    settings: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 64 << 20,
    }
    return AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(model), **{**settings, **options}))


async def _story(way: str, models: list[Path], hub: Server, publish: Callable[[int], Any]) -> list[list[int]]:
    """What a session answers under versions 1, 2 and, after 3 and 4 that nobody has used, 5."""
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    extra = {"hub": hub.address, "run": "r", "model": "actor", "replica": "engine"}
    loader: dict[str, Any] = {"load_format": "tensorhub", "model_loader_extra_config": extra}
    if way == "follow":
        extra["follow"] = "now"
    else:
        loader["weight_transfer_config"] = {"backend": "tensorhub"}
    engine = _engine(models[0], **loader)

    async def update(version: int) -> None:
        publish(version)
        if way != "follow":
            await engine.start_weight_update()
            await engine.update_weights(WeightTransferUpdateRequest(update_info={"version": version}))
            await engine.finish_weight_update(str(version))
        async with asyncio.timeout(TIMEOUT_S):
            while await engine.get_weight_version() != str(version):
                await asyncio.sleep(0.05)

    try:
        session, other = Session(engine, "one"), Session(engine, "two")
        told = [await session.ask(FIRST)]
        assert await other.ask(FIRST) == told[0]
        await update(2)
        told.append(await session.ask(SECOND))
        await update(3)
        await update(4)
        await update(5)
        told.append(await session.ask(THIRD))
        await session.close()
        await other.close()  # of which nothing has been computed since version 1
        return told
    finally:
        engine.shutdown()
