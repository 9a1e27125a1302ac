"""The table of replicas by which verl and OpenRLHF dispatch: its stories, and a naive model beside it."""

import math
from dataclasses import dataclass

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

pytest.importorskip("vllm", reason="the package beside it needs vLLM")

from tensorhub_plugins.vllm.ray import replica_metrics  # noqa: E402
from tensorhub_plugins.vllm.ray.fleet.events import Reported  # noqa: E402
from tensorhub_plugins.vllm.ray.fleet.state import FleetState  # noqa: E402
from tensorhub_plugins.vllm.ray.fleet.types import Entry  # noqa: E402
from tensorhub_plugins.vllm.ray.members import DEATHS_MAX, STILL_MAX_S, Member, Members  # noqa: E402


def _hear(members, name, now, **heartbeat):
    return members.heard(name, now, heartbeat)


def _two():
    members = Members(timeout_s=10)
    for name in ("a", "b"):
        members.add(name, 0)
        _hear(members, name, 1, ready=True, version=5)
    return members


def test_a_replica_without_weights_gets_no_requests():
    members = Members(timeout_s=10)
    members.add("a", 0)
    assert not members.all["a"].in_rotation
    _hear(members, "a", 1, ready=False, version=0)
    assert not members.all["a"].in_rotation
    _hear(members, "a", 2, ready=True, version=1)
    assert members.all["a"].in_rotation


def test_a_spare_is_reported_and_is_none_of_the_replicas():
    members = _two()
    (joined,), _ = members.apply([], [Entry("rollout-2", "handle", "spare")], 1)
    heard = {"version": 0, "ready": False, "spare": True, "worker": "rollout-2/0", "node": "n2"}
    _hear(members, "rollout-2", 2, **heard)
    before = members.seen(lambda name: 0, now=3).seen
    assert [(one.name, one.spare, one.ready, one.node) for one in before] == [("rollout-2", True, False, "n2")]
    assert [one.name for one in members.able()] == ["a", "b"] and members.behind(9) == members.behind(6)
    told = replica_metrics.of_members(members, "trainer", published=5, now=3)
    assert (told["tensorhub/replicas/ready"], told["tensorhub/version_lag/max"]) == (2.0, 0.0)
    assert told["tensorhub/replicas/lost"] == told["tensorhub/replicas/refused"] == 0.0
    # When all others refuse a version the run is stuck: what a spare would do is not known.
    for name in ("a", "b"):
        _hear(members, name, 4, ready=True, version=5, refusal=(6, "it does not fit"))
    assert members.is_stuck(6)
    # It is heard of no more, and its last word is old; and one that is started again has said nothing yet.
    assert not members.seen(lambda name: 0, now=2 + members.timeout_s + 1).seen[0].spare
    assert "rollout-2" not in {*members.silent(100), *members.late(100), *members.hung(100)}
    members.failed("rollout-2", 5, "restarting")
    (ended,) = members.seen(lambda name: 0, now=5).seen
    assert (ended.spare, ended.lost) == (False, "restarting")
    assert replica_metrics.of_members(members, "trainer", published=5, now=5)["tensorhub/replicas/lost"] == 0.0
    # It joins as any other one.
    _hear(members, "rollout-2", 6, version=0, ready=False)
    assert not members.is_stuck(6) and not joined.in_rotation  # it may be able to
    _hear(members, "rollout-2", 7, version=5, ready=True)
    assert joined.in_rotation


@pytest.mark.parametrize("kind", ["spare", "joined"])
def test_a_spare_that_hangs_while_it_joins_is_ended_and_one_that_still_loads_is_not(kind):
    """It was told to join, and is stopped (SIGSTOP) just then: for half an hour a replica would be missing."""
    members = Members(timeout_s=10, engine_timeout_s=60)
    members.apply([], [Entry("rollout-2", "handle", kind)], 1)
    _hear(members, "rollout-2", 2, version=0, ready=False, spare=kind == "spare")
    _hear(members, "rollout-2", 3, version=0, ready=False, spare=False, silent_s=61)  # its engine begins to follow
    assert members.hung(63) == [] and not members.silent(70) and not members.late(70)
    assert members.hung(64) == (["rollout-2"] if kind == "spare" else [])
    members.failed("rollout-2", 64, "restarting")
    assert members.hung(1000) == []  # it loads again
    assert replica_metrics.of_members(members, "trainer", published=5, now=64)["tensorhub/replicas/lost"] == 0.0


