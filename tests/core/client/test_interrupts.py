"""Wherever a public call is interrupted, hub and worker are of one mind, the next call works, and nothing is kept."""

from __future__ import annotations

import ctypes
import gc
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from client_stage import SOON_S, Stage, holders, leases, until
from delta_stage import THERE
from interrupts import Interrupt, Where
from simulated import Simulation

from tensorhub_plugins.core import (
    CHECKPOINT,
    Client,
    Fetched,
    Held,
    HubUnreachable,
    Publisher,
    Recovery,
    ShardKey,
    UsageError,
    spec_of,
)
from tensorhub_plugins.core.cli import fetch_status
from tensorhub_plugins.core.client import calls
from tensorhub_plugins.core.device.graph_capture import acting

# An interrupt in a callback of a weak reference goes nowhere.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

RUNTIME = "runtime:f"
POINTS = 5  # of a call, in each thread, that a quick run interrupts


def tensors_of(seed: int) -> dict[str, torch.Tensor]:
    """Some segments, of which a hundredth differs from one version to the next."""
    w = torch.ones(40_000)
    w[::100] = seed
    return {"w": w, "scale": torch.tensor(float(seed))}


def same(some: dict[str, torch.Tensor], seed: int) -> bool:
    return all(torch.equal(some[name], tensor) for name, tensor in tensors_of(seed).items())


@dataclass
class Cast:
    """A worker whose calls are interrupted, a trainer that holds version 1, and a reader."""

    stage: Stage
    numbers: Iterator[int] = field(default_factory=lambda: count(2))
    given: Any = None  # what `prepare` has made

    def __post_init__(self) -> None:
        self.trainer, self.worker, self.reader = map(self.stage.client, ("trainer", "worker", "reader"))
        self.trainer.publish(1, tensors_of(1))
        self.trainer.retain(0)
        self.into = tensors_of(0)
        self.elsewhere = self.stage.client("elsewhere", location=THERE)

    def reads(self, version: int) -> None:
        fetched = self.reader.fetch(version)
        assert same(fetched.tensors(), version)
        fetched.release()

    def publisher(self, **options: Any) -> Publisher:
        return Publisher(self.worker, rank=0, ranks=1, worker="worker/0", keep=1, timeout_s=10, **options)

    # --- what is left of a call ---

    def differences(self) -> list[str]:
        """Between what the worker serves, what it says, and what the hub shows; and what nobody will give back."""
        worker, found = self.worker, []
        shelf, machine, pool = worker._serving._shelf, worker._hub._machine, worker._serving.pool
        threads = [thread.name for thread in threading.enumerate()]
        found += ["a call is under way"] * (threads.count("tensorhub-call") - calls._threads._idle)
        found += [name for name in threads if name == "tensorhub-read-trainer/0"]
        found += [f"{name}: {left}" for name, left in (
            ("transfers", worker._transfers), ("readings", shelf.readings), ("futures", worker._hub._asked),
            ("asked", machine.asked), ("leases", machine.leases),
            ("claims", machine.claims if not isinstance(self.given, Fetched) else ()),
        ) if left]  # fmt: skip
        served = {key: entry for key, entry in shelf.entries.items() if not entry.is_arriving}
        if set(shelf.entries) != set(machine.holdings):
            found.append(f"serves {sorted(shelf.entries)}, says {sorted(machine.holdings)}")
        shown = {
            (info.version, layout)
            for info in self.reader.versions()
            for layout, workers in info.layouts.items()
            if "worker/0" in workers
        }
        if shown != {(key.version, key.layout) for key in served}:
            found.append(f"serves {sorted(served)}, the hub shows {sorted(shown)}")
        known = {*pool._free, *(entry.offer.slab for entry in served.values())}
        if isinstance(self.given, Fetched):
            known |= {*self.given.slabs.values()}
        if any(slab not in known for slab in pool._handed_out) and gc.collect() >= 0:
            found += [f"kept: {slab}" for slab in pool._handed_out if slab not in known and not slab._closed]
        return found + [f"lease {lease}" for lease in leases(self.stage)]

    def is_of_one_mind(self) -> None:
        last: list[str] = []

        def agree() -> bool:
            try:
                last[:] = self.differences()
            except HubUnreachable as error:  # a machine that is busy with others
                last[:] = [str(error)]
            return not last

        try:
            until(agree)
        except AssertionError:
            raise AssertionError(last) from None


