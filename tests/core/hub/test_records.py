"""Whatever is said to the hub, and however often: what it keeps of it is bounded, and goes with the session.

Each kind of message is said a few thousand times, with fresh values in every field that takes one. All that can be
reached from the hub is counted, so a collection that is added one day is counted, too.
"""

from __future__ import annotations

import ast
import gc
import operator
import subprocess
import sys
import tracemalloc
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any, get_args

import msgspec
import pytest
from hub_scenarios import RUNTIME, Scenario

from recipes.bench.hub.simulated import _Simulation
from recipes.bench.hub.story import holding
from tensorhub_plugins.core.cli import status_text
from tensorhub_plugins.core.hub import hub as machine
from tensorhub_plugins.core.hub import limits
from tensorhub_plugins.core.hub.hub import Received
from tensorhub_plugins.core.hub.registry import Registry
from tensorhub_plugins.core.hub.report import report
from tensorhub_plugins.core.hub.state import NONE, Claim, Room, Version, Worker, drop, put
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.protocol.directive import Directive
from tensorhub_plugins.core.types import CHECKPOINT, Location, Role, ShardKey

TIMES = 2000
BOUND = 60_000  # entries of all collections, for one session that says a kind of message so often; 12,000 without it
TRAINER = b"trainer/0".ljust(16, b".")
KINDS = {kind.__name__: kind for kind in get_args(m.ClientMessage)}


def entries(root: object) -> int:
    """Of all collections that can be reached from here, each once; bytes of texts count for one in 64."""
    seen: set[int] = set()
    todo: deque[object] = deque([root])
    total = 0
    while todo:
        one = todo.pop()
        if isinstance(one, str | bytes | int | float | type) or one is None or callable(one) or id(one) in seen:
            total += len(one) // 64 if isinstance(one, str | bytes) else 0
            continue
        seen.add(id(one))
        if isinstance(one, Mapping):
            total += len(one)
            todo.extend(one.keys())
            todo.extend(one.values())
        elif isinstance(one, list | tuple | set | frozenset | deque):
            total += len(one)
            todo.extend(one)
        else:
            todo.extend(vars(one).values() if hasattr(one, "__dict__") else ())
            fields = getattr(type(one), "__struct_fields__", ())
            slots = [name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ())]
            todo.extend(
                getattr(one, name) for name in (*fields, *slots) if name != "__weakref__" and hasattr(one, name)
            )
    return total


def name(number: int) -> str:
    return f"{number:0256}"


def session(number: int) -> bytes:
    return b"s%015d" % number


def fresh(kind: type, n: int) -> m.ClientMessage:
    """The n-th of this kind: every value is one that was not said before, where that is possible at all."""
    layout, versions = name(n), (1, 2, 1000 + n)
    keys = tuple(ShardKey(version, each) for version in versions for each in (CHECKPOINT, layout, f"b{layout[:250]}"))
    held = tuple(m.Holding(key, b"r" * 16, n, n % 3 > 0, "replicated") for key in keys)
    lease = m.HeldLease(
        n, versions[n % 3], (CHECKPOINT, layout)[n % 2], {s: session(99 * n + s) for s in range(40)}, 1e6
    )
    number = 10 + 2 * n
    asked = tuple(range(max(0, number - 1000), number))
    avoid = tuple(session(99 * n + s) for s in range(20))
    hello = m.Hello(
        "run", "actor", "evil", 0, 1, Location(), {"tcp": "x"}, held, (lease,), keys, 5, number, asked, n, n, n,
        Directive(n, 0, (n + 1,)), b"H" * 16, "", b"m%015d" % n, "",
    )  # fmt: skip
    acquire = m.Acquire(
        number,
        versions[n % 2],
        n,
        (layout, CHECKPOINT),
        1e6,
        True,
        avoid=avoid[:2],
        exclude=avoid[2:],
        serve=n % 2 == 0,
    )
    found: dict[type, m.ClientMessage] = {
        m.Hello: hello,
        m.Heartbeat: m.Heartbeat(b"H" * 16, number, asked, {n: n}, n, n, {n: n}, n, n % 2 > 0),
        m.Bye: m.Bye(),
        m.Release: m.Release(number, (None, 0)[n % 2], True, (n % 2000,)),
        m.Acquire: acquire,
        m.Abandon: m.Abandon(number, keys[n % 9]),
        m.Wait: m.Wait(number, 1000 + n, 0, 1e6),
        m.Target: m.Target(number, n, 1e6, tuple(range(n + 1, n + 60)), n),
        m.Publish: m.Publish(number, held[n % 9]),
        m.Unpublish: m.Unpublish(number, keys * 20, 1e6, n % 2 > 0),
        m.Pin: m.Pin(number, 1 + n % 2, 1e6),
        m.Withdraw: m.Withdraw(number, 1000 + n, 1e6),
        m.Retain: m.Retain(number, n % 1024),
        m.Begin: m.Begin(number, n, 1e6, name(n), (name(n),), True),
        m.AskVersions: m.AskVersions(number),
        m.AskStatus: m.AskStatus(number),
    }
    return found[kind]


