"""Which source a reader is given, and which reader converts, as stories."""

from __future__ import annotations

import pytest
from hub_scenarios import LIMITS, RUNTIME, Scenario, source_of

from tensorhub_plugins.core.hub.hub import FAILURES_PER_QUEUE_MAX, Received
from tensorhub_plugins.core.hub.limits import HubLimits
from tensorhub_plugins.core.hub.report import report
from tensorhub_plugins.core.hub.unreached import SOURCES_MAX
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.types import CHECKPOINT, Location, ShardKey


@pytest.fixture
def scenario() -> Scenario:
    return Scenario()


# --- sources ---


def test_readers_become_sources_and_are_preferred_to_the_publisher(scenario: Scenario) -> None:
    scenario.join("trainer/0")
    scenario.publish("trainer/0", 1)
    scenario.join_all("a/0", "b/0")
    scenario.acquire("a/0")
    assert scenario.heard("a/0") == [f"read 1 {CHECKPOINT} 0<-trainer/0"]
    scenario.publish("a/0", 1, origin="replicated")
    scenario.acquire("b/0")
    assert scenario.heard("b/0") == [f"read 1 {CHECKPOINT} 0<-a/0"]


def test_near_sources_come_before_far_ones(scenario: Scenario) -> None:
    scenario.join("far/0", location=Location("dc1", "r1", "h1"))
    scenario.join("rack/0", location=Location("dc2", "r1", "h2"))
    scenario.join("host/0", location=Location("dc2", "r1", "h3"))
    for name in ("far/0", "rack/0", "host/0"):
        scenario.publish(name, 1)
    scenario.join("rollout/0", location=Location("dc2", "r1", "h3"))
    order = []
    for _ in range(3):
        scenario.acquire("rollout/0", avoid=tuple(scenario.sessions[name] for name in order))
        order.append(scenario.heard("rollout/0")[0].rsplit("<-", 1)[1])
    assert order == ["host/0", "rack/0", "far/0"]


def test_a_shard_that_still_arrives_is_a_source_but_never_in_a_circle(scenario: Scenario) -> None:
    scenario.join_all("trainer/0", "a/0", "b/0")
    scenario.publish("trainer/0", 1)
    scenario.acquire("a/0", version=1)
    scenario.publish("a/0", 1, complete=False, origin="replicated")
    scenario.acquire("b/0", version=1)
    assert scenario.heard("b/0") == [f"read 1 {CHECKPOINT} 0<-a/0"]
    scenario.publish("b/0", 1, complete=False, origin="replicated")
    scenario.heard("a/0")
    scenario.tell("a/0", m.Release(scenario.requests["a/0"] - 1, lost=True))
    trainer = scenario.sessions["trainer/0"]
    again = {"shards": (0,), "shards_layout": CHECKPOINT, "shard_count": 1}
    scenario.acquire("a/0", version=1, avoid=(trainer,), **again)
    assert scenario.heard("a/0") == [f"read 1 {CHECKPOINT} 0<-trainer/0"]  # b would be free, but reads from a


def test_a_source_that_was_lost_is_the_last_choice_until_it_is_heard_again(scenario: Scenario) -> None:
    scenario.join_all("a/0", "b/0", "x/0", "y/0")
    scenario.publish("a/0", 1)
    lease = scenario.acquire("x/0")
    scenario.publish("b/0", 1)
    scenario.tell("x/0", m.Release(lease, lost=True))
    scenario.heard("x/0")
    for _ in range(2):  # though b becomes busier than a
        scenario.acquire("y/0")
        assert scenario.heard("y/0") == [f"read 1 {CHECKPOINT} 0<-b/0"]
    scenario.tell("a/0", m.Heartbeat(scenario.hub.session))
    scenario.acquire("y/0")
    assert scenario.heard("y/0") == [f"read 1 {CHECKPOINT} 0<-a/0"]


