"""PURE: how the replicas do, for a trainer's log and for why it ends: the same words with every framework."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from tensorhub_plugins.core import steps_behind, version_text
from tensorhub_plugins.vllm.ray.members import Member, Members

WAYS: Mapping[str, Callable[[str], bool]] = {  # of the bytes of pulls, by the names of core's ways
    "same_host": lambda way: way.startswith("same_host "),
    "near": lambda way: way.startswith(("same_rack ", "same_data_center ")),
    "far": lambda way: way.startswith("other_data_center "),
    "rdma": lambda way: way.endswith(" rdma"),
    "wire": lambda way: way == "wire",  # names.WIRE
}


def of_replicas(
    serving: Collection[Member], *, lost: int, refused: int, published: int, now: float
) -> dict[str, float]:
    """Return how many there are, and by how many steps they are behind the newest version, at least one for a version
    of an earlier attempt.

    refused: how many cannot install it; published: by the trainer, which may be more than any of them has."""
    newest = max(published, *(one.version for one in serving)) if serving else published
    lags = [steps_behind(one.version, newest) for one in serving]
    return {
        "tensorhub/replicas/ready": float(len(serving)),
        "tensorhub/replicas/lost": float(lost),
        "tensorhub/replicas/refused": float(refused),
        "tensorhub/version_lag/max": float(max(lags, default=0)),
        "tensorhub/version_lag/mean": sum(lags) / len(lags) if lags else 0.0,
        "tensorhub/last_pull_age_s": max((now - one.installed_at for one in serving), default=0.0),
    }


def of_members(members: Members, trainer: str, *, published: int, now: float) -> dict[str, float]:
    """Return the metrics of all of them, as a dispatcher has them. trainer: the name of its replica; published: by
    it."""
    serving = members.able()
    told = of_replicas(
        serving,
        lost=sum(one.is_missed for one in members.all.values()),
        refused=len(members.refusing(published)),
        published=published,
        now=now,
    )
    return {**told, **of_updates((one.heartbeat for one in serving), trainer)}


def why_stuck(refusals: Mapping[str, tuple[int, str]]) -> str:
    """Return why a run ends. refusals: of every replica, a version and why that cannot be installed there."""
    worker, (version, why) = next(iter(refusals.items()))
    return (
        f"version {version_text(version)} cannot be installed in any of {len(refusals)} replicas, and they have no "
        f"other one to go on with: {worker}: {why}"
    )


def of_updates(updates: Iterable[Mapping[str, Any]], trainer: str) -> dict[str, float]:
    """Return the slowest pull and pause in seconds, the share of all bytes that came from other replicas than the
    trainer, and how many bytes came from how far, and over RDMA, and were sent for all of them.

    updates: of each replica, as its heartbeat says: pull_s, pause_s, sources and ways (of the bytes it has read)."""
    given = list(updates)
    sources = [update.get("sources") or {} for update in given]
    ways = sum((Counter(update.get("ways") or {}) for update in given), Counter[str]())
    total = sum(sum(each.values()) for each in sources)
    own = sum(size for each in sources for source, size in each.items() if source.startswith(f"{trainer}/"))
    return {
        "tensorhub/pull/seconds_max": max((update.get("pull_s", 0.0) for update in given), default=0.0),
        "tensorhub/pause/seconds_max": max((update.get("pause_s", 0.0) for update in given), default=0.0),
        "tensorhub/pull/share_from_peers": 1.0 - own / total if total else 0.0,
        **{
            f"tensorhub/pull/bytes_{name}": float(sum(ways[way] for way in filter(of, ways)))
            for name, of in WAYS.items()
        },
    }
