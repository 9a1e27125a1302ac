"""What is true when a transfer has returned, however it ended."""

from __future__ import annotations

import queue
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from tensorhub_plugins.core import errors
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.transfer import events, runner
from tensorhub_plugins.core.transfer.replication import Replication
from tensorhub_plugins.core.transfer.source_reader import Events, SourceReader, Target
from tensorhub_plugins.core.transports.interface import LinkProgress
from tensorhub_plugins.core.transports.stream.messages import HELLO, MAGIC, PROTOCOL, check_hello
from tensorhub_plugins.core.types import CHECKPOINT, Location, ShardKey


class SlowHub:
    """It takes every request, and answers it when the reader has left."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.ended: list[int] = []

    def ask(self, make, deadline: float) -> Future:
        self.asked.append(make(7 + len(self.asked)).request_id)
        return Future()

    def end_lease(self, ended: m.Release) -> None:
        self.ended.append(ended.request_id)


def make(hub: SlowHub) -> runner.Transfer:
    machine = Replication(m.Acquire(0, 1, 0, (CHECKPOINT,), 1e9), 1e9, 1e9)
    return runner.Transfer(machine, hub, {}, SimpleNamespace())


def test_the_lease_of_an_unanswered_request_is_ended_with_the_transfer() -> None:
    """The hub may have granted it, and the answer is still on its way: nobody would ever say that the read is over."""
    hub = SlowHub()
    transfer = make(hub)
    transfer._next.append(events.Answer(0, errors.HubUnreachable("it is away"), False))
    with pytest.raises(errors.HubUnreachable):
        transfer.run()
    assert hub.asked == [7] and hub.ended == [7]


@pytest.mark.parametrize("writes", [True, False])
def test_no_reader_writes_any_more_when_a_transfer_has_returned(writes: bool) -> None:
    """One that only connects, and was given no memory to write to, is not waited for without end."""
    said: list[object] = []
    reader = SimpleNamespace(close=lambda: said.append("close"), join=lambda s: said.append(s), writes=writes)
    transfer = make(SlowHub())
    transfer._left.append(reader)
    transfer._next.append(events.Answer(0, errors.HubUnreachable("it is away"), False))
    with pytest.raises(errors.HubUnreachable):
        transfer.run()
    assert said == ["close", None if writes else runner.OPENING_S]


def a_reader(inbox: Events | None = None, transports: dict[str, SimpleNamespace] | None = None) -> SourceReader:
    grant = m.Grant(0, b"s" * 16, "a/0", {"tcp": "x"}, Location(), b"root", 1)
    machine = Replication(m.Acquire(0, 1, 0, (CHECKPOINT,), 1e9), 1e9, 1e9)
    return SourceReader(ShardKey(1, CHECKPOINT), grant, transports or {}, machine, inbox or queue.SimpleQueue())


def test_what_another_source_may_still_write_is_not_read_before_that_one_has_ended() -> None:
    """Its late bytes would land on verified ones."""
    reader, others = a_reader(), [a_reader(), a_reader()]
    ended: list[str] = []
    for name, other in zip("ab", others, strict=True):
        other.join = lambda name=name: ended.append(name)  # type: ignore[method-assign]
    reader.read((4, 5), Target(None, None, ()), others[:1])
    reader.read((6,), Target(None, None, ()), others[1:])
    assert ended == [] and reader._more() == [4, 5, 6] and ended == ["a", "b"]


def test_a_source_that_was_opened_and_is_asked_for_nothing_is_not_taken_for_frozen() -> None:
    """An additional source may wait long until another one leaves it something. The control: one that is opened."""
    inbox: Events = queue.SimpleQueue()
    link = SimpleNamespace(open=lambda *_, **__: None, close=lambda: None, progress=LinkProgress())
    reader = a_reader(inbox, {"tcp": SimpleNamespace(connect=lambda *_, **__: link)})
    assert reader.stalls_at < float("inf")
    reader.start()
    try:
        assert isinstance(inbox.get(timeout=10)[1], events.Opened)
        assert reader.stalls_at == float("inf")
    finally:
        reader.close()
        reader.join(10)


@pytest.mark.parametrize(("magic", "unreached"), [(MAGIC, False), (b"HTTP", True)], ids=["it", "another program"])
def test_a_source_of_another_release_is_not_said_to_be_out_of_reach(magic: bytes, unreached: bool) -> None:
    """Nobody is told to set addresses for it. The control: a program that is no source of ours at its address."""
    inbox: Events = queue.SimpleQueue()

    def connect(*_: object, **__: object) -> None:
        check_hello(HELLO.pack(magic, PROTOCOL + 1, 0, b""))

    reader = a_reader(inbox, {"tcp": SimpleNamespace(connect=connect)})
    reader.start()
    reader.join(10)
    lost = inbox.get(timeout=10)[1]
    assert isinstance(lost, events.Lost) and lost.unreached == unreached