@pytest.mark.parametrize("refused", [True, False], ids=["nobody listens there", "the control"])
def test_a_source_that_refuses_connections_is_given_up_after_three_heartbeats(refused: bool) -> None:
    """What ended without a word was named to readers until the end of its session, 15 s later."""
    scenario = Scenario(limits=HubLimits(heartbeat_s=1.0, session_timeout_s=15.0))
    scenario.join_all("a/0", "x/0", "y/0")
    scenario.publish("a/0", 1)
    scenario.silent = ("a/0",)
    scenario.wait(2.0)
    lease = scenario.acquire("x/0")
    scenario.tell("x/0", m.Release(lease, lost=True, refused=refused))
    scenario.heard("x/0")
    scenario.acquire("y/0")
    assert scenario.heard("y/0") == [f"read 1 {CHECKPOINT} 0<-a/0"]  # it may be heard yet
    scenario.wait(1.5)
    assert (scenario.heard("y/0") == ["gone a/0"]) == refused
    scenario.acquire("x/0", version=1)
    assert scenario.heard("x/0") == (["refused VersionGone"] if refused else [f"read 1 {CHECKPOINT} 0<-a/0"])


def test_a_source_that_is_heard_lives_whoever_was_refused(scenario: Scenario) -> None:
    """Behind a wall that refuses in its name, or because a reader lies; and it has one timer, however many say so."""
    scenario.join_all("a/0", "x/0")
    scenario.publish("a/0", 1)
    for _ in range(10):
        scenario.beat("a/0")
        lease = scenario.acquire("x/0")
        scenario.tell("x/0", m.Release(lease, lost=True, refused=True))
        scenario.wait(1.0)
    scenario.wait(30.0)
    timers = [record() for _, _, record in scenario.hub.registry._timers if record is not None]
    a = scenario.hub.workers[scenario.sessions["a/0"]]
    assert timers.count(a) == 1 and a.holdings


def test_readers_per_source_are_limited_and_the_next_waits_for_room() -> None:
    scenario = Scenario(limits=HubLimits(readers_per_source_max=2))
    scenario.join("trainer/0")
    scenario.publish("trainer/0", 1)
    leases = {}
    for name in ("a/0", "b/0", "c/0"):
        scenario.join(name)
        leases[name] = scenario.acquire(name)
    assert scenario.heard("c/0") == []
    scenario.tell("a/0", m.Release(leases["a/0"]))
    assert scenario.heard("c/0") == [f"read 1 {CHECKPOINT} 0<-trainer/0"]


@pytest.mark.parametrize("greedy", [False, True], ids=["control", "greedy"])
def test_who_asks_for_more_beside_what_it_reads_keeps_nobody_from_a_place(*, greedy: bool) -> None:
    scenario = Scenario(limits=HubLimits(readers_per_source_max=1))
    scenario.join_all("trainer/0", "a/0", "greedy/0", "b/0")
    scenario.publish("trainer/0", 1)
    lease, beside = scenario.acquire("a/0", 1), (scenario.sessions["trainer/0"],)
    for _ in range(FAILURES_PER_QUEUE_MAX if greedy else 0):
        scenario.acquire("greedy/0", 1, beside=beside)
    scenario.acquire("b/0", 1)
    scenario.tell("a/0", m.Release(lease))
    assert scenario.heard("b/0") == [f"read 1 {CHECKPOINT} 0<-trainer/0"]


def test_requests_that_a_change_of_their_worker_has_made_unlike_others_do_not_count_for_them() -> None:
    scenario = Scenario(limits=HubLimits(readers_per_source_max=1))
    scenario.join_all("trainer/0", "a/0", "greedy/0", "b/0")
    scenario.publish("trainer/0", 1)
    scenario.acquire("a/0", 1)
    for _ in range(FAILURES_PER_QUEUE_MAX):
        scenario.acquire("greedy/0", 1)
    scenario.acquire("b/0", 1)
    scenario.publish("greedy/0", 1, origin="replicated")  # a place for all but itself
    assert scenario.heard("b/0") == [f"read 1 {CHECKPOINT} 0<-greedy/0"]


def test_a_herd_that_waits_becomes_a_chain_at_once_without_a_word_from_its_links(scenario: Scenario) -> None:
    scenario.join("trainer/0", location=Location("dc", "", "t"))
    readers = herd(scenario, 20)
    scenario.publish("trainer/0", 1)
    sources = [source_of(scenario, reader) for reader in readers]
    assert sources == ["trainer/0", *readers[:-1]]


def test_readers_that_do_not_pass_on_share_the_publisher(scenario: Scenario) -> None:
    scenario.join("trainer/0")
    scenario.publish("trainer/0", 1)
    for name in ("a/0", "b/0"):
        scenario.join(name)
        scenario.acquire(name)
        assert source_of(scenario, name) == "trainer/0"


