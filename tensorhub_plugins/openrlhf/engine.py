"""OpenRLHF's vLLM actor that follows the store by itself.

One that was started again fetches the version to run, and only then answers; one that joins a run starts from a peer's
weights. Prompts it was working on are asked elsewhere meanwhile (routing.py). One that has to leave gives them back
(answering.py).
"""

from __future__ import annotations

import asyncio
import functools
from typing import Any

from tensorhub_plugins.openrlhf import config
from tensorhub_plugins.openrlhf.answering import Answering, Stock, named
from tensorhub_plugins.openrlhf.samples import Samples
from tensorhub_plugins.vllm.config import FollowConfig
from tensorhub_plugins.vllm.engine import compiled
from tensorhub_plugins.vllm.lora import engine_arguments, for_adapter
from tensorhub_plugins.vllm.ray import secret
from tensorhub_plugins.vllm.ray.config import worker_config
from tensorhub_plugins.vllm.ray.health import EngineLost, own_engines
from tensorhub_plugins.vllm.ray.members import Heartbeat
from tensorhub_plugins.vllm.ray.owned import OwnedEngine

EXTENSION = "tensorhub_plugins.vllm.ray.health.OwnedWorkerExtension"


class TensorHubEngine(Answering):
    """`tensorhub`: {"backend": the flag's value, "engine": number, "partial": requests outlive an update, "sync": the
    trainer waits for the samples of its newest version, "lora": the rank of the adapter that it follows over weights
    from disk; 0: weights, "joins": it starts from a peer's weights if one has any, "spare": or none, till told}."""

    is_spare = _was_spare = False

    async def __init__(self, *args: Any, tensorhub: dict[str, Any], **kwargs: Any) -> None:  # type: ignore[misc]
        self.options, name = config.parse(tensorhub["backend"]), f"rollout-{tensorhub['engine']}"
        kwargs["worker_extension_cls"] = EXTENSION
        rank = tensorhub["lora"]
        self.is_spare = self._was_spare = tensorhub.get("spare", False)
        worker = worker_config(self.options, replica=name, adapter=rank > 0)
        if rank:
            kwargs |= engine_arguments(rank)
        elif self.is_spare:
            kwargs["load_format"] = "dummy"
        elif tensorhub["joins"]:
            kwargs["load_format"] = config.NAME
            kwargs["model_loader_extra_config"] = {**worker, "disk": "fallback"}
        own_engines()
        known = await asyncio.to_thread(secret.learn)  # vLLM's processes inherit it
        with compiled.announced(worker):
            await Stock.__init__(self, *args, **kwargs)
        if rank:  # before its first version the weights alone are what is trained
            self.llm.generate = for_adapter(self.llm.generate, self.options.model, lambda: self.owned.has_version)
        self.llm.generate = named(self.llm.generate)
        self.worker = f"{name}/0"
        self.owned = OwnedEngine(self.llm, self.worker)
        self.is_leaving, self.is_partial, self.samples = False, tensorhub["partial"], Samples()
        how = FollowConfig(
            worker=self.worker,
            timeout_s=self.options.timeout_s,
            grows=self.options.timeout_grows,
            until=self.options.pull_until,
            pins=not tensorhub["sync"],
            whole_prompts=not self.is_partial,
            catches_up=True,
            staleness_s=self.options.staleness_s,
        )
        self.owned.keep()
        self._follow = functools.partial(self.owned.follow, worker, known, how)
        if self.is_spare:
            await self.owned.warm_up()
            return
        await self._follow()
        self.owned.keep(self.owned.watch())
        await self.owned.caught_up()

    async def _join(self) -> None:
        await self._follow()
        await self.owned.watch()

    # --- what our generator asks for ----------------------------------------------------------------------------------

    async def tensorhub_heartbeat(self) -> Heartbeat:
        """Answer our generator, which asks all the time; EngineLost when this actor is about to end."""
        if self.owned.lifeline.is_dying:
            raise EngineLost(f"{self.worker}: its vLLM is dead")
        why, requests_max = self._why_not(), self.llm.vllm_config.scheduler_config.max_num_seqs
        return self.owned.heartbeat(ready=not why, why=why, requests_max=requests_max, spare=self.is_spare)

    def _why_not(self) -> str:
        """Return why it takes no new work; "": it does."""
        status = self.owned.status
        if self._was_spare and not (status.version and status.has_caught_up):
            return f"{self.worker} has no weights yet"
        return super()._why_not()

    async def tensorhub_hold(self, version: int) -> int:
        return await self.owned.hold(version)

    async def tensorhub_release(self) -> None:
        await self.owned.release()

    # --- what the fleet asks for --------------------------------------------------------------------------------------

    async def tensorhub_join(self) -> None:
        if self.is_spare:
            self.is_spare = False
            self.owned.keep(self._join())

    async def tensorhub_leave(self) -> None:
        """Leave the store, so that the hub forgets this engine at once. It answers nothing afterwards."""
        self.is_leaving = True
        await self.owned.leave()
