"""One replicate() event by event: what happened goes in, the list of what to do next comes out."""

from __future__ import annotations

import msgspec
import pytest

from tensorhub_plugins.core import errors
from tensorhub_plugins.core.manifest import (
    NO_DIGESTS,
    Manifest,
    TensorSpec,
    TensorTable,
)
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.transfer import replication as r
from tensorhub_plugins.core.transfer.limits import TransferLimits
from tensorhub_plugins.core.types import (
    CHECKPOINT,
    LATEST,
    Location,
    ShardKey,
)

A, B, C = (letter.encode() * 16 for letter in "abc")
NAMES = {A: "a/0", B: "b/0", C: "c/0"}
RUNTIME = "runtime:f"
TIMEOUT_S = 60.0
LIMITS = TransferLimits()


def manifest(segments: int, tag: str = "") -> Manifest:
    tensors = (TensorSpec("w" + tag, "uint8", (segments,), segments),)
    return Manifest(TensorTable.of(tensors), bytes(16 * segments), 1)


def grant(shard: int, session: bytes, of: Manifest) -> m.Grant:
    return m.Grant(shard, session, NAMES[session], {"tcp": "tcp://x:1"}, Location(), of.root(), of.size_bytes)


def granted(request: int, *grants: m.Grant, version: int = 7, layout: str = CHECKPOINT, count: int = 1, claim=None):
    return r.Answer(request, m.Granted(request, version, layout, count, grants, claim))


class Story:
    """A machine, the clock in hand, and names for what it is told often."""

    def __init__(self, version: int | str = 7, layouts: tuple[str, ...] = (CHECKPOINT,), **options: object) -> None:
        number = 0 if version == LATEST else version
        self.now = 0.0
        self.machine = r.Replication(number, 3, layouts, False, TIMEOUT_S, TIMEOUT_S, **options)

    def at(self, now: float, event: r.Event) -> list[r.Effect]:
        """What it does, once there is memory for what it wants to prepare."""
        self.now = now
        effects = self.machine.handle(event, now)
        if effects and isinstance(effects[-1], r.Prepare):
            key, of = effects[-1].key, effects[-1].manifest
            effects[-1:] = self.machine.handle(r.Prepared(key.shard, tuple(range(of.segment_count))), now)
        return effects

    def then(self, event: r.Event) -> list[r.Effect]:
        return self.at(self.now, event)

    def asks(self, effects: list[r.Effect]) -> m.Acquire:
        """The only effect is a question; return it."""
        (ask,) = effects
        assert isinstance(ask, r.AskSources)
        return ask.acquire

    def begin(self) -> None:
        self.asks(self.then(r.Begin()))

    def open(self, request: int, *pairs: tuple[bytes, Manifest]) -> None:
        """From Begin to every shard being read."""
        self.begin()
        grants = [grant(shard, session, of) for shard, (session, of) in enumerate(pairs)]
        self.then(granted(request, *grants, count=len(pairs)))
        for shard, (session, of) in enumerate(pairs):
            effects = self.then(r.Opened(shard, session, of))
            assert effects == [r.Read(shard, session, tuple(range(of.segment_count))[: LIMITS.window_first_segments])]

    def arrive(self, shard: int, session: bytes, *segments: int) -> None:
        for segment in segments:
            effects = self.then(r.Arrived(shard, session, segment, True))
            state = self.machine.shards[shard]
            done = [] if state.missing else [r.ConfirmEpoch(shard, session)]
            assert effects == [r.Verified(shard, session, segment), *done]


def gives_up(effects: list[r.Effect]) -> errors.TensorHubError:
    assert isinstance(effects[-1], r.GiveUp)
    return effects[-1].error


# --- the way of one version ---


