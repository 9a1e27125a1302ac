"""Rollout side: one engine follows by itself the version that it is to run, at its own pace: the newest one, or the one
that an operator has pinned. What the owner of an engine runs.

The way of one version
    ask for it -> the vLLM workers fetch it while the engine generates -> pause -> install -> resume
Only the last three steps stop the engine, and no other. Weights, KV of the old weights and the version that samples
carry change between pause and resume, as one. A version that fails to arrive costs this engine's freshness and nothing
else. One that fails half way through its installation leaves the engine paused, because mixed weights must not answer,
until an installation succeeds.

It goes back when an operator pins an older version or withdraws the one it runs (`Client.target`), and in no other
case. A version that its workers refuse (VersionRefused) is not taken again, unless it is pinned anew.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tensorhub_plugins.core import (
    REFUSED_MAX,
    DeadlineExceeded,
    HubUnreachable,
    NotPublished,
    TensorHubError,
    VersionGone,
    VersionRefused,
    record,
    step_of,
)
from tensorhub_plugins.core.log import get_logger

logger = get_logger(__name__)

HUB_TIMEOUT_S = 30.0  # one question to the hub; then it is asked again
POLL_INTERVAL_S = 0.02  # of the workers' fetch: it runs beside generation
POLL_GRACE_S = 5.0  # the workers keep the deadline themselves, and say what failed
RETRY_DELAY_S = 1.0  # after a failed update
RETRY_DELAY_MAX_S = 30.0


class EngineOwner(Protocol):
    """The actor that owns the vLLM engine."""

    async def rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every vLLM worker; their answers in rank order."""

    async def pause(self) -> None:
        """Stand still and forget what was computed. What fails leaves it running."""

    async def forget(self) -> None:
        """What was computed with other weights; raises what keeps it from that."""

    async def resume(self) -> None: ...

    def running(self) -> Collection[str]:
        """Requests that have not ended."""

    def departed(self) -> Sequence[str]:
        """Requests that somebody has aborted since the pause, or since this was asked before."""


@dataclass
class LastUpdate:
    """What the last version cost."""

    pull_s: float = 0.0  # beside generation
    pause_s: float = 0.0  # no request was served
    sources: dict[str, int] = field(default_factory=dict)  # "replica/shard" -> bytes, of all workers


class UpdateFailed(TensorHubError):
    """This engine does not have the version, and goes on with the one it had."""


