"""An engine is a family: the actor that owns it -> vLLM's engine core -> vLLM's workers. They live and die as one.

One failure path: whatever breaks an engine for good (one of its processes died, the actor was killed), the actor ends
and Ray starts it again at the same place. vLLM's own processes do not notice when the actor is killed, and would keep
the memory of the device from the engine that is started in its place: so its workers watch the actor, and end with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

from tensorhub_plugins.core import HubUnreachable, TensorHubError, UsageError, VersionRefused, work
from tensorhub_plugins.core.log import get_logger
from tensorhub_plugins.vllm.engine.core_follower import of_core
from tensorhub_plugins.vllm.engine.follower import UpdateFailed
from tensorhub_plugins.vllm.interrupts import call_at_end_of
from tensorhub_plugins.vllm.worker.extension import TensorHubWorkerExtension

logger = get_logger(__name__)

OWNER_PID = "TENSORHUB_OWNER_PID"  # environment of an engine's actor, inherited by vLLM's processes
# How often vLLM is asked whether it lives. A worker of vLLM's spins for a second after each message: asked each second,
# every one of them takes a core for good, on two cores the trainer's.
PROBE_INTERVAL_S = 10.0
WATCH_INTERVAL_S = 1.0  # how often the actor looks whether vLLM has said that it is dead
STILL_TOLD_S = 60.0  # for which an actor's own loop stands still before users hear of it
LOOP_STILL_MAX_S = 5.0  # between two looks: the actor's loop stood still for the rest, and heard no answer of vLLM's
EXIT_DELAY_S = 0.5  # for answers on their way out; requests still here fail with the actor and are asked elsewhere

ERRORS = {kind.__name__: kind for kind in (HubUnreachable, UsageError, VersionRefused)}  # whose remedy is another one


class EngineLost(TensorHubError):
    """This engine cannot answer any more: ask another one."""


def own_engines() -> None:
    """Call in the actor, before it starts an engine: its workers end with this process, and show it that they work."""
    os.environ[OWNER_PID] = str(os.getpid())
    work.share()


class Lifeline:
    """Lives in the actor: all its questions to vLLM's workers go through here, and tell whether they live."""

    def __init__(self, engine: Any, worker: str) -> None:
        """Watch this AsyncLLM."""
        self.engine, self.worker = engine, worker
        self.is_dying = False
        self._waiting_since: float | None = None  # the first question since the last answer
        self._pending = 0
        self.busy_since = 0.0  # since then an installation keeps the engine from answering, in monotonic seconds
        self.timeout_s = self.still_s = work.STILL_S  # without a piece of work; the first where none ever shows
        self._watching: asyncio.Task[None] | None = None
        self._looked_at: float | None = None  # when the actor's loop was last known to turn
        self._told_still: float | None = None

    async def rpc(self, method: str, *args: Any) -> list[Any]:
        """Return what every worker answers, in rank order. UpdateFailed has what a worker raised; or EngineLost."""
        with self._translating(method), self._listening():
            return list(await self.engine.collective_rpc(method, args=args))

    async def call(self, method: str, *args: Any) -> Any:
        """Return what the follower in the engine's core answers (engine/core_follower.py), however long that takes.
        Raises what it raised, or EngineLost."""
        with self._translating(method):
            told = await of_core(self.engine.engine_core, method, *args)
        (kind, message, version), answer = told or (("", "", 0), None)
        if kind:
            raise ERRORS.get(kind, UpdateFailed)(message, version=version or None)
        return answer

    @contextlib.contextmanager
    def _translating(self, method: str) -> Iterator[None]:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            yield
        except Exception as error:
            if isinstance(error, EngineDeadError) or self.engine.errored:
                self.die(error)
                raise EngineLost(f"{self.worker}: {error}") from error
            # vLLM hands on what was raised there as text in an error of its own.
            raise UpdateFailed(f"{method}: {error}") from error

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Note when a question was answered; an error is an answer as well."""
        if self._waiting_since is None:
            self._waiting_since = time.monotonic()
        self._pending += 1
        is_answered = True
        try:
            yield
        except (TimeoutError, asyncio.CancelledError):
            is_answered = False
            raise
        finally:
            self._pending -= 1
            if is_answered:
                self._waiting_since = time.monotonic() if self._pending else None

    async def probe(self) -> None:
        """Ask until the actor exits. That can be well while vLLM's processes are frozen: only their answer counts."""
        from tensorhub_plugins.vllm.ray import preemption  # not in vLLM's workers, which import this file, too

        self._watching = asyncio.create_task(preemption.watch(self.worker))
        asked_at, asked = -PROBE_INTERVAL_S, None
        try:
            while True:
                self._look()
                if self.engine.errored:
                    self.die(self.engine.dead_error)
                if time.monotonic() - asked_at >= PROBE_INTERVAL_S and (asked is None or asked.done()):
                    # Not awaited here: vLLM never answers what is pending when its engine dies.
                    asked_at, asked = time.monotonic(), asyncio.create_task(self._ping())
                await asyncio.sleep(min(WATCH_INTERVAL_S, PROBE_INTERVAL_S))
        finally:
            self._looked_at = None
            if asked is not None:
                asked.cancel()

    def _look(self) -> None:
        """Note that the actor's loop turns. While it stood still, as an agent that never awaits makes it, no answer of
        vLLM's could be heard: that counts as no silence."""
        now = time.monotonic()
        still_s = 0.0 if self._looked_at is None else max(0.0, now - self._looked_at - LOOP_STILL_MAX_S)
        if still_s and self._waiting_since is not None:
            self._waiting_since = min(now, self._waiting_since + still_s)
        self._looked_at = now

    @property
    def still_since(self) -> float | None:
        """Return since when the actor's loop stands still, in monotonic seconds; None: it turns. For other threads."""
        looked_at = self._looked_at
        return looked_at if looked_at is not None and time.monotonic() - looked_at > LOOP_STILL_MAX_S else None

    async def _ping(self) -> None:
        with contextlib.suppress(TensorHubError):  # no answer, no sign of life: it shows in `silent_s`
            await self.rpc("tensorhub_ping")

    def silent_s(self) -> float:
        """Return the seconds for which vLLM has left a question without an answer. An installation leaves all, as long
        as it works: judged by what it does (core/work.py), not by how long it takes, up to a bound. So does a loop of
        the actor's that stands still."""
        still_since = self.still_since
        if still_since is not None:
            still_s = time.monotonic() - still_since
            return still_s if still_s > work.TIMES_MAX * self.timeout_s else 0.0
        if (waiting_since := self._waiting_since) is None:  # once: another thread may be the one that asks
            return 0.0
        if not self.busy_since:
            return time.monotonic() - waiting_since
        worked_at, now, began = work.last_at(), time.monotonic(), max(waiting_since, self.busy_since)
        if now >= began + work.TIMES_MAX * self.timeout_s:
            return now - began
        silent_s = now - max(began, worked_at)
        return silent_s if silent_s > (self.still_s if worked_at else self.timeout_s) else 0.0

    def tell_still(self) -> None:
        """Log once each time that the actor's loop stands still. For other threads."""
        since = self.still_since
        if since not in (None, self._told_still) and time.monotonic() - since >= STILL_TOLD_S:
            self._told_still = since
            what = "the agent, or what else runs in its actor, has awaited nothing for %.0f s, so no sample goes on"
            logger.warning(f"%s: {what}: asyncio.to_thread takes what lasts", self.worker, STILL_TOLD_S)

    def allow(self, timeout_s: float) -> None:
        """Give installations so long for what does not show, as what workers on other hosts do does not."""
        parallel = getattr(getattr(self.engine, "vllm_config", None), "parallel_config", None)
        is_spread = getattr(parallel, "nnodes", 1) > 1 or getattr(parallel, "distributed_executor_backend", "") == "ray"
        self.timeout_s, self.still_s = timeout_s, timeout_s if is_spread else min(timeout_s, work.STILL_S)

    def die(self, error: BaseException) -> None:
        if self.is_dying:
            return
        self.is_dying = True
        logger.error("%s: vLLM is dead, leaving so that Ray starts this engine again: %s", self.worker, error)
        asyncio.get_running_loop().call_later(EXIT_DELAY_S, os._exit, 1)