def test_a_promise_ends_with_the_lease_it_came_from(scenario: Scenario) -> None:
    scenario.join("trainer/0", location=Location("dc", "", "t"))
    scenario.publish("trainer/0", 1)
    (first,) = herd(scenario, 1)
    assert source_of(scenario, first) == "trainer/0"
    scenario.tell(first, m.Release(scenario.requests[first]))
    scenario.join("late/0", location=Location("dc", "", "late"))
    scenario.acquire("late/0")
    assert source_of(scenario, "late/0") == "trainer/0"


def test_one_seed_crosses_into_a_data_centre_and_another_takes_over(scenario: Scenario) -> None:
    scenario.join("trainer/0", location=Location("home", "", "t"))
    readers = herd(scenario, 5, data_center="far")
    scenario.publish("trainer/0", 1)
    assert [source_of(scenario, reader) for reader in readers] == ["trainer/0", *readers[:-1]]
    scenario.tell(readers[0], m.Bye())
    assert scenario.heard(readers[1]) == [f"gone {readers[0]}"]
    scenario.tell(readers[1], m.Release(scenario.requests[readers[1]], 0, True))
    again = {"shards": (0,), "shards_layout": CHECKPOINT, "shard_count": 1, "serve": True}
    scenario.acquire(readers[1], version=1, **again)
    assert source_of(scenario, readers[1]) == "trainer/0"  # all others depend on it
    assert scenario.hub.registry.uplink.total() == 1


def test_an_uplink_is_limited_and_shared_fairly_between_models() -> None:
    scenario = Scenario(limits=HubLimits(uplink_readers_max=2))
    for model in ("one", "two"):
        for shard in range(4):
            for kind, place in (("trainer", "home"), ("reader", "far")):
                name = f"{model}-{kind}/{shard}"
                session = scenario.sessions.setdefault(name, name.encode().ljust(16, b"."))
                location = Location(place, "", f"{name}")
                hello = m.Hello("run", model, f"{model}-{kind}", shard, 4, location, {"tcp": name})
                scenario._deliver(Received(session, hello))
    for model in ("one", "two"):
        for shard in range(4):
            scenario.publish(f"{model}-trainer/{shard}", 1, RUNTIME, root=f"{model}{shard}".encode().ljust(16, b"-"))
    for model in ("one", "two"):
        for shard in range(4):
            scenario.acquire(f"{model}-reader/{shard}", version=1, layouts=(RUNTIME,))

    def granted() -> list[str]:
        return [name for name in scenario.sessions if "reader" in name and scenario.heard(name)]

    assert granted() == ["one-reader/0", "one-reader/1"]  # the first ones took all there was
    order = []
    running = ["one-reader/0", "one-reader/1"]
    while running:
        scenario.tell(running[0], m.Release(scenario.requests[running[0]]))
        running = running[1:] + (now := granted())
        order += now
    assert sorted(order) == sorted(f"{model}-reader/{n}" for model in ("one", "two") for n in range(4))[2:]
    assert order[0].startswith("two") and {name[:3] for name in order[1:3]} == {"one", "two"}


def test_a_further_source_is_one_with_nothing_to_do_unless_it_is_urgent(scenario: Scenario) -> None:
    for name in ("a/0", "b/0", "x/0", "y/0"):
        scenario.join(name, location=Location("dc", "", name))
    scenario.publish("a/0", 1)
    scenario.publish("b/0", 1)
    first = {}
    for name in ("x/0", "y/0"):
        first[name] = scenario.acquire(name, version=1)
        assert source_of(scenario, name) == {"x/0": "a/0", "y/0": "b/0"}[name]
    beside = {"shards": (0,), "shards_layout": CHECKPOINT, "shard_count": 1, "beside": (scenario.sessions["a/0"],)}
    scenario.acquire("x/0", version=1, **beside)
    assert scenario.heard("x/0") == []  # b has a reader
    scenario.acquire("x/0", version=1, urgent=True, **beside)
    assert source_of(scenario, "x/0") == "b/0"
    scenario.tell("x/0", m.Release(scenario.requests["x/0"]))
    scenario.tell("y/0", m.Release(first["y/0"]))
    assert source_of(scenario, "x/0") == "b/0"  # what it asked for first


