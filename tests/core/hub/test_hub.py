"""Sessions, restarts of the hub and deadlines (rules 5 and 6) as stories."""

from __future__ import annotations

import pytest
from hub_scenarios import LIMITS, RUNTIME, Scenario, source_of

from tensorhub_plugins.core.hub.hub import Tick
from tensorhub_plugins.core.hub.report import report, validate
from tensorhub_plugins.core.hub.state import GroupResolution
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.protocol.directive import NO_DIRECTIVE
from tensorhub_plugins.core.types import CHECKPOINT, Location, ShardKey


@pytest.fixture
def scenario() -> Scenario:
    return Scenario()


# --- rule 6: a restarted hub ---


def test_a_restarted_hub_is_rebuilt_by_hello_and_waits_before_it_decides() -> None:
    scenario = Scenario(recovering=True)
    key = ShardKey(7, CHECKPOINT)
    held = m.Holding(key, b"7" * 16, 100)
    scenario.join("trainer/0", holdings=(held,))
    scenario.unpublish("trainer/0", 7)
    assert scenario.heard("trainer/0") == []  # a reader may still have to say that it reads
    lease = m.HeldLease(3, 7, CHECKPOINT, {0: scenario.sessions["trainer/0"]}, 60.0)
    scenario.join("rollout/0", leases=(lease,), request_id=3)
    scenario.join("peer/0", holdings=(m.Holding(key, b"7" * 16, 100, True, "replicated"),))
    scenario.wait(LIMITS.grace_s + 1)
    assert scenario.heard("trainer/0") == []
    scenario.requests["rollout/0"] = 3
    scenario.tell("rollout/0", m.Release(3))
    assert scenario.heard("trainer/0") == ["unpublished"]


@pytest.mark.parametrize("timeout_s", [0.0, LIMITS.grace_s / 2, LIMITS.grace_s + 5.0])
def test_a_recovering_hub_confirms_no_unpublish_not_even_at_its_deadline(timeout_s: float) -> None:
    """How many versions are retained is not known before all workers were heard. The control: after that it is."""
    scenario = Scenario(recovering=True)
    scenario.join("trainer/0")
    for version in (1, 2):
        scenario.publish("trainer/0", version)
    scenario.unpublish("trainer/0", 1, timeout_s=timeout_s)
    scenario.wait(min(timeout_s, LIMITS.grace_s - 0.5))
    assert scenario.heard("trainer/0") == ([] if timeout_s > LIMITS.grace_s else ["keep it"])
    scenario.wait(LIMITS.grace_s + 6.0)
    scenario.unpublish("trainer/0", 1)
    assert scenario.heard("trainer/0")[-1] == "unpublished"


@pytest.mark.parametrize("notices", [True, False], ids=["it notices", "the control"])
def test_nobody_is_given_up_for_the_time_in_which_the_hub_stood_still(scenario: Scenario, notices: bool) -> None:
    """A read goes on meanwhile; what its worker and the source have said lies in buffers yet."""
    scenario.join("trainer/0")
    scenario.publish("trainer/0", 7)
    scenario.join("rollout/0")
    number = scenario.acquire("rollout/0", timeout_s=600.0)
    for stop_s in (LIMITS.session_timeout_s - 1.0, LIMITS.lease_idle_s):
        scenario.now += stop_s
        scenario._deliver(Tick(stop_s if notices else 0.0))
    lives = {worker.name for worker in scenario.hub.workers.values() if number in worker.leases or worker.holdings}
    assert lives == ({"trainer/0", "rollout/0"} if notices else set())
    scenario.silent = ("trainer/0", "rollout/0")
    scenario.wait(LIMITS.session_timeout_s + 1.0)
    assert not scenario.hub.workers  # they are given up for the time in which it listened


