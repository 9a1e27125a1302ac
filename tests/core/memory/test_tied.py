"""Reading into tied weights: several names, one memory. What a reader ends with is what was published under each name.

"Equal" below means that the published tensors have the same bytes, as a tied model's do. "Different" is the fault that
must be found: the reader's names share a memory that cannot hold both.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from client_processes import hold_back, let_go
from client_stage import FIRST_HUB, until

from tensorhub_plugins.core import CHECKPOINT, Client, Location, Part, ShardKey, Slab, UsageError, start_server
from tensorhub_plugins.core.client.destinations import Destinations
from tensorhub_plugins.core.device.devices import Device
from tensorhub_plugins.core.device.drivers import Plain
from tensorhub_plugins.core.manifest import segment_size_for
from tensorhub_plugins.core.memory.tied import LiveTensors
from tensorhub_plugins.core.transports import Offer
from tensorhub_plugins.core.transports.shm import process_memory as _process
from tensorhub_plugins.core.transports.shm.source import ShmSource

SOON_S = 30.0  # for what happens at once unless something is broken
TIMEOUT_S = 120.0  # of a read: an error that came only then would be far beyond SOON_S
NAMES_BOTH = "'embed' and 'lm_head' are the same memory here, but were published with different bytes"


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    with start_server(limits=FIRST_HUB) as server:
        yield server.address


@pytest.fixture
def client(hub, request) -> Iterator[Callable[..., Client]]:
    with ExitStack() as stack:

        def make(replica: str, **options: Any) -> Client:
            options = {"transports": ("tcp",), **options}
            return stack.enter_context(
                Client(hub, run=request.node.name[:200], model="actor", replica=replica, **options)
            )

        yield make


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def raw(count: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def published(size_bytes: int, *, equal: bool) -> dict[str, torch.Tensor]:
    """Different ones differ in the last byte only, where nobody looks first."""
    one = raw(size_bytes, 1)
    other = one.clone()
    other[-1] += 0 if equal else 1
    return {"body": raw(1000, 2), "embed": one, "lm_head": other}


def tied_like(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    shared = torch.zeros_like(tensors["embed"])
    return {"body": torch.zeros_like(tensors["body"]), "embed": shared, "lm_head": shared}


def same(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def holders(client: Client) -> tuple[str, ...]:
    return client.versions()[0].layouts.get(CHECKPOINT, ())


def in_one_memory(self: LiveTensors, names: Any = None) -> Slab:
    """`LiveTensors.adopt` as if nothing were tied."""
    return Slab.adopt(self._tensors if names is None else {name: self._tensors[name] for name in names})


# --- a whole version, over every way ---


SIZES = {"4 KB": 4 << 10, "1 MB": 1 << 20, "4 MB": 4 << 20, "10 MB": 10 << 20}


@pytest.mark.parametrize("verify", [True, False], ids=["digests", "no digests"])
@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("size", SIZES)
def test_equal_bytes_arrive_and_are_served_on(client, size, transport, verify):
    options: dict[str, Any] = {"transports": (transport,), "verify": verify}
    trainer, rollout, other = (client(name, **options) for name in ("trainer", "rollout", "other"))
    tensors = published(SIZES[size], equal=True)
    trainer.publish(1, tensors)
    mine = tied_like(tensors)
    assert rollout.replicate(mine).losses == () and same(mine, tensors)
    assert mine["embed"] is mine["lm_head"] and holders(trainer) == ("rollout/0", "trainer/0")

    trainer.close()
    theirs = tied_like(tensors)
    report = other.replicate(theirs)
    assert list(report.sources) == ["rollout/0"] and report.losses == () and same(theirs, tensors)


@pytest.mark.parametrize("verify", [True, False], ids=["digests", "no digests"])
@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("size", SIZES)
def test_different_bytes_are_refused_at_once_and_the_source_is_not_blamed(client, caplog, size, transport, verify):
    options: dict[str, Any] = {"transports": (transport,), "verify": verify}
    trainer, rollout = (client(name, **options) for name in ("trainer", "rollout"))
    tensors = published(SIZES[size], equal=False)
    assert segment_size_for(sum(map(torch.Tensor.numel, tensors.values()))) < 10 << 20  # one tensor is more than that
    trainer.publish(1, tensors)
    began = time.monotonic()
    with pytest.raises(UsageError, match=NAMES_BOTH) as caught:
        rollout.replicate(tied_like(tensors), timeout_s=TIMEOUT_S)
    assert time.monotonic() - began < SOON_S and caught.value.version == 1 and caught.value.peer is None
    assert rollout.serving() == [] and holders(rollout) == ("trainer/0",) and "lost" not in caplog.text

    mine = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}  # the way out that the error names
    report = rollout.replicate(mine)
    assert report.losses == () and list(report.sources) == ["trainer/0"] and same(mine, tensors)


def test_without_scratch_the_wrong_tensor_would_be_handed_over(client, monkeypatch):
    """The control of the one above."""
    monkeypatch.setattr(LiveTensors, "adopt", in_one_memory)
    monkeypatch.setattr(LiveTensors, "tied", property(lambda self: False))
    trainer, rollout = client("trainer"), client("rollout")
    tensors = published(4 << 20, equal=False)
    trainer.publish(1, tensors)
    mine = tied_like(tensors)
    rollout.replicate(mine)
    assert not torch.equal(mine["embed"], tensors["embed"]) and torch.equal(mine["lm_head"], tensors["lm_head"])


@pytest.mark.parametrize("equal", [True, False], ids=["equal", "different"])
def test_read_into_place_by_a_fetch(client, equal):
    trainer, rollout = client("trainer"), client("rollout")
    tensors = published(1 << 20, equal=equal)
    trainer.publish(1, tensors, "runtime")
    mine = tied_like(tensors)
    if not equal:
        with pytest.raises(UsageError, match=NAMES_BOTH):
            rollout.fetch(1, ("runtime", CHECKPOINT), into=mine, serve=True)
        assert rollout.serving() == []
        return
    fetched = rollout.fetch(1, ("runtime", CHECKPOINT), into=mine, serve=True)
    assert fetched.slabs == {} and same(mine, tensors)
    offered = rollout.find(ShardKey(1, "runtime"))
    assert offered.slab.tensors()["lm_head"] is mine["lm_head"]  # and the scratch is gone


def test_another_layout_is_read_into_memory_of_its_own_although_the_tensors_are_tied(client):
    trainer, rollout = client("trainer"), client("rollout")
    tensors = published(1 << 20, equal=False)
    trainer.publish(1, tensors)
    mine = tied_like(tensors)
    fetched = rollout.fetch(1, ("runtime", CHECKPOINT), into=mine)
    assert same(fetched.tensors(), tensors) and not mine["embed"].any()


# --- several sources, parts ---


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("equal", [True, False], ids=["equal", "different"])
def test_the_names_come_from_two_source_shards(client, transport, equal):
    tensors = published(1 << 20, equal=equal)
    for shard, names in enumerate((["body", "embed"], ["lm_head"])):
        trainer = client("trainer", shard=shard, shard_count=2, transports=(transport,))
        trainer.publish(1, {name: tensors[name] for name in names})
    rollout = client("rollout", transports=(transport,))
    mine = tied_like(tensors)
    if equal:
        assert len(rollout.replicate(mine).sources) == 2 and same(mine, tensors)
        assert len(rollout.serving()) == 2
    else:
        with pytest.raises(UsageError, match=NAMES_BOTH):
            rollout.replicate(mine)
        assert rollout.serving() == []


@pytest.mark.parametrize("equal", [True, False], ids=["equal", "different"])
def test_rows_of_both_names_put_together_from_two_source_shards(client, equal):
    embed = raw(64 * 1024, 1).view(64, 1024)
    lm_head = embed.clone()
    lm_head[40, 7] += 0 if equal else 1
    for shard in range(2):
        rows = slice(32 * shard, 32 * (shard + 1))
        part = Part((64, 1024), (32 * shard, 0))
        client("trainer", shard=shard, shard_count=2).publish(
            1, {"embed": embed[rows], "lm_head": lm_head[rows]}, parts={"embed": part, "lm_head": part}
        )
    rollout = client("rollout")
    shared = torch.zeros(32, 1024, dtype=torch.uint8)  # rows 16 to 48: of both shards
    part = Part((64, 1024), (16, 0))
    mine, parts = {"embed": shared, "lm_head": shared}, {"embed": part, "lm_head": part}
    if equal:
        rollout.replicate(mine, parts=parts)
        assert torch.equal(shared, embed[16:48])
    else:
        with pytest.raises(UsageError, match=NAMES_BOTH):
            rollout.replicate(mine, parts=parts)
        rollout.replicate({"embed": shared}, parts={"embed": part})  # the other way out
        assert torch.equal(shared, embed[16:48])


def test_other_parts_under_the_two_names_are_different_bytes(client):
    whole = raw(64 * 1024, 1).view(64, 1024)
    client("trainer").publish(1, {"embed": whole, "lm_head": whole.clone()})
    shared = torch.zeros(32, 1024, dtype=torch.uint8)
    parts = {"embed": Part((64, 1024), (0, 0)), "lm_head": Part((64, 1024), (32, 0))}
    with pytest.raises(UsageError, match=NAMES_BOTH):
        client("rollout").replicate({"embed": shared, "lm_head": shared}, parts=parts)


# --- nothing is decided by the order in which segments come ---


def arrive(slab: Slab, name: str, tensor: torch.Tensor) -> tuple[tuple[int, int], bytes]:
    """A source's bytes of this name; which range of the stream that is, and its digest as taken then."""
    start = slab.specs.offsets[slab.specs.positions[name]]
    stop = start + tensor.nbytes
    with slab.writable(start, stop) as views:
        at = 0
        for view in views:
            view[:] = tensor.numpy()[at : at + len(view)]
            at += len(view)
    return (start, stop), slab.digest(start, stop)


