"""One replicate() event by event: what happened goes in, the list of what to do next comes out."""

from __future__ import annotations

import msgspec
import pytest
from replication_story import LIMITS, RUNTIME, TIMEOUT_S, A, B, C, Story, gives_up, grant, granted, manifest

from tensorhub_plugins.core import errors
from tensorhub_plugins.core.deadline import TIMEOUT_S as SLOW_S
from tensorhub_plugins.core.manifest import NO_DIGESTS
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.protocol.directive import Directive
from tensorhub_plugins.core.transfer import events, replication
from tensorhub_plugins.core.types import CHECKPOINT, LATEST, ShardKey

# --- the way of one version ---


def test_ask_open_read_verify_complete():
    story, of = Story(), manifest(2)
    assert story.then(events.Begin()) == [events.AskSources(m.Acquire(0, 7, 3, (CHECKPOINT,), TIMEOUT_S))]
    key = ShardKey(7, CHECKPOINT, 0, 1)
    assert story.then(granted(1, grant(0, A, of))) == [events.Open(key, grant(0, A, of), 1)]
    assert story.then(events.Opened(0, A, of)) == [events.Read(0, A, (0, 1))]
    assert story.then(events.Arrived(0, A, 1, True)) == [events.Verified(0, A, 1)]
    assert story.then(events.Arrived(0, A, 0, True)) == [events.Verified(0, A, 0), events.ConfirmEpoch(0, A)]
    assert story.then(events.EpochChecked(0, A, True)) == [
        events.Close(0, A),
        m.Release(1, 0, False),
        events.Complete(),
    ]
    assert story.machine.finished and story.machine.losses == []


def test_a_shard_without_bytes_is_complete_once_it_is_opened():
    story, of = Story(), manifest(0)
    story.begin()
    story.then(granted(1, grant(0, A, of)))
    assert story.then(events.Opened(0, A, of)) == [events.Close(0, A), m.Release(1, 0, False), events.Complete()]


def test_it_is_complete_only_when_every_shard_is():
    story, one, two = Story(), manifest(1), manifest(1, "2")
    story.open(1, (A, one), (B, two))
    story.arrive(1, B, 0)
    assert story.then(events.EpochChecked(1, B, True)) == [events.Close(1, B), m.Release(1, 1, False)]
    story.arrive(0, A, 0)
    assert story.then(events.EpochChecked(0, A, True))[-1] == events.Complete()


def test_latest_stays_what_it_was_resolved_to():
    story, of = Story(LATEST), manifest(1)
    assert story.asks(story.then(events.Begin())).version == 0
    story.then(granted(1, grant(0, A, of), version=9))
    assert story.asks(story.then(events.Lost(0, A, "died"))[2:]).version == 9


def test_after_the_end_nothing_is_done_and_a_late_grant_is_given_back():
    story, of = Story(), manifest(1)
    story.open(1, (A, of))
    story.arrive(0, A, 0)
    story.then(events.EpochChecked(0, A, True))
    for late in (
        events.Arrived(0, A, 0, True),
        events.Arrived(0, A, 0, False),
        events.Lost(0, A, "late"),
        events.EpochChecked(0, A, False),
        events.Opened(0, A, of),
        events.SourceGone(A),
        events.Tick(),
        events.Answer(5, errors.HubUnreachable("away")),
    ):
        assert story.then(late) == []
    assert story.then(granted(5, grant(0, B, of))) == [m.Release(5, None, False)]


def test_memory_is_prepared_once_and_every_source_that_is_open_by_then_is_used():
    story, of = Story(), manifest(3)
    story.begin()
    story.then(granted(1, grant(0, A, of)))
    key, handle = ShardKey(7, CHECKPOINT, 0, 1), story.machine.handle
    assert handle(events.Opened(0, A, of), 0.0) == [events.Prepare(key, of)]
    assert handle(events.Opened(0, A, of), 0.0) == []  # doubled
    assert handle(events.Prepared(0, (0, 2)), 5.0) == [events.Read(0, A, (0, 2))]  # only what is wanted
    assert handle(events.Tick(), 5.1) == []  # the time that memory took is not the source's