def test_a_former_life_that_gives_up_the_last_copy_at_a_new_hub_is_answered_all_the_same() -> None:
    """Its next life says Hello meanwhile. The request was dropped, the copy counted as leaving for ever after, and its
    version as lost when the hub began to decide."""
    scenario = Scenario(recovering=True)
    scenario.join("trainer/0")
    scenario.publish("trainer/0", 1)
    scenario.unpublish("trainer/0", 1, timeout_s=1.0)
    scenario.sessions["former"] = scenario.sessions.pop("trainer/0")
    scenario.sessions["trainer/0"] = b"another".ljust(16)
    scenario.join("trainer/0")
    scenario.wait(LIMITS.grace_s + 0.5)
    assert "keep it" in scenario.heard("former")
    assert not [line for line in scenario.logged if "is lost" in line]
    scenario.join("reader/0")
    scenario.acquire("reader/0", 1)
    assert scenario.heard("reader/0") == ["read 1 checkpoint 0<-trainer/0"]


def test_what_is_heard_after_the_grace_and_before_a_tick_loses_no_retained_version() -> None:
    """A hub that was stopped in its grace hears first. The last copy that was to be given up counted as gone before
    anybody had asked whether it has to stay."""
    scenario = Scenario(recovering=True)
    scenario.join("trainer/0", holdings=(m.Holding(ShardKey(7, CHECKPOINT), b"7" * 16, 100),))
    scenario.unpublish("trainer/0", 7)
    scenario.now = LIMITS.grace_s + 0.1
    scenario.join("rollout/0")
    scenario.acquire("rollout/0")
    assert scenario.heard("trainer/0") == ["keep it"]
    assert scenario.heard("rollout/0") == ["read 7 checkpoint 0<-trainer/0"]


def test_a_restarted_hub_does_not_lend_what_hangs_on_somebody_it_has_not_heard_of() -> None:
    """reader/0 is read from by stranger/0, which is read from by middle/0; only the last of these is known."""
    scenario = Scenario(recovering=True)
    key, root = ShardKey(2, CHECKPOINT), b"2" * 16
    scenario.join("trainer/0", holdings=(m.Holding(key, root, 100),))
    for shard in ("middle/0", "reader/0"):
        lease = m.HeldLease(3, 2, CHECKPOINT, {0: b"stranger/0......"}, 60.0)
        scenario.join(
            shard,
            holdings=(m.Holding(key, root, 100, False, "replicated"),),
            request_id=3,
            leases=(lease,) * (shard[0] == "m"),
        )
        scenario.requests[shard] = 3
    scenario.acquire("reader/0", version=2, avoid=(scenario.sessions["trainer/0"],))
    assert source_of(scenario, "reader/0") == "trainer/0"
    scenario.tell("reader/0", m.Release(scenario.requests["reader/0"]))
    scenario.join(
        "stranger/0", holdings=(m.Holding(key, root, 100, False, "replicated"),)
    )  # it reads from nobody any more
    scenario.acquire("reader/0", version=2, avoid=(scenario.sessions["trainer/0"],))
    assert source_of(scenario, "reader/0") in ("middle/0", "stranger/0")


def test_a_recovering_hub_neither_declares_a_version_gone_nor_elects_a_converter() -> None:
    scenario = Scenario(recovering=True)
    scenario.join("trainer/0", holdings=(m.Holding(ShardKey(2, CHECKPOINT), b"2" * 16, 100),))
    scenario.join("a/0")
    scenario.acquire("a/0", version=1)
    scenario.acquire("a/0", version=2, layouts=(RUNTIME, CHECKPOINT), claim=True)
    assert scenario.heard("a/0") == []
    scenario.wait(LIMITS.grace_s + 0.5)
    assert sorted(scenario.heard("a/0")) == [f"read 2 {CHECKPOINT} 0<-trainer/0 and convert", "refused VersionGone"]


