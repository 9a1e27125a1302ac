"""A worker's talk with the hub event by event: what is sent, what is sent again, and what a new hub is told."""

from __future__ import annotations

import msgspec
import pytest

from tensorhub_plugins.core.client import session as s
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.protocol.directive import NO_DIRECTIVE, WITHDRAWN_MAX, Directive, directive_checksum, merge
from tensorhub_plugins.core.protocol.fields import SECONDS_MAX
from tensorhub_plugins.core.protocol.lineage import Attempt
from tensorhub_plugins.core.types import CHECKPOINT, Location, ShardKey

HUB, OTHER_HUB = b"H" * 16, b"O" * 16
SOURCE, OTHER_SOURCE = b"a" * 16, b"b" * 16
KEY, NEXT = ShardKey(1, CHECKPOINT), ShardKey(2, CHECKPOINT)
RUNTIME_KEY = ShardKey(1, "runtime:f")
DIRECTIVE = Directive(3, 5, (4,))
IDENTITY = m.Hello("r", "actor", "rollout", 0, 1, Location(host="h"), {"tcp": "x"})


def holding(key: ShardKey, complete: bool = True) -> m.Holding:
    return m.Holding(key, b"r" * 16, 10, complete)


def grant(shard: int, session: bytes) -> m.Grant:
    return m.Grant(shard, session, "a/0", {}, Location(), b"r" * 16, 10)


class Story:
    """A session and a clock; what it sends is returned as messages, the rest as effects."""

    def __init__(self, *, welcome: bool = True) -> None:
        self.now = 0.0
        self.machine = s.Session(IDENTITY, 0.0)
        if welcome:
            (hello,) = self.tick()
            assert self.hear(self.welcome(hello)) == []

    def welcome(self, hello: m.Hello, hub: bytes = HUB) -> m.Welcome:
        return m.Welcome(hub, 1.0, 15.0, hello.request_id)

    def _plain(self, effects: list[s.Effect]) -> list[object]:
        return [effect.message if isinstance(effect, s.Send) else effect for effect in effects]

    def tick(self, at: float | None = None) -> list[object]:
        self.now = self.now if at is None else at
        return self._plain(self.machine.handle(s.Tick(), self.now))

    def hear(self, message: m.HubMessage) -> list[object]:
        return self._plain(self.machine.handle(s.Heard(message), self.now))

    def ask(self, kind: type, *fields: object, deadline: float = 60.0, **options: object) -> int:
        """A question that is sent at once; its number."""
        number = self.machine.next_request_id()
        message = kind(number, *fields, **options)
        sent = self._plain(self.machine.handle(s.Ask(message, self.now + deadline), self.now))
        if self.machine._welcomed:
            assert [type(x) for x in sent] == [kind], sent
        else:
            assert sent == []
        return number

    def end_lease(self, request: int, shard: int | None = None, lost: bool = False) -> list[object]:
        return self._plain(self.machine.handle(m.Release(request, shard, lost), self.now))

    def acquire(self, *sources: bytes, deadline: float = 60.0, version: int = 0, round_: int = 0) -> int:
        """A lease on shard 0, 1, ... of version 1."""
        number = self.ask(m.Acquire, version, 0, (CHECKPOINT,), deadline, deadline=deadline)
        grants = tuple(grant(shard, session) for shard, session in enumerate(sources))
        reply = m.Granted(number, 1, CHECKPOINT, len(grants), grants, generation=round_)
        assert self.hear(reply) == [s.Answered(number, reply)]
        return number

    def publish(self, key: ShardKey) -> None:
        number = self.ask(m.Publish, holding(key))
        self.hear(m.Done(number))

    def restart_hub(self, hub: bytes = OTHER_HUB) -> m.Hello:
        """This hub says that it does not know us; the Hello that follows."""
        *settled, hello = self.hear(m.Unknown(hub))
        assert isinstance(hello, m.Hello) and all(isinstance(each, s.Answered) for each in settled)
        return hello


# --- hello ---


def test_it_says_hello_until_it_is_welcome_and_beats_from_then_on():
    story = Story(welcome=False)
    (first,) = story.tick(0.0)
    assert first == msgspec.structs.replace(IDENTITY, request_id=first.request_id, hub=b"") and first.request_id > 0
    assert story.tick(0.1) == [] and story.machine.next_deadline() == s.HELLO_EVERY_S
    (second,) = story.tick(s.HELLO_EVERY_S)
    assert second.request_id > first.request_id  # so that the hub can tell it from one that is late
    story.hear(story.welcome(first))
    (beat,) = story.tick(1.6)
    assert isinstance(beat, m.Heartbeat) and beat.hub == HUB and story.machine.next_deadline() == pytest.approx(2.6)
    assert story.tick(2.0) == []


