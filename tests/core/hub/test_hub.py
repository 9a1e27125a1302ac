"""The hub's rules as stories: what workers say, what it answers. Its state is validated after every event."""

from __future__ import annotations

import pytest

from tensorhub_plugins.core.hub import hub as hub_module
from tensorhub_plugins.core.hub.hub import GRACE_S, SESSION_TIMEOUT_S, Hub, Log, Received, Tick
from tensorhub_plugins.core.hub.report import report, validate
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.types import (
    CHECKPOINT,
    Location,
    ShardKey,
)

RUNTIME = "runtime:f"
OLD_ENOUGH = GRACE_S + 1.0


class Stage:
    """A hub and its workers, named like "rollout-0/1" (replica/shard); answers come back as lines of text."""

    def __init__(self, *, recovering: bool = False) -> None:
        self.hub = Hub(b"H" * 16, 0.0)
        self.now = 0.0 if recovering else OLD_ENOUGH
        self.sessions: dict[str, bytes] = {}
        self.requests: dict[str, int] = {}
        self.inbox: dict[str, list[m.HubMessage]] = {}
        self.logged: list[str] = []

    def join(self, worker: str, shard_count: int = 1, *, location: Location | None = None, **hello: object) -> None:
        replica, shard = worker.rsplit("/", 1)
        session = self.sessions.setdefault(worker, worker.encode().ljust(16, b"."))
        greeting = m.Hello(
            "run", "actor", replica, int(shard), shard_count, location or Location(), {"tcp": worker}, **hello
        )
        self._deliver(Received(session, greeting))

    def say(self, worker: str, message: type, **fields: object) -> int:
        number = self.requests[worker] = self.requests.get(worker, 0) + 1
        self._deliver(Received(self.sessions[worker], message(request_id=number, **fields)))
        return number

    def tell(self, worker: str, message: m.ClientMessage) -> None:
        self._deliver(Received(self.sessions[worker], message))

    def wait(self, seconds: float) -> None:
        """Time passes; everybody who is here beats the heart."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.5)
            self._deliver(Tick())
            for worker, session in self.sessions.items():
                if session in self.hub.workers and worker not in self.silent:
                    self.hub.workers[session].last_heard = self.now

    silent: tuple[str, ...] = ()

    def publish(self, worker: str, version: int, layout: str = CHECKPOINT, **holding: object) -> None:
        record = self.hub.workers[self.sessions[worker]].hello
        key = ShardKey(version, layout, record.shard, record.shard_count)
        root = holding.pop("root", f"{version}{layout}{record.shard}".encode()[:16].ljust(16, b"-"))
        self.say(worker, m.Publish, holding=m.Holding(key, root, 100, **holding))

    def acquire(self, worker: str, version: int = 0, layouts: tuple[str, ...] = (CHECKPOINT,), **more: object) -> int:
        fields: dict[str, object] = {"at_least": 0, "timeout_s": 60.0, **more}
        return self.say(worker, m.Acquire, version=version, layouts=layouts, **fields)

    def unpublish(self, worker: str, version: int, layout: str = CHECKPOINT, timeout_s: float = 30.0) -> int:
        record = self.hub.workers[self.sessions[worker]].hello
        key = ShardKey(version, layout, record.shard, record.shard_count)
        return self.say(worker, m.Unpublish, keys=(key,), timeout_s=timeout_s)

    def heard(self, worker: str) -> list[str]:
        """What this worker was told since the last time, as text."""
        return [_text(message) for message in self.inbox.pop(worker, []) if not isinstance(message, m.Welcome | m.Done)]

    def _deliver(self, event: Received | Tick) -> None:
        for effect in self.hub.handle(event, self.now):
            if isinstance(effect, Log):
                self.logged.append(effect.text)
            else:
                name = next(w for w, s in self.sessions.items() if s == effect.session)
                self.inbox.setdefault(name, []).append(effect.message)
        validate(self.hub)


def _text(message: m.HubMessage) -> str:
    match message:
        case m.Granted(_, version, layout, _, grants, claim):
            sources = " ".join(f"{g.shard}<-{g.worker}" for g in grants)
            return f"read {version} {layout} {sources}" + (" and convert" if claim else "")
        case m.Unpublished(_, cut_off, must_retain):
            return "keep it" if must_retain else f"unpublished{' cut off ' + ' '.join(cut_off) if cut_off else ''}"
        case m.Visible(_, version):
            return f"visible {version}"
        case m.Refused(_, error, _):
            return f"refused {error}"
        case m.SourceGone(session):
            return f"gone {session.rstrip(b'.').decode()}"
        case m.MayRelease(keys):
            return f"may release {' '.join(str(k.version) for k in keys)}"
        case _:
            return type(message).__name__


@pytest.fixture
def stage() -> Stage:
    return Stage()


# --- rule 2: atomic visibility, one version for a group ---


def test_a_version_is_visible_once_every_shard_of_one_replica_holds_it(stage: Stage) -> None:
    stage.join("trainer/0", 2)
    stage.join("trainer/1", 2)
    stage.join("rollout/0")
    stage.say("rollout/0", m.Wait, version=0, newer_than=0, timeout_s=60.0)
    stage.publish("trainer/0", 1)
    assert stage.heard("rollout/0") == []
    stage.publish("trainer/1", 1)
    assert stage.heard("rollout/0") == ["visible 1"]


def test_shards_of_two_replicas_do_not_make_a_version_visible(stage: Stage) -> None:
    stage.join("a/0", 2)
    stage.join("b/1", 2)
    stage.join("rollout/0")
    stage.publish("a/0", 1)
    stage.publish("b/1", 1)
    stage.say("rollout/0", m.Wait, version=0, newer_than=0, timeout_s=5.0)
    stage.wait(6)
    assert stage.heard("rollout/0") == ["refused NotPublished"]


def test_an_incomplete_shard_does_not_make_a_version_visible(stage: Stage) -> None:
    stage.join("trainer/0")
    stage.publish("trainer/0", 1, complete=False)
    assert not stage.hub.histories["run", "actor"].versions[1].visible
    stage.publish("trainer/0", 1)
    assert stage.hub.histories["run", "actor"].versions[1].visible


def test_a_reading_group_agrees_on_latest_though_a_newer_version_appears_in_between(stage: Stage) -> None:
    for name in ("trainer", "rollout"):
        stage.join(f"{name}/0", 2)
        stage.join(f"{name}/1", 2)
    for shard in (0, 1):
        stage.publish(f"trainer/{shard}", 1, RUNTIME)
    stage.acquire("rollout/0", layouts=(RUNTIME,))
    for shard in (0, 1):
        stage.publish(f"trainer/{shard}", 2, RUNTIME)
    stage.acquire("rollout/1", layouts=(RUNTIME,))
    assert stage.heard("rollout/0") == [f"read 1 {RUNTIME} 0<-trainer/0"]
    assert stage.heard("rollout/1") == [f"read 1 {RUNTIME} 1<-trainer/1"]
    stage.acquire("rollout/1", layouts=(RUNTIME,))  # the next round
    stage.acquire("rollout/0", layouts=(RUNTIME,))
    assert stage.heard("rollout/1") == [f"read 2 {RUNTIME} 1<-trainer/1"]
    assert stage.heard("rollout/0") == [f"read 2 {RUNTIME} 0<-trainer/0"]


def test_latest_never_goes_backwards_for_a_reader(stage: Stage) -> None:
    stage.join("trainer/0")
    stage.join("old/0")
    stage.join("rollout/0")
    stage.publish("old/0", 1)
    stage.publish("trainer/0", 2)
    stage.acquire("rollout/0")
    stage.tell("trainer/0", m.Bye())
    stage.heard("rollout/0")
    stage.acquire("rollout/0", timeout_s=5.0)
    stage.join("fresh/0")
    stage.acquire("fresh/0")
    stage.wait(6)
    assert stage.heard("rollout/0") == ["refused NotPublished"]  # it has seen 2
    assert stage.heard("fresh/0") == [f"read 1 {CHECKPOINT} 0<-old/0"]


def test_other_bytes_under_a_published_version_are_refused(stage: Stage) -> None:
    stage.join("trainer/0")
    stage.join("twin/0")
    stage.publish("trainer/0", 1)
    stage.publish("twin/0", 1, root=b"something else..")
    assert stage.heard("twin/0") == ["refused UsageError"]
    stage.publish("twin/0", 1)  # the same bytes are welcome
    assert stage.heard("twin/0") == []


# --- rule 1: leases and unpublish ---


def test_unpublish_waits_for_its_reader_and_grants_nothing_new(stage: Stage) -> None:
    stage.join("trainer/0")
    stage.join("peer/0")
    stage.join("rollout/0")
    stage.publish("trainer/0", 1)
    stage.publish("trainer/0", 2)
    lease = stage.acquire("rollout/0", version=1)
    stage.unpublish("trainer/0", 1)
    assert stage.heard("trainer/0") == []
    stage.acquire("peer/0", version=1, timeout_s=1.0)
    stage.wait(2)
    assert stage.heard("peer/0") == ["refused VersionGone"]
    stage.tell("rollout/0", m.Release(lease))
    assert stage.heard("trainer/0") == ["unpublished"]


@pytest.mark.parametrize(("again", "left"), [(True, [1, 2]), (False, [2])])
def test_an_unpublish_that_comes_late_does_not_mean_what_is_offered_since(
    stage: Stage, again: bool, left: list[int]
) -> None:
    stage.join("a/0")
    stage.join("b/0")
    stage.publish("a/0", 1)
    for version in (1, 2):
        stage.publish("b/0", version)
    stage.requests["a/0"] += 1  # asked twice; the first one takes longer on the way
    stage.unpublish("a/0", 1)
    if again:
        stage.publish("a/0", 1)
    late = m.Unpublish(stage.requests["a/0"] - 1 - again, (ShardKey(1, CHECKPOINT),), 30.0)
    stage.tell("b/0", m.Unpublish(9, (ShardKey(1, CHECKPOINT),), 30.0))
    stage.tell("a/0", late)
    assert stage.heard("a/0") == ["unpublished", "unpublished"]
    versions = stage.hub.histories["run", "actor"].versions
    assert [number for number, version in versions.items() if version.visible] == left


def test_unpublish_ends_at_its_deadline_and_names_who_was_cut_off(stage: Stage) -> None:
    stage.join("trainer/0")
    stage.join("rollout/0")
    stage.publish("trainer/0", 1)
    stage.publish("trainer/0", 2)
    stage.acquire("rollout/0", version=1)
    stage.unpublish("trainer/0", 1, timeout_s=5.0)
    stage.wait(4.5)
    assert stage.heard("trainer/0") == []
    stage.wait(1)
    assert stage.heard("trainer/0") == ["unpublished cut off rollout/0"]


def test_a_lost_reader_or_an_expired_lease_does_not_hold_unpublish_up(stage: Stage) -> None:
    stage.join("trainer/0")
    for name in ("dies/0", "sleeps/0"):
        stage.join(name)
    stage.publish("trainer/0", 1)
    stage.publish("trainer/0", 2)
    stage.acquire("dies/0", version=1)
    stage.acquire("sleeps/0", version=1, timeout_s=3.0)
    stage.unpublish("trainer/0", 1)
    stage.wait(4)
    stage.tell("dies/0", m.Bye())
    assert stage.heard("trainer/0") == ["unpublished"]


def test_a_heartbeat_that_does_not_name_a_lease_ends_it(stage: Stage) -> None:
    stage.join("trainer/0")
    stage.join("rollout/0")
    stage.publish("trainer/0", 1)
    lease = stage.acquire("rollout/0", version=1)
    stage.tell("rollout/0", m.Heartbeat(stage.hub.session, last_request_id=lease, leases={lease: 1}))
    assert report(stage.hub, stage.now)["models"][0]["leases"]
    stage.tell(
        "rollout/0", m.Heartbeat(stage.hub.session, last_request_id=lease - 1)
    )  # sent before: says nothing of it
    assert report(stage.hub, stage.now)["models"][0]["leases"]
    stage.tell("rollout/0", m.Heartbeat(stage.hub.session, last_request_id=lease))  # its Release was lost
    assert not report(stage.hub, stage.now)["models"][0]["leases"]


# --- sources ---


def test_readers_become_sources_and_are_preferred_to_the_publisher(stage: Stage) -> None:
    stage.join("trainer/0")
    stage.publish("trainer/0", 1)
    for name in ("a/0", "b/0"):
        stage.join(name)
    stage.acquire("a/0")
    assert stage.heard("a/0") == [f"read 1 {CHECKPOINT} 0<-trainer/0"]
    stage.publish("a/0", 1, origin="replicated")
    stage.acquire("b/0")
    assert stage.heard("b/0") == [f"read 1 {CHECKPOINT} 0<-a/0"]


def test_near_sources_come_before_far_ones(stage: Stage) -> None:
    stage.join("far/0", location=Location("dc1", "r1", "h1"))
    stage.join("rack/0", location=Location("dc2", "r1", "h2"))
    stage.join("host/0", location=Location("dc2", "r1", "h3"))
    for name in ("far/0", "rack/0", "host/0"):
        stage.publish(name, 1)
    stage.join("rollout/0", location=Location("dc2", "r1", "h3"))
    order = []
    for _ in range(3):
        stage.acquire("rollout/0", avoid=tuple(stage.sessions[name] for name in order))
        order.append(stage.heard("rollout/0")[0].rsplit("<-", 1)[1])
    assert order == ["host/0", "rack/0", "far/0"]


def test_a_shard_that_still_arrives_is_a_source_but_never_in_a_circle(stage: Stage) -> None:
    for name in ("trainer/0", "a/0", "b/0"):
        stage.join(name)
    stage.publish("trainer/0", 1)
    stage.acquire("a/0", version=1)
    stage.publish("a/0", 1, complete=False, origin="replicated")
    stage.acquire("b/0", version=1)
    assert stage.heard("b/0") == [f"read 1 {CHECKPOINT} 0<-a/0"]
    stage.publish("b/0", 1, complete=False, origin="replicated")
    stage.heard("a/0")
    stage.tell("a/0", m.Release(stage.requests["a/0"] - 1, lost=True))
    trainer = stage.sessions["trainer/0"]
    again = {"shards": (0,), "shards_layout": CHECKPOINT, "shard_count": 1}
    stage.acquire("a/0", version=1, avoid=(trainer,), **again)
    assert stage.heard("a/0") == [f"read 1 {CHECKPOINT} 0<-trainer/0"]  # b would be free, but reads from a


def test_a_source_that_was_lost_is_the_last_choice_until_it_is_heard_again(stage: Stage) -> None:
    for name in ("a/0", "b/0", "x/0", "y/0"):
        stage.join(name)
    stage.publish("a/0", 1)
    lease = stage.acquire("x/0")
    stage.publish("b/0", 1)
    stage.tell("x/0", m.Release(lease, lost=True))
    stage.heard("x/0")
    for _ in range(2):  # though b becomes busier than a
        stage.acquire("y/0")
        assert stage.heard("y/0") == [f"read 1 {CHECKPOINT} 0<-b/0"]
    stage.tell("a/0", m.Heartbeat(stage.hub.session))
    stage.acquire("y/0")
    assert stage.heard("y/0") == [f"read 1 {CHECKPOINT} 0<-a/0"]


def test_readers_per_source_are_limited_and_the_next_waits_for_room(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "READERS_PER_SOURCE_MAX", 2)
    stage.join("trainer/0")
    stage.publish("trainer/0", 1)
    leases = {}
    for name in ("a/0", "b/0", "c/0"):
        stage.join(name)
        leases[name] = stage.acquire(name)
    assert stage.heard("c/0") == []
    stage.tell("a/0", m.Release(leases["a/0"]))
    assert stage.heard("c/0") == [f"read 1 {CHECKPOINT} 0<-trainer/0"]


def herd(stage: Stage, count: int, **location: str) -> list[str]:
    """So many workers on hosts of their own that wait for version 1 and pass on what they read."""
    names = []
    for number in range(count):
        place = Location(location.get("data_center", "dc"), "", f"{location.get('data_center', 'dc')}-{number}")
        names.append(f"{place.host}/0")
        stage.join(names[-1], location=place)
        stage.acquire(names[-1], version=1, serve=True)
    return names


def source_of(stage: Stage, reader: str) -> str:
    (line,) = stage.heard(reader)
    return line.rsplit("<-", 1)[1]


def test_a_herd_that_waits_becomes_a_chain_at_once_without_a_word_from_its_links(stage: Stage) -> None:
    stage.join("trainer/0", location=Location("dc", "", "t"))
    readers = herd(stage, 20)
    stage.publish("trainer/0", 1)
    sources = [source_of(stage, reader) for reader in readers]
    assert sources == ["trainer/0", *readers[:-1]]


def test_readers_that_do_not_pass_on_share_the_publisher(stage: Stage) -> None:
    stage.join("trainer/0")
    stage.publish("trainer/0", 1)
    for name in ("a/0", "b/0"):
        stage.join(name)
        stage.acquire(name)
        assert source_of(stage, name) == "trainer/0"


def test_a_promise_ends_with_the_lease_it_came_from(stage: Stage) -> None:
    stage.join("trainer/0", location=Location("dc", "", "t"))
    stage.publish("trainer/0", 1)
    (first,) = herd(stage, 1)
    assert source_of(stage, first) == "trainer/0"
    stage.tell(first, m.Release(stage.requests[first]))
    stage.join("late/0", location=Location("dc", "", "late"))
    stage.acquire("late/0")
    assert source_of(stage, "late/0") == "trainer/0"


def test_one_seed_crosses_into_a_data_centre_and_another_takes_over(stage: Stage) -> None:
    stage.join("trainer/0", location=Location("home", "", "t"))
    readers = herd(stage, 5, data_center="far")
    stage.publish("trainer/0", 1)
    assert [source_of(stage, reader) for reader in readers] == ["trainer/0", *readers[:-1]]
    stage.tell(readers[0], m.Bye())
    assert stage.heard(readers[1]) == [f"gone {readers[0]}"]
    stage.tell(readers[1], m.Release(stage.requests[readers[1]], 0, True))
    again = {"shards": (0,), "shards_layout": CHECKPOINT, "shard_count": 1, "serve": True}
    stage.acquire(readers[1], version=1, **again)
    assert source_of(stage, readers[1]) == "trainer/0"  # all others depend on it
    assert sum(c.total() for c in stage.hub._crossings.values()) == 1


def test_an_uplink_is_limited_and_shared_fairly_between_models(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "UPLINK_READERS_MAX", 2)
    for model in ("one", "two"):
        for shard in range(4):
            for kind, place in (("trainer", "home"), ("reader", "far")):
                name = f"{model}-{kind}/{shard}"
                session = stage.sessions.setdefault(name, name.encode().ljust(16, b"."))
                location = Location(place, "", f"{name}")
                hello = m.Hello("run", model, f"{model}-{kind}", shard, 4, location, {"tcp": name})
                stage._deliver(Received(session, hello))
    for model in ("one", "two"):
        for shard in range(4):
            stage.publish(f"{model}-trainer/{shard}", 1, RUNTIME, root=f"{model}{shard}".encode().ljust(16, b"-"))
    for model in ("one", "two"):
        for shard in range(4):
            stage.acquire(f"{model}-reader/{shard}", version=1, layouts=(RUNTIME,))

    def granted() -> list[str]:
        return [name for name in stage.sessions if "reader" in name and stage.heard(name)]

    assert granted() == ["one-reader/0", "one-reader/1"]  # the first ones took all there was
    order = []
    running = ["one-reader/0", "one-reader/1"]
    while running:
        stage.tell(running[0], m.Release(stage.requests[running[0]]))
        running = running[1:] + (now := granted())
        order += now
    assert sorted(order) == sorted(f"{model}-reader/{n}" for model in ("one", "two") for n in range(4))[2:]
    assert order[0].startswith("two") and {name[:3] for name in order[1:3]} == {"one", "two"}


def test_a_further_source_is_one_with_nothing_to_do_unless_it_is_urgent(stage: Stage) -> None:
    for name in ("a/0", "b/0", "x/0", "y/0"):
        stage.join(name, location=Location("dc", "", name))
    stage.publish("a/0", 1)
    stage.publish("b/0", 1)
    first = {}
    for name in ("x/0", "y/0"):
        first[name] = stage.acquire(name, version=1)
        assert source_of(stage, name) == {"x/0": "a/0", "y/0": "b/0"}[name]
    beside = {"shards": (0,), "shards_layout": CHECKPOINT, "shard_count": 1, "beside": (stage.sessions["a/0"],)}
    stage.acquire("x/0", version=1, **beside)
    assert stage.heard("x/0") == []  # b has a reader
    stage.acquire("x/0", version=1, urgent=True, **beside)
    assert source_of(stage, "x/0") == "b/0"
    stage.tell("x/0", m.Release(stage.requests["x/0"]))
    stage.tell("y/0", m.Release(first["y/0"]))
    assert source_of(stage, "x/0") == "b/0"  # what it asked for first


def test_a_slow_source_in_reach_is_no_reason_to_cross_a_long_way(stage: Stage) -> None:
    stage.join("trainer/0", location=Location("home", "", "t"))
    stage.join("peer/0", location=Location("far", "", "p"))
    stage.join("x/0", location=Location("far", "", "x"))
    stage.publish("trainer/0", 1)
    stage.publish("peer/0", 1, origin="replicated")
    stage.acquire("x/0", version=1)
    assert source_of(stage, "x/0") == "peer/0"
    beside = {"shards": (0,), "shards_layout": CHECKPOINT, "shard_count": 1, "beside": (stage.sessions["peer/0"],)}
    stage.acquire("x/0", version=1, urgent=True, **beside)
    assert stage.heard("x/0") == []


def test_over_a_long_way_a_further_source_is_only_given_when_the_first_is_slow(stage: Stage) -> None:
    stage.join("a/0", location=Location("home", "", "a"))
    stage.join("b/0", location=Location("home", "", "b"))
    stage.join("x/0", location=Location("far", "", "x"))
    stage.publish("a/0", 1)
    stage.publish("b/0", 1)
    stage.acquire("x/0", version=1)
    assert source_of(stage, "x/0") == "a/0"
    beside = {"shards": (0,), "shards_layout": CHECKPOINT, "shard_count": 1, "beside": (stage.sessions["a/0"],)}
    stage.acquire("x/0", version=1, timeout_s=0.0, **beside)
    stage.wait(0.5)
    assert stage.heard("x/0") == ["refused DeadlineExceeded"]
    stage.acquire("x/0", version=1, urgent=True, **beside)
    assert source_of(stage, "x/0") == "b/0"


def test_a_deadline_is_kept_to_the_millisecond(stage: Stage) -> None:
    """The shell asks next_deadline when to come back."""
    stage._deliver(Tick())  # the end of its recovery is behind us
    stage.join("a/0")
    stage.say("a/0", m.Wait, version=9, newer_than=0, timeout_s=0.123)
    assert 0.12 < stage.hub.next_deadline(stage.now) - stage.now < 0.13
    stage.now += 0.123
    stage._deliver(Tick())
    assert stage.heard("a/0") == ["refused NotPublished"]


def test_readers_are_told_when_their_source_is_given_up(stage: Stage) -> None:
    for name in ("trainer/0", "rollout/0"):
        stage.join(name)
    stage.publish("trainer/0", 1)
    stage.acquire("rollout/0")
    stage.heard("rollout/0")
    stage.silent = ("trainer/0",)
    stage.wait(SESSION_TIMEOUT_S + 1)
    assert stage.heard("rollout/0") == ["gone trainer/0"]
    assert any("version 1 is lost with its last holder" in line for line in stage.logged)


def test_a_checkpoint_is_read_whole_and_a_runtime_layout_shard_by_shard(stage: Stage) -> None:
    for shard in (0, 1):
        stage.join(f"trainer/{shard}", 2)
        stage.publish(f"trainer/{shard}", 1)
        stage.join(f"engine/{shard}", 2)
        stage.publish(f"engine/{shard}", 1, RUNTIME)
        stage.join(f"rollout/{shard}", 2)
    stage.acquire("rollout/1")
    stage.acquire("rollout/1", layouts=(RUNTIME,))
    assert stage.heard("rollout/1") == [
        f"read 1 {CHECKPOINT} 0<-trainer/0 1<-trainer/1",
        f"read 1 {RUNTIME} 1<-engine/1",
    ]


# --- who converts ---


def test_one_reader_converts_and_the_others_wait_for_its_layout(stage: Stage) -> None:
    stage.join("trainer/0")
    stage.publish("trainer/0", 1)
    for name in ("a/0", "b/0"):
        stage.join(name)
        stage.acquire(name, layouts=(RUNTIME, CHECKPOINT), claim=True)
    assert stage.heard("a/0") == [f"read 1 {CHECKPOINT} 0<-trainer/0 and convert"]
    assert stage.heard("b/0") == []
    stage.publish("a/0", 1, RUNTIME)
    assert stage.heard("b/0") == [f"read 1 {RUNTIME} 0<-a/0"]


def test_all_shards_of_a_version_are_converted_by_one_replica(stage: Stage) -> None:
    """Else a would wait for b's second shard and b for a's first: none converts before all its workers are ready."""
    stage.join("trainer/0")
    stage.publish("trainer/0", 1)
    for name in ("a/0", "b/1", "b/0", "a/1"):
        stage.join(name, 2)
        stage.acquire(name, 1, layouts=(RUNTIME, CHECKPOINT), claim=True)
    for name in ("a/0", "a/1"):
        assert stage.heard(name) == [f"read 1 {CHECKPOINT} 0<-trainer/0 and convert"]
    for name in ("b/0", "b/1"):
        assert stage.heard(name) == []
    stage.publish("a/0", 1, RUNTIME)
    stage.publish("a/1", 1, RUNTIME)
    for shard in (0, 1):
        assert stage.heard(f"b/{shard}") == [f"read 1 {RUNTIME} {shard}<-a/{shard}"]


@pytest.mark.parametrize("end", ["abandons", "leaves", "is silent", "is too slow"])
def test_another_converts_when_the_first_does_not(stage: Stage, end: str) -> None:
    stage.join("trainer/0")
    stage.publish("trainer/0", 1)
    for name in ("a/0", "b/0"):
        stage.join(name)
        stage.acquire(name, layouts=(RUNTIME, CHECKPOINT), claim=True, timeout_s=1000.0)
    if end == "abandons":
        stage.say("a/0", m.Abandon, key=ShardKey(1, RUNTIME))
    elif end == "leaves":
        stage.tell("a/0", m.Bye())
    elif end == "is silent":
        stage.silent = ("a/0",)
        stage.wait(SESSION_TIMEOUT_S + 1)
    else:
        stage.wait(hub_module.CLAIM_S - 1)
        assert stage.heard("b/0") == []
        stage.wait(2)
    assert stage.heard("b/0") == [f"read 1 {CHECKPOINT} 0<-trainer/0 and convert"]


# --- rule 4: retention ---


def test_the_last_copy_of_the_newest_version_is_kept_until_a_newer_one_is_visible(stage: Stage) -> None:
    stage.join("trainer/0")
    stage.publish("trainer/0", 1)
    stage.unpublish("trainer/0", 1)
    assert stage.heard("trainer/0") == ["keep it"]
    stage.join("rollout/0")
    stage.acquire("rollout/0")
    assert stage.heard("rollout/0") == [f"read 1 {CHECKPOINT} 0<-trainer/0"]
    stage.tell("trainer/0", m.Heartbeat(stage.hub.session))
    assert stage.heard("trainer/0") == ["Alive"]
    stage.publish("trainer/0", 2)
    stage.tell("trainer/0", m.Heartbeat(stage.hub.session))
    assert stage.heard("trainer/0") == ["Alive", "may release 1"]


def test_the_last_checkpoint_copy_is_kept_even_when_a_runtime_copy_is_left(stage: Stage) -> None:
    """Only the checkpoint layout can be read by an engine of another build."""
    stage.join("trainer/0")
    stage.join("a/0")
    stage.publish("trainer/0", 1)
    stage.publish("a/0", 1, RUNTIME)
    stage.unpublish("a/0", 1, RUNTIME)
    assert stage.heard("a/0") == ["unpublished"]
    stage.publish("a/0", 1, RUNTIME)
    stage.unpublish("trainer/0", 1)
    assert stage.heard("trainer/0") == ["keep it"]


def test_a_copy_that_another_holds_too_is_not_kept(stage: Stage) -> None:
    for name in ("trainer/0", "a/0"):
        stage.join(name)
        stage.publish(name, 1)
    stage.unpublish("trainer/0", 1)
    assert stage.heard("trainer/0") == ["unpublished"]


def test_retain_counts_versions(stage: Stage) -> None:
    stage.join("trainer/0")
    stage.say("trainer/0", m.Retain, newest=2)
    for version in (1, 2, 3):
        stage.publish("trainer/0", version)
    for version in (1, 2, 3):
        stage.unpublish("trainer/0", version)
    assert stage.heard("trainer/0") == ["unpublished", "keep it", "keep it"]


# --- what operators decide ---


def operators_scene(stage: Stage, *versions: int) -> None:
    """Versions that the trainer holds, a rollout that has seen the newest, and an operator."""
    for name in ("trainer/0", "rollout/0", "operator/0"):
        stage.join(name)
    stage.say("trainer/0", m.Retain, newest=len(versions))
    for version in versions:
        stage.publish("trainer/0", version)
    stage.tell("rollout/0", m.Release(stage.acquire("rollout/0")))
    stage.heard("rollout/0")


def direct(stage: Stage, kind: type, version: int, by: str = "operator/0") -> list[str]:
    """What the operator is answered; the directive itself left out."""
    stage.inbox.clear()
    stage.say(by, kind, version=version, timeout_s=5.0)
    return [text for text in stage.heard(by) if text != "Alive"]


def directive(stage: Stage) -> m.Directive:
    return stage.hub.histories["run", "actor"].directive


def targets(stage: Stage, installed: int, worker: str = "rollout/0", **more: object) -> list[str]:
    """What a follower hears at once, or by the end of its patience."""
    stage.inbox.pop(worker, None)
    stage.say(worker, m.Target, installed=installed, timeout_s=2.0, **more)
    stage.wait(3.0)
    return [text for text in stage.heard(worker) if text != "Alive"]


def test_latest_is_the_pinned_version_also_for_who_has_seen_a_newer_one(stage: Stage) -> None:
    operators_scene(stage, 1, 2)
    stage.acquire("rollout/0", version=0, at_least=2, timeout_s=0.0)
    assert stage.heard("rollout/0") == [f"read 2 {CHECKPOINT} 0<-trainer/0"]  # the control
    assert direct(stage, m.Pin, 1) == []
    stage.publish("trainer/0", 3)  # visible, and nobody follows it
    stage.inbox.clear()
    stage.acquire("rollout/0", version=0, at_least=2, timeout_s=0.0)
    stage.say("rollout/0", m.Wait, version=0, newer_than=0, timeout_s=0.0)
    stage.say("rollout/0", m.Wait, version=0, newer_than=1, timeout_s=0.0)
    stage.say("rollout/0", m.Wait, version=3, newer_than=0, timeout_s=0.0)  # by its number it can be had
    heard = [f"read 1 {CHECKPOINT} 0<-trainer/0", "visible 1", "refused NotPublished", "visible 3"]
    assert stage.heard("rollout/0") == heard
    assert targets(stage, 2) == ["visible 1"] and targets(stage, 1) == ["refused NotPublished"]
    assert targets(stage, 1, pins=False) == ["visible 3"]
    assert direct(stage, m.Pin, 0) == []
    stage.acquire("rollout/0", version=0, timeout_s=0.0)
    assert stage.heard("rollout/0")[-1] == f"read 3 {CHECKPOINT} 0<-trainer/0"
    assert targets(stage, 1) == ["visible 3"]


def test_a_reading_group_agrees_though_a_pin_comes_in_between(stage: Stage) -> None:
    for name in ("trainer", "rollout"):
        stage.join(f"{name}/0", 2)
        stage.join(f"{name}/1", 2)
    stage.say("trainer/0", m.Retain, newest=2)
    for version in (1, 2):
        for shard in (0, 1):
            stage.publish(f"trainer/{shard}", version, RUNTIME)
    stage.acquire("rollout/0", layouts=(RUNTIME,))
    direct(stage, m.Pin, 1, by="trainer/0")
    stage.acquire("rollout/1", layouts=(RUNTIME,), at_least=1)
    assert stage.heard("rollout/1") == ["Alive", f"read 2 {RUNTIME} 1<-trainer/1"]
    stage.acquire("rollout/1", layouts=(RUNTIME,), at_least=2)  # the next round goes back, in all shards
    stage.acquire("rollout/0", layouts=(RUNTIME,), at_least=2)
    assert stage.heard("rollout/1") == [f"read 1 {RUNTIME} 1<-trainer/1"]
    assert stage.heard("rollout/0")[-1] == f"read 1 {RUNTIME} 0<-trainer/0"


def test_only_a_version_that_is_held_can_be_pinned(stage: Stage) -> None:
    operators_scene(stage, 1, 2)
    stage.publish("trainer/0", 5, complete=False)
    for version in (5, 9):
        assert direct(stage, m.Pin, version) == ["refused UsageError"]
    assert "version 9 cannot be pinned because nobody holds it; held: [1, 2]" in stage.logged[-1]
    assert directive(stage) == m.NO_DIRECTIVE


def test_the_last_copy_of_a_pinned_version_is_kept(stage: Stage) -> None:
    operators_scene(stage, 1, 2)
    stage.say("trainer/0", m.Retain, newest=1)
    direct(stage, m.Pin, 1)
    stage.unpublish("trainer/0", 1)
    assert stage.heard("trainer/0")[-1] == "keep it"
    direct(stage, m.Pin, 0)
    stage.tell("trainer/0", m.Heartbeat(stage.hub.session))
    assert "may release 1" in stage.heard("trainer/0")  # the control: it was the pin that kept it


def test_a_pinned_version_that_is_lost_moves_nobody_and_says_so(stage: Stage) -> None:
    operators_scene(stage, 1, 2)
    stage.join("old/0")
    stage.publish("old/0", 3)
    direct(stage, m.Pin, 3)
    stage.tell("old/0", m.Bye())
    assert targets(stage, 2) == ["refused VersionGone"]
    assert direct(stage, m.Pin, 0) == [] and targets(stage, 1) == ["visible 2"]
    operators = report(stage.hub, stage.now)["models"][0]
    assert (operators["pinned"], operators["withdrawn"]) == (None, [])


def test_a_withdrawn_version_cannot_be_had_and_who_runs_it_returns(stage: Stage) -> None:
    operators_scene(stage, 1, 2)
    stage.join("waiting/0")
    stage.acquire("waiting/0", layouts=(RUNTIME,), version=2)
    assert direct(stage, m.Withdraw, 2) == []
    assert stage.heard("waiting/0") == ["Alive", "refused VersionGone"]
    stage.inbox.clear()
    stage.acquire("rollout/0", version=2)
    stage.say("rollout/0", m.Wait, version=2, newer_than=0, timeout_s=60.0)
    stage.acquire("rollout/0", at_least=2)
    assert stage.heard("rollout/0") == ["refused VersionGone"] * 2 + [f"read 1 {CHECKPOINT} 0<-trainer/0"]
    assert targets(stage, 2) == ["visible 1"] and targets(stage, 1) == ["refused NotPublished"]
    assert report(stage.hub, stage.now)["models"][0]["withdrawn"] == [2]
    stage.publish("trainer/0", 3)
    assert targets(stage, 2) == ["visible 3"]


def test_without_a_word_of_an_operator_no_follower_goes_back(stage: Stage) -> None:
    """The control of the others: version 2 is lost, which is no reason to leave it."""
    operators_scene(stage, 1)
    stage.join("other/0")
    stage.publish("other/0", 2)
    stage.tell("other/0", m.Bye())
    assert targets(stage, 2) == ["refused NotPublished"] and targets(stage, 0) == ["visible 1"]


def test_with_nothing_to_return_to_a_follower_stays_and_hears_why(stage: Stage) -> None:
    operators_scene(stage, 1)
    direct(stage, m.Withdraw, 1)
    assert targets(stage, 1) == ["refused VersionGone"]
    assert targets(stage, 0) == ["refused NotPublished"]


def test_a_withdrawn_version_is_not_published_again(stage: Stage) -> None:
    operators_scene(stage, 1, 2)
    direct(stage, m.Withdraw, 2)
    stage.join("twin/0")
    stage.publish("twin/0", 2)
    assert stage.heard("twin/0") == ["refused UsageError"] and "publish under a higher number" in stage.logged[-1]
    stage.publish("twin/0", 2, origin="replicated")  # it has just finished reading it: the truth, and no more
    assert stage.heard("twin/0") == [] and not stage.hub.histories["run", "actor"].versions[2].visible
    stage.unpublish("trainer/0", 2)
    stage.unpublish("twin/0", 2)
    assert stage.heard("twin/0") == ["unpublished"]  # bad versions are not retained
    stage.publish("trainer/0", 2)
    assert stage.heard("trainer/0")[-1] == "refused UsageError"


def test_the_lease_on_a_withdrawn_version_ends_with_the_readers_word(stage: Stage) -> None:
    operators_scene(stage, 1, 2)
    lease = stage.acquire("rollout/0")
    direct(stage, m.Withdraw, 2)
    (told,) = [message for message in stage.inbox["rollout/0"] if isinstance(message, m.Alive)]
    assert told.directive == directive(stage) and told.directive.withdrawn == (2,)
    stage.unpublish("trainer/0", 2)
    assert "unpublished" not in stage.heard("trainer/0")  # it still reads
    stage.tell("rollout/0", m.Release(lease))
    assert stage.heard("trainer/0") == ["unpublished"]


def test_a_pin_ends_with_the_withdrawal_of_its_version(stage: Stage) -> None:
    operators_scene(stage, 1, 2)
    direct(stage, m.Pin, 1)
    direct(stage, m.Withdraw, 1)
    assert (directive(stage).pin, directive(stage).withdrawn) == (0, (1,))
    assert direct(stage, m.Pin, 1) == ["refused UsageError"] and "was withdrawn" in stage.logged[-1]
    assert targets(stage, 1) == ["visible 2"]


def test_what_was_never_published_cannot_be_withdrawn(stage: Stage) -> None:
    operators_scene(stage, 1, 2)
    assert direct(stage, m.Withdraw, 3) == ["refused UsageError"] and "never published" in stage.logged[-1]
    stage.unpublish("trainer/0", 1)
    assert direct(stage, m.Withdraw, 1) == []  # gone already, and it shall not come back


def test_the_same_word_twice_changes_nothing_but_a_pin_is_a_new_decision(stage: Stage) -> None:
    operators_scene(stage, 1, 2)
    direct(stage, m.Pin, 0)
    assert directive(stage).serial == 0
    for kind, version, serial in ((m.Withdraw, 2, 1), (m.Withdraw, 2, 1), (m.Pin, 1, 2), (m.Pin, 1, 3), (m.Pin, 0, 4)):
        assert direct(stage, kind, version) == []
        assert directive(stage).serial == serial
    direct(stage, m.Pin, 0)
    assert directive(stage) == m.Directive(4, 0, (2,))


def test_two_operators_pin_at_once_and_the_last_word_counts_for_everybody(stage: Stage) -> None:
    operators_scene(stage, 1, 2, 3)
    stage.join("other/0")
    stage.say("operator/0", m.Pin, version=1, timeout_s=5.0)
    stage.say("other/0", m.Pin, version=2, timeout_s=5.0)
    for name in ("operator/0", "other/0", "rollout/0", "trainer/0"):
        known = [message.directive for message in stage.inbox[name] if isinstance(message, m.Alive)]
        assert known[-1] == directive(stage) == m.Directive(2, 2)


def test_a_refused_version_is_passed_over_until_it_is_pinned_again(stage: Stage) -> None:
    operators_scene(stage, 1, 2, 3)
    assert targets(stage, 1, refused=(3,)) == ["visible 2"] and targets(stage, 1) == ["visible 3"]
    assert targets(stage, 2, refused=(3,)) == ["refused NotPublished"]
    direct(stage, m.Withdraw, 2)  # it returns past what it cannot install
    assert targets(stage, 2, refused=(3,)) == ["visible 1"]
    serial = directive(stage).serial
    direct(stage, m.Pin, 3)
    assert targets(stage, 1, refused=(3,), serial=serial) == ["visible 3"]
    assert targets(stage, 1, refused=(3,), serial=serial + 1) == ["refused NotPublished"]  # refused under this pin
    direct(stage, m.Pin, 3)
    assert targets(stage, 1, refused=(3,), serial=serial + 1) == ["visible 3"]


def test_a_restarted_hub_has_the_directive_with_the_first_hello_and_the_highest_serial_counts() -> None:
    stage = Stage(recovering=True)
    here = m.Holding(ShardKey(2, CHECKPOINT), b"r" * 16, 100)
    old = m.Holding(ShardKey(1, CHECKPOINT), b"r" * 16, 100)
    stage.join("late/0", directive=m.Directive(1, 0, (2,)))  # was away when version 1 was pinned
    stage.join("a/0", holdings=(here, old), directive=m.Directive(7, 1, ()))
    assert directive(stage) == m.Directive(7, 1, (2,))  # and what was withdrawn stays so
    assert "Alive" in stage.heard("late/0")
    stage.acquire("late/0")
    assert stage.heard("late/0") == [f"read 1 {CHECKPOINT} 0<-a/0"]
    stage.join("b/0", directive=m.Directive(3, 2, ()))
    assert directive(stage) == m.Directive(7, 1, (2,)) and stage.heard("late/0") == []
    (welcome,) = stage.inbox["b/0"]
    assert isinstance(welcome, m.Welcome) and welcome.directive == directive(stage)


def test_a_restarted_hub_takes_directives_when_it_has_heard_everybody() -> None:
    stage = Stage(recovering=True)
    stage.join("operator/0")
    stage.join("a/0", holdings=(m.Holding(ShardKey(1, CHECKPOINT), b"r" * 16, 100),))
    stage.say("operator/0", m.Pin, version=1, timeout_s=60.0)
    stage.say("operator/0", m.Pin, version=1, timeout_s=0.1)
    stage.wait(GRACE_S - 0.5)
    assert stage.heard("operator/0") == ["refused DeadlineExceeded"] and directive(stage).pin == 0
    stage.join("b/0", directive=m.Directive(5, 0, (3,)))
    stage.wait(1.0)
    assert directive(stage) == m.Directive(6, 1, (3,))  # it came after the one that b had


def test_a_restarted_hub_sends_nobody_back_before_it_has_heard_everybody() -> None:
    stage = Stage(recovering=True)
    stage.join("rollout/0", directive=m.Directive(1, 0, (7,)))
    stage.join("old/0", holdings=(m.Holding(ShardKey(5, CHECKPOINT), b"r" * 16, 100),))
    stage.say("rollout/0", m.Target, installed=7, timeout_s=60.0)
    stage.wait(1.0)
    assert stage.heard("rollout/0") == []
    stage.say("rollout/0", m.Target, installed=7, timeout_s=0.0)
    assert stage.heard("rollout/0") == ["refused NotPublished"]  # not that there is none
    stage.join("newer/0", holdings=(m.Holding(ShardKey(6, CHECKPOINT), b"r" * 16, 100),))
    stage.wait(GRACE_S)
    assert stage.heard("rollout/0") == ["visible 6"]


def test_a_heartbeat_makes_up_for_a_directive_that_was_lost(stage: Stage) -> None:
    operators_scene(stage, 1, 2)
    direct(stage, m.Pin, 1)
    for mark, told in (
        (m.directive_checksum(m.NO_DIRECTIVE), directive(stage)),
        (m.directive_checksum(directive(stage)), None),
        (0, None),  # a worker that is older than directives
    ):
        stage.inbox.clear()
        stage.tell("rollout/0", m.Heartbeat(stage.hub.session, directive_checksum=mark))
        (alive,) = stage.inbox["rollout/0"]
        assert isinstance(alive, m.Alive) and alive.directive == told


def test_no_directive_is_given_that_could_not_be_sent(stage: Stage) -> None:
    operators_scene(stage, 1, 2)
    stage.join("one/0", directive=m.Directive(0, 0, tuple(range(3, 3 + m.WITHDRAWN_MAX))))
    assert direct(stage, m.Withdraw, 1) == ["refused UsageError"] and "no more are remembered" in stage.logged[-1]
    stage.join("two/0", directive=m.Directive(m.SERIAL_MAX, 0, ()))
    assert direct(stage, m.Pin, 1) == ["refused UsageError"] and "another run name" in stage.logged[-1]


# --- rule 6: a restarted hub ---


def test_a_restarted_hub_is_rebuilt_by_hello_and_waits_before_it_decides() -> None:
    stage = Stage(recovering=True)
    key = ShardKey(7, CHECKPOINT)
    held = m.Holding(key, b"7" * 16, 100)
    stage.join("trainer/0", holdings=(held,))
    stage.unpublish("trainer/0", 7)
    assert stage.heard("trainer/0") == []  # a reader may still have to say that it reads
    lease = m.HeldLease(3, 7, CHECKPOINT, {0: stage.sessions["trainer/0"]}, 60.0)
    stage.join("rollout/0", leases=(lease,), request_id=3)
    stage.join("peer/0", holdings=(m.Holding(key, b"7" * 16, 100, True, "replicated"),))
    stage.wait(GRACE_S + 1)
    assert stage.heard("trainer/0") == []
    stage.requests["rollout/0"] = 3
    stage.tell("rollout/0", m.Release(3))
    assert stage.heard("trainer/0") == ["unpublished"]


def test_a_restarted_hub_does_not_lend_what_hangs_on_somebody_it_has_not_heard_of() -> None:
    """reader/0 is read from by stranger/0, which is read from by middle/0; only the last of these is known."""
    stage = Stage(recovering=True)
    key, root = ShardKey(2, CHECKPOINT), b"2" * 16
    stage.join("trainer/0", holdings=(m.Holding(key, root, 100),))
    for shard in ("middle/0", "reader/0"):
        lease = m.HeldLease(3, 2, CHECKPOINT, {0: b"stranger/0......"}, 60.0)
        stage.join(
            shard,
            holdings=(m.Holding(key, root, 100, False, "replicated"),),
            request_id=3,
            leases=(lease,) * (shard[0] == "m"),
        )
        stage.requests[shard] = 3
    stage.acquire("reader/0", version=2, avoid=(stage.sessions["trainer/0"],))
    assert source_of(stage, "reader/0") == "trainer/0"
    stage.tell("reader/0", m.Release(stage.requests["reader/0"]))
    stage.join(
        "stranger/0", holdings=(m.Holding(key, root, 100, False, "replicated"),)
    )  # it reads from nobody any more
    stage.acquire("reader/0", version=2, avoid=(stage.sessions["trainer/0"],))
    assert source_of(stage, "reader/0") in ("middle/0", "stranger/0")


def test_a_recovering_hub_neither_declares_a_version_gone_nor_elects_a_converter() -> None:
    stage = Stage(recovering=True)
    stage.join("trainer/0", holdings=(m.Holding(ShardKey(2, CHECKPOINT), b"2" * 16, 100),))
    stage.join("a/0")
    stage.acquire("a/0", version=1)
    stage.acquire("a/0", version=2, layouts=(RUNTIME, CHECKPOINT), claim=True)
    assert stage.heard("a/0") == []
    stage.wait(GRACE_S + 0.5)
    assert sorted(stage.heard("a/0")) == [f"read 2 {CHECKPOINT} 0<-trainer/0 and convert", "refused VersionGone"]


@pytest.mark.parametrize(("round_of_the_other", "text"), [(6, "read 3"), (7, "read 4")], ids=["behind", "beside"])
def test_a_restarted_hub_knows_who_has_had_the_answer_of_a_round(round_of_the_other: int, text: str) -> None:
    """Both have read version 3 as the latest before; which of them did so again in round 7 only its number tells."""
    stage = Stage(recovering=True)
    for version in (3, 4):
        stage.join(f"trainer-{version}/0", 2, holdings=(_half(version, 0),))
        stage.join(f"trainer-{version}/1", 2, holdings=(_half(version, 1),))
    stage.join("rollout/0", 2, resolved=3, generation=7)
    stage.join("rollout/1", 2, resolved=3, generation=round_of_the_other)
    stage.acquire("rollout/1", layouts=(RUNTIME,))
    assert stage.heard("rollout/1")[0].startswith(text)
    stage.acquire("rollout/0", layouts=(RUNTIME,))
    assert stage.heard("rollout/0")[0].startswith("read 4")


def _half(version: int, shard: int) -> m.Holding:
    return m.Holding(ShardKey(version, RUNTIME, shard, 2), f"{version}/{shard}".encode().ljust(16, b"-"), 100)


def test_an_unknown_worker_is_asked_who_it_is(stage: Stage) -> None:
    stage.sessions["stranger/0"] = b"s" * 16
    stage.tell("stranger/0", m.Heartbeat(stage.hub.session))
    assert stage.heard("stranger/0") == ["Unknown"]


def test_old_words_that_arrive_late_do_not_bring_back_what_is_over() -> None:
    stage = Stage()
    stage.join("trainer/0", request_id=5)
    stage.requests["trainer/0"] = 2
    stage.publish("trainer/0", 1)  # request 3, from before the Hello that knows of 5 requests and waits for none
    assert stage.hub.histories["run", "actor"].versions == {}
    stage.requests["trainer/0"] = 5
    stage.publish("trainer/0", 1)
    assert 1 in stage.hub.histories["run", "actor"].versions


def test_a_repeated_request_gets_the_same_answer_and_no_second_lease(stage: Stage) -> None:
    stage.join("trainer/0")
    stage.join("rollout/0")
    stage.publish("trainer/0", 1)
    stage.acquire("rollout/0")
    stage.requests["rollout/0"] -= 1
    stage.acquire("rollout/0")
    first, second = stage.heard("rollout/0")
    assert first == second
    assert len(report(stage.hub, stage.now)["models"][0]["leases"]) == 1


# --- rule 5: nothing waits for ever ---


def test_every_pending_request_ends_in_an_answer(stage: Stage) -> None:
    stage.join("trainer/0")
    stage.publish("trainer/0", 1, RUNTIME)
    stage.join("rollout/0")
    stage.say("rollout/0", m.Wait, version=9, newer_than=0, timeout_s=5.0)
    stage.acquire("rollout/0", version=9, timeout_s=5.0)
    stage.acquire("rollout/0", version=1, timeout_s=5.0)  # there, but not in a layout that it can read
    stage.wait(6)
    assert stage.heard("rollout/0") == ["refused NotPublished", "refused NotPublished", "refused DeadlineExceeded"]
    assert stage.hub.histories["run", "actor"].waiting == {}


def test_validate_notices_a_broken_state(stage: Stage) -> None:
    """The negative control of every test here: the invariants are not empty words."""
    stage.join("trainer/0")
    stage.publish("trainer/0", 1)
    stage.hub.workers[stage.sessions["trainer/0"]].holdings.clear()
    with pytest.raises(AssertionError):
        validate(stage.hub)