@dataclass(frozen=True)
class Story:
    """prepare: what there is before. act: what is interrupted. works: what must do then; `done` says what `act` has
    returned, None if it was interrupted."""

    act: Callable[[Cast], Any]
    works: Callable[[Cast, Any], Any]
    prepare: Callable[[Cast], Any] = lambda cast: next(cast.numbers)


def _published(cast: Cast, done: Any) -> None:
    if done is None:
        cast.worker.publish(cast.given, tensors_of(cast.given))
    cast.reads(cast.given)
    cast.worker.unpublish(cast.given)


def _adopted(cast: Cast) -> Any:
    cast.into = tensors_of(cast.given)
    return cast.worker.publish(cast.given, cast.into, copy=False)


def _publish_slab(cast: Cast) -> Any:
    tensors = tensors_of(cast.given)
    slab = cast.worker.allocate(spec_of(name, tensor) for name, tensor in tensors.items())
    for name, tensor in tensors.items():
        slab.write(name, tensor)
    return cast.worker.publish(cast.given, slab)


def _replicated(cast: Cast, done: Any) -> None:
    if done is None:
        cast.worker.replicate(cast.into, 1)
    assert same(cast.into, 1)
    cast.worker.unpublish(1)
    cast.into = tensors_of(0)


def _fetched(cast: Cast, done: Fetched | None) -> None:
    if done is None:
        done = cast.worker.fetch(1, serve=True)
    assert same(done.tensors(), 1)
    done.release()
    cast.worker.unpublish(1)


def _chosen(cast: Cast, done: Fetched | None) -> None:
    done = done or cast.worker.fetch(1, (RUNTIME, CHECKPOINT))
    assert done.converts == RUNTIME
    cast.worker.abandon(1, RUNTIME)
    done.release()


def _publish_here(cast: Cast) -> int:
    number = next(cast.numbers)
    cast.worker.publish(number, tensors_of(number))
    return number


def _released(cast: Cast, _: Any) -> None:
    cast.given.release()
    cast.worker.fetch(1).release()


def _withdrawn(cast: Cast, _: Any) -> None:
    cast.worker.withdraw(cast.given)
    cast.worker.unpublish(cast.given)


def _pinned(cast: Cast, _: Any) -> None:
    cast.worker.pin(1)
    cast.worker.unpin()


def _connected(cast: Cast, done: Client | None) -> None:
    done = done or cast.stage.client("new")
    assert 1 in [info.version for info in done.versions()]
    done.close()


def names(cast: Cast) -> list[str]:
    model = next(x for x in fetch_status(cast.stage.address)["models"] if x["run"] == cast.stage.run)
    return [worker["worker"] for worker in model["workers"]]


def _leaves(cast: Cast) -> Client:
    leaves = cast.stage.client(f"leaves-{next(cast.numbers)}")
    leaves.publish(next(cast.numbers), tensors_of(1))
    return leaves


def _closed(cast: Cast, _: Any) -> None:
    cast.given.close()
    until(lambda: f"{cast.given.replica}/0" not in names(cast))
    with pytest.raises(UsageError, match="closed"):
        cast.given.versions()


def _publisher(**options: Any) -> Callable[[Cast], Any]:
    def make(cast: Cast) -> Any:
        publisher = cast.publisher(**options)
        publisher.publish(next(cast.numbers), tensors_of(0).items())
        return publisher, next(cast.numbers)

    return make


def _publish_parts(cast: Cast) -> Any:
    publisher, step = cast.given
    return publisher.publish_parts(step, _held(step))


def _publisher_goes_on(cast: Cast, _: Any) -> None:
    publisher, step = cast.given
    publisher.publish(step, tensors_of(step).items())  # once more, or for the first time
    publisher.settle()
    cast.reads(step)
    number = next(cast.numbers)
    publisher.publish(number, tensors_of(number).items())
    publisher.settle()
    until(lambda: not holders(cast.reader, step))
    publisher._retired.put(None)
    cast.worker.unpublish(number)