def test_what_is_asked_before_the_welcome_is_sent_after_it():
    story = Story(welcome=False)
    (hello,) = story.tick(0.0)
    number = story.ask(m.Wait, 0, 3, 60.0)
    story.now = 10.0
    assert story.hear(story.welcome(hello)) == [m.Wait(number, 0, 3, 50.0)]  # with what is left of its deadline


def test_it_says_how_often_the_hub_was_restarted_lately():
    story = Story()
    for number in range(10):
        story.now += 30.0
        hub = bytes([number]) * 16
        hello = story.restart_hub(hub)
        assert hello.restarts == number
        story.hear(story.welcome(hello, hub))
    story.now += 500.0
    assert story.restart_hub(OTHER_HUB).restarts == 4  # of the last ten minutes


def test_a_welcome_of_another_time_is_no_welcome():
    story = Story()
    old = m.Welcome(HUB, 1.0, 15.0, 1)
    hello = story.restart_hub()
    assert story.hear(old) == [] and not story.machine._welcomed
    assert story.hear(story.welcome(hello, OTHER_HUB)) == [s.HubBack(True)]
    assert story.hear(story.welcome(hello, OTHER_HUB)) == []  # doubled


def test_what_the_next_hub_does_not_take_is_held_no_more_unless_it_is_asked_for_just_now():
    story = Story()
    for version in (1, 2):
        number = story.ask(m.Publish, m.Holding(ShardKey(version, CHECKPOINT), b"r" * 16, 1))
        story.hear(m.Done(number))
    story.ask(m.Publish, m.Holding(ShardKey(3, CHECKPOINT), b"r" * 16, 1))
    hello = story.restart_hub()
    refused = tuple((ShardKey(version, CHECKPOINT), "other bytes") for version in (1, 3, 9))
    effects = story.hear(msgspec.structs.replace(story.welcome(hello, OTHER_HUB), not_held=refused))
    assert s.Disowned(ShardKey(1, CHECKPOINT), "other bytes", True) in effects
    assert [effect for effect in effects if isinstance(effect, s.Disowned)] == effects[1:2]
    assert [key.version for key in story.machine.holdings] == [2, 3]


def test_a_hub_whose_place_another_had_taken_is_one_of_two():
    story = Story()
    for hub, former in ((OTHER_HUB, False), (HUB, True), (OTHER_HUB, True)):
        (hello,) = story.hear(m.Unknown(hub))
        assert story.hear(story.welcome(hello, hub)) == [s.HubBack(True, former)]


def test_unknown_twice_is_answered_once():
    story = Story()
    story.restart_hub()
    assert story.hear(m.Unknown(OTHER_HUB)) == []


def test_hello_names_the_hub_that_it_is_said_to():
    story = Story()
    old = story.restart_hub(HUB)  # it had given us up, and ends before it hears this
    assert old.hub == HUB
    (new,) = story.hear(m.Unknown(OTHER_HUB))
    assert new.hub == OTHER_HUB and new.request_id > old.request_id
    assert story.hear(story.welcome(old)) == [] and not story.machine._welcomed  # its last word, which comes late
    assert story.hear(story.welcome(new, OTHER_HUB)) == [s.HubBack(True)]


def test_a_hub_that_is_older_than_named_hellos_lets_us_in():
    story = Story()
    hello = story.restart_hub(OTHER_HUB)
    (other,) = story.hear(story.welcome(hello, b"3" * 16))  # a third one, which does not look whom we mean
    assert other.hub == b"3" * 16 and not story.machine._welcomed
    story.hear(story.welcome(other, b"3" * 16))
    assert story.machine._welcomed
    assert story.restart_hub(b"").hub == b""


# --- questions and answers ---


def test_an_answer_is_heard_once():
    story = Story()
    number = story.ask(m.AskVersions)
    reply = m.Versions(number, ())
    assert story.hear(reply) == [s.Answered(number, reply)]
    assert story.hear(reply) == []


