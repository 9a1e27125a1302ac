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
def test_no_reader_writes_any_more_when_a_transfer_has_returned(writes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that only connects, and was given no memory to write to, is not waited for without end."""
    monkeypatch.setattr(runner.time, "monotonic", lambda: 100.0)
    said: list[object] = []
    reader = SimpleNamespace(close=lambda: said.append("close"), join=lambda s: said.append(s), writes=writes)
    transfer = make(SlowHub())
    transfer._left.append(reader)
    transfer._next.append(events.Answer(0, errors.HubUnreachable("it is away"), False))
    with pytest.raises(errors.HubUnreachable):
        transfer.run()
    assert said == ["close", None if writes else pytest.approx(runner.OPENING_S)]


def a_reader(inbox: Events | None = None, transports: dict[str, SimpleNamespace] | None = None) -> SourceReader:
    grant = m.Grant(0, b"s" * 16, "a/0", {"tcp": "x"}, Location(), b"root", 1)
    machine = Replication(m.Acquire(0, 1, 0, (CHECKPOINT,), 1e9), 1e9, 1e9)
    return SourceReader(ShardKey(1, CHECKPOINT), grant, transports or {}, machine, inbox or queue.SimpleQueue())


def test_hundreds_of_readers_that_connect_are_not_waited_for_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A version is withdrawn while its source, of many shards, is frozen."""
    clock = [100.0]
    monkeypatch.setattr(runner.time, "monotonic", lambda: clock[0])

    def join(timeout_s: float) -> None:
        clock[0] += timeout_s

    transfer = make(SlowHub())
    transfer._left = [SimpleNamespace(close=lambda: None, join=join, writes=False)] * 300  # type: ignore[list-item]
    transfer._join_all()
    assert clock[0] == pytest.approx(100.0 + runner.OPENING_S)


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
    stalls_at: list[float] = []
    link = SimpleNamespace(
        open=lambda *_, **__: stalls_at.append(reader.stalls_at), close=lambda: None, progress=LinkProgress()
    )
    reader = a_reader(inbox, {"tcp": SimpleNamespace(connect=lambda *_, **__: link)})
    assert reader.stalls_at == float("inf")  # before it is started
    reader.start()
    try:
        assert isinstance(inbox.get(timeout=10)[1], events.Opened)
        assert stalls_at[0] < reader.stalls_at == float("inf")
    finally:
        reader.close()
        reader.join(10)


class OneSource:
    """A transfer of many shards from one source; none of its readers runs, and `carry_out` returns which are begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, shards: int) -> None:
        self.now, self.begun = 100.0, list[int]()
        monkeypatch.setattr(runner.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(SourceReader, "start", lambda reader: self.begun.append(reader.shard))
        self.transfer, self.session = make(SlowHub()), b"s" * 16
        self.transfer._destinations = SimpleNamespace(announce_read=lambda key: None, takes_deltas=False)
        grants = {each: m.Grant(each, self.session, "a/0", {}, Location(), b"root", 1) for each in range(shards)}
        self.opens = [events.Open(ShardKey(1, CHECKPOINT, each, shards), grant, 7) for each, grant in grants.items()]
        self.closes = [events.Close(each, self.session) for each in range(shards)]

    def carry_out(self, *effects: events.Effect) -> list[int]:
        self.begun.clear()
        for effect in effects:
            self.transfer._carry_out(effect)
        self.transfer._start_queued()
        return list(self.begun)


def test_who_was_refused_beside_others_of_one_source_waits_until_one_of_them_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A source of hundreds of shards admits so many connections; one is tried now and then. The control: one that
    refuses the first is unreached, and one that is lost is waited for no more."""
    source = OneSource(monkeypatch, shards=6)
    transfer, session, carry_out = source.transfer, source.session, source.carry_out
    opens, closes = source.opens, source.closes
    refused = [events.Lost(each, session, "it went away", unreached=True) for each in range(6)]

    assert carry_out(*opens) == [0, 1, 2, 3, 4, 5]
    for shard in (0, 1):
        transfer._noted(events.Opened(shard, session, None))  # type: ignore[arg-type]
    for shard in (2, 3, 4, 5):
        transfer._noted(refused[shard])
    assert carry_out(*closes[2:], *opens[2:]) == [] and not transfer._unreached.sessions(0.0)
    assert carry_out(closes[0]) == [2]
    source.now += runner.TRY_S
    assert carry_out() == [3] and carry_out() == []
    transfer._noted(events.Opened(2, session, None))  # type: ignore[arg-type]
    transfer._next.clear()
    transfer._noted(events.Lost(1, session, "it died"))
    assert list(transfer._next) == [events.Lost(each, session, "it died") for each in (4, 5)]
    assert carry_out(*closes[1:]) == []
    assert carry_out(*opens[:2]) == [0, 1]
    transfer._noted(events.Lost(0, session, "it closed the connection", unreached=True, cut=True))
    assert not transfer._unreached.sessions(0.0)
    transfer._noted(refused[0])
    assert transfer._unreached.sessions(0.0) == (session,)


def test_where_all_open_readers_of_a_source_end_as_many_begin_and_more_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else hundreds would be refused anew. Where others have left their places more and more are tried."""
    source = OneSource(monkeypatch, shards=20)
    transfer, session, carry_out = source.transfer, source.session, source.carry_out
    opens, closes = source.opens, source.closes
    carry_out(*opens)
    for shard in (0, 1):
        transfer._noted(events.Opened(shard, session, None))  # type: ignore[arg-type]
    refused = [events.Lost(each, session, "it closed the connection", unreached=True, cut=True) for each in range(20)]
    for each in refused[2:]:
        transfer._noted(each)
    assert carry_out(*closes[2:], *opens[2:]) == []
    assert carry_out(*closes[:2]) == [2, 3]
    transfer._noted(refused[3])
    assert carry_out(closes[3], opens[3]) == [] and not transfer._unreached.sessions(0.0)
    waited = list[float]()
    transfer._events = SimpleNamespace(get=lambda timeout: waited.append(timeout) or (None, events.Tick()))
    transfer._next_event()
    assert waited == [pytest.approx(runner.TRY_ALONE_S)], "though none is open, of which an event would come"
    source.now += runner.TRY_ALONE_S
    assert carry_out() == [4]
    for tried in ([5, 6], [7, 8, 9, 10]):
        source.now += runner.TRY_S
        assert carry_out() == tried
    transfer._noted(refused[10])
    source.now += runner.TRY_S
    assert carry_out() == [11]


def test_a_source_that_says_that_it_is_full_is_tried_now_and_then_and_not_out_of_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others of this host have all its places. The control: one that closes the connection without a word."""
    source = OneSource(monkeypatch, shards=3)
    transfer, carry_out = source.transfer, source.carry_out
    assert carry_out(*source.opens) == [0, 1, 2]
    full = [events.Lost(each, source.session, "it admits no more readers", cut=True) for each in range(3)]
    assert [transfer._noted(each) for each in full] == full
    assert carry_out(*source.closes, *source.opens) == []
    source.now += runner.TRY_ALONE_S
    assert carry_out() == [0] and not transfer._unreached.sessions(0.0)
    closed = events.Lost(0, source.session, "it closed the connection", unreached=True, cut=True)
    assert transfer._noted(closed) == closed and transfer._unreached.sessions(0.0)


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