@pytest.mark.parametrize(("round_of_the_other", "text"), [(6, "read 3"), (7, "read 4")], ids=["behind", "beside"])
def test_a_restarted_hub_knows_who_has_had_the_answer_of_a_round(round_of_the_other: int, text: str) -> None:
    """Both have read version 3 as the latest before; which of them did so again in round 7 only its number tells."""
    scenario = Scenario(recovering=True)
    for version in (3, 4):
        scenario.join(f"trainer-{version}/0", 2, holdings=(_half(version, 0),))
        scenario.join(f"trainer-{version}/1", 2, holdings=(_half(version, 1),))
    scenario.join("rollout/0", 2, resolved=3, generation=7)
    scenario.join("rollout/1", 2, resolved=3, generation=round_of_the_other)
    scenario.acquire("rollout/1", layouts=(RUNTIME,))
    assert scenario.heard("rollout/1")[0].startswith(text)
    scenario.acquire("rollout/0", layouts=(RUNTIME,))
    assert scenario.heard("rollout/0")[0].startswith("read 4")


@pytest.mark.parametrize("meanwhile", [False, True])
def test_who_cannot_follow_its_group_hears_it_however_often_it_asks(meanwhile: bool) -> None:
    """Seed 8159: its refusal was lost while it was away, and asked again it had another version than the rest."""
    scenario = Scenario()
    for shard in ("0", "1"):
        scenario.join(f"trainer/{shard}", 2)
        scenario.join(f"rollout/{shard}", 2)
    for version in (1, 2):
        scenario.publish("trainer/0", version)
        scenario.publish("trainer/1", version)
        if version == 1:
            scenario.acquire("rollout/0", layouts=(CHECKPOINT,))
            scenario.say("rollout/0", m.Release)
    for shard in ("0", "1"):
        scenario.unpublish(f"trainer/{shard}", 1)
    lost = m.Acquire(scenario.acquire("rollout/1"), 0, 0, (CHECKPOINT,), 60.0)
    scenario.silent = ("rollout/1",)
    scenario.wait(LIMITS.session_timeout_s + 1.0)
    assert scenario.heard("rollout/1") == ["refused VersionGone"]
    assert scenario.sessions["rollout/1"] not in scenario.hub.registry.workers
    scenario.join("rollout/1", 2, request_id=2, pending=(1,), hub=scenario.hub.session)
    if meanwhile:  # what the others agree on before it comes again stays
        scenario.acquire("rollout/0", layouts=(CHECKPOINT,))
        assert scenario.heard("rollout/0")[-1].startswith("read 2")
    scenario.tell("rollout/1", lost)
    assert scenario.heard("rollout/1") == ["refused VersionGone"]
    scenario.publish("trainer/0", 3)
    scenario.publish("trainer/1", 3)
    scenario.requests["rollout/1"] = 2
    scenario.acquire("rollout/1")  # the control: it asks anew
    assert scenario.heard("rollout/1")[0].startswith("read 2" if meanwhile else "read 3")


def test_a_session_remembers_the_last_request_that_was_refused() -> None:
    group = GroupResolution()
    for session, request_id in ((b"s", 10), (b"s", 8)):
        group.refuse(1, session, request_id)
    assert group.has_refused(1, b"s", 10) and not group.has_refused(1, b"s", 11)
    group.refuse(1, b"t", 2)
    assert group.has_refused(1, b"t", 2) and not group.has_refused(1, b"s", 10)


def a_hub_that_knows_two_versions_and_a_reader() -> Scenario:
    scenario = Scenario(recovering=True)
    for version in (3, 4):
        scenario.join(f"trainer-{version}/0", 2, holdings=(_half(version, 0),))
        scenario.join(f"trainer-{version}/1", 2, holdings=(_half(version, 1),))
    scenario.join("rollout/0", 2, resolved=3, generation=7)
    return scenario


@pytest.mark.parametrize(("newer", "text"), [(True, "read 4"), (False, "read 3")], ids=["newer", "late"])
def test_a_hello_after_a_late_one_says_in_which_round_it_was_answered(newer: bool, text: str) -> None:
    """Seed 1205: of a worker that names no hub, a restarted one may hear an old Hello first."""
    scenario = a_hub_that_knows_two_versions_and_a_reader()
    scenario.join("rollout/1", 2, resolved=3, generation=6, request_id=10)
    scenario.join("rollout/1", 2, resolved=3, generation=7, request_id=11 if newer else 9)
    scenario.requests["rollout/1"] = 11
    scenario.acquire("rollout/1", layouts=(RUNTIME,))
    assert scenario.heard("rollout/1")[0].startswith(text)