def test_the_hub_is_told_what_is_open_and_asks_for_what_it_never_saw():
    story = Story()
    lost, lease = story.ask(m.AskVersions), story.acquire(SOURCE, OTHER_SOURCE)
    (beat,) = story.tick(1.0)
    assert (beat.pending, beat.leases, beat.last_request_id) == ((lost,), {lease: 2}, story.machine.last_request_id)
    assert story.hear(m.Alive((lost, 999))) == [m.AskVersions(lost)]


def test_deadlines_travel_as_seconds_that_are_left():
    story = Story()
    number = story.ask(m.Unpublish, (KEY,), 20.0, deadline=20.0)
    story.now = 15.0
    assert story.hear(m.Alive((number,))) == [m.Unpublish(number, (KEY,), 5.0)]
    story.now = 21.0
    assert story.hear(m.Alive((number,))) == [m.Unpublish(number, (KEY,), 0.0)]
    story = Story()
    number = story.ask(m.Wait, 0, 0, 1e12, deadline=1e12)
    assert story.hear(m.Alive((number,))) == [m.Wait(number, 0, 0, SECONDS_MAX)]


@pytest.mark.parametrize("heard_s_ago", [0.5, 30.0])
def test_a_question_without_an_answer_ends_a_little_after_its_deadline(heard_s_ago):
    story = Story()
    number = story.ask(m.AskVersions, deadline=30.0)
    end = 30.0 + s.ANSWER_MARGIN_S
    story.tick(end - 0.6)
    if heard_s_ago < 1:
        story.hear(m.Alive())
    assert story.machine.next_deadline() <= end
    assert s.Expired(number, heard_s_ago > 1, was_sent=True) in story.tick(end)
    assert story.hear(m.Versions(number, ())) == []  # too late
    assert all(not isinstance(x, s.Expired) for x in story.tick(end + 50))


def test_a_refused_hello_is_an_answer_to_no_question():
    story = Story(welcome=False)
    story.tick(0.0)
    refused = m.Refused(0, "UsageError", "no")
    assert story.hear(refused) == [s.Answered(0, refused)]


def test_silence_is_told_once_and_its_end():
    story = Story()
    silent = [x for at in (1, 3, 5, 5.1, 6, 9) for x in story.tick(at) if isinstance(x, s.HubAway)]
    assert len(silent) == 1 and silent[0].silent_s > s.HUB_SILENT_S
    assert story.hear(m.Alive()) == [s.HubBack(False)]
    assert story.hear(m.Alive()) == []


# --- what a hub that was restarted is told ---


def test_a_new_hub_is_told_all_there_is():
    story = Story()
    story.publish(KEY)
    retain = story.ask(m.Retain, 3)
    story.hear(m.Done(retain, 7))
    lease = story.acquire(SOURCE, round_=4)
    waiting = story.ask(m.Wait, 9, 0, 60.0)
    claimed = story.ask(m.Acquire, 1, 0, ("runtime:f", CHECKPOINT), 60.0, claim=True)
    story.hear(m.Granted(claimed, 1, CHECKPOINT, 1, (grant(0, OTHER_SOURCE),), RUNTIME_KEY))
    story.end_lease(claimed)
    story.hear(m.Alive((), DIRECTIVE))
    story.now = 20.0
    hello = story.restart_hub()
    assert hello == msgspec.structs.replace(
        IDENTITY,
        holdings=(holding(KEY),),
        leases=(m.HeldLease(lease, 1, CHECKPOINT, {0: SOURCE}, 40.0),),
        claims=(RUNTIME_KEY,),
        retain_newest=3,
        retain_serial=7,
        request_id=hello.request_id,
        pending=(waiting,),
        seen=1,
        resolved=1,
        generation=4,
        directive=DIRECTIVE,
        hub=OTHER_HUB,
        welcomed=HUB,
        heartbeat_s=1.0,
    )
    assert story.hear(story.welcome(hello, OTHER_HUB)) == [s.HubBack(True), m.Wait(waiting, 9, 0, 40.0)]


