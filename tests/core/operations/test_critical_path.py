"""The path of a version, by journals of runs that are made up: what delays them is known."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from tensorhub_plugins.core.operations import critical_path

SIZE = 1000
RUNTIME = "runtime:ab"


@dataclass(frozen=True)
class World:
    """Seconds of everything in a run of one version. Replica a converts what it reads from all ranks; b reads that when
    it is served; c relays b, d relays c; e reads the ranks itself. Each has two workers."""

    seconds: dict[str, float] = field(default_factory=dict)  # what is not in here takes `quick`
    quick: float = 0.1
    says: bool = True  # the journal says how long a read stood still for want of bytes

    def __getitem__(self, name: str) -> float:
        return self.seconds.get(name, self.quick)


RANKS, SHARDS = ("trainer/0", "trainer/1", "trainer/2"), (0, 1)
SOURCES = {"a": "", "b": "a", "c": "b", "d": "c", "e": ""}
NAMES = [
    *(f"{rank} {what}" for rank in RANKS for what in ("begins", "publishes")),
    *(f"{r} {what}" for r in SOURCES for what in ("asks", "holds", "stops", "resumes", "serves")),
    *(f"{r}/{n} {what}" for r in SOURCES for n in SHARDS for what in ("finds", "installs")),
    *(f"{r}/{n} from {s}/{n}" for r, s in SOURCES.items() if s for n in SHARDS),
    *(f"{r}/{n} from {rank}" for r in "ae" for n in SHARDS for rank in RANKS),
]


def journal(world: World, version: int = 3) -> list[dict[str, Any]]:
    """Return the events of such a run."""
    events, done = list[dict[str, Any]](), dict[str, float]()

    def note(event: str, worker: str, ended: float, began: float, **more: Any) -> None:
        more = {"version": version, **more}
        events.append({"t": ended, "event": event, "worker": worker, "seconds": ended - began, **more})

    visible = 0.0
    for rank in RANKS:
        begins = 1000 + world[f"{rank} begins"]
        note("publish", rank, ended := begins + world[f"{rank} publishes"], begins, bytes=SIZE)
        visible = max(visible, ended)
    served: dict[str, float] = {}
    for name, source in SOURCES.items():
        events.append({"t": 999.0, "event": "request", "worker": f"{name}/0", "seconds": 5.0})
        asks, ends = visible + world[f"{name} asks"], []
        for shard in SHARDS:
            worker = f"{name}/{shard}"
            reading = asks + world[f"{worker} finds"]
            if not source:
                reads = {rank: (reading - asks + world[f"{worker} from {rank}"], 0.0) for rank in RANKS}
                layout = "checkpoint"
            else:
                if source == "a":
                    reading, own = max(reading, served["a"]), 0.0  # nobody has it before it is converted
                else:
                    own = done[f"{source}/{shard}"]
                link = world[f"{worker} from {source}/{shard}"]
                ended = max(reading + link, own)
                reads = {f"{source}/{shard}": (ended - asks, ended - reading - link)}
                layout = RUNTIME
            ended = asks + max(until for until, _ in reads.values())
            done[worker] = ended
            told = {"reads": reads} if world.says else {}
            sources, find_s = {each: SIZE for each in reads}, reading - asks
            note("fetch", worker, ended, asks, find_s=find_s, bytes=SIZE, layout=layout, sources=sources, **told)
            ends.append(ended)
        pauses = max(ends) + world[f"{name} holds"]
        stopped = pauses + world[f"{name} stops"]
        note("pause", f"{name}/0", stopped, pauses, version=version - 1)
        installed = max(stopped + world[f"{name}/{shard} installs"] for shard in SHARDS)
        for shard in SHARDS:
            note("install", f"{name}/{shard}", stopped + world[f"{name}/{shard} installs"], stopped)
        note("resume", f"{name}/0", installed + world[f"{name} resumes"], pauses)
        served[name] = installed + world[f"{name} serves"]
        for shard in SHARDS:
            events.append(
                {
                    "t": served[name],
                    "event": "serve",
                    "worker": f"{name}/{shard}",
                    "version": version,
                    "layout": RUNTIME,
                }
            )
    return events


def path_of(world: World) -> critical_path.Path:
    (path,) = critical_path.paths(journal(world))
    return path


SLOW = {
    "trainer/1 begins": "trainer/1 begins to publish after other ranks",
    "trainer/2 publishes": "trainer/2 publishes it",
    "e asks": "e does not ask for it yet",
    "e/1 finds": "e/1 waits for a source",
    "e/1 from trainer/2": "e/1 reads from trainer/2",
    "a/0 from trainer/1": "a/0 reads from trainer/1",  # d is the last: it has waited for c, for b, for a
    "d/0 from c/0": "d/0 reads from c/0",
    "b/1 from a/1": "b/1 reads from a/1",
    "c/1 from b/1": "c/1 reads from b/1",
    "a/1 installs": "a/1 installs it",  # what b has waited for is converted there
    "a serves": "a offers it",
    "e holds": "e has its bytes, and is not paused yet",
    "d stops": "d stops its engine",
    "e/1 installs": "e/1 installs it",
    "c resumes": "c resumes",
}


@pytest.mark.parametrize("says", [True, False])
@pytest.mark.parametrize("slow", SLOW)
def test_what_is_slow_is_named(slow: str, says: bool) -> None:
    path = path_of(World({slow: 30.0}, says=says or slow.startswith(("e/", "a/"))))
    what, seconds = next(iter(path.causes().items()))
    assert what == SLOW[slow] and 29.8 < seconds < 30.01
    assert path.seconds > 30.0 and sum(path.causes().values()) == pytest.approx(path.seconds, abs=0.01)


def test_where_nothing_is_slow_nothing_stands_out() -> None:
    causes = path_of(World()).causes()
    assert max(causes.values()) == pytest.approx(0.1) and len(causes) > 8


def cause_of(name: str) -> str:
    """Return the words for a name of a World."""
    who, what = name.split(" ", 1)
    if what.startswith("from"):
        return f"{who} reads {what}"
    return {
        "begins": f"{who} begins to publish after other ranks",
        "publishes": f"{who} publishes it",
        "asks": f"{who} does not ask for it yet",
        "finds": f"{who} waits for a source",
        "holds": f"{who} has its bytes, and is not paused yet",
        "stops": f"{who} stops its engine",
        "installs": f"{who} installs it",
        "resumes": f"{who} resumes",
        "serves": f"{who} offers it",
    }[what]


@pytest.mark.parametrize("seed", range(40))
def test_what_is_on_no_path_may_be_as_quick_as_it_likes(seed: int) -> None:
    """The proof: what is not on the path could have taken no time at all, and the run would have ended no sooner."""
    rng = random.Random(seed)
    world = World({name: rng.choice((0.05, 0.3, 1.0, 4.0)) * rng.uniform(0.5, 1.5) for name in NAMES})
    path = path_of(world)
    helped = 0
    for name in NAMES:
        quicker = path_of(replace(world, seconds={**world.seconds, name: 0.002}))
        gained = path.ended - quicker.ended
        is_first = name.endswith("begins") and cause_of(name.replace("begins", "publishes")) in path.causes()
        if cause_of(name) not in path.causes() and not is_first:
            assert gained < 0.01, f"{name} is on no path, and costs {gained:.2f} s: {path}"
        helped += gained > 0.01
    assert helped >= 3  # the control: some of them did


def test_a_replica_that_came_later_was_not_late() -> None:
    events = journal(World())
    late = [{"t": 5000.0, "event": "fetch", "worker": "z/0", "version": 3, "seconds": 9.0, "sources": {"a/0": 1}}]
    late += [{"t": 5001.0, "event": "resume", "worker": "z/0", "version": 3, "seconds": 0.1}]
    (path,) = critical_path.paths(events + late)
    assert path.replica == "d"
    there = [{"t": 990.0, "event": "resume", "worker": "z/0", "version": 2, "seconds": 0.1}]
    (path,) = critical_path.paths(events + late + there)  # the control: this one was there
    assert path.replica == "z" and next(iter(path.causes())) == "z does not ask for it yet"


def test_one_that_is_busy_with_an_earlier_version_says_so() -> None:
    events = journal(World({"e asks": 20.0}))
    busy = {"t": 1020.0, "event": "fetch", "worker": "e/0", "version": 2, "seconds": 19.9, "sources": {"trainer/0": 1}}
    (path,) = critical_path.paths([*events, busy])
    what, _ = next(iter(path.causes().items()))
    assert what == "e is busy with an earlier version" and "version 2" in [step.more for step in path.steps]


def test_direct_reads_are_within_the_pause() -> None:
    """What is read in place: paused, read, resumed."""
    events = [
        {"t": 10.0, "event": "publish", "worker": "trainer/0", "version": 5, "seconds": 1.0},
        {"t": 10.2, "event": "pause", "worker": "a/0", "version": 4, "seconds": 0.1},
        {"t": 14.3, "event": "fetch", "worker": "a/0", "version": 5, "seconds": 4.0, "sources": {"trainer/0": 9}},
        {"t": 14.5, "event": "install", "worker": "a/0", "version": 5, "seconds": 4.2},
        {"t": 14.6, "event": "resume", "worker": "a/0", "version": 5, "seconds": 4.5},
    ]
    (path,) = critical_path.paths(events)
    assert next(iter(path.causes())) == "a/0 reads from trainer/0"
    assert sum(path.causes().values()) == pytest.approx(path.seconds) == pytest.approx(5.6)


def test_without_engines_a_version_is_in_use_when_it_is_there() -> None:
    events = [
        {"t": 10.0, "event": "publish", "worker": "trainer/0", "version": 5, "seconds": 1.0},
        {"t": 12.0, "event": "fetch", "worker": "a/0", "version": 5, "seconds": 1.5, "sources": {"trainer/0": 9}},
        {"t": 11.0, "event": "fetch", "worker": "b/0", "version": 5, "seconds": 0.5, "sources": {"trainer/0": 9}},
    ]
    (path,) = critical_path.paths(events)
    assert (path.replica, path.seconds) == ("a", pytest.approx(3.0))
    assert critical_path.paths(events[1:]) == [] == critical_path.paths(events[:1])


def test_the_summary_is_of_all_versions() -> None:
    slow = [critical_path.paths(journal(World({"d/0 from c/0": 30.0}), v))[0] for v in (3, 4, 5)]
    other = critical_path.paths(journal(World({"e holds": 300.0}), 6))
    said = critical_path.text([*slow, *other])
    assert "version 3: " in said and "until d had it, as the last: d/0 reads from c/0 30.00 s" in said
    lines = said.splitlines()
    assert "e has its bytes, and is not paused yet (300.00 s; the most in 1 of 4 versions)" in lines[5]
    assert "d/0 reads from c/0 (90.00 s; the most in 3 of 4 versions)" in lines[6]


@pytest.mark.parametrize(
    "damage",
    [{"version": "x"}, {"version": True}, {"seconds": "long"}, {"seconds": 1e300}, {"worker": None}, {"worker": 7},
     {"reads": 3}, {"reads": {"a/0": [1, 0]}}, {"find_s": "x"}, {"sources": None}, {"transports": 1}, {"bytes": "x"},
     {"layout": ["x"]}, {"layout": {}}, {"t": 0}, {"t": -5.5}],
)  # fmt: skip
def test_values_of_any_kind_break_nothing(damage: dict[str, Any]) -> None:
    rng = random.Random(str(damage))
    for _ in range(20):
        events = [{**event, **damage} if rng.random() < 0.3 else event for event in journal(World())]
        for path in critical_path.paths(events):
            assert all(step.seconds >= 0 for step in path.steps)
        critical_path.text(critical_path.paths(events))