def test_a_hello_to_a_former_hub_is_not_believed() -> None:
    """Seed 7282: until its newer Hello came, the late one spoke for a shard that had been answered since."""
    scenario = a_hub_that_knows_two_versions_and_a_reader()
    scenario.join("rollout/1", 2, resolved=3, generation=6, request_id=10, hub=b"F" * 16)
    assert scenario.heard("rollout/1") == ["Unknown"]
    scenario.requests["rollout/1"] = 10
    scenario.acquire("rollout/1", layouts=(RUNTIME,))
    scenario.acquire("rollout/0", layouts=(RUNTIME,))
    assert (scenario.heard("rollout/1"), scenario.heard("rollout/0")) == (["Unknown"], [])  # one shard is missing
    scenario.join("rollout/1", 2, resolved=3, generation=7, request_id=12, pending=(11,), hub=scenario.hub.session)
    scenario.requests["rollout/1"] = 10
    scenario.acquire("rollout/1", layouts=(RUNTIME,))
    for reader in ("rollout/0", "rollout/1"):
        assert scenario.heard(reader)[0].startswith("read 4")


def test_the_first_hello_of_a_worker_is_believed_if_it_cannot_be_wrong() -> None:
    scenario = Scenario()
    scenario.join("trainer/0", hub=b"")
    assert [type(message) for message in scenario.inbox["trainer/0"]] == [m.Welcome]
    scenario.join("half/0", 2, hub=b"")  # "latest" depends on what its group was told
    scenario.join("late/0", hub=b"", holdings=(_half(3, 0),))
    assert (scenario.heard("half/0"), scenario.heard("late/0")) == (["Unknown"], ["Unknown"])
    scenario.join("half/0", 2, hub=scenario.hub.session, request_id=1)
    scenario.join("half/0", 2, hub=b"F" * 16, request_id=1)  # late, and known to be
    assert scenario.heard("half/0") == []


def _half(version: int, shard: int) -> m.Holding:
    return m.Holding(ShardKey(version, RUNTIME, shard, 2), f"{version}/{shard}".encode().ljust(16, b"-"), 100)


def test_an_unknown_worker_is_asked_who_it_is(scenario: Scenario) -> None:
    scenario.sessions["stranger/0"] = b"s" * 16
    scenario.tell("stranger/0", m.Heartbeat(scenario.hub.session))
    assert scenario.heard("stranger/0") == ["Unknown"]


def test_old_words_that_arrive_late_do_not_bring_back_what_is_over() -> None:
    scenario = Scenario()
    scenario.join("trainer/0", request_id=5)
    scenario.requests["trainer/0"] = 2
    scenario.publish("trainer/0", 1)  # request 3, from before the Hello that knows of 5 requests and waits for none
    assert scenario.hub.registry.histories["run", "actor"].versions == {}
    scenario.requests["trainer/0"] = 5
    scenario.publish("trainer/0", 1)
    assert 1 in scenario.hub.registry.histories["run", "actor"].versions


def test_a_repeated_request_gets_the_same_answer_and_no_second_lease(scenario: Scenario) -> None:
    scenario.join("trainer/0")
    scenario.join("rollout/0")
    scenario.publish("trainer/0", 1)
    scenario.acquire("rollout/0")
    scenario.requests["rollout/0"] -= 1
    scenario.acquire("rollout/0")
    first, second = scenario.heard("rollout/0")
    assert first == second
    assert len(report(scenario.hub.registry, scenario.now)["models"][0]["leases"]) == 1


# --- rule 5: every request ends ---


def test_every_pending_request_ends_in_an_answer(scenario: Scenario) -> None:
    scenario.join("trainer/0")
    scenario.publish("trainer/0", 1, RUNTIME)
    scenario.join("rollout/0")
    scenario.say("rollout/0", m.Wait, version=9, newer_than=0, timeout_s=5.0)
    scenario.acquire("rollout/0", version=9, timeout_s=5.0)
    scenario.acquire("rollout/0", version=1, timeout_s=5.0)  # there, but not in a layout that it can read
    scenario.wait(6)
    assert scenario.heard("rollout/0") == ["refused NotPublished", "refused NotPublished", "refused DeadlineExceeded"]
    assert scenario.hub.registry.histories["run", "actor"].waiting == {}


