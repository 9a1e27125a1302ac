"""Which engines answer. A silent one is ended, and Ray starts it again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError

from tensorhub_plugins.core import DeadlineExceeded, TensorHubError, record
from tensorhub_plugins.core.log import get_logger

logger = get_logger(__name__)

START_TIMEOUT_S = 1800.0  # loading the largest models and capturing graphs
HEARTBEAT_TIMEOUT_S = 0.5  # what a healthy engine's answer to a heartbeat takes at most, on a busy machine
CHECK_INTERVAL_S = 2.0  # between two looks at all engines while answers come
REQUESTS_MAX = 256  # vLLM's own default of max_num_seqs
DEATHS_MAX = 3  # an engine that Ray still calls dead after so many heartbeats will not be started again

LOST = (RayActorError, TensorHubError)


@dataclass
class Member:
    """One engine. probe: a heartbeat that was sent and not answered yet."""

    name: str
    handle: Any
    is_live: bool = False
    probe: Any = None
    sent_at: float = 0.0
    was_live: bool = False  # since it was (re)started: before, silence means that it is loading
    was_lost: bool = False
    losses: int = 0  # times that it was lost
    requests_max: int = REQUESTS_MAX  # sequences that its vLLM runs at once
    deaths: int = 0  # heartbeats in a row that Ray has answered with "it died"
    error: Exception | None = None  # the last one


@dataclass
class Engines:
    """All engines of the run, by what they have answered last."""

    handles: Sequence[Any]
    timeout_s: float
    members: list[Member] = field(init=False)
    has_begun: bool = False
    _checked_at: float = 0.0

    def __post_init__(self) -> None:
        self.members = [Member(f"rollout-{number}", handle) for number, handle in enumerate(self.handles)]

    def live(self) -> list[Member]:
        """Those that answer; waits until there is one, and at the beginning for all, as OpenRLHF would."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            self.check()
            live = [member for member in self.members if member.is_live]
            is_late = time.monotonic() > deadline
            self.has_begun = self.has_begun or is_late or len(live) == len(self.members)
            if live and self.has_begun:
                return live
            dead = [member for member in self.members if member.deaths >= DEATHS_MAX]
            if dead and (len(dead) == len(self.members) or not self.has_begun):
                assert dead[0].error is not None
                raise dead[0].error  # it could not start, for a reason that another start does not change
            if is_late:
                raise DeadlineExceeded(
                    "no vLLM engine answers: look into Ray's logs of them", timeout_s=START_TIMEOUT_S
                )
            time.sleep(HEARTBEAT_TIMEOUT_S)

    def ready(self) -> list[Member]:
        """Those that have answered last; waits as `live` does if there is none."""
        if time.monotonic() - self._checked_at >= CHECK_INTERVAL_S:
            self.check(wait_s=0.0)  # what is not answered by now is looked at next time
        return [member for member in self.members if member.is_live and self.has_begun] or self.live()

    def check(self, *, wait_s: float = HEARTBEAT_TIMEOUT_S) -> None:
        """One round of heartbeats, with that long for the answers."""
        self._checked_at = now = time.monotonic()
        for member in self.members:
            if member.probe is None:
                member.probe, member.sent_at = member.handle.tensorhub_heartbeat.remote(), now
        ray.wait([member.probe for member in self.members], num_returns=len(self.members), timeout=wait_s)
        for member in self.members:
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
            member.error = error
            member.deaths = member.deaths + 1 if isinstance(error, ActorDiedError) else 0
            return
        member.probe, member.deaths = None, 0
        member.requests_max = heartbeat.get("requests_max", REQUESTS_MAX)
        if heartbeat["silent_s"] > self.timeout_s:
            self._end(member, f"vLLM has not answered for {heartbeat['silent_s']:.0f} s")
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
        for member in self.members:
            if member.name == name:
                self.lost(member, error)

    def lost(self, member: Member, error: Exception) -> None:
        member.probe = None  # whatever is still answered was said before
        if member.is_live:
            logger.warning("%s is lost, its prompts are asked elsewhere: %s", member.name, error)
            record("replica_lost", worker=f"{member.name}/0", reason=(str(error).splitlines() or [""])[0][:200])
            member.was_lost = True
            member.losses += 1
        member.is_live = False