def test_ask_open_read_verify_complete():
    story, of = Story(), manifest(2)
    assert story.then(r.Begin()) == [r.AskSources(m.Acquire(0, 7, 3, (CHECKPOINT,), TIMEOUT_S))]
    key = ShardKey(7, CHECKPOINT, 0, 1)
    assert story.then(granted(1, grant(0, A, of))) == [r.Open(key, grant(0, A, of), 1)]
    assert story.then(r.Opened(0, A, of)) == [r.Read(0, A, (0, 1))]
    assert story.then(r.Arrived(0, A, 1, True)) == [r.Verified(0, A, 1)]
    assert story.then(r.Arrived(0, A, 0, True)) == [r.Verified(0, A, 0), r.ConfirmEpoch(0, A)]
    assert story.then(r.EpochChecked(0, A, True)) == [r.Close(0, A), r.EndLease(1, 0, False), r.Complete()]
    assert story.machine.finished and story.machine.losses == []


def test_a_shard_without_bytes_is_complete_once_it_is_opened():
    story, of = Story(), manifest(0)
    story.begin()
    story.then(granted(1, grant(0, A, of)))
    assert story.then(r.Opened(0, A, of)) == [r.Close(0, A), r.EndLease(1, 0, False), r.Complete()]


def test_it_is_complete_only_when_every_shard_is():
    story, one, two = Story(), manifest(1), manifest(1, "2")
    story.open(1, (A, one), (B, two))
    story.arrive(1, B, 0)
    assert story.then(r.EpochChecked(1, B, True)) == [r.Close(1, B), r.EndLease(1, 1, False)]
    story.arrive(0, A, 0)
    assert story.then(r.EpochChecked(0, A, True))[-1] == r.Complete()


def test_latest_stays_what_it_was_resolved_to():
    story, of = Story(LATEST), manifest(1)
    assert story.asks(story.then(r.Begin())).version == 0
    story.then(granted(1, grant(0, A, of), version=9))
    assert story.asks(story.then(r.Lost(0, A, "died"))[2:]).version == 9


def test_after_the_end_nothing_is_done_and_a_late_grant_is_given_back():
    story, of = Story(), manifest(1)
    story.open(1, (A, of))
    story.arrive(0, A, 0)
    story.then(r.EpochChecked(0, A, True))
    for late in (
        r.Arrived(0, A, 0, True),
        r.Arrived(0, A, 0, False),
        r.Lost(0, A, "late"),
        r.EpochChecked(0, A, False),
        r.Opened(0, A, of),
        r.SourceGone(A),
        r.Tick(),
        r.Answer(5, errors.HubUnreachable("away")),
    ):
        assert story.then(late) == []
    assert story.then(granted(5, grant(0, B, of))) == [r.EndLease(5, None, False)]


def test_memory_is_prepared_once_and_every_source_that_is_open_by_then_is_used():
    story, of = Story(), manifest(3)
    story.begin()
    story.then(granted(1, grant(0, A, of)))
    key, handle = ShardKey(7, CHECKPOINT, 0, 1), story.machine.handle
    assert handle(r.Opened(0, A, of), 0.0) == [r.Prepare(key, of)]
    assert handle(r.Opened(0, A, of), 0.0) == []  # doubled
    assert handle(r.Prepared(0, (0, 2)), 5.0) == [r.Read(0, A, (0, 2))]  # only what is wanted
    assert handle(r.Tick(), 5.1) == []  # the time that memory took is not the source's


def test_what_was_published_without_digests_is_not_read_by_who_compares_them():
    story, of = Story(), msgspec.structs.replace(manifest(1), digests=b"1" * 16, digest_algorithm=NO_DIGESTS)
    story.begin()
    story.then(granted(1, grant(0, A, of)))
    effects = story.then(r.Opened(0, A, of))
    assert effects[:2] == [r.Close(0, A), r.EndLease(1, 0, False)]
    error = gives_up(effects)
    assert type(error) is errors.UsageError and "published without digests" in str(error) and error.peer == "a/0"


# --- an operator withdraws the version ---


def test_a_version_that_is_withdrawn_is_not_read_to_its_end():
    story, one, two = Story(), manifest(2), manifest(1, "2")
    story.open(1, (A, one), (B, two))
    story.arrive(0, A, 0)
    assert story.then(r.Withdrawn((5, 6))) == []  # others
    effects = story.then(r.Withdrawn((5, 6, 7)))
    ends = [r.Close(0, A), r.EndLease(1, 0, False), r.Close(1, B), r.EndLease(1, 1, False)]
    assert effects[:-1] == ends and story.machine.finished
    error = gives_up(effects)
    assert isinstance(error, errors.VersionGone) and error.version == 7 and "withdrawn" in error.message