@pytest.mark.parametrize("order", [("embed", "lm_head"), ("lm_head", "embed")])
def test_what_was_verified_stays_as_it_was_whatever_comes_after(order):
    tensors = published(1 << 20, equal=False)
    mine = tied_like(tensors)
    live = LiveTensors(mine)
    slab = live.adopt()
    seen = [arrive(slab, name, tensors[name]) for name in order]
    assert all(slab.digest(*where) == digest for where, digest in seen)
    assert torch.equal(mine["embed"], tensors["embed"])  # the first name is read in place
    with pytest.raises(UsageError, match=NAMES_BOTH):
        live.check(1)

    slab = Slab.adopt(mine)  # the control: one memory for both, each digest right when it was taken
    seen = [arrive(slab, name, tensors[name]) for name in order]
    assert [slab.digest(*where) == digest for where, digest in seen] == [False, True]


@pytest.mark.parametrize("equal", [True, False], ids=["equal", "different"])
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_who_reads_from_a_reader_that_is_still_reading_gets_the_published_bytes(
    client, threads, monkeypatch, transport, equal
):
    monkeypatch.setattr(Slab.manifest, "__defaults__", (1 << 16,))
    trainer, first, second = (client(name, transports=(transport,)) for name in ("trainer", "first", "second"))
    tensors = published(1 << 20, equal=equal)
    trainer.publish(1, tensors)
    hold_back(trainer, 1, 30)  # of 33 segments: embed is complete, lm_head nearly
    mine = tied_like(tensors)
    reading = threads.submit(first.replicate, mine, 1)
    offer = until(lambda: first.find(ShardKey(1, CHECKPOINT)))
    assert offer.poll_ready(29, time.monotonic() + SOON_S)
    cut: list[int] = []
    offer.attach(lambda: cut.append(1))  # somebody reads there, all the time
    lm_head_at = tensors["body"].nbytes + tensors["embed"].nbytes
    start, stop = lm_head_at, 30 << 16
    passed_on = b"".join(offer.slab.readable(start, stop))
    assert passed_on == tensors["lm_head"].numpy().tobytes()[: stop - start]
    let_go(trainer, 1)
    if equal:
        assert reading.result(SOON_S).losses == () and same(mine, tensors) and cut == []
        report = second.fetch().report
        assert report.losses == ()
        offer.detach(0)
    else:
        finishing = threads.submit(lambda: reading.exception(SOON_S))
        until(lambda: cut)  # it is taken back before the error is raised, once readers have left
        assert not reading.done() and cut == [1] and first.serving() == []
        offer.detach(0)
        error = finishing.result(SOON_S)
        assert isinstance(error, UsageError) and "'embed' and 'lm_head'" in str(error)
        fetched = second.fetch()
        assert list(fetched.report.sources) == ["trainer/0"] and same(fetched.tensors(), tensors)