def test_what_changes_something_says_until_when_on_the_hubs_clock():
    """Which is no later than we think: its word took a second to get here. Afterwards it is not asked for any more."""
    story = Story(welcome=False)
    (hello,) = story.tick(0.0)
    story.now = 1.0
    story.hear(m.Welcome(HUB, 1.0, 15.0, hello.request_id, clock=500.0))
    number = story.machine.next_request_id()
    (sent,) = story.machine.handle(s.Ask(m.Pin(number, 1, 4.0), 5.0), 1.0)
    gives_up = 5.0 + s.ANSWER_MARGIN_S
    assert sent.message == m.Pin(number, 1, 4.0, until=m.Until(HUB, pytest.approx(499.0 + gives_up, abs=0.01)))
    slow_s = (gives_up - 1.0) * s.DRIFT_MAX  # by which the hub's clock may be behind ours then
    assert sent.message.until.clock <= 499.0 + gives_up - slow_s < 499.0 + gives_up
    story.hear(m.Alive(clock=501.5, hub=HUB))  # half a second sooner
    (again,) = story.hear(m.Alive((number,), clock=501.5, hub=HUB))
    assert again.until.clock == pytest.approx(sent.message.until.clock + 1.5, abs=0.01)
    story.hear(m.Alive(clock=9999.0, hub=OTHER_HUB))  # a former hub's, late
    (again,) = story.hear(m.Alive((number,)))
    assert again.until.clock < 600.0
    assert s.Expired(number, True, was_sent=True) in story.tick(gives_up + 1.0)
    assert story.hear(m.Alive((number,))) == [s.HubBack(False)]


def test_what_says_what_is_so_is_true_whenever_it_comes():
    story = Story()
    story.machine._hear_clock(HUB, 500.0, 0.0)
    story.publish(KEY)
    for message in (m.Abandon(50, KEY), m.Unpublish(51, (KEY,), 0.0, gone=True)):
        (sent,) = story.machine.handle(s.Ask(message, 5.0), 0.0)
        assert getattr(sent.message, "until", None) is None


def test_a_hello_brings_nothing_into_effect_that_was_given_up():
    """A Publish that is unanswered is in it, and until when; a Retain only when it was answered."""
    story = Story()
    story.publish(KEY)
    story.ask(m.Publish, holding(NEXT), deadline=5.0)
    story.ask(m.Retain, 3, deadline=5.0)
    (hello,) = story.hear(m.Unknown(OTHER_HUB, 700.0))
    assert hello.until == m.Until(OTHER_HUB, pytest.approx(705.0 + s.ANSWER_MARGIN_S, abs=0.01))
    assert [each.key for each in hello.holdings] == [KEY, NEXT] and hello.retain_newest is None
    story.tick(5.0 + s.ANSWER_MARGIN_S)
    hello = story.restart_hub(HUB)
    assert (hello.holdings, hello.until, hello.retain_newest) == ((holding(KEY),), None, None)


def test_nothing_is_sent_between_unknown_and_welcome():
    story = Story()
    lease = story.acquire(SOURCE)
    hello = story.restart_hub()
    number = story.ask(m.AskVersions)  # asserts that it sends nothing
    assert story.end_lease(lease) == [] and story.hear(m.Alive((number,))) == []
    assert story.hear(m.Versions(number, ())) == []  # to a question it cannot have heard
    assert story.hear(story.welcome(hello, OTHER_HUB)) == [s.HubBack(True), m.AskVersions(number)]


def test_what_is_over_is_not_told():
    story = Story()
    story.publish(KEY)
    number = story.ask(m.Unpublish, (KEY,), 5.0)
    story.hear(m.Unpublished(number))
    lease = story.acquire(SOURCE, OTHER_SOURCE)
    assert story.end_lease(lease, 0, True) == [m.Release(lease, 0, True)]
    assert list(story.restart_hub().leases[0].sources) == [1]
    story = Story()
    lease = story.acquire(SOURCE, OTHER_SOURCE)
    story.end_lease(lease, 0)
    story.end_lease(lease, 1)
    hello = story.restart_hub()
    assert (hello.holdings, hello.leases) == ((), ())


def test_a_lease_is_forgotten_after_its_deadline():
    story = Story()
    story.acquire(SOURCE, deadline=5.0)
    story.tick(5.0 + s.ANSWER_MARGIN_S)
    assert story.restart_hub().leases == ()


def test_a_hello_fits_whatever_the_deadlines_are():
    story = Story()
    story.acquire(SOURCE, deadline=1e15)
    hello = story.restart_hub()
    assert m.decode_from_client(m.encode(hello)) == hello


# --- acquire ---