def test_a_grant_and_the_withdrawal_of_its_version_cross():
    story, of = Story(LATEST), manifest(1)
    story.begin()
    story.then(r.Withdrawn((7,)))  # which version it is to read it does not know yet
    effects = story.then(granted(1, grant(0, A, of)))
    assert effects[0] == r.EndLease(1, None, False)
    assert isinstance(gives_up(effects), errors.VersionGone)


# --- a source is lost ---


def test_a_lost_source_costs_what_was_in_flight_and_nothing_verified():
    story, of = Story(), manifest(4)
    story.open(1, (A, of))
    story.arrive(0, A, 0, 2)
    effects = story.then(r.Lost(0, A, "died"))
    assert effects[:2] == [r.Close(0, A), r.EndLease(1, 0, True)]
    again = story.asks(effects[2:])
    assert (again.shards, again.shards_layout, again.shard_count) == ((0,), CHECKPOINT, 1)
    assert (again.avoid, again.exclude) == ((A,), ())
    story.then(granted(2, grant(0, B, of)))
    assert story.then(r.Opened(0, B, of)) == [r.Read(0, B, (1, 3))]
    story.arrive(0, B, 1, 3)
    assert story.then(r.EpochChecked(0, B, True)) == [r.Close(0, B), r.EndLease(2, 0, False), r.Complete()]
    assert story.machine.losses == ["shard 0 from a/0: died"]


def test_words_of_a_source_that_was_left_mean_nothing():
    story, of = Story(), manifest(2)
    story.open(1, (A, of))
    story.then(r.Lost(0, A, "died"))
    for late in (r.Arrived(0, A, 0, True), r.EpochChecked(0, A, True), r.Lost(0, A, "again"), r.Opened(0, A, of)):
        assert story.then(late) == []
    story.then(granted(2, grant(0, B, of)))
    for late in (r.Arrived(0, A, 0, True), r.EpochChecked(0, A, True), r.Lost(0, A, "again"), r.Opened(0, A, of)):
        assert story.then(late) == []
    assert story.then(r.Opened(0, B, of)) == [r.Read(0, B, (0, 1))]
    assert story.then(r.Opened(0, B, of)) == []  # doubled
    story.arrive(0, B, 0)
    assert story.then(r.Arrived(0, B, 0, True)) == []  # doubled
    assert story.then(r.Arrived(0, B, 0, False)) == []  # it is verified, whatever comes after


def test_a_reading_that_ends_early_is_a_loss():
    story, of = Story(), manifest(2)
    story.open(1, (A, of))
    story.arrive(0, A, 0)
    assert story.then(r.EpochChecked(0, A, True))[:2] == [r.Close(0, A), r.EndLease(1, 0, True)]
    assert story.machine.losses == ["shard 0 from a/0: 1 segments did not arrive"]


def test_the_hub_says_that_a_source_is_gone():
    story, of = Story(), manifest(1)
    story.open(1, (A, of))
    assert story.then(r.SourceGone(B)) == []
    assert story.then(r.SourceGone(A))[:2] == [r.Close(0, A), r.EndLease(1, 0, True)]
    assert story.then(r.SourceGone(A)) == []


def test_one_source_that_takes_several_shards_with_it_costs_one_question_and_no_wait():
    story = Story()
    parts = [manifest(1, str(shard)) for shard in range(4)]
    story.open(1, *[(A, of) for of in parts])
    story.arrive(2, A, 0)
    story.then(r.EpochChecked(2, A, True))
    effects = story.then(r.SourceGone(A))
    assert effects[:6] == [x for shard in (0, 1, 3) for x in (r.Close(shard, A), r.EndLease(1, shard, True))]
    assert story.asks(effects[6:]).shards == (0, 1, 3)


