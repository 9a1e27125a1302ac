"""One shard from several sources: who reads what, who is left, when another is asked for."""

from __future__ import annotations

import msgspec
from replication_story import LIMITS, A, B, C, Story, grant, granted, manifest

from tensorhub_plugins.core import errors
from tensorhub_plugins.core.protocol.messages import Release
from tensorhub_plugins.core.transfer import events
from tensorhub_plugins.core.types import CHECKPOINT, Location, ShardKey


def two_sources(segments: int = 400) -> Story:
    """A is read from, and B has just been opened beside it."""
    story, of = Story(), manifest(segments)
    story.open(1, (A, of))
    further = msgspec.structs.replace(granted(2, grant(0, B, of)), additional=True)
    assert story.then(further) == [events.Open(ShardKey(7, CHECKPOINT, 0, 1), grant(0, B, of), 2)]
    return story


def deliver(story: Story, rates: dict[bytes, float], until: float) -> dict[bytes, int]:
    """Each source delivers what it was asked for at its rate (segments a second); returns how many came from whom."""
    came = dict.fromkeys(rates, 0)
    due = {session: story.now + 1 / rate for session, rate in rates.items()}
    shard = story.machine.shards[0]
    while shard.missing and story.now < until:
        session = min(due, key=due.__getitem__)
        story.now = due[session]
        due[session] += 1 / rates[session]
        source = shard.sources.get(session)
        if source is not None and source.assigned:
            story.then(events.Arrived(0, session, next(iter(source.assigned)), True))
            came[session] += 1
        story.then(events.Tick())
    return came


def test_two_sources_share_the_work_by_their_rates_and_end_together():
    story = two_sources()
    of = manifest(400)
    assert story.then(events.Opened(0, B, of)) == [events.Read(0, B, tuple(range(16, 32)))]
    came = deliver(story, {A: 100.0, B: 300.0}, until=10.0)
    assert came[A] + came[B] == 400 and 2.3 < came[B] / came[A] < 3.9
    assert story.now < 1.15 * 400 / 400.0 and story.machine.losses == []


def test_no_segment_is_asked_of_two_and_none_is_forgotten():
    story = two_sources(100)
    asked = [
        s for e in story.then(events.Opened(0, B, manifest(100))) if isinstance(e, events.Read) for s in e.segments
    ]
    assert not set(asked) & set(story.machine.shards[0].sources[A].assigned)
    deliver(story, {A: 50.0, B: 10.0}, until=10.0)
    assert not story.machine.shards[0].missing


def test_who_is_done_takes_over_from_who_hangs():
    story = two_sources(32)
    story.then(events.Opened(0, B, manifest(32)))
    story.machine.shards[0].queue.clear()
    for segment in range(16, 31):  # B delivers; A says nothing any more
        story.now += 0.02
        story.then(events.Arrived(0, B, segment, True))
    story.now += 1.0
    effects = story.then(events.Arrived(0, B, 31, True))
    assert effects[0] == events.Verified(0, B, 31)
    assert effects[1:3] == [events.Close(0, A), Release(1, 0, False)]
    assert isinstance(effects[3], events.Read) and effects[3].segments == tuple(range(len(effects[3].segments)))
    assert "slow" in story.machine.losses[0]


def test_a_source_that_was_left_as_slow_is_left_by_the_shards_that_it_has_not_opened_too():
    """They may wait for its places, and another one may have come. The control: one that it has opened goes on."""
    story, of = Story(), manifest(8)
    story.begin()
    story.then(granted(1, *(grant(shard, A, of) for shard in range(3)), count=3))
    for shard in (0, 1):
        story.then(events.Opened(shard, A, of))
    story.then(msgspec.structs.replace(granted(2, grant(0, B, of), count=3), additional=True))
    story.now = LIMITS.waits_s + 1.0
    effects = story.then(events.Opened(0, B, of))
    closed = [effect for effect in effects if isinstance(effect, events.Close)]
    assert closed == [events.Close(0, A), events.Close(2, A)] and Release(1, 2, False) in effects
    (ask,) = [effect.acquire for effect in effects if isinstance(effect, events.AskSources)]
    assert ask.shards == (2,) and ask.avoid == (A,)
    assert story.machine.losses[1:] == ["shard 2 from a/0: it was slow for another shard"]


def test_who_was_left_is_given_nothing_more():
    story = two_sources(40)
    story.then(events.Opened(0, B, manifest(40)))
    state = story.machine.shards[0]
    idle, hangs = state.sources[A], state.sources[B]
    state.queue.clear()
    state.missing = dict.fromkeys(range(30, 40))
    idle.assigned.clear()
    idle.rate = 2.0  # it takes four at a time
    hangs.assigned, hangs.rate = dict.fromkeys(range(30, 40)), 100.0  # and this one may have fifty
    story.now += 10.0
    effects = story.then(events.Tick())
    assert effects[:3] == [events.Close(0, B), Release(2, 0, False), events.Read(0, A, (30, 31, 32, 33))]
    assert not [effect for effect in effects[3:] if isinstance(effect, events.Read)]
    assert list(state.queue) == list(range(34, 40))