def test_a_grant_of_a_former_hub_that_comes_late_is_no_answer():
    story = Story()
    number = story.ask(m.Acquire, 0, 0, (CHECKPOINT,), 60.0)
    grants = (grant(0, SOURCE),)
    hello = story.restart_hub()
    assert story.hear(story.welcome(hello, OTHER_HUB))[1:] == [m.Acquire(number, 0, 0, (CHECKPOINT,), 60.0)]
    assert story.hear(m.Granted(number, 1, CHECKPOINT, 1, grants, hub=HUB)) == []
    reply = m.Granted(number, 2, CHECKPOINT, 1, grants, hub=OTHER_HUB)
    assert story.hear(reply) == [s.Answered(number, reply)]


def test_an_attempt_of_a_former_hub_that_comes_late_is_no_answer():
    """The hub of now is asked again, and may begin the next one: who took the former one's would be superseded."""
    story = Story()
    number = story.ask(m.Begin, 5, 60.0, "word", deadline=60.0)
    hello = story.restart_hub()
    assert story.hear(story.welcome(hello, OTHER_HUB))[1:] == [m.Begin(number, 5, 60.0, "word")]
    assert story.hear(m.Begun(number, Attempt(0, 5, b"former"), HUB)) == []
    reply = m.Begun(number, Attempt(1, 5, b"newer"), OTHER_HUB)
    assert s.Answered(number, reply) in story.hear(reply) and story.machine.mark == b"newer"


def test_a_grant_that_nobody_waits_for_is_given_back_with_its_claim():
    story = Story()
    number = story.ask(m.Acquire, 1, 0, ("runtime:f", CHECKPOINT), 60.0, claim=True)
    assert story.end_lease(number) == [m.Release(number)]
    granted = m.Granted(number, 1, CHECKPOINT, 1, (grant(0, SOURCE),), RUNTIME_KEY)
    release, abandon = story.hear(granted)
    assert release == m.Release(number) and isinstance(abandon, m.Abandon) and abandon.key == RUNTIME_KEY
    assert story.restart_hub().claims == ()


def test_a_doubled_grant_changes_nothing():
    story = Story()
    number = story.acquire(SOURCE)
    assert story.hear(m.Granted(number, 1, CHECKPOINT, 1, (grant(0, SOURCE),))) == []
    assert len(story.restart_hub().leases) == 1


def test_a_claim_ends_with_its_publication_or_when_it_is_abandoned():
    for kind, field in ((m.Publish, holding(RUNTIME_KEY)), (m.Abandon, RUNTIME_KEY)):
        story = Story()
        number = story.ask(m.Acquire, 1, 0, ("runtime:f", CHECKPOINT), 60.0, claim=True)
        is_read = kind is m.Publish  # by others, as the hub says
        story.hear(m.Granted(number, 1, CHECKPOINT, 1, (grant(0, SOURCE),), RUNTIME_KEY, awaited=is_read))
        assert story.machine.claims == {RUNTIME_KEY: is_read}
        story.hear(m.Done(story.ask(kind, field)))
        assert story.machine.claims == {}


def test_latest_is_remembered_for_the_other_shards_of_the_replica():
    story = Story()
    story.acquire(SOURCE, version=1)
    assert (story.machine.seen, story.machine.resolved, story.machine.generation) == (1, 0, 0)
    story.acquire(SOURCE, round_=2)
    story.acquire(SOURCE, version=1)  # by name, and not what its replica's last round came to
    number = story.ask(m.Wait, 0, 0, 5.0)
    story.hear(m.Visible(number, 7))
    hello = story.restart_hub()
    assert (hello.seen, hello.resolved, hello.generation) == (7, 1, 2)


# --- publish and unpublish ---


def test_a_refused_publish_is_forgotten():
    story = Story()
    number = story.ask(m.Publish, holding(KEY))
    story.hear(m.Refused(number, "UsageError", "other bytes"))
    assert story.restart_hub().holdings == ()


def test_a_publish_that_is_not_answered_in_time_is_taken_back_until_the_hub_has_heard():
    story = Story()
    number = story.ask(m.Publish, holding(KEY), deadline=5.0)
    taken_back, *rest = story.tick(5.0 + s.ANSWER_MARGIN_S)
    assert isinstance(taken_back, m.Unpublish) and taken_back.gone and taken_back.keys == (KEY,)
    assert s.Expired(number, True, was_sent=True) in rest
    assert story.tick(1e6) != [] and taken_back.request_id in story.machine.asked  # it is never given up
    hello = story.restart_hub()
    assert hello.holdings == hello.pending == ()  # which takes it back as well