def test_an_offer_that_moves_keeps_the_old_memory_for_those_who_read_it():
    key = ShardKey(1, CHECKPOINT)
    tensors = {"w": torch.ones(10)}
    old, new = Slab.adopt(tensors), Slab.adopt(tensors)
    offer = Offer(key, old.manifest(), old)
    before = offer.attach(lambda: None)
    gone = weakref.ref(old)
    offer.move(new)
    del old
    after = offer.attach(lambda: None)
    assert gone() is not None and offer.slab is new
    offer.detach(before)
    gc.collect()
    assert gone() is None and offer.active_readers == 1
    offer.detach(after)

    old = Slab.adopt(tensors)  # nobody reads: nothing is kept
    offer, gone = Offer(key, old.manifest(), old), weakref.ref(old)
    offer.move(new)
    del old
    assert gone() is None


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_reader_goes_on_while_what_it_reads_moves(client, threads, monkeypatch, transport):
    monkeypatch.setattr(Slab.manifest, "__defaults__", (1 << 16,))
    trainer = client("trainer", transports=(transport,), location=Location("far", "", "away"))
    first, second = (client(name, transports=(transport,)) for name in ("first", "second"))
    tensors = published(1 << 20, equal=True)
    trainer.publish(1, tensors)
    moved = threading.Event()
    complete = Destinations.complete

    def complete_while_it_is_read(self, version, layout):
        if self.worker == "first/0":
            assert moved.wait(SOON_S)
        complete(self, version, layout)

    monkeypatch.setattr(Destinations, "complete", complete_while_it_is_read)
    reading = threads.submit(first.replicate, tied_like(tensors), 1)
    offer = until(lambda: first.find(ShardKey(1, CHECKPOINT)))
    until(lambda: offer.poll_ready(32, 0.0) and all(offer._ready))
    hold_back(first, 1, 20)
    first.versions()  # answered after what it has announced: the hub knows of it, and that it is nearer
    following = threads.submit(second.fetch, 1)
    before = offer.slab
    until(lambda: offer.active_readers)
    moved.set()
    report = reading.result(SOON_S)
    assert report.losses == () and offer.slab is not before
    fetched = following.result(SOON_S)
    assert fetched.report.losses == () and list(fetched.report.sources) == ["first/0"]
    assert same(fetched.tensors(), tensors)


