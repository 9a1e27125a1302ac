"""What the store adds to vLLM's engine core, the process with the scheduler: only there can weights and caches be one.

`attach` is called (see plugin.py) before the first request of engines with `--load-format tensorhub`, with the weight
transfer backend `tensorhub`, or with an owner (verl, OpenRLHF).

    Weights and caches change as one    Before and after every update_weights, and every reload_weights, the prefix and
                                        encoder caches are forgotten and running requests are computed anew, in
                                        whatever mode the engine was paused, or not at all (but where that would lose
                                        prompt_logprobs). Where vLLM does not forget before, nothing changes; where it
                                        does not afterwards, the engine stands still, and finish_weight_update and
                                        resume fail until it has (caches.py). The cache of prepared images stays: it
                                        holds inputs, and the API server's half of it would not be told.
    Weights and labels change as one    vLLM's weight_version is the workers' after each of those, or "none".
    Broken weights are not used         What fails half way pauses the engine; resume fails, it stays paused and alive:
                                        update again. In the process of its caller each step raises until then.
    "follow"                            The engine switches to every new version by itself, and back to a pinned one,
                                        see follower.py. It tells which version each token came from (spans.py).
                                        One that has an owner does so when that says how (ray/owned.py).

What it tells others over HTTP: see routes.py.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import msgspec

from tensorhub_plugins.core import (
    Client,
    DeadlineExceeded,
    HubUnreachable,
    NotPublished,
    TensorHubError,
    UsageError,
    options,
)
from tensorhub_plugins.core.log import get_logger
from tensorhub_plugins.vllm.config import FollowConfig, WorkerConfig, parse, shares_experts
from tensorhub_plugins.vllm.engine.caches import Caches, StaleCaches
from tensorhub_plugins.vllm.engine.core import Core, before_shutdown, label
from tensorhub_plugins.vllm.engine.follower import (
    POLL_INTERVAL_S,
    RETRY_DELAY_MAX_S,
    RETRY_DELAY_S,
    Follower,
    Gate,
    UpdateFailed,
)
from tensorhub_plugins.vllm.engine.ranks import FirstRank, OtherRank, store_of
from tensorhub_plugins.vllm.engine.spans import Place, Start
from tensorhub_plugins.vllm.engine.staleness import Staleness
from tensorhub_plugins.vllm.engine.status import Following, following
from tensorhub_plugins.vllm.names import NAME
from tensorhub_plugins.vllm.plugin import around
from tensorhub_plugins.vllm.worker.extension import learn_secret
from tensorhub_plugins.vllm.worker.methods import may_change_weights

if TYPE_CHECKING:
    from tensorhub_plugins.vllm.engine.adapters import AdapterFollowers, OneAdapter

    Here: TypeAlias = "CoreFollower | OtherRank | AdapterFollowers"

logger = get_logger(__name__)

T = TypeVar("T")

NEEDED = (
    "reset_prefix_cache", "reset_encoder_cache", "collective_rpc", "abort_requests", "resume_scheduler",
    "pause_scheduler", "is_scheduler_paused", "shutdown",
)  # fmt: skip
CHANGES = ("update_weights", "reload_weights")  # vLLM's calls of workers that change weights, whosever back end it is
HUB_TIMEOUT_S = 1.0  # one question to the hub; it answers at once when there is something new
DEAD_POLL_S = 1.0  # how often what waits for an answer of the core looks whether that is dead
HEALTH_TIMEOUT_S = 2.0  # of one question to the workers
PAUSED_S = 5.0  # an engine may be paused by another client before that is reported: most do so for a moment
PAUSED = "another client has paused this engine, or put it to sleep; it installs nothing until that client resumes it"


def attach(core: Any, vllm_config: Any, *, owned: bool = False) -> None:
    """Add what this engine's configuration asks for; UsageError if it cannot have it. owned: it tells its owner which
    version each token came from, and follows once that says how (ray/owned.py)."""
    missing = [name for name in NEEDED if not hasattr(core, name)]
    if missing:
        raise UsageError(
            f"vLLM's engine core has no {', '.join(missing)}: use a version that the store was tested with"
        )
    caches = Caches(core)
    around(core, "collective_rpc", partial(_as_one, core, caches))
    around(core, "resume_scheduler", partial(_only_if_whole, core, caches))
    core.tensorhub_status, core.tensorhub_updates = lambda: None, list  # it does not follow
    core.tensorhub_label = partial(label, core)
    if vllm_config.load_config.load_format == NAME:
        _follow(core, caches, vllm_config)
    # One in the process of its caller has no queue, and nothing asks it.
    if owned and hasattr(core, "input_queue") and not hasattr(core, "tensorhub_starts"):
        whole = Core(core, caches)
        core.tensorhub_starts, core.tensorhub_label = whole.starts, whole.relabel
        core.tensorhub_follow = partial(_follow_owner, core, whole)
        core.tensorhub_leave = lambda: None  # it does not follow
        whole.settle(_version(core) or 0)


def _as_one(core: Any, caches: Caches, original: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
    """Have what changes weights change caches and label with them, also when it fails."""

    def change() -> Any:
        before, *number = _weights(core)

        def settled() -> int | None:
            after, *number_now = _weights(core)
            is_other = (after, number_now) != (before, number)  # of no version they may be others, too
            caches.is_stale |= is_other and method != "start_weight_update"  # which only begins a round
            return after

        try:
            result = original(method, *args, **kwargs)
        except Exception:
            with suppress(Exception):  # of workers that are gone
                after = settled()
                if after != before:
                    core.tensorhub_label(after or 0)
                if _is_broken(core):
                    caches.is_stale = True
                    caches.why_stale()
                    if hasattr(core, "input_queue"):  # its next step would end this process; else its caller hears why
                        _stand_still(core)
            raise
        after = settled()
        if after != before or not after:  # else it may be a text of another owner
            core.tensorhub_label(after or 0)
        return result

    if method == "finish_weight_update" and caches.why_stale():
        raise StaleCaches(caches.refusal)
    if method == "start_weight_update":
        return change()
    if method not in CHANGES and not may_change_weights(method):
        answers = original(method, *args, **kwargs)
        return [worker or caches.refusal or None for worker in answers] if method == "tensorhub_health" else answers
    if method in CHANGES:
        caches.check_steps()
        caches.forget()  # or nothing changes
        caches.is_stale = True
    try:
        result = change()
    finally:
        why = caches.why_stale()
        if why:
            _stand_still(core)
    if why:
        raise StaleCaches(f"{why}; the engine stands still until a client resumes it")
    return result


def _stand_still(core: Any) -> None:
    if not core.is_scheduler_paused():
        getattr(core, "tensorhub_pause", core.pause_scheduler)("keep", False)


def _version(core: Any) -> int | None:
    """Return the version that all workers have, whole; 0: none of the store's; None: they are not in the store."""
    return _weights(core)[0]