class Follower:
    def __init__(
        self,
        engine: EngineOwner,
        target: Callable[..., int],
        *,
        worker: str,
        timeout_s: float,
        until: int | None = None,
        pins: bool = True,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """target: `Client.target` of a client that reads nothing itself; it blocks, so it is run in a thread. until:
        the last version to follow. pins=False: for an engine that must have the trainer's newest, whatever is pinned.
        """
        self.engine = engine
        self.target = target
        self.worker = worker
        self.timeout_s = timeout_s
        self.until = until
        self.pins = pins
        self.sleep = sleep
        self.refused: dict[int, str] = {}  # versions that cannot be installed in this engine, and why
        self._said = ""  # why there is nothing to run
        self.version = 0  # installed; 0: what the engine was started with
        self.is_broken = False  # an installation failed half way: nothing may be generated
        self.is_paused = False  # and if nothing is broken or installed: because it cannot forget
        self.installing_since: float | None = None  # monotonic seconds
        self.last_update = LastUpdate()
        self._pull_s = 0.0  # of the version that is being taken
        self._was_whole = True  # when the installation under way began

    @property
    def is_whole(self) -> bool:
        """It answers from one version, or will when the installation under way has ended."""
        return not (self.is_broken or self.is_paused) or (self.installing_since is not None and self._was_whole)

    @property
    def refusal(self) -> tuple[int, str]:
        """The newest version that was refused, and why, if it is above the installed one; else (0, "")."""
        newest = max(self.refused, default=0)
        return (newest, self.refused[newest]) if newest > self.version else (0, "")

    async def follow(self) -> None:
        """Runs as long as the engine."""
        delay_s, said = RETRY_DELAY_S, ""
        while self.is_paused or self.until is None or step_of(self.version) < self.until:
            try:
                if self.is_paused and not self.is_broken:
                    await self._go_on()
                version = await self.next_version()
                if version is not None:
                    await self.take(version)
                    delay_s, said = RETRY_DELAY_S, ""
            except TensorHubError as error:
                if str(error) != said:  # else it is what it was
                    how = "standing still" if self.is_paused else "going on"
                    logger.warning("%s: %s with version %d: %s", self.worker, how, self.version, error)
                said = str(error)
                await self.sleep(delay_s)
                delay_s = min(2 * delay_s, RETRY_DELAY_MAX_S)

    async def next_version(self) -> int | None:
        """The version to run, if it is not the installed one; or None: ask again."""
        installed = 0 if self.is_broken else self.version  # the same version repairs, too
        try:
            version = await asyncio.to_thread(
                self.target, installed, refused=dict(self.refused), pins=self.pins, timeout_s=HUB_TIMEOUT_S
            )
        except (NotPublished, DeadlineExceeded, VersionGone, HubUnreachable) as error:
            await self._nothing_to_run(error)
            return None
        self._said = ""
        if self.until is not None and step_of(version) > self.until:
            await self.sleep(RETRY_DELAY_S)  # the last one to follow was missed: stay with what there is
            return None
        if version in self.refused:
            logger.warning("%s: version %d was refused, and is tried again because it was pinned", self.worker, version)
            del self.refused[version]
        return version

    async def _nothing_to_run(self, error: TensorHubError) -> None:
        """Say why, once, and wait where the hub did not."""
        match error:
            case VersionGone():  # there is nothing to go to
                if error.message != self._said:
                    logger.warning("%s: staying with version %d: %s", self.worker, self.version, error.message)
                self._said = error.message
            case HubUnreachable():
                logger.warning("%s: no hub, going on with version %d: %s", self.worker, self.version, error)
                await self.sleep(RETRY_DELAY_S)
            case _:
                self._said = ""

    async def take(self, version: int) -> None:
        """This one is to be run. Here a subclass may wait, or decide against it."""
        await self.update(version)

    async def update(self, version: int) -> None:
        """Bring this engine to `version`. One at a time."""
        started = time.monotonic()
        await self.fetch(version)
        await self.prepare(version)
        self._pull_s = time.monotonic() - started
        await self.install(version)

    async def fetch(self, version: int) -> None:
        """Beside generation: every worker gets its bytes, verified."""
        deadline = time.monotonic() + self.timeout_s + POLL_GRACE_S
        await self.engine.rpc("tensorhub_start_fetch", version, self.timeout_s)
        while True:
            workers = await self.engine.rpc("tensorhub_poll")
            if all(worker["state"] == "ready" for worker in workers):
                return
            if any(worker["state"] == "fetching" for worker in workers) and time.monotonic() < deadline:
                await self.sleep(POLL_INTERVAL_S)
                continue
            raise await self._not_fetched(version, workers)

    async def _not_fetched(self, version: int, workers: Sequence[Mapping[str, Any]]) -> UpdateFailed:
        self._note_refusal(version, workers)
        if any(worker["state"] == "ready" for worker in workers):  # of one engine all install, or none
            await self.engine.rpc("tensorhub_discard")
        errors = [str(worker["error"]) for worker in workers if worker["error"]]
        return UpdateFailed("; ".join(errors) or "not fetched in time", version=version, phase="fetch")

    async def prepare(self, version: int) -> None:
        """Still generating: wait until no peer reads what the installation will overwrite."""
        try:
            await self.engine.rpc("tensorhub_prepare_install", self.timeout_s)
        except Exception as error:
            if self._note_refusal(version, await self.engine.rpc("tensorhub_poll")):
                await self.engine.rpc("tensorhub_discard")
                raise UpdateFailed(str(error), version=version, phase="prepare") from error
            raise

    def _note_refusal(self, version: int, workers: Sequence[Mapping[str, Any]]) -> bool:
        """Whether a worker says that this version cannot be installed: then it is not fetched again and again."""
        reasons = [worker["error"] for worker in workers if worker.get("error_kind") == VersionRefused.__name__]
        if not reasons:
            return False
        text = "%s: version %d cannot be installed in this engine, which goes on with version %d: %s"
        logger.error(text, self.worker, version, self.version, reasons[0])
        self.refused[version] = str(reasons[0])
        while len(self.refused) > REFUSED_MAX:
            del self.refused[next(iter(self.refused))]
        return True

    async def install(self, version: int) -> None:
        """The engine stands still from here to the end."""
        started = time.monotonic()
        self.installing_since, self._was_whole = started, not (self.is_broken or self.is_paused)
        try:
            if not self.is_paused:
                await self.engine.pause()
                self.is_paused = True
            frozen = set(self.engine.running())
            record(
                "pause",
                worker=self.worker,
                version=self.version,
                seconds=time.monotonic() - started,
                in_flight=len(frozen),
            )
            self.is_broken = True  # until the workers say otherwise
            results = await self.engine.rpc("tensorhub_install", version, self.timeout_s)
            failed = [result for result in results if not result["installed"]]
            self.is_broken = any(result["broken"] for result in results)
            if not failed:
                self.version = version
            running, departed = set(self.engine.running()), set(self.engine.departed())
            if not self.is_broken:
                await self._go_on()
            if failed:
                raise UpdateFailed(str(failed[0]["error"]), version=version, phase="install")
            self.last_update = LastUpdate(self._pull_s, time.monotonic() - started, _sources(results))
            record(
                "resume",
                worker=self.worker,
                version=version,
                seconds=time.monotonic() - started,
                in_flight=len(running & frozen),
                lost=len(frozen - running - departed),
            )
        finally:
            self.installing_since = None

    async def _go_on(self) -> None:
        """Resume; what was computed with other weights is forgotten by then, or it stays as it is."""
        await self.engine.forget()
        await self.engine.resume()
        self.is_paused = False


def _sources(results: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for result in results:
        total.update((result.get("report") or {}).get("sources", {}))
    return dict(total)
