"""An engine that follows by itself, as the actor asks it that owns it (verl's, OpenRLHF's): over AsyncLLM.

The follower runs in the engine's core (core_follower.py). Its status is sent here whenever it changes: a heartbeat asks
no core that may be busy.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import msgspec
import ray

from tensorhub_plugins.core import TensorHubError, work
from tensorhub_plugins.vllm.config import FollowConfig
from tensorhub_plugins.vllm.engine.core_follower import starts_in
from tensorhub_plugins.vllm.engine.spans import Span, spans_of
from tensorhub_plugins.vllm.engine.status import Status
from tensorhub_plugins.vllm.ray.health import Lifeline, exit_on_error
from tensorhub_plugins.vllm.ray.members import Heartbeat


def actor_class(engine: Any) -> Any:
    """Return what Ray makes actors of, whose heartbeats have a thread and a loop of their own: an agent that never
    awaits stops the actor's, for which OpenRLHF's own engines wait as long as that takes."""
    ray.method(concurrency_group="heartbeats")(engine.tensorhub_heartbeat)
    return ray.remote(concurrency_groups={"heartbeats": 2})(engine)


class OwnedEngine:
    """engine: AsyncLLM. status: as the engine's follower has told last; version 0 before it follows. has_version: it
    has had one since: a prompt is let in by the follower, of which the news may come later."""

    def __init__(self, engine: Any, worker: str) -> None:
        self.status, self.lifeline = Status(), Lifeline(engine, worker)
        self._whole_prompts = self.has_version = False
        self._changed = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []

    def keep(self, *works: Coroutine[Any, Any, None]) -> None:
        """Do this until the engine leaves, and watch whether vLLM lives: a dead one answers nothing that is pending.
        The actor ends with what fails: it must not pass for one that follows."""
        for each in works if self._tasks else (*works, self.lifeline.probe()):
            task = asyncio.create_task(each)
            task.add_done_callback(exit_on_error)
            self._tasks.append(task)

    async def warm_up(self) -> None:
        """Answer one token, whatever its weights: what vLLM compiles at its first answer is there for the next one."""
        from vllm import SamplingParams

        engine, sampling = self.lifeline.engine, SamplingParams(max_tokens=1, logprobs=0, detokenize=False)
        async for _ in type(engine).generate(engine, {"prompt_token_ids": [0]}, sampling, "warm-up"):
            pass

    async def follow(self, joining: dict[str, Any], secret: str | None, how: FollowConfig) -> None:
        """Have the engine join the store as this, see WorkerConfig, and follow it. Raises what keeps it from that."""
        self._whole_prompts = how.whole_prompts
        self.lifeline.allow(how.timeout_s)
        await self.lifeline.call("tensorhub_follow", joining, msgspec.structs.asdict(how), secret)

    async def watch(self) -> None:
        """Keep `status`. Runs as long as the engine follows."""
        while True:
            news = await self._ask("news", self.status.revision)
            self.status = msgspec.convert(news, Status)
            self.has_version |= self.status.version > 0
            self.lifeline.busy_since = self.status.busy_since
            async with self._changed:
                self._changed.notify_all()

    async def caught_up(self) -> None:
        """Return when it has the version to run, or there is none, see `FollowConfig.catches_up`."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.status.has_caught_up)

    @asynccontextmanager
    async def answering(self, version: int) -> AsyncIterator[None]:
        """Yield for a prompt when this version or a later one is installed, or what operators want
        to be run instead. UpdateFailed when that takes too long, VersionRefused when it cannot be."""
        if self.status.may_answer(version) and not self._whole_prompts:
            yield
            return
        name = uuid.uuid4().hex
        try:
            if await self._ask("enter", name, version):
                self.has_version = True
            yield
        finally:
            with suppress(TensorHubError):  # it has left the store
                await self._ask("leave", name)

    async def hold(self, version: int) -> int:
        """See `Follower.hold`."""
        return int(await self._ask("hold", version))

    async def release(self) -> None:
        await self._ask("release")

    async def _ask(self, question: str, *given: Any) -> Any:
        return await self.lifeline.call("tensorhub_ask", question, given)

    async def leave(self) -> None:
        """Follow no more, and say so: the hub forgets this engine at once."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.lifeline.call("tensorhub_leave")

    def heartbeat(self, **own: Any) -> Heartbeat:
        """Return what a dispatcher asks. own: what only this framework's actor knows."""
        own["node"] = ray.get_runtime_context().get_node_id()
        self.lifeline.tell_still()
        return heartbeat(self.status, self.lifeline.silent_s(), idle_s=time.monotonic() - work.last_at(), **own)

    async def spans(self, request: str, tokens: int) -> tuple[Span, ...]:
        """Return the versions of this request's only answer, of which `tokens` have come; (): they are not known. Ask
        once, of every request that has a name of ours (spans.py)."""
        found = await starts_in(self.lifeline.engine.engine_core, request, forget=True)
        return spans_of(found[0][1], tokens) if len(found) == 1 else ()


def heartbeat(status: Status, silent_s: float, **own: Any) -> Heartbeat:
    """Return what a replica with this status answers. own: what is known beside it."""
    last, said = status.last, {"version": status.version, "refusal": status.refusal, "silent_s": silent_s}
    cost = {"pull_s": last.pull_s, "pause_s": last.pause_s, "sources": last.sources, "ways": last.ways}
    return cast(Heartbeat, {**said, "stays": status.stays, **cost, **own})
