"""A real `vllm serve` that follows, asked from outside: the version of every token is right, also across a switch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")
pytest.importorskip("transformers")
pytest.importorskip("requests")
pytest.importorskip("ray")

from transformers import AutoConfig
from vllm_engines import checkpoint
from vllm_servers import make_two_models, serving

from recipes.sweep import kill_group
from tensorhub_plugins.core import Client, Server, UsageError
from tensorhub_plugins.core.options import TrainingOptions
from tensorhub_plugins.vllm.model_facts import facts_of
from tensorhub_plugins.vllm.ray.external import Expected, External, ServerLost

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900)]

PROMPT = [10, 11, 12, 13, 14, 15]
LONG, ALIKE = 1500, 16  # tokens of an answer; and of those after a switch that are compared
GREEDY = {"temperature": 0, "ignore_eos": True, "logprobs": 0}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_two_models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("follow", ["now", "idle"])
def test_every_token_has_the_version_that_it_came_from(
    follow: str, folders: list[Path], hub: Server, tmp_path: Path
) -> None:
    """Idle: its patience ends at once, which is when answers of several versions come."""
    extra = {"hub": hub.address, "run": "r", "model": "actor", "replica": "server", "follow": follow}
    with Client(hub.address, run="r", model="actor", replica="trainer") as trainer:
        trainer.publish(1, checkpoint(folders[0]))
        options = ["--max-model-len", "2048", "--logprobs-mode", "processed_logprobs"]
        with serving(folders[0], tmp_path, {**extra, "follow_patience_s": 0.0}, *options) as server:
            options = TrainingOptions(hub=hub.address, run="r", model="actor")
            asyncio.run(_story(server, options, folders, lambda: trainer.publish(2, checkpoint(folders[1]))))


async def _story(server: Any, options: TrainingOptions, folders: list[Path], publish: Callable[[], Any]) -> None:
    facts = facts_of(AutoConfig.from_pretrained(folders[0]))
    expected = Expected("", "", facts, 2048, "processed_logprobs")
    larger = msgspec.structs.replace(expected, facts={**facts, "vocab_size": facts["vocab_size"] + 1})
    with pytest.raises(UsageError, match="another model .vocab_size"):
        await External("external-1", server.url, options, larger, timeout_s=10.0).join()
    external = External("external-1", server.url, options, expected, timeout_s=10.0)
    await external.join()

    async def ask(prompt: list[int], tokens: int, **more: Any) -> Any:
        return await external.ask(prompt, {**GREEDY, "max_tokens": tokens, **more})

    old = await ask(PROMPT, LONG)
    assert old.spans == ((1, LONG),) and old.finish_reason == "length" and len(old.log_probs) == LONG
    banned = await ask(PROMPT, 1, logit_bias={old.token_ids[0]: -100.0})
    assert banned.token_ids != old.token_ids[:1]

    asked = asyncio.create_task(ask(PROMPT, LONG))
    await _until(lambda: sum(external.running().values()) > 100)
    await asyncio.to_thread(publish)
    mixed = await asked
    assert [version for version, _ in mixed.spans] == [1, 2] and len(mixed.token_ids) == LONG
    boundary = mixed.spans[0][1]
    assert mixed.token_ids[:boundary] == old.token_ids[:boundary]
    after = slice(boundary, boundary + ALIKE)
    new = await ask(PROMPT + mixed.token_ids[:boundary], ALIKE)
    assert new.spans == ((2, ALIKE),)
    assert mixed.token_ids[after] == new.token_ids != old.token_ids[after]

    asked = asyncio.create_task(ask(PROMPT, LONG))
    await _until(lambda: sum(external.running().values()) > 20)
    assert await external.tensorhub_give_back() == 1
    partial = await asked
    assert partial.finish_reason == "abort" and 20 < len(partial.token_ids) < LONG
    assert partial.spans == ((2, len(partial.token_ids)),) and external.version == 2

    asked = asyncio.create_task(ask(PROMPT, LONG))
    await _until(lambda: sum(external.running().values()) > 20)
    await asyncio.to_thread(kill_group, server.process.pid)
    with pytest.raises(ServerLost):
        await asked
    await external.tensorhub_leave()


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.001)