def test_a_heartbeat_that_does_not_name_a_request_for_sources_ends_it(scenario: Scenario) -> None:
    """Its worker has given it up between its Hello, which named it, and the Welcome: it says no Release then."""
    scenario.join("trainer/0")
    scenario.join("rollout/0")
    wanted, given_up = (scenario.acquire("rollout/0", version=9) for _ in range(2))
    scenario.join("rollout/0", request_id=3, pending=(wanted, given_up))
    late = m.Heartbeat(scenario.hub.session, last_request_id=wanted, pending=(wanted,))  # was sent before: says nothing
    for beat, waiting in ((late, [wanted, given_up]), (m.Heartbeat(scenario.hub.session, 3, (wanted,)), [wanted])):
        scenario.tell("rollout/0", beat)
        history = scenario.hub.registry.histories["run", "actor"]
        assert [number for _, number in history.waiting] == waiting


def test_validate_notices_a_broken_state(scenario: Scenario) -> None:
    """The negative control of every test here: the invariants are not empty words."""
    scenario.join("trainer/0")
    scenario.publish("trainer/0", 1)
    scenario.hub.registry.workers[scenario.sessions["trainer/0"]].holdings.clear()
    with pytest.raises(AssertionError):
        validate(scenario.hub.registry)


def test_a_deadline_is_kept_to_the_millisecond(scenario: Scenario) -> None:
    """The shell asks next_deadline when to come back."""
    scenario._deliver(Tick())  # the end of its recovery is behind us
    scenario.join("a/0")
    scenario.say("a/0", m.Wait, version=9, newer_than=0, timeout_s=0.123)
    assert 0.12 < scenario.hub.next_deadline(scenario.now) - scenario.now < 0.13
    scenario.now += 0.123
    scenario._deliver(Tick())
    assert scenario.heard("a/0") == ["refused NotPublished"]


def test_a_version_for_which_many_wait_keeps_no_message_waiting(scenario: Scenario) -> None:
    """As for tens of thousands, which would take a second."""
    scenario.hub.tries_max = 3
    waiting = [f"rollout-{number}/0" for number in range(8)]
    scenario.join_all("trainer/0", *waiting)
    for worker in waiting:
        scenario.say(worker, m.Wait, version=0, newer_than=0, timeout_s=60.0)
    assert scenario.hub.next_deadline(scenario.now) > scenario.now
    answered = []
    scenario.publish("trainer/0", 1)
    while True:
        answered.append([worker for worker in waiting if scenario.heard(worker) == ["visible 1"]])
        if scenario.hub.next_deadline(scenario.now) > scenario.now:
            break
        scenario.say("trainer/0", m.AskVersions)
        assert scenario.heard("trainer/0") == ["Versions"]
    assert answered == [waiting[:3], waiting[3:6], waiting[6:]]


def test_an_unpublish_and_the_loss_of_a_version_wait_for_no_reader(scenario: Scenario) -> None:
    scenario.hub.tries_max = 1
    readers = [f"rollout-{number}/0" for number in range(4)]
    scenario.join_all("trainer/0", "trainer-2/0", *readers)
    scenario.publish("trainer/0", 1)
    for worker in readers:
        scenario.acquire(worker, 2)
    scenario.publish("trainer-2/0", 2)
    assert scenario.heard(readers[0]) == ["read 2 checkpoint 0<-trainer-2/0"] and not scenario.heard(readers[1])
    scenario.unpublish("trainer/0", 1)
    assert scenario.heard("trainer/0") == ["unpublished"] and scenario.hub.next_deadline(scenario.now) == scenario.now
    scenario.tell("trainer-2/0", m.Bye())
    assert any("version 2 is lost with its last holder" in line for line in scenario.logged)