@pytest.mark.skipif(not _process.available(), reason="this system lets no process read another's memory")
def test_addresses_asked_for_just_before_a_move_are_not_given_out(client, monkeypatch):
    trainer, rollout = (client(name, transports=("shm",)) for name in ("trainer", "rollout"))
    live = {"w": raw(1 << 20, 1)}
    trainer.publish(1, live, copy=False)
    offer = trainer.find(ShardKey(1, CHECKPOINT))
    moved = {"w": live["w"].clone()}
    addresses = ShmSource.addresses
    calls: list[int] = []

    def move_meanwhile(self, asked):
        found = addresses(self, asked)
        calls.append(1)
        if len(calls) == 1:
            offer.move(Slab.adopt(moved))  # nobody is known to read
            live["w"].zero_()
        return found

    monkeypatch.setattr(ShmSource, "addresses", move_meanwhile)
    fetched = rollout.fetch()
    assert len(calls) == 2 and fetched.report.losses == () and same(fetched.tensors(), moved)


# --- strange shapes ---


def test_two_names_of_one_memory_may_differ_in_shape_type_and_order(client):
    bits = raw(6 * 8 * 2, 3)
    for version, (one, other) in enumerate(
        {
            "shape": (lambda t: t.view(6, 16), lambda t: t.view(96)),
            "type": (lambda t: t.view(torch.bfloat16).view(6, 8), lambda t: t.view(torch.int16).view(6, 8)),
            "order": (lambda t: t.view(torch.int16).view(6, 8), lambda t: t.view(torch.int16).view(6, 8).t()),
            "a scalar": (lambda t: t[:4].view(torch.float32)[0], lambda t: t[:4].view(torch.int32)[0]),
        }.values(),
        start=1,
    ):
        tensors, shared = {"embed": one(bits), "lm_head": other(bits.clone())}, torch.zeros_like(bits)
        mine = {"embed": one(shared), "lm_head": other(shared)}
        trainer, rollout = client(f"trainer-{version}"), client(f"rollout-{version}")
        trainer.publish(version, tensors, copy=False)
        rollout.replicate(mine, version)
        flat = shared[: tensors["embed"].nbytes]
        assert torch.equal(flat, bits[: len(flat)]) and flat.any()
        rollout.unpublish(version)
        different = {"embed": tensors["embed"], "lm_head": torch.zeros_like(tensors["lm_head"])}
        trainer.publish(version + 100, different, copy=False)
        with pytest.raises(UsageError, match=NAMES_BOTH):
            rollout.replicate(mine, version + 100)
        trainer.unpublish(version + 100)


def test_empty_tensors_are_never_the_same_memory(client):
    trainer, rollout = client("trainer"), client("rollout")
    empty = torch.empty(0, 7)
    trainer.publish(1, {"embed": empty, "lm_head": empty, "w": torch.ones(3)})
    mine = {"embed": torch.empty(0, 7), "w": torch.zeros(3)}
    mine["lm_head"] = mine["embed"]
    assert not LiveTensors(mine).tied
    rollout.replicate(mine)
    assert torch.equal(mine["w"], torch.ones(3))


