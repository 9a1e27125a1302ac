"""A reader becomes a source, and sources are killed, frozen, cut off, or break the contract in the middle."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from client_processes import SEGMENT, SEGMENTS, SIZE, hold_back, let_go, same_bytes, tensors_of, zeros_like
from client_stage import FAR, HELD, LATE_S, NEAR, RUNTIME, SOON_S, holders, leases, until

from tensorhub_plugins.core import (
    CHECKPOINT,
    Client,
    CorruptBytes,
    DeadlineExceeded,
    Location,
    ShardKey,
    SourceLost,
    UsageError,
    VersionGone,
    start_server,
)
from tensorhub_plugins.core.cli import fetch_status, status_text
from tensorhub_plugins.core.client import calls
from tensorhub_plugins.core.client.changes import Bases
from tensorhub_plugins.core.client.connection import HubLink
from tensorhub_plugins.core.device.graph_capture import acting
from tensorhub_plugins.core.hub.limits import HubLimits
from tensorhub_plugins.core.transfer.limits import TransferLimits
from tensorhub_plugins.core.transports import TransportLimits, tcp

# --- a reader becomes a source ---


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_reader_serves_on_when_the_publisher_is_gone(stage, transport):
    trainer, first, second = (stage.client(name, transports=(transport,)) for name in ("trainer", "first", "second"))
    trainer.publish(1, tensors_of(1))
    first.fetch(serve=True)
    trainer.close()
    fetched = second.fetch()
    assert fetched.report.sources == {"first/0": SIZE} and same_bytes(fetched.tensors(), tensors_of(1))


def only_source(stage, ranks: int, numbers: int, *, readers: int) -> Client:
    """Return a worker that alone has version 1: of each of these ranks as many numbers, which are its rank. It admits
    so many readers of a host."""
    trainer = [stage.client("trainer", shard=rank, shard_count=ranks) for rank in range(ranks)]
    for rank, each in enumerate(trainer):
        each.publish(1, {f"w{rank}": torch.full((numbers,), float(rank))})
    first = stage.client("first", transport_limits=TransportLimits(readers_per_peer_max=readers))
    first.fetch(serve=True)
    for each in trainer:
        each.close()
    return first


def held_back(source: Client, ranks: int) -> list[Any]:
    """Return its offers, none of which is ready."""
    offers = [source.find(ShardKey(1, CHECKPOINT, rank, ranks)) for rank in range(ranks)]
    for offer in offers:
        offer._ready[0] = 0
    return offers


@pytest.mark.slow
def test_a_source_of_more_shards_than_it_admits_readers_refuses_each_once(stage):
    """A rollout that has what all ranks of a large trainer have published, each a part of it. Those that it was asked
    for again, now and then, needed a lease each, and beyond four of them waited at the hub while there were places."""
    ranks, readers = 12, 4
    offers = held_back(only_source(stage, ranks, 1000, readers=readers), ranks)
    second = stage.client("second", location=FAR)
    reading = stage.begin(second.fetch)
    transfer = until(lambda: next(iter(second._transfers), None))
    until(lambda: sum(len(each.readers) for each in transfer._queues.values()) == ranks - readers)
    losses = len(transfer._machine.losses)
    time.sleep(2.5)  # in which it tries another one
    tried = len(transfer._machine.losses) - losses
    for offer in offers:
        offer.mark_all_ready()
    fetched = reading.result(SOON_S)
    assert fetched.report.sources == {"first/0": 4000 * ranks} and (losses > 0, tried) == (True, 0)
    assert all(fetched.tensors()[f"w{rank}"][0] == rank for rank in range(ranks))


def test_where_no_reader_of_it_is_open_the_others_do_not_begin_all_at_once(stage):
    """Shards that are small, or in place already, have ended before the next ones are open. A source that closes a
    connection, and was read before, is not said to be out of reach."""
    ranks = 16
    only_source(stage, ranks, 10, readers=3)
    second = stage.client("second", location=FAR)
    for size_bytes in (40 * ranks, 0):
        fetched = second.fetch()
        assert sum(fetched.report.sources.values()) == size_bytes and len(fetched.report.losses) <= 2 * ranks
        assert not second._hub.unreached.sessions(time.monotonic())
        assert all(fetched.tensors()[f"w{rank}"][0] == rank for rank in range(ranks))
        fetched.release()


def test_where_others_have_all_places_of_a_source_it_is_not_said_to_be_out_of_reach(stage):
    """Several workers of one host read what a large trainer has published; the last ones wait."""
    ranks = 4
    offers = held_back(only_source(stage, ranks, 10, readers=2), ranks)
    reading = stage.begin(stage.client("second", location=FAR).fetch)
    until(lambda: sum(offer.active_readers for offer in offers) == 2)
    third = stage.client("third", location=FAR)
    with pytest.raises(DeadlineExceeded, match="the source admits no more readers from here now") as caught:
        third.fetch(timeout_s=1.0)
    assert "cannot be connected to" not in caught.value.message
    assert not third._hub.unreached.sessions(time.monotonic())
    waiting = stage.begin(third.fetch)
    for offer in offers:
        offer.mark_all_ready()
    for each in (reading, waiting):
        assert each.result(SOON_S).report.sources == {"first/0": 40 * ranks}


def test_what_an_interrupted_fetch_has_not_put_on_offer_stays(stage, monkeypatch):
    trainer, reader = stage.client("trainer"), stage.client("reader")
    trainer.publish(1, tensors_of(1))
    undo: list[list[Callable[[], object]]] = []
    monkeypatch.setattr(calls, "undone_by", lambda step: undo[-1].append(step))
    for _ in range(2):
        undo.append([])
        reader.fetch(1, serve=True).release()
    for left in ([ShardKey(1, CHECKPOINT)], []):  # of the second one, and of the first one as the control
        for step in reversed(undo.pop()):  # its caller was interrupted when it was done
            step()
        assert reader.serving() == left


@pytest.mark.parametrize("endpoint", ["tcp://a..b:80", f"tcp://{'a' * 64}:80", "tcp://[::1:80", "tcp://", "a"])
def test_an_address_that_is_none_costs_its_source_only(stage, monkeypatch, endpoint):
    trainer = stage.client("trainer", location=FAR)
    trainer.publish(1, tensors_of(1))
    with monkeypatch.context() as patched:
        patched.setattr(tcp.TcpTransport, "serve", lambda self, shelf: endpoint)
        stage.client("evil").fetch(1, serve=True)
    fetched = stage.client("reader").fetch(1, timeout_s=SOON_S)
    assert fetched.report.sources == {"trainer/0": SIZE} and same_bytes(fetched.tensors(), tensors_of(1))
    assert [loss.split(":")[0] for loss in fetched.report.losses] == ["shard 0 from evil/0"]


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_reader_serves_while_it_still_reads(stage, progress, transport):
    trainer = stage.client("trainer", location=FAR, transports=(transport,))
    first, second = stage.client("first", transports=(transport,)), stage.client("second", transports=(transport,))
    trainer.publish(1, tensors_of(1))
    hold_back(trainer, 1, HELD)
    reading = stage.begin(first.fetch, serve=True)
    progress.wait("first", HELD)
    first.versions()  # answered after what it has announced: the hub knows of it
    following = stage.begin(second.fetch, serve=True)
    progress.wait("second", HELD)
    assert not reading.done() and len(progress.of("first")) == HELD  # so these came from a half
    (lease,) = [x for x in leases(stage) if x["reader"] == "second/0"]
    assert lease["sources"] == {"0": "first/0"}
    text = status_text(fetch_status(stage.address))
    assert "lease: second/0 reads version 1 checkpoint from first/0" in text
    assert holders(trainer, 1) == ("trainer/0",)  # a half is no holder
    with pytest.raises(UsageError, match="it is still being read here"):
        first.unpublish(1)
    let_go(trainer, 1)
    assert reading.result(SOON_S).report.sources == {"trainer/0": SIZE}
    fetched = following.result(SOON_S)
    assert fetched.report.sources == {"first/0": SIZE} and same_bytes(fetched.tensors(), tensors_of(1))
    assert until(lambda: holders(trainer, 1) == ("first/0", "second/0", "trainer/0"))


def test_serving_can_be_switched_off(stage):
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    trainer.publish(1, tensors_of(1))
    rollout.replicate(zeros_like(tensors_of(1)), serve=False)
    assert rollout.serving() == [] and holders(trainer, 1) == ("trainer/0",)


@pytest.mark.slow
def test_a_source_that_waits_itself_is_not_given_up(stage, progress):
    limits = TransferLimits(stall_s=3.0)  # on a busy machine the source may be late by a second
    trainer = stage.client("trainer", transport_limits=TransportLimits(alive_s=0.2))
    rollout = stage.client("rollout", limits=limits)
    trainer.publish(1, tensors_of(1))
    hold_back(trainer, 1, HELD)
    reading = stage.begin(rollout.fetch)
    progress.wait("rollout", HELD)
    time.sleep(2 * limits.stall_s)  # nothing may happen, so there is nothing to wait for
    let_go(trainer, 1)
    assert reading.result(SOON_S).report.losses == ()


# --- a source is killed, frozen, cut off ---


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_source_is_killed_in_the_middle(stage, progress, transport):
    options = {"transports": (transport,)}
    near, far = stage.worker("near", **options), stage.client("far", location=FAR, **options)
    rollout = stage.client("rollout", **options)
    near.call("publish", 1, 1, hold_from=HELD)
    far.publish(1, tensors_of(1))
    mine = zeros_like(tensors_of(1))
    reading = stage.begin(rollout.replicate, mine)
    progress.wait("rollout", HELD)
    near.kill()
    assert progress.of("rollout")[:HELD] == list(range(HELD)) and 1 <= HELD < SEGMENTS  # it hit in the middle
    report = reading.result(SOON_S)
    assert report.sources == {"near/0": HELD * SEGMENT, "far/0": SIZE - HELD * SEGMENT}
    assert sum(report.sources.values()) == report.size_bytes == SIZE
    assert sorted(progress.of("rollout")) == list(range(SEGMENTS))  # each once
    assert len(report.losses) == 1 and "near/0" in report.losses[0]
    assert same_bytes(mine, tensors_of(1))


def test_a_read_whose_deadline_grows_begins_anew_after_the_one_that_it_began_with(stage, progress):
    """In another layout, with memory of its own: what has come until then has moved the deadline."""
    trainer, peer, rollout = stage.client("trainer"), stage.client("peer"), stage.client("rollout")
    trainer.publish(1, tensors_of(1))
    peer.publish(1, {**tensors_of(2), "fused": torch.ones(3)}, RUNTIME)
    hold_back(peer, 1, HELD, RUNTIME)
    timeout_s, began = 1.0, time.monotonic()
    reading = stage.begin(rollout.fetch, 1, (RUNTIME, CHECKPOINT), timeout_s=timeout_s, grows=True, converts=False)
    progress.wait("rollout", HELD)
    time.sleep(max(0.0, began + timeout_s + 0.1 - time.monotonic()))
    peer.close()
    fetched = reading.result(SOON_S)
    assert fetched.report.layout == CHECKPOINT and same_bytes(fetched.tensors(), tensors_of(1))


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_read_whose_deadline_grows_keeps_its_source(stage, progress, transport):
    trainer, rollout = (stage.client(name, transports=(transport,)) for name in ("trainer", "rollout"))
    trainer.publish(1, tensors_of(1))
    hold_back(trainer, 1, HELD)
    timeout_s, began = 1.0, time.monotonic()
    reading = stage.begin(rollout.fetch, 1, timeout_s=timeout_s, grows=True)
    progress.wait("rollout", HELD)
    time.sleep(max(0.0, began + timeout_s + 0.5 - time.monotonic()))
    let_go(trainer, 1)
    fetched = reading.result(SOON_S)
    assert fetched.report.losses == () and same_bytes(fetched.tensors(), tensors_of(1))


def test_a_read_into_tied_tensors_whose_deadline_grows_may_end_after_the_one_that_it_began_with(stage, progress):
    """It failed when all was there: the names of one memory were compared by the deadline that it began with."""
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    published = {**tensors_of(1), "head": tensors_of(1)["embed"]}
    trainer.publish(1, published)
    hold_back(trainer, 1, HELD)
    timeout_s, began, mine = 1.0, time.monotonic(), zeros_like(tensors_of(1))
    mine["head"] = mine["embed"]
    reading = stage.begin(rollout.fetch, 1, timeout_s=timeout_s, grows=True, into=mine)
    progress.wait("rollout", HELD)
    time.sleep(max(0.0, began + timeout_s + 0.1 - time.monotonic()))
    let_go(trainer, 1)
    reading.result(SOON_S)
    assert same_bytes(mine, published)


def test_the_only_source_is_killed_in_the_middle(stage, progress):
    with start_server() as hub:  # whose heartbeats are so far apart that silence tells nothing before the deadline
        stage.address = hub.address
        near, rollout = stage.worker("near"), stage.client("rollout")
        near.call("publish", 1, 1, hold_from=HELD)
        began = time.monotonic()
        reading = stage.begin(rollout.fetch, timeout_s=1.0)
        progress.wait("rollout", HELD)
        near.kill()
        with pytest.raises(
            DeadlineExceeded, match="10 segments were still missing; lost .* shard 0 from near/0"
        ) as caught:
            reading.result(SOON_S)
        error = caught.value
        assert (error.version, error.peer, error.timeout_s) == (1, "near/0", 1.0) and error.phase
        assert time.monotonic() - began < 1.0 + LATE_S and len(progress.of("rollout")) == HELD
        assert rollout.serving() == [] and not [x for x in leases(stage) if x["reader"] == "rollout/0"]


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_source_that_ended_without_a_word_is_given_up_when_a_reader_was_refused(stage, transport):
    """Long before its silence alone would tell."""
    with start_server(limits=HubLimits(heartbeat_s=0.2, session_timeout_s=600.0)) as hub:
        stage.address = hub.address
        near, rollout = stage.worker("near", transports=(transport,)), stage.client("rollout", transports=(transport,))
        near.call("publish", 1, 1)
        near.kill()
        with pytest.raises(VersionGone):
            rollout.fetch(1, timeout_s=SOON_S)
        assert [worker["worker"] for worker in fetch_status(hub.address)["models"][0]["workers"]] == ["rollout/0"]


def test_a_connection_over_a_long_way_is_reset_and_the_transfer_goes_on_where_it_was(stage, progress):
    trainer = stage.client("trainer", location=Location("another dc"))
    rollout = stage.client("rollout")
    trainer.publish(1, tensors_of(1))
    hold_back(trainer, 1, HELD)
    reading = stage.begin(rollout.fetch)
    progress.wait("rollout", HELD)
    (link,) = rollout._transports["tcp"]._links
    channels = link._channels
    assert len(channels) == tcp.FAR_STREAMS
    reset(channels[1].sock)
    let_go(trainer, 1)
    fetched = reading.result(SOON_S)
    assert same_bytes(fetched.tensors(), tensors_of(1)) and fetched.report.sources == {"trainer/0": SIZE}
    assert len(fetched.report.losses) == 1
    assert sorted(progress.of("rollout")) == list(range(SEGMENTS))  # what had arrived was not read again


def reset(sock: socket.socket) -> None:
    """End this TCP connection as a broken middlebox does: connecting to nowhere sends a reset."""
    nowhere = struct.pack("H14x", socket.AF_UNSPEC)
    libc = ctypes.CDLL(None, use_errno=True)
    assert not libc.connect(sock.fileno(), nowhere, len(nowhere)), os.strerror(ctypes.get_errno())


def test_a_frozen_source_is_left_after_a_while(stage, progress):
    near, far = stage.worker("near"), stage.client("far", location=FAR)
    rollout = stage.client("rollout", limits=TransferLimits(stall_s=SOON_S))
    near.call("publish", 1, 1, hold_from=HELD)
    far.publish(1, tensors_of(1))
    reading = stage.begin(rollout.fetch)
    progress.wait("rollout", HELD)
    near.freeze()
    fetched = reading.result(SOON_S)
    assert fetched.report.sources == {"near/0": HELD * SEGMENT, "far/0": SIZE - HELD * SEGMENT}
    assert "another took over" in fetched.report.losses[0] and same_bytes(fetched.tensors(), tensors_of(1))
    assert sorted(progress.of("rollout")) == list(range(SEGMENTS))


def test_one_worker_with_several_shards_is_killed(stage, progress):
    """What it had of every shard is kept; the rest of all comes from elsewhere."""
    trainers = [stage.client("trainer", shard=shard, shard_count=2, location=FAR) for shard in range(2)]
    for shard, trainer in enumerate(trainers):
        trainer.publish(1, {f"{name}.{shard}": t for name, t in tensors_of(shard).items()})
        hold_back(trainer, 1, HELD)
    near, rollout = stage.client("near"), stage.client("rollout")
    relay = stage.begin(near.fetch, serve=True)
    progress.wait("near", 2 * HELD)
    reading = stage.begin(rollout.fetch)
    progress.wait("rollout", 2 * HELD)
    near.close()
    with pytest.raises(UsageError):
        relay.result(SOON_S)
    for trainer in trainers:
        let_go(trainer, 1)
    report = reading.result(SOON_S).report
    rest = SIZE - HELD * SEGMENT
    assert report.sources == {"near/0": 2 * HELD * SEGMENT, "trainer/0": rest, "trainer/1": rest}
    for shard in range(2):
        assert sorted(s for name, k, s in progress.verified if (name, k) == ("rollout", shard)) == list(range(SEGMENTS))


def test_unpublish_waits_for_a_reader(stage, progress):
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    trainer.publish(1, tensors_of(1))
    hold_back(trainer, 1, HELD)
    reading = stage.begin(rollout.fetch)
    progress.wait("rollout", HELD)
    trainer.publish(2, tensors_of(2))
    leaving = stage.begin(trainer.unpublish, 1)
    late = stage.client("late")
    with pytest.raises(VersionGone):  # nobody new is let in
        until(lambda: late.fetch(1, timeout_s=0.3) and None)
    assert not leaving.done() and not reading.done()
    let_go(trainer, 1)
    assert same_bytes(reading.result(SOON_S).tensors(), tensors_of(1))
    report = leaving.result(SOON_S)
    assert (report.cut_off, report.kept) == ((), False)


def test_two_threads_unpublish_the_same_and_it_is_read_again_in_between(stage, monkeypatch):
    """As a kept copy that may go, while its owner gives the version up and then returns to it."""
    trainer, engine = stage.client("trainer"), stage.client("engine")
    trainer.publish(1, tensors_of(1))
    first = engine.fetch(1, serve=True)
    asking, answered = threading.Event(), threading.Event()
    ask = engine._hub.ask

    def ask_and_wait(make: Callable[[int], Any], deadline: float) -> Future[Any]:
        reply = ask(make, deadline)
        if acting() != threading.main_thread().ident:  # whose call it is
            reply.result()
            asking.set()
            assert answered.wait(SOON_S)
        return reply

    monkeypatch.setattr(engine._hub, "ask", ask_and_wait)
    other = stage.begin(engine.unpublish, 1)
    assert asking.wait(SOON_S)
    engine.unpublish(1)
    first.release()
    second = engine.fetch(1, serve=True)
    answered.set()
    other.result(SOON_S)
    assert engine.serving() == [ShardKey(1, CHECKPOINT)]
    assert engine.allocate(second.slab.specs) is not second.slab and same_bytes(second.tensors(), tensors_of(1))
    engine.unpublish(1)  # the control: now it is meant
    assert engine.serving() == []


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_unpublish_cuts_off_at_its_deadline_and_the_reader_goes_elsewhere(stage, progress, transport):
    trainer, far, rollout = (
        stage.client(name, location=location, transports=(transport,))
        for name, location in (("trainer", NEAR), ("far", FAR), ("rollout", NEAR))
    )
    trainer.publish(1, tensors_of(1))
    far.publish(1, tensors_of(1))
    hold_back(trainer, 1, HELD)
    reading = stage.begin(rollout.fetch)
    progress.wait("rollout", HELD)
    report = trainer.unpublish(1, timeout_s=0.3)
    assert report.cut_off == ("rollout/0",) and trainer.serving() == []
    fetched = reading.result(SOON_S)
    assert fetched.report.sources == {"trainer/0": HELD * SEGMENT, "far/0": SIZE - HELD * SEGMENT}
    assert same_bytes(fetched.tensors(), tensors_of(1))
    assert sorted(progress.of("rollout")) == list(range(SEGMENTS))


# --- a broken contract ---


def break_the_contract(live: dict[str, torch.Tensor]) -> None:
    live["rest"][SEGMENT] += 1


def test_bytes_that_change_while_published_are_never_handed_over(stage, progress):
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    live = tensors_of(1)
    trainer.publish(1, live, copy=False)
    break_the_contract(live)
    mine = zeros_like(live)
    began = time.monotonic()
    with pytest.raises(CorruptBytes, match="segment .* arrived corrupt .of 'rest'") as caught:
        rollout.replicate(mine)
    assert time.monotonic() - began < SOON_S  # not at its deadline
    error = caught.value
    assert (error.version, error.peer, error.tensors) == (1, "trainer/0", ("rest",)) and error.segment is not None
    assert rollout.serving() == [] and len(progress.of("rollout")) < SEGMENTS
    stage.client("good", location=FAR).publish(1, tensors_of(1))
    rollout.replicate(mine)
    assert same_bytes(mine, tensors_of(1))


def test_without_the_digests_torn_bytes_would_be_handed_over(stage):
    """The control of the test above."""
    trainer, rollout = stage.client("trainer"), stage.client("rollout", verify=False)
    live = tensors_of(1)
    trainer.publish(1, live, copy=False)
    break_the_contract(live)
    mine = zeros_like(live)
    rollout.replicate(mine)
    assert not same_bytes(mine, tensors_of(1)) and same_bytes(mine, live)


@pytest.mark.parametrize("verify", [True, False])
def test_a_withdrawal_after_the_last_byte_matters_only_without_digests(stage, monkeypatch, verify):
    true_check = tcp.TcpLink.check
    trainer = stage.client("trainer", transports=("tcp",))
    rollout = stage.client("r", transports=("tcp",), verify=verify)
    trainer.publish(1, tensors_of(1))

    def withdrawn_before(link, *, deadline, waits):
        trainer.find(ShardKey(1, CHECKPOINT)).withdraw()
        return true_check(link, deadline=deadline, waits=waits)

    monkeypatch.setattr(tcp.TcpLink, "check", withdrawn_before)
    if verify:
        assert same_bytes(rollout.fetch().tensors(), tensors_of(1))
    else:
        with pytest.raises(SourceLost, match="withdrew its version while it was read"):
            rollout.fetch()


# --- a lease is for who reads ---


@pytest.mark.slow
@pytest.mark.parametrize("renews", [True, False], ids=["", "the control: nobody says that the read goes on"])
def test_who_waits_for_a_source_that_waits_itself_keeps_its_lease(stage, small_segments, monkeypatch, renews):
    if not renews:
        monkeypatch.setattr(HubLink, "renew", lambda self, requests: None)
    with start_server(limits=HubLimits(grace_s=0.0, heartbeat_s=0.2, lease_idle_s=3.0)) as hub:
        stage.address = hub.address
        trainer, rollout = stage.client("trainer"), stage.client("rollout")
        trainer.publish(1, tensors_of(1))
        hold_back(trainer, 1, HELD)
        with pytest.raises(DeadlineExceeded) as failed:
            rollout.fetch(1, timeout_s=4.0)
        assert ("the hub gave it up" in str(failed.value)) is not renews
        while stage.open:
            stage.open.pop().close()


@pytest.mark.parametrize("renews", [True, False], ids=["", "the control: nobody says that work is done here"])
def test_who_copies_what_is_here_already_keeps_its_lease(stage, small_segments, monkeypatch, renews):
    """For longer than a lease may be idle, as tens of GB take on a slow host."""
    if not renews:
        monkeypatch.setattr(HubLink, "renew", lambda self, requests: None)
    copy_equal = Bases.copy_equal

    def slowly(self: Bases, segment: int) -> bool:
        time.sleep(1.8 / self._manifest.segment_count)
        return copy_equal(self, segment)

    with start_server(limits=HubLimits(grace_s=0.0, heartbeat_s=0.2, lease_idle_s=1.0)) as hub:
        stage.address = hub.address
        trainer, rollout = stage.client("trainer"), stage.client("rollout")
        first = tensors_of(1)
        second = {**first, "mask": ~first["mask"]}
        trainer.publish(1, first)
        held = rollout.fetch(1, serve=True)
        trainer.publish(2, second)
        monkeypatch.setattr(Bases, "copy_equal", slowly)
        fetched = rollout.fetch(2, serve=True)
        assert same_bytes(fetched.tensors(), second)
        assert (not fetched.report.losses) is renews
        for each in (held, fetched):
            each.release()
        while stage.open:
            stage.open.pop().close()