def exit_on_error(task: asyncio.Task[None]) -> None:
    """Done-callback of work without which the engine must not pass for one that follows the store. After EngineLost
    its lifeline ends it, in a moment."""
    if not task.cancelled() and not isinstance(error := task.exception(), EngineLost | None):
        logger.error("this engine cannot go on, leaving so that Ray starts it again", exc_info=error)
        os._exit(1)


class OwnedWorkerExtension(TensorHubWorkerExtension):
    """Mixed into the workers of an engine that belongs to an actor."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        worker = super().__new__(cls, *args, **kwargs)
        end_with_owner()
        return worker

    def tensorhub_ping(self) -> bool:
        """Return True: the engine's loop and this worker answer."""
        return True


def end_with_owner() -> None:
    """Call in the worker process: it ends when the actor ends."""
    owner = int(os.environ.get(OWNER_PID, 0))
    parent = os.getppid()  # the actor, or vLLM's engine core between the two; asked now: orphans are adopted

    def end() -> None:
        if parent not in (1, owner) and os.getppid() == parent:  # not what adopts orphans, maybe Ray's daemon
            os.kill(parent, signal.SIGKILL)
        os._exit(1)

    with contextlib.suppress(OSError, AttributeError):  # none, gone already, another host's, or a kernel before 5.3
        call_at_end_of(owner, end)