def test_a_slow_source_in_reach_is_no_reason_to_cross_a_long_way(scenario: Scenario) -> None:
    scenario.join("trainer/0", location=Location("home", "", "t"))
    scenario.join("peer/0", location=Location("far", "", "p"))
    scenario.join("x/0", location=Location("far", "", "x"))
    scenario.publish("trainer/0", 1)
    scenario.publish("peer/0", 1, origin="replicated")
    scenario.acquire("x/0", version=1)
    assert source_of(scenario, "x/0") == "peer/0"
    beside = {"shards": (0,), "shards_layout": CHECKPOINT, "shard_count": 1, "beside": (scenario.sessions["peer/0"],)}
    scenario.acquire("x/0", version=1, urgent=True, **beside)
    assert scenario.heard("x/0") == []


def test_over_a_long_way_a_further_source_is_only_given_when_the_first_is_slow(scenario: Scenario) -> None:
    scenario.join("a/0", location=Location("home", "", "a"))
    scenario.join("b/0", location=Location("home", "", "b"))
    scenario.join("x/0", location=Location("far", "", "x"))
    scenario.publish("a/0", 1)
    scenario.publish("b/0", 1)
    scenario.acquire("x/0", version=1)
    assert source_of(scenario, "x/0") == "a/0"
    beside = {"shards": (0,), "shards_layout": CHECKPOINT, "shard_count": 1, "beside": (scenario.sessions["a/0"],)}
    scenario.acquire("x/0", version=1, timeout_s=0.0, **beside)
    scenario.wait(0.5)
    assert scenario.heard("x/0") == ["refused DeadlineExceeded"]
    scenario.acquire("x/0", version=1, urgent=True, **beside)
    assert source_of(scenario, "x/0") == "b/0"


@pytest.mark.parametrize(("where", "named"), [("here", ["tcp", "tls"]), ("far", ["tls"])])
def test_what_asks_for_tls_names_no_other_way_to_another_data_centre(
    scenario: Scenario, where: str, named: list[str]
) -> None:
    greeting = m.Hello("run", "actor", "trainer", 0, 1, Location("here"), {"tcp": "t", "tls": "s"}, tls_only=True)
    scenario.sessions["trainer/0"] = b"trainer".ljust(16, b".")
    scenario.tell("trainer/0", greeting)
    scenario.publish("trainer/0", 1)
    scenario.join("rollout/0", location=Location(where))
    scenario.acquire("rollout/0")
    (granted,) = (each for each in scenario.inbox["rollout/0"] if isinstance(each, m.Granted))
    assert sorted(granted.grants[0].endpoints) == named


def test_a_checkpoint_is_read_whole_and_a_runtime_layout_shard_by_shard(scenario: Scenario) -> None:
    for shard in (0, 1):
        scenario.join(f"trainer/{shard}", 2)
        scenario.publish(f"trainer/{shard}", 1)
        scenario.join(f"engine/{shard}", 2)
        scenario.publish(f"engine/{shard}", 1, RUNTIME)
        scenario.join(f"rollout/{shard}", 2)
    scenario.acquire("rollout/1")
    scenario.acquire("rollout/1", layouts=(RUNTIME,))
    assert scenario.heard("rollout/1") == [
        f"read 1 {CHECKPOINT} 0<-trainer/0 1<-trainer/1",
        f"read 1 {RUNTIME} 1<-engine/1",
    ]


def herd(scenario: Scenario, count: int, **location: str) -> list[str]:
    """So many workers on hosts of their own that wait for version 1 and pass on what they read."""
    names = []
    for number in range(count):
        place = Location(location.get("data_center", "dc"), "", f"{location.get('data_center', 'dc')}-{number}")
        names.append(f"{place.host}/0")
        scenario.join(names[-1], location=place)
        scenario.acquire(names[-1], version=1, serve=True)
    return names


# --- who converts ---


def test_one_reader_converts_and_the_others_wait_for_its_layout(scenario: Scenario) -> None:
    scenario.join("trainer/0")
    scenario.publish("trainer/0", 1)
    for name in ("a/0", "b/0"):
        scenario.join(name)
        scenario.acquire(name, layouts=(RUNTIME, CHECKPOINT), claim=True)
    assert scenario.heard("a/0") == [f"read 1 {CHECKPOINT} 0<-trainer/0 and convert"]
    assert scenario.heard("b/0") == []
    scenario.publish("a/0", 1, RUNTIME)
    assert scenario.heard("b/0") == [f"read 1 {RUNTIME} 0<-a/0"]


