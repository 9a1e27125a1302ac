"""PURE: what happens to a fleet, and what it does about it: see state.py."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from tensorhub_plugins.core import UsageError
from tensorhub_plugins.vllm.ray.fleet.types import Member, Seen

DRAIN_TIMEOUT_MAX_S = 86_400.0
DRAIN_TIMEOUT_S = 120.0  # where it is not said how long answers under way may take
RESERVE_TIMEOUT_S = 30.0  # by then a start holds its resources, so that `slots` no longer counts them, or has failed

# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reported:
    """By the dispatcher. waiting: requests that no member has yet; unnamed: members that it cannot name yet."""

    seen: tuple[Seen, ...]
    waiting: int = 0
    unnamed: int = 0


@dataclass(frozen=True)
class Cluster:
    """nodes: those that live, Ray's id and address; slots: replicas for which there is room; is_wanted: something else
    waits for resources."""

    nodes: Mapping[str, str]
    slots: int
    is_wanted: bool = False


@dataclass(frozen=True)
class Started:
    name: str
    handle: Any


@dataclass(frozen=True)
class StartFailed:
    name: str
    why: str


@dataclass(frozen=True)
class Stopped:
    name: str


@dataclass(frozen=True)
class StopFailed:
    name: str
    why: str


@dataclass(frozen=True)
class Add:
    count: int


@dataclass(frozen=True)
class AddExternal:
    url: str


@dataclass(frozen=True)
class Drain:
    """now: even if too few others are ready."""

    name: str
    timeout_s: float = DRAIN_TIMEOUT_S
    now: bool = False


@dataclass(frozen=True)
class DrainNodes:
    """Ray's ids. Nothing is started there any more, and drains wait for nothing: the nodes go away. hosts: their names
    in addresses of external servers, which leave with them."""

    nodes: frozenset[str]
    timeout_s: float = DRAIN_TIMEOUT_S
    why: str = "its node is drained"
    hosts: frozenset[str] = frozenset()


@dataclass(frozen=True)
class UndrainNodes:
    """Ray's ids. Replicas may be started there again; host: what people call it."""

    nodes: frozenset[str]
    host: str


@dataclass(frozen=True)
class SetTarget:
    """None: by the policy again."""

    target: int | None


@dataclass(frozen=True)
class PolicySaid:
    target: int


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event: TypeAlias = (
    Reported
    | Cluster
    | Started
    | StartFailed
    | Stopped
    | StopFailed
    | Add
    | AddExternal
    | Drain
    | DrainNodes
    | UndrainNodes
    | SetTarget
    | PolicySaid
    | Tick
)


# --- effects ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    name: str
    rank: int
    avoid: frozenset[str]
    spare: bool = False


@dataclass(frozen=True)
class Join:
    """A spare is needed."""

    name: str
    handle: Any


@dataclass(frozen=True)
class StartExternal:
    name: str
    url: str


@dataclass(frozen=True)
class Abort:
    name: str
    handle: Any


@dataclass(frozen=True)
class Stop:
    name: str
    handle: Any | None


@dataclass(frozen=True)
class Changed:
    """For the event log: a member's state or version is another one now."""

    member: Member


@dataclass(frozen=True)
class Targeted:
    """For the event log."""

    target: int
    by: str


@dataclass(frozen=True)
class Say:
    """One sentence for people: the answer to a command, and for the log."""

    text: str


Effect: TypeAlias = Start | Join | StartExternal | Abort | Stop | Changed | Targeted | Say


# --- what operators have given ----------------------------------------------------------------------------------------


def host_of(url: str) -> str:
    """Return the host in an address like http://host:8000; of IPv6 without the brackets."""
    found = re.match(r"https?://(?:\[([^\]]+)\]|([^/:]+))", url)
    return (found[1] or found[2]).lower() if found else ""


def is_whole(count: Any) -> bool:
    """Return whether this is a number of replicas; True is none."""
    return isinstance(count, int) and not isinstance(count, bool)


def check_timeout(timeout_s: Any) -> None:
    """Check a timeout: a deadline that never comes would keep a member for ever."""
    is_number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
    if not is_number or not 0 <= timeout_s <= DRAIN_TIMEOUT_MAX_S:
        limits = f"0 to {DRAIN_TIMEOUT_MAX_S:.0f}"
        raise UsageError(f"a timeout of {timeout_s!r}: give the seconds that requests may take, {limits}")