def test_a_silent_replica_is_out_until_it_has_caught_up():
    members = _two()
    _hear(members, "b", 11, ready=True, version=7)
    assert members.silent(11) == []  # exactly the timeout is still well
    assert members.silent(11.5) == ["a"]
    assert members.silent(12) == []  # told once
    assert not members.all["a"].in_rotation and members.all["b"].in_rotation
    assert not members.is_current("a", 0) and members.is_current("b", 0)
    _hear(members, "b", 30, ready=True, version=9)
    assert not _hear(members, "a", 30, ready=True, version=5)  # awake, but its first answers would be stale
    assert not members.all["a"].in_rotation
    _hear(members, "b", 31, ready=True, version=10)
    assert _hear(members, "a", 31, ready=True, version=9)  # what the others had when it woke is enough
    assert members.all["a"].in_rotation
    assert not members.is_current("a", 0)  # its old requests are with others


def test_a_failed_replica_comes_back_ready():
    members = _two()
    assert members.failed("a", 2)
    assert not members.failed("a", 2)
    assert not _hear(members, "a", 3, ready=False, version=0)  # started again, no weights yet
    assert _hear(members, "a", 60, ready=True, version=5)
    assert members.all["a"].in_rotation


def test_a_failed_replica_catches_up_with_what_the_others_have_when_it_answers_again():
    members = _two()
    assert members.failed("a", 2)
    _hear(members, "b", 5, ready=True, version=9)
    assert not _hear(members, "a", 6, ready=True, version=5)  # within the timeout, and stale all the same
    assert _hear(members, "a", 7, ready=True, version=9)


@pytest.mark.parametrize(("others", "comes_back"), [(4, True), (9, False)], ids=["they went back", "control"])
def test_a_replica_catches_up_no_further_than_the_others_are(others, comes_back):
    members = _two()
    assert members.failed("a", 2)
    _hear(members, "b", 5, ready=True, version=9)
    assert not _hear(members, "a", 6, ready=True, version=0)
    _hear(members, "b", 7, ready=True, version=others)  # an older version was pinned meanwhile
    assert _hear(members, "a", 8, ready=True, version=4) is comes_back


def test_the_last_one_standing_is_never_kept_out():
    members = _two()
    assert members.silent(20) == []  # both at once: it was the machine that stood still
    assert members.all["a"].in_rotation and members.all["b"].in_rotation
    _hear(members, "b", 21, ready=True, version=6)
    assert members.silent(21) == ["a"]
    assert members.failed("b", 22)  # its process ended
    assert members.newest() == 0
    assert _hear(members, "a", 33, ready=True, version=5)  # as stale as it is, there is no better one
    assert members.all["a"].in_rotation


def _hung(members, seconds):
    """When it is found, if looked for once a second; None: never."""
    for now in range(2, seconds):
        members.look(now)
        members.silent(now)
        if found := members.hung(now):
            return found, now
    return None


def _alone(**heard):
    members = Members(timeout_s=10)
    members.add("a", 0)
    _hear(members, "a", 1, **{"ready": True, "version": 1, "engine_timeout_s": 60, **heard})
    return members


def test_one_that_hangs_is_found_when_nobody_else_is_heard_either():
    members = _alone()
    assert _hung(members, 3600) == (["a"], 62)
    assert members.failed("a", 62, "restarting") and not members.all["a"].in_rotation and not members.is_current("a", 0)
    _hear(members, "a", 70, ready=False, version=0, engine_timeout_s=60)  # started again, and loading
    assert _hung(members, 3600) is None
    two = _two()  # all at once
    for name in ("a", "b"):
        _hear(two, name, 1, ready=True, version=5, engine_timeout_s=60)
    assert _hung(two, 3600) == (["a", "b"], 62)


def test_what_does_not_hang_is_not_taken_for_it():
    assert _hung(_alone(ready=False), 3600) is None  # it loads for the first time
    assert _hung(_alone(engine_timeout_s=math.inf), 3600) is None  # nobody here could start it again
    members = _alone()
    members.all["a"].is_draining = True
    assert _hung(members, 3600) is None  # it is ended when its time is up
    members = _alone()
    for now in range(2, 50):  # it answers heartbeats, however long its requests are
        members.look(now)
        _hear(members, "a", now, ready=True, version=1, engine_timeout_s=60)
    assert members.hung(105) == []
    # Whoever listens was frozen for an hour: what they answered is read a moment later.
    members.look(3650)
    assert members.hung(3650) == [] and members.silent(3650) == []
    for now in range(3651, 3706):
        members.look(now)
        assert members.hung(now) == []
    members.look(3706)
    assert members.hung(3706) == ["a"]