def test_all_shards_of_a_version_are_converted_by_one_replica(scenario: Scenario) -> None:
    """Else a would wait for b's second shard and b for a's first: none converts before all its workers are ready."""
    scenario.join("trainer/0")
    scenario.publish("trainer/0", 1)
    for name in ("a/0", "b/1", "b/0", "a/1"):
        scenario.join(name, 2)
        scenario.acquire(name, 1, layouts=(RUNTIME, CHECKPOINT), claim=True)
    for name in ("a/0", "a/1"):
        assert scenario.heard(name) == [f"read 1 {CHECKPOINT} 0<-trainer/0 and convert"]
    for name in ("b/0", "b/1"):
        assert scenario.heard(name) == []
    scenario.publish("a/0", 1, RUNTIME)
    scenario.publish("a/1", 1, RUNTIME)
    for shard in (0, 1):
        assert scenario.heard(f"b/{shard}") == [f"read 1 {RUNTIME} {shard}<-a/{shard}"]


@pytest.mark.parametrize("end", ["abandons", "leaves", "is silent", "is too slow"])
def test_another_converts_when_the_first_does_not(scenario: Scenario, end: str) -> None:
    scenario.join("trainer/0")
    scenario.publish("trainer/0", 1)
    for name in ("a/0", "b/0"):
        scenario.join(name)
        scenario.acquire(name, layouts=(RUNTIME, CHECKPOINT), claim=True, timeout_s=1000.0)
    if end == "abandons":
        scenario.say("a/0", m.Abandon, key=ShardKey(1, RUNTIME))
    elif end == "leaves":
        scenario.tell("a/0", m.Bye())
    elif end == "is silent":
        scenario.silent = ("a/0",)
        scenario.wait(LIMITS.session_timeout_s + 1)
    else:
        scenario.wait(LIMITS.claim_s - 1)
        assert scenario.heard("b/0") == []
        scenario.wait(2)
    assert scenario.heard("b/0") == [f"read 1 {CHECKPOINT} 0<-trainer/0 and convert"]


@pytest.mark.parametrize(("gigabytes", "more_s"), [(0, 0), (141, 282)], ids=["tiny", "70B"])
def test_a_large_version_may_be_converted_for_longer(scenario: Scenario, gigabytes: int, more_s: int) -> None:
    scenario.join("trainer/0")
    scenario.publish("trainer/0", 1, size_bytes=max(gigabytes * 10**9, 1))
    for name in ("a/0", "b/0"):
        scenario.join(name)
        scenario.acquire(name, layouts=(RUNTIME, CHECKPOINT), claim=True, timeout_s=1000.0)
    scenario.wait(LIMITS.claim_s + more_s - 1)
    assert scenario.heard("b/0") == []
    scenario.wait(2)
    assert scenario.heard("b/0") == [f"read 1 {CHECKPOINT} 0<-trainer/0 and convert"]


HERE, THERE = Location("dc", "rack", "here"), Location("dc", "rack", "there")


def converts(scenario: Scenario, version: int, *names: str) -> list[list[str]]:
    """What they hear who ask for this version in this order, a new one; whoever is to convert it has not done so."""
    scenario.publish("trainer/0", version)
    for name in names:
        scenario.acquire(name, version, layouts=(RUNTIME, CHECKPOINT), claim=True, timeout_s=60.0)
    return [[line.rpartition(" and ")[2] for line in scenario.heard(name)] for name in names]


@pytest.fixture
def converted(scenario: Scenario) -> Scenario:
    """Engine a has converted version 1; b is beside it, c on another host."""
    for name, place in (("trainer/0", THERE), ("a/0", HERE), ("b/0", HERE), ("c/0", THERE)):
        scenario.join(name, location=place)
    assert converts(scenario, 1, "a/0") == [["convert"]]
    scenario.publish("a/0", 1, RUNTIME)
    return scenario