def _weights(core: Any) -> tuple[int | None, ...]:
    """Return the version, as `_version` does, and a number of each worker, which is another one after each change."""
    versions, numbers = zip(*core.model_executor.collective_rpc("tensorhub_weights"), strict=True)
    return versions[0] if len({*versions}) == 1 and not _is_broken(core) else 0, *numbers


def _is_broken(core: Any) -> bool:
    return any(core.model_executor.collective_rpc("tensorhub_health"))


def _only_if_whole(core: Any, caches: Caches, original: Any, *args: Any, **kwargs: Any) -> Any:
    # Where all data parallel ranks stand still they resume as one, or none does: the others would wait for it.
    stale = caches.why_stale()
    if getattr(core, "ignore_start_dp_wave", False):
        core.model_executor.collective_rpc("tensorhub_guard_all", args=(stale,))
    else:
        core.model_executor.collective_rpc("tensorhub_guard")
    if stale:
        raise StaleCaches(stale)
    return original(*args, **kwargs)


async def check_weights(engine: Any) -> None:
    """Raise vLLM's EngineDeadError (HTTP 503 of /health) while the weights must not be used. Call in the API server.

    engine: AsyncLLM. One that is busy, as with an install, is not asked for long, and passes for well."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        asked = of_all_cores(engine.engine_core, "collective_rpc", "tensorhub_health")
        workers = [worker for core in await asyncio.wait_for(asked, HEALTH_TIMEOUT_S) for worker in core]
    except asyncio.TimeoutError:
        return
    broken = next((worker for worker in workers if worker), None)
    if broken:
        error = EngineDeadError()
        error.args = (f"the engine holds its requests until it has whole weights: {broken}",)
        raise error


async def of_all_cores(client: Any, method: str, *arguments: Any) -> list[Any]:
    """Return the answers of all cores. Of data parallel engines vLLM's own call gives that of the first one.

    client: AsyncLLM's, of its engine cores."""
    cores = getattr(client, "core_engines", ())
    if len(cores) < 2:
        return [await of_core(client, method, *arguments)]
    asked = (client._call_utility_async(method, *arguments, engine=each) for each in cores)
    return list(await _unless_dead(client, asyncio.gather(*asked)))


