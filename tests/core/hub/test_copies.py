"""How many copies there are, with and without those that leave."""

from __future__ import annotations

from tensorhub_plugins.core.hub.copy_counts import Copies, Counted
from tensorhub_plugins.core.types import CHECKPOINT, ShardKey

COPY = Counted(is_whole=True, stays=True)


def copies(*held: tuple[ShardKey, str]) -> Copies:
    found = Copies()
    for key, replica in held:
        found.change(key, replica, Counted(), COPY)
    return found


def test_a_copy_that_leaves_is_none() -> None:
    first, second = (ShardKey(1, CHECKPOINT, shard, 2) for shard in (0, 1))
    found = copies((first, "a"), (second, "a"), (second, "b"))
    assert found.has_whole(CHECKPOINT) and found.is_held()
    assert found.has_whole(CHECKPOINT, without=[second]) and not found.has_whole(CHECKPOINT, without=[first])
    assert found.is_held(without=[second]) and not found.is_held(without=[second, second])


def test_what_leaves_of_another_cut_takes_nothing_from_this_one() -> None:
    whole, half = ShardKey(1, CHECKPOINT, 0, 1), ShardKey(1, CHECKPOINT, 0, 2)
    found = copies((whole, "a"), (half, "b"))
    assert found.has_whole(CHECKPOINT, without=[half]) and not found.has_whole(CHECKPOINT, without=[whole])
    assert found.replica_has_all(CHECKPOINT, 1, "a") and not found.replica_has_all(CHECKPOINT, 2, "b")