def test_what_was_read_stays_announced_however_long_the_hub_is_away():
    """It arrives (incomplete), is complete, and no hub answers: the shard is here, whatever its first deadline was."""
    story = Story()
    story.ask(m.Publish, holding(KEY, False), deadline=5.0)
    story.ask(m.Publish, holding(KEY, True), deadline=float("inf"))
    story.tick(1000.0)
    assert story.restart_hub().holdings == (holding(KEY, True),)


def test_unpublish_waits_for_the_publish_it_would_overtake():
    story = Story()
    publish = story.ask(m.Publish, holding(KEY))
    unpublish = story.machine.next_request_id()
    assert story.machine.handle(s.Ask(m.Unpublish(unpublish, (KEY,), 5.0), 5.0), 0.0) == []
    done = m.Done(publish)
    assert story.hear(done) == [s.Answered(publish, done), m.Unpublish(unpublish, (KEY,), 5.0)]


def test_what_is_gone_answers_for_its_own_publish():
    story = Story()
    publish = story.ask(m.Publish, holding(KEY, False))
    gone = story.machine.next_request_id()
    effects = story.machine.handle(s.Ask(m.Unpublish(gone, (KEY,), 0.0, gone=True), 0.0), 0.0)
    assert effects == [s.Answered(publish, m.Done(publish)), s.Send(m.Unpublish(gone, (KEY,), SECONDS_MAX, True))]
    assert story.restart_hub().holdings == ()


def test_a_shard_that_is_read_again_between_two_answers_stays_announced():
    story = Story()
    story.publish(KEY)
    first, second = story.ask(m.Unpublish, (KEY,), 5.0), story.ask(m.Unpublish, (KEY,), 5.0)
    story.hear(m.Unpublished(first))
    assert story.machine.holdings == {}
    story.publish(KEY)
    story.hear(m.Unpublished(second))
    assert list(story.machine.holdings) == [KEY]
    third = story.ask(m.Unpublish, (KEY,), 5.0)  # the control: one that means this offering
    story.hear(m.Unpublished(third))
    assert story.machine.holdings == story.machine.offered == {}


@pytest.mark.parametrize("gone", [True, False])
def test_an_unpublish_before_a_hello_does_not_take_back_what_is_offered_anew(gone: bool):
    """A new hub takes all that the Hello holds as older than the Unpublish, which is sent to it again."""
    story = Story()
    story.publish(KEY)
    story.publish(NEXT)
    first = story.ask(m.Unpublish, (KEY,), 5.0)
    second = story.ask(m.Unpublish, (KEY, NEXT) if not gone else (KEY,), 5.0, gone=gone)
    story.hear(m.Unpublished(first))
    story.publish(KEY)
    effects = story.machine.handle(s.Heard(m.Unknown(OTHER_HUB)), story.now)
    (hello,) = (effect.message for effect in effects if isinstance(effect, s.Send))
    assert {held.key for held in hello.holdings} == {KEY, NEXT}
    again = story.hear(story.welcome(hello, OTHER_HUB))
    if gone:
        assert hello.pending == () and effects[0] == s.Answered(second, m.Unpublished(second))
        assert again == [s.HubBack(True)]
    else:
        assert hello.pending == (second,) and again == [s.HubBack(True), m.Unpublish(second, (NEXT,), 60.0)]


def test_a_kept_copy_stays_announced_until_it_may_be_dropped():
    story = Story()
    story.publish(KEY)
    number = story.ask(m.Unpublish, (KEY,), 5.0)
    story.hear(m.Unpublished(number, (), True))
    assert story.restart_hub().holdings == (holding(KEY),)
    story = Story()
    story.publish(KEY)
    assert story.hear(m.MayRelease((KEY,))) == []  # it is not kept: nobody asked to give it up
    number = story.ask(m.Unpublish, (KEY,), 5.0)
    story.hear(m.Unpublished(number, (), True))
    assert story.hear(m.MayRelease((KEY, NEXT))) == [s.MayRelease((KEY,))]
    number = story.ask(m.Unpublish, (KEY,), 5.0)
    story.hear(m.Unpublished(number))
    assert story.hear(m.MayRelease((KEY,))) == [] and story.machine.holdings == {}