def test_readers_are_told_when_their_source_is_given_up(scenario: Scenario) -> None:
    scenario.join_all("trainer/0", "rollout/0")
    scenario.publish("trainer/0", 1)
    scenario.acquire("rollout/0")
    scenario.heard("rollout/0")
    scenario.silent = ("trainer/0",)
    scenario.wait(LIMITS.session_timeout_s + 1)
    assert scenario.heard("rollout/0") == ["gone trainer/0"]
    assert any("version 1 is lost with its last holder" in line for line in scenario.logged)


@pytest.mark.parametrize(
    "other",
    [
        {"worker": "other/0"},
        {"worker": "trainer/1", "shard_count": 2},
        {"worker": "trainer/0", "location": Location(data_center="far")},
        {"worker": "trainer/0", "run": "another"},
        {"worker": "trainer/0", "endpoints": {"tcp": "tcp://1.2.3.4:5"}},
    ],
    ids=["replica", "shard", "location", "run", "endpoints"],
)
def test_a_session_stays_the_worker_that_it_was(scenario: Scenario, other: dict[str, object]) -> None:
    scenario.join("trainer/0")
    scenario.publish("trainer/0", 1)
    (trainer,) = scenario.hub.registry.workers.values()
    replica, shard = str(other.pop("worker")).split("/")
    said = {"run": "run", "model": "actor", "shard_count": 1, "location": Location(), "endpoints": {"tcp": "trainer/0"}}
    hello = m.Hello(replica=replica, shard=int(shard), request_id=9, **{**said, **other})
    scenario.tell("trainer/0", hello)
    assert scenario.heard("trainer/0") == ["refused UsageError"]
    assert any("this session is trainer/0 of run/actor, and stays that" in line for line in scenario.logged)
    assert list(scenario.hub.registry.workers.values()) == [trainer] and list(trainer.holdings) == [_whole(1)]
    scenario.join("trainer/0", request_id=10, holdings=tuple(_held(scenario)))  # the control: itself
    assert any(isinstance(message, m.Welcome) for message in scenario.inbox["trainer/0"])


def _whole(version: int) -> ShardKey:
    return ShardKey(version, CHECKPOINT)


def _held(scenario: Scenario) -> list[m.Holding]:
    (worker,) = scenario.hub.registry.workers.values()
    return [m.Holding(h.key, h.root, h.size_bytes) for h in worker.holdings.values()]


def test_a_shard_that_is_given_up_twice_in_one_request_is_given_up(scenario: Scenario) -> None:
    scenario.join("trainer/0")
    for version in (1, 2):
        scenario.publish("trainer/0", version)
    key = ShardKey(1, CHECKPOINT)
    scenario.say("trainer/0", m.Unpublish, keys=(key, key), timeout_s=5.0)
    assert scenario.heard("trainer/0") == ["unpublished"]
    assert [held.version for worker in scenario.hub.registry.workers.values() for held in worker.holdings] == [2]


# --- rule 7: what was given up ---


def until(scenario: Scenario, seconds: float) -> m.Until:
    return m.Until(scenario.hub.session, scenario.now + seconds)


@pytest.mark.parametrize("hub", [b"H" * 16, b"of before"], ids=["too late", "said to another hub"])
def test_what_was_given_up_is_dropped_and_not_for_good(scenario: Scenario, hub: bytes) -> None:
    """Who has not given up, and thinks the hub's clock earlier than it is, is told to ask again."""
    scenario.join("trainer/0")
    scenario.publish("trainer/0", 1)
    scenario.inbox.clear()
    over = m.Until(hub, scenario.now + (-0.1 if hub == scenario.hub.session else 1e6))
    held = m.Holding(ShardKey(2, CHECKPOINT), b"2" * 16, 100)
    messages: dict[type, dict[str, object]] = {
        m.Publish: {"holding": held},
        m.Unpublish: {"keys": (ShardKey(1, CHECKPOINT),), "timeout_s": 1.0},
        m.Acquire: {"version": 1, "at_least": 0, "layouts": (CHECKPOINT,), "timeout_s": 1.0},
        m.Pin: {"version": 1, "timeout_s": 1.0},
        m.Withdraw: {"version": 1, "timeout_s": 1.0},
        m.Retain: {"newest": 5},
        m.Begin: {"step": 0, "timeout_s": 1.0},
    }
    assert set(messages) == set(m.Dated.__args__)
    before = report(scenario.hub.registry, scenario.now)
    numbers = [scenario.say("trainer/0", kind, **fields, until=over) for kind, fields in messages.items()]
    assert scenario.inbox == {} and report(scenario.hub.registry, scenario.now) == before
    scenario.beat("trainer/0", pending=tuple(numbers))
    (alive,) = scenario.inbox.pop("trainer/0")
    assert isinstance(alive, m.Alive) and alive.resend == tuple(numbers)
    scenario.tell("trainer/0", m.Publish(numbers[0], held, until=until(scenario, 0.1)))
    assert scenario.inbox.pop("trainer/0") == [m.Done(numbers[0])]