def test_who_is_heard_before_the_router_finds_that_it_stood_still_is_not_heard_in_the_future():
    members = _two()
    members.look(2)
    _hear(members, "a", 3602, ready=True, version=5)
    members.look(3602)
    assert members.silent(3602) == []
    for now in range(3603, 3614):
        members.look(now)
        _hear(members, "b", now, ready=True, version=5)
    assert members.silent(3613) == ["a"]


def test_what_verl_takes_away_is_not_put_back():
    members = _two()
    members.remove("a")
    assert not _hear(members, "a", 2, ready=True, version=5)
    assert [one.name for one in members.able()] == ["b"]


def test_one_that_joins_gets_requests_when_it_has_what_the_others_have():
    members = _two()
    members.apply((), [Entry("c", None, "joined")], 2)
    _hear(members, "c", 3, ready=False, version=0)
    _hear(members, "a", 4, ready=True, version=7)
    assert not _hear(members, "c", 5, ready=True, version=5)
    assert not members.all["c"].in_rotation
    assert not _hear(members, "c", 6, ready=True, version=7)  # it was never lost, so it does not come back
    assert members.all["c"].in_rotation
    alone = Members(timeout_s=10)
    alone.apply((), [Entry("a", None, "joined")], 0)
    _hear(alone, "a", 1, ready=True, version=1)
    assert alone.all["a"].in_rotation


def test_one_that_is_drained_gets_no_requests_and_is_not_lost():
    members = _two()
    members.all["a"].is_draining = True
    _hear(members, "a", 2, ready=True, version=9)
    assert not members.all["a"].in_rotation and members.newest() == 5
    assert members.is_current("a", 0)  # its requests end there
    members.all["a"].is_draining = False
    assert members.all["a"].in_rotation


def _names(found):
    return [one.name for one in found]


def _behind(members, version):
    return _names(members.behind(version))


def test_who_is_behind():
    members = _two()
    assert _behind(members, 5) == [] and _behind(members, 6) == ["a", "b"]
    members.add("new", 1)  # at the start: it will be asked as soon as it is ready
    assert _behind(members, 5) == ["new"]
    _hear(members, "b", 2, ready=True, version=5, stays=True)
    assert _behind(members, 6) == ["a", "new"]
    members.failed("a", 3)
    assert _behind(members, 6) == ["new"]


def _lag_and_age(members: Members, now: float, published: int = 0) -> tuple[float, float, float]:
    """The largest and the mean lag, and the oldest age, for the trainer's log."""
    told = replica_metrics.of_replicas(members.able(), lost=0, refused=0, published=published, now=now)
    return told["tensorhub/version_lag/max"], told["tensorhub/version_lag/mean"], told["tensorhub/last_pull_age_s"]


def test_replicas_that_all_stand_still_are_behind_what_was_published():
    members = _two()
    assert _lag_and_age(members, 31) == (0.0, 0.0, 30.0)  # the newest of them says nothing of the trainer
    assert _lag_and_age(members, 31, 5) == (0.0, 0.0, 30.0) and _lag_and_age(members, 31, 9) == (4.0, 4.0, 30.0)
    _hear(members, "a", 32, ready=True, version=9)
    assert _lag_and_age(members, 33, 9) == (4.0, 2.0, 32.0)
    assert [replica.installed_at for replica in members.able()] == [32, 1]


def test_replicas_are_stuck_when_all_refuse_and_none_has_another_version():
    members = Members(timeout_s=10)
    for name in ("a", "b"):
        members.add(name, 0)
        _hear(members, name, 1, ready=False, version=0, refusal=(1, "why"))
        assert members.is_stuck() is (name == "b" or len(members.all) == 1)
    assert _names(members.refusing(1)) == ["a", "b"] and members.is_stuck(published=1)
    assert _names(members.refusing(2)) == [] and not members.is_stuck(published=2)  # they may take that one
    _hear(members, "b", 2, ready=False, version=0)  # it was started again, and is asked again
    assert not members.is_stuck(published=1)
    _hear(members, "b", 3, ready=True, version=1)
    assert _names(members.refusing(1)) == ["a"] and not members.is_stuck(published=1)
    _hear(members, "b", 4, ready=True, version=1, refusal=(2, "why"))
    _hear(members, "a", 4, ready=False, version=0, refusal=(2, "why"))
    assert _names(members.refusing(2)) == ["a", "b"] and not members.is_stuck(published=2)  # one goes on with version 1
    for _ in range(DEATHS_MAX):
        members.failed("b", 5, "died")
    assert members.is_stuck(published=2)


