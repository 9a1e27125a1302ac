"""Rollout side, pull mode: one replica follows the newest version by itself, at its own pace.

The way of one version
    wait for it -> the vLLM workers fetch it while the engine generates -> pause -> install -> resume
Only the last three steps stop the engine. Weights, KV of the old weights and the number that samples carry change
between pause and resume, as one. A version that fails to arrive costs nothing but this replica's freshness; one that
fails half way through its installation leaves the engine paused, because mixed weights must not answer, until an
installation succeeds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from tensorhub_plugins.core.errors import HubUnreachable, NotPublished, TensorHubError, VersionGone
from tensorhub_plugins.core.events import record
from tensorhub_plugins.core.values import LATEST

log = logging.getLogger(__name__)

WAIT_S = 30.0  # one question to the hub; asked again for ever
POLL_S = 0.01  # of the workers' fetch: it runs beside generation, and a shorter pause than this is not noticed
RETRY_S = 1.0  # after a failed update
RETRY_MAX_S = 30.0


class Engine(Protocol):
    """The server that owns the vLLM engine."""

    async def rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every vLLM worker; their answers in rank order."""

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    def running(self) -> Mapping[str, int]:
        """Requests that have not ended, with the tokens each has produced."""

    def switch(self, version: int, running: Mapping[str, int]) -> None:
        """From here on tokens come from `version`."""


class Follower:
    def __init__(
        self,
        engine: Engine,
        wait: Callable[..., int],
        *,
        worker: str,
        deadline_s: float,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """wait: `Client.wait` of a client that reads nothing itself; it blocks, so it is run in a thread."""
        self.engine = engine
        self.wait = wait
        self.worker = worker
        self.deadline_s = deadline_s
        self.sleep = sleep
        self.version = 0  # installed; 0: none yet
        self.newest = 0  # that the hub has told of
        self.is_broken = False  # an installation failed half way: nothing may be generated
        self.installing_since: float | None = None  # monotonic seconds

    async def follow(self) -> None:
        """Runs as long as the replica."""
        delay_s = RETRY_S
        while True:
            try:
                version = await self.next_version()
                if version is None:
                    continue
                await self.update(version)
                delay_s = RETRY_S
            except VersionGone:
                continue  # a newer one took its place while it was fetched
            except TensorHubError as error:
                self._failed(error)
                await self.sleep(delay_s)
                delay_s = min(2 * delay_s, RETRY_MAX_S)

    async def next_version(self) -> int | None:
        """A visible version that is newer than the installed one, or None: ask again."""
        after = self.version - 1 if self.is_broken else self.version  # repair with the same version if need be
        try:
            self.newest = await asyncio.to_thread(self.wait, LATEST, newer_than=after, deadline_s=WAIT_S)
        except NotPublished:
            return None
        except HubUnreachable as error:
            log.warning("%s: the hub does not answer, going on with version %d: %s", self.worker, self.version, error)
            await self.sleep(RETRY_S)
            return None
        return self.newest

    async def update(self, version: int) -> None:
        """Bring this replica to `version`."""
        await self.fetch(version)
        await self.install(version)

    async def fetch(self, version: int) -> None:
        """Beside generation: every worker gets its bytes, verified."""
        deadline = time.monotonic() + self.deadline_s
        await self.engine.rpc("tensorhub_begin_fetch", version, self.deadline_s)
        while not all(await self.engine.rpc("tensorhub_poll")):
            if time.monotonic() > deadline + RETRY_S:  # the workers keep the same deadline and name the cause
                raise TensorHubError("the workers did not fetch in time", version=version, deadline_s=self.deadline_s)
            await self.sleep(POLL_S)

    async def install(self, version: int) -> None:
        """The engine stands still from here to the end."""
        started = time.monotonic()
        self.installing_since = started
        try:
            await self.engine.pause()
            frozen = dict(self.engine.running())
            record(
                "pause",
                worker=self.worker,
                version=self.version,
                seconds=time.monotonic() - started,
                in_flight=len(frozen),
            )
            try:
                await self.engine.rpc("tensorhub_install")
            except BaseException:
                self.is_broken = True  # stays paused
                raise
            self.engine.switch(version, frozen)
            self.version, self.is_broken = version, False
            left = set(self.engine.running())
            await self.engine.resume()
            record(
                "resume",
                worker=self.worker,
                version=version,
                seconds=time.monotonic() - started,
                in_flight=sum(request in left for request in frozen),
                lost=sum(request not in left for request in frozen),
            )
        finally:
            self.installing_since = None

    def _failed(self, error: TensorHubError) -> None:
        log.warning("%s: update failed, going on with version %d: %s", self.worker, self.version, error)
        record("update_failed", worker=self.worker, version=self.newest, error=str(error))
