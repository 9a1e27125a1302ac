"""PURE: which replicas a run has, and what to do next about each.

    starting -> ready <-> lost          draining -> stopping -> gone
       |          |         |              ^           ^
       |          +-- drain-+--------------+           |
       +-- fails -+-------- gone for good -------------+

- No member comes back from draining. What was started is in the list until all it used has been given back.
- `target` is how many first and joined members there shall be; the one that Ray restarts by itself counts as there.
- Below the target one is started for every free slot, at most STARTS_MAX at once, after failures with growing delays.
  Above it the newest joined ones drain first. A rank is never used twice in a run.
- Beside the target, `spares` more are kept started, once all else is well: they count for nothing and get no requests.
  What is missing below the target is taken of them first. One gives its place up when something else waits for
  resources.
- With a drained member the target sinks by one. A drained or lost node does not: its members come back elsewhere.
- Drain: no new requests at once; aborted when the time is up; stopped when the dispatcher says that it is empty.
  By name it begins when `minimum` others are ready, unless it shall be now: else requests would wait for an engine.

`FleetState.handle(event, now)` returns effects; its shell (actor.py) carries them out and tells how they ended.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import assert_never

from tensorhub_plugins.core import UsageError
from tensorhub_plugins.vllm.ray.fleet import events
from tensorhub_plugins.vllm.ray.fleet.types import Entry, Kind, Member, Seen, State, View

STARTS_MAX = 8  # at once: every start reads hundreds of files of Python from what is often one shared disk
# Until the engine is there, from then until it is ready, and for Ray to start it again: the largest models.
START_TIMEOUT_S = 1800.0
START_TIMES_MAX = 10  # as long, if its engine works: after each piece of work it has that time again
START_DELAY_S, START_DELAY_MAX_S = 5.0, 300.0  # after a failed start, doubled by each further one
STOP_DELAY_S, STOP_DELAY_MAX_S = 5.0, 60.0  # the same for what could not be given back
# Ray gives what is free within a second: what waits for longer needs a place. The next spare starts so much later.
WANTED_TIMEOUT_S, SPARE_DELAY_S = 5.0, 60.0
ABORT_TIMEOUT_S = 10.0  # until partial answers have gone elsewhere
MISSING_TIMEOUT_S = 10.0  # a member that the dispatcher has not named for this long is not in use
GONE_MAX = 1000  # names that are remembered, so that a late report does not bring them back
GONE_SHOWN = 10
BY_NAME = "drained by name"


@dataclass
class _Member:
    name: str
    kind: Kind
    state: State
    since: float
    rank: int = -1
    url: str = ""
    handle: Any = None  # None: its start has not returned
    node: str = ""
    version: int = 0
    in_flight: int = 0
    why: str = ""
    seen_at: float = 0.0
    deadline: float = math.inf  # starting, lost: abandoned then; draining: aborted, then stopped; stopping: tried again
    is_aborted: bool = False
    leaves_within_s: float | None = None  # ready, and drains with this timeout when enough others are ready
    stops: int = 0  # that failed

    @property
    def is_launching(self) -> bool:
        return self.state == "starting" and self.handle is None


@dataclass
class FleetState:
    """Pickled as it is, it survives its process: see `resume`. target None: as many as were there from the start."""

    minimum: int = 1
    maximum: int = 1024
    spares: int = 0
    target: int | None = None
    policy: str = ""
    by_policy: bool = field(init=False)
    members: dict[str, _Member] = field(default_factory=dict)
    gone: dict[str, _Member] = field(default_factory=dict)
    nodes: dict[str, str] = field(default_factory=dict)  # that live
    addresses: dict[str, str] = field(default_factory=dict)  # of all nodes that ever lived
    avoided: set[str] = field(default_factory=set)  # nodes where nothing is started any more
    slots: int = 0
    waiting: int = 0
    next_rank: int = 0
    next_external: int = 0
    firsts: int = 0  # members that were there from the start, also those that are gone
    is_known: bool = False  # all of those have been reported
    reported_at: float = -math.inf
    failures: dict[Kind, int] = field(default_factory=lambda: {"joined": 0, "spare": 0})  # since a start went well
    start_again_at: dict[Kind, float] = field(default_factory=lambda: {"joined": 0.0, "spare": 0.0})
    last_failure: str = ""
    wanted_since: float = math.inf  # something on the cluster waits for resources since then
    _effects: list[events.Effect] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.by_policy = bool(self.policy)

    def handle(self, event: events.Event, now: float) -> list[events.Effect]:
        """Return what is to be done now. Raise UsageError for a command that cannot be carried out, and then nothing
        has changed."""
        self._effects, was_ready = [], bool(self._ready())
        match event:
            case events.Reported():
                self._report(event, now)
            case events.Cluster(nodes, slots, is_wanted):
                self.wanted_since = min(self.wanted_since, now) if is_wanted else math.inf
                self._cluster(nodes, slots, now)
            case events.Started(name, handle):
                self._started(name, handle, now)
            case events.StartFailed(name, why):
                if (member := self.members.get(name)) is not None and member.is_launching:
                    self._fail(member, why, now)
            case events.Stopped(name):
                self._stopped(name, now)
            case events.StopFailed(name, why):
                self._stop_failed(name, why, now)
            case events.Add(count):
                self._add(count)
            case events.AddExternal(url):
                self._add_external(url, now)
            case events.Drain():
                self._drain_by_name(event, now)
            case events.DrainNodes():
                self._drain_nodes(event, now)
            case events.UndrainNodes(nodes, host):
                self._undrain_nodes(nodes, host)
            case events.SetTarget(target):
                self._set_target(target)
            case events.PolicySaid(target):
                if self.by_policy and self.is_known:
                    self._aim(max(self.minimum, min(target, self.maximum)), self.policy)
            case events.Tick():
                self._time_out(now)
            case _:
                assert_never(event)
        self._let_leave(now)
        self._reconcile(now)
        self._keep_spares(now)
        if isinstance(event, (events.Add, events.SetTarget, events.UndrainNodes)):
            self._say_what_begins(now)
        elif isinstance(event, (events.Drain, events.DrainNodes)):
            self._say_what_waits(event, was_ready, now)
        return self._effects

    def resume(self, now: float) -> list[events.Effect]:
        """Return what was under way when this state was saved, and may not be waited for any more."""
        self._effects = []
        for member in self.members.values():
            if member.state == "stopping":
                member.deadline = math.inf
                self._effects.append(events.Stop(member.name, member.handle))
            elif member.is_launching:
                self._effects.append(self._start_of(member))
            member.seen_at = now
        return self._effects

    # --- what there is ------------------------------------------------------------------------------------------------

    @property
    def wanted(self) -> int:
        """Return how many first and joined members there shall be, within the limits."""
        target = self.firsts if self.target is None else self.target
        return max(self.minimum, min(target, self.maximum))

    def roster(self) -> list[Entry]:
        """Return the members that the dispatcher shall use, and no others."""
        return [
            Entry(member.name, member.handle, member.kind, member.state == "draining")
            for member in self.members.values()
            if member.state != "stopping" and member.handle is not None
        ]

    def view(self, now: float) -> View:
        """Return the view for policies and for users."""
        return View(
            members=tuple(self._shown(member, now) for member in self.members.values()),
            gone=tuple(self._shown(member, now) for member in list(self.gone.values())[-GONE_SHOWN:]),
            target=self.wanted,
            minimum=self.minimum,
            maximum=self.maximum,
            slots=self.slots,
            waiting=self.waiting,
            policy=self.policy if self.by_policy else "",
            now=now,
            spares=self.spares,
        )

    def _shown(self, member: _Member, now: float) -> Member:
        return Member(
            name=member.name,
            kind=member.kind,
            state=member.state,
            version=member.version,
            in_flight=member.in_flight,
            node=member.url or self.addresses.get(member.node, member.node),
            since_s=now - member.since,
            why=member.why,
        )

    def _own(self) -> list[_Member]:
        """Return the members that count for the target."""
        there = ("starting", "ready", "lost")
        own = [one for one in self.members.values() if one.kind in ("first", "joined") and one.state in there]
        return [one for one in own if one.leaves_within_s is None]

    def _spares(self) -> list[_Member]:
        """Return the spares, those first that are needed first."""
        there = [one for one in self.members.values() if one.kind == "spare" and one.state in ("starting", "spare")]
        return sorted(there, key=lambda one: one.state != "spare")

    def _ready(self) -> list[_Member]:
        """Return the members that get requests, of any kind."""
        return [one for one in self.members.values() if one.state == "ready"]

    # --- what is heard ------------------------------------------------------------------------------------------------

    def _report(self, report: events.Reported, now: float) -> None:
        self.waiting, self.reported_at = report.waiting, now
        for seen in report.seen:
            if seen.name in self.gone:
                continue
            member = self.members.get(seen.name)
            if member is None:
                member = self._first(seen, now)
            member.handle = seen.handle if member.handle is None else member.handle
            member.node = seen.node or member.node
            member.in_flight, member.seen_at = seen.in_flight, now
            is_new, member.version = member.version != seen.version, seen.version
            before = member.state
            self._heard(member, seen, now)
            if is_new and member.state == before:
                self._changed(member, now)
            if member.node in self.avoided and member.state == "starting" and member.kind in ("joined", "spare"):
                self._fail(member, "it was placed on a node that is drained", now)
            elif member.node in self.avoided and member.state in ("starting", "spare", "ready", "lost"):
                self._drain(member, events.DRAIN_TIMEOUT_S, "its node is drained", now)
        self.is_known = self.is_known or (bool(report.seen) and report.unnamed == 0)

    def _first(self, seen: Seen, now: float) -> _Member:
        rank = int(found[1]) if (found := re.search(r"(\d+)$", seen.name)) else -1
        self.next_rank = max(self.next_rank, rank + 1)
        self.firsts += 1
        member = _Member(seen.name, "first", "starting", now, rank, deadline=now + START_TIMEOUT_S)
        self.members[seen.name] = member
        self._changed(member, now)
        return member

    def _heard(self, member: _Member, seen: Seen, now: float) -> None:
        state = member.state
        if state == "stopping":
            return
        if state in ("starting", "lost"):
            until = min(now - seen.idle_s + START_TIMEOUT_S, member.since + START_TIMES_MAX * START_TIMEOUT_S)
            member.deadline = max(member.deadline, until)
        if member.kind == "spare":
            if seen.lost or (state == "spare" and not seen.spare):
                self._fail(member, "its process has ended" if seen.lost else "it does not answer", now)
            elif seen.spare:
                self.failures["spare"] = 0
                self._move(member, "spare", "", now)
            return
        if seen.spare and state != "draining":  # it was not told yet, or Ray has started it again since
            self._effects.append(events.Join(member.name, member.handle))
        if seen.lost == "gone":
            if state == "starting":
                self._fail(member, "its process has ended and Ray does not start it again", now)
            else:
                self._stop(member, self._why_gone(member, "Ray does not start it again"), now)
        elif state == "draining":
            if seen.lost or (seen.draining and seen.in_flight == 0):
                self._stop(member, member.why, now)
        elif seen.ready and not seen.lost:
            self.failures["joined"] = 0 if state == "starting" else self.failures["joined"]
            self._move(member, "ready", "" if member.leaves_within_s is None else member.why, now)
        elif state != "starting":
            unready = seen.why or "it has no current weights or does not answer"
            why = "Ray is starting it again" if seen.lost else unready
            self._lose(member, why, now)
        elif seen.lost:
            member.why = "Ray is starting it again"

    def _cluster(self, nodes: Mapping[str, str], slots: int, now: float) -> None:
        if nodes:  # Ray's head has an answer
            self.nodes = dict(nodes)
            self.addresses.update(nodes)
            self.avoided &= nodes.keys()
        just_begun = [m for m in self.members.values() if m.is_launching and now - m.since < events.RESERVE_TIMEOUT_S]
        self.slots = max(0, slots - len([member for member in just_begun if member.kind != "external"]))
        for member in list(self.members.values()):
            if member.state == "stopping" or not self._is_node_lost(member):
                continue
            if member.kind in ("joined", "spare"):
                self._stop(member, self._why_gone(member, ""), now)
            elif member.state in ("ready", "lost"):  # its framework may start it again elsewhere
                self._lose(member, self._why_gone(member, ""), now)

    def _lose(self, member: _Member, why: str, now: float) -> None:
        if member.state != "lost":
            member.deadline = now + START_TIMEOUT_S
        self._move(member, "lost", why, now)

    def _is_node_lost(self, member: _Member) -> bool:
        return member.node in self.addresses and member.node not in self.nodes

    def _why_gone(self, member: _Member, otherwise: str) -> str:
        return f"its node {self.addresses[member.node]} is lost" if self._is_node_lost(member) else otherwise

    def _time_out(self, now: float) -> None:
        # Without reports, nothing is known of those that run: they are left alone, however long that is.
        is_told = now - self.reported_at <= MISSING_TIMEOUT_S
        for member in list(self.members.values()):
            is_late = now >= member.deadline
            if member.state == "draining" and is_late:
                self._give_back(member, now)
            elif member.state == "stopping" and member.stops and is_late:
                member.deadline = math.inf
                self._effects.append(events.Stop(member.name, member.handle))
            elif member.state == "starting" and is_late and (is_told or member.handle is None):
                self._fail(member, f"it was not ready after {START_TIMEOUT_S:.0f} s", now)
            elif member.state == "lost" and member.kind != "external" and is_late and is_told:
                self._stop(member, f"it was lost for {START_TIMEOUT_S:.0f} s: {member.why}", now)
            elif member.state == "spare" and is_told and now - member.seen_at > MISSING_TIMEOUT_S:
                self._fail(member, "the dispatcher does not report it", now)
            elif member.state == "ready" and is_told and now - member.seen_at > MISSING_TIMEOUT_S:
                self._lose(member, "the dispatcher does not report it", now)

    # --- starting -----------------------------------------------------------------------------------------------------

    def _reconcile(self, now: float) -> None:
        """Take one step from what there is to what there shall be."""
        own = self._own()
        if not self.is_known or len(own) == self.wanted:
            return
        if len(own) > self.wanted:
            for member in sorted(own, key=_goes_first)[: len(own) - self.wanted]:
                self._drain(member, events.DRAIN_TIMEOUT_S, f"the target is {self.wanted}", now)
            return
        for spare in self._spares()[: self.wanted - len(own)]:
            self._take(spare, now)
        self._start("joined", self.wanted - len(self._own()), now)

    def _start(self, kind: Kind, count: int, now: float) -> None:
        """Start so many, as far as there is room."""
        under_way = [one for one in (*self._own(), *self._spares()) if one.state == "starting"]
        most = min(self.slots, STARTS_MAX - len(under_way)) if now >= self.start_again_at[kind] else 0
        for _ in range(min(count, most)):
            member = _Member(f"rollout-{self.next_rank}", kind, "starting", now, self.next_rank)
            self.next_rank += 1
            self._launch(member, now)
            self.slots -= 1

    def _take(self, spare: _Member, now: float) -> None:
        """Have a spare join: from now on it is a replica as any other, which has still to fetch its first weights."""
        is_there, spare.kind, spare.why = spare.state == "spare", "joined", ""
        if is_there:
            spare.deadline = now + START_TIMEOUT_S
            self._effects.append(events.Join(spare.name, spare.handle))
            self._move(spare, "starting", "", now)
        else:  # it is told when it says that it is a spare
            self._changed(spare, now)
        self._say(f"{spare.name} joins, a spare")

    def _keep_spares(self, now: float) -> None:
        """Start spares when there is room, and everything else is well; stop one whose place is wanted."""
        spares, own = self._spares(), self._own()
        if spares and now - self.wanted_since >= WANTED_TIMEOUT_S:
            self.wanted_since, self.start_again_at["spare"] = now, now + SPARE_DELAY_S
            self._stop(spares[-1], "something else waits for resources", now)
            return
        is_well = self.is_known and len(own) == self.wanted and all(one.state != "starting" for one in own)
        has_weights = any(one.version for one in own)  # or there would be nothing for a spare to fetch
        if is_well and has_weights and self.wanted_since == math.inf:
            self._start("spare", self.spares - len(spares), now)

    def _launch(self, member: _Member, now: float) -> None:
        member.deadline = now + START_TIMEOUT_S
        self.members[member.name] = member
        self._effects.append(self._start_of(member))
        self._changed(member, now)

    def _start_of(self, member: _Member) -> events.Effect:
        if member.kind == "external":
            return events.StartExternal(member.name, member.url)
        return events.Start(member.name, member.rank, frozenset(self.avoided), member.kind == "spare")

    def _started(self, name: str, handle: Any, now: float) -> None:
        member = self.members.get(name)
        if member is not None and member.is_launching:
            member.handle, member.deadline, member.seen_at = handle, now + START_TIMEOUT_S, now

    def _fail(self, member: _Member, why: str, now: float) -> None:
        self._stop(member, why, now)
        if member.kind not in ("joined", "spare"):
            self._say(f"{member.name} {member.url} did not start: {why}")
            return
        delay_s = min(START_DELAY_MAX_S, START_DELAY_S * 2 ** self.failures[member.kind])
        self.failures[member.kind] = min(self.failures[member.kind] + 1, 32)
        self.start_again_at[member.kind] = now + delay_s
        self.last_failure = why if member.kind == "joined" else self.last_failure
        self._say(f"{member.name} did not start, the next try is in {delay_s:.0f} s: {why}")

    # --- leaving ------------------------------------------------------------------------------------------------------

    def _drain(self, member: _Member, timeout_s: float, why: str, now: float) -> None:
        if member.state == "draining":  # the time is another one
            member.deadline = member.deadline if member.is_aborted else now + timeout_s
        elif member.state in ("starting", "spare", "lost") or member.handle is None:
            self._stop(member, why, now)
        else:
            member.deadline = now + timeout_s
            self._move(member, "draining", why, now)

    def _let_leave(self, now: float) -> None:
        """Drain those that wait until enough others are ready, and those that are ready no more themselves."""
        for member in [one for one in self.members.values() if one.leaves_within_s is not None]:
            if member.state != "ready" or len(self._ready()) > self.minimum:
                self._drain(member, member.leaves_within_s or 0.0, BY_NAME, now)

    def _give_back(self, member: _Member, now: float) -> None:
        if member.is_aborted:
            self._stop(member, f"{member.why}; {member.in_flight} requests were under way to the end", now)
            return
        member.is_aborted, member.deadline = True, now + ABORT_TIMEOUT_S
        self._effects.append(events.Abort(member.name, member.handle))

    def _stop(self, member: _Member, why: str, now: float) -> None:
        member.deadline = math.inf
        self._effects.append(events.Stop(member.name, member.handle))
        self._move(member, "stopping", why, now)

    def _stopped(self, name: str, now: float) -> None:
        member = self.members.get(name)
        if member is None or member.state != "stopping":
            return
        del self.members[name]
        self.gone[name] = member
        while len(self.gone) > GONE_MAX:
            del self.gone[next(iter(self.gone))]
        self._move(member, "gone", member.why, now)

    def _stop_failed(self, name: str, why: str, now: float) -> None:
        member = self.members.get(name)
        if member is None or member.state != "stopping":
            return
        delay_s = min(STOP_DELAY_MAX_S, STOP_DELAY_S * 2**member.stops)
        member.stops, member.deadline = min(member.stops + 1, 32), now + delay_s
        self._say(f"{name} has not given back what it used, the next try is in {delay_s:.0f} s: {why}")

    # --- commands -----------------------------------------------------------------------------------------------------

    def _add(self, count: int) -> None:
        if not events.is_whole(count) or count < 1:
            raise UsageError(f"add {count!r}: give the number of replicas to add, 1 or more")
        if self.wanted + count > self.maximum:
            raise UsageError(f"the target is {self.wanted}, and {count} more are above fleet_max, {self.maximum}")
        self._set_target(self.wanted + count)

    def _set_target(self, target: int | None) -> None:
        if target is None:
            if not self.policy:
                raise UsageError("this run has no policy: start it with option fleet_policy, or give a number")
            self.by_policy = True
            self._say(f"the target is set by {self.policy}")
            return
        if not events.is_whole(target):
            raise UsageError(f"target {target!r}: give a whole number of replicas")
        if not self.minimum <= target <= self.maximum:
            raise UsageError(f"target {target}: fleet_min and fleet_max allow {self.minimum} to {self.maximum}")
        if self.by_policy:
            self.by_policy = False
            self._say(f"{self.policy} no longer sets the target (`tensorhub fleet target policy` undoes)")
        self._aim(target, "people")

    def _aim(self, target: int, by: str) -> None:
        if target != self.wanted:
            self._effects += [events.Say(f"the target is {target}, it was {self.wanted}"), events.Targeted(target, by)]
        self.target = target

    def _add_external(self, url: str, now: float) -> None:
        for member in self.members.values():
            if member.url == url:
                raise UsageError(f"{url} is in this fleet already, as {member.name}")
        member = _Member(f"external-{self.next_external}", "external", "starting", now, url=url)
        self.next_external += 1
        self._launch(member, now)
        self._say(f"{url} joins as {member.name}")

    def _drain_by_name(self, event: events.Drain, now: float) -> None:
        member = self.members.get(event.name)
        if member is None:
            raise UsageError(f"no member is called {event.name!r}: there are {', '.join(self.members) or 'none'}")
        if member.state == "stopping":
            raise UsageError(f"{event.name} has left already: {member.why}")
        events.check_timeout(event.timeout_s)
        if member.kind in ("first", "joined") and member.state != "draining" and member.leaves_within_s is None:
            if self.wanted == self.minimum:
                self._say(f"another one is started in its place: fleet_min is {self.minimum}")
            self._aim(max(self.minimum, self.wanted - 1), "people")
        if member.state == "ready" and not event.now and len(self._ready()) <= self.minimum:
            member.leaves_within_s = event.timeout_s
            self._move(member, "ready", f"{BY_NAME}, and waits until others are ready", now)
            return
        self._drain(member, event.timeout_s, BY_NAME, now)
        self._say(self._how_it_leaves(member, event.timeout_s))

    def _drain_nodes(self, event: events.DrainNodes, now: float) -> None:
        there = [
            one
            for one in self.members.values()
            if one.state != "stopping"
            and (one.node in event.nodes or (one.url and events.host_of(one.url) in event.hosts))
        ]
        if not there and not event.nodes:
            known = sorted(
                {*self.nodes.values(), *(events.host_of(one.url) for one in self.members.values() if one.url)}
            )
            raise UsageError(f"there is no node {', '.join(event.hosts)!r}: there are {', '.join(known)}")
        events.check_timeout(event.timeout_s)
        self.avoided |= event.nodes & self.nodes.keys()
        for member in there:
            self._drain(member, event.timeout_s, event.why, now)
            self._say(self._how_it_leaves(member, event.timeout_s))
        if not there:
            self._say("no member is there; none will be started there")

    def _undrain_nodes(self, nodes: frozenset[str], host: str) -> None:
        if not nodes & self.nodes.keys():
            raise UsageError(f"there is no node {host!r}: there are {', '.join(sorted(self.nodes.values()))}")
        if not nodes & self.avoided:
            raise UsageError(f"node {host} is not drained")
        self.avoided -= nodes
        self._say(f"replicas may be started on {host} again")

    def _how_it_leaves(self, member: _Member, timeout_s: float) -> str:
        if member.state == "stopping":
            return f"{member.name} is stopped"
        return f"{member.name} drains: {member.in_flight} requests may take {timeout_s:.0f} s"

    def _say_what_begins(self, now: float) -> None:
        started = [effect.name for effect in self._effects if isinstance(effect, events.Start)]
        leaving = [
            one.member.name
            for one in self._effects
            if isinstance(one, events.Changed) and one.member.state == "draining"
        ]
        if started:
            self._say(f"starting {', '.join(started)}")
        if leaving:
            self._say(f"draining {', '.join(leaving)}")
        lacking = self.wanted - len(self._own())
        if lacking > 0:
            self._say(f"{lacking} more will be started later: {self._why_later(now)}")

    def _why_later(self, now: float) -> str:
        if not self.is_known:
            return "the run's first replicas have not all reported yet"
        if (wait_s := self.start_again_at["joined"] - now) > 0:
            return f"the last start failed, the next is in {wait_s:.0f} s ({self.last_failure})"
        return "there is no room now" if self.slots <= 0 else f"{STARTS_MAX} start at a time"

    def _say_what_waits(self, event: events.Drain | events.DrainNodes, was_ready: bool, now: float) -> None:
        """Say after a drain, when it is known what was started in its place, what waits for that: the drain, or
        requests."""
        ready = self._ready()
        coming = [one.name for one in self._own() if one.state != "ready"]
        successor = f"{' or '.join(coming)} is" if coming else f"another one is ({self._why_later(now)})"
        member = self.members[event.name] if isinstance(event, events.Drain) else None
        if member is not None and member.leaves_within_s is not None:
            one = "the last that is ready" if len(ready) == 1 else f"one of {len(ready)} that are ready"
            one += f", and fleet_min is {self.minimum}" if self.minimum > 1 else ""
            self._say(f"{member.name} is {one}: it drains when {successor}, or at once with --now")
        elif was_ready and not ready:
            self._say(f"it was the last that is ready: requests wait until {successor}")

    # --- telling ------------------------------------------------------------------------------------------------------

    def _move(self, member: _Member, state: State, why: str, now: float) -> None:
        member.why = why
        if member.state != state:
            member.state, member.since = state, now
            if state in ("draining", "stopping"):
                member.leaves_within_s = None
            if state in ("stopping", "gone"):
                member.in_flight = 0
            self._changed(member, now)

    def _say(self, text: str) -> None:
        self._effects.append(events.Say(text))

    def _changed(self, member: _Member, now: float) -> None:
        self._effects.append(events.Changed(self._shown(member, now)))


def _goes_first(member: _Member) -> tuple[bool, bool, int]:
    """Return the key by which members leave when there are too many: first those that serve no requests, then the
    joined, the newest first."""
    return member.state == "ready", member.kind == "first", -member.rank