@pytest.mark.parametrize("grows", [True, False])
def test_the_deadline_that_nobody_has_given_moves_with_what_is_to_be_read_once_a_shard(grows):
    story, of = Story(grows=grows), manifest(3)
    assert story.asks(story.then(events.Begin())).grows == grows
    story.then(granted(1, grant(0, A, of)))
    story.machine.handle(events.Opened(0, A, of), 0.0)
    for _ in range(2):  # the second, after a loss, is of the same bytes
        story.machine.handle(events.Prepared(0, (0, 1, 2), size_bytes=10 * 10**9), 0.0)
        assert story.machine.deadline == story.machine.timeout_s == TIMEOUT_S + 20 * grows


@pytest.mark.parametrize("grows", [True, False])
def test_what_comes_slowly_is_waited_for_and_what_stands_still_is_not(grows):
    story, of = Story(grows=grows), manifest(4)
    story.then(events.Begin())
    story.then(granted(1, grant(0, A, of)))
    handle = story.machine.handle
    handle(events.Opened(0, A, of), 0.0)
    handle(events.Prepared(0, (0, 1, 2, 3)), 0.0)
    now = TIMEOUT_S - 1
    for segment in range(3 if grows else 1):
        handle(events.Arrived(0, A, segment, True), now)
        limit_s = now + SLOW_S if grows else TIMEOUT_S
        assert story.machine.deadline == pytest.approx(limit_s) and story.machine.timeout_s == pytest.approx(limit_s)
        now += SLOW_S - 1
    assert gives_up(handle(events.Tick(), limit_s + 0.1)).timeout_s == story.machine.timeout_s


@pytest.mark.parametrize("refusal", [errors.DeadlineExceeded("no source had room"), errors.HubUnreachable("away")])
@pytest.mark.parametrize("grows", [True, False])
def test_a_refusal_at_a_deadline_that_has_moved_since_is_no_end(grows, refusal):
    """A shard that waits for a place at its source, while what comes of another one moves the deadline."""
    story, one, two = Story(grows=grows), manifest(2), manifest(1, "2")
    story.open(1, (A, one), (A, two))
    assert story.asks(story.then(events.Lost(1, A, "full"))[2:]).shards == (1,)
    story.now = TIMEOUT_S - 1
    story.arrive(0, A, 0)
    effects = story.at(TIMEOUT_S + 0.1, events.Answer(2, refusal, False))
    if grows:
        assert story.asks(effects).timeout_s == pytest.approx(SLOW_S - 1.1)
    else:
        gives_up(effects)


def test_what_was_published_without_digests_is_not_read_by_who_compares_them():
    story, of = Story(), msgspec.structs.replace(manifest(1), digests=b"1" * 16, digest_algorithm=NO_DIGESTS)
    story.begin()
    story.then(granted(1, grant(0, A, of)))
    effects = story.then(events.Opened(0, A, of))
    assert effects[:2] == [events.Close(0, A), m.Release(1, 0, False)]
    error = gives_up(effects)
    assert type(error) is errors.UsageError and "published without digests" in str(error) and error.peer == "a/0"


# --- an operator withdraws the version ---


def test_a_version_that_is_withdrawn_is_not_read_to_its_end():
    story, one, two = Story(), manifest(2), manifest(1, "2")
    story.open(1, (A, one), (B, two))
    story.arrive(0, A, 0)
    assert story.then(events.Directed(Directive(0, 0, (5, 6)))) == []  # others
    effects = story.then(events.Directed(Directive(0, 0, (5, 6, 7))))
    ends = [events.Close(0, A), m.Release(1, 0, False), events.Close(1, B), m.Release(1, 1, False)]
    assert effects[:-1] == ends and story.machine.finished
    error = gives_up(effects)
    assert isinstance(error, errors.VersionGone) and error.version == 7 and "withdrawn" in error.message


def test_a_grant_and_the_withdrawal_of_its_version_cross():
    story, of = Story(LATEST), manifest(1)
    story.begin()
    story.then(events.Directed(Directive(0, 0, (7,))))  # which version it is to read it does not know yet
    effects = story.then(granted(1, grant(0, A, of)))
    assert effects[0] == m.Release(1, None, False)
    assert isinstance(gives_up(effects), errors.VersionGone)


# --- a source is lost ---