def test_an_unpublish_without_an_answer_keeps_the_copy_and_is_tried_again():
    """It may be the last copy: only the hub can say."""
    story = Story()
    story.publish(KEY)
    number = story.ask(m.Unpublish, (KEY,), 5.0, deadline=5.0)
    assert s.Expired(number, True, was_sent=True) in story.tick(5.0 + s.ANSWER_MARGIN_S)
    assert story.machine.holdings == {KEY: holding(KEY)} and story.machine.retained == {KEY}
    hello = story.restart_hub()
    assert hello.holdings == (holding(KEY),)
    assert story.hear(story.welcome(hello, OTHER_HUB)) == [s.HubBack(True)]
    assert story.hear(m.Alive()) == [s.MayRelease((KEY,))]
    assert story.hear(m.Alive()) == []


def test_a_source_that_is_gone_is_passed_on():
    assert Story().hear(m.SourceGone(SOURCE)) == [s.SourceGone(SOURCE)]


def test_what_is_read_is_said_with_the_next_heartbeat():
    story = Story()
    number = story.acquire(SOURCE)
    (first,) = (x for x in story.tick(1.0) if isinstance(x, m.Heartbeat))
    story.machine.renew({number: 0, 77: 0})  # its source waits
    (second,) = (x for x in story.tick(2.0) if isinstance(x, m.Heartbeat))
    (third,) = (x for x in story.tick(3.0) if isinstance(x, m.Heartbeat))
    story.machine.renew({number: 5_000})
    (fourth,) = (x for x in story.tick(4.0) if isinstance(x, m.Heartbeat))
    said = [beat.progress for beat in (first, second, third, fourth)]
    assert said == [{number: 0}, {number: 1}, {number: 1}, {number: 5_000}]


# --- what operators decide ---


def test_a_directive_is_told_once_and_kept():
    story = Story()
    assert story.hear(m.Alive((), DIRECTIVE)) == [s.Directed(DIRECTIVE)]
    assert story.hear(m.Alive((), DIRECTIVE)) == []
    assert story.restart_hub().directive == DIRECTIVE
    beats = [x for x in story.tick(1.0) if isinstance(x, m.Heartbeat)]
    assert beats == []  # not welcome yet
    story = Story()
    story.hear(m.Alive((), DIRECTIVE))
    (beat,) = story.tick(1.0)
    assert isinstance(beat, m.Heartbeat) and beat.directive_checksum == directive_checksum(DIRECTIVE)


def test_a_directive_comes_with_the_welcome():
    story = Story(welcome=False)
    (hello,) = story.tick()
    welcome = msgspec.structs.replace(story.welcome(hello), directive=DIRECTIVE)
    assert story.hear(welcome) == [s.Directed(DIRECTIVE)] and story.machine.directive == DIRECTIVE


def test_a_hub_that_knows_less_is_told():
    story = Story()
    story.hear(m.Alive((), DIRECTIVE))
    (hello,) = story.hear(m.Alive((), Directive(2, 9, ())))
    assert isinstance(hello, m.Hello) and hello.directive == DIRECTIVE
    assert story.hear(m.Alive((), Directive(2, 9, ()))) == []  # it is on its way


def test_directives_merge_alike_whatever_their_order():
    some: list[Directive] = [
        NO_DIRECTIVE,
        Directive(1, 2, ()),
        Directive(2, 0, (2,)),
        Directive(2, 3, (1,)),  # of a hub that had not heard of the one above
        Directive(3, 2, (5,)),
        Directive(0, 0, tuple(range(10, 10 + WITHDRAWN_MAX))),
    ]
    for one in some[:-1]:
        for other in some:
            both = merge(one, other)
            assert both == merge(other, one) == merge(both, one) == merge(both, other)
            assert both.pin not in both.withdrawn and len(both.withdrawn) <= WITHDRAWN_MAX
            for third in some[:-1]:  # while none is forgotten
                if other is not some[-1]:
                    assert merge(both, third) == merge(one, merge(other, third))
    assert merge(some[2], some[3]) == Directive(2, 3, (1, 2))
    assert merge(some[3], some[4]) == Directive(3, 2, (1, 5))
    assert merge(some[2], some[4]) == Directive(3, 0, (2, 5))  # a withdrawn version is not pinned


@pytest.mark.parametrize("kind", [m.Pin, m.Withdraw])
def test_an_operators_request_travels_with_the_seconds_that_are_left(kind):
    story = Story()
    number = story.ask(kind, 3, 60.0)
    story.now = 20.0
    hello = story.restart_hub()
    assert story.hear(story.welcome(hello, OTHER_HUB)) == [s.HubBack(True), kind(number, 3, 40.0)]
