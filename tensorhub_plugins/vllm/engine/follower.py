"""One engine follows by itself the version that it is to run, at its own pace: the newest one, or the one that an
operator has pinned. It runs beside the engine's core (core_follower.py); an actor that owns it asks it (ray/owned.py).

The way of one version
    ask for it -> the vLLM workers fetch it while the engine generates -> pause -> install -> resume
Only the last three steps stop the engine, and no other. Weights, KV of the old weights and the version that samples
carry change between pause and resume, as one. A version that fails to arrive costs this engine's freshness and nothing
else. One that fails half way through its installation leaves the engine paused, because mixed weights must not answer,
until an installation succeeds.

It goes back when an operator pins an older version or withdraws the one it runs (`Client.target`), and in no other
case. A version that its workers refuse (VersionRefused) is not taken again, unless it is pinned anew.

An owner may hold the engine at a version, and have prompts wait for one. Where all samples of a prompt must come from
one version the installation waits at a `Gate` until the prompts inside have been answered, and new ones wait outside
meanwhile. Prompts that were to be answered from a later version than the engine is to run are answered from that.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from functools import partial
from typing import Any, Protocol

import msgspec

from tensorhub_plugins.core import (
    REFUSED_MAX,
    Deadline,
    DeadlineExceeded,
    HubUnreachable,
    NotPublished,
    TensorHubError,
    UsageError,
    VersionGone,
    VersionRefused,
    attempt_of,
    record,
    step_of,
    version_of,
    version_text,
    work,
)
from tensorhub_plugins.core.log import get_logger
from tensorhub_plugins.vllm.engine.status import LastUpdate, Status
from tensorhub_plugins.vllm.names import WIRE

logger = get_logger(__name__)

HUB_TIMEOUT_S = 30.0  # one question to the hub; then it is asked again
POLL_INTERVAL_S = 0.02  # of the workers' fetch, at first: each poll is a step in which all workers wait for each other
POLL_INTERVAL_MAX_S = 0.2
UPDATES_MAX = 64  # between two scrapes
POLL_GRACE_S = 5.0  # the workers keep the deadline themselves, and say what failed
RETRY_DELAY_S = 1.0  # after a failed update
RETRY_DELAY_MAX_S = 30.0
ASK_INTERVAL_S = 5.0  # how often a prompt that waits for a version asks whether it is still to come
NEWS_INTERVAL_S = 0.25  # what comes without a notification (a pin, a silent hub) is noticed so soon


class Engine(Protocol):
    """The vLLM engine, see core.py."""

    async def rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every vLLM worker; their answers in rank order."""

    async def pause(self) -> None:
        """Stand still and forget what was computed. What fails leaves it running."""

    async def forget(self) -> None:
        """Drop what was computed with other weights; raises what keeps it from that."""

    async def resume(self) -> None: ...

    async def at_once(self, steps: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Do these steps of the above right after each other, and return what comes of them."""

    def running(self) -> Collection[str]:
        """Return the requests that have not ended."""

    def departed(self) -> Sequence[str]:
        """Return the requests that were aborted since the pause, or since this was asked before."""


class UpdateFailed(TensorHubError):
    """This engine does not have the version, and goes on with the one it had."""


class Gate:
    """Prompts go in and out; while it is closed, those inside finish and the others wait."""

    def __init__(self) -> None:
        self.inside = 0
        self.is_closed = False
        self._changed = asyncio.Condition()

    async def __aenter__(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: not self.is_closed)
            self.inside += 1

    async def __aexit__(self, *_: object) -> None:
        async with self._changed:
            self.inside -= 1
            self._changed.notify_all()

    @property
    def awaits_prompts(self) -> bool:
        """Return whether an installation waits for prompts inside."""
        return self.is_closed and self.inside > 0

    async def close(self) -> None:
        """Close it, and return when no prompt is inside."""
        async with self._changed:
            self.is_closed = True
            await self._changed.wait_for(lambda: self.inside == 0)

    async def open(self) -> None:
        async with self._changed:
            self.is_closed = False
            self._changed.notify_all()


QUESTIONS = frozenset({"news", "hold", "abandon", "release", "enter", "leave"})  # of the owner, see `Follower.answer`


class Follower:
    def __init__(
        self,
        engine: Engine,
        target: Callable[..., int],
        *,
        worker: str,
        timeout_s: float,
        grows: bool = False,
        until: int | None = None,
        pins: bool = True,
        gate: Gate | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Follow `target`: `Client.target` of a client that reads nothing itself; it blocks, so it is run in a thread.

        grows: what works may take longer than timeout_s. until: the last version to follow. pins=False: for an engine
        that must have the trainer's newest, whatever is pinned. gate: where all samples of a prompt come from one
        version."""
        self.engine = engine
        self.target, self.worker = target, worker
        self.origin: Callable[[int], str | None] = lambda version: None  # see `Client.origin`
        self.timeout_s, self.grows = timeout_s, grows
        self.until, self.pins = until, pins
        self.gate, self.sleep = gate, sleep
        self.refused: dict[int, str] = {}  # versions that cannot be installed in this engine, and why
        self._said = ""  # why there is nothing to run
        self._failure = ""  # of the last try, for the hub
        self.version = 0  # installed; 0: what the engine was started with
        self.last = 0  # of those that it follows, once it has had that
        self.is_broken = False  # an installation failed half way: nothing may be generated
        self.is_paused = False  # and if nothing is broken or installed: because it cannot forget
        self._is_installing = False
        self._busy_since = 0.0
        self.last_update = LastUpdate()
        self.updates = deque[LastUpdate](maxlen=UPDATES_MAX)  # not asked for yet
        self._pull_s = 0.0  # of the version that is being taken
        self._was_whole = True  # when the installation under way began
        self.has_caught_up = False
        self.is_held = self._holds_waiting = False  # stay with this version; a hold waits until its own is published
        self._releases = 0  # each ends all holds before it
        self._lapse: asyncio.Task[None] | None = None  # ends that in time
        self._asked_with = 0  # the version that was installed when the last question was asked
        self._one_update = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._told = Status()
        self._prompts: dict[str, asyncio.Task[Any] | AbstractAsyncContextManager[None]] = {}  # waiting, or inside

    @property
    def is_whole(self) -> bool:
        """Return whether it answers from one version, or will when the installation under way has ended."""
        return not (self.is_broken or self.is_paused) or (self._is_installing and self._was_whole)

    @property
    def refusal(self) -> tuple[int, str]:
        """Return the newest version that was refused, and why, if it is above the installed one; else (0, "")."""
        newest = max(self.refused, default=0)
        return (newest, self.refused[newest]) if newest > self.version else (0, "")

    async def follow(self) -> None:
        """Follow for as long as the engine runs."""
        delay_s = RETRY_DELAY_S
        while self.is_paused or self.until is None or step_of(self.version) < self.until:
            try:
                if self.is_paused and not self.is_broken:
                    await self._go_on()
                version = await self.next_version()
                if version is not None:
                    await self.take(version)
                    delay_s, self._failure = RETRY_DELAY_S, ""
            except TensorHubError as error:
                if str(error) != self._failure:  # else it is what it was
                    how = "standing still" if self.is_paused else "going on"
                    logger.warning("%s: %s with version %d: %s", self.worker, how, self.version, error)
                self._failure = str(error)
                await self.sleep(delay_s)
                delay_s = min(2 * delay_s, RETRY_DELAY_MAX_S)
        self.last = self.version

    async def next_version(self) -> int | None:
        """Return the version to run, if it is not the installed one; or None: ask again."""
        self._asked_with = self.version
        installed = 0 if self.is_broken else self.version  # the same version repairs, too
        try:
            version = await asyncio.to_thread(
                self.target,
                installed,
                refused=dict(self.refused),
                pins=self.pins,
                failure=self._failure,
                timeout_s=HUB_TIMEOUT_S,
            )
        except (NotPublished, DeadlineExceeded, VersionGone, HubUnreachable) as error:
            await self._nothing_to_run(error)
            return None
        self._said = ""
        if self.until is not None and step_of(version) > self.until:
            if not self.last:
                await self.sleep(RETRY_DELAY_S)  # the last one to follow was missed: stay with what there is
                return None
            if self.last in self.refused or not await self.is_visible(self.last):
                raise UpdateFailed(f"{self.worker} follows no later version, and cannot have it", version=self.last)
            return self.last  # others have changed or lost it
        if version in self.refused:
            logger.info("%s: version %d was refused, and is tried again because it was pinned", self.worker, version)
            del self.refused[version]
        return version

    async def _nothing_to_run(self, error: TensorHubError) -> None:
        """Say why, once, and wait where the hub did not."""
        is_trouble = isinstance(error, VersionGone | HubUnreachable)  # nothing to go to, or it is not known what
        self._say(f"staying with version {self.version}: {error}" if is_trouble else "")
        if isinstance(error, HubUnreachable):
            await self.sleep(RETRY_DELAY_S)

    def _say(self, what: str) -> None:
        """Warn of what goes on, unless that was the last that was said; "": all is well."""
        if what and what != self._said:
            logger.warning("%s: %s", self.worker, what)
        self._said = what

    async def catch_up(self) -> None:
        """Bring an engine that was started again to the version to run before it answers anything: it has the weights
        of before the training. One that refuses all there is stays with them, and says so."""
        while not self.has_caught_up:
            try:
                version = await asyncio.to_thread(
                    self.target, 0, refused=dict(self.refused), pins=self.pins, timeout_s=0.0
                )
                if version != self.version and bounded(version, self.until) == version:
                    await self.update(version)
                self.has_caught_up = True
            except NotPublished:
                self.has_caught_up = True
            except (UpdateFailed, HubUnreachable, DeadlineExceeded, VersionGone) as error:  # there may be another soon
                self._say(f"trying again: {error}")
                await self.sleep(RETRY_DELAY_S)
        await self._notify()

    async def take(self, version: int) -> None:
        """Update to this version, unless the engine is held."""
        async with self._changed:
            if self.is_held:
                await self._changed.wait_for(lambda: not self.is_held)
                return  # there may be a newer one by now
        async with self._one_update:
            # It may have been held since, and have got another one: then this answer is an old one.
            if not self.is_held and self.version == self._asked_with:
                await self.update(version)

    async def update(self, version: int) -> None:
        """Bring this engine to `version`. One at a time."""
        started = time.monotonic()
        try:
            ready = await self.make_ready(version)
            if ready is not None:
                await self.prepare(ready)
                self._pull_s = time.monotonic() - started
                await self.install(ready)
        finally:
            await self._notify()

    async def make_ready(self, version: int) -> int | None:
        """Fetch it, and return what is to be installed now; None: ask again. Here a subclass may wait."""
        await self.fetch(version)
        return version

    async def fetch(self, version: int) -> None:
        """Have every worker get its bytes, verified, beside generation."""
        interval_s, began, worked = POLL_INTERVAL_S, time.monotonic(), 0
        await self.engine.rpc("tensorhub_start_fetch", version, self.timeout_s, self.grows)
        while True:
            workers = await self.engine.rpc("tensorhub_poll")
            if all(worker["state"] == "ready" for worker in workers):
                return
            before, worked = worked, sum(worker.get("worked", 0) for worker in workers)
            if self.grows and worked != before:
                began = time.monotonic()
            is_late = time.monotonic() >= began + self.timeout_s + POLL_GRACE_S
            if any(worker["state"] == "fetching" for worker in workers) and not is_late:
                interval_s = min(1.1 * interval_s, POLL_INTERVAL_MAX_S)  # a tenth of what it has taken
                await self.look()
                await self.sleep(interval_s)
                continue
            raise await self._not_fetched(version, workers)

    async def look(self) -> bool:
        """Return whether the weights that answer meanwhile are lost. Here a subclass may look."""
        return False

    async def _not_fetched(self, version: int, workers: Sequence[Mapping[str, Any]]) -> UpdateFailed:
        self._note_refusal(version, workers)
        if any(worker["state"] == "ready" for worker in workers):  # of one engine all install, or none
            await self.engine.rpc("tensorhub_discard")
        errors = [str(worker["error"]) for worker in workers if worker["error"]]
        return UpdateFailed("; ".join(errors) or "not fetched in time", version=version, phase="fetch")

    async def prepare(self, version: int) -> None:
        """Wait until no peer reads what the installation will overwrite; the engine still generates."""
        try:
            await self._may_be_busy()
            await self.engine.rpc("tensorhub_prepare_install", self.timeout_s)
        except Exception as error:
            if self._note_refusal(version, await self.engine.rpc("tensorhub_poll")):
                await self.engine.rpc("tensorhub_discard")
                raise UpdateFailed(str(error), version=version, phase="prepare") from error
            raise
        finally:
            self._busy_since = 0.0

    async def _may_be_busy(self) -> None:
        """Note that the workers answer nothing else until they have done this."""
        self._busy_since = time.monotonic()
        await self._notify()

    def _note_refusal(self, version: int, workers: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether a worker says that this version cannot be installed: then it is not fetched again."""
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
        """Install it, between two prompts where one may not see two versions."""
        try:
            if self.gate is not None:
                await self.gate.close()
            await self._install(version)
        finally:
            if self.gate is not None:
                await self.gate.open()

    async def _install(self, version: int) -> None:
        """Stop the engine, install and resume."""
        started, was = time.monotonic(), self.version
        self._is_installing, self._was_whole = True, not (self.is_broken or self.is_paused)
        try:
            await self._may_be_busy()
            if not self.is_paused:
                await self.engine.pause()
                self.is_paused = True
            frozen = set(self.engine.running())
            how = {"seconds": time.monotonic() - started, "in_flight": len(frozen), "t": time.time()}
            try:
                results, here, gone = await self.engine.at_once(partial(self._switch, version))
            finally:  # before, the pause would last longer for it
                record("pause", worker=self.worker, version=was, **how)
            failed = [result for result in results if not result["installed"]]
            if failed:
                raise UpdateFailed(str(failed[0]["error"]), version=version, phase="install")
            self.last_update = LastUpdate(self._pull_s, time.monotonic() - started, *_read(results))
            self.updates.append(self.last_update)
            lost = len(frozen - here - gone)
            how = {"seconds": time.monotonic() - started, "in_flight": len(here & frozen), "lost": lost}
            record("resume", worker=self.worker, version=version, origin=self.origin(version), **how)
        finally:
            self._is_installing, self._busy_since = False, 0.0

    async def _switch(self, version: int) -> tuple[list[Any], set[str], set[str]]:
        """Install and resume. Return what the workers say, and before that the requests that ran, and had departed."""
        self.is_broken = True  # until the workers say otherwise
        results = await self.engine.rpc("tensorhub_install", version, self.timeout_s)
        self.is_broken = any(result["broken"] for result in results)
        self.version = version if all(result["installed"] for result in results) else self.version
        running, departed = set(self.engine.running()), set(self.engine.departed())
        if not self.is_broken:
            await self._go_on()
        return results, running, departed

    async def _go_on(self) -> None:
        """Resume once what was computed with other weights is forgotten; else it stays as it is."""
        await self.engine.forget()
        await self.engine.resume()
        self.is_paused = False

    # --- what the owner asks ------------------------------------------------------------------------------------------

    async def answer(self, question: str, *args: Any) -> tuple[tuple[str, str, int], Any]:
        """Return what comes of it: the error as its kind, message and version ("" and 0: none), and the answer."""
        try:
            if question not in QUESTIONS:
                raise UsageError(f"unknown question {question!r:.80}")
            return ("", "", 0), await getattr(self, question)(*args)
        except TensorHubError as error:
            return (type(error).__name__, error.message, error.version or 0), None
        except Exception as error:  # a worker's
            return (UpdateFailed.__name__, f"{type(error).__name__}: {error}", 0), None

    async def news(self, revision: int) -> dict[str, Any]:
        """Return the status, as soon as it is another one than that."""
        while self.status_now().revision == revision:
            async with self._changed:
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), NEWS_INTERVAL_S)
        return msgspec.to_builtins(self._told)

    def status_now(self) -> Status:
        """Return the status, in a new revision if it has changed. Call where it follows."""
        now = self.look_at_itself()
        if now != self._told:
            self._told = msgspec.structs.replace(now, revision=self._told.revision + 1)
        return self._told

    def look_at_itself(self) -> Status:
        """Return the status, in the revision that was told last."""
        of_hub = self.of_hub()
        attempt, is_pinned = of_hub.get("attempt", 0), self.pins and of_hub.get("pinned") is not None
        if not self.is_whole:
            of_hub["why_not"] = f"{self.worker} has no whole weights"
        elif not is_pinned and attempt_of(self.version) < attempt:
            # It may be far behind the step from which the trainer resumes, or of a past that did not happen.
            version = f"{self.worker} has version {version_text(self.version)}"
            of_hub["why_not"] = f"{version}, and waits for the first of attempt {attempt}"
        is_last = self.until is not None and step_of(self.version) >= self.until
        return msgspec.structs.replace(
            self._told,
            version=self.version,
            is_broken=self.is_broken and not self.is_whole,  # an install under way passes for what it was before
            has_caught_up=self.has_caught_up,
            busy_since=self._busy_since,
            refusal=self.refusal,
            stays=is_last or self.refusal[0] > 0 or is_pinned,
            last=self.last_update,
            **of_hub,
        )

    def of_hub(self) -> dict[str, Any]:
        """Return what the status says of the hub."""
        return {"why_not": ""}

    async def hold(self, version: int = 0, for_s: float | None = None) -> int:
        """Stay with the version that is installed, or with `version` if one is given, until `release`, or for so long.
        UpdateFailed when it cannot; one that is broken goes on following then, to be repaired."""
        version = bounded(version, self.until)
        self.is_held, releases = True, self._releases  # at once: a `release` that comes while this waits is of this
        try:
            async with self._one_update:
                self._must_be_held(releases)
                self._end_lapse()
                if version and (self.is_broken or self.version != version):
                    await self._come(version, releases)
                    await self.update(version)
                if self.is_broken:
                    raise UpdateFailed(f"{self.worker} has no whole weights now", version=self.version, phase="hold")
                return self.version
        finally:
            if self.is_broken:
                await self.release()
            elif for_s is not None and self.is_held and self._lapse is None:
                self._lapse = asyncio.create_task(self._release_after(for_s))

    async def _come(self, version: int, releases: int) -> None:
        """Return when this version is visible. A release ends this, and could not end a fetch of what does not come."""
        deadline, self._holds_waiting = Deadline.after(self.timeout_s), True
        try:
            while not await self.is_visible(version):
                self._must_be_held(releases)
                if deadline.expired:
                    text = f"{self.worker} was to be held at a version that is not published"
                    raise UpdateFailed(text, version=version, phase="hold", timeout_s=self.timeout_s)
        finally:
            self._holds_waiting = False

    async def is_visible(self, version: int) -> bool:
        """Return whether a fetch of it would find it, after a moment if not. Here a subclass may ask the hub."""
        return True

    def _must_be_held(self, releases: int) -> None:
        if self._releases != releases:
            raise UpdateFailed(f"{self.worker} was released before it was held", phase="hold")

    async def abandon(self) -> None:
        """End a hold that waits for its version, as its client has left. What is held stays so until that lapses."""
        if self._holds_waiting:
            await self.release()

    async def release(self) -> None:
        self._end_lapse()
        self.is_held, self._releases = False, self._releases + 1
        await self._notify()

    async def _release_after(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._lapse = None  # it is this one
        logger.warning("%s: goes on: it was held for %.0f s, and not again", self.worker, seconds)
        await self.release()

    def _end_lapse(self) -> None:
        if self._lapse is not None:
            self._lapse.cancel()
            self._lapse = None

    async def enter(self, name: str, version: int) -> int:
        """Return when this prompt may begin, see `answering`: the version it begins with. It ends with `leave`, in any
        case."""
        task = asyncio.current_task()
        assert task is not None
        self._prompts[name] = task
        prompt = self.answering(version)
        try:
            await prompt.__aenter__()
        except BaseException:
            self._prompts.pop(name, None)
            raise
        self._prompts[name] = prompt
        return self.version

    async def leave(self, name: str) -> None:
        prompt = self._prompts.pop(name, None)
        if isinstance(prompt, asyncio.Task):
            prompt.cancel()
        elif prompt is not None:
            await prompt.__aexit__(None, None, None)

    @asynccontextmanager
    async def answering(self, version: int) -> AsyncIterator[None]:
        """Yield for a prompt when this version or a later one is installed (`_need`)."""
        deadline = Deadline.after(self.timeout_s)
        while True:
            await self._need(version, deadline)
            async with self.gate or nullcontext():
                if not self.is_broken:  # by what it has waited for at the gate: the next installation waits for it
                    yield
                    return

    async def _need(self, version: int, deadline: Deadline) -> None:
        """Return when this version or a later one is installed; UpdateFailed at the deadline, which is put off while
        the installation waits for prompts; VersionRefused when it cannot be. An older one is enough when that is what
        operators want to be run."""
        version = bounded(version, self.until)
        while self.is_broken or self.version < version:
            version = min(version, await self._to_run_instead_of(version))
            refused, why = self.refusal
            if refused >= version > self.version:
                raise VersionRefused(why, version=refused)
            if self.gate is not None and self.gate.awaits_prompts and not self.is_broken:
                deadline = Deadline.after(self.timeout_s)  # this engine works, and its agent or reward takes so long
            until = work.until(deadline - self.timeout_s, work.last_at(), self.timeout_s) if self.grows else deadline
            if time.monotonic() >= until:
                raise UpdateFailed(
                    f"{self.worker} has version {self.version} and was asked to answer from a later one",
                    version=version,
                    phase="need",
                    timeout_s=self.timeout_s,
                )
            await self._reach(version, min(deadline.remaining() or ASK_INTERVAL_S, ASK_INTERVAL_S))

    async def _reach(self, version: int, timeout_s: float) -> None:
        """Wait until it is installed, or refused, at most for so long."""

        def is_decided() -> bool:
            return self.refusal[0] >= version or (self.version >= version and not self.is_broken)

        async with self._changed:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait_for(is_decided), timeout_s)

    async def _to_run_instead_of(self, version: int) -> int:
        """Return what the hub says now; the same one if it does not answer, 0 when there is nothing to be run."""
        try:
            return await asyncio.to_thread(self.target, version, pins=self.pins, timeout_s=0.0)
        except (NotPublished, DeadlineExceeded, HubUnreachable):
            return version
        except VersionGone:
            return 0

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def bounded(version: int, until: int | None) -> int:
    """Return this version, or the last one that is followed."""
    return version if until is None else version_of(attempt_of(version), min(step_of(version), until))


def _read(results: Sequence[Mapping[str, Any]]) -> tuple[dict[str, int], dict[str, int]]:
    """Return how many bytes the workers of an engine have read, by source and by way."""
    sources, ways = Counter[str](), Counter[str]()
    for result in results:
        report = result.get("report") or {}
        sources.update(report.get("sources", {}))
        ways.update({**report.get("ways", {}), WIRE: report.get("wire_size_bytes", 0)})
    return dict(sources), dict(ways)