def story_with_a_trainer(*, recovering: bool = False) -> Scenario:
    story = Scenario(secret=True, recovering=recovering)
    story.join("trainer/0")
    for version in (1, 2):
        story.publish("trainer/0", version)
    return story


def say(story: Scenario, who: bytes, message: m.ClientMessage, role: Role = "reader") -> None:
    """As if all were well-behaved: a session that has said too much would not be heard (rates.py)."""
    story.hub.handle(Received(who, message, role), story.now)
    story.now += 0.001


def drive(story: Scenario, kinds: tuple[type, ...], times: int = TIMES, *, spread: int = 1) -> None:
    """spread: sessions that say this, each in its turn, with a location and a name of its own."""
    for n in range(1, times + 1):
        who = n % spread
        where = Location(*(f"{part}{n // spread * spread + who:0250}" for part in "abc"))
        if n <= spread or m.Bye in kinds:
            replica = f"evil-{n}" if spread > 1 else "evil"
            hello = m.Hello(
                "run", "actor", replica, 0, 1, where if m.Bye in kinds else Location(), {"tcp": "x"}, request_id=1
            )
            say(story, session(10**9 + who), hello)
            say(story, session(10**9 + who), m.Publish(2, m.Holding(ShardKey(1, CHECKPOINT), b"1checkpoint0----", 100)))
        for kind in kinds:
            message = fresh(kind, n)
            if isinstance(message, m.Hello) and spread > 1:
                message = msgspec.structs.replace(message, replica=f"evil-{who or spread}")
            say(story, session(10**9 + who), message)
        if n % 20 == 0:
            story.hub.registry.workers[TRAINER].last_heard = story.now
            story.hub.handle(machine.Tick(), story.now)
            story.hub.registry.workers[TRAINER].last_heard = story.now