async def of_core(client: Any, method: str, *arguments: Any) -> Any:
    """Return the answer of the first core. Raise EngineDeadError where it dies meanwhile, or has died."""
    return await _unless_dead(client, client.call_utility_async(method, *arguments))


async def _unless_dead(client: Any, asked: Awaitable[T]) -> T:
    """Return the answer. vLLM leaves what its cores were asked unanswered when they die, and a server waits at its end
    for the HTTP requests that wait for that."""
    answer = asyncio.ensure_future(asked)
    try:
        while not (await asyncio.wait({answer}, timeout=DEAD_POLL_S))[0]:
            if client.resources.engine_dead:
                from vllm.v1.engine.exceptions import EngineDeadError

                raise EngineDeadError
        return answer.result()
    finally:
        answer.cancel()


async def starts_in(client: Any, request: str, *, forget: bool = False) -> list[tuple[Place, list[Start]]]:
    """Return where the versions of each of this request's answers start; none: it is not known, or of beam search, or
    two requests had this name. forget: afterwards. Call in the API server."""
    cores = await of_all_cores(client, "tensorhub_starts", request, forget)
    found = sorted(answer for core in cores for answer in core)
    if len({tuple(place) for place, _ in found}) < len(found) or not all(starts for _, starts in found):
        return []
    return found


# --- following ---


def _follow(core: Any, caches: Caches, vllm_config: Any) -> None:
    start, joining = parse(vllm_config.load_config.model_loader_extra_config, vllm_config)
    lora = () if joining is None else joining.lora
    if start.follow is None and not lora:
        return
    assert joining is not None
    if not hasattr(core, "input_queue"):
        raise UsageError(
            'this engine runs in the process of its caller and steps only when told to, so it cannot "follow": '
            "set VLLM_ENABLE_V1_MULTIPROCESSING=1, or update it by tensorhub_start_fetch and tensorhub_install"
        )
    alone = not shares_experts(vllm_config)
    parallel, whole = vllm_config.parallel_config, Core(core, caches, alone=alone)
    how = FollowConfig(when=start.follow or "now", patience_s=start.follow_patience_s)
    here: Here
    if lora:
        here = _follow_adapters(core, whole, joining, how, wait_s=start.wait_s)
    elif alone:
        here = CoreFollower(whole, joining, how)
        if start.may_be_held:
            core.tensorhub_ask = here.ask
    elif parallel.data_parallel_rank == 0:
        here = CoreFollower(FirstRank(whole, store_of(core), parallel.data_parallel_size), joining, how)
    else:
        here = OtherRank(whole, store_of(core), parallel.data_parallel_rank, joining, start)
    core.tensorhub_starts, core.tensorhub_label = whole.starts, whole.relabel
    _begin(core, here)


def _follow_adapters(
    core: Any, whole: Core, joining: WorkerConfig, how: FollowConfig, *, secret: str | None = None, wait_s: float = 0.0
) -> AdapterFollowers:
    """Have the workers join the histories of the adapters. wait_s: wait for the first version of each, before the
    engine answers anything; 0: requests run on the weights alone until it comes."""
    from tensorhub_plugins.vllm.engine.adapters import AdapterFollowers

    core.collective_rpc("tensorhub_connect_adapters", args=(msgspec.structs.asdict(joining), secret, wait_s))
    return AdapterFollowers(whole, joining, how)


