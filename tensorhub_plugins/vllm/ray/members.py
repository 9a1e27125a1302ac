"""PURE: the replicas of a run, as their dispatcher knows them: which may take work, and which have to be ended.

    joining --+                                +-- drain --> draining --> removed
              +-- ready and caught up --> in rotation
    lost -----+                                +-- silent, failed, hung --> lost

verl's router and OpenRLHF's generator ask every replica for a `Heartbeat` and dispatch by this one table; the fleet
(fleet/types.py) gets what it knows, and says which to use.

- In rotation is a replica that is *ready* and has answered within `timeout_s`. `able` says which may take a request.
- One that falls silent or fails is taken out at once, in a new epoch: what it was given is asked elsewhere. It is put
  back only when it answers again AND has caught up with the version the others had when it came back: it may have slept
  through many, and its first answers would be stale. When the others go back, because an older version was pinned, that
  is far enough. One that joins a run is treated likewise, and the last one standing is never kept out.
- One that has served, or was a spare, and is silent for `engine_timeout_s` hangs, even alone: it is to be ended, and
  is started again. One that loads, drains, or could not be started again from here, never hangs.
- One that answers that it is not ready (it is cut off from the hub for too long, say) gets no work and is not lost. It
  catches up likewise when it is ready again.
- One that is drained gets no new requests, and finishes those it has.
- Silence while the dispatcher itself stood still does not count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from typing_extensions import Required, TypedDict

from tensorhub_plugins.vllm.ray.fleet.events import Reported
from tensorhub_plugins.vllm.ray.fleet.types import Entry, Kind, Seen

JOIN_INTERVAL_S = 0.2  # between heartbeats of one that joins, whose first answer waits for them
STILL_MAX_S = 5.0  # between two looks: a dispatcher that looks once a second stood still for the rest
DEATHS_MAX = 3  # in a row: the calls under way when an actor dies may say so of one that is started again

# unfit: a request found that it cannot serve, or it said so itself. restarting: its process has ended, and is started
# again. died: its process has ended and will not be, as Ray says.
Failure = Literal["unfit", "restarting", "died"]


class Heartbeat(TypedDict, total=False):
    """What a replica answers. Whatever it leaves out is as a replica without that part has it."""

    version: Required[int]
    ready: bool  # it may take work
    silent_s: float  # for so long its engine has left a question unanswered, whatever the actor around it does
    idle_s: float  # for so long it has fetched and installed nothing
    refusal: tuple[int, str]  # a newer version that it cannot install, and why
    stays: bool  # it will not go on to a newer version: pinned, or not one that follows
    spare: bool  # its engine runs and holds no weights yet: the fleet says when it begins to follow
    follows: bool  # the store; others are moved in and out by their framework
    worker: str  # its name in the store and the event log: "rollout-3/0"
    node: str  # Ray's id of it
    why: str  # it is not ready
    events: str | None  # the folder in which its run records events
    timeout_s: float  # of `Members`, where the replicas are configured with it
    engine_timeout_s: float  # likewise
    requests_max: int  # sequences that its vLLM runs at once
    pull_s: float  # what its last version has cost, see replica_metrics.py
    pause_s: float
    sources: Mapping[str, int]
    ways: Mapping[str, int]


@dataclass
class Member:
    """One replica. name: by which its dispatcher asks it; worker: "" until it has said what it is called."""

    name: str
    handle: Any = None
    kind: Kind = "first"
    worker: str = ""
    silent_since: float = 0.0  # its last answer, or the question that it leaves unanswered
    heartbeat: Heartbeat = field(default_factory=lambda: Heartbeat(version=0))  # the last one
    ready: bool = False
    worked_at: float = 0.0  # when it last advanced with a version
    version: int = 0
    installed_at: float = 0.0  # when this version was first heard of
    refusal: tuple[int, str] = (0, "")
    is_joining: bool = False  # not in rotation yet, because the others are further
    is_draining: bool = False
    is_spare: bool = False
    is_lost: bool = False  # out of rotation since it fell silent or failed
    catch_up_to: int | None = None  # None: not heard since it was lost, or not ready since it joined
    is_restarting: bool = False  # its process has ended, and it was not ready since
    has_served: bool = False  # since it was (re)started: before, silence means that it is loading
    has_run: bool = False  # likewise: it has served, or said that it is a spare
    deaths: int = 0  # heartbeats in a row that Ray has answered with "it died"
    epoch: int = 0  # counts losses: a request of an earlier epoch is gone

    @property
    def is_gone(self) -> bool:
        """Return whether no process will ever answer under its name again."""
        return self.deaths >= DEATHS_MAX

    @property
    def answers(self) -> bool:
        """Return whether it would take new work if it were not draining."""
        return self.ready and not self.is_lost and not self.is_joining

    @property
    def in_rotation(self) -> bool:
        return self.answers and not self.is_draining

    @property
    def is_missed(self) -> bool:
        """Return whether it is lost: not one that leaves, nor one that has not begun."""
        return self.is_lost and not self.is_draining and not self.is_joining

    @property
    def stays(self) -> bool:
        return self.heartbeat.get("stays", False)

    @property
    def called(self) -> str:
        """Return its name in the event log, as far as it is known."""
        return self.worker or self.name

    def refuses(self, version: int) -> bool:
        """Return whether it will not have this version; 0: any version, where it has the model of before the
        training."""
        return self.refusal[0] >= max(version, 1) > self.version

    def has(self, version: int, now: float) -> None:
        """Note that it answers with this version."""
        if self.version != version or not self.installed_at:
            self.version, self.installed_at = version, now

    def lose(self) -> None:
        """Take it out, in a new epoch."""
        self.is_lost, self.catch_up_to, self.epoch = True, None, self.epoch + 1
        self.is_joining = self.is_joining and not self.has_served


class Members:
    """timeout_s: silence that takes a replica out of rotation; engine_timeout_s: silence for which it is ended."""

    def __init__(self, timeout_s: float, engine_timeout_s: float = math.inf) -> None:
        self.timeout_s, self.engine_timeout_s = timeout_s, engine_timeout_s
        self.all: dict[str, Member] = {}
        self._looked_at = math.inf

    # --- what is there ------------------------------------------------------------------------------------------------

    def add(self, name: str, now: float, handle: Any = None, *, worker: str = "") -> Member:
        """Add a replica that is there from the start. It is not ready before it says so."""
        member = self.all.setdefault(name, Member(name, worker=worker, silent_since=now))
        member.handle = handle
        return member

    def remove(self, name: str) -> None:
        """Remove a replica that is taken away: it is not lost, simply not ours to route to any more."""
        self.all.pop(name, None)

    # --- what is heard ------------------------------------------------------------------------------------------------

    def heard(self, name: str, now: float, heartbeat: Heartbeat) -> bool:
        """Take in an answer. Returns whether this brings it back into rotation after a loss."""
        member = self.all.get(name)
        if member is None:
            return False
        self.timeout_s = heartbeat.get("timeout_s", self.timeout_s)
        was_silent = member.silent_since < now - self.timeout_s
        member.heartbeat, member.worker = heartbeat, heartbeat.get("worker", member.worker)
        member.is_spare = heartbeat.get("spare", False)
        member.deaths, ready, silent_s = 0, heartbeat.get("ready", True), heartbeat.get("silent_s", 0.0)
        member.has_served = member.has_served or ready
        member.has_run = member.has_run or ready or member.is_spare
        member.worked_at = max(member.worked_at, now - heartbeat.get("idle_s", math.inf))
        # The actor is well, its engine is not: no sign of life, but of one that joins, which has much to begin with.
        if silent_s > self.timeout_s and (member.has_served or member.is_spare):
            member.silent_since = now - silent_s
            return False
        if member.is_lost and (member.catch_up_to is None or was_silent):
            member.catch_up_to = self.newest()  # the first answer after the loss, or after a silence
        if member.is_joining and ready and member.catch_up_to is None:
            member.catch_up_to = self.newest()  # it has started by now, which took a while
        member.has(heartbeat["version"], now)
        if member.answers and not ready:  # it may not hear of versions for hours: when it is ready it catches up
            member.is_joining, member.catch_up_to = True, None
        member.silent_since, member.ready, member.refusal = now, ready, heartbeat.get("refusal", (0, ""))
        member.is_restarting = member.is_restarting and not ready
        is_out = member.is_lost or member.is_joining
        if is_out and ready and member.version >= min(member.catch_up_to or 0, self.newest()):
            was_lost, member.is_lost, member.is_joining = member.is_lost, False, False
            return was_lost
        return False

    def failed(self, name: str, now: float, how: Failure = "unfit") -> bool:
        """Take it out. Returns whether it was not out before. How a heartbeat failed says what becomes of it; a request
        cannot: those under way when a process ends all end alike."""
        member = self.all.get(name)
        if member is None:
            return False
        is_new = not member.is_lost
        if is_new:
            member.ready, member.silent_since = False, now
            member.lose()
        if how != "unfit":
            member.deaths = member.deaths + 1 if how == "died" else 0
            member.is_restarting, member.has_served, member.refusal = True, False, (0, "")
            member.is_spare = member.has_run = False  # before it says so again
        return is_new

    # --- silence ------------------------------------------------------------------------------------------------------

    def look(self, now: float) -> None:
        """Call once a second: what this took too long for counts as no replica's silence."""
        still_s = max(0.0, now - self._looked_at - STILL_MAX_S)
        for member in self.all.values():
            member.silent_since = min(now, member.silent_since + still_s)  # it may have been heard since
        self._looked_at = now

    def silent(self, now: float) -> list[str]:
        """Take out, and return, those not heard for the timeout while another one was.

        When none is heard it is more likely that this machine or the dispatcher stands still; and their requests
        could go nowhere."""
        late = self.late(now)
        out = late if any(one.in_rotation for one in self.all.values() if one.name not in late) else []
        for name in out:
            self.all[name].lose()
        return out

    def late(self, now: float) -> list[str]:
        """Return those that have served, are not heard for the timeout, and are not taken out."""
        here = [one for one in self.all.values() if one.has_served and not one.is_lost]
        return [one.name for one in here if now - one.silent_since > self.timeout_s]

    def hung(self, now: float) -> list[str]:
        """Return those to be ended, and then `failed` as "restarting"."""
        here = [one for one in self.all.values() if one.has_run and not one.is_draining]
        return [one.name for one in here if now - one.silent_since > self.hangs_after_s(one)]

    def hangs_after_s(self, member: Member) -> float:
        """Return the silence for which it is ended. An external one could not be started again from here."""
        limit_s = member.heartbeat.get("engine_timeout_s", self.engine_timeout_s)
        return math.inf if member.kind == "external" else limit_s

    @property
    def worked_at(self) -> float:
        """Return when one of them last advanced with a version: those that wait for any replica wait on."""
        return max((one.worked_at for one in self.all.values()), default=0.0)

    # --- dispatch -----------------------------------------------------------------------------------------------------

    def able(self, version: int = 0) -> list[Member]:
        """Return those that may take a request to be answered from this version or a later one."""
        return [one for one in self.all.values() if one.in_rotation and not one.refuses(version)]

    def is_current(self, name: str, epoch: int) -> bool:
        """Return whether requests given to this replica in `epoch` can still be answered."""
        member = self.all.get(name)
        return member is not None and member.epoch == epoch

    def newest(self) -> int:
        """Return the newest version in rotation; 0 if there is none, so that the last one standing is never kept
        out."""
        return max((one.version for one in self.all.values() if one.in_rotation), default=0)

    def behind(self, version: int) -> list[Member]:
        """Return those that would answer with an older version and will have this one; at the start, those without
        any."""
        there = [one for one in self.all.values() if not (one.is_lost or one.is_joining or one.is_draining)]
        return [one for one in there if (one.ready or not one.version) and one.version < version and not one.stays]

    def refusing(self, published: int = 0) -> list[Member]:
        """Return those that cannot install the trainer's newest version. published: that one; 0 where it is not
        known."""
        return [one for one in self.all.values() if not one.is_gone and one.refusal[0] >= max(published, 1)]

    def is_stuck(self, version: int = 0, published: int = 0) -> bool:
        """Return whether none is able, and never will be: all of them refuse what is asked for, and what was
        published."""
        there = [one for one in self.all.values() if not (one.is_gone or one.is_draining or one.is_spare)]
        refusing = self.refusing(max(version, published))
        return bool(there) and not self.able(version) and all(one in refusing for one in there)

    # --- the fleet ----------------------------------------------------------------------------------------------------

    def seen(self, in_flight: Callable[[str], int], waiting: int = 0, *, now: float = -math.inf) -> Reported:
        """Return what the fleet is told. in_flight: requests that one has; waiting: those that none has.

        Those that their framework moves in and out are left out."""
        named = [one for one in self.all.values() if one.worker and one.heartbeat.get("follows", True)]
        seen = [
            Seen(
                name=one.worker.partition("/")[0],
                handle=one.handle,
                node=one.heartbeat.get("node", ""),
                ready=one.answers,
                version=one.version,
                in_flight=in_flight(one.name),
                draining=one.is_draining,
                lost="gone" if one.is_gone else "restarting" if one.is_restarting else "",
                why=one.heartbeat.get("why", ""),
                spare=one.is_spare and now - one.silent_since <= self.timeout_s,
                idle_s=now - one.worked_at if one.worked_at and math.isfinite(now) else math.inf,
            )
            for one in named
        ]
        return Reported(tuple(seen), waiting, unnamed=sum(not (one.worker or one.is_gone) for one in self.all.values()))

    def apply(self, told: Collection[str], roster: Iterable[Entry], now: float) -> tuple[list[Member], list[Member]]:
        """Use those in the roster and no others. Returns those that join, and those that have left.

        told: names that the fleet was told before. One of them that is not in the roster is being ended."""
        entries = {entry.name: entry for entry in roster}
        known = {one.worker.partition("/")[0]: one for one in self.all.values() if one.worker}
        left = [one for name, one in known.items() if name in told and name not in entries]
        for one in left:
            self.remove(one.name)
        joined = []
        for name, entry in entries.items():
            if name not in known:
                known[name] = Member(name, entry.handle, entry.kind, f"{name}/0", silent_since=now, is_joining=True)
                self.all[name] = known[name]
                joined.append(known[name])
            known[name].is_draining = entry.draining
        return joined, left