@pytest.mark.parametrize("odd", range(4))
def test_of_many_names_the_one_that_differs_is_named(client, odd):
    trainer, rollout = client("trainer"), client("rollout")
    shared = torch.zeros(1000)
    tensors = {f"n{index}": torch.ones(1000) for index in range(4)}
    tensors[f"n{odd}"][500] = 2
    trainer.publish(1, tensors)
    with pytest.raises(UsageError, match=rf"'n0' and 'n{odd or 1}' are the same memory here"):
        rollout.replicate(dict.fromkeys(tensors, shared))
    tensors[f"n{odd}"][500] = 1
    trainer.publish(2, tensors)
    rollout.replicate(dict.fromkeys(tensors, shared))
    assert torch.equal(shared, torch.ones(1000))


def test_views_of_experts_are_not_tied_and_a_partial_overlap_is_refused_by_both_names(client):
    trainer, rollout = client("trainer"), client("rollout")
    stacked = torch.arange(4 * 100.0).view(4, 100)
    experts = {f"experts.{index}": stacked[index] for index in range(4)}
    trainer.publish(1, experts)
    mine = torch.zeros(4, 100)
    views = {f"experts.{index}": mine[index] for index in range(4)}
    rollout.replicate(views)
    assert torch.equal(mine, stacked) and not LiveTensors(views).tied
    rollout.unpublish(1)
    for overlapping in ({"experts.all": mine}, {"half": mine.view(-1)[50:150]}, {"tail": mine[3][1:]}):
        with pytest.raises(UsageError, match="'experts.*' overlap in part") as caught:
            rollout.replicate({**views, **overlapping})
        assert next(iter(overlapping)) in str(caught.value)


# --- what it costs ---


def test_scratch_holds_the_further_names_and_nothing_else(client):
    mine = tied_like(published(1 << 20, equal=True))
    assert [spec.name for spec in LiveTensors(mine)._scratch.specs] == ["lm_head"]
    untied = {"body": mine["body"], "embed": mine["embed"]}
    live = LiveTensors(untied)
    assert live._scratch is None and live.adopt() is live.whole


def test_the_scratch_is_let_go_when_it_was_compared(client, monkeypatch):
    made: list[weakref.ref[Slab]] = []
    allocate = Slab.allocate.__func__

    def watched(cls, specs, **options):
        slab = allocate(cls, specs, **options)
        made.append(weakref.ref(slab))
        return slab

    trainer, rollout = client("trainer"), client("rollout")
    for version, equal in ((1, True), (2, False)):
        tensors = published(1 << 20, equal=equal)
        trainer.publish(version, tensors)
        with monkeypatch.context() as patch:
            patch.setattr(Slab, "allocate", classmethod(watched))
            try:
                rollout.replicate(tied_like(tensors), version)
            except UsageError:
                assert not equal
        assert len(made) == version
        until(lambda: gc.collect() is not None and made[-1]() is None)  # the thread that read it ends soon


def through_host(slab: Slab) -> Slab:
    """It takes the way of device memory, on the CPU: through host buffers, committed at the end."""
    slab._copy_through_host(Device("cpu", Plain()))
    return slab


@pytest.mark.parametrize("equal", [True, False], ids=["equal", "different"])
def test_by_way_of_host_buffers_as_for_a_device(equal):
    tensors = published(10 << 20, equal=equal)
    mine = tied_like(tensors)
    live = LiveTensors(mine)
    through_host(live.whole)
    slab = through_host(live.adopt())
    for name, tensor in tensors.items():
        arrive(slab, name, tensor)
    assert b"".join(slab.readable(0, slab.size_bytes)) == b"".join(t.numpy().tobytes() for t in tensors.values())
    if equal:
        live.check(1)
        assert same(mine, tensors)
    else:
        with pytest.raises(UsageError, match=NAMES_BOTH):
            live.check(1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("equal", [True, False], ids=["equal", "different"])
def test_on_a_device(client, equal):
    trainer, rollout = client("trainer"), client("rollout")
    tensors = published(10 << 20, equal=equal)
    trainer.publish(1, tensors)
    mine = tied_like({name: tensor.cuda() for name, tensor in tensors.items()})
    if equal:
        rollout.replicate(mine)
        assert same({name: tensor.cpu() for name, tensor in mine.items()}, tensors)
    else:
        with pytest.raises(UsageError, match=NAMES_BOTH):
            rollout.replicate(mine)
