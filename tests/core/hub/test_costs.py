"""No handler takes more than n log n of what one message holds, and no reader more than its share (attacks 8, 10).

Counted, not timed: each call of a function of the hub, for messages of n and of 4 n parts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hub_scenarios import RUNTIME, Scenario, source_of

from tensorhub_plugins.core.hub.hub import Tick
from tensorhub_plugins.core.hub.limits import LEASES_PER_SESSION_MAX, HubLimits
from tensorhub_plugins.core.hub.registry import CLAIM_TIMES_MAX, CONVERTERS_MAX, OWED_MAX, OWED_TIMES, Registry
from tensorhub_plugins.core.hub.selection import LEASES_PER_SOURCE_MAX
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.protocol.fields import SECONDS_MAX
from tensorhub_plugins.core.security.leases import name_of
from tensorhub_plugins.core.types import CHECKPOINT, Location, Role, ShardKey

SMALL, LARGE = 64, 256
RATIO_MAX = 1.6 * LARGE / SMALL  # n log n: 4 x 8 / 6 is 5.3
SHARDS = 4096


def lines_of(do: Callable[[], object]) -> int:
    """How many lines of ours this runs: generators and loops within a function count, too."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if "tensorhub_plugins" not in frame.f_code.co_filename or frame.f_code.co_filename.endswith("report.py"):
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        do()
    finally:
        sys.settrace(before)
    return count


def held(count: int, *, versions: bool = False) -> tuple[m.Holding, ...]:
    keys = [ShardKey(n + 1, CHECKPOINT) if versions else ShardKey(1, CHECKPOINT, n, SHARDS) for n in range(count)]
    return tuple(m.Holding(key, b"r" * 16, 1) for key in keys)


def of_many_shards(count: int) -> Callable[[], object]:
    """As attack 8 did: each was looked for among all."""
    story = Scenario(recovering=True)
    return lambda: story.join("a/0", SHARDS, holdings=held(count))


def of_many_versions(count: int) -> Callable[[], object]:
    story = Scenario(recovering=True)
    return lambda: story.join("a/0", holdings=held(count, versions=True))


def gives_up_many(versions: bool) -> Callable[[int], Callable[[], object]]:
    def prepare(count: int) -> Callable[[], object]:
        story = Scenario()
        story.join("a/0", 1 if versions else SHARDS, holdings=held(count, versions=versions), retain_newest=1024)
        story.join("b/0", 1 if versions else SHARDS, holdings=held(count, versions=versions))
        keys = tuple(holding.key for holding in held(count, versions=versions))
        return lambda: story.say("a/0", m.Unpublish, keys=keys, timeout_s=5.0)

    return prepare


def ends_a_lease_of_many(count: int) -> Callable[[], object]:
    story = Scenario()
    keys = [ShardKey(1, CHECKPOINT, n, count) for n in range(count)]
    story.join("a/0", count, holdings=tuple(m.Holding(key, b"r" * 16, 1) for key in keys))
    story.join("b/0")
    story.acquire("b/0", 1, serve=True)
    assert story.heard("b/0")[0].startswith("read 1")
    return lambda: story.tell("b/0", m.Release(story.requests["b/0"]))


def announces_many_leases(count: int) -> Callable[[], object]:
    story = Scenario(recovering=True)
    sources = [f"s{n}".encode().ljust(16, b".") for n in range(count)]
    leases = tuple(m.HeldLease(n + 1, 1, CHECKPOINT, {0: source}, 60.0) for n, source in enumerate(sources))
    return lambda: story.join("a/0", leases=leases, request_id=count + 1, pending=tuple(range(1, count + 1)))


def looks_for_room(count: int) -> Callable[[], object]:
    """For so many versions that lack a copy, among as many workers of which none has room."""
    story = Scenario()
    for n in range(count):
        story.join(f"w{n}/0", location=Location("", "", f"h{n}"), holdings=held(count, versions=True) if not n else ())
    story.say("w0/0", m.Retain, newest=count, domains=2)
    story.beat("w0/0")
    story.now += 10.0
    return lambda: story.beat("w0/0")