def _over_the_former(cast: Cast) -> int:
    """Let a peer elsewhere take a runtime copy, whose memory is free for the next one then."""
    former, number = next(cast.numbers), next(cast.numbers)
    cast.worker.publish(former, tensors_of(former), RUNTIME)
    cast.elsewhere.fetch(former, (RUNTIME,), serve=True).release()
    cast.worker.unpublish(former)
    return number


def _read_elsewhere(cast: Cast, done: Any) -> None:
    if done is None:
        cast.worker.publish(cast.given, tensors_of(cast.given), RUNTIME)
    fetched = cast.elsewhere.fetch(cast.given, (RUNTIME,))
    assert same(fetched.tensors(), cast.given)
    assert done is None or fetched.report.delta_size_bytes
    fetched.release()
    cast.worker.unpublish(cast.given)
    cast.elsewhere.unpublish(cast.given - 1)


def _beside_the_former(cast: Cast) -> int:
    """Serve a version here, and have the next one elsewhere, where both still are."""
    former, number = next(cast.numbers), next(cast.numbers)
    cast.elsewhere.publish(former, tensors_of(former))
    cast.worker.fetch(former, serve=True).release()
    cast.elsewhere.publish(number, tensors_of(number))
    return number


def _by_deltas(cast: Cast, done: Fetched | None) -> None:
    whole = done is None
    done = done or cast.worker.fetch(cast.given, serve=True)
    assert same(done.tensors(), cast.given)
    assert whole or done.report.delta_size_bytes
    done.release()
    for version in (cast.given - 1, cast.given):
        cast.worker.unpublish(version)
        cast.elsewhere.unpublish(version)


def _held(step: int) -> list[Held]:
    return [Held(spec_of(name, tensor), tensor) for name, tensor in tensors_of(step).items()]


def _root(cast: Cast) -> Any:
    return cast.given[0].root(_held(1), by_parts=True)


def _in_the_background(cast: Cast) -> Any:
    publisher, step = cast.publisher(in_background=True), next(cast.numbers)
    publisher.publish(step, tensors_of(step).items())
    return publisher, step


def _publisher_leaves(cast: Cast) -> Any:
    client = cast.stage.client(f"leaves-{next(cast.numbers)}")
    publisher = Publisher(client, rank=0, ranks=1, worker="leaves", keep=1, timeout_s=10)
    for _ in range(2):
        publisher.publish(next(cast.numbers), tensors_of(1).items())
    return publisher


def _publisher_closed(cast: Cast, _: Any) -> None:
    publisher = cast.given
    publisher.close()
    cast.given = publisher.client
    _closed(cast, None)


def _recovery(cast: Cast) -> Recovery:
    step = cast.given[1] if cast.given else 1
    return Recovery(
        cast.given[0],
        "resumed_step",
        weights=lambda: _held(step),
        held=lambda: [Held(spec_of(name, tensor), tensor) for name, tensor in cast.into.items()],
        by_parts=True,
        gather=lambda mine: [mine],
    )


def _noted(cast: Cast) -> Any:
    publisher, step = cast.publisher(), next(cast.numbers)
    publisher.publish_parts(step, _held(step))
    cast.elsewhere.fetch(step, serve=True).release()
    cast.worker.unpublish(step)
    return publisher, step, tempfile.mkdtemp()


def _recovers(cast: Cast) -> Any:
    recovery = _recovery(cast)
    recovery.note(cast.given[2])
    return recovery.resume(cast.given[2], 10.0)


def _recovered(cast: Cast, done: Any) -> None:
    if done is None:
        done = _recovers(cast)
    assert done and same(cast.into, cast.given[1])
    cast.into = tensors_of(0)
    cast.elsewhere.unpublish(cast.given[1])


def _to_convert(cast: Cast) -> Fetched:
    return cast.worker.fetch(1, (RUNTIME, CHECKPOINT))


def _abandoned(cast: Cast, _: Any) -> None:
    cast.worker.abandon(1, RUNTIME)
    cast.given.release()


