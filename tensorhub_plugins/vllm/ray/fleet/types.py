"""PURE: what a run's fleet, its dispatcher, its framework and its policies say to each other.

    dispatcher (verl's router,   -- report([Seen, ...]) -->  fleet actor  -- start, abort, stop -->  Launcher
    OpenRLHF's generator)        <--    [Entry, ...]    --

Once a second the dispatcher reports what it knows of every member, and gets the roster: the members to use from now on,
no others. It applies the roster before it makes its next report, and never depends on the fleet: no answer means go on
with what you have.

- In the roster and unknown: take it in. It gets work when it is ready and has the newest version.
- `draining`: no new requests; report it, with `draining` set, until it is no longer in the roster.
- Not in the roster: forget it. What is still under way there goes on elsewhere.
- Members that were there from the start are made known by the first report; nothing is started before that.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal, Protocol

# first: there from the start. joined: started by the fleet. external: a server that no framework has started. spare:
# started by the fleet, to be a joined one as soon as one is needed; until then it counts as no replica anywhere.
Kind = Literal["first", "joined", "external", "spare"]
# starting: not yet ready for the first time. spare: started, without weights or requests. lost: was ready, is not now,
# and may come back. stopping: what it used is being given back. gone: that is done.
State = Literal["starting", "spare", "ready", "lost", "draining", "stopping", "gone"]
# restarting: Ray starts it again by itself (ActorUnavailableError). gone: it never will (actor_handles.DEAD).
Lost = Literal["", "restarting", "gone"]


@dataclass(frozen=True)
class Seen:
    """What a dispatcher knows of one member."""

    name: str  # of its replica, as in the store and in the event log: "rollout-3"
    handle: Any  # its actor; sealed on its way (actor_handles.py)
    # Ray's id of its node, in hex (`get_runtime_context().get_node_id()` there); "": not known, or external.
    node: str = ""
    ready: bool = False  # it gets new requests, or would if it were not draining
    version: int = 0
    in_flight: int = 0  # requests that it has been given and has not answered
    draining: bool = False  # the dispatcher knows that, and gives it no new requests
    lost: Lost = ""
    why: str = ""  # it is not ready, as it says itself
    spare: bool = False  # its engine runs, and waits for `Launcher.join`
    idle_s: float = math.inf  # since its engine last fetched or installed anything


@dataclass(frozen=True)
class Entry:
    """One member of the roster."""

    name: str
    handle: Any
    kind: Kind
    draining: bool = False


@dataclass(frozen=True)
class Member:
    """What the fleet tells people and policies of one member."""

    name: str
    kind: Kind
    state: State
    version: int
    in_flight: int
    node: str  # its address where it is known, else Ray's id; of an external one its URL
    since_s: float  # seconds in this state
    why: str  # it is in this state; "" if nothing is unusual


@dataclass(frozen=True)
class View:
    """What a policy decides by, and what `tensorhub fleet list` shows."""

    members: tuple[Member, ...]  # in the order in which they came
    gone: tuple[Member, ...]  # the last ones that went
    target: int  # first and joined members that there shall be; external ones do not count
    minimum: int
    maximum: int
    slots: int  # more replicas for which there is room now
    waiting: int  # requests that the dispatcher has, and has given to no member yet
    policy: str  # that sets the target; "" if people do
    now: float = 0.0  # seconds, on a clock that only goes forward
    spares: int = 0  # that shall be kept beside the target; those there are among the members

    @property
    def in_flight(self) -> int:
        """Return the number of requests that members are working on."""
        return sum(member.in_flight for member in self.members)

    def count(self, *states: State) -> int:
        """First and joined members in one of these states."""
        return sum(member.kind in ("first", "joined") and member.state in states for member in self.members)


class Launcher(Protocol):
    """How a framework makes and ends replicas. Sent by value to one actor of the run's job on the head node, where all
    calls of one run meet the same object. Calls for different names overlap; whatever blocks belongs into a thread.
    Errors are one sentence for people."""

    async def start(self, name: str, rank: int, avoid: Collection[str], spare: bool = False) -> Any:
        """Make one replica, and return its actor. rank: never used before in this run; avoid: nodes by Ray's ids.
        spare: it follows nothing until `join`, needs no weights, and its heartbeats say so.

        Looks for free resources first and never waits for a placement group without limit. May be cancelled: `stop` is
        called then, as after an error."""

    async def join(self, name: str, handle: Any) -> None:
        """Have a spare follow, as any other replica. Called again where Ray has started it again, and where it does."""

    async def start_external(self, name: str, url: str) -> Any:
        """Return an actor that stands for this server, once the server answers."""

    async def abort(self, name: str, handle: Any) -> None:
        """Have it give back what is under way: partial answers, where the framework understands them."""

    async def stop(self, name: str, handle: Any | None) -> None:
        """End it and give back all it used: follower, clients (which say Bye), actor, placement group.

        Called for members of every kind, also for those whose node is lost. handle None: `start` did not return; what
        it has made is found by name. Called again if it raises; what is not there any more is no error."""

    def settle(self, names: Collection[str]) -> None:
        """Learn which members there are: of others none comes back. Called once the first ones are known: an object
        that stands for one that was lost with its actor does not know otherwise which have left."""

    def slots(self, avoid: Collection[str]) -> int:
        """Return how many more replicas would fit now, without these nodes. Called in a thread."""