def test_losses_that_come_while_it_asks_are_asked_about_next():
    story, one, two = Story(), manifest(1), manifest(1, "2")
    story.open(1, (A, one), (A, two))
    assert story.asks(story.then(r.Lost(0, A, "died"))[2:]).shards == (0,)
    assert story.then(r.Lost(1, A, "died")) == [r.Close(1, A), r.EndLease(1, 1, True)]  # a question is on its way
    effects = story.then(granted(2, grant(0, B, one), count=2))
    assert effects == [r.Open(ShardKey(7, CHECKPOINT, 0, 2), grant(0, B, one), 2)]
    assert story.asks(story.at(story.machine.next_deadline(), r.Tick())).shards == (1,)


def test_a_grant_for_what_is_read_already_is_given_back():
    story, one, two = Story(), manifest(1), manifest(1, "2")
    story.open(1, (A, one), (B, two))
    story.then(r.Lost(0, A, "died"))
    effects = story.then(granted(2, grant(0, C, one), grant(1, C, two), count=2))
    assert effects == [r.Open(ShardKey(7, CHECKPOINT, 0, 2), grant(0, C, one), 2), r.EndLease(2, 1, False)]


def test_it_backs_off_while_nothing_moves_and_starts_afresh_with_progress():
    story, of = Story(), manifest(10_000)
    story.open(1, (A, of))
    waits = []
    for request in range(2, 12):
        lost_at = story.now
        effects = story.at(lost_at, r.Lost(0, A, "refused"))
        if len(effects) == 2:
            assert story.at(story.machine.next_deadline() - 0.001, r.Tick()) == []
            effects = [*effects, *story.at(story.machine.next_deadline(), r.Tick())]
        story.asks(effects[2:])
        waits.append(round(story.now - lost_at, 3))
        story.then(granted(request, grant(0, A, of)))
    assert waits == [0, 0.1, 0.2, 0.4, 0.8, 1.6, 2, 2, 2, 2]
    story.then(r.Opened(0, A, of))
    story.arrive(0, A, 0)
    assert len(story.then(r.Lost(0, A, "died"))) == 3  # asked at once


def test_backing_off_for_hours_does_not_overflow():
    assert r.backoff_s(10**6, LIMITS) == LIMITS.backoff_max_s


def test_two_sources_that_fail_in_turn_do_not_keep_the_hub_busy():
    """Each answer used to be followed by the next question at once when another shard was lost meanwhile."""
    story, one, two = Story(), manifest(1), manifest(1, "2")
    story.begin()
    story.then(granted(1, grant(0, A, one), grant(1, A, two), count=2))
    questions, request, asking = 0, 1, False
    while story.now < 10.0:
        for shard in (0, 1):
            for effect in story.then(r.Lost(shard, A, "refused")):
                asking |= isinstance(effect, r.AskSources)
        if asking:
            questions, request, asking = questions + 1, request + 1, False
            effects = story.then(granted(request, grant(0, A, one), grant(1, A, two), count=2))
            asking = any(isinstance(effect, r.AskSources) for effect in effects)
        else:
            asking = any(isinstance(e, r.AskSources) for e in story.at(story.machine.next_deadline(), r.Tick()))
    assert questions < 15


# --- bytes that are not what was published ---


def test_a_corrupt_segment_is_read_again_and_never_verified():
    story, of = Story(), manifest(2)
    story.open(1, (A, of))
    story.arrive(0, A, 0)
    effects = story.then(r.Arrived(0, A, 1, False))
    assert effects[:2] == [r.Close(0, A), r.EndLease(1, 0, True)]
    assert story.asks(effects[2:]).exclude == ()
    story.then(granted(2, grant(0, A, of)))
    assert story.then(r.Opened(0, A, of)) == [r.Read(0, A, (1,))]


def test_a_source_that_keeps_sending_corrupt_bytes_is_excluded():
    story, of = Story(), manifest(2)
    story.open(1, (A, of))
    for request in range(2, 2 + LIMITS.corrupt_segments_max):
        effects = story.then(r.Arrived(0, A, 1, False))
        if len(effects) == 2:
            effects += story.at(story.machine.next_deadline(), r.Tick())
        acquire = story.asks(effects[2:])
        story.then(granted(request, grant(0, A, of)))
        story.then(r.Opened(0, A, of))
    assert acquire.exclude == (A,)
    assert story.machine.losses == ["shard 0 from a/0: segment 1 arrived corrupt"] * LIMITS.corrupt_segments_max