# --- stories of both frameworks ---------------------------------------------------------------------------------------


def _seen(members):
    return {one.name: one for one in members.seen(lambda _: 0).seen}


def test_one_that_is_stale_gets_nothing_is_not_lost_and_is_not_said_to_be_restarting():
    members = _two()
    _hear(members, "a", 2, version=5, ready=False, worker="a/0", why="it is cut off from the hub")
    assert _names(members.able()) == ["b"] and not members.all["a"].is_lost and members.is_current("a", 0)
    seen = _seen(members)["a"]
    assert (seen.ready, seen.lost, seen.why) == (False, "", "it is cut off from the hub")
    assert members.failed("a", 3, "restarting") and _seen(members)["a"].lost == "restarting"  # the control
    _hear(members, "a", 4, version=0, ready=False)  # it loads
    assert _seen(members)["a"].lost == "restarting"
    _hear(members, "a", 5, version=5)
    _hear(members, "a", 6, version=5, ready=False)
    assert _seen(members)["a"].lost == ""


def test_one_that_was_cut_off_and_is_ready_again_catches_up_before_it_gets_work():
    members = _two()
    _hear(members, "a", 2, version=5, ready=False)
    _hear(members, "b", 3, version=9)
    assert not _hear(members, "a", 4, version=5)  # the hub is back, and its weights are those of before
    assert _names(members.able()) == ["b"] and not _seen(members).get("a")
    assert not _hear(members, "a", 5, version=9)  # it was never lost, so it does not come back
    assert _names(members.able()) == ["a", "b"] and members.is_current("a", 0)
    for name in ("a", "b"):
        _hear(members, name, 6, version=9, ready=False)
    _hear(members, "a", 7, version=4)  # all at once: as stale as it is, there is no better one
    assert _names(members.able()) == ["a"]
    _hear(members, "b", 8, version=4, ready=False)
    assert members.failed("b", 9, "restarting") and members.all["b"].is_missed  # it had begun


def test_silence_of_an_engine_counts_from_its_own_last_answer():
    members = _two()
    _hear(members, "b", 20, version=5)
    _hear(members, "a", 20, version=5, silent_s=9.0)  # within the timeout: it may be in a long step
    assert members.silent(20) == []
    _hear(members, "a", 21, version=9, silent_s=10.5)
    assert members.all["a"].silent_since == 10.5 and members.all["a"].version == 5
    assert members.silent(21) == ["a"]
    assert not _hear(members, "a", 22, version=5, silent_s=11.5)  # what answers is the actor around it
    assert _hear(members, "a", 23, version=5)


def test_one_that_a_request_found_unfit_and_that_then_hangs_is_ended():
    members = Members(10, 60)
    members.add("a", 0)
    _hear(members, "a", 1, version=1)
    assert members.failed("a", 2)
    assert _hung(members, 3600) == (["a"], 63)
    members = Members(10, 60)
    members.add("a", 0)
    _hear(members, "a", 1, version=1)
    assert members.failed("a", 2, "restarting")
    assert _hung(members, 3600) is None  # it is loading, however long that takes


def test_one_that_loads_is_not_missed_however_silent_it_is():
    members = _two()
    members.add("c", 1)
    for now in range(2, 40):
        for name in ("a", "b"):
            _hear(members, name, now, version=5)
        assert members.silent(now) == members.hung(now) == []
    assert not members.all["c"].is_missed


def test_an_external_one_is_taken_out_and_never_ended():
    members = Members(10, 10)
    members.add("a", 0)
    members.apply((), [Entry("external-0", None, "external")], 0)
    for name in ("a", "external-0"):
        _hear(members, name, 1, version=1)
    _hear(members, "a", 90, version=1)
    assert members.silent(90) == ["external-0"] and members.hung(90) == []


def test_able_is_asked_for_a_version():
    members = _two()
    _hear(members, "a", 2, version=5, refusal=(6, "why"))
    assert _names(members.able(5)) == ["a", "b"] and _names(members.able(6)) == ["b"]
    _hear(members, "b", 2, version=0, refusal=(1, "why"))  # it has the model of before the training
    assert _names(members.able()) == ["a"]
    assert not members.is_stuck(5) and members.is_stuck(6) is False  # b may take version 6
    _hear(members, "b", 3, version=5, refusal=(6, "why"))
    assert members.is_stuck(6) and not members.is_stuck(5)
    assert members.failed("b", 4, "restarting") and not members.is_stuck(6)  # and is asked again


