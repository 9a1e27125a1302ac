"""No call outlasts its deadline by more than half a second, whatever it is given; what it has begun is undone."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from client_stage import SOON_S

from tensorhub_plugins.core import CHECKPOINT, Client, DeadlineExceeded, HubUnreachable, Part, Publisher, UsageError
from tensorhub_plugins.core import deadline as deadlines
from tensorhub_plugins.core.client import calls
from tensorhub_plugins.core.client.parts import Held
from tensorhub_plugins.core.client.serving import SAMPLE_S
from tensorhub_plugins.core.manifest import TensorSpec
from tensorhub_plugins.core.memory import claims, downloads, slab, staging
from tensorhub_plugins.core.memory.downloads import FILLED_FROM_BYTES, HOST_THREADS_MAX
from tensorhub_plugins.core.memory.tensors import contiguous_spec
from tensorhub_plugins.core.transfer import runner

MANY = 150_000
FEW = 2048
CALLS_A_TENSOR_MAX = 6  # between two looks at the clock: 0.2 s for MANY tensors


def some(count: int, value: float = 1.0) -> dict[str, torch.Tensor]:
    return {f"layers.{number:06}.w": t for number, t in enumerate(torch.full((count, 2), value).unbind(0))}


def specs_of(tensors: dict[str, torch.Tensor]) -> list[TensorSpec]:
    return [contiguous_spec(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]


Call = Callable[[Client, float], Any]


def publishing(count: int, **how: Any) -> Call:
    tensors = some(count)
    parts = dict.fromkeys(tensors, Part((4,), (0,))) if how.pop("parts", False) else None
    return lambda client, timeout_s: client.publish(7, tensors, parts=parts, timeout_s=timeout_s, **how)


def publishing_parts(count: int) -> Call:
    tensors = some(count)
    held = [Held(spec, tensor) for spec, tensor in zip(specs_of(tensors), tensors.values(), strict=True)]

    def publish(client: Client, timeout_s: float) -> None:
        publisher = Publisher(client, rank=0, ranks=1, worker="t", keep=1, timeout_s=timeout_s)
        try:
            publisher.publish_parts(7, held)
        finally:
            publisher._retired.put(None)

    return publish


def replicating(count: int, **how: Any) -> Call:
    tensors = some(count, 0.0)
    return lambda client, timeout_s: client.replicate(tensors, 1, timeout_s=timeout_s, serve=False, **how)


def fetching(count: int, *, into: bool = False, wanted: bool = False) -> Call:
    tensors = some(count, 0.0)
    how = {"into": tensors if into else None, "wanted": specs_of(tensors) if wanted else None}
    return lambda client, timeout_s: client.fetch(1, timeout_s=timeout_s, **how).release()


# By name, with the worker that calls: of so many tensors, of which the trainer has published version 1.
CALLS: dict[str, tuple[str, Callable[[int], Call]]] = {
    "publish": ("trainer", publishing),
    "publish in place": ("trainer", lambda count: publishing(count, copy=False)),
    "publish with parts": ("trainer", lambda count: publishing(count, parts=True)),
    "publish_parts": ("trainer", publishing_parts),
    "replicate": ("rollout", replicating),
    "replicate a part": ("rollout", lambda count: replicating(count // 2)),
    "repair": ("rollout", lambda count: replicating(count, repair=True)),
    "fetch": ("rollout", fetching),
    "fetch into": ("rollout", lambda count: fetching(count, into=True)),
    "fetch wanted": ("rollout", lambda count: fetching(count // 2, wanted=True)),
}


@pytest.fixture(autouse=True)
def carried_out_here(monkeypatch) -> None:
    """By the calling thread, whose steps, looks and time are counted."""
    monkeypatch.setattr(calls, "run", lambda body: body())


@pytest.fixture
def pair(stage) -> dict[str, Client]:
    trainer, rollout = (stage.client(name, transports=("tcp",)) for name in ("trainer", "rollout"))
    return {"trainer": trainer, "rollout": rollout}


def most_calls_between_looks(call: Callable[[], Any]) -> int:
    """At the clock, by this thread: calls of functions, whatever the machine is busy with."""
    longest = since = 0

    def count(_: Any, event: str, function: Any) -> None:
        nonlocal longest, since
        if event in ("call", "c_call"):
            since += 1
            longest = max(longest, since)
            since = 0 if function is time.monotonic else since

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return longest


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("looks", [True, False])
def test_a_call_looks_at_the_clock_while_it_goes_through_many_tensors(pair, monkeypatch, name, looks):
    if not looks:  # the control
        for module in (deadlines, slab):
            monkeypatch.setattr(module, "check_time", lambda deadline: None)
    worker, make = CALLS[name]
    if worker == "rollout":
        pair["trainer"].publish(1, some(FEW))
    call = make(FEW)
    most = most_calls_between_looks(lambda: call(pair[worker], SOON_S))
    assert (most < CALLS_A_TENSOR_MAX * FEW) == looks, most / FEW


@pytest.mark.parametrize("name", ["replicate", "publish"])
def test_150_000_tensors_do_not_keep_a_call_beyond_its_deadline(pair, name):
    tensors, timeout_s = some(MANY), 0.2
    calls = {
        "publish": lambda: pair["trainer"].publish(7, tensors, timeout_s=timeout_s),
        "replicate": lambda: pair["rollout"].replicate(tensors, 1, timeout_s=timeout_s),
    }
    with pytest.raises(DeadlineExceeded) as caught:  # soon after it has passed, as the number of calls above says
        calls[name]()
    assert (caught.value.timeout_s, caught.value.phase) == (timeout_s, "prepare")


class Clock:
    """The time, until the calling thread has looked at it so often: then all deadlines have passed."""

    def __init__(self, looks: int) -> None:
        self.looks, self._thread = looks, threading.get_ident()

    def monotonic(self) -> float:
        if threading.get_ident() == self._thread:
            self.looks -= 1
        return time.monotonic() + (1e6 if self.looks < 0 else 0.0)


@pytest.mark.parametrize("name", CALLS)
def test_at_whichever_look_the_deadline_has_passed_nothing_is_left_behind(pair, monkeypatch, name):
    worker, make = CALLS[name]
    client, count, call = pair[worker], 3 * deadlines.STEPS, make(3 * deadlines.STEPS)
    pair["trainer"].publish(1, some(count))
    before = client.serving(), pair["trainer"].versions()
    for looks in accumulate(range(100)):  # at the first ones, and then less often
        clock = Clock(looks)
        with monkeypatch.context() as clocks:
            for module in (deadlines, runner, claims):
                clocks.setattr(module, "time", clock)
            try:
                call(client, SOON_S)
                break
            except (DeadlineExceeded, HubUnreachable) as error:  # the latter of what is asked too late
                assert error.timeout_s is not None, error
        assert clock.looks < 0
        assert client.serving() == before[0]
        assert not any(each.is_written for each in claims._claims)
    else:
        pytest.fail("it never ends well")
    assert looks > 3  # at the first of them, at the last one and between
    assert [each.version for each in pair["trainer"].versions()] == ([1, 7] if worker == "trainer" else [1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["as it is", "cast"])
@pytest.mark.parametrize("looks", [True, False])
def test_one_large_tensor_does_not_keep_a_call_beyond_its_deadline(pair, monkeypatch, dtype, looks):
    """Which passes while its first pieces are copied, one by each thread."""
    pieces, copied, fill, monotonic = 2 * HOST_THREADS_MAX, list[int](), staging.fill, time.monotonic
    tensor = torch.ones(pieces, FILLED_FROM_BYTES // 4)

    def last_in_time(target: torch.Tensor, source: torch.Tensor) -> None:
        fill(target, source)
        copied.append(source.nbytes)

    monkeypatch.setattr(staging, "fill", last_in_time)
    monkeypatch.setattr(deadlines, "time", SimpleNamespace(monotonic=lambda: monotonic() + 1e6 * bool(copied)))
    if not looks:  # the control
        monkeypatch.setattr(downloads, "check_time", lambda deadline: None)
    publisher = Publisher(pair["trainer"], rank=0, ranks=1, worker="t", keep=1, timeout_s=SOON_S, dtype=dtype)
    with pytest.raises((DeadlineExceeded, HubUnreachable)):
        publisher.publish_parts(7, [Held(contiguous_spec("w", tensor.dtype, tensor.shape), tensor)])
    assert (len(copied) <= HOST_THREADS_MAX) == looks
    assert pair["trainer"].serving() == []


def test_a_timeout_that_is_given_is_strict_and_the_default_grows_with_the_size():
    assert deadlines.timeout_for(3.0, 1 << 40) == 3.0
    assert deadlines.timeout_for(None, 0) == 60.0
    assert deadlines.timeout_for(None, 200 * 10**9) == 460.0
    with pytest.raises(UsageError, match="timeout_s"):
        deadlines.timeout_for(float("nan"), 0)


@pytest.mark.parametrize("timeout_s", [0.0, SOON_S])
def test_an_unpublish_compares_its_sample_no_longer_than_it_has_time(pair, monkeypatch, timeout_s):
    """It may be of very many tensors. What was not compared is not called damaged."""
    pair["trainer"].publish(1, some(64), copy=False)
    pair["trainer"].retain(0)
    given = list[float]()

    def takes_long(*_: Any, deadline: float, **__: Any) -> None:
        given.append(deadline - time.monotonic())
        raise DeadlineExceeded("the deadline passed")

    monkeypatch.setattr(slab.Slab, "damaged", takes_long)
    report = pair["trainer"].unpublish(1, timeout_s=timeout_s)
    assert report.damaged == ()
    assert len(given) == 1 and given[0] <= max(timeout_s, SAMPLE_S)
    assert bool(pair["trainer"].serving()) == report.kept  # as where a busy hub does not answer in no time


def test_a_last_copy_that_is_not_moved_in_time_is_offered_on(pair, monkeypatch):
    trainer = pair["trainer"]
    tensors = some(64)
    trainer.publish(1, tensors, copy=False)

    def late(deadline: float) -> None:
        raise DeadlineExceeded("the deadline passed")

    monkeypatch.setattr(slab, "check_time", late)
    with pytest.raises(DeadlineExceeded, match="must not change yet") as caught:
        trainer.unpublish(1, timeout_s=1.0)
    assert (caught.value.version, caught.value.phase) == (1, "retain")
    assert [key.version for key in trainer.serving()] == [1]
    into = some(64, 0.0)
    pair["rollout"].replicate(into, 1, serve=False)  # where there is another copy, the hub has this one released
    assert all(map(torch.equal, into.values(), tensors.values()))
    monkeypatch.undo()
    assert trainer.unpublish(1, CHECKPOINT).kept  # the control: with time it is moved
