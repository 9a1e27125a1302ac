"""Requests go to replicas that live. A verl request router (one actor for all agent loops) and the handle it gives out.

Where verl's own router keeps sending requests to a replica that is frozen or dead, and verl's client fails the sample,
this one asks every replica for a heartbeat, takes a silent one out, puts it back when it has caught up, and its
`Handle` gives a request that was on a lost replica to another. verl's clients notice nothing of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import ray
from ray.exceptions import RayError
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.router import DEFAULT_ROUTING_CACHE_SIZE, GlobalRequestLoadBalancer

from tensorhub_plugins.core import Deadline, TensorHubError, VersionRefused, record, run_log, version_text, work
from tensorhub_plugins.core.log import get_logger
from tensorhub_plugins.verl import worker_stub
from tensorhub_plugins.verl.config import TRAINER
from tensorhub_plugins.verl.request_counts import Load
from tensorhub_plugins.vllm.plugin import wrap
from tensorhub_plugins.vllm.ray import replica_metrics
from tensorhub_plugins.vllm.ray.actor_handles import ENDED
from tensorhub_plugins.vllm.ray.fleet.events import Reported
from tensorhub_plugins.vllm.ray.fleet.types import Entry
from tensorhub_plugins.vllm.ray.members import JOIN_INTERVAL_S, Heartbeat, Member, Members
from tensorhub_plugins.vllm.ray.reporting import Reporter
from tensorhub_plugins.vllm.ray.rotation import Out, Rotation

logger = get_logger(__name__)

HEARTBEAT_INTERVAL_S = 1.0
HURRY_INTERVAL_S = 0.05  # the same, while validation waits for a version
TIMEOUT_S = 15.0  # until the replicas' own option is known
NO_REPLICA_TIMEOUT_S = 900.0  # a request waits so long for any replica: one is started again within minutes
LONG_POLL_TIMEOUT_S = 10.0  # one question of a process that has requests under way: is any replica lost?
RETRIES_MAX = 8  # of one request; beyond that it is the request that kills replicas
LOOPS = "verl.experimental.agent_loop.tool_agent_loop"  # imported where it is needed, and nowhere else

T = TypeVar("T")


class ReplicaLost(TensorHubError):
    """This replica cannot answer; another one can."""


class TensorHubRouter(GlobalRequestLoadBalancer):
    """verl's router (sticky sessions, least loaded) over the replicas in rotation. An asyncio actor: one thread."""

    def __init__(self, servers: dict[str, Any], config: Mapping[str, Any] | None = None) -> None:
        super().__init__({}, max_cache_size=DEFAULT_ROUTING_CACHE_SIZE)
        del config  # the replicas tell what they are configured with
        self.members = Members(TIMEOUT_S)  # by the names that verl has for its servers
        self._load = Load()
        self.rotation = Rotation(self.members, self._load.count, self._forget)
        self._silence: asyncio.Task[None] | None = None
        self._beats: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._hurry = asyncio.Event()  # a caller waits for a version
        self._waits = 0  # how many do
        self._published = 0  # the trainer's newest version, as it says itself
        self._losses = 0
        self._lost = asyncio.Event()
        self._given = dict(servers)
        self._reports: asyncio.Task[None] | None = None
        self._waiting = 0  # requests for which no replica is ready
        self._forgotten: set[str] = set()  # that have left
        self._announce()

    async def acquire_server(self, request_id: str, priority: int = 0) -> tuple[str, Any]:
        server_id, handle, epoch = await self.acquire(request_id)
        router = ray.get_runtime_context().current_actor
        return server_id, Handle(server_id, handle, epoch, router, request_id, priority)

    async def acquire(self, request_id: str) -> tuple[str, Any, int]:
        """Return a replica in rotation; wait for one when there is none."""
        self._start()
        began = time.monotonic()
        while not self._inflight_requests:
            if why := self.why_stuck():
                raise VersionRefused(why)
            self._changed.clear()
            self._waiting += 1
            deadline = self._gives_up_at(began)
            try:
                await asyncio.wait_for(self._changed.wait(), deadline.remaining())
            except asyncio.TimeoutError:
                if self._gives_up_at(began) > deadline:  # one has worked meanwhile
                    continue
                raise RuntimeError(
                    "No available servers in load balancer: "
                    f"for {NO_REPLICA_TIMEOUT_S:.0f} s none of {len(self.members.all)} replicas was ready or advanced; "
                    "look for `update failed` and for dead actors in Ray's logs"
                ) from None
            finally:
                self._waiting -= 1
        server_id, handle = super().acquire_server(request_id)
        self._load.acquire(server_id, request_id)
        return server_id, handle, self.members.all[server_id].epoch

    def _gives_up_at(self, began: float) -> Deadline:
        return Deadline(work.until(began, self.members.worked_at, NO_REPLICA_TIMEOUT_S))

    async def release_server(self, server_id: str, request_id: str = "") -> None:
        self._load.release(server_id, request_id)
        if server_id in self._inflight_requests:
            self._inflight_requests[server_id] = self._load.count(server_id)

    async def add_servers(self, servers: dict[str, Any]) -> None:
        self._start()
        for server_id, handle in servers.items():
            self._know(self.members.add(server_id, time.monotonic(), handle))

    async def remove_servers(self, server_ids: list[str]) -> None:
        for server_id in server_ids:
            self.members.remove(server_id)
            self._release(server_id)

    async def losses(self, known: int) -> tuple[int, dict[str, int]]:
        """Return how many losses there were, as soon as there are more than `known` (or after a while), and every
        replica's epoch: a request that a replica got in an earlier one will never be answered by it."""
        self._start()
        if self._losses <= known:
            self._lost.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._lost.wait(), LONG_POLL_TIMEOUT_S)
        epochs = {name: member.epoch for name, member in self.members.all.items()}
        return self._losses, {**dict.fromkeys(self._forgotten, -1), **epochs}

    async def report_lost(self, server_id: str, epoch: int, reason: str) -> None:
        """Take out a replica: a request found out before the heartbeat did."""
        self.rotation.failed_request(server_id, epoch, reason)

    async def wait_for_version(self, version: int, timeout_s: float) -> list[str]:
        """Return when all replicas in rotation answer with this version; or, at the deadline, which do not. Raise
        VersionRefused where none will ever answer."""
        await self._wait(lambda: not self.members.behind(version), version, timeout_s)
        return [f"{one.called} has {version_text(one.version)}" for one in self.members.behind(version)]

    async def wait_for_any(self, version: int, timeout_s: float) -> bool:
        """Return whether a replica is in rotation, as soon as one is, or at the deadline: the trainer is about to
        publish this version. Raise VersionRefused where none will be."""
        await self._wait(lambda: bool(self._inflight_requests), version, timeout_s)
        return bool(self._inflight_requests)

    async def _wait(self, is_done: Callable[[], bool], version: int, timeout_s: float) -> None:
        self._start()
        self._published = max(self._published, version)
        deadline = Deadline.after(timeout_s)
        self._waits += 1
        self._hurry.set()
        try:
            while not is_done():
                if why := self.why_stuck():
                    raise VersionRefused(why)
                if deadline.remaining() <= 0:
                    return
                await asyncio.sleep(HURRY_INTERVAL_S)
        finally:
            self._waits -= 1
            if not self._waits:
                self._hurry.clear()

    def why_stuck(self) -> str:
        """Return why no replica will ever answer: all of them refuse the newest version. "": they do, or may."""
        if not self.members.is_stuck(published=self._published):
            return ""
        return replica_metrics.why_stuck({one.called: one.refusal for one in self.members.refusing(self._published)})

    async def figures(self, published: int = 0) -> dict[str, float]:
        """Return metrics for the trainer's log. published: its newest version."""
        self._start()
        self._published = max(self._published, published)
        return self._figures(published)

    def _figures(self, published: int | None = None) -> dict[str, float]:
        newest = self._published if published is None else published
        return replica_metrics.of_members(self.members, TRAINER, published=newest, now=time.monotonic())

    # The rest of verl's protocol, on the actor's one thread.

    async def require_acquire_fields(self) -> list[str]:
        return [*super().require_acquire_fields(), "priority"]

    async def require_release_fields(self) -> list[str]:
        return [*super().require_release_fields(), "request_id"]

    async def get_inflight_count(self, server_id: str) -> int:
        return self._load.count(server_id)

    async def get_all_servers(self) -> list[str]:
        return super().get_all_servers()

    async def clear_sticky_cache(self) -> dict[str, Any]:
        return super().clear_sticky_cache()

    async def get_status(self) -> dict[str, Any]:
        status = super().get_status()
        status["lost"] = [name for name, member in self.members.all.items() if member.is_missed]
        status["versions"] = {name: member.version for name, member in self.members.all.items()}
        return status

    async def get_total_inflight(self) -> int:
        return sum(self._load.count(name) for name in self.members.all)

    # --- heartbeats ---------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Start the tasks: the constructor runs before the actor's event loop does."""
        if self._silence is None:
            self._silence = asyncio.create_task(self._find_silent())
            self._reports = asyncio.create_task(Reporter(self, figures=self._figures).run())
            for server_id, handle in self._given.items():
                self._know(self.members.add(server_id, time.monotonic(), handle))

    def _know(self, member: Member) -> None:
        if member.name not in self._beats:
            self._beats[member.name] = asyncio.create_task(self._beat(member))

    async def _beat(self, member: Member) -> None:
        """Ask for heartbeats until the replica is gone for good."""
        said = ""
        while True:
            try:
                self._heard(member, await member.handle.tensorhub_heartbeat.remote())
                said = ""
            except ENDED as error:
                self.rotation.failed(member, error)
                if member.is_gone:
                    return
            except Exception as error:
                if said != repr(error):  # once, not every second
                    logger.exception("router: heartbeat of %s failed", member.name)
                said = repr(error)
            if self._hurry.is_set():
                await asyncio.sleep(HURRY_INTERVAL_S)
            elif member.is_joining:
                await asyncio.sleep(JOIN_INTERVAL_S)
            else:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._hurry.wait(), HEARTBEAT_INTERVAL_S)

    def _heard(self, member: Member, answer: Heartbeat) -> None:
        run_log.use(answer.get("events"))
        self.rotation.heard(member, answer)
        self._choose(member)
        if self.why_stuck():
            self._changed.set()  # those that wait for a replica wait in vain

    def _choose(self, member: Member) -> None:
        """Put it into the choice or take it out, as the table has it. Its requests under way are counted all the
        same."""
        if not member.in_rotation:
            if member.name in self._inflight_requests:
                super().remove_servers([member.name])
        elif member.name not in self._inflight_requests:
            super().add_servers({member.name: member.handle})
            self._inflight_requests[member.name] = self._load.count(member.name)
            self._changed.set()

    async def _find_silent(self) -> None:
        while True:
            self._announce()
            self.members.look(time.monotonic())
            self.rotation.look()
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)

    def _announce(self) -> None:
        """Announce this router to the worker that holds updates up. Again and again, because it may be started
        again."""
        if not ray.is_initialized():
            return
        with contextlib.suppress(ValueError, RayError):  # there is none yet, or Ray's head is busy
            ray.get_actor(worker_stub.NAME).meet.remote(ray.get_runtime_context().current_actor, self._published)

    def _forget(self, member: Member, out: Out) -> None:
        if out == "left":
            self._forgotten.add(member.name)
            self._release(member.name)
        else:
            self._load.forget(member.name)
            super().remove_servers([member.name])
        self._losses += 1
        self._lost.set()

    # --- the fleet (../vllm/ray/fleet/types.py) -----------------------------------------------------------------------

    def seen(self) -> Reported:
        self.members.look(now := time.monotonic())  # this process may have stood still, and not the spares
        return self.members.seen(self._load.count, self._waiting, now=now)

    def apply(self, told: Collection[str], roster: Sequence[Entry]) -> None:
        """Apply the roster. What has left is asked no more: what it still has is asked elsewhere, and nothing of it is
        counted."""
        for member in self.rotation.apply(told, roster):
            self._know(member)
        for member in self.members.all.values():
            self._choose(member)

    def _release(self, server_id: str) -> None:
        self._load.forget(server_id)
        if (beat := self._beats.pop(server_id, None)) is not None:
            beat.cancel()
        super().remove_servers([server_id])


