"""Which segments are read from which source: a state and a time in, a list of actions out, and nothing changed."""

from __future__ import annotations

import copy

import pytest

from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.transfer.limits import TransferLimits
from tensorhub_plugins.core.transfer.sharing import Assign, Leave, Shard, Source, plan, reason_for_more
from tensorhub_plugins.core.transports import TransportLimits
from tensorhub_plugins.core.types import Location

A, B, C = (letter.encode() * 16 for letter in "abc")
LIMITS = TransferLimits(window_first_segments=4, window_min_segments=2, additional_min_segments=2)


def source(session: bytes, assigned: range = range(0), *, rate: float = 0.0, last_at: float = 0.0) -> Source:
    grant = m.Grant(0, session, session.decode()[0], {}, Location(), b"root", 1)
    found = Source(LIMITS, grant, 1, last_at, is_far=False, window_first=4, is_open=True, rate=rate, best_rate=rate)
    found.assigned = dict.fromkeys(assigned)
    return found


def shard(queue: range, *sources: Source, verify: bool = True) -> Shard:
    state = Shard(b"root", verify, {each.grant.session: each for each in sources})
    state.begin([*(s for each in sources for s in each.assigned), *queue], 0.0, LIMITS)
    for each in sources:
        for segment in each.assigned:
            state.queue.remove(segment)
    return state


def planned(state: Shard, now: float = 0.0) -> list[Assign | Leave]:
    """The plan, which is the same the second time: it changes nothing."""
    before = copy.deepcopy(state)
    actions = plan(state, now)
    assert state == before and plan(state, now) == actions
    return actions


def test_every_open_source_is_assigned_its_window_in_stream_order():
    one, two, closed = source(A), source(B, rate=12.0), source(C)
    closed.is_open = False
    state = shard(range(20), one, two, closed)
    assert planned(state) == [Assign(A, (0, 1, 2, 3)), Assign(B, (4, 5, 6, 7, 8, 9))]  # half a second of 12 a second
    for action in plan(state, 0.0):
        state.assign(action.session, action.segments, 0.0)
    assert list(state.queue) == list(range(10, 20)) and list(two.assigned) == list(range(4, 10))
    assert planned(state) == []  # both have enough
    for segment in (0, 1):
        one.arrived(segment, 0.01, waited=False)
    assert planned(state) == [Assign(A, (10, 11))]  # a half-empty window is filled


def test_an_idle_source_takes_the_rest_of_one_that_would_take_much_longer():
    slow, fast = source(A, range(10), rate=1.0), source(B, rate=100.0)
    state = shard(range(0), slow, fast)
    assert planned(state) == [Leave(A), Assign(B, tuple(range(10)))]
    fast.rate = 4.0  # 2.5 s instead of 10, and twice that is less than it takes
    assert planned(state)[0] == Leave(A)
    fast.rate = 2.0  # 5 s: the connection is not worth giving up
    assert planned(state) == []
    fast.is_open, fast.rate = False, 100.0
    assert planned(state) == []


def test_what_is_left_is_shared_by_all_that_stay():
    hangs, one, two = source(A, range(12), rate=100.0), source(B, rate=8.0), source(C, rate=8.0)
    state = shard(range(0), hangs, one, two)
    assert planned(state, 0.1) == []
    assert planned(state, 10.0) == [Leave(A), Assign(B, (0, 1, 2, 3)), Assign(C, (4, 5, 6, 7))]


def test_the_other_side_of_a_long_way_is_left_only_when_it_is_silent():
    far, near = source(A, range(10), rate=1.0), source(B, rate=1000.0)
    far.is_far = True
    state = shard(range(0), far, near)
    assert planned(state, 7.9) == []  # eight segments could not have come yet
    assert planned(state, 8.1)[0] == Leave(A)


def test_without_digests_all_that_a_source_gave_is_read_again_when_it_is_left():
    for verify, expected in ((True, (5, 6)), (False, (3, 4, 5, 6))):
        hangs, takes = source(A, range(5, 7), rate=100.0), source(B, rate=100.0)
        hangs.given = [3, 4]
        state = shard(range(0), hangs, takes, verify=verify)
        assert planned(state, 10.0) == [Leave(A), Assign(B, expected)]
        assert state.remove(A, lost=False) is hangs
        assert tuple(state.queue) == expected and set(state.missing) == set(expected)