@pytest.mark.parametrize(
    "prepare",
    [
        of_many_shards,
        of_many_versions,
        gives_up_many(False),
        gives_up_many(True),
        ends_a_lease_of_many,
        announces_many_leases,
        looks_for_room,
    ],
    ids=["shards", "versions", "unpublish shards", "unpublish versions", "release", "leases", "look for room"],
)
def test_what_is_four_times_as_large_takes_about_four_times_as_long(
    prepare: Callable[[int], Callable[[], object]],
) -> None:
    small, large = (lines_of(prepare(count)) for count in (SMALL, LARGE))
    assert large < RATIO_MAX * small, (small, large)


@pytest.mark.slow
def test_the_control_a_square_is_seen() -> None:
    def square(count: int) -> Callable[[], object]:
        story = Scenario()
        story.join("a/0", SHARDS, holdings=held(count))
        (worker,) = story.hub.registry.workers.values()
        keys = list(worker.holdings)
        return lambda: [story.hub.registry.refresh_candidate(worker, key) for key in keys for _ in keys]

    small, large = (lines_of(square(count)) for count in (SMALL, LARGE))
    assert large > RATIO_MAX * small


# --- leases ---


def test_one_reader_gets_so_many_leases_on_a_source_and_others_their_places() -> None:
    story = Scenario()
    story.join_all("trainer/0", "greedy/0", "other/0")
    story.publish("trainer/0", 1)
    for number in range(LEASES_PER_SOURCE_MAX + 30):
        story.acquire("greedy/0", 1)
        granted = story.heard("greedy/0")
        assert bool(granted) is (number < LEASES_PER_SOURCE_MAX), number
    story.acquire("other/0", 1)
    assert source_of(story, "other/0") == "trainer/0"
    story.tell("greedy/0", m.Release(1))
    assert source_of(story, "greedy/0") == "trainer/0"  # what waited is served
    story.publish("other/0", 1, origin="replicated")
    assert story.heard("greedy/0") == [f"read 1 {CHECKPOINT} 0<-other/0"] * LEASES_PER_SOURCE_MAX


@pytest.mark.parametrize("role", ["reader", "publisher"])
def test_readers_keys_leave_places_at_a_source_to_the_run(role: Role) -> None:
    """Four sessions of one key took all 16 places, and every other reader waited."""
    story = Scenario(limits=HubLimits(readers_per_source_max=16))
    names = [f"greedy{number}/0" for number in range(4)]
    story.roles |= dict.fromkeys(names, role)
    story.join_all("trainer/0", "rollout/0", *names)
    story.publish("trainer/0", 1)
    for name in names:
        for _ in range(LEASES_PER_SOURCE_MAX):
            story.acquire(name, 1)
    granted = sum(len(story.heard(name)) for name in names)
    story.acquire("rollout/0", 1)
    is_served = bool(story.heard("rollout/0"))
    assert (granted, is_served) == ((12, True) if role == "reader" else (16, False))  # the latter: the control
    story.tell(names[0], m.Release(1))
    assert sum(len(story.heard(name)) for name in names) == (1 if role == "reader" else 0)  # what waited is served


def test_a_hello_cannot_claim_more() -> None:
    story = Scenario(recovering=True)
    story.join("trainer/0", holdings=held(1, versions=True))
    leases = tuple(m.HeldLease(n, 1, CHECKPOINT, {0: story.sessions["trainer/0"]}, 60.0) for n in range(1, 20))
    story.join("greedy/0", leases=leases, request_id=20, pending=tuple(range(1, 20)))
    assert len(story.hub.registry.workers[story.sessions["trainer/0"]].readers) == LEASES_PER_SOURCE_MAX
    assert any("a lease too many of one reader" in line for line in story.logged)


def test_a_session_has_a_number_of_leases() -> None:
    story = Scenario(recovering=True)
    sources = [f"s{n}".encode().ljust(16, b".") for n in range(LEASES_PER_SESSION_MAX)]
    leases = tuple(m.HeldLease(n + 1, 1, CHECKPOINT, {0: source}, 600.0) for n, source in enumerate(sources))
    story.join("a/0", leases=leases, request_id=len(leases))
    story.requests["a/0"] = len(leases)
    story.join("trainer/0", holdings=held(1, versions=True))
    story.acquire("a/0", 1)
    assert story.heard("a/0") == ["refused UsageError"]
    story.tell("a/0", m.Release(1))
    story.acquire("a/0", 1)
    assert story.heard("a/0")[0].startswith("read 1")


