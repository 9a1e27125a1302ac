"""The fleet's actor: it carries out what state.py decides. On Ray's head node; killed, it is back in seconds."""

from __future__ import annotations

import asyncio
import ipaddress
import math
import os
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import ray
from ray.exceptions import RayActorError, RayTaskError

from tensorhub_plugins.core import Deadline, UsageError, record, run_log
from tensorhub_plugins.core.log import get_logger
from tensorhub_plugins.core.options import TrainingOptions
from tensorhub_plugins.vllm.ray import placement
from tensorhub_plugins.vllm.ray import policy as policies
from tensorhub_plugins.vllm.ray.fleet import events
from tensorhub_plugins.vllm.ray.fleet.state import FleetState
from tensorhub_plugins.vllm.ray.fleet.types import Entry, Seen, View
from tensorhub_plugins.vllm.ray.gauges import Gauges

logger = get_logger(__name__)

TICK_INTERVAL_S = 1.0
STOP_TIMEOUT_S = 120.0  # an engine that is asked politely takes seconds; what is given back is Ray's
STARTER_TIMEOUT_S = 60.0  # for Ray to start that actor again, which may import a whole framework
SLOTS_TIMEOUT_S = 10.0
POLICY_TIMEOUT_S = 60.0
DEFAULT_PORTS = {"http": 80, "https": 443}
KNOCK_TIMEOUT_S = 5.0  # for a server that was started by hand to take a connection and answer anything
EXTERNAL_TIMEOUT_S, EXTERNAL_POLL_S = 3.0, 0.05  # what else is wrong with it mostly shows at once