def test_the_engine_of_a_host_that_converted_last_does_so_again(converted: Scenario) -> None:
    """It has memory for the checkpoint; another one would take as much again."""
    assert converts(converted, 2, "b/0", "a/0") == [[], ["convert"]]
    converted.publish("a/0", 2, RUNTIME)
    assert converted.heard("b/0") == [f"read 2 {RUNTIME} 0<-a/0"]


def test_a_converter_hears_whether_others_read_what_it_makes(converted: Scenario) -> None:
    """B5: what nobody reads is copied, digested and kept for nobody. Of a first conversion nothing is known."""

    def is_awaited(version: int, *others: str) -> bool:
        converted.publish("trainer/0", version)
        request = converted.acquire("a/0", version, layouts=(RUNTIME, CHECKPOINT), claim=True, timeout_s=60.0)
        converted.tell("a/0", m.Release(request))
        (granted,) = (each for each in converted.inbox.pop("a/0") if isinstance(each, m.Granted))
        assert granted.claim == ShardKey(version, RUNTIME)
        for other in others:
            converted.acquire(other, version, layouts=(RUNTIME, CHECKPOINT), claim=True, timeout_s=60.0)
        return granted.awaited

    assert not is_awaited(2)
    assert not is_awaited(3, "c/0")  # it asks while a converts, and waits
    converted.say("a/0", m.Abandon, key=ShardKey(3, RUNTIME))
    assert converted.heard("c/0") == [f"read 3 {CHECKPOINT} 0<-trainer/0 and convert"]
    converted.say("c/0", m.Abandon, key=ShardKey(3, RUNTIME))
    assert is_awaited(4)
    converted.tell("c/0", m.Bye())
    converted.say("a/0", m.Abandon, key=ShardKey(4, RUNTIME))
    assert not is_awaited(5)


def test_it_is_waited_for_only_so_long(converted: Scenario) -> None:
    assert converts(converted, 2, "b/0") == [[]]
    converted.wait(LIMITS.converter_first_s + 0.1)
    assert converted.heard("b/0") == [f"read 2 {CHECKPOINT} 0<-trainer/0 and convert"]
    converted.publish("b/0", 2, RUNTIME)
    assert converts(converted, 3, "a/0", "b/0") == [[], ["convert"]]  # b is the last one now


@pytest.mark.parametrize("who", ["on another host", "of one that has left", "of one that has given up"])
def test_nobody_else_gives_way(scenario: Scenario, converted: Scenario, who: str) -> None:
    if who == "on another host":
        assert converts(converted, 2, "c/0", "a/0") == [["convert"], []]
    elif who == "of one that has left":
        converted.tell("a/0", m.Bye())
        assert converts(converted, 2, "b/0") == [["convert"]]
    else:  # it gave its promise back
        assert converts(converted, 2, "a/0") == [["convert"]]
        converted.say("a/0", m.Abandon, key=ShardKey(2, RUNTIME))
        converted.heard("a/0")
        converted.acquire("b/0", 2, layouts=(RUNTIME, CHECKPOINT), claim=True, timeout_s=60.0)
        assert converted.heard("b/0") == []  # it may ask again, and is waited for as ever
        converted.wait(LIMITS.converter_first_s + 0.1)
        assert converted.heard("b/0") == [f"read 2 {CHECKPOINT} 0<-trainer/0 and convert"]


def test_what_a_dead_process_has_sent_does_not_speak_for_its_replica(scenario: Scenario) -> None:
    """It comes late: its replica has started again, and both new shards must still agree on "latest"."""
    scenario.join("trainer/0")
    scenario.publish("trainer/0", 1)
    scenario.join_all("rollout/0", "rollout/1", shard_count=2)
    scenario.sessions["dead/0"], scenario.sessions["rollout/0"] = (
        scenario.sessions["rollout/0"],
        b"started again...."[:16],
    )
    scenario.join("rollout/0", 2)
    scenario.acquire("dead/0")
    scenario.acquire("rollout/1")
    scenario.publish("trainer/0", 2)
    scenario.acquire("rollout/0")
    assert scenario.heard("dead/0") == ["refused UsageError"]
    assert [scenario.heard(f"rollout/{shard}")[0].split()[:2] for shard in (0, 1)] == [["read", "1"], ["read", "1"]]


# --- sources that have sent corrupt bytes ---