def test_the_fleet_is_told_of_those_with_a_name_and_ends_only_what_it_was_told_of():
    members = Members(10)
    members.add("10.0.0.1:80", 0, "a")
    assert members.seen(lambda _: 0, 7) == Reported((), waiting=7, unnamed=1)
    _hear(members, "10.0.0.1:80", 1, version=5, worker="rollout-0/0", node="n")
    members.add("10.0.0.2:80", 1, "b")
    told = members.seen({"10.0.0.1:80": 3}.__getitem__)
    (seen,) = told.seen
    assert (seen.name, seen.handle, seen.node, seen.ready, seen.version, seen.in_flight) == (
        *("rollout-0", "a", "n", True, 5, 3),
    )
    assert told.unnamed == 1
    _hear(members, "10.0.0.2:80", 2, version=5, worker="rollout-1/0")  # after the report
    joined, left = members.apply(["rollout-0"], [Entry("rollout-2", "c", "joined")], 3)
    assert (_names(joined), _names(left)) == (["rollout-2"], ["10.0.0.1:80"])
    assert list(members.all) == ["10.0.0.2:80", "rollout-2"]
    _hear(members, "10.0.0.2:80", 4, version=5, worker="rollout-1/0", follows=False)
    assert list(_seen(members)) == ["rollout-2"]  # its framework moves the other one in and out


def test_one_that_has_died_before_it_had_a_name_is_not_waited_for():
    """The fleet starts nothing before all first ones are named: on a node that was lost at the start none ever is."""
    members = _two()
    _hear(members, "a", 2, ready=True, version=5, worker="rollout-0/0")
    for _ in range(DEATHS_MAX):
        assert members.seen(lambda _: 0).unnamed == 1  # Ray may start it again
        members.failed("b", 3, "died")
    told = members.seen(lambda _: 0)
    assert [one.name for one in told.seen] == ["rollout-0"] and told.unnamed == 0
    fleet = FleetState()
    fleet.handle(told, 4)
    assert fleet.is_known


# --- a naive model ----------------------------------------------------------------------------------------------------

NAMES, TIMEOUT_S, HANGS_S = ("a", "b", "c"), 10, 20
WHICH = st.sampled_from(NAMES)


@dataclass
class Known:
    """What is known of one, in the words of the rules at the top of members.py."""

    joins: bool
    is_external: bool = False
    is_ready: bool = False
    version: int = 0
    bar: int | None = None  # what the others had when it came, or came back
    is_out: bool = False
    is_draining: bool = False
    is_up: bool = False
    ended: bool = False
    deaths: int = 0
    losses: int = 0
    silence_s: float = 0.0