def test_a_lost_source_costs_what_was_in_flight_and_nothing_verified():
    story, of = Story(), manifest(4)
    story.open(1, (A, of))
    story.arrive(0, A, 0, 2)
    effects = story.then(events.Lost(0, A, "died"))
    assert effects[:2] == [events.Close(0, A), m.Release(1, 0, True)]
    again = story.asks(effects[2:])
    assert (again.shards, again.shards_layout, again.shard_count) == ((0,), CHECKPOINT, 1)
    assert (again.avoid, again.exclude) == ((A,), ())
    story.then(granted(2, grant(0, B, of)))
    assert story.then(events.Opened(0, B, of)) == [events.Read(0, B, (1, 3))]
    story.arrive(0, B, 1, 3)
    assert story.then(events.EpochChecked(0, B, True)) == [
        events.Close(0, B),
        m.Release(2, 0, False),
        events.Complete(),
    ]
    assert story.machine.losses == ["shard 0 from a/0: died"]


def test_words_of_a_source_that_was_left_mean_nothing():
    story, of = Story(), manifest(2)
    story.open(1, (A, of))
    story.then(events.Lost(0, A, "died"))
    for late in (
        events.Arrived(0, A, 0, True),
        events.EpochChecked(0, A, True),
        events.Lost(0, A, "again"),
        events.Opened(0, A, of),
    ):
        assert story.then(late) == []
    story.then(granted(2, grant(0, B, of)))
    for late in (
        events.Arrived(0, A, 0, True),
        events.EpochChecked(0, A, True),
        events.Lost(0, A, "again"),
        events.Opened(0, A, of),
    ):
        assert story.then(late) == []
    assert story.then(events.Opened(0, B, of)) == [events.Read(0, B, (0, 1))]
    assert story.then(events.Opened(0, B, of)) == []  # doubled
    story.arrive(0, B, 0)
    assert story.then(events.Arrived(0, B, 0, True)) == []  # doubled
    assert story.then(events.Arrived(0, B, 0, False)) == []  # it is verified, whatever comes after


def test_a_reading_that_ends_early_is_a_loss():
    story, of = Story(), manifest(2)
    story.open(1, (A, of))
    story.arrive(0, A, 0)
    assert story.then(events.EpochChecked(0, A, True))[:2] == [events.Close(0, A), m.Release(1, 0, True)]
    assert story.machine.losses == ["shard 0 from a/0: 1 segments did not arrive"]


def test_the_hub_says_that_a_source_is_gone():
    story, of = Story(), manifest(1)
    story.open(1, (A, of))
    assert story.then(events.SourceGone(B)) == []
    assert story.then(events.SourceGone(A))[:2] == [events.Close(0, A), m.Release(1, 0, True)]
    assert story.then(events.SourceGone(A)) == []


def test_one_source_that_takes_several_shards_with_it_costs_one_question_and_no_wait():
    story = Story()
    parts = [manifest(1, str(shard)) for shard in range(4)]
    story.open(1, *[(A, of) for of in parts])
    story.arrive(2, A, 0)
    story.then(events.EpochChecked(2, A, True))
    effects = story.then(events.SourceGone(A))
    assert effects[:6] == [x for shard in (0, 1, 3) for x in (events.Close(shard, A), m.Release(1, shard, True))]
    assert story.asks(effects[6:]).shards == (0, 1, 3)


def test_losses_that_come_while_it_asks_are_asked_about_next():
    story, one, two = Story(), manifest(1), manifest(1, "2")
    story.open(1, (A, one), (A, two))
    assert story.asks(story.then(events.Lost(0, A, "died"))[2:]).shards == (0,)
    assert story.then(events.Lost(1, A, "died")) == [
        events.Close(1, A),
        m.Release(1, 1, True),
    ]  # a question is on its way
    effects = story.then(granted(2, grant(0, B, one), count=2))
    assert effects == [events.Open(ShardKey(7, CHECKPOINT, 0, 2), grant(0, B, one), 2)]
    assert story.asks(story.at(story.machine.next_deadline(), events.Tick())).shards == (1,)


def test_a_grant_for_what_is_read_already_is_given_back():
    story, one, two = Story(), manifest(1), manifest(1, "2")
    story.open(1, (A, one), (B, two))
    story.then(events.Lost(0, A, "died"))
    effects = story.then(granted(2, grant(0, C, one), grant(1, C, two), count=2))
    assert effects == [events.Open(ShardKey(7, CHECKPOINT, 0, 2), grant(0, C, one), 2), m.Release(2, 1, False)]