def _fetched_into(cast: Cast, done: Any) -> None:
    if done is None:
        cast.worker.fetch(1, into=cast.into, serve=True)
    assert same(cast.into, 1)
    cast.worker.unpublish(1)
    cast.into = tensors_of(0)


def _fetched_part(cast: Cast, done: Fetched | None) -> None:
    done = done or cast.worker.fetch(1, wanted=SPECS)
    assert same(done.tensors() | {"scale": tensors_of(1)["scale"]}, 1)
    done.release()


SPECS = [spec_of("w", torch.ones(40_000))]
KEY = ShardKey(1, CHECKPOINT)
STORIES: dict[str, Story] = {
    "publish": Story(lambda cast: cast.worker.publish(cast.given, tensors_of(cast.given)), _published),
    "publish in place": Story(_adopted, _published),
    "publish a slab": Story(_publish_slab, _published),
    "allocate": Story(lambda cast: cast.worker.allocate([spec_of("w", torch.ones(9))]), lambda cast, done: None),
    "unpublish": Story(
        lambda cast: cast.worker.unpublish(cast.given),
        lambda cast, done: cast.worker.unpublish(cast.given),
        _publish_here,
    ),
    "recheck": Story(
        lambda cast: cast.worker.recheck(cast.given),
        lambda cast, done: cast.worker.unpublish(cast.given),
        _publish_here,
    ),
    "replicate": Story(lambda cast: cast.worker.replicate(cast.into, 1), _replicated),
    "fetch": Story(lambda cast: cast.worker.fetch(1, serve=True), _fetched),
    "fetch to convert": Story(lambda cast: cast.worker.fetch(1, (RUNTIME, CHECKPOINT)), _chosen),
    "release": Story(lambda cast: cast.given.release(), _released, lambda cast: cast.worker.fetch(1)),
    "wait": Story(lambda cast: cast.worker.wait(1), lambda cast, done: cast.worker.wait(1)),
    "target": Story(lambda cast: cast.worker.target(), lambda cast, done: cast.worker.target()),
    "versions": Story(lambda cast: cast.worker.versions(), lambda cast, done: cast.worker.versions()),
    "retain": Story(lambda cast: cast.worker.retain(0), lambda cast, done: cast.worker.retain(0)),
    "pin": Story(lambda cast: cast.worker.pin(1), _pinned),
    "withdraw": Story(lambda cast: cast.worker.withdraw(cast.given), _withdrawn, _publish_here),
    "begin": Story(lambda cast: cast.worker.begin(10**5), lambda cast, done: cast.worker.begin(10**5)),
    "hand_over": Story(
        lambda cast: cast.worker.hand_over(),
        lambda cast, done: cast.worker.hand_over(),
        _publish_here,
    ),
    "connect": Story(lambda cast: cast.stage.client("new"), _connected),
    "close": Story(lambda cast: cast.given.close(), _closed, _leaves),
    "Publisher.publish": Story(
        lambda cast: cast.given[0].publish(cast.given[1], tensors_of(cast.given[1]).items()),
        _publisher_goes_on,
        _publisher(),
    ),
    "Publisher.publish in the background": Story(
        lambda cast: cast.given[0].publish(cast.given[1], tensors_of(cast.given[1]).items()),
        _publisher_goes_on,
        _publisher(in_background=True),
    ),
    "Publisher.publish_parts": Story(_publish_parts, _publisher_goes_on, _publisher()),
    "publish over the former, for its readers' deltas": Story(
        lambda cast: cast.worker.publish(cast.given, tensors_of(cast.given), RUNTIME),
        _read_elsewhere,
        _over_the_former,
    ),
    "Publisher.begin": Story(
        lambda cast: cast.given[0].begin(10**4),
        lambda cast, done: cast.given[0].begin(10**4),
        lambda cast: (cast.publisher(), 0),
    ),
    "Publisher.prepare": Story(
        lambda cast: cast.given[0].prepare(_held(cast.given[1])),
        _publisher_goes_on,
        lambda cast: (cast.publisher(), next(cast.numbers)),
    ),
    "Publisher.root": Story(_root, lambda cast, done: done in (None, _root(cast)), _publisher()),
    "Publisher.settle": Story(lambda cast: cast.given[0].settle(), _publisher_goes_on, _in_the_background),
    "Publisher.close": Story(lambda cast: cast.given.close(), _publisher_closed, _publisher_leaves),
    "Recovery": Story(_recovers, _recovered, _noted),
    "unpin": Story(lambda cast: cast.worker.unpin(), _pinned, lambda cast: cast.worker.pin(1)),
    "abandon": Story(lambda cast: cast.worker.abandon(1, RUNTIME), _abandoned, _to_convert),
    "reserve": Story(lambda cast: cast.worker.reserve(SPECS, 2), lambda cast, done: cast.worker.reserve(SPECS, 2)),
    "serving": Story(lambda cast: cast.worker.serving(), lambda cast, done: cast.worker.serving()),
    "find": Story(lambda cast: cast.worker.find(KEY), lambda cast, done: cast.worker.find(KEY)),
    "fetch into": Story(lambda cast: cast.worker.fetch(1, into=cast.into, serve=True), _fetched_into),
    "fetch what is wanted": Story(lambda cast: cast.worker.fetch(1, wanted=SPECS), _fetched_part),
    "fetch by deltas": Story(lambda cast: cast.worker.fetch(cast.given, serve=True), _by_deltas, _beside_the_former),
}