def a_lease_of_a_year() -> Scenario:
    story = Scenario(limits=HubLimits(lease_s=30.0, grace_s=0.0))
    story.join_all("trainer/0", "other/0", "greedy/0")
    for worker in ("trainer/0", "other/0"):
        story.publish(worker, 1, origin="published" if worker == "trainer/0" else "replicated")
    story.acquire("greedy/0", 1, timeout_s=SECONDS_MAX)
    return story


def test_no_lease_is_for_longer_than_the_hub_says() -> None:
    story = a_lease_of_a_year()
    first = source_of(story, "greedy/0")
    story.unpublish(first, 1, timeout_s=1000.0)
    story.wait(29.0)
    assert story.heard(first) == []
    story.wait(2.0)
    assert story.heard(first) == ["unpublished"] and story.heard("greedy/0") == [f"gone {first}"]
    story.acquire("greedy/0", 1, timeout_s=SECONDS_MAX)  # its transfer asks again
    assert story.heard("greedy/0")[0].startswith("read 1")


def an_idle_lease() -> tuple[Scenario, str, HubLimits]:
    """greedy has a lease of half an hour on this worker, which wants to unpublish."""
    limits = HubLimits(grace_s=0.0)
    story = Scenario(limits=limits)
    story.join_all("trainer/0", "other/0", "greedy/0")
    for worker in ("trainer/0", "other/0"):
        story.publish(worker, 1, origin="published" if worker == "trainer/0" else "replicated")
    story.acquire("greedy/0", 1, timeout_s=1800.0)
    source = source_of(story, "greedy/0")
    story.unpublish(source, 1, timeout_s=1800.0)
    assert limits.lease_idle_s <= limits.lease_s / 10 and story.heard(source) == []
    return story, source, limits


def beat(story: Scenario, progress: int, leases: int = 1) -> None:
    said = m.Heartbeat(story.hub.session, 1, (), {1: leases}, progress={1: progress})
    story.tell("greedy/0", said)


@pytest.mark.parametrize("lie", [0, 1, 7])
def test_a_lease_under_which_nothing_is_read_ends(lie: int) -> None:
    """Its reader sends heartbeats, and says the same progress (or none) in all of them."""
    story, source, limits = an_idle_lease()
    beat(story, lie)
    story.wait(limits.lease_idle_s - 1.0)
    beat(story, lie)
    story.heard("greedy/0")
    assert story.heard(source) == []
    story.wait(2.0)
    assert story.heard("greedy/0") == [f"gone {source}"]  # it may ask again
    told = story.inbox[source]
    assert [x.idle for x in told if isinstance(x, m.Alive)] == ["greedy/0"]
    assert [x for x in story.heard(source) if x != "Alive"] == ["unpublished"]  # long before its deadline
    assert any("greedy/0 got no byte of version 1 for 60 s and loses its lease" in line for line in story.logged)


def test_no_hello_and_no_heartbeat_brings_it_back() -> None:
    story, source, limits = an_idle_lease()
    story.wait(limits.lease_idle_s / 2)
    lease = m.HeldLease(1, 1, CHECKPOINT, {0: story.sessions[source]}, 1000.0)
    story.join("greedy/0", leases=(lease,), request_id=9)  # does not make it longer
    (reader,) = (w for w in story.hub.registry.workers.values() if w.name == "greedy/0")
    assert len(reader.leases) == 1
    story.wait(limits.lease_idle_s / 2 + 1.0)
    assert not reader.leases
    beat(story, 99)
    story.join("greedy/0", leases=(lease,), request_id=10)
    assert not reader.leases


def test_the_control_a_read_that_goes_on_keeps_its_lease() -> None:
    story, source, limits = an_idle_lease()
    for progress in range(1, 20):
        story.wait(limits.lease_idle_s - 1.0)
        beat(story, progress)
    assert set(story.heard("greedy/0")) == {"Alive"} and story.heard(source) == []
    story.tell("greedy/0", m.Release(1))
    assert story.heard(source) == ["unpublished"]


