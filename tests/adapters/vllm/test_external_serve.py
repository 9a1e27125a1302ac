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
KEY = "key"
LONG, ALIKE = 1500, 16  # tokens of an answer; and of those after a switch that are compared
GREEDY = {"temperature": 0, "ignore_eos": True, "logprobs": 0}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_two_models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("follow", ["now", "idle"])
def test_every_token_has_the_version_that_it_came_from(
    follow: str, folders: list[Path], hub: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Idle: its patience ends at once, which is when answers of several versions come."""
    extra = {"hub": hub.address, "run": "r", "model": "actor", "replica": "server", "follow": follow}
    extra["may_be_held"] = follow == "now"
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    with Client(hub.address, run="r", model="actor", replica="trainer") as trainer:
        trainer.publish(1, checkpoint(folders[0]))
        options = ["--max-model-len", "2048", "--logprobs-mode", "processed_logprobs", "--api-key", KEY]
        with serving(folders[0], tmp_path, {**extra, "follow_patience_s": 0.0}, *options) as server:
            options = TrainingOptions(hub=hub.address, run="r", model="actor")

            def publish(version: int) -> None:
                trainer.publish(version, checkpoint(folders[1 - version % 2]))

            asyncio.run(_story(server, options, folders, publish, holds=follow == "now"))


async def _story(
    server: Any, options: TrainingOptions, folders: list[Path], publish: Callable[[int], None], *, holds: bool
) -> None:
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
    await asyncio.to_thread(publish, 2)
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
    assert partial.spans == ((2, len(partial.token_ids)),) and external.status.version == 2

    refused = await asyncio.to_thread(server.post, "v1/tensorhub/hold", {})
    assert refused.status_code == 401, "without the server's API key nobody holds it"
    if not holds:
        with pytest.raises(ServerLost, match="cannot be held: .*set may_be_held to true"):
            await external.tensorhub_hold(0)
    else:
        assert await external.tensorhub_hold(0) == 2
        await asyncio.to_thread(publish, 3)
        assert (await ask(PROMPT, LONG)).spans == ((2, LONG),) and external.status.version == 2
        assert await external.tensorhub_hold(3) == 3 and (await ask(PROMPT, ALIKE)).spans == ((3, ALIKE),)
        await asyncio.to_thread(publish, 4)
        await external.tensorhub_release()
        await _until(lambda: external.status.version == 4)

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
