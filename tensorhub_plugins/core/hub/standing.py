"""How the workers of a model stand, as the status and the figures both show it. PURE."""

from __future__ import annotations

from itertools import islice, pairwise
from typing import NamedTuple

from tensorhub_plugins.core.hub.registry import Registry
from tensorhub_plugins.core.hub.state import History, Worker
from tensorhub_plugins.core.types import RECENT_S, step_of, steps_behind

SILENT_HEARTBEATS = 5
MISSING_MAX = 8  # ranks of a version that is not whole, by name
PACES = 5  # the last intervals between versions that are looked at


class Lag(NamedTuple):
    """How far a follower is behind the newest version: 0 steps if it has installed that."""

    steps: int
    behind_s: float  # for which there has been a newer version than the last one that it has installed


def lag_of(worker: Worker, now: float) -> Lag | None:
    """Return how far a follower is behind: by all steps if it has installed nothing. None: it follows nothing."""
    history, installed = worker.history, worker.installed
    if installed is None:
        return None
    newest = history.newest_visible
    steps = steps_behind(installed, newest) if installed else step_of(newest)
    if steps <= 0 or newest <= installed:
        return Lag(0, 0.0)
    since = now
    for number in reversed(history.shown):
        if number <= installed:
            break
        since = since if history.is_over(number) else history.shown[number]
    return Lag(steps, now - max(since, worker.installed_at))


def refusal_of(worker: Worker) -> tuple[int, str]:
    """Return the newest version that it cannot install, and why; (0, ""): none, or not to be run any more."""
    return (0, "") if worker.history.is_over(worker.refusal[0]) else worker.refusal


def is_silent(worker: Worker, now: float) -> bool:
    """Return whether it was not heard for so long that it is frozen, or cut off."""
    return now - worker.last_heard > SILENT_HEARTBEATS * worker.beat_s


def newest_age_s(history: History, now: float) -> float:
    """Return the seconds since the newest version became visible here; 0 before the first one."""
    return now - history.shown[history.newest_visible] if history.newest_visible else 0.0


class Unfinished(NamedTuple):
    """A version that some ranks of a trainer have published, for so long, and these others have not."""

    version: int
    seconds: float
    missing: list[str]  # the first of them
    missing_count: int


def unfinished(history: History, now: float) -> Unfinished | None:
    """Return the newest such version; None: there is none above the newest that is visible."""
    for number in sorted((n for n in history.versions if n > history.newest_visible), reverse=True):
        version = history.versions[number]
        for (_, shard_count), by_shard in version.holdings.items():
            held = {shard: h for shard, holders in by_shard.items() for h in holders.values() if h.is_published}
            if held and len(held) < shard_count and not history.is_over(number):
                replica = next(iter(held.values())).worker.hello.replica
                missing = (f"{replica}/{shard}" for shard in range(shard_count) if shard not in held)
                some = list(islice(missing, MISSING_MAX))
                return Unfinished(number, now - version.since, some, shard_count - len(held))
    return None


def pace_s(registry: Registry, history: History) -> float:
    """Return the longest of the last intervals between two versions; 0: fewer than three came since the hub's start."""
    from_s = registry.started + registry.limits.grace_s  # what came before may be older than it seems
    at = [when for when in history.shown.values() if when > from_s][-PACES - 1 :]
    return max((later - earlier for earlier, later in pairwise(at)), default=0.0) if len(at) > 2 else 0.0


def newest_replicas(history: History) -> int:
    """Return the number of replicas of which each has all of the newest version."""
    newest = history.versions.get(history.newest_visible)
    return 0 if newest is None else newest.copies.whole_replicas()


class Lost(NamedTuple):
    """The host of a worker that was declared dead, and for how long it has been."""

    host: str
    seconds: float


def lost(history: History, now: float) -> dict[str, Lost]:
    """Return the workers that were declared dead lately, and have not come back, by name."""
    return {name: Lost(host, now - at) for name, (host, at) in history.lost.items() if now - at < RECENT_S}