def test_it_backs_off_while_nothing_moves_and_starts_afresh_with_progress():
    story, of = Story(), manifest(10_000)
    story.open(1, (A, of))
    waits = []
    for request in range(2, 12):
        lost_at = story.now
        effects = story.at(lost_at, events.Lost(0, A, "refused"))
        if len(effects) == 2:
            assert story.at(story.machine.next_deadline() - 0.001, events.Tick()) == []
            effects = [*effects, *story.at(story.machine.next_deadline(), events.Tick())]
        story.asks(effects[2:])
        waits.append(round(story.now - lost_at, 3))
        story.then(granted(request, grant(0, A, of)))
    assert waits == [0, 0.1, 0.2, 0.4, 0.8, 1.6, 2, 2, 2, 2]
    story.then(events.Opened(0, A, of))
    story.arrive(0, A, 0)
    assert len(story.then(events.Lost(0, A, "died"))) == 3  # asked at once


def test_backing_off_for_hours_does_not_overflow():
    assert replication.backoff_s(10**6, LIMITS) == LIMITS.backoff_max_s


def test_two_sources_that_fail_in_turn_do_not_keep_the_hub_busy():
    """Each answer used to be followed by the next question at once when another shard was lost meanwhile."""
    story, one, two = Story(), manifest(1), manifest(1, "2")
    story.begin()
    story.then(granted(1, grant(0, A, one), grant(1, A, two), count=2))
    questions, request, asking = 0, 1, False
    while story.now < 10.0:
        for shard in (0, 1):
            for effect in story.then(events.Lost(shard, A, "refused")):
                asking |= isinstance(effect, events.AskSources)
        if asking:
            questions, request, asking = questions + 1, request + 1, False
            effects = story.then(granted(request, grant(0, A, one), grant(1, A, two), count=2))
            asking = any(isinstance(effect, events.AskSources) for effect in effects)
        else:
            asking = any(
                isinstance(e, events.AskSources) for e in story.at(story.machine.next_deadline(), events.Tick())
            )
    assert questions < 15


# --- bytes that are not what was published ---


def test_a_corrupt_segment_is_read_again_and_never_verified():
    story, of = Story(), manifest(2)
    story.open(1, (A, of))
    story.arrive(0, A, 0)
    effects = story.then(events.Arrived(0, A, 1, False))
    assert effects[:2] == [events.Close(0, A), m.Release(1, 0, True, corrupt=(1,))]  # which the hub is told
    assert story.asks(effects[2:]).exclude == ()
    story.then(granted(2, grant(0, A, of)))
    assert story.then(events.Opened(0, A, of)) == [events.Read(0, A, (1,))]


def test_a_source_that_keeps_sending_corrupt_bytes_is_excluded():
    story, of = Story(), manifest(2)
    story.open(1, (A, of))
    for request in range(2, 2 + LIMITS.corrupt_segments_max):
        effects = story.then(events.Arrived(0, A, 1, False))
        if len(effects) == 2:
            effects += story.at(story.machine.next_deadline(), events.Tick())
        acquire = story.asks(effects[2:])
        story.then(granted(request, grant(0, A, of)))
        story.then(events.Opened(0, A, of))
    assert acquire.exclude == (A,)
    assert story.machine.losses == ["shard 0 from a/0: segment 1 arrived corrupt"] * LIMITS.corrupt_segments_max


def test_when_only_excluded_sources_are_left_it_names_what_was_corrupt():
    story, of = Story(), manifest(2)
    story.open(1, (A, of))
    story.then(events.Arrived(0, A, 1, False, tensors=tuple(f"w{i}" for i in range(7))))
    error = gives_up(story.then(events.Answer(2, errors.VersionGone("only excluded sources are left"))))
    assert type(error) is errors.CorruptBytes
    assert (error.version, error.shard, error.peer, error.segment) == (7, 0, "a/0", 1)
    assert error.tensors == tuple(f"w{i}" for i in range(7))
    assert "segment 1 arrived corrupt (of 'w0', 'w1', 'w2', 'w3', 'w4' and 2 more)" in str(error)

    story = Story()
    story.begin()
    story.then(granted(1, grant(0, A, of)))
    story.then(events.Opened(0, A, manifest(2, "other")))
    error = gives_up(story.then(events.Answer(2, errors.VersionGone("only excluded sources are left"))))
    assert type(error) is errors.CorruptBytes and error.segment is None and "its manifest is not the one" in str(error)