@pytest.mark.parametrize("again_at_s", [5.0, 31.0])
def test_a_hello_does_not_make_it_longer(again_at_s: float) -> None:
    story = a_lease_of_a_year()
    first = source_of(story, "greedy/0")
    lease = m.HeldLease(1, 1, CHECKPOINT, {0: story.sessions[first]}, SECONDS_MAX)
    story.wait(again_at_s)
    story.join("greedy/0", leases=(lease,), request_id=9)
    (reader,) = (w for w in story.hub.registry.workers.values() if w.name == "greedy/0")
    assert len(reader.leases) == (again_at_s < 30.0)
    story.wait(31.0 - again_at_s)
    assert not reader.leases
    story.inbox.clear()
    story.tell("greedy/0", m.Heartbeat(story.hub.session, 9, (), {1: 1}))  # until its reader has heard
    assert [type(message) for message in story.inbox["greedy/0"]] == [m.Alive]
    story.tell("greedy/0", m.Heartbeat(story.hub.session, 9, (), {7: 1}))  # the control: one that is not known
    assert any(isinstance(message, m.Unknown) for message in story.inbox["greedy/0"])


# --- of a reader's key the source's word counts ---


@pytest.mark.parametrize(
    ("role", "word", "keeps"),
    [("reader", "none", False), ("reader", "its", True), ("reader", "old", True), ("publisher", "none", True)],
)
def test_a_readers_key_keeps_no_place_by_saying_that_it_reads(role: Role, word: str, keeps: bool) -> None:
    """Its progress grows in every heartbeat; old: a source that does not count."""
    story = Scenario(limits=HubLimits(grace_s=0.0))
    story.roles["greedy/0"] = role
    story.join_all("trainer/0", "greedy/0")
    story.publish("trainer/0", 1)
    number = story.acquire("greedy/0", 1, timeout_s=1800.0)
    assert source_of(story, "greedy/0") == "trainer/0"
    served = {"none": (), "its": (name_of(story.sessions["greedy/0"], number),), "old": None}[word]
    for progress in range(1, 40):
        story.wait(2.0)
        story.tell("greedy/0", m.Heartbeat(story.hub.session, number, (), {1: 1}, progress={1: progress}))
        story.beat("trainer/0", served=served)
    assert ("gone trainer/0" in story.heard("greedy/0")) is not keeps
    told = story.inbox["trainer/0"]
    assert [x.idle for x in told if isinstance(x, m.Alive) and x.idle] == ([] if keeps else ["greedy/0"])


@pytest.mark.parametrize("again", [False, True], ids=["", "its Hello says it once more"])
@pytest.mark.parametrize(("role", "waits"), [("reader", False), ("publisher", True)])
def test_no_unpublish_waits_for_a_readers_key_that_reads_nothing(role: Role, waits: bool, again: bool) -> None:
    story = Scenario(limits=HubLimits(grace_s=0.0))
    story.roles["greedy/0"] = role
    story.join_all("trainer/0", "other/0", "greedy/0")
    for worker in ("trainer/0", "other/0"):
        story.publish(worker, 1, origin="published" if worker == "trainer/0" else "replicated")
    story.acquire("greedy/0", 1, timeout_s=1800.0)
    source = source_of(story, "greedy/0")
    lease = m.HeldLease(1, 1, CHECKPOINT, {0: story.sessions[source]}, 1000.0)
    story.unpublish(source, 1, timeout_s=30.0)
    story.beat(source, served=())
    story.wait(9.0)
    story.beat(source, served=())
    assert "unpublished" not in " ".join(story.heard(source))  # it may be about to begin
    if again:
        story.join("greedy/0", leases=(lease,), request_id=9)
    story.wait(1.5)
    for _ in range(2):
        story.beat(source, served=())
        story.wait(0.5)
    assert ("unpublished cut off greedy/0" in story.heard(source)) is not waits


def test_an_unpublish_waits_for_a_readers_key_that_reads() -> None:
    story = Scenario(limits=HubLimits(grace_s=0.0))
    story.roles["rollout/0"] = "reader"
    story.join_all("trainer/0", "other/0", "rollout/0")
    for worker in ("trainer/0", "other/0"):
        story.publish(worker, 1, origin="published" if worker == "trainer/0" else "replicated")
    number = story.acquire("rollout/0", 1, timeout_s=1800.0)
    source = source_of(story, "rollout/0")
    story.unpublish(source, 1, timeout_s=1000.0)
    for progress in range(1, 100):
        story.wait(1.0)
        story.beat("rollout/0", progress={number: progress})
        story.beat(source, served=(name_of(story.sessions["rollout/0"], number),))
    assert set(story.heard(source)) == {"Alive"}
    story.tell("rollout/0", m.Release(number))
    assert story.heard(source) == ["unpublished"]


