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
    deaths: int = 0  # heartbeats in a row that Ray has answered with "it died"
    error: Exception | None = None  # the last one


@dataclass
class Fleet:
    """All engines of the run, by what they have answered last."""

    handles: Sequence[Any]
    timeout_s: float
    members: list[Member] = field(init=False)
    has_begun: bool = False

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

    def check(self) -> None:
        """One round of heartbeats."""
        now = time.monotonic()
        for member in self.members:
            if member.probe is None:
                member.probe, member.sent_at = member.handle.tensorhub_heartbeat.remote(), now
        ray.wait([member.probe for member in self.members], num_returns=len(self.members), timeout=HEARTBEAT_TIMEOUT_S)
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

    def lost(self, member: Member, error: Exception) -> None:
        member.probe = None  # whatever is still answered was said before
        if member.is_live:
            logger.warning("%s is lost, its prompts are asked elsewhere: %s", member.name, error)
            record("replica_lost", worker=f"{member.name}/0", reason=(str(error).splitlines() or [""])[0][:200])
            member.was_lost = True
        member.is_live = False
