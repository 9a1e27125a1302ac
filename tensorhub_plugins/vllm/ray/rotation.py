"""What follows when the table of replicas (members.py) takes one out of rotation, or puts it back.

verl's router and OpenRLHF's generator ask for heartbeats, each in its own way, and say here how that has ended. What
is lost, back, or has left is logged and recorded, its requests go to others, and a replica that hangs is ended.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from typing import Literal

import ray

from tensorhub_plugins.core import record, version_text
from tensorhub_plugins.core.log import get_logger
from tensorhub_plugins.vllm.ray.actor_handles import DEAD, ENDED
from tensorhub_plugins.vllm.ray.fleet.types import Entry
from tensorhub_plugins.vllm.ray.members import DEATHS_MAX, Failure, Heartbeat, Member, Members

logger = get_logger(__name__)

REASON_LENGTH_MAX = 200

# Requests at one that has failed end with an error of their own; at one that is silent or has left they may never end.
Out = Literal["failed", "silent", "left"]


class Rotation:
    """The replicas that get work. All calls by one thread at a time."""

    def __init__(
        self, members: Members, in_flight: Callable[[str], int], forget: Callable[[Member, Out], None]
    ) -> None:
        """Watch these. in_flight: how many requests the one of this name has; forget: they go to others from now on."""
        self.members, self._in_flight, self._forget = members, in_flight, forget
        self._late: set[str] = set()  # no other one could answer; logged once

    def heard(self, member: Member, heartbeat: Heartbeat) -> None:
        """Take in an answer."""
        if self.members.heard(member.name, time.monotonic(), heartbeat):
            logger.info("%s is back with version %s", member.called, version_text(member.version))
            record("replica_back", worker=member.called, version=member.version)

    def failed(self, member: Member, error: Exception) -> None:
        """Take it out: a heartbeat has ended with this error."""
        how: Failure = "died" if isinstance(error, DEAD) else "restarting" if isinstance(error, ENDED) else "unfit"
        if self.members.failed(member.name, time.monotonic(), how):
            self._take_out(member, "failed", reason_of(error))
        if member.deaths == DEATHS_MAX:
            logger.warning("%s will not come back (%s)", member.called, reason_of(error))

    def failed_request(self, name: str, epoch: int, reason: str) -> None:
        """Take it out: a request that it was given in this epoch found out before a heartbeat did. Of those that it
        had when it was lost some are heard of when it is back."""
        if self.members.is_current(name, epoch) and self.members.failed(name, time.monotonic()):
            self._take_out(self.members.all[name], "failed", reason)

    def look(self) -> None:
        """Take out what is silent, and end what hangs: Ray starts it again, or the fleet another one."""
        now, known = time.monotonic(), self.members.all
        for name in self.members.silent(now):
            self._take_out(known[name], "silent", f"no answer for {self.members.timeout_s:.0f} s")
        late = set(self.members.late(now))
        for member in [known[name] for name in late - self._late]:
            limit_s = self.members.hangs_after_s(member)
            until = f"; it is ended and started again after {limit_s:.0f} s" if limit_s < math.inf else ""
            text = "%s has not answered for %.0f s, and no other one is ready%s"
            logger.warning(text, member.called, self.members.timeout_s, until)
        self._late = late
        for member in [known[name] for name in self.members.hung(now)]:
            reason = f"no answer for {now - member.silent_since:.0f} s"
            logger.error("%s hangs (%s): it is ended, to be started again", member.called, reason)
            ray.kill(member.handle, no_restart=False)
            if self.members.failed(member.name, now, "restarting"):
                self._take_out(member, "failed", reason)

    def apply(self, told: Collection[str], roster: Sequence[Entry]) -> list[Member]:
        """Use the replicas in the fleet's roster and no others; return those that join. told: see `Members.apply`."""
        joined, left = self.members.apply(told, roster, time.monotonic())
        for member in left:
            record("replica_left", worker=member.called, in_flight=self._in_flight(member.name))
            logger.info("%s has left", member.called)
            self._forget(member, "left")
        for member in joined:
            logger.info("%s joins", member.called)
        return joined

    def _take_out(self, member: Member, how: Out, reason: str) -> None:
        requests = self._in_flight(member.name)
        logger.warning("%s is out (%s); %d requests go to others", member.called, reason, requests)
        if member.is_missed:
            record("replica_lost", worker=member.called, reason=reason, in_flight=requests)
        self._forget(member, how)


def reason_of(error: Exception) -> str:
    """Return the first line of an error."""
    return (str(error).splitlines() or [""])[0][:REASON_LENGTH_MAX] or type(error).__name__