def test_a_manifest_that_was_not_the_published_one_excludes_its_source():
    story, of = Story(), manifest(2)
    story.begin()
    story.then(granted(1, grant(0, A, of)))
    effects = story.then(r.Opened(0, A, manifest(2, "other")))
    assert effects[:2] == [r.Close(0, A), r.EndLease(1, 0, True)]
    assert story.asks(effects[2:]).exclude == (A,)


def test_the_epoch_decides_when_digests_are_off():
    for verify, unchanged, completes in ((True, False, True), (False, True, True), (False, False, False)):
        story, of = Story(verify=verify), manifest(1)
        story.open(1, (A, of))
        story.arrive(0, A, 0)
        last = story.then(r.EpochChecked(0, A, unchanged))[-1]
        if completes:
            assert last == r.Complete()
        else:
            assert isinstance(last, r.GiveUp) and isinstance(last.error, errors.SourceLost)
            assert "withdrew" in str(last.error) and last.error.peer == "a/0"


# --- another layout ---


def test_another_layout_starts_again():
    story, runtime, checkpoint = Story(layouts=(RUNTIME, CHECKPOINT)), manifest(2), manifest(3)
    story.begin()
    story.then(granted(1, grant(0, A, runtime), layout=RUNTIME))
    story.then(r.Opened(0, A, runtime))
    story.arrive(0, A, 0)
    story.then(r.Lost(0, A, "died"))
    effects = story.then(granted(2, grant(0, B, checkpoint), layout=CHECKPOINT))
    assert effects == [r.Restart(CHECKPOINT), r.Open(ShardKey(7, CHECKPOINT, 0, 1), grant(0, B, checkpoint), 2)]
    assert story.then(r.Opened(0, B, checkpoint)) == [r.Read(0, B, (0, 1, 2))]


