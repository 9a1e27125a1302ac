"""An engine core, as a thread beside it may use it: what is asked of it runs in its own loop, between two steps."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from functools import partial, wraps
from typing import Any

from tensorhub_plugins.core import UsageError
from tensorhub_plugins.vllm.engine.caches import Caches, StaleCaches
from tensorhub_plugins.vllm.engine.spans import Place, Spans, Start
from tensorhub_plugins.vllm.lora import PATH
from tensorhub_plugins.vllm.plugin import around

INSTALL = "tensorhub_install"
NO_VERSION = "none"
LOOP_TIMEOUT_S = 900.0  # for the core's loop to come round: one step, or a call of another client


def label(core: Any, version: int | str) -> None:
    """Tell vLLM what its own weight_version is; 0: none of the store's. A text: of each of several adapters."""
    if hasattr(core, "set_weight_version"):
        core.set_weight_version(str(version) if version else NO_VERSION)


def before_shutdown(core: Any, first: Callable[[], None]) -> None:
    """Have this called when an engine core is shut down, while there is time: its process may be killed meanwhile."""

    def shutdown(original: Any, *args: Any, **kwargs: Any) -> Any:
        first()
        return original(*args, **kwargs)

    around(core, "shutdown", shutdown)


class Core:
    def __init__(self, core: Any, caches: Caches, *, alone: bool = True) -> None:
        """Wrap vLLM's engine core. alone: no other core takes part in its pauses (ranks.py)."""
        from vllm.v1.engine import EngineCoreRequestType

        self._core, self._wake_up, self._alone = core, EngineCoreRequestType.WAKEUP, alone
        self._caches, self._departures = caches, Departures(core, self.running)
        self.pause_mode, self.recompute = "keep", True  # see config.FollowConfig
        # What tokens are of, by what requests ask for: "": the weights, else an adapter. Used in the loop only.
        self.spans = {"": Spans()}
        around(core, "collective_rpc", self._label)

        def handle_client_request(original: Any, request_type: Any, request: Any) -> None:
            if request_type == self._wake_up and callable(request):
                request()  # ours; vLLM's own carries nothing
                return
            if request_type == EngineCoreRequestType.ADD:
                asked, goes_on = request[0], request[0].request_id in core.scheduler.requests
                if not (goes_on or getattr(asked, "resumable", False)):  # a session counts its tokens anew
                    self.spans[self._target_of(asked)].added(asked.request_id)
            original(request_type, request)

        around(core, "_handle_client_request", handle_client_request)
        self._held = False  # by our update, from pause to resume
        self._is_stopped = False  # by us, as well when that update has failed half way
        self._is_theirs = False  # another client has paused it since, and not resumed
        self._taking_steps = 0  # the thread of the loop during `at_once`
        self._deferred: list[tuple[partial[Any], Future[Any]]] = []  # what other clients have asked meanwhile
        core.tensorhub_pause = self._pause = core.pause_scheduler
        self._resume = core.resume_scheduler
        core.pause_scheduler = self._their_pause = self._unless_held(self._pause)
        core.resume_scheduler = self._unless_held(self._resume)

    def _label(
        self, original: Any, method: Any, timeout: float | None = None, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Have every install change what tokens are of in the very call in which it changes weights: no step is made,
        and no request comes, between the two."""
        answers = original(method, timeout, args, kwargs)
        if method == INSTALL and all(answer["installed"] for answer in answers):
            self.relabel(args[0] if args else kwargs["version"], (kwargs or {}).get("target", ""))
        return answers

    def _unless_held(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Defer what another client asks while our update has stopped the engine: nothing runs on weights that are half
        changed, and data parallel ranks, of which each waits for the others in what it hears first, hear all in one
        order."""

        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._held:
                done: Future[Any] = Future()
                self._deferred.append((partial(call, *args, **kwargs), done))
                return done
            self._is_theirs = original == self._pause
            runs = bool(self._core.scheduler.running)  # what stands still does not count as unfinished
            if self._is_stopped and self._is_theirs and "wait" in (*args, *kwargs.values()) and runs:
                raise UsageError("this engine stands still after an update that failed: nothing to wait for ends")
            return original(*args, **kwargs)

        return call

    def _let_go(self) -> None:
        """Call in the loop."""
        self._held, deferred, self._deferred = False, self._deferred, []
        for call, done in deferred:
            if call.func is self._their_pause and self._core.is_scheduler_paused() and not self._is_stopped:
                done.set_result(None)  # it is: for another rank, where that client was quicker
            else:
                _follow_up(call, done)

    @property
    def version(self) -> int:
        """Return the version of the tokens that are made now; 0: of none of the store's."""
        return self.version_of("")

    def version_of(self, target: str) -> int:
        """Return the version of the tokens that requests for this adapter get now; "": for the weights alone."""
        return self.spans[target].version

    def starts(self, request: str, forget: bool = False) -> list[tuple[Place, list[Start]]]:
        """Call in the loop. Where the versions of this request's answers start, see spans.py. forget: afterwards."""
        found = (spans.pop(request) if forget else spans.of(request) for spans in self.spans.values())
        return sorted(start for starts in found for start in starts)

    def _target_of(self, request: Any) -> str:
        path = getattr(getattr(request, "lora_request", None), "lora_path", "")  # not by name: a user's own may have it
        name = path.removeprefix(PATH)
        return name if path.startswith(PATH) and name in self.spans else ""

    async def ask(self, action: Callable[[], Any], *, may_last: bool = False) -> Any:
        """Run this in the loop and return what it returns; of a future, when it is done. After LOOP_TIMEOUT_S it is not
        run any more. may_last: what has begun by then is waited for."""
        if threading.get_ident() == self._taking_steps:
            return action()
        done = self._queue(action)
        answer = asyncio.wrap_future(done)
        try:
            await asyncio.wait({answer}, timeout=LOOP_TIMEOUT_S)
            return await (answer if may_last and done.running() else asyncio.wait_for(answer, 0))
        finally:
            answer.cancel()

    async def at_once(self, steps: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Run these steps in the loop, one right after the other, and return what comes of them. Each may call and ask
        this engine, and wait for nothing else. For a pause: to wake one thread by the other takes milliseconds where
        all cores are busy."""

        def run() -> Any:
            self._taking_steps = threading.get_ident()
            try:
                steps().send(None)
            except StopIteration as ended:
                return ended.value
            finally:
                self._taking_steps = 0
            raise AssertionError("a step waits for something else than this engine")

        return await self.ask(run, may_last=True)

    def _queue(self, action: Callable[[], Any]) -> Future[Any]:
        done: Future[Any] = Future()
        self._core.input_queue.put_nowait((self._wake_up, partial(_follow_up, action, done)))
        return done

    async def rpc(self, method: str, *args: Any, target: str = "") -> list[Any]:
        """Return what the workers of this core answer, in their order. target: an adapter, instead of the weights."""
        more = {"kwargs": {"target": target}} if target else {}

        def call() -> list[Any]:
            self._held |= method == INSTALL  # also of what has stayed paused since one that failed
            self._caches.is_stale |= method == INSTALL and self.recompute
            try:
                answers = list(self._core.collective_rpc(method, args=args, **more))
            except Exception:
                if method == INSTALL:
                    self._let_go()
                raise
            if method == INSTALL and any(answer["broken"] for answer in answers):
                self._let_go()  # it stays paused until the next one; the next question is answered with why
            return answers

        return list(await self.ask(call, may_last=True))

    async def is_available(self) -> bool:
        return bool(await self.ask(lambda: self._available))

    async def is_idle(self) -> bool:
        return bool(await self.ask(lambda: self._idle))

    async def look(self) -> tuple[int, bool]:
        """Return the version of the weights, and whether another client has left them mixed or lost: then the engine
        stands still until an update has mended it."""

        def is_lost() -> bool:
            executor = self._core.model_executor
            stands = self._core.is_scheduler_paused() and not (self._held or executor.is_sleeping)
            found = stands and any(executor.collective_rpc("tensorhub_health"))
            self._is_stopped |= found
            return bool(found)

        version, lost = await self.ask(lambda: (self.version, is_lost()))
        return version, lost

    async def lose(self) -> None:
        """Stand still until an update has mended these weights, as all ranks are told to, of which one has lost its."""

        def lose() -> Any:
            self._core.model_executor.collective_rpc("tensorhub_lose")
            self._is_stopped = True
            return self._pause("keep", False)

        await self.ask(lose)

    async def pause(self) -> None:
        """Keep all requests and forget all caches; returns when nothing runs any more. What fails leaves it running."""

        def pause() -> Any:
            if not self._available:
                raise UsageError("another client has paused this engine, or put it to sleep")
            held_by = self._held_by() if self._alone else ""
            if held_by:
                raise StaleCaches(held_by)
            self._departures.begin()
            self._held = self._is_stopped = True
            self._is_theirs = False
            stopping = self._pause(self.pause_mode, False)
            if stopping is None:
                return self._forget()
            stopped: Future[Any] = Future()
            stopping.add_done_callback(lambda _: _follow_up(self._forget, stopped))
            return stopped

        try:
            await self.ask(pause)
        except BaseException:
            if self._alone:
                self._queue(self.undo_pause)
            raise

    def undo_pause(self) -> None:
        """Call in the loop. Go on, if it stands still for an update that will not come."""
        if self._held:
            self._go_on()

    async def held_by(self) -> str:
        """Return what keeps it from being updated, in words; see caches.py."""
        return str(await self.ask(self._held_by))

    def _held_by(self) -> str:
        return self._caches.held_by() if self.recompute else ""

    async def forget(self) -> None:
        await self.ask(self._forget)

    def _forget(self) -> None:
        if self.recompute:
            self._caches.forget()

    async def is_theirs(self) -> bool:
        """Return whether another client has paused it while it stood still after an update that failed."""
        return bool(await self.ask(lambda: self._is_theirs))

    async def resume(self) -> None:
        """Resume it, unless another client has paused it: then that client does."""
        await self.ask(self._go_on)

    async def stay(self) -> None:
        """End the update as `resume` does where another client has paused a rank: that client resumes all."""
        await self.ask(partial(self._go_on, stay=True))

    def _go_on(self, *, stay: bool = False) -> None:
        """Call in the loop."""
        try:
            if not (stay or self._is_theirs):
                self._resume()
            self._is_stopped = False
            self._departures.end()
        finally:
            self._let_go()

    async def let_go(self) -> None:
        """End a pause that has failed on another rank."""

        def let_go() -> None:
            self._is_stopped = False
            self._let_go()

        await self.ask(let_go)

    def running(self) -> list[str]:
        return list(self._core.scheduler.requests)  # at once: the loop may add some

    def _produced(self, target: str) -> dict[str, int]:
        """Call in the loop."""
        requests = self._core.scheduler.requests.items()
        return {name: each.num_output_tokens for name, each in requests if self._target_of(each) == target}

    def departed(self) -> list[str]:
        return self._departures.take()

    def relabel(self, version: int, target: str = "") -> None:
        """Call in the loop. Tokens are of this version from here on; 0: of none of the store's."""
        self.spans[target].switched(version, self._produced(target))
        label(self._core, self._told())

    def _told(self) -> int | str:
        """Return the version of the weights, or of the only adapter; of several all that they have."""
        of_adapters = {name: spans.version for name, spans in self.spans.items() if name}
        if len(of_adapters) > 1:
            return ",".join(f"{name}={version}" for name, version in of_adapters.items())
        return next(iter(of_adapters.values()), self.version)

    def settle(self, version: int, target: str = "") -> None:
        """Note that the engine was started with this version."""

        def settle() -> None:
            self.spans[target].settle(version, self._produced(target))
            label(self._core, self._told())

        self._core.input_queue.put_nowait((self._wake_up, settle))

    @property
    def _available(self) -> bool:
        return not (self._core.is_scheduler_paused() or self._core.model_executor.is_sleeping)

    @property
    def is_paused_by_another(self) -> bool:
        """Call in the loop. Return whether another client has paused it, or put it to sleep."""
        return not (self._available or self._held or self._is_stopped)

    @property
    def _idle(self) -> bool:
        return not (self._core.scheduler.has_unfinished_requests() or self._core.batch_queue)


def _follow_up(action: Callable[[], Any], done: Future[Any]) -> None:
    """Run this and set what comes of it; of a future, when it is done."""

    if not done.set_running_or_notify_cancel():  # the caller has abandoned it
        return

    def ended(future: Future[Any]) -> None:
        error = future.exception()
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(None)

    try:
        result = action()
    except Exception as error:
        done.set_exception(error)
        return
    if isinstance(result, Future):
        result.add_done_callback(ended)
    else:
        done.set_result(result)


# --- requests that were aborted while an engine stands still: their callers have gone, nothing is lost ----------------


class Departures:
    """owner: what is asked to `abort_requests`, by clients that leave. running: the requests that there are."""

    def __init__(self, owner: Any, running: Callable[[], Iterable[str]]) -> None:
        self._gone: set[str] | None = None

        def abort_requests(original: Any, *args: Any, **kwargs: Any) -> Any:
            if self._gone is None:
                return original(*args, **kwargs)
            before = set(running())
            try:
                return original(*args, **kwargs)
            finally:
                self._gone |= before - set(running())

        around(owner, "abort_requests", abort_requests)

    def begin(self) -> None:
        """Note them from here on."""
        self._gone = set()

    def end(self) -> None:
        self._gone = None

    def take(self) -> list[str]:
        """Return those since the beginning, or since this was asked before."""
        gone = sorted(self._gone or ())
        if self._gone is not None:
            self._gone = set()
        return gone