def test_a_manifest_that_was_not_the_published_one_excludes_its_source():
    story, of = Story(), manifest(2)
    story.begin()
    story.then(granted(1, grant(0, A, of)))
    effects = story.then(events.Opened(0, A, manifest(2, "other")))
    assert effects[:2] == [events.Close(0, A), m.Release(1, 0, True)]
    assert story.asks(effects[2:]).exclude == (A,)


def test_who_believes_one_digest_only_takes_no_other_whatever_its_root():
    """A root of 128 bits by another algorithm may be forged to be the published one."""
    weak = manifest(1)
    story = Story(algorithm="blake3")
    story.begin()
    story.then(granted(1, grant(0, A, weak)))
    effects = story.then(events.Opened(0, A, weak))
    assert effects[:2] == [events.Close(0, A), m.Release(1, 0, True)]
    assert story.asks(effects[2:]).exclude == (A,)
    error = gives_up(story.then(events.Answer(2, errors.VersionGone("only excluded sources are left"))))
    assert type(error) is errors.UsageError and error.peer == "a/0"
    assert "digests by xxh3_128, and this reader believes blake3 only" in str(error)

    strong = msgspec.structs.replace(weak, digest_algorithm="blake3")
    Story(algorithm="blake3").open(1, (A, strong))
    Story().open(1, (A, strong))  # who names none takes any


def test_the_epoch_decides_when_digests_are_off():
    for verify, unchanged, completes in ((True, False, True), (False, True, True), (False, False, False)):
        story, of = Story(verify=verify), manifest(1)
        story.open(1, (A, of))
        story.arrive(0, A, 0)
        last = story.then(events.EpochChecked(0, A, unchanged))[-1]
        if completes:
            assert last == events.Complete()
        else:
            assert isinstance(last, events.GiveUp) and isinstance(last.error, errors.SourceLost)
            assert "withdrew" in str(last.error) and last.error.peer == "a/0"


# --- another layout ---


def test_another_layout_starts_again():
    story, runtime, checkpoint = Story(layouts=(RUNTIME, CHECKPOINT)), manifest(2), manifest(3)
    story.begin()
    story.then(granted(1, grant(0, A, runtime), layout=RUNTIME))
    story.then(events.Opened(0, A, runtime))
    story.arrive(0, A, 0)
    story.then(events.Lost(0, A, "died"))
    effects = story.then(granted(2, grant(0, B, checkpoint), layout=CHECKPOINT))
    assert effects == [
        events.Restart(CHECKPOINT),
        events.Open(ShardKey(7, CHECKPOINT, 0, 1), grant(0, B, checkpoint), 2),
    ]
    assert story.then(events.Opened(0, B, checkpoint)) == [events.Read(0, B, (0, 1, 2))]


def test_another_layout_closes_what_is_still_being_read():
    story, one, two, whole = Story(), manifest(1), manifest(1, "2"), manifest(2, "whole")
    story.open(1, (A, one), (B, two))
    story.then(events.Lost(0, A, "died"))
    effects = story.then(granted(2, grant(0, C, whole)))
    assert effects == [
        events.Close(1, B),
        m.Release(1, 1, False),
        events.Restart(CHECKPOINT),
        events.Open(ShardKey(7, CHECKPOINT, 0, 1), grant(0, C, whole), 2),
    ]


def test_a_claim_is_remembered():
    claim = ShardKey(7, RUNTIME, 0, 1)
    story, of = Story(layouts=(RUNTIME, CHECKPOINT)), manifest(1)
    story.begin()
    story.then(granted(1, grant(0, A, of), claim=claim))
    assert story.machine.claimed == claim


# --- the end by deadline ---


def test_at_the_deadline_it_says_what_is_missing_from_whom():
    story, of = Story(), manifest(3)
    story.open(1, (A, of))
    story.arrive(0, A, 1)
    story.at(TIMEOUT_S - 0.001, events.Tick())
    assert not story.machine.finished and story.machine.next_deadline() == TIMEOUT_S
    effects = story.at(TIMEOUT_S, events.Tick())
    assert effects[:2] == [events.Close(0, A), m.Release(1, 0, False)]
    error = gives_up(effects)
    assert isinstance(error, errors.DeadlineExceeded)
    assert (error.version, error.peer, error.phase, error.timeout_s) == (7, "a/0", "read", TIMEOUT_S)
    assert "2 segments were still missing" in str(error)