def test_a_reader_of_which_all_sources_are_excluded_hears_so_at_once(scenario: Scenario) -> None:
    scenario.join_all("a/0", "b/0", "x/0")
    scenario.publish("a/0", 1)
    a, b = (scenario.sessions[name] for name in ("a/0", "b/0"))
    scenario.acquire("x/0", version=1, exclude=(a,))
    assert scenario.heard("x/0") == ["refused VersionGone"]
    scenario.publish("b/0", 1)
    scenario.acquire("x/0", version=1, exclude=(a,))  # the control
    assert scenario.heard("x/0") == [f"read 1 {CHECKPOINT} 0<-b/0"]
    scenario.acquire("x/0", version=1, exclude=(a,), beside=(b,))  # an additional one: the others go on
    assert scenario.heard("x/0") == []
    scenario.acquire("x/0", version=1, exclude=(a, b), layouts=(RUNTIME, CHECKPOINT))
    assert scenario.heard("x/0") == ["refused VersionGone"]


def test_who_waits_hears_it_when_the_last_other_source_leaves(scenario: Scenario) -> None:
    scenario.join_all("a/0", "b/0", "x/0")
    limit = scenario.hub.limits.readers_per_source_max
    for name in ("a/0", "b/0"):
        scenario.publish(name, 1)
    for number in range(limit):
        scenario.join(f"r{number}/0")
        scenario.acquire(f"r{number}/0", version=1, exclude=(scenario.sessions["a/0"],))
    scenario.acquire("x/0", version=1, exclude=(scenario.sessions["a/0"],))
    assert scenario.heard("x/0") == []  # b is busy, and will have room
    scenario.tell("b/0", m.Bye())
    assert scenario.heard("x/0") == ["refused VersionGone"]


@pytest.mark.parametrize("grows", [True, False])
def test_a_lease_lasts_until_the_readers_deadline_or_as_long_as_any_where_that_grows(grows: bool) -> None:
    scenario = Scenario()
    scenario.join_all("a/0", "x/0")
    scenario.publish("a/0", 1)
    scenario.acquire("x/0", version=1, timeout_s=5.0, grows=grows)
    (lease,) = scenario.hub.registry.workers[scenario.sessions["x/0"]].leases.values()
    assert lease.deadline == scenario.now + (scenario.hub.limits.lease_s if grows else 5.0)


def test_after_a_restart_of_the_hub_others_may_still_come(scenario: Scenario) -> None:
    scenario = Scenario(recovering=True)
    scenario.join_all("a/0", "x/0")
    scenario.publish("a/0", 1, origin="replicated")
    scenario.acquire("x/0", version=1, exclude=(scenario.sessions["a/0"],))
    assert scenario.heard("x/0") == []
    scenario.wait(LIMITS.grace_s + 1)
    assert scenario.heard("x/0") == ["refused VersionGone"]


def test_two_that_read_from_each_other_do_not_wait_for_each_other(scenario: Scenario) -> None:
    scenario.join_all("trainer/0", "a/0", "b/0")
    trainer = (scenario.sessions["trainer/0"],)
    scenario.publish("trainer/0", 1)
    scenario.acquire("a/0", version=1, serve=True)
    scenario.publish("a/0", 1, complete=False, origin="replicated")
    lease = scenario.acquire("b/0", version=1, serve=True, avoid=(scenario.sessions["a/0"],))
    scenario.publish("b/0", 1, complete=False, origin="replicated")
    scenario.heard("a/0"), scenario.heard("b/0")
    scenario.tell("a/0", m.Release(1, 0, True, (3,)))
    scenario.acquire("a/0", version=1, exclude=trainer)
    assert scenario.heard("a/0") == [f"read 1 {CHECKPOINT} 0<-b/0"]
    scenario.tell("b/0", m.Release(lease, 0, True, (3,)))
    scenario.acquire("b/0", version=1, exclude=trainer)
    assert scenario.heard("b/0") == ["refused VersionGone"]  # a has it from b


@pytest.mark.parametrize(("layout", "in_part"), [(CHECKPOINT, True), (CHECKPOINT, False), (RUNTIME, True)])
def test_nobody_is_sent_to_who_reads_a_checkpoint_in_part(scenario: Scenario, layout: str, in_part: bool) -> None:
    """Engines' workers do: the second one was, in every version, to the first one beside it."""
    scenario.join("trainer/0", location=Location("", "", "far"))
    scenario.publish("trainer/0", 1, layout)
    for name in ("a/0", "b/0"):
        scenario.join(name, location=Location("", "", "here"))
        scenario.acquire(name, version=1, layouts=(layout,), serve=True, in_part=in_part)
    source = "trainer/0" if in_part and layout == CHECKPOINT else "a/0"  # the controls
    assert scenario.heard("b/0") == [f"read 1 {layout} 0<-{source}"]