class FleetActor:
    """The shell of `FleetState`, one thread with asyncio. Ray starts it again without limit."""

    def __init__(self, starter: str, options: TrainingOptions) -> None:
        """Make the actor's state. starter: that actor's name: Ray keeps no handles for the arguments of an actor that
        it starts again."""
        run_log.use(options.events)
        self._starter = ray.get_actor(starter)
        self._state = FleetState(
            minimum=options.fleet_min,
            maximum=options.fleet_max,
            spares=options.fleet_spares,
            target=options.fleet_target,
            policy=options.fleet_policy or "",
        )
        self._gauges = Gauges()
        self._tasks: set[asyncio.Task[None]] = set()
        self._begun: asyncio.Task[None] | None = None

    # --- for dispatchers ----------------------------------------------------------------------------------------------

    async def report(self, seen: Sequence[Seen], waiting: int = 0, unnamed: int = 0) -> list[Entry]:
        """Apply a report, and return the roster. waiting: requests that no member has yet; unnamed: members that cannot
        be named yet."""
        await self._begin()
        self._handle(events.Reported(tuple(seen), waiting, unnamed))
        return self._state.roster()

    # --- for people: a sentence on what has begun or what was wrong, and whether it was refused -----------------------

    async def view(self) -> View:
        await self._begin()
        return self._state.view(time.monotonic())

    async def add_external(self, url: str) -> tuple[str, bool]:
        try:
            url = address_of(url)
            if all(one.url != url for one in self._state.members.values()):  # or it is refused for that
                await knock(url)
        except UsageError as error:
            return error.message, True
        text, is_refused = await self.command(events.AddExternal(url))
        joining = [one for one in self._state.members.values() if one.url == url]
        deadline = Deadline.after(0.0 if is_refused else EXTERNAL_TIMEOUT_S)
        while joining[0].is_launching and deadline.remaining() > 0:
            await asyncio.sleep(EXTERNAL_POLL_S)
        if joining[0].state in ("stopping", "gone"):
            return joining[0].why, True
        return text, is_refused

    async def drain_node(
        self, node: str, timeout_s: float = events.DRAIN_TIMEOUT_S, why: str = "its node is drained"
    ) -> tuple[str, bool]:
        """Let all members on a node leave. node: its address, its host's name, or Ray's id of it. External servers
        there leave as well, also if the node is none of Ray's."""
        there = await self._nodes_called(node)
        hosts = {plain_host(node)} | {plain_host(name) for one in there for name in _names_of(one)}
        ids = frozenset(one["NodeID"] for one in there)
        return await self.command(events.DrainNodes(ids, timeout_s, why, frozenset(hosts)))

    async def undrain_node(self, node: str) -> tuple[str, bool]:
        """Use this node again: the notice was withdrawn, or the work on it is done."""
        there = await self._nodes_called(node)
        return await self.command(events.UndrainNodes(frozenset(one["NodeID"] for one in there), node))

    async def _nodes_called(self, name: str) -> list[dict[str, Any]]:
        """Return what Ray knows now of the nodes of this name; update the state as well."""
        await self._begin()
        nodes = await asyncio.to_thread(live_nodes)
        self._look_at(nodes, self._state.slots, is_wanted=self._state.wanted_since < math.inf)
        return [one for one in nodes if name in _names_of(one)]

    async def command(self, event: events.Event) -> tuple[str, bool]:
        await self._begin()
        try:
            effects = self._handle(event)
        except UsageError as error:
            return error.message, True
        said = "; ".join(effect.text for effect in effects if isinstance(effect, events.Say))
        return said or f"the target is {self._state.wanted}, as it was", False

    # --- the shell ----------------------------------------------------------------------------------------------------

    async def _begin(self) -> None:
        """Begin with the first call: a constructor of a Ray actor has no event loop to work in."""
        if self._begun is None or (self._begun.done() and self._begun.exception() is not None):
            self._begun = asyncio.create_task(self._restore())
        await asyncio.shield(self._begun)

    async def _restore(self) -> None:
        saved = await self._ask(lambda: self._starter.saved.remote())
        if saved is not None:
            logger.warning("fleet: started again, going on with %d members", len(saved.members))
            self._state = saved
            for effect in self._state.resume(time.monotonic()):
                self._carry_out(effect)
        await self._look()
        self._keep(self._watch_cluster())
        if self._state.policy:
            self._keep(self._ask_policy())

    def _handle(self, event: events.Event) -> list[events.Effect]:
        effects = self._state.handle(event, time.monotonic())
        if effects or not isinstance(event, (events.Reported, events.Cluster, events.Tick)):
            # Calls of one actor to another arrive in their order: it is kept before anything of it is done.
            self._starter.save.remote(self._state)
        for effect in effects:
            self._carry_out(effect)
        return effects

    def _carry_out(self, effect: events.Effect) -> None:
        match effect:
            case events.Start(name, rank, avoid, spare):
                self._keep(self._start(name, lambda: self._starter.start.remote(name, rank, avoid, spare)))
            case events.Join(name, handle):
                self._keep(self._tell(name, "does not join", self._starter.join, handle))
            case events.StartExternal(name, url):
                self._keep(self._start(name, lambda: self._starter.start_external.remote(name, url)))
            case events.Abort(name, handle):
                self._keep(self._tell(name, "gives nothing back", self._starter.abort, handle))
            case events.Stop(name, handle):
                self._keep(self._stop(name, handle))
            case events.Changed(member):
                about = f" ({member.why})" if member.why else ""
                logger.info("fleet: %s is %s, version %d%s", member.name, member.state, member.version, about)
                record(
                    "member",
                    worker=f"{member.name}/0",
                    state=member.state,
                    kind=member.kind,
                    version=member.version,
                    node=member.node,
                    why=member.why or None,
                )
            case events.Targeted(target, by):
                record("target", worker="fleet", target=target, by=by)
            case events.Say(text):
                logger.info("fleet: %s", text)

    def _keep(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("fleet: this should not happen", exc_info=task.exception())

    async def _ask(self, call: Callable[[], Any]) -> Any:
        """Return what the starter answers. It may be asked twice for the same thing: Ray may be starting it again."""
        deadline = Deadline.after(STARTER_TIMEOUT_S)
        while True:
            try:
                return await call()
            except RayActorError as error:
                # What a launcher has raised comes as a RayTaskError of the same class.
                if isinstance(error, RayTaskError) or deadline.remaining() <= 0:
                    raise
                await asyncio.sleep(TICK_INTERVAL_S)

    async def _start(self, name: str, call: Callable[[], Any]) -> None:
        try:
            handle = await self._ask(call)
        except Exception as error:
            self._handle(events.StartFailed(name, sentence(error)))
        else:
            self._handle(events.Started(name, handle))

    async def _tell(self, name: str, otherwise: str, method: Any, handle: Any) -> None:
        try:
            await method.remote(name, handle)
        except Exception as error:  # it is stopped soon, or told again
            logger.warning("fleet: %s %s: %s", name, otherwise, sentence(error))

    async def _stop(self, name: str, handle: Any | None) -> None:
        try:
            await asyncio.wait_for(self._ask(lambda: self._starter.stop.remote(name, handle)), STOP_TIMEOUT_S)
        except asyncio.TimeoutError:
            self._handle(events.StopFailed(name, f"it takes more than {STOP_TIMEOUT_S:.0f} s"))
        except Exception as error:
            self._handle(events.StopFailed(name, sentence(error)))
        else:
            self._handle(events.Stopped(name))

    async def _watch_cluster(self) -> None:
        while True:
            await asyncio.sleep(TICK_INTERVAL_S)
            await self._look()
            self._handle(events.Tick())

    async def _look(self) -> None:
        try:
            nodes = await asyncio.to_thread(live_nodes)
            asked = self._starter.slots.remote(frozenset(self._state.avoided))
            slots, is_saved = await asyncio.wait_for(asked, SLOTS_TIMEOUT_S)
            if not is_saved:  # it was lost, and the state with it
                self._starter.save.remote(self._state)
            self._look_at(nodes, slots, bool(self._state.spares) and await asyncio.to_thread(placement.is_wanted))
        except Exception as error:  # Ray's head or the starter is busy, or is being started again
            logger.info("fleet: what there is room for is not known now: %s", sentence(error))

    def _look_at(self, nodes: Sequence[dict[str, Any]], slots: int, is_wanted: bool) -> None:
        self._handle(events.Cluster({one["NodeID"]: one["NodeManagerAddress"] for one in nodes}, slots, is_wanted))
        if self._state.spares:
            waiting = sum(one.state == "spare" for one in self._state.members.values())
            self._gauges.set({"tensorhub/replicas/spare": float(waiting)})

    async def _ask_policy(self) -> None:
        """Ask the policy in a thread of its own, one question at a time: one that blocks takes no other's."""
        policy, complaint = policies.load(self._state.policy), ""
        thread, asked = ThreadPoolExecutor(1, "fleet-policy"), None
        while True:
            if asked is None and self._state.by_policy and self._state.is_known:
                view = self._state.view(time.monotonic())
                asked = asyncio.get_running_loop().run_in_executor(thread, policies.ask, policy, view)
            if asked is not None:
                await asyncio.wait({asked}, timeout=POLICY_TIMEOUT_S)
                said = asked.result() if asked.done() else f"it does not answer within {POLICY_TIMEOUT_S:g} s"
                asked = None if asked.done() else asked
                if isinstance(said, int):
                    self._handle(events.PolicySaid(said))
                elif complaint != said:  # once
                    complaint = said
                    logger.warning("fleet: policy %s is ignored: %s", self._state.policy, said)
            await asyncio.sleep(policies.POLICY_INTERVAL_S)


def live_nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _names_of(node: dict[str, Any]) -> set[str]:
    """Return what users call it: its address, its host's name, the name that Ray was given, Ray's id."""
    names = (node["NodeManagerAddress"], node.get("NodeManagerHostname"), node.get("NodeName"), node["NodeID"])
    return {name for name in names if name}


def address_of(url: str) -> str:
    """Return a server's address in the form in which two of them are compared: http://host:port, without what goes
    without saying. Raise UsageError for one that is none."""
    try:
        parts = urlsplit(url)
        host, port = plain_host(parts.hostname or ""), parts.port
        host.encode("idna")  # as it is looked up
    except (ValueError, AttributeError):  # brackets, a port or a name that is none, or no text
        host, port = "", None
    if (
        not host
        or port == 0
        or parts.scheme not in DEFAULT_PORTS
        or re.search(r"[\s@?#]", url)
        or parts.path.strip("/")
    ):
        raise UsageError(f"{url!r} is no address: give one like http://10.0.0.7:8000")
    shown = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{shown}" + (f":{port}" if port not in (None, DEFAULT_PORTS[parts.scheme]) else "")


async def knock(url: str) -> None:
    """UsageError if nothing answers there. Before anything is begun for a server: its actor takes seconds to start."""
    parts = urlsplit(url)
    port = parts.port or DEFAULT_PORTS[parts.scheme]

    async def first_byte() -> bytes:
        reader, writer = await asyncio.open_connection(parts.hostname, port)
        try:
            if parts.scheme == "https":
                return b"."  # the client that will ask it knows which certificates to trust
            writer.write(f"GET /health HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n".encode())
            return await reader.read(1)
        finally:
            writer.close()

    try:
        error = "" if await asyncio.wait_for(first_byte(), KNOCK_TIMEOUT_S) else "it closes the connection"
    except asyncio.TimeoutError:
        error = f"no answer in {KNOCK_TIMEOUT_S:g} s"
    except OSError as cause:
        error = os.strerror(cause.errno) if cause.errno and cause.errno > 0 else str(cause)
    if error:
        raise UsageError(
            f"no server answers at {url} from Ray's head node ({error}), and nothing was added: start the server "
            "there first, or correct the address"
        )


def plain_host(host: str) -> str:
    """Return a host in the form in which two of them are compared: IPv6 without brackets, in the one way to write
    it."""
    try:
        return str(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        return host.lower()


def sentence(error: BaseException) -> str:
    """Return what went wrong, in one line."""
    cause: Any = error.cause if isinstance(error, RayTaskError) else error
    text = str(getattr(cause, "message", "") or cause).strip()
    return text.splitlines()[0][:300] if text else type(cause).__name__
