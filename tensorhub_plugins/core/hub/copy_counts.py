"""How many copies there are of each shard of a version, counted as they come and go. PURE.

A version may have 65,536 shards, and one message may add or remove thousands of them: a scan of all shards for each one
would take quadratic time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias, TypeVar

from tensorhub_plugins.core.types import ShardKey

Cut: TypeAlias = tuple[str, int]  # layout, shard count
Group: TypeAlias = tuple[object, ...]  # the workers of a replica, see state.GroupId


class Counted(NamedTuple):
    """What a holding counts as: a whole shard, and a copy that may be read and is not about to go."""

    is_whole: bool = False
    stays: bool = False


class Copies:
    """The copies of each shard of one version."""

    def __init__(self) -> None:
        self._staying: dict[Cut, Counter[int]] = {}  # -> shard -> copies
        self._of_replica: dict[tuple[Cut, Group], Counter[int]] = {}

    def change(self, key: ShardKey, replica: Group, before: Counted, after: Counted) -> None:
        """Count a holding of this shard, by a worker of this replica, as `after` instead of `before`."""
        cut = key.layout, key.shard_count
        _count(self._of_replica, (cut, replica), key.shard, after.is_whole - before.is_whole)
        _count(self._staying, cut, key.shard, after.stays - before.stays)

    def replica_has_all(self, layout: str, shard_count: int, replica: Group) -> bool:
        """Return whether this replica by itself has every shard, whole."""
        return len(self._of_replica.get(((layout, shard_count), replica), ())) == shard_count

    def whole_replicas(self) -> int:
        """Return how many replicas have every shard of some layout."""
        whole = ((cut, group) for (cut, group), shards in self._of_replica.items() if len(shards) == cut[1])
        return len({group for _, group in whole})

    def has_whole(self, layout: str, *, without: Iterable[ShardKey] = ()) -> bool:
        """Return whether every shard of this layout has a copy. without: do not count one copy of each of these."""
        leaving = Counter(without)
        return any(self._is_whole(cut, leaving) for cut in self._staying if cut[0] == layout)

    def is_held(self, *, without: Iterable[ShardKey] = ()) -> bool:
        """Return the same for any layout."""
        leaving = Counter(without)
        return any(self._is_whole(cut, leaving) for cut in self._staying)

    def _is_whole(self, cut: Cut, leaving: Counter[ShardKey]) -> bool:
        counts = self._staying[cut]
        lost = sum(
            (key.layout, key.shard_count) == cut and number >= counts[key.shard] > 0 for key, number in leaving.items()
        )
        return len(counts) - lost == cut[1]


Name = TypeVar("Name")


def _count(counters: dict[Name, Counter[int]], name: Name, shard: int, change: int) -> None:
    """Change a counter, and drop it when it is zero."""
    if change:
        counter = counters.setdefault(name, Counter())
        counter[shard] += change
        if not counter[shard]:
            del counter[shard]
        if not counter:
            del counters[name]