def test_what_waits_and_is_given_up_meanwhile_is_not_carried_out(scenario: Scenario) -> None:
    """The hub was stopped while they waited: shard 0 has given up when shard 1 begins, and so have the others."""
    scenario = Scenario(recovering=True)
    for shard in (0, 1):
        scenario.join(f"trainer/{shard}", 2)
    scenario.join("other/0", holdings=(m.Holding(ShardKey(1, CHECKPOINT), b"1" * 16, 100, True, "replicated"),))
    for kind in (m.Pin, m.Withdraw):
        scenario.say("other/0", kind, version=1, timeout_s=60.0, until=until(scenario, 2.0))
    scenario.say("other/0", m.Unpublish, keys=(ShardKey(1, CHECKPOINT),), timeout_s=2.0, until=until(scenario, 2.4))
    scenario.say("trainer/0", m.Begin, step=0, timeout_s=60.0, launch_id="w", waits=True, until=until(scenario, 2.0))
    scenario.now += LIMITS.grace_s + 1.0  # it wakes, and hears before it looks at its timers
    scenario.say("trainer/1", m.Begin, step=0, timeout_s=2.0, launch_id="w", waits=True, until=until(scenario, 2.4))
    scenario.tell("other/0", m.AskVersions(99))
    scenario._deliver(Tick())
    history = scenario.hub.registry.histories["run", "actor"]
    assert history.directive == NO_DIRECTIVE and history.visible() == [1]
    held = scenario.hub.workers[scenario.sessions["other/0"]].holdings[ShardKey(1, CHECKPOINT)]
    assert held.stays and scenario.heard("trainer/0") == []
    scenario.wait(3.0)
    assert scenario.heard("trainer/1") == ["refused DeadlineExceeded"]  # shard 0 is missing


def test_a_hello_is_not_believed_after_what_is_published_in_it_was_given_up(scenario: Scenario) -> None:
    held = m.Holding(ShardKey(1, CHECKPOINT), b"1" * 16, 100)
    scenario.join("trainer/0", holdings=(held,), hub=scenario.hub.session, until=until(scenario, -0.1))
    assert scenario.inbox.pop("trainer/0") == [m.Unknown(scenario.hub.session, scenario.now)]
    scenario.join("trainer/0", holdings=(held,), hub=scenario.hub.session, until=until(scenario, 0.1))
    assert scenario.hub.registry.histories["run", "actor"].visible() == [1]


def test_a_first_hello_that_comes_late_takes_nobodys_place(scenario: Scenario) -> None:
    """Its client has long raised. Who lives says Hello again, to this hub."""
    scenario.join("trainer/0", hub=b"")
    scenario.publish("trainer/0", 1)
    scenario.sessions["again"] = b"again".ljust(16)
    late = m.Hello("run", "actor", "trainer", 0, 1, Location(), {"tcp": "trainer/0"}, hub=b"")
    scenario.tell("again", late)
    assert scenario.inbox.pop("again") == [m.Unknown(scenario.hub.session, scenario.now)]
    assert not scenario.hub.workers[scenario.sessions["trainer/0"]].is_replaced