@pytest.mark.parametrize("recovering", [False, True], ids=["", "in the grace time"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_of_one_kind_is_bounded(kind: str, recovering: bool) -> None:
    story = story_with_a_trainer(recovering=recovering)
    times = TIMES if kind != "Hello" else TIMES // 4
    drive(story, (KINDS[kind],), times)
    machine.validate(story.hub.registry)
    assert entries(story.hub) < BOUND
    assert story.hub.registry.histories["run", "actor"].visible() == [2, 1]


SEVERAL: tuple[tuple[type, ...], ...] = (
    (m.Acquire, m.Release),
    (m.Publish, m.Unpublish),
    (m.Hello, m.Acquire, m.Publish),
    (m.Wait, m.Unpublish, m.Bye),
)


@pytest.mark.parametrize("kinds", SEVERAL, ids=lambda kinds: " ".join(kind.__name__ for kind in kinds))
def test_what_is_kept_of_several_is_bounded(kinds: tuple[type, ...]) -> None:
    story = story_with_a_trainer()
    drive(story, kinds, TIMES // 2)
    machine.validate(story.hub.registry)
    assert entries(story.hub) < BOUND


def test_all_is_given_back_when_the_sessions_end() -> None:
    story = story_with_a_trainer()
    before = entries(story.hub)
    everything = tuple(kind for kind in KINDS.values() if kind is not m.Bye)
    drive(story, everything, 200, spread=10)
    assert entries(story.hub) > 10 * before
    for who in range(10):
        say(story, session(10**9 + who), m.Bye())
    machine.validate(story.hub.registry)
    story.hub.handle(machine.Tick(), story.now)
    assert set(story.hub.workers) == {TRAINER} and story.hub.registry.readers_records == 0
    assert entries(story.hub) < before + 20_000  # timers that have not come, each a number and a place


def test_sessions_that_come_and_go_leave_nothing() -> None:
    """The places of those that had passed on a version were kept for as long as anybody had it."""
    story = story_with_a_trainer()
    drive(story, (m.Acquire, m.Publish, m.Bye), 100)
    once = entries(story.hub)
    drive(story, (m.Acquire, m.Publish, m.Bye), TIMES)
    assert set(story.hub.workers) == {TRAINER} and entries(story.hub) < once + 20_000


def records_in_cycles(do: Callable[[], object]) -> set[str]:
    """Return the kinds of our objects that only the collector of cycles would have freed."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        do()
        gc.collect()
        return {type(each).__name__ for each in gc.garbage if type(each).__module__.startswith("tensorhub_plugins")}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize("end", ["bye", "silence", "control"])
def test_what_ends_is_freed_without_a_collection(end: str) -> None:
    """A hub that looks through the records of tens of thousands hears nobody meanwhile: see `collect_rarely`."""
    story = story_with_a_trainer()
    everything = tuple(kind for kind in KINDS.values() if kind is not m.Bye)

    def all_come_and_go() -> None:
        drive(story, everything, 200, spread=10)
        if end == "control":
            pending = machine.Pending(story.hub.registry.workers[TRAINER], m.AskStatus(1), story.now)
            pending.queue = pending  # type: ignore[assignment]
        for who in range(10):
            if end != "silence":
                say(story, session(10**9 + who), m.Bye())
        for _ in range(8):
            story.now += story.hub.limits.session_timeout_s
            story.hub.registry.workers[TRAINER].last_heard = story.now
            story.hub.handle(machine.Tick(), story.now)
        assert set(story.hub.workers) == {TRAINER}

    assert records_in_cycles(all_come_and_go) == ({"Pending"} if end == "control" else set())


def test_a_hubs_process_looks_for_cycles_rarely() -> None:
    """In a process of its own, which keeps what is set."""
    script = (
        "import gc, tensorhub_plugins.core.hub.server as server; server.collect_rarely(); print(gc.get_threshold())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ast.literal_eval(done.stdout)[2] >= 100 * gc.get_threshold()[2]


def keeps_claims(self: Registry, version: Version, worker: Worker, key: ShardKey, now: float, number: int = 0) -> None:
    version.claims[key] = claim = Claim(worker, version, key, now, number)
    put(worker, "claims", key, claim)


def keeps_timers(self: Registry, when: float, record: object) -> None:
    self._timers.append((when, len(self._timers), None))


CONTROLS: dict[str, tuple[tuple[type, ...], type, str, Callable[..., None]]] = {
    "claims": ((m.Acquire, m.Release), Registry, "add_claim", keeps_claims),
    "timers": ((m.Acquire, m.Release), Registry, "schedule", keeps_timers),
    "what a Hello leaves out": ((m.Hello,), machine.Hub, "_forget_what_is_not_in", lambda self, hello, worker: None),
}


@pytest.mark.parametrize("broken", CONTROLS)
def test_the_control_what_is_not_bounded_is_seen(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds, owner, method, damage = CONTROLS[broken]
    counts = []
    for _ in range(2):
        story = story_with_a_trainer()
        drive(story, kinds, TIMES // 2)
        counts.append(entries(story.hub))
        monkeypatch.setattr(owner, method, damage)
    assert counts[1] > counts[0] + TIMES // 2


def test_a_worker_costs_eight_kilobytes_while_all_read_at_once() -> None:
    count, shards = 512, 8
    simulation = _Simulation(count, shards, wire_s=0.0)
    tracemalloc.start()
    for index in range(count):
        simulation.send(index, simulation.readers.begin(index))
    simulation.run(lambda: not simulation.inbox)
    for shard in range(shards):
        simulation.send(count + shard, m.Publish(1, holding(shard, shards, True, "published")))
    simulation.run(lambda: simulation.ended == count)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak / count < 8000, "with what the simulation has of it; 7,200, and 8,350 where each has all tables"


@pytest.mark.parametrize(
    "write",
    [
        lambda table, key: operator.setitem(table, key, None),
        lambda table, key: operator.ior(table, {key: None}),
        lambda table, key: table.setdefault(key, None),
        lambda table, key: table.update({key: None}),
    ],
    ids=["[]", "|=", "setdefault", "update"],
)
def test_no_worker_writes_into_the_table_that_all_have_who_have_none(write: Callable[[Any, ShardKey], object]) -> None:
    story = story_with_a_trainer()
    trainer = story.hub.registry.workers[TRAINER]
    assert trainer.claims is trainer.aside is NONE
    write(dict(NONE), ShardKey(1, CHECKPOINT))  # the control: a dict of its own takes it
    with pytest.raises(TypeError, match="use `put`"):
        write(trainer.claims, ShardKey(1, CHECKPOINT))
    assert drop(trainer.claims, ShardKey(1, CHECKPOINT)) is None and len(NONE) == 0


# --- answers that would be too long ---


def crowded(story: Scenario, *, sessions: int = 6, layouts: int = limits.LAYOUTS_PER_READER_MAX) -> None:
    """Readers with layouts of long names, in the trainer's model and in models of their own."""
    for n in range(sessions):
        held = tuple(
            m.Holding(ShardKey(1, name(1000 * n + i)[-250:]), b"r" * 16, 1, True, "replicated") for i in range(layouts)
        )
        for model in ("actor", f"model{n}"):
            hello = m.Hello("run", model, name(n), 0, 1, Location(), {}, held, request_id=1)
            say(story, session(10**6 + 2 * n + (model == "actor")), hello)


def test_versions_and_status_are_cut_at_what_a_client_takes_and_say_so() -> None:
    """Six Hellos with thousands of layouts of long names, and both were refused to everybody."""
    story = story_with_a_trainer()
    crowded(story, sessions=40)
    whole = len(msgspec.msgpack.encode(report(story.hub.registry, story.now)))
    story.say("trainer/0", m.AskVersions)
    complete = story.inbox["trainer/0"][-1]
    assert complete.left_out == 0 and len(complete.versions[0].layouts) == 1 + 40 * limits.LAYOUTS_PER_READER_MAX
    said = report(story.hub.registry, story.now, 100_000)
    assert whole > 2 * len(msgspec.msgpack.encode(said)) and len(msgspec.msgpack.encode(said)) < 150_000
    first = said["models"][0]
    assert (first["model"], first["workers"][0]["worker"]) == ("actor", "trainer/0")
    assert first["versions"][0]["layouts"][CHECKPOINT] == ["trainer/0"] and first["left_out"] > 100
    assert said["left_out"] > 10 and f"and {said['left_out']} more models" in status_text(said)
    room = Room(100_000)
    versions = story.hub.registry.histories["run", "actor"].version_infos(room)
    assert room.left_out > 100 and versions[0].layouts[CHECKPOINT] == ("trainer/0",)
    assert [info.version for info in versions] == [1, 2]
    assert len(m.encode(m.Versions(1, versions, room.left_out))) < 110_000


def test_a_reader_has_few_layouts_and_a_session_few_of_everything() -> None:
    story = story_with_a_trainer()
    crowded(story, sessions=1, layouts=100)
    (evil,) = (w for w in story.hub.workers.values() if w.role == "reader" and w.history.model == "actor")
    assert len(evil.holdings) == limits.LAYOUTS_PER_READER_MAX
    assert sum("layouts of one worker" in line for line in story.logged) <= 2  # a line for all of them


def test_readers_leave_places_for_the_trainer() -> None:
    story = Scenario(secret=True)
    story.hub.sessions_max = 10
    for n in range(12):
        hello = m.Hello("run", "actor", f"r{n}", 0, 1, Location(), {}, request_id=1)
        say(story, session(n), hello)
    assert len(story.hub.workers) == 5
    story.join("trainer/0")
    assert len(story.hub.workers) == 6
    story.hub.registry.readers_records_max = 1
    story.publish("trainer/0", 1)
    for n in (0, 1):
        say(story, session(n), m.Publish(2, m.Holding(ShardKey(1, CHECKPOINT), b"1checkpoint0----", 100)))
    assert story.hub.registry.readers_records == 1
    story.publish("trainer/0", 2)
    assert story.hub.registry.histories["run", "actor"].visible() == [2, 1]


def test_a_doubt_is_passed_on_once_a_reader_and_minute() -> None:
    """10,000 of them cost a trainer seconds of its time."""
    story = story_with_a_trainer()
    story.roles["rollout/0"] = "reader"
    story.join("rollout/0")
    counts = Counter[int]()
    for minute in (0, 1):
        for _ in range(50):
            number = story.acquire("rollout/0", 2)
            story.tell("rollout/0", m.Release(number, 0, False, (0,)))
        counts[minute] = sum(isinstance(x, m.Alive) and x.doubted is not None for x in story.inbox["trainer/0"])
        story.now += limits.DOUBT_AGAIN_S
    assert counts == {0: 1, 1: 2}
    assert story.hub.workers[TRAINER].corrupt_segments == 100  # counted all the same


def test_what_nobody_holds_any_more_is_converted_anew() -> None:
    """What readers have converted was remembered for ever: one more entry for each name."""
    story = story_with_a_trainer()
    story.roles["rollout/0"] = "reader"
    story.join("rollout/0")
    for root in (b"a" * 16, b"b" * 16):
        story.publish("rollout/0", 2, RUNTIME, root=root)
        story.unpublish("rollout/0", 2, RUNTIME)
    assert story.heard("rollout/0") == ["unpublished"] * 2
    story.publish("trainer/0", 2, root=b"c" * 16)
    assert story.heard("trainer/0") == ["refused UsageError"]  # a checkpoint is never another one
