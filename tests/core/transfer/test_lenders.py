"""Memory of a source that is used where it lies: what its loss costs, and when it costs nothing."""

from __future__ import annotations

from replication_story import A, B, Story, grant, granted, manifest

from tensorhub_plugins.core.protocol.messages import Release
from tensorhub_plugins.core.transfer import events
from tensorhub_plugins.core.types import CHECKPOINT, ShardKey

KEY = ShardKey(7, CHECKPOINT, 0, 1)


def borrowed(of, **options) -> Story:
    """A story in which the first shard is in its source's memory."""
    story = Story(borrows=True, **options)
    story.begin()
    story.then(granted(1, grant(0, A, of)))
    assert story.machine.handle(events.Opened(0, A, of), 0.0) == [events.Prepare(KEY, of, A)]
    segments = tuple(range(of.segment_count))
    assert story.machine.handle(events.Prepared(0, segments, True), 0.0) == [events.Read(0, A, segments)]
    return story


def test_what_is_borrowed_goes_with_a_lender_that_is_lost_before_all_is_there():
    of = manifest(4)
    story = borrowed(of)
    story.arrive(0, A, 0, 1)
    effects = story.then(events.Lost(0, A, "died"))
    assert effects[:3] == [events.Close(0, A), Release(1, 0, True, ()), events.Restart(CHECKPOINT)]
    ask = story.asks(effects[3:])
    assert (ask.shards, ask.shards_layout, ask.avoid, ask.version) == ((0,), CHECKPOINT, (A,), 7)
    story.then(granted(2, grant(0, B, of)))
    # It asks for no second loan, and reads everything.
    assert story.machine.handle(events.Opened(0, B, of), 1.0) == [events.Prepare(KEY, of, None)]
    assert story.machine.handle(events.Prepared(0, (0, 1, 2, 3)), 1.0) == [events.Read(0, B, (0, 1, 2, 3))]


def test_a_lender_that_has_none_to_lend_is_a_source_like_others():
    """The control: what was copied from a source that is lost is not read again."""
    of, story = manifest(4), Story(borrows=True)
    story.begin()
    story.then(granted(1, grant(0, A, of)))
    story.machine.handle(events.Opened(0, A, of), 0.0)
    story.machine.handle(events.Prepared(0, (0, 1, 2, 3)), 0.0)
    story.arrive(0, A, 0, 1)
    effects = story.then(events.Lost(0, A, "died"))
    assert not any(isinstance(effect, events.Restart) for effect in effects)
    story.then(granted(2, grant(0, B, of)))
    assert story.then(events.Opened(0, B, of)) == [events.Read(0, B, (2, 3))]


def test_a_lender_that_is_lost_when_all_is_there_costs_nothing():
    story = borrowed(manifest(2))
    story.arrive(0, A, 0)
    story.then(events.Arrived(0, A, 1, True))
    assert story.then(events.Lost(0, A, "died")) == [
        events.Close(0, A),
        Release(1, 0, True, ()),
        events.Complete(),
    ]


def test_without_digests_nothing_of_a_lost_lender_counts():
    story = borrowed(manifest(2), verify=False)
    story.arrive(0, A, 0)
    story.then(events.Arrived(0, A, 1, True))
    effects = story.then(events.Lost(0, A, "died"))
    assert events.Restart(CHECKPOINT) in effects and not story.machine.finished


def test_corrupt_bytes_of_a_lender_are_read_elsewhere():
    story = borrowed(manifest(3))
    story.arrive(0, A, 0)
    effects = story.then(events.Arrived(0, A, 1, False))
    assert effects[:3] == [events.Close(0, A), Release(1, 0, True, (1,)), events.Restart(CHECKPOINT)]


def test_the_loss_of_one_lender_starts_all_shards_anew_and_asks_once():
    one, two = manifest(2), manifest(2, "2")
    story = Story(borrows=True)
    story.begin()
    story.then(granted(1, grant(0, A, one), grant(1, B, two), count=2))
    for shard, (session, of) in enumerate([(A, one), (B, two)]):
        story.machine.handle(events.Opened(shard, session, of), 0.0)
        story.machine.handle(events.Prepared(shard, (0, 1), True), 0.0)
    story.arrive(1, B, 0)
    effects = story.then(events.SourceGone(A))
    assert events.Close(1, B) in effects and Release(1, 1, False) in effects
    assert story.asks(effects[-1:]).shards == (0, 1)


def test_nobody_else_is_asked_for_what_lies_in_a_lenders_memory():
    of = manifest(16)
    story = borrowed(of)
    for _ in range(20):
        story.now += 0.5
        assert story.then(events.Tick()) == []  # a silent source, of which others would be asked for more
