"""What the replicas' last updates have cost, for a trainer's log: the same names with every framework."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def of_updates(updates: Iterable[Mapping[str, Any]], trainer: str) -> dict[str, float]:
    """The slowest pull and pause in seconds, and the share of all bytes that came from other replicas than the trainer.

    updates: of each replica, as its heartbeat says: pull_s, pause_s, sources (of the bytes it has read).
    """
    given = list(updates)
    sources = [update.get("sources") or {} for update in given]
    total = sum(sum(each.values()) for each in sources)
    own = sum(size for each in sources for source, size in each.items() if source.startswith(f"{trainer}/"))
    return {
        "tensorhub/pull/seconds_max": max((update.get("pull_s", 0.0) for update in given), default=0.0),
        "tensorhub/pause/seconds_max": max((update.get("pause_s", 0.0) for update in given), default=0.0),
        "tensorhub/pull/share_from_peers": 1.0 - own / total if total else 0.0,
    }
