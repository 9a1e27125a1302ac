"""Which engines answer, by the table of vllm/ray/members.py. One that hangs is ended, and Ray starts it again.

Engines come and go with the fleet's roster, which another thread takes in: all access holds the lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayTaskError

from tensorhub_plugins.core import DeadlineExceeded, TensorHubError, VersionRefused, work
from tensorhub_plugins.openrlhf import config
from tensorhub_plugins.vllm.ray import replica_metrics
from tensorhub_plugins.vllm.ray.actor_handles import ENDED
from tensorhub_plugins.vllm.ray.fleet.events import Reported
from tensorhub_plugins.vllm.ray.fleet.types import Entry
from tensorhub_plugins.vllm.ray.members import Member, Members
from tensorhub_plugins.vllm.ray.rotation import Out, Rotation, reason_of

START_TIMEOUT_S = 1800.0  # loading the largest models and capturing graphs
HEARTBEAT_TIMEOUT_S = 0.5  # what a healthy engine's answer to a heartbeat takes at most, on a busy machine
CHECK_INTERVAL_S = 2.0  # between two looks at all engines while answers come

LOST = (*ENDED, TensorHubError)


class Engines:
    """All engines of the run, by what they have answered last."""

    def __init__(self, handles: Sequence[Any], timeout_s: float) -> None:
        self.table = Members(timeout_s, timeout_s)
        self.rotation = Rotation(self.table, lambda name: self.in_flight.get(name, 0), self._forget)
        for number, handle in enumerate(handles):
            self.table.add(f"rollout-{number}", time.monotonic(), handle, worker=f"rollout-{number}/0")
        self.has_begun = False
        self.has_fleet = False
        self.in_flight: Mapping[str, int] = {}  # prompts at each; the generator says so
        self.waiting = 0  # prompts at none
        self.forgotten: set[str] = set()  # silent, or gone for good: what they have goes on elsewhere
        self.lock = threading.RLock()
        self._probes: dict[str, Any] = {}  # heartbeats that were sent and not answered yet
        self._errors: dict[str, Exception] = {}  # of last heartbeats
        self._not_started: Exception | None = None  # of one that died without an answer; the fleet removes it
        self._checked_at = 0.0

    @property
    def members(self) -> list[Member]:
        return list(self.table.all.values())

    def live(self, version: int = 0) -> list[Member]:
        """Return those that answer from this version or a later one; wait until there is one, and at the beginning for
        all, as OpenRLHF would. Raise VersionRefused when none of them will."""
        began = time.monotonic()
        while True:
            self.check()
            with self.lock:
                members, live, refusing = self.members, self.table.able(version), self.table.refusing(version)
                is_stuck = self.table.is_stuck(version)
            if self._not_started is not None and not self.has_begun:
                raise self._not_started  # for a reason that another start does not change
            is_late = time.monotonic() >= work.until(began, self.table.worked_at, START_TIMEOUT_S)
            firsts = [member for member in members if member.kind == "first"]  # of others the fleet starts more
            self.has_begun = self.has_begun or is_late or all(member.answers for member in firsts)
            if live and self.has_begun:
                return live
            if is_stuck:
                raise VersionRefused(replica_metrics.why_stuck({one.called: one.refusal for one in refusing}))
            counted = members if self.has_begun else firsts
            dead = [self._errors[member.name] for member in counted if member.is_gone]
            is_last = len(dead) == len(members) and not self.has_fleet  # which would start others
            if dead and (is_last or not self.has_begun):
                raise dead[0]  # likewise, or there is nothing that would start another
            if is_late:
                raise DeadlineExceeded(
                    "no vLLM engine answers: look into Ray's logs of them", timeout_s=START_TIMEOUT_S
                )
            time.sleep(HEARTBEAT_TIMEOUT_S)

    def ready(self, version: int = 0) -> list[Member]:
        """Return those that have answered last; wait as `live` does if there is none."""
        if time.monotonic() - self._checked_at >= CHECK_INTERVAL_S:
            self.check(wait_s=0.0)  # what is not answered by now is looked at next time
        with self.lock:
            able = self.table.able(version) if self.has_begun else []
        return able or self.live(version)

    def check(self, *, wait_s: float = HEARTBEAT_TIMEOUT_S, joining: bool = False) -> None:
        """Make one round of heartbeats, with that long for the answers. joining: ask only those that join, if any."""
        with self.lock:
            if joining and not any(member.is_joining for member in self.members):
                return
            now = time.monotonic()
            idle_s, self._checked_at = now - self._checked_at, now
            for member in self.members:
                if member.name not in self._probes:
                    member.silent_since = min(now, member.silent_since + idle_s)  # nothing was asked
                    if member.is_joining or not joining:
                        self._probes[member.name] = member.handle.tensorhub_heartbeat.remote()
            probes = list(self._probes.values())
            if any(now - member.silent_since > self.table.timeout_s for member in self.members):
                wait_s = HEARTBEAT_TIMEOUT_S  # we may have stood still, and their answers are on the way
        if probes:
            ray.wait(probes, num_returns=len(probes), timeout=wait_s)
        with self.lock:
            for member in self.members:
                if member.name in self._probes:
                    self._receive(member)
            self.rotation.look()

    def _receive(self, member: Member) -> None:
        try:
            heartbeat = ray.get(self._probes[member.name], timeout=0)
        except GetTimeoutError:
            return
        except LOST as error:
            self._errors[member.name] = error
            self._probes.pop(member.name)
            self.rotation.failed(member, error)
            if member.is_gone and member.kind == "first" and not member.installed_at:
                self._not_started = error
            return
        self._probes.pop(member.name)
        self.rotation.heard(member, heartbeat)

    def _forget(self, member: Member, out: Out) -> None:
        self._probes.pop(member.name, None)  # whatever is still answered was said before
        if out != "failed":
            self.forgotten.add(member.name)

    # --- what answers of prompts say ----------------------------------------------------------------------------------

    def lost_by_name(self, name: str, epoch: int, error: Exception) -> None:
        """Note that a prompt that this engine was given in that epoch has ended so; raise what its agent has met."""
        if isinstance(error, RayTaskError) and isinstance(error, ENDED):
            raise error  # it has answered so: an actor has ended that its agent asked
        with self.lock:
            self.rotation.failed_request(name, epoch, reason_of(error))

    def refused_by_name(self, name: str, error: VersionRefused) -> None:
        """Note the same of a refused version; its next heartbeat says so."""
        with self.lock:
            if name in self.table.all:
                self.table.all[name].refusal = (error.version or 0, error.message)

    def leaves_by_name(self, name: str, epoch: int) -> None:
        """Note that it has given a prompt of that epoch back, which the fleet's roster will say, too."""
        with self.lock:
            if self.table.is_current(name, epoch):
                self.table.all[name].is_draining = True

    def answered_by_name(self, name: str, version: int) -> None:
        """Note that it has answered from this version or a later one, which its next heartbeat reports."""
        with self.lock:
            if (member := self.table.all.get(name)) is not None:
                member.has(max(version, member.version), time.monotonic())

    def figures(self, published: int = 0) -> dict[str, float]:
        """Return how they do, for the trainer's log: under the names that verl's log has, too. published: what is
        newest."""
        with self.lock:
            return replica_metrics.of_members(self.table, config.TRAINER, published=published, now=time.monotonic())

    # --- the fleet ----------------------------------------------------------------------------------------------------

    def seen(self) -> Reported:
        with self.lock:
            return self.table.seen(lambda name: self.in_flight.get(name, 0), self.waiting, now=time.monotonic())

    def apply(self, told: Collection[str], roster: Sequence[Entry]) -> None:
        with self.lock:
            self.has_fleet = True
            self.rotation.apply(told, roster)