# --- claims that bring nothing ---

CLAIM_S = 5.0


def claiming(role: Role, *names: str, shard_count: int = 1) -> Scenario:
    """A trainer with version 1, and workers of this role."""
    story = Scenario(limits=HubLimits(grace_s=0.0, claim_s=CLAIM_S, readers_per_source_max=1024))
    for name in ("trainer/0", *names):
        story.roles[name] = "publisher" if name == "trainer/0" else role
        story.join(name, 1 if name == "trainer/0" else shard_count)
    story.publish("trainer/0", 1)
    return story


def converts(story: Scenario, name: str, version: int = 1) -> bool:
    story.acquire(name, version, layouts=(RUNTIME, CHECKPOINT), claim=True, timeout_s=1000.0)
    return is_to_convert(story, name)


def is_to_convert(story: Scenario, name: str) -> bool:
    return any(line.endswith("and convert") for line in story.heard(name))


@pytest.mark.parametrize("end", ["expires", "leaves"])
@pytest.mark.parametrize(("role", "waits"), [("reader", OWED_MAX), ("publisher", 5)])
def test_a_readers_key_holds_engines_up_no_longer_than_a_claim_or_two(role: Role, waits: int, end: str) -> None:
    """It claims a layout again and again, under new names, and brings nothing."""
    greedy = [f"greedy{number}/0" for number in range(5)]
    story = claiming(role, *greedy, "rollout/0")
    for name in greedy:
        converts(story, name)
    story.acquire("rollout/0", 1, layouts=(RUNTIME, CHECKPOINT), claim=True, timeout_s=1000.0)
    for number in range(5):
        assert is_to_convert(story, "rollout/0") is (number == waits)
        story.wait(CLAIM_S - 1.0)
        if end == "leaves" and story.sessions[greedy[number]] in story.hub.workers:
            story.tell(greedy[number], m.Bye())
        story.wait(1.5)
    assert is_to_convert(story, "rollout/0") is (waits == 5)
    (history,) = story.hub.registry.histories.values()
    story.wait(OWED_TIMES * OWED_MAX * CLAIM_S)
    story.publish("trainer/0", 2)
    assert converts(story, "rollout/0", 2) and history.owed_until.keys() <= {(RUNTIME, 1)}
    story.join("late/0")
    assert not converts(story, "late/0", 2)  # given back


@pytest.mark.parametrize("works", [True, False])
@pytest.mark.parametrize("role", ["reader", "publisher"])
def test_a_converter_that_works_on_is_waited_for_ten_times_as_long_at_most(role: Role, works: bool) -> None:
    """It converts for longer than claim_s; one whose heartbeats all say the same stands still."""
    story = claiming(role, "slow/0", "rollout/0")
    assert converts(story, "slow/0") and not converts(story, "rollout/0")
    waited_s = 0.0
    while not is_to_convert(story, "rollout/0"):
        story.wait(CLAIM_S - 1.0)
        waited_s += CLAIM_S - 1.0
        story.beat("slow/0", worked=int(waited_s) if works else 1)
    limit_s = CLAIM_TIMES_MAX * CLAIM_S
    assert limit_s - 1 <= waited_s <= limit_s + CLAIM_S if works else waited_s < 3 * CLAIM_S
    (history,) = story.hub.registry.histories.values()
    owed_s = history.owed_until.get((RUNTIME, 1), story.now) - story.now
    assert (owed_s > OWED_TIMES * (waited_s - 2 * CLAIM_S) / 2) == (role == "reader"), "all of it was waited in vain"


