"""Which engines answer, and which of them get prompts. A silent one is ended, and Ray starts it again.

Engines come and go with the fleet's roster (fleet.py), which another thread takes in: all access holds the lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnschedulableError, GetTimeoutError, RayActorError, RayError

from tensorhub_plugins.core import Deadline, DeadlineExceeded, TensorHubError, VersionRefused, record
from tensorhub_plugins.core.log import get_logger
from tensorhub_plugins.openrlhf import config
from tensorhub_plugins.vllm.ray import figures
from tensorhub_plugins.vllm.ray.fleet_types import Entry, Kind, Lost, Seen

logger = get_logger(__name__)

START_TIMEOUT_S = 1800.0  # loading the largest models and capturing graphs
HEARTBEAT_TIMEOUT_S = 0.5  # what a healthy engine's answer to a heartbeat takes at most, on a busy machine
CHECK_INTERVAL_S = 2.0  # between two looks at all engines while answers come
REQUESTS_MAX = 256  # vLLM's own default of max_num_seqs
DEATHS_MAX = 3  # an engine that Ray still calls dead after so many heartbeats will not be started again

LOST = (RayActorError, ActorUnschedulableError, TensorHubError)
DEAD = (ActorDiedError, ActorUnschedulableError)  # the second: Ray never starts it again, its node is lost


@dataclass
class Member:
    """One engine. probe: a heartbeat that was sent and not answered yet."""

    name: str
    handle: Any
    kind: Kind = "first"
    node: str = ""  # Ray's id of it
    version: int = 0
    installed_at: float = 0.0  # when this version was first heard of
    refusal: tuple[int, str] = (0, "")  # a newer version that it cannot install, and why
    last_update: Mapping[str, Any] = field(default_factory=dict)  # what that version has cost, as its heartbeat says
    is_draining: bool = False  # it gets no prompts any more
    is_live: bool = False
    probe: Any = None
    sent_at: float = 0.0
    was_live: bool = False  # since it was (re)started: before, silence means that it is loading
    was_lost: bool = False
    losses: int = 0  # times that it was lost
    requests_max: int = REQUESTS_MAX  # sequences that its vLLM runs at once
    deaths: int = 0  # heartbeats in a row that Ray has answered with "it died"
    error: Exception | None = None  # of the last heartbeat

    @property
    def gets_prompts(self) -> bool:
        return self.is_live and not self.is_draining

    def refuses(self, version: int) -> bool:
        """It will not have this version; 0: any version, where it has the model of before the training."""
        return self.refusal[0] >= max(version, 1) > self.version

    def heard(self, version: int, now: float) -> None:
        """It has this version."""
        if self.version != version or not self.installed_at:
            self.version, self.installed_at = version, now

    @property
    def lost(self) -> Lost:
        """For the fleet."""
        if self.deaths >= DEATHS_MAX:
            return "gone"
        return "restarting" if isinstance(self.error, RayError) else ""


@dataclass
class Engines:
    """All engines of the run, by what they have answered last."""

    handles: Sequence[Any]
    timeout_s: float
    members: list[Member] = field(init=False)
    has_begun: bool = False
    has_fleet: bool = False
    in_flight: Mapping[str, int] = field(default_factory=dict)  # prompts at each; the generator says so
    waiting: int = 0  # prompts at none
    forgotten: set[str] = field(default_factory=set)  # gone for good; what they have goes on elsewhere
    lock: threading.RLock = field(default_factory=threading.RLock)
    _checked_at: float = 0.0

    def __post_init__(self) -> None:
        self.members = [Member(f"rollout-{number}", handle) for number, handle in enumerate(self.handles)]

    def live(self, version: int = 0) -> list[Member]:
        """Those that answer from this version or a later one; waits until there is one, and at the beginning for all,
        as OpenRLHF would. VersionRefused when none of them will."""
        deadline = Deadline.after(START_TIMEOUT_S)
        while True:
            self.check()
            live = self._able(version)
            is_late = deadline.expired
            self.has_begun = self.has_begun or is_late or all(member.is_live for member in self.members)
            if live and self.has_begun:
                return live
            if why := self._why_stuck(version):
                raise VersionRefused(why)
            dead = [member for member in self.members if member.deaths >= DEATHS_MAX]
            is_last = len(dead) == len(self.members) and not self.has_fleet  # which would start others
            if dead and (is_last or not self.has_begun):
                assert dead[0].error is not None
                raise dead[0].error  # it could not start, for a reason that another start does not change
            if is_late:
                raise DeadlineExceeded(
                    "no vLLM engine answers: look into Ray's logs of them", timeout_s=START_TIMEOUT_S
                )
            time.sleep(HEARTBEAT_TIMEOUT_S)

    def _able(self, version: int) -> list[Member]:
        return [member for member in self.members if member.gets_prompts and not member.refuses(version)]

    def _why_stuck(self, version: int) -> str:
        """Why none will ever answer from this version; "": one does, or may."""
        there = [member for member in self.members if not member.is_draining and member.deaths < DEATHS_MAX]
        if not there or not all(member.is_live and member.refuses(version) for member in there):
            return ""
        return figures.why_stuck({f"{member.name}/0": member.refusal for member in there})

    def ready(self, version: int = 0) -> list[Member]:
        """Those that have answered last; waits as `live` does if there is none."""
        if time.monotonic() - self._checked_at >= CHECK_INTERVAL_S:
            self.check(wait_s=0.0)  # what is not answered by now is looked at next time
        return (self._able(version) if self.has_begun else []) or self.live(version)

    def check(self, *, wait_s: float = HEARTBEAT_TIMEOUT_S) -> None:
        """One round of heartbeats, with that long for the answers."""
        self._checked_at = now = time.monotonic()
        with self.lock:
            for member in self.members:
                if member.probe is None:
                    member.probe, member.sent_at = member.handle.tensorhub_heartbeat.remote(), now
            probes = [member.probe for member in self.members]
            if any(now - member.sent_at > self.timeout_s for member in self.members):
                wait_s = HEARTBEAT_TIMEOUT_S  # we may have stood still, and their answers are on the way
        if probes:
            ray.wait(probes, num_returns=len(probes), timeout=wait_s)
        with self.lock:
            for member in self.members:
                if member.probe is not None:
                    self._look(member)

    def _look(self, member: Member) -> None:
        silent_s = time.monotonic() - member.sent_at
        try:
            heartbeat = ray.get(member.probe, timeout=0)
        except GetTimeoutError:
            if member.was_live and silent_s > self.timeout_s:
                self._end(member, f"no answer for {silent_s:.0f} s")
            return
        except LOST as error:
            self.lost(member, error)
            member.was_live = False  # Ray is starting it again
            member.deaths = member.deaths + 1 if isinstance(error, DEAD) else 0
            return
        member.probe, member.deaths, member.error = None, 0, None
        member.heard(heartbeat["version"], time.monotonic())
        member.refusal, member.node = heartbeat.get("refusal", (0, "")), heartbeat.get("node", "")
        member.last_update = heartbeat
        member.requests_max = heartbeat.get("requests_max", REQUESTS_MAX)
        if heartbeat["silent_s"] > self.timeout_s:
            reason = f"vLLM has not answered for {heartbeat['silent_s']:.0f} s"
            if member.kind == "external":  # nobody here could start it again
                self.lost(member, RuntimeError(reason))
            else:
                self._end(member, reason)
        elif not member.is_live:
            if member.was_lost:
                logger.warning("%s answers again, at version %d", member.name, heartbeat["version"])
                record("replica_back", worker=f"{member.name}/0", version=heartbeat["version"])
            member.is_live, member.was_live, member.was_lost = True, True, False

    def _end(self, member: Member, reason: str) -> None:
        ray.kill(member.handle, no_restart=False)
        member.was_live = False
        self.lost(member, RuntimeError(reason))

    def lost_by_name(self, name: str, error: Exception) -> None:
        """A prompt that this engine had has ended so."""
        with self.lock:
            for member in self._called(name):
                self.lost(member, error)

    def refused_by_name(self, name: str, error: VersionRefused) -> None:
        """The same, and its next heartbeat says so."""
        with self.lock:
            for member in self._called(name):
                member.refusal = (error.version or 0, error.message)

    def answered_by_name(self, name: str, version: int) -> None:
        """It has answered from this version or a later one, of which its next heartbeat tells."""
        with self.lock:
            for member in self._called(name):
                member.heard(max(version, member.version), time.monotonic())

    def _called(self, name: str) -> list[Member]:
        return [member for member in self.members if member.name == name]

    def figures(self, published: int = 0) -> dict[str, float]:
        """How they do, for the trainer's log: under the names that verl's log has, too. published: what is newest."""
        with self.lock:
            live = [member for member in self.members if member.gets_prompts]
            told = figures.of_replicas(
                live,
                lost=sum(member.was_lost and not member.is_draining for member in self.members),
                refused=sum(member.refusal[0] >= max(published, 1) for member in self.members),
                published=published,
                now=time.monotonic(),
            )
            return {**told, **figures.of_updates((member.last_update for member in live), config.TRAINER)}

    # --- the fleet ----------------------------------------------------------------------------------------------------

    def seen(self) -> list[Seen]:
        """What the fleet is told."""
        with self.lock:
            return [
                Seen(
                    name=member.name,
                    handle=member.handle,
                    node=member.node,
                    ready=member.is_live,
                    version=member.version,
                    in_flight=self.in_flight.get(member.name, 0),
                    draining=member.is_draining,
                    lost=member.lost,
                )
                for member in self.members
            ]

    def take(self, roster: Sequence[Entry]) -> None:
        """Use these from now on, and no others."""
        with self.lock:
            self.has_fleet = True
            known = {member.name: member for member in self.members}
            for entry in roster:
                if entry.name not in known:
                    self.members.append(Member(entry.name, entry.handle, entry.kind))
                    logger.info("%s joins", entry.name)
                else:
                    known.pop(entry.name).is_draining = entry.draining
            for name, member in known.items():
                self.members.remove(member)
                self.forgotten.add(name)
                record("replica_left", worker=f"{name}/0", in_flight=self.in_flight.get(name, 0))
                logger.info("%s has left", name)

    def lost(self, member: Member, error: Exception) -> None:
        member.error = error
        member.probe = None  # whatever is still answered was said before
        if member.is_live:
            logger.warning("%s is lost, its prompts are asked elsewhere: %s", member.name, error)
            if not member.is_draining:  # one that leaves is not missed
                record("replica_lost", worker=f"{member.name}/0", reason=(str(error).splitlines() or [""])[0][:200])
            member.was_lost = True
            member.losses += 1
        member.is_live = False