def _begin(core: Any, here: Here) -> None:
    core.tensorhub_status = here.status
    if not isinstance(here, OtherRank):
        core.tensorhub_updates = here.take_updates
    before_shutdown(core, here.close)
    here.start()


def _follow_owner(core: Any, whole: Core, joining: dict[str, Any], how: dict[str, Any], secret: str | None) -> Any:
    """Call in the core's loop. Join the store, unless the engine has started from it, and follow; return the error,
    as `Follower.answer` does."""
    try:
        if hasattr(core, "tensorhub_ask"):
            raise UsageError("this engine follows already: two owners would update it one over the other")
        learn_secret(secret)
        config = options.convert(how, FollowConfig, where="what the owner of this engine says")
        whole.pause_mode, whole.recompute = config.pause_mode, config.recompute
        parsed = WorkerConfig.parse(joining)
        if parsed.lora:
            (here,) = _follow_adapters(core, whole, parsed, config, secret=secret).each.values()
        else:
            here = CoreFollower(whole, parsed, config)
            if _version(core) is None:
                core.collective_rpc("tensorhub_connect", args=(joining, secret))
    except TensorHubError as error:
        return (type(error).__name__, error.message, error.version or 0), None
    except Exception as error:  # a worker's
        return (UpdateFailed.__name__, f"tensorhub_connect: {error}", 0), None
    core.tensorhub_ask, core.tensorhub_leave = here.ask, partial(_leave, core, whole, here)
    _begin(core, here)
    if hasattr(core, "tensorhub_compiled"):
        core.tensorhub_compiled.offer(parsed)
    return ("", "", 0), None


def _leave(core: Any, whole: Core, here: CoreFollower) -> Future[None]:
    """Call in the core's loop. Follow no more, and say so: the hub forgets this engine at once."""
    here.close()
    whole.undo_pause()
    core.collective_rpc("tensorhub_close")
    if hasattr(core, "tensorhub_compiled"):
        core.tensorhub_compiled.close()
    return here.ended


class _ClosedError(Exception):
    """The engine is being shut down: ends the thread."""