def test_a_runtime_copy_that_is_excluded_is_not_waited_for(scenario: Scenario) -> None:
    scenario.join_all("trainer/0", "engine/0", "x/0")
    scenario.publish("trainer/0", 1)
    scenario.publish("engine/0", 1, RUNTIME)
    how = {"version": 1, "layouts": (RUNTIME, CHECKPOINT), "claim": True}
    scenario.acquire("x/0", **how)
    assert scenario.heard("x/0") == [f"read 1 {RUNTIME} 0<-engine/0"]
    scenario.acquire("x/0", exclude=(scenario.sessions["engine/0"],), **how)
    assert scenario.heard("x/0") == [f"read 1 {CHECKPOINT} 0<-trainer/0 and convert"]


def test_who_sent_corrupt_bytes_is_told_and_counted_and_the_log_says_it_once(scenario: Scenario) -> None:
    scenario.join_all("trainer/0", "a/0", "b/0")
    scenario.publish("trainer/0", 1)
    scenario.logged.clear()
    for reader in ("a/0", "b/0"):
        scenario.inbox.clear()
        lease = scenario.acquire(reader, version=1)
        scenario.tell(reader, m.Release(lease, 0, True, (3, 5)))
        scenario.tell(reader, m.Release(lease, 0, True, (3, 5)))  # its lease has ended: this is no reader's word
        (said,) = [message for message in scenario.inbox["trainer/0"] if isinstance(message, m.Alive)]
        assert said.doubted == (ShardKey(1, CHECKPOINT), (3, 5))
    assert len([line for line in scenario.logged if "got corrupt bytes" in line]) == 1
    (model,) = report(scenario.hub.registry, scenario.now)["models"]
    assert model["corrupt_segments"] == 4
    assert [w["corrupt_segments"] for w in model["workers"]] == [4, 0, 0]
    scenario.acquire("b/0", version=1)
    assert scenario.heard("b/0")[-1] == f"read 1 {CHECKPOINT} 0<-trainer/0"  # whether it is right only it can say


def test_a_source_that_cannot_be_connected_to_is_told_once_if_it_lives() -> None:
    """The hub waits until it has heard the source since; one that has died is blamed for nothing."""
    story = Scenario()
    story.join("trainer/0")
    for reader in ("rollout-0/0", "rollout-1/0"):
        story.join(reader, location=Location(host="b"))
    shut = (story.sessions["trainer/0"], b"nobody knows it!")
    for _ in range(3):
        story.now += 1.0
        story.beat("rollout-0/0", unreached=shut)
    assert story.warned == [] and story.heard("trainer/0") == [], "the control: it is silent"
    story.beat("trainer/0")
    story.heard("trainer/0")
    for reader in ("rollout-0/0", "rollout-1/0", "rollout-0/0"):
        story.now += 1.0
        story.beat(reader, unreached=shut)
    (said,) = story.warned
    assert said.startswith("rollout-0/0 on b cannot connect to trainer/0 at trainer/0: set TENSORHUB_ADVERTISE")
    assert [message.unreached for message in story.inbox["trainer/0"]] == [said]
    (model,) = report(story.hub.registry, story.now)["models"]
    (shown,) = filter(None, (worker["unreached"] for worker in model["workers"]))
    assert shown.startswith("rollout-0/0, rollout-1/0 cannot connect to trainer/0 at trainer/0:")
    for number in range(SOURCES_MAX):
        story.join(f"many-{number}/0")
    story.beat("rollout-0/0", unreached=tuple(story.sessions.values()))
    assert len(story.hub.workers[story.sessions["rollout-0/0"]].unreached) == SOURCES_MAX, "and no more"
    for reader in ("rollout-0/0", "rollout-1/0"):
        story.beat(reader)
    (model,) = report(story.hub.registry, story.now)["models"]
    assert not any(worker["unreached"] for worker in model["workers"]), "they reach it, or have left"
