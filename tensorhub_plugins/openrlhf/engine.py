"""OpenRLHF's vLLM actor that follows the store by itself.

One that was started again fetches the version to run, and only then answers. Prompts it was working on are asked
elsewhere meanwhile (routing.py).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from typing import Any

from openrlhf.trainer.ray import vllm_engine
from vllm.v1.engine.exceptions import EngineDeadError

from tensorhub_plugins.core import Client, DeadlineExceeded, HubUnreachable, NotPublished, VersionGone, record
from tensorhub_plugins.core.log import get_logger
from tensorhub_plugins.openrlhf import config
from tensorhub_plugins.openrlhf.follower import Follower, Gate
from tensorhub_plugins.openrlhf.versions import Versioned, came_from
from tensorhub_plugins.vllm.engine.follower import RETRY_DELAY_S, UpdateFailed
from tensorhub_plugins.vllm.engine.pause import pause
from tensorhub_plugins.vllm.ray.config import connect, worker_config
from tensorhub_plugins.vllm.ray.health import EngineLost, Lifeline, exit_on_error, own_engines

logger = get_logger(__name__)

EXTENSION = "tensorhub_plugins.vllm.ray.health.OwnedWorkerExtension"

# The class that OpenRLHF decorated. Ray sends it by its name here, so that each process has one copy of it.
_Stock: Any = vllm_engine.RolloutRayActor.__ray_metadata__.modified_class.__ray_actor_class__


class TensorHubEngine(_Stock):
    """`tensorhub`: {"backend": the flag's value, "engine": number, "partial": requests outlive an update, "sync": the
    trainer waits for the samples of its newest version}."""

    executor: Any

    async def __init__(self, *args: Any, tensorhub: dict[str, Any], **kwargs: Any) -> None:  # type: ignore[misc]
        kwargs["worker_extension_cls"] = EXTENSION
        own_engines()
        await _Stock.__init__(self, *args, **kwargs)
        self.options = config.parse(tensorhub["backend"])
        self.worker = f"rollout-{tensorhub['engine']}/0"
        self.executor = Versioned(self.executor)
        self.lifeline = Lifeline(self.llm, self.worker)
        self.gate = None if tensorhub["partial"] else Gate()
        # It only waits; the vLLM workers are the replica's shards.
        client = await asyncio.to_thread(connect, self.options, replica=f"server-{tensorhub['engine']}")
        await self.rpc("tensorhub_connect", worker_config(self.options, replica=f"rollout-{tensorhub['engine']}"))
        self.follower = Follower(
            self,
            client.target,
            worker=self.worker,
            timeout_s=self.options.timeout_s,
            gate=self.gate,
            until=self.options.pull_until,
            pins=not tensorhub["sync"],
        )
        await self._catch_up(client)
        self._tasks = []
        for work in (self.follower.follow(), self.lifeline.probe()):
            task = asyncio.create_task(work)
            task.add_done_callback(exit_on_error)
            self._tasks.append(task)

    # --- what OpenRLHF asks for ---------------------------------------------------------------------------------------

    async def generate_responses(self, *args: Any, min_version: int = 0, **kwargs: Any) -> list[dict[str, Any]]:
        """As OpenRLHF's, from this version or a later one. Without partial rollout all samples are of one version."""
        await self.follower.need(min_version)
        if self.gate is None:
            return list(await _Stock.generate_responses(self, *args, **kwargs))
        async with self.gate:
            return list(await _Stock.generate_responses(self, *args, **kwargs))

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        started, first = time.monotonic(), self.follower.version
        try:
            output = await _Stock.generate(self, *args, **kwargs)
        except EngineDeadError as error:
            record("request", worker=self.worker, seconds=time.monotonic() - started, outcome="error")
            self.lifeline.die(error)
            raise EngineLost(f"{self.worker}: {error}") from error
        last = self.follower.version
        came_from(first, last)
        record(
            "request",
            worker=self.worker,
            seconds=time.monotonic() - started,
            outcome=str(output.outputs[0].finish_reason),
            versions=[first, last],
            tokens=len(output.outputs[0].token_ids),
        )
        return output

    # --- what our generator asks for ----------------------------------------------------------------------------------

    async def tensorhub_heartbeat(self) -> dict[str, Any]:
        """version, for how long vLLM's processes have been silent, how many sequences it runs at once; EngineLost when
        this actor is about to end."""
        if self.lifeline.is_dying:
            raise EngineLost(f"{self.worker}: its vLLM is dead")
        silent_s = self.lifeline.silent_s(self.follower)
        return {
            "version": self.follower.version,
            "silent_s": silent_s,
            "pid": os.getpid(),
            "requests_max": self.llm.vllm_config.scheduler_config.max_num_seqs,
        }

    async def tensorhub_hold(self, version: int) -> int:
        return await self.follower.hold(version)

    async def tensorhub_release(self) -> None:
        await self.follower.release()

    # --- following ----------------------------------------------------------------------------------------------------

    async def _catch_up(self, client: Client) -> None:
        """An engine that was started again has the weights of before the training: it must not answer with those."""
        while True:
            try:
                version = await asyncio.to_thread(client.target, pins=self.follower.pins, timeout_s=0.0)
                if version <= (self.options.pull_until or version):
                    await self.follower.update(version)
                return
            except NotPublished:
                return
            except (UpdateFailed, HubUnreachable, DeadlineExceeded, VersionGone) as error:  # there may be another soon
                logger.warning("%s: trying again: %s", self.worker, error)
                await asyncio.sleep(RETRY_DELAY_S)

    async def rpc(self, method: str, *args: Any) -> list[Any]:
        return await self.lifeline.rpc(method, *args)

    async def pause(self) -> None:
        await pause(self.llm, mode="keep", clear_cache=True)

    async def resume(self) -> None:
        await self.llm.resume_generation()

    def running(self) -> Mapping[str, int]:
        return {name: 0 for name in self.llm.output_processor.request_states}

    def switch(self, version: int, running: Mapping[str, int]) -> None:
        """Samples ask the follower for its version (`generate`)."""