class CoreFollower(Follower):
    """An engine core that follows by itself, in a thread of its own beside the core's loop.

    when "now": at once; requests that are running are kept, and computed anew from their tokens under the new weights.
    "idle": when no request waits or runs, after patience_s at once; a newer version that appears meanwhile is fetched
    instead, and one that is not to be run any more is dropped. While another client has paused the engine, or put it to
    sleep, nothing is switched; but one that stands still after an update that failed is mended, and stays paused."""

    def __init__(self, core: Core | FirstRank | OneAdapter, joining: WorkerConfig, how: FollowConfig) -> None:
        super().__init__(
            core,
            self._ask_hub,
            worker=how.worker or joining.replica,
            timeout_s=how.timeout_s,
            grows=how.grows,
            until=how.until,
            pins=how.pins,
            gate=Gate() if how.whole_prompts else None,
        )
        self._core, self._joining, self._how = core, joining, how
        self._client: Client | None = None
        self._joins = threading.Lock()
        self._look_at = 0.0  # when to look again at what others have made of the weights, while it waits for its moment
        self._wanted = 0  # the version to run, as the hub last said
        self._behind = (0, 0.0)  # a version that was installed, and since when another one is to be run
        self._patient = (-1, 0.0)  # a version that was installed, and until when others wait for an idle moment
        self._installed = (0, time.monotonic())  # the version that is, and since when
        self._staleness = Staleness(lambda: self._hub_silent_s, how.staleness_s, worker=self.worker)
        self._began_at = time.monotonic()
        self._runs, self._end = threading.Event(), threading.Event()
        self.ended: Future[None] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._work: asyncio.Task[None]  # once there is a loop
        self._thread = threading.Thread(target=self._run, name="tensorhub-follow", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._runs.wait()

    def status(self) -> Following:
        """Return which run it follows, and how far it is. Call in the core's loop."""
        now, version = time.monotonic(), self._core.version
        told = msgspec.structs.replace(self.look_at_itself(), version=version)
        if self._installed[0] != version:
            self._installed = version, now
        return {
            **following(self._joining, self._how.when, told, self._hub_silent_s),
            "wanted": self._wanted,
            "behind_s": now - self._behind[1] if self._behind[0] == version != self._wanted else 0.0,
            "installed_s": now - self._installed[1],
            "failure": self._failure,
            "updating": self._one_update.locked(),
            "paused": self._core.is_paused_by_another,
        }

    def take_updates(self) -> list[tuple[float, float]]:
        """Return the pull_s and pause_s of each version that was installed since the last call."""
        taken = [self.updates.popleft() for _ in range(len(self.updates))]
        return [(each.pull_s, each.pause_s) for each in taken]

    def _refused_still(self, installed: int) -> int:
        """Return what would be to be run if this engine took all; one that it refuses may have been withdrawn."""
        assert self._client is not None
        try:
            return self._client.target(installed, pins=self.pins, timeout_s=0.0)
        except NotPublished:
            return installed or self.version

    def _want(self, version: int) -> None:
        """Note what the hub says is to be run."""
        version = min(version, self.last or version)
        self._patient = (-1, 0.0) if version == self.version else self._patient
        if self._behind[0] != self.version or self._wanted == self.version:
            self._behind = self.version, time.monotonic()
        self._wanted = version

    def ask(self, question: str, given: Sequence[Any]) -> Future[Any]:
        """Call in the core's loop. See `answer`; vLLM takes no *args."""
        if self._closed:
            gone: Future[Any] = Future()
            gone.set_result(((UpdateFailed.__name__, f"{self.worker} has left the store", 0), None))
            return gone
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(self.answer(question, *given), self._loop)

    def of_hub(self) -> dict[str, Any]:
        client = self._client
        known = {} if client is None else {"pinned": client.pinned, "attempt": client.attempt}
        return {**known, "why_not": self._staleness.why_not()}

    @property
    def _hub_silent_s(self) -> float:
        """Return for how long the hub has not answered. It had answered the workers before this began."""
        return time.monotonic() - self._began_at if self._client is None else self._client.hub_silent_s

    def close(self) -> None:
        """End the thread, and do not wait for it: it may wait for the core's loop, in which this is called."""
        self._end.set()
        if self._loop is not None:
            with suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self._work.cancel)

    @property
    def _closed(self) -> bool:
        return self._end.is_set()

    def _run(self) -> None:
        try:
            with suppress(asyncio.CancelledError):  # wherever it waits, see `close`
                asyncio.run(self._follow_always())
        finally:
            if self._client is not None:
                self._client.close()
            self.ended.set_result(None)

    async def _follow_always(self) -> None:
        watching = asyncio.create_task(self._staleness.watch())
        work = asyncio.current_task()
        assert work is not None
        self._loop, self._work = asyncio.get_running_loop(), work
        self._runs.set()
        delay_s, version = RETRY_DELAY_S, 0
        while not self._closed:
            try:
                await self._follow_on()
            except Exception as error:  # whatever it is, the next version may succeed
                if not self._closed:
                    self._failure = str(error)
                    logger.warning("%s: following goes on after %s: %s", self.worker, type(error).__name__, error)
                    delay_s = RETRY_DELAY_S if version != self.version else min(2 * delay_s, RETRY_DELAY_MAX_S)
                    version = self.version
                    await asyncio.to_thread(self._end.wait, delay_s)
        watching.cancel()

    async def _follow_on(self) -> None:
        workers = await self.engine.rpc("tensorhub_poll")
        self.version = min(worker["version"] or 0 for worker in workers)
        self.is_broken = any(worker["broken"] for worker in workers)
        if self.version > 0:
            self._core.settle(self.version)
        if self._how.catches_up:
            await self.catch_up()
        while not self._closed:
            await self.follow()
            await self.sleep(HUB_TIMEOUT_S)  # it has the last version that it follows
            await self._notice()

    def _ask_hub(self, installed: int, *, timeout_s: float, **more: Any) -> int:
        """Ask `Client.target` in short turns: an engine that is shut down does not wait for a version."""
        client = self._joined()
        try:
            version = client.target(installed, timeout_s=min(timeout_s, HUB_TIMEOUT_S), **more)
        except NotPublished:
            self._want(self._refused_still(installed) if self.refusal[0] else installed or self.version)
            if installed == self.version and not self.refusal[0]:
                self._failure = ""  # it has what is to be run
            raise
        self._want(version)
        return version

    def _joined(self) -> Client:
        with self._joins:
            if self._closed:
                raise _ClosedError
            if self._client is None:
                self._client = self._joining.connect(replica=f"{self._joining.replica}-follow", transports=("tcp",))
                self.origin = self._client.origin
            return self._client

    async def is_visible(self, version: int) -> bool:
        try:
            await asyncio.to_thread(lambda: self._joined().wait(version, timeout_s=HUB_TIMEOUT_S))
        except (NotPublished, DeadlineExceeded, HubUnreachable):  # the last: the hub may be back in time
            await self.sleep(POLL_INTERVAL_S)
            return False
        return True

    async def next_version(self) -> int | None:
        await self._notice()
        return await super().next_version()

    async def _notice(self) -> None:
        """Look what other clients have made of the weights: what was replaced or lost is installed again."""
        if not (self.is_paused or self._one_update.locked()):
            version, is_lost = await self._core.look()
            if not self._one_update.locked():
                self.version, self.is_broken = version, self.is_broken or is_lost
                self.is_paused = is_lost

    async def hold(self, version: int = 0, for_s: float | None = None) -> int:
        """Look first what others have made of the weights: while an engine is held, nothing else looks."""
        releases = self._releases
        await self._notice()
        self._must_be_held(releases)
        return await super().hold(version, for_s)

    async def make_ready(self, version: int) -> int | None:
        other: int | None = version
        while other is not None:
            if other < version:  # an operator has decided against what was fetched: ask again from what is installed
                await self.engine.rpc("tensorhub_discard")
                return None
            version = other
            if not await self._may_install():
                return None  # there may be a newer one by now
            await self.fetch(version)
            other = None if self._how.when == "now" else await self._idle_moment(version)
        return version

    async def _may_install(self) -> bool:
        """Return when it may, and whether that was at once: else another client had paused it, or put it to sleep.
        StaleCaches: it cannot be paused and forget."""
        if self.is_paused:
            return True
        at_once = await self._core.is_available()
        report_at = time.monotonic() + PAUSED_S
        while not await self._core.is_available():
            if await self.look():
                return False  # no client can resume it
            if time.monotonic() >= report_at:
                await self._report(PAUSED)
                report_at = time.monotonic() + PAUSED_S
            await self.sleep(POLL_INTERVAL_S)
        held_by = await self._core.held_by()
        if held_by:
            raise StaleCaches(held_by)
        return at_once

    async def look(self) -> bool:
        """Return whether another client has lost the weights, looking once in a while; the next install mends them."""
        if self.is_paused or time.monotonic() < self._look_at:
            return False
        self._look_at = time.monotonic() + HUB_TIMEOUT_S
        _, is_lost = await self._core.look()
        self.is_paused, self.is_broken = is_lost, self.is_broken or is_lost
        return is_lost

    async def _report(self, failure: str) -> None:
        """Have the hub show why this engine does not go on, and ask what there is, though it can take no version."""
        if failure != self._failure:
            logger.warning("%s: going on with version %d: %s", self.worker, self.version, failure)
        self._failure = failure
        with suppress(TensorHubError):
            refused = dict(self.refused)
            ask = partial(self._ask_hub, refused=refused, failure=failure, timeout_s=POLL_INTERVAL_S)
            await asyncio.to_thread(ask, self.version)

    async def _idle_moment(self, version: int) -> int | None:
        """Return when there is one, or another version that is to be run instead of this one before there was."""
        if self._patient[0] != self.version:  # once for all of them: they may come faster than patience ends
            self._patient = self.version, time.monotonic() + self._how.patience_s
        _, patient_until = self._patient
        while not (self.is_paused or time.monotonic() > patient_until or await self.look()):
            if await self._core.is_idle():
                return None
            with suppress(TensorHubError):
                refused = dict(self.refused)
                return await asyncio.to_thread(self._ask_hub, version, refused=refused, timeout_s=POLL_INTERVAL_S)
        return None