@pytest.fixture
def cast(stage: Stage, as_on_a_link: None, compiled_first: None) -> Cast:
    return Cast(stage)


def tell(cast: Cast, story: Story, interrupt: Interrupt) -> bool:
    """Whether it was interrupted."""
    cast.given = story.prepare(cast)
    done = interrupt.during(lambda: story.act(cast))
    if interrupt.happened and not isinstance(done, Fetched):  # it went nowhere, and that is not released yet
        cast.is_of_one_mind()
    story.works(cast, done)
    cast.given = done = None
    cast.is_of_one_mind()
    return interrupt.happened


def sweep(cast: Cast, story: Story, where: Where, points: int | None) -> int:
    """Interrupt it at so many lines (None: all of them) of this thread, one after the other; how often."""
    never = Interrupt(where, None)
    tell(cast, story, never)
    wanted = range(1, never.lines + 1)
    if points is not None:
        wanted = sorted({1 + each * (never.lines - 1) // (points - 1) for each in range(points)})
    return sum(tell(cast, story, Interrupt(where, at)) for at in wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", STORIES)
def test_an_interrupted_call_leaves_nothing_behind(cast: Cast, name: str) -> None:
    for where in ("caller", "call"):
        assert sweep(cast, STORIES[name], where, POINTS) >= POINTS // 2


@pytest.mark.heavy
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("where", ["caller", "call"])
@pytest.mark.parametrize("name", STORIES)
def test_an_interrupt_at_any_line(cast: Cast, name: str, where: Where) -> None:
    assert sweep(cast, STORIES[name], where, None) >= POINTS


@pytest.mark.parametrize("within", ["_publish", "run"])
@pytest.mark.parametrize("signals", [1, 3])
def test_an_interrupted_publish_neither_keeps_its_lock_nor_publishes_later(cast, signals: int, within: str) -> None:
    """At each line of what the caller's thread does itself, while an earlier task is in the background."""
    publisher = cast.publisher(in_background=True)
    publisher.keep = 10**3  # none of them goes
    first, at = next(cast.numbers), count(1)
    publisher.publish(first, tensors_of(first).items())
    publisher.settle()
    while True:
        publisher._executor.submit((free := threading.Event()).wait, SOON_S)
        interrupt, step = Interrupt("caller", next(at), within, signals), next(cast.numbers)
        interrupt.during(lambda: publisher.publish(step, tensors_of(step).items()))  # noqa: B023
        free.set()
        publisher.settle()
        assert not publisher._ahead.locked()
        if not interrupt.happened:
            break
    assert [info.version for info in cast.reader.versions()] == [1, first, step]
    publisher.close()


def test_without_a_thread_of_its_own_it_does(cast: Cast, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: interrupted at the last line of a publish, the caller does not know what the hub shows."""
    monkeypatch.setattr(calls, "run", lambda body: body())
    tell(cast, STORIES["publish"], Interrupt("caller", None))  # the next ones use its memory again
    never = Interrupt("caller", None)
    tell(cast, STORIES["publish"], never)
    with pytest.raises(UsageError, match="published here already"):
        last = Interrupt("caller", never.lines - 2)
        cast.given = next(cast.numbers)
        last.during(lambda: STORIES["publish"].act(cast))
        assert last.happened
        STORIES["publish"].works(cast, None)


def test_an_exception_that_another_thread_raises_ends_a_wait_at_once(cast: Cast) -> None:
    """As `ray.cancel` does it. The hub hears that nobody waits any more."""
    ended: list[BaseException] = []

    def wait() -> None:
        try:
            cast.worker.wait(newer_than=10**6, timeout_s=3600)
        except SystemExit as error:
            ended.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    until(lambda: cast.worker._hub._machine.asked)
    thread, raised = ctypes.c_ulong(waiting.ident or 0), ctypes.py_object(SystemExit)
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, raised) == 1
    waiting.join(SOON_S)
    assert ended and not waiting.is_alive()
    cast.is_of_one_mind()


def test_a_call_is_carried_out_as_if_in_the_callers_thread() -> None:
    """Device, stream, torch's modes, context variables, and the right to call a device while it captures."""
    simulation, variable = Simulation(0, count=2), ContextVar("variable", default="nothing")
    variable.set("the caller's")

    def look() -> tuple[object, ...]:
        stream = simulation._mine.__dict__.get("stream", "default")
        modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        counts = os.sched_getaffinity(0), torch.get_num_threads()
        return simulation.current, stream, *modes, variable.get(), acting(), *counts

    def is_alike() -> bool:
        here, there = look(), calls.run(lambda: (*look(), threading.get_ident()))
        return here == there[:-1] and there[-1] != threading.get_ident()

    for modes in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        with simulation, simulation.choosing(1), simulation.stream("the caller's"), modes():
            assert is_alike()
    assert is_alike()  # also after others
    cores, count = os.sched_getaffinity(0), torch.get_num_threads()
    try:
        os.sched_setaffinity(0, {min(cores)})
        torch.set_num_threads(count + 1)
        assert is_alike()
    finally:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(count)
    assert is_alike()


def test_calls_that_wait_for_each_other_have_a_thread_each_and_few_threads_stay() -> None:
    together = threading.Barrier(10)
    with ThreadPoolExecutor(10, "other") as other:
        list(other.map(lambda _: calls.run(lambda: together.wait(SOON_S)), range(10)))
    until(lambda: calls._threads._idle == calls.IDLE_MAX)
    by = {calls.run(threading.get_ident) for _ in range(100)}
    assert len(by) <= calls.IDLE_MAX


def test_where_no_thread_can_be_started_the_caller_carries_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(calls, "_threads", calls._Threads())
    monkeypatch.setattr(calls._thread, "start_new_thread", fails)
    assert calls.run(threading.get_ident) == threading.get_ident()
    monkeypatch.setattr(calls._Threads, "put", lambda threads, action: None)  # one that never begins
    monkeypatch.setattr(calls, "time", SimpleNamespace(monotonic=count(0, 2 * calls.BEGIN_S).__next__))
    assert calls.run(threading.get_ident) == threading.get_ident()


def test_a_forked_child_has_threads_of_its_own() -> None:
    calls.run(int)
    if (child := os.fork()) == 0:
        os._exit(calls.run(int) if calls.run(threading.get_ident) != threading.get_ident() else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_thread_of_ours_carries_its_calls_out_itself() -> None:
    """What it holds it may enter again, and nobody waits for a thread that waits for it."""
    with ThreadPoolExecutor(1, "tensorhub-some") as ours, ThreadPoolExecutor(1, "other") as other:
        for pool, is_itself in (ours, True), (other, False):
            me, carried_out_by = pool.submit(lambda: (threading.get_ident(), calls.run(threading.get_ident))).result()
            assert (me == carried_out_by) is is_itself