def test_a_source_that_waits_itself_is_not_slow_and_one_that_hangs_is():
    for waits in (True, False):
        story, of = Story(), manifest(100)
        story.open(1, (A, of))
        asked = []
        for _ in range(8):
            story.now += 0.2
            if waits:
                story.then(events.SourceWaiting(0, A))
            asked += [e for e in story.then(events.Tick()) if isinstance(e, events.AskSources) and e.acquire.urgent]
        assert bool(asked) is not waits
        if asked:
            (ask,) = asked
            assert ask.acquire.beside == (A,) and ask.acquire.shards == (0,)


def drip(every_s: float, until: float) -> tuple[Story, list[events.Effect]]:
    """A says all the time that it waits itself, and a segment comes so rarely; B is granted when it is asked for."""
    story, of = Story(), manifest(12)
    story.open(1, (A, of))
    story.now = 0.5  # its rate was good until then
    for segment in range(8):
        story.then(events.Arrived(0, A, segment, True))
    effects: list[events.Effect] = []
    due, segment = story.now + every_s, 8
    while story.now < until and not story.machine.finished:
        story.now += 0.25
        came = [events.Arrived(0, A, segment, True, True)] if story.now >= due else []
        due, segment = due + every_s * len(came), segment + len(came)
        for event in (events.SourceWaiting(0, A), *came, events.Tick()):
            effects += (new := story.then(event))
            if any(isinstance(effect, events.AskSources) for effect in new):
                effects += story.then(msgspec.structs.replace(granted(2, grant(0, B, of)), additional=True))
                effects += story.then(events.Opened(0, B, of))
    return story, effects


def test_a_source_that_says_for_ever_that_it_waits_is_left_for_another():
    story, effects = drip(1e9, until=LIMITS.waits_s + 3.0)
    assert events.Close(0, A) in effects and events.Read(0, B, (8, 9, 10, 11)) in effects
    assert story.machine.losses == ["shard 0 from a/0: it was slow, another took over its rest"]
    early, effects = drip(1e9, until=LIMITS.waits_s - 1.0)  # the control: its own source may have been lost
    assert not early.machine.losses and events.Close(0, A) not in effects


def test_a_source_of_which_a_segment_comes_now_and_then_is_left_for_another():
    story, effects = drip(9.0, until=30.0)
    assert events.Close(0, A) in effects and events.Read(0, B, (9, 10, 11)) in effects
    steady, effects = drip(0.5, until=30.0)  # the control
    assert not steady.machine.losses and events.Close(0, A) not in effects


def test_a_source_in_another_data_centre_is_given_more_time():
    story, of = Story(location=Location("here")), manifest(100)
    story.open(1, (A, of))
    assert not [e for e in story.at(1.9, events.Tick()) if isinstance(e, events.AskSources) and e.acquire.urgent]
    story.then(events.Answer(9, errors.DeadlineExceeded("nobody is idle"), additional=True))
    assert [e for e in story.at(2.1, events.Tick()) if isinstance(e, events.AskSources) and e.acquire.urgent]


def test_a_transfer_that_lasts_asks_more_and_more_rarely_for_an_idle_source():
    story, of = Story(), manifest(1000)
    story.open(1, (A, of))
    asks = []
    then = story.machine.handle

    def noting(event, now):
        effects = then(event, now)
        asked = [e.acquire for e in effects if isinstance(e, events.AskSources)]
        asks.extend((now, acquire) for acquire in asked)
        if asked:
            then(events.Answer(9, errors.DeadlineExceeded("there is none"), additional=True), now)
        return effects

    story.machine.handle = noting
    deliver(story, {A: 100.0}, until=5.0)
    assert all((ask.beside, ask.urgent, ask.timeout_s) == ((A,), False, 0.0) for _, ask in asks)
    assert [round(now) for now, _ in asks] == [1, 2, 4]


def test_the_lease_of_an_additional_source_that_is_of_no_use_is_ended():
    """It came for another version, or for a shard that needs no more."""
    of = manifest(40)
    for version, shard in ((8, None), (7, 0)):
        story = two_sources(40)
        late = msgspec.structs.replace(granted(3, grant(0, C, of), version=version), additional=True)
        story.machine.limits = msgspec.structs.replace(story.machine.limits, sources_max=2)
        assert story.then(late) == [Release(3, shard, False)]


def test_when_one_of_two_dies_the_other_goes_on_and_nobody_is_asked():
    story = two_sources(40)
    story.then(events.Opened(0, B, manifest(40)))
    effects = story.then(events.Lost(0, A, "died"))
    assert effects[:2] == [events.Close(0, A), Release(1, 0, True)]
    assert not [e for e in effects if isinstance(e, events.AskSources)]
    came = deliver(story, {B: 50.0}, until=10.0)
    assert came[B] == 40


def test_a_further_grant_for_what_is_done_is_given_back():
    story, of = Story(), manifest(1)
    story.open(1, (A, of))
    story.arrive(0, A, 0)
    further = msgspec.structs.replace(granted(2, grant(0, B, of)), additional=True)
    assert story.then(further) == [Release(2, 0, False)]