class MembersBesideModel(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.real, self.now = Members(TIMEOUT_S, HANGS_S), 0.0
        self.known = {"a": Known(False), "b": Known(False)}
        for name in self.known:
            self.real.add(name, self.now, worker=f"{name}/0")
        self.real.look(self.now)

    def rotation(self):
        return {name for name, one in self.known.items() if self.is_in(one)}

    def is_in(self, one):
        return one.is_ready and not (one.is_out or one.joins or one.is_draining)

    def newest(self):
        return max((self.known[name].version for name in self.rotation()), default=0)

    def lose(self, one):
        one.is_out, one.bar, one.losses = True, None, one.losses + 1
        one.joins = one.joins and not one.is_up

    @rule(
        name=WHICH,
        version=st.integers(0, 2),
        ready=st.sampled_from([True, True, False]),
        engine_silent_s=st.sampled_from([0, 0, 0, 0, 12, 40]),
    )
    def answers(self, name, version, ready, engine_silent_s):
        beat = {"version": version, "ready": ready, "silent_s": engine_silent_s}
        back = self.real.heard(name, self.now, beat)
        if (one := self.known.get(name)) is None:
            assert not back
            return
        one.deaths, one.is_up = 0, one.is_up or ready
        if one.is_ready and not (one.is_out or one.joins or ready) and engine_silent_s <= TIMEOUT_S:
            one.joins, one.bar = True, None
        if engine_silent_s > TIMEOUT_S:
            one.silence_s = engine_silent_s
            assert not back
            return
        if (one.is_out and (one.bar is None or one.silence_s > TIMEOUT_S)) or (one.joins and ready and one.bar is None):
            one.bar = self.newest()
        one.silence_s, one.is_ready, one.version = 0.0, ready, version
        one.ended = one.ended and not ready
        was_out = one.is_out
        if ready and one.bar is not None and version >= min(one.bar, self.newest()):
            one.is_out = one.joins = False
        assert back is (was_out and not one.is_out)

    @rule(name=WHICH, how=st.sampled_from(["unfit", "restarting", "died"]))
    def fails(self, name, how):
        one, was_new = self.known.get(name), self.real.failed(name, self.now, how)
        if one is None:
            return
        assert was_new is not one.is_out
        if not one.is_out:
            one.is_ready, one.silence_s = False, 0.0
            self.lose(one)
        if how != "unfit":
            one.ended, one.is_up = True, False
            one.deaths = one.deaths + 1 if how == "died" else 0

    @rule(seconds=st.sampled_from([1, 5, 5, 3600]))
    def time_passes(self, seconds):
        self.now += seconds
        self.real.look(self.now)
        for one in self.known.values():
            one.silence_s += min(seconds, STILL_MAX_S)
        late = {n for n, one in self.known.items() if one.is_up and not one.is_out and one.silence_s > TIMEOUT_S}
        out = late if self.rotation() - late else set()
        assert set(self.real.silent(self.now)) == out
        for name in out:
            self.lose(self.known[name])

    @rule(name=WHICH, kind=st.sampled_from(["joined", "external"]))
    def joins(self, name, kind):
        if name not in self.known:
            self.known[name] = Known(True, kind == "external")
            self.real.apply((), [Entry(name, None, kind)], self.now)

    @rule(name=WHICH, is_draining=st.booleans())
    def drains(self, name, is_draining):
        if name in self.known:
            self.known[name].is_draining = is_draining
            assert self.real.apply((), [Entry(name, None, "first", is_draining)], self.now) == ([], [])

    @rule(name=WHICH)
    def leaves(self, name):
        if self.known.pop(name, None) is not None:
            there = [Entry(other, None, "first", one.is_draining) for other, one in self.known.items()]
            told = [one.name for one in self.real.seen(lambda _: 0).seen]
            assert [one.name for one in self.real.apply(told, there, self.now)[1]] == [name]

    @invariant()
    def they_agree(self):
        assert {one.name for one in self.real.able()} == self.rotation()
        assert {name: one.epoch for name, one in self.real.all.items()} == {n: k.losses for n, k in self.known.items()}
        hung = {
            name
            for name, one in self.known.items()
            if one.is_up and not one.is_draining and not one.is_external and one.silence_s > HANGS_S
        }
        assert set(self.real.hung(self.now)) == hung
        for seen in self.real.seen(lambda _: 0).seen:
            one = self.known[seen.name]
            assert seen.ready is (one.is_ready and not one.is_out and not one.joins)
            assert seen.lost == ("gone" if one.deaths >= DEATHS_MAX else "restarting" if one.ended else "")
        # Nobody is kept out for ever: with nobody in rotation one that answers ready comes in, whatever it has.
        if not self.rotation():
            assert self.real.newest() == 0


BRIEF = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestMembersBesideModel = MembersBesideModel.TestCase
TestMembersBesideModel.settings = BRIEF


def _lose_in_the_same_epoch(self):
    self.is_lost, self.catch_up_to = True, None


def _found_only_beside_others(self, now, hung=Members.hung):
    return hung(self, now) if self.able() else []


def _restarts_in_the_fleets_eyes(self, name, now, how="unfit", failed=Members.failed):
    return failed(self, name, now, "restarting")


@pytest.mark.parametrize(
    ("kind", "method", "broken"),
    [
        (Members, "newest", lambda self: 0),  # one comes back as stale as it is
        (Members, "look", lambda self, now: None),  # silence while the dispatcher stood still counts
        (Members, "hung", _found_only_beside_others),
        (Members, "failed", _restarts_in_the_fleets_eyes),
        (Members, "late", lambda self, now: []),
        (Member, "lose", _lose_in_the_same_epoch),
        (Member, "in_rotation", property(lambda self: self.answers)),  # also one that drains
    ],
    ids=["no catching up", "standing still", "alone", "restarting", "silence", "epoch", "draining"],
)
def test_the_model_notices_a_broken_table(monkeypatch, kind, method, broken):
    monkeypatch.setattr(kind, method, broken)
    quick = settings(max_examples=500, stateful_step_count=30, deadline=None, phases=[Phase.generate], derandomize=True)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(MembersBesideModel, settings=quick)