def test_an_additional_source_is_worth_a_question_when_all_are_slow_or_it_lasts():
    one, two = source(A, range(5)), source(B, range(5, 10))
    state = shard(range(0), one, two)
    assert reason_for_more(state, 0.4, LIMITS) is None
    one.heard(0.5)
    assert reason_for_more(state, 0.6, LIMITS) is None  # one of them is not slow
    assert reason_for_more(state, 1.5, LIMITS) == "slow"
    one.heard(1.5)
    assert reason_for_more(state, 1.6, LIMITS) == "idle"  # it lasts
    assert reason_for_more(state, 1.6, TransferLimits(sources_max=2)) is None
    state.missing = {9: None}
    assert reason_for_more(state, 1.6, LIMITS) is None  # too little is left
    two.assigned.clear()
    one.assigned.clear()
    assert reason_for_more(state, 9.0, LIMITS) is None  # nothing is asked of any


@pytest.mark.parametrize(
    ("limits", "wrong"),
    [
        (TransferLimits, {"stall_s": -1.0}),
        (TransferLimits, {"window_s": float("nan")}),
        (TransferLimits, {"sources_max": 0}),
        (TransferLimits, {"open_s": "5"}),
        (TransportLimits, {"stall_s": 0}),
        (TransportLimits, {"readers_max": True}),
    ],
)
def test_limits_that_cannot_be_are_refused_by_name(limits, wrong):
    (name,) = wrong
    with pytest.raises(UsageError, match=name):
        limits(**wrong)


def test_no_more_sources_are_asked_for_than_may_be_at_a_time():
    for count in (LIMITS.sources_max - 1, LIMITS.sources_max):
        sources = [
            source(session, range(2 * n, 2 * n + 2)) for n, session in zip(range(count), (A, B, C), strict=False)
        ]
        state = shard(range(10, 20), *sources)
        assert reason_for_more(state, LIMITS.slow_s + 0.1, LIMITS) == ("slow" if count < LIMITS.sources_max else None)


def test_a_source_whose_notices_are_late_counts_as_slow_when_three_are_missing():
    every_s = TransportLimits().alive_s
    state = shard(range(10, 20), source(A, range(4)))
    assert reason_for_more(state, 3.4 * every_s, LIMITS) is None, "the third may be on its way"
    assert reason_for_more(state, 4.0 * every_s - 0.05, LIMITS) == "slow"


@pytest.mark.parametrize("waited", [False, True])
def test_a_source_that_waits_for_the_bytes_itself_does_not_count_as_slow(waited: bool):
    one = source(A, range(4), rate=100.0)
    for segment in range(4):
        one.arrived(segment, 5.0 * (1 + segment), waited=waited)
    assert one.is_slow is not waited


def test_where_an_earlier_version_is_here_more_is_asked_for_at_first():
    near, there = source(A), source(B)
    near.is_elsewhere = False  # on the reader's host: whole segments, as ever
    state = shard(range(0), near, there)
    state.has_bases = True
    state.begin(range(100), 0.0, LIMITS)
    assert [len(action.segments) for action in planned(state)] == [4, 4 * LIMITS.window_delta_times]
    state.has_bases = False  # the control
    state.begin(range(100), 0.0, LIMITS)
    assert [len(action.segments) for action in planned(state)] == [4, 4]


def test_rates_of_deltas_and_of_whole_segments_are_not_compared():
    """After a hundred deltas a second, one whole segment a second is no slow source."""
    one = source(A, range(300))
    for segment in range(200):
        one.arrived(segment, segment / 100, waited=False, by_delta=True)
    assert one.rate > 90
    for segment in range(200, 204):
        one.arrived(segment, segment - 198.0, waited=False)
    assert not one.is_slow and one.rate == 1.0
    for segment in range(204, 210):  # the control: of one kind they are
        one.arrived(segment, 6.0 + 20.0 * (segment - 203), waited=False)
    assert one.is_slow