def test_at_the_deadline_it_says_that_only_the_confirmation_is_missing():
    story, of = Story(), manifest(1)
    story.open(1, (A, of))
    story.arrive(0, A, 0)
    error = gives_up(story.at(TIMEOUT_S, events.Tick()))
    assert "confirmations that what was read is still published were still missing" in str(error)
    assert error.peer == "a/0"


def test_at_the_deadline_it_names_the_sources_that_were_lost():
    story, of = Story(), manifest(2)
    story.open(1, (A, of))
    story.then(events.Lost(0, A, "connection refused"))  # asks at once; the hub knows nobody else
    assert story.at(TIMEOUT_S, events.Tick()) == []  # its answer says more
    assert story.machine.next_deadline() == TIMEOUT_S + LIMITS.hub_answer_s
    error = gives_up(story.at(TIMEOUT_S + LIMITS.hub_answer_s, events.Tick()))
    assert isinstance(error, errors.DeadlineExceeded)
    assert (error.version, error.peer, error.phase) == (7, "a/0", "read")
    assert "lost on the way: shard 0 from a/0: connection refused" in str(error)


def test_shards_that_nobody_opened_are_counted_apart():
    story, one, two = Story(), manifest(2), manifest(2, "2")
    story.begin()
    story.then(granted(1, grant(0, A, one), grant(1, B, two), count=2))
    story.then(events.Opened(0, A, one))
    error = gives_up(story.at(TIMEOUT_S, events.Tick()))
    assert "2 segments and 1 shards not yet opened were still missing" in str(error) and error.peer == "a/0, b/0"


def test_no_answer_at_all_means_that_the_hub_is_away():
    story = Story()
    story.begin()
    assert story.at(TIMEOUT_S, events.Tick()) == []
    error = gives_up(story.at(TIMEOUT_S + LIMITS.hub_answer_s, events.Tick()))
    assert isinstance(error, errors.HubUnreachable) and error.phase == "find sources"
    story = Story()
    story.begin()
    unheard = gives_up(story.then(events.Answer(1, errors.HubUnreachable("it asks for the run's secret"))))
    assert isinstance(unheard, errors.HubUnreachable) and "it asks for the run's secret" in str(unheard)


@pytest.mark.parametrize("kind", [errors.NotPublished, errors.VersionGone, errors.UsageError, errors.DeadlineExceeded])
def test_the_hubs_refusal_becomes_the_error_it_names_with_what_was_lost_before(kind):
    story, of = Story(), manifest(1)
    story.open(1, (A, of))
    story.then(events.Lost(0, A, "died"))
    error = gives_up(story.then(events.Answer(2, errors.refusal(kind.__name__, "because"))))
    assert type(error) is kind and (error.version, error.peer) == (7, "a/0")
    assert "because" in str(error) and "shard 0 from a/0: died" in str(error)


def test_a_refusal_of_an_unknown_kind_is_a_broken_peer():
    story = Story()
    story.begin()
    error = gives_up(story.then(events.Answer(1, errors.refusal("SystemExit", "ha"))))
    assert type(error) is errors.ProtocolError


def test_a_grant_after_the_deadline_is_given_back_at_once():
    story, of = Story(), manifest(1)
    story.begin()
    effects = story.at(TIMEOUT_S + 0.5, granted(1, grant(0, A, of)))
    assert effects[1:3] == [events.Close(0, A), m.Release(1, 0, False)]
    assert isinstance(gives_up(effects), errors.DeadlineExceeded)


def test_a_long_list_of_losses_is_cut_short_in_the_error():
    story, of = Story(), manifest(1)
    story.open(1, (A, of))
    for request in range(2, 8):
        effects = story.then(events.Lost(0, A, f"loss {request}"))
        if len(effects) == 2:
            story.at(story.machine.next_deadline(), events.Tick())
        story.then(granted(request, grant(0, A, of)))
    text = str(gives_up(story.at(TIMEOUT_S, events.Tick())))
    assert "loss 7" in text and "loss 3" not in text