def test_another_layout_closes_what_is_still_being_read():
    story, one, two, whole = Story(), manifest(1), manifest(1, "2"), manifest(2, "whole")
    story.open(1, (A, one), (B, two))
    story.then(r.Lost(0, A, "died"))
    effects = story.then(granted(2, grant(0, C, whole)))
    assert effects == [
        r.Close(1, B),
        r.EndLease(1, 1, False),
        r.Restart(CHECKPOINT),
        r.Open(ShardKey(7, CHECKPOINT, 0, 1), grant(0, C, whole), 2),
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
    story.at(TIMEOUT_S - 0.001, r.Tick())
    assert not story.machine.finished and story.machine.next_deadline() == TIMEOUT_S
    effects = story.at(TIMEOUT_S, r.Tick())
    assert effects[:2] == [r.Close(0, A), r.EndLease(1, 0, False)]
    error = gives_up(effects)
    assert isinstance(error, errors.DeadlineExceeded)
    assert (error.version, error.peer, error.phase, error.timeout_s) == (7, "a/0", "read", TIMEOUT_S)
    assert "2 segments were still missing" in str(error)


def test_at_the_deadline_it_names_the_sources_that_were_lost():
    story, of = Story(), manifest(2)
    story.open(1, (A, of))
    story.then(r.Lost(0, A, "connection refused"))  # asks at once; the hub knows nobody else
    assert story.at(TIMEOUT_S, r.Tick()) == []  # its answer says more
    assert story.machine.next_deadline() == TIMEOUT_S + LIMITS.hub_answer_s
    error = gives_up(story.at(TIMEOUT_S + LIMITS.hub_answer_s, r.Tick()))
    assert isinstance(error, errors.DeadlineExceeded)
    assert (error.version, error.peer, error.phase) == (7, "a/0", "read")
    assert "lost on the way: shard 0 from a/0: connection refused" in str(error)


def test_shards_that_nobody_opened_are_counted_apart():
    story, one, two = Story(), manifest(2), manifest(2, "2")
    story.begin()
    story.then(granted(1, grant(0, A, one), grant(1, B, two), count=2))
    story.then(r.Opened(0, A, one))
    error = gives_up(story.at(TIMEOUT_S, r.Tick()))
    assert "2 segments and 1 shards not yet opened were still missing" in str(error) and error.peer == "a/0, b/0"


def test_no_answer_at_all_means_that_the_hub_is_away():
    story = Story()
    story.begin()
    assert story.at(TIMEOUT_S, r.Tick()) == []
    error = gives_up(story.at(TIMEOUT_S + LIMITS.hub_answer_s, r.Tick()))
    assert isinstance(error, errors.HubUnreachable) and error.phase == "find sources"
    story = Story()
    story.begin()
    assert isinstance(gives_up(story.then(r.Answer(1, errors.HubUnreachable("away")))), errors.HubUnreachable)


@pytest.mark.parametrize("kind", [errors.NotPublished, errors.VersionGone, errors.UsageError, errors.DeadlineExceeded])
def test_the_hubs_refusal_becomes_the_error_it_names_with_what_was_lost_before(kind):
    story, of = Story(), manifest(1)
    story.open(1, (A, of))
    story.then(r.Lost(0, A, "died"))
    error = gives_up(story.then(r.Answer(2, errors.refusal(kind.__name__, "because"))))
    assert type(error) is kind and (error.version, error.peer) == (7, "a/0")
    assert "because" in str(error) and "shard 0 from a/0: died" in str(error)


def test_a_refusal_of_an_unknown_kind_is_a_broken_peer():
    story = Story()
    story.begin()
    error = gives_up(story.then(r.Answer(1, errors.refusal("SystemExit", "ha"))))
    assert type(error) is errors.ProtocolError


def test_a_grant_after_the_deadline_is_given_back_at_once():
    story, of = Story(), manifest(1)
    story.begin()
    effects = story.at(TIMEOUT_S + 0.5, granted(1, grant(0, A, of)))
    assert effects[1:3] == [r.Close(0, A), r.EndLease(1, 0, False)]
    assert isinstance(gives_up(effects), errors.DeadlineExceeded)


def test_a_long_list_of_losses_is_cut_short_in_the_error():
    story, of = Story(), manifest(1)
    story.open(1, (A, of))
    for request in range(2, 8):
        effects = story.then(r.Lost(0, A, f"loss {request}"))
        if len(effects) == 2:
            story.at(story.machine.next_deadline(), r.Tick())
        story.then(granted(request, grant(0, A, of)))
    text = str(gives_up(story.at(TIMEOUT_S, r.Tick())))
    assert "loss 7" in text and "loss 3" not in text


# --- several sources ---


def two_sources(segments: int = 400) -> Story:
    """A is read from, and B has just been opened beside it."""
    story, of = Story(), manifest(segments)
    story.open(1, (A, of))
    further = msgspec.structs.replace(granted(2, grant(0, B, of)), additional=True)
    assert story.then(further) == [r.Open(ShardKey(7, CHECKPOINT, 0, 1), grant(0, B, of), 2)]
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
            story.then(r.Arrived(0, session, next(iter(source.assigned)), True))
            came[session] += 1
        story.then(r.Tick())
    return came


def test_two_sources_share_the_work_by_their_rates_and_end_together():
    story = two_sources()
    of = manifest(400)
    assert story.then(r.Opened(0, B, of)) == [r.Read(0, B, tuple(range(16, 32)))]
    came = deliver(story, {A: 100.0, B: 300.0}, until=10.0)
    assert came[A] + came[B] == 400 and 2.3 < came[B] / came[A] < 3.9
    assert story.now < 1.15 * 400 / 400.0 and story.machine.losses == []


def test_no_segment_is_asked_of_two_and_none_is_forgotten():
    story = two_sources(100)
    asked = [s for e in story.then(r.Opened(0, B, manifest(100))) if isinstance(e, r.Read) for s in e.segments]
    assert not set(asked) & set(story.machine.shards[0].sources[A].assigned)
    deliver(story, {A: 50.0, B: 10.0}, until=10.0)
    assert not story.machine.shards[0].missing


def test_who_is_done_takes_over_from_who_hangs():
    story = two_sources(32)
    story.then(r.Opened(0, B, manifest(32)))
    story.machine.shards[0].queue.clear()
    for segment in range(16, 31):  # B delivers; A says nothing any more
        story.now += 0.02
        story.then(r.Arrived(0, B, segment, True))
    story.now += 1.0
    effects = story.then(r.Arrived(0, B, 31, True))
    assert effects[0] == r.Verified(0, B, 31)
    assert effects[1:3] == [r.Close(0, A), r.EndLease(1, 0, False)]
    assert isinstance(effects[3], r.Read) and effects[3].segments == tuple(range(len(effects[3].segments)))
    assert "slow" in story.machine.losses[0]


def test_who_was_left_is_given_nothing_more():
    story = two_sources(40)
    story.then(r.Opened(0, B, manifest(40)))
    state = story.machine.shards[0]
    idle, hangs = state.sources[A], state.sources[B]
    state.queue.clear()
    state.missing = dict.fromkeys(range(30, 40))
    idle.assigned.clear()
    idle.rate = 2.0  # it takes four at a time
    hangs.assigned, hangs.rate = dict.fromkeys(range(30, 40)), 100.0  # and this one may have fifty
    story.now += 10.0
    effects = story.then(r.Tick())
    assert effects[:3] == [r.Close(0, B), r.EndLease(2, 0, False), r.Read(0, A, (30, 31, 32, 33))]
    assert not [effect for effect in effects[3:] if isinstance(effect, r.Read)]
    assert list(state.queue) == list(range(34, 40))


def test_a_source_that_waits_itself_is_not_slow_and_one_that_hangs_is():
    for waits in (True, False):
        story, of = Story(), manifest(100)
        story.open(1, (A, of))
        asked = []
        for _ in range(8):
            story.now += 0.2
            if waits:
                story.then(r.SourceWaiting(0, A))
            asked += [e for e in story.then(r.Tick()) if isinstance(e, r.AskSources) and e.acquire.urgent]
        assert bool(asked) is not waits
        if asked:
            (ask,) = asked
            assert ask.acquire.beside == (A,) and ask.acquire.shards == (0,)


def test_a_source_in_another_data_centre_is_given_more_time():
    story, of = Story(location=Location("here")), manifest(100)
    story.open(1, (A, of))
    assert not [e for e in story.at(1.9, r.Tick()) if isinstance(e, r.AskSources) and e.acquire.urgent]
    story.then(r.Answer(9, errors.DeadlineExceeded("nobody is idle"), additional=True))
    assert [e for e in story.at(2.1, r.Tick()) if isinstance(e, r.AskSources) and e.acquire.urgent]


def test_a_transfer_that_lasts_asks_more_and_more_rarely_for_an_idle_source():
    story, of = Story(), manifest(1000)
    story.open(1, (A, of))
    asks = []
    then = story.machine.handle

    def noting(event, now):
        effects = then(event, now)
        asked = [e.acquire for e in effects if isinstance(e, r.AskSources)]
        asks.extend((now, acquire) for acquire in asked)
        if asked:
            then(r.Answer(9, errors.DeadlineExceeded("there is none"), additional=True), now)
        return effects

    story.machine.handle = noting
    deliver(story, {A: 100.0}, until=5.0)
    assert all((ask.beside, ask.urgent, ask.timeout_s) == ((A,), False, 0.0) for _, ask in asks)
    assert [round(now) for now, _ in asks] == [1, 2, 4]


def test_when_one_of_two_dies_the_other_goes_on_and_nobody_is_asked():
    story = two_sources(40)
    story.then(r.Opened(0, B, manifest(40)))
    effects = story.then(r.Lost(0, A, "died"))
    assert effects[:2] == [r.Close(0, A), r.EndLease(1, 0, True)]
    assert not [e for e in effects if isinstance(e, r.AskSources)]
    came = deliver(story, {B: 50.0}, until=10.0)
    assert came[B] == 40


def test_a_further_grant_for_what_is_done_is_given_back():
    story, of = Story(), manifest(1)
    story.open(1, (A, of))
    story.arrive(0, A, 0)
    further = msgspec.structs.replace(granted(2, grant(0, B, of)), additional=True)
    assert story.then(further) == [r.EndLease(2, 0, False)]