def test_the_shards_of_a_replica_are_charged_whichever_of_them_works_on() -> None:
    """The one with the charge stood still and expired, and the other was waited for at no charge."""
    story = claiming("reader", "greedy/0", "greedy/1", "rollout/0", shard_count=2)
    assert all(converts(story, name) for name in ("greedy/0", "greedy/1")) and not converts(story, "rollout/0")
    waited_s = 0.0
    while not is_to_convert(story, "rollout/0"):
        story.wait(CLAIM_S - 1.0)
        waited_s += CLAIM_S - 1.0
        story.beat("greedy/1", worked=int(waited_s))
    (history,) = story.hub.registry.histories.values()
    owed_s = history.owed_until.get((RUNTIME, 2), story.now) - story.now
    assert owed_s > (OWED_TIMES - 2) * (waited_s - 2 * CLAIM_S)


def test_claims_that_are_kept_are_waited_for_however_many() -> None:
    story = claiming("reader", "a/0", "b/0")
    for version in range(2, 20):
        story.publish("trainer/0", version)
        assert converts(story, "a/0", version) and not converts(story, "b/0", version)
        story.wait(CLAIM_S - 1.0)
        story.publish("a/0", version, RUNTIME)
        assert story.heard("b/0") == [f"read {version} {RUNTIME} 0<-a/0"]
        for name in ("a/0", "b/0"):
            story.tell(name, m.Release(story.requests[name] - (name == "a/0")))


@pytest.mark.parametrize("first", ["abandons", "converts"])
def test_the_shards_of_a_replica_are_charged_once_and_by_the_last_of_them(first: str) -> None:
    ranks = [f"greedy/{shard}" for shard in range(8)]
    story = claiming("reader", *ranks, shard_count=8)
    (history,) = story.hub.registry.histories.values()
    assert all(converts(story, name) for name in ranks)
    assert list(history.owed_until.values()) == [pytest.approx(story.now + OWED_TIMES * CLAIM_S, abs=1e-3)]
    for name in ranks[:-1]:
        if first == "abandons":
            story.say(name, m.Abandon, key=ShardKey(1, RUNTIME, int(name[-1]), 8))
        else:
            story.publish(name, 1, RUNTIME)
    assert list(history.owed_until.values()) == [pytest.approx(story.now + OWED_TIMES * CLAIM_S, abs=1e-3)]
    story.publish(ranks[-1], 1, RUNTIME)
    assert list(history.owed_until.values()) == [pytest.approx(story.now)]


def test_layouts_that_nobody_has_charge_a_bounded_table() -> None:
    story = claiming("reader", *(f"greedy{number}/0" for number in range(CONVERTERS_MAX)), "rollout/0", "late/0")
    (history,) = story.hub.registry.histories.values()
    for number in range(CONVERTERS_MAX):
        for layout in range(3):
            layouts = (f"runtime:{number}-{layout}", CHECKPOINT)
            story.acquire(f"greedy{number}/0", 1, layouts=layouts, claim=True)
    assert len(history.owed_until) == CONVERTERS_MAX
    assert converts(story, "rollout/0") and converts(story, "late/0")  # nobody waits for whom nothing is kept


@pytest.mark.parametrize("old", [False, True], ids=["", "the control: whenever such a timer ends"])
def test_a_hub_that_is_behind_tries_nothing_again_for_it(old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 65,536 workers that wait it took half a second each time, in which the hub fell behind further."""
    if old:
        monkeypatch.setattr(Registry, "recovers", lambda *_: True)
    story, tried = Scenario(recovering=True), [0]
    attempt = story.hub._try

    def counted(pending: Any, now: float) -> bool:
        tried[0] += 1
        return attempt(pending, now)

    monkeypatch.setattr(story.hub, "_try", counted)
    for n in range(SMALL):
        story.join(f"w{n}/0")
        story.say(f"w{n}/0", m.Wait, version=0, newer_than=0, timeout_s=3600.0)
    found = []
    for ends in (story.hub.registry.recovered, story.hub.registry.all_silent_are_dead):
        tried[0], story.now = 0, ends
        story._deliver(Tick())
        found.append(tried[0] >= SMALL)
        for n in range(SMALL):
            story.beat(f"w{n}/0", pending=(story.requests[f"w{n}/0"],))
    assert found == [True, True]  # those that waited for them
    tried[0] = 0
    for _ in range(3):
        story.now += 1.0
        story._deliver(Tick(deaf_s=0.5))
        story._deliver(Tick())
    assert tried[0] == (3 * SMALL if old else 0)