class Handle:
    """What verl's client takes for the server's actor handle. `generate.remote` outlives the loss of its replica."""

    def __init__(self, server_id: str, actor: Any, epoch: int, router: Any, request_id: str, priority: int = 0) -> None:
        """Make a handle. priority: verl's client drops it where `rollout.name` is not vllm."""
        self._at = (server_id, actor, epoch)
        self._router, self._request_id, self._priority = router, request_id, priority

    def __reduce__(self) -> tuple[Any, ...]:
        return Handle, (*self._at, self._router, self._request_id, self._priority)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._at[1], name)

    @property
    def generate(self) -> Any:
        return _Method(self._generate)

    async def _generate(self, **request: Any) -> TokenOutput:
        server_id, actor, epoch = self._at
        if self._priority:
            request.setdefault("priority", self._priority)
        for attempt in range(RETRIES_MAX + 1):
            try:
                output = await self._ask(server_id, actor, epoch, request)
                return _hand_over(output)
            except (*ENDED, ReplicaLost) as error:
                reason = f"{type(error).__name__}"
                await self._router.report_lost.remote(server_id, epoch, reason)
                record("request_retried", worker=server_id, reason=reason, attempt=attempt)
            finally:
                if attempt:  # the first one is released by verl's client
                    self._router.release_server.remote(server_id, self._request_id)
            server_id, actor, epoch = await self._another()
            request = {**request, "request_id": f"{request['request_id']}-{attempt + 1}"}
        raise RuntimeError(f"request {self._request_id} was lost with {RETRIES_MAX + 1} replicas one after another")

    async def _another(self) -> tuple[str, Any, int]:
        async def acquire() -> tuple[str, Any, int]:
            server_id, actor, epoch = await self._router.acquire.remote(self._request_id)
            return server_id, actor, epoch

        def give_back(given: tuple[str, Any, int]) -> None:
            self._router.release_server.remote(given[0], self._request_id)

        return await _granted(acquire(), give_back)

    async def _ask(self, server_id: str, actor: Any, epoch: int, request: Mapping[str, Any]) -> TokenOutput:
        """Return the replica's answer; raise ReplicaLost as soon as the router has taken it out."""
        losses = Losses.known_to(self._router)
        answer = asyncio.ensure_future(_awaited(actor.generate.remote(**request)))
        lost = losses.of(server_id, epoch)
        try:
            await asyncio.wait({answer, lost}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            answer.add_done_callback(lambda late: late.cancelled() or late.exception())  # it is not awaited any more
            raise ReplicaLost("the replica was taken out of rotation", peer=server_id)
        finally:
            losses.forget(server_id, epoch, lost)


class _Method:
    def __init__(self, call: Any) -> None:
        self.remote = call


async def _awaited(reference: Any) -> Any:
    return await reference


async def _granted(grant: Coroutine[Any, Any, T], give_back: Callable[[T], None]) -> T:
    """Return what the router grants. It goes on where its caller is cancelled meanwhile: what comes then is given
    back, or it would be counted for ever."""
    asked = asyncio.create_task(grant)
    try:
        return await asyncio.shield(asked)
    except asyncio.CancelledError:

        def end(late: asyncio.Task[T]) -> None:
            if not late.cancelled() and late.exception() is None:
                give_back(late.result())

        asked.add_done_callback(end)
        raise


class Losses:
    """What this process knows of lost replicas: one question to the router at a time, however many requests wait."""

    _of_loop: WeakKeyDictionary[Any, dict[Any, Losses]] = WeakKeyDictionary()

    @classmethod
    def known_to(cls, router: Any) -> Losses:
        routers = cls._of_loop.setdefault(asyncio.get_running_loop(), {})
        return routers.setdefault(router, cls(router))

    def __init__(self, router: Any) -> None:
        self._router = router
        self._waiting: dict[tuple[str, int], set[asyncio.Future[None]]] = {}
        self._count = -1
        self._asking: asyncio.Task[None] | None = None

    def of(self, server_id: str, epoch: int) -> asyncio.Future[None]:
        """Return a future that completes when this epoch of the replica ends. Release it with `forget`."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault((server_id, epoch), set()).add(future)
        if self._asking is None or self._asking.done():
            self._count = -1  # the first answer tells what happened since the last question
            self._asking = asyncio.create_task(self._ask())
        return future

    def forget(self, server_id: str, epoch: int, future: asyncio.Future[None]) -> None:
        futures = self._waiting.get((server_id, epoch), set())
        futures.discard(future)
        if not futures:
            self._waiting.pop((server_id, epoch), None)

    async def _ask(self) -> None:
        while self._waiting:
            try:
                self._count, epochs = await self._router.losses.remote(self._count)
            except Exception as error:  # requests go on; only what is lost now is not noticed
                logger.warning("the router does not answer: %s", error)
                await asyncio.sleep(HEARTBEAT_INTERVAL_S)
                continue
            for (server_id, epoch), futures in list(self._waiting.items()):
                if epochs.get(server_id, epoch) != epoch:
                    for future in futures:
                        if not future.done():
                            future.set_result(None)


# --- samples of several versions --------------------------------------------------------------------------------------

_steps: ContextVar[list[int] | None] = ContextVar("the first and last steps of the answer being made", default=None)
_turn: ContextVar[list[int] | None] = ContextVar("the first steps of the answers of this turn", default=None)


def _hand_over(output: TokenOutput) -> TokenOutput:
    """Return the answer in verl's terms: with its first and last step (see versions.py). verl's own engines, on the
    trainer's GPUs, know one."""
    own = output.extra_fields.get("global_steps")
    steps = [step for step, _ in output.extra_fields.pop("tensorhub_spans", [(own, 0)]) if step is not None]
    told = output.extra_fields.pop("tensorhub_split", True)
    if steps:
        output.extra_fields.setdefault("min_global_steps", min(steps))
        output.extra_fields.setdefault("max_global_steps", max(steps))
        if told and (of_answer := _steps.get()) is not None:
            of_answer += [min(steps), max(steps)]
        if (of_turn := _turn.get()) is not None:
            of_turn.append(min(steps))
    return output


def watch_client() -> None:
    """Change what verl's client and its loop of several turns make of answers, from now on. Calling it twice is fine.

    - The client for interrupted answers keeps their first and last steps, as its other one does: it makes a new answer
      of what it gets, of which it knows one step each.
    - A client that is cancelled while it waits for a replica takes none.
    - Of a conversation the first and last steps of all turns count: they go back where a turn moves to a replica that
      is behind."""
    from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient

    wrap(FullyAsyncLLMServerClient, "generate", _generate)
    wrap(LLMServerClient, "_acquire_server", _acquire_server)


async def _generate(original: Any, client: Any, *args: Any, **kwargs: Any) -> TokenOutput:
    steps: list[int] = []
    token = _steps.set(steps)
    try:
        output: TokenOutput = await original(client, *args, **kwargs)
    finally:
        _steps.reset(token)
    if steps:
        output.extra_fields.update(min_global_steps=min(steps), max_global_steps=max(steps))
    return output


async def _acquire_server(original: Any, client: Any, request_id: str, **extra: Any) -> tuple[str, Any]:
    def give_back(given: tuple[str, Any]) -> None:
        client._release_server(given[0], request_id=request_id)

    if (loops := sys.modules.get(LOOPS)) is not None:
        wrap(loops.ToolAgentLoop, "_handle_generating_state", _take_turn)
    return await _granted(original(client, request_id, **extra), give_back)


async def _take_turn(original: Any, loop: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
    before, steps, (first, last) = dict(data.extra_fields), list[int](), ("min_global_steps", "max_global_steps")
    token = _turn.set(steps)
    try:
        state = await original(loop, data, *args, **kwargs)
    finally:
        _turn.reset(token)
    if steps and before.get(first) is not None:
        data.extra_fields[first] = min(before[first], *steps)
        data.extra_fields[last] = max(before[last], data.extra_fields[last])
    return state
