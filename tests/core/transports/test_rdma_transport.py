"""The rdma transport's own decisions, over fake verbs; over real ones it is tested by `make test-rdma`."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import rdma_fakes
import torch
from transport_suite import ConformanceError, SimpleShelf, TransportSuite
from transport_suite.material import read_equal

from recipes.bench.rdma import __main__ as bench
from tensorhub_plugins.core.client.arguments import usable
from tensorhub_plugins.core.deadline import TIMEOUT_S_MAX, Deadline
from tensorhub_plugins.core.digests import digest_of
from tensorhub_plugins.core.errors import SourceLost, UsageError
from tensorhub_plugins.core.memory.adoption import ADOPTIONS_MAX, forget_live_memory
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.memory.tensors import spec_of
from tensorhub_plugins.core.protocol.advertised import ANY_PORT, Advertised
from tensorhub_plugins.core.transports import (
    DEFAULT_LIMITS,
    DEFAULT_TRANSPORTS,
    LinkProgress,
    NotServable,
    Offer,
    TransportLimits,
    create,
    read_plan,
)
from tensorhub_plugins.core.transports.rdma import link as rdma_link
from tensorhub_plugins.core.transports.rdma import transport as rdma
from tensorhub_plugins.core.transports.rdma import verbs as _verbs
from tensorhub_plugins.core.transports.rdma.bindings import VerbsError
from tensorhub_plugins.core.transports.rdma.messages import RING_SLOTS, Taken
from tensorhub_plugins.core.transports.rdma.rails import Port
from tensorhub_plugins.core.transports.read_plan import ReadPlan
from tensorhub_plugins.core.types import ShardKey

KEY = ShardKey(1, "checkpoint")
SEGMENT = 1000
SIZE = 40 * SEGMENT + 1


def port(name: str = "fake0", link_layer: str = "Ethernet") -> Port:
    return msgspec.structs.replace(rdma_fakes.PORT, device=name, link_layer=link_layer)


class Fakes:
    """What the next transports find. One port by default."""

    def __init__(self) -> None:
        self.ports = [port()]
        self.limit: int | None = None


@pytest.fixture(autouse=True)
def fakes() -> Iterator[Fakes]:
    found = Fakes()
    with rdma_fakes.installed(lambda: found.ports, lambda port: rdma_fakes.Nic(port, found.limit)):
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("case", TransportSuite.CASES)
def test_conformance(case: str) -> None:
    with TransportSuite(rdma.RdmaTransport, processes=False, held=rdma_fakes.held) as suite:
        if reason := suite.skip_reason(case):
            pytest.skip(reason)
        suite.run(case)


def test_a_link_that_does_not_hear_that_its_source_waits_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was once: the reader took a source that waits for bytes itself for slow, and then for dead."""
    monkeypatch.setattr(LinkProgress, "waiting", lambda self: None)
    with (
        TransportSuite(rdma.RdmaTransport, processes=False, patience_s=2.0) as suite,
        pytest.raises(ConformanceError, match="a source that waits did not say so"),
    ):
        suite.run("waiting_source_says_so")


def far() -> float:
    return time.monotonic() + 20


def content() -> torch.Tensor:
    return (torch.arange(SIZE) * 7919 % 251).to(torch.uint8)


@contextlib.contextmanager
def serving(**options: Any) -> Iterator[tuple[rdma.RdmaTransport, Offer, str]]:
    slab = Slab.allocate([spec_of("a", content())])
    slab.write("a", content())
    offer = Offer(KEY, slab.manifest(SEGMENT), slab)
    offer.mark_all_ready()
    with contextlib.closing(rdma.RdmaTransport(**options)) as source:
        yield source, offer, source.serve(SimpleShelf(offer))
        offer.withdraw()


def read(reader: rdma.RdmaTransport, endpoint: str, deadline: float | None = None) -> rdma_link.RdmaLink:
    """Everything, checked; the link is returned, not closed."""
    link = reader.connect(endpoint, deadline=far())
    manifest = link.open(KEY, 1, deadline=far())
    target, until = {"a": torch.zeros(SIZE, dtype=torch.uint8)}, far() if deadline is None else deadline
    got = list(read_equal(link, range(manifest.segment_count), Slab.adopt(target), deadline=until))
    assert sorted(got) == list(range(manifest.segment_count))
    assert torch.equal(target["a"], content())
    assert link.check(deadline=far())
    return link


def test_a_link_that_ended_well_leaves_its_queue_pairs_to_the_next() -> None:
    with serving() as (source, _, endpoint), contextlib.closing(rdma.RdmaTransport()) as reader:
        seen = set()
        for _ in range(3):
            link = read(reader, endpoint)
            seen.add(link._connection)
            for _ in range(2):
                link.close()
        assert len(seen) == 1
        assert len(source.nics[0].registered) == 1, "the slab was registered again"


def test_a_link_that_did_not_end_well_leaves_nothing() -> None:
    with serving() as (_, _, endpoint), contextlib.closing(rdma.RdmaTransport()) as reader:
        link = reader.connect(endpoint, deadline=far())
        manifest = link.open(KEY, 1, deadline=far())
        target = Slab.adopt({"a": torch.zeros(SIZE, dtype=torch.uint8)})
        next(iter(read_equal(link, range(manifest.segment_count), target, deadline=far())))
        link.close()  # in the middle
        second = read(reader, endpoint)
        assert second._connection is not link._connection


def test_a_kept_connection_whose_source_has_gone_is_not_used() -> None:
    with contextlib.closing(rdma.RdmaTransport()) as reader:
        with serving() as (_, _, endpoint):
            read(reader, endpoint).close()
        with pytest.raises(SourceLost, match="cannot connect"):
            reader.connect(endpoint, deadline=far())


def test_the_source_closes_the_oldest_of_too_many_idle_connections() -> None:
    with serving(limits=TransportLimits(idle_at_source_max=2)) as (_, _, endpoint), contextlib.ExitStack() as stack:
        links = []
        for _ in range(3):
            reader = stack.enter_context(contextlib.closing(rdma.RdmaTransport()))
            links.append(read(reader, endpoint))
            links[-1].close()
        channels = [link._connection.channel for link in links]
        deadline = far()
        while not channels[0].is_cut():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert [channel.is_cut() for channel in channels] == [True, False, False]


def test_the_thread_that_polls_digests_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads go on while one segment is digested: the window is what is kept from the source, not one segment."""
    digested: set[str] = set()
    held, landed = threading.Event(), threading.Semaphore(0)

    def slow(views: Any, algorithm: str) -> bytes:
        digested.add(threading.current_thread().name)
        assert held.wait(20)
        return digest_of(views, algorithm)

    land = rdma_link._RdmaStream._land

    def counted(self: rdma_link._RdmaStream, segment: int) -> None:
        land(self, segment)
        landed.release()

    with serving() as (_, _, endpoint), contextlib.closing(rdma.RdmaTransport()) as reader:
        monkeypatch.setattr(read_plan, "digest_of", slow)
        monkeypatch.setattr(rdma_link._RdmaStream, "_land", counted)
        with ThreadPoolExecutor(1) as thread:
            reading = thread.submit(read, reader, endpoint)
            for _ in range(rdma_link.WINDOW):
                assert landed.acquire(timeout=20), "reading waited for a digest"
            held.set()
            reading.result(20).close()
    assert digested and all(name.startswith("tensorhub-rdma-finish") for name in digested)


def test_a_read_may_have_as_long_as_any_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose deadline grows has a year. While a segment was digested it waited for that long, and failed:
    poll(2) takes no more than 24 days."""

    def slow(views: Any, algorithm: str) -> bytes:
        time.sleep(0.02)  # it is waited for
        return digest_of(views, algorithm)

    monkeypatch.setattr(read_plan, "digest_of", slow)
    with serving() as (_, _, endpoint), contextlib.closing(rdma.RdmaTransport()) as reader:
        read(reader, endpoint, Deadline.after(TIMEOUT_S_MAX)).close()


def test_a_digest_that_fails_ends_the_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(views: Any, algorithm: str) -> bytes:
        raise MemoryError("no room to digest")

    monkeypatch.setattr(read_plan, "digest_of", fails)
    with (
        serving() as (_, _, endpoint),
        contextlib.closing(rdma.RdmaTransport()) as reader,
        pytest.raises(MemoryError, match="no room to digest"),
    ):
        read(reader, endpoint)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tensorhub-rdma-finish")]


def test_several_rails_share_the_segments(fakes: Fakes) -> None:
    fakes.ports = [port("fake0"), port("fake1"), port("fake2")]
    with serving() as (source, _, endpoint), contextlib.closing(rdma.RdmaTransport()) as reader:
        link = read(reader, endpoint)
        assert [(rail.nic, rail.port) for rail in link._connection.rails] == [(0, 0), (1, 1), (2, 2)]
        assert all(nic.registered for nic in (*source.nics, *reader.nics))


def test_a_rail_that_does_not_carry_is_left_out(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.ports = [port("fake0"), port("fake1")]
    poll = rdma_fakes.ReadQueuePair.poll

    def broken(self: rdma_fakes.ReadQueuePair) -> list[int]:
        if self.nic.port.device == "fake0":
            raise _verbs.ReadFailed("RETRY_EXC_ERR")
        return poll(self)

    monkeypatch.setattr(rdma_fakes.ReadQueuePair, "poll", broken)
    with serving() as (_, _, endpoint), contextlib.closing(rdma.RdmaTransport()) as reader:
        assert [rail.nic for rail in read(reader, endpoint)._connection.rails] == [1]


def test_a_source_that_no_rail_reaches_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: rdma_fakes.ReadQueuePair) -> list[int]:
        raise _verbs.ReadFailed("RETRY_EXC_ERR")

    with serving() as (_, _, endpoint), contextlib.ExitStack() as stack:
        remembers = stack.enter_context(contextlib.closing(rdma.RdmaTransport()))
        forgets = stack.enter_context(contextlib.closing(rdma.RdmaTransport(limits=TransportLimits(unreachable_s=0.0))))
        with monkeypatch.context() as patch:
            patch.setattr(rdma_fakes.ReadQueuePair, "poll", broken)
            for reader in (remembers, forgets):
                with pytest.raises(NotServable, match="RETRY_EXC_ERR"):
                    reader.connect(endpoint, deadline=far()).open(KEY, 1, deadline=far())
        with pytest.raises(SourceLost, match="a moment ago"):
            remembers.connect(endpoint, deadline=far())
        read(forgets, endpoint)


def test_ports_of_different_kinds_do_not_face_each_other(fakes: Fakes) -> None:
    with serving() as (_, _, endpoint):
        fakes.ports = [port(link_layer="InfiniBand")]
        with contextlib.closing(rdma.RdmaTransport()) as reader, pytest.raises(NotServable, match="faces one of ours"):
            reader.connect(endpoint, deadline=far()).open(KEY, 1, deadline=far())


@pytest.mark.parametrize("devices", [1, 2])
def test_a_source_that_cannot_register_its_memory_sends_it_through_a_ring(fakes: Fakes, devices: int) -> None:
    fakes.ports = [port(f"fake{number}") for number in range(devices)]
    fakes.limit = SIZE // 2
    with serving() as (source, _, endpoint):
        fakes.limit = None
        with contextlib.closing(rdma.RdmaTransport()) as reader:
            for _ in range(3):
                read(reader, endpoint).close()
            assert read(reader, endpoint)._ring is not None
        ring = RING_SLOTS * SEGMENT
        assert [size for _, size in source.nics[0].registered] == [max(4096, ring)], "made once, and only that"


def test_the_slots_of_a_ring_are_filled_again_only_when_they_were_taken(fakes: Fakes) -> None:
    """A reader that never says so: the source stops after as many segments, and the bytes there stay what they were."""
    fakes.limit = SIZE // 2
    with serving() as (source, _, endpoint):
        fakes.limit = None
        with contextlib.closing(rdma.RdmaTransport()) as reader:
            link = reader.connect(endpoint, deadline=far())
            manifest = link.open(KEY, 1, deadline=far())
            channel = link._connection.channel
            with Slab.allocate(manifest.tensors) as target:
                plan = ReadPlan(manifest, target, [])
            stream = rdma_link._RdmaStream(link, manifest, plan, far())
            stream.request(range(SIZE // SEGMENT))
            slots = []
            for segment in range(RING_SLOTS):
                stream.announced(deque([segment]))
                slots.append(stream._slots[segment])
            assert slots == list(range(RING_SLOTS))
            (ring,) = source._server._backend._rings.values()
            assert ring.is_full and not channel.has_input()
            want = [content()[slot * SEGMENT : (slot + 1) * SEGMENT].numpy().tobytes() for slot in slots]
            assert bytes(ring._memory.view[: RING_SLOTS * SEGMENT]) == b"".join(want)
            channel.send_message(Taken(2), far())
            stream.announced(deque([RING_SLOTS]))
            assert stream._slots[RING_SLOTS] == 2
            stream.close()
            link.close()


def test_a_source_that_can_register_nothing_says_so(fakes: Fakes) -> None:
    fakes.limit = RING_SLOTS * SEGMENT - 1
    with serving() as (_, _, endpoint):
        fakes.limit = None
        with contextlib.closing(rdma.RdmaTransport()) as reader, pytest.raises(NotServable, match="ulimit -l"):
            reader.connect(endpoint, deadline=far()).open(KEY, 1, deadline=far())


@pytest.mark.parametrize("segments", [1, 3])
def test_a_target_that_cannot_be_registered_is_read_through_what_can(fakes: Fakes, segments: int) -> None:
    with serving() as (_, _, endpoint):
        fakes.limit = 4096 * (segments + 1)  # the probe takes one page as well
        with contextlib.closing(rdma.RdmaTransport()) as reader:
            read(reader, endpoint)


def test_one_link_reads_offers_of_small_segments_and_then_of_big_ones_through_staging_memory(fakes: Fakes) -> None:
    slab = Slab.allocate([spec_of("a", content())])
    slab.write("a", content())
    offers = [Offer(ShardKey(v, "checkpoint"), slab.manifest(size), slab) for v, size in ((1, 1000), (2, 20_000))]
    for offer in offers:
        offer.mark_all_ready()
    with contextlib.closing(rdma.RdmaTransport()) as source:
        endpoint = source.serve(SimpleShelf(*offers))
        fakes.limit = SIZE - 1
        with contextlib.closing(rdma.RdmaTransport()) as reader:
            link = reader.connect(endpoint, deadline=far())
            for offer in offers:
                manifest = link.open(offer.key, 1, deadline=far())
                target = {"a": torch.zeros(SIZE, dtype=torch.uint8)}
                list(read_equal(link, range(manifest.segment_count), Slab.adopt(target), deadline=far()))
                assert torch.equal(target["a"], content())
                reader.nics[0].left = 40_000  # what was registered for the first is free again
            link.close()


def test_a_reader_that_can_register_nothing_leaves_it_to_others(fakes: Fakes) -> None:
    with serving() as (_, _, endpoint):
        fakes.limit = 4096  # enough for the probe
        with contextlib.closing(rdma.RdmaTransport()) as reader:
            with pytest.raises(SourceLost, match="ulimit -l"):
                read(reader, endpoint)
            with pytest.raises(SourceLost, match="a moment ago"):
                reader.connect(endpoint, deadline=far())


def test_live_tensors_stay_registered_while_they_are_the_same() -> None:
    """`replicate` adopts a model's parameters anew for every version. One that goes takes the registration along."""
    tensors = {"a": torch.zeros(SIZE, dtype=torch.uint8), "none": torch.empty(0)}
    with contextlib.closing(rdma.RdmaTransport()) as reader:
        memory = reader.memory

        def keys() -> list[int]:
            (region,) = memory.of(Slab.adopt(tensors)).offer()
            return list(region.keys)

        first = keys()
        assert keys() == first and len(reader.nics[0].registered) == 1
        tensors["a"].data = torch.ones(SIZE, dtype=torch.uint8)
        second = keys()
        assert second != first, "the same tensor, other memory"
        assert len(memory._known) == 1
        forget_live_memory()  # as before an engine's sleep, after which the addresses are the same (A13)
        assert not memory._known and keys() != second
        tensors["a"] = torch.zeros(SIZE, dtype=torch.uint8)
        assert not memory._known, "kept after its tensor had gone"
        assert keys() not in (first, second)
        for _ in range(ADOPTIONS_MAX + 1):
            tensors = {"a": torch.zeros(SIZE, dtype=torch.uint8)}
            kept = [tensors]
            memory.of(Slab.adopt(tensors))
        assert kept and len(memory._known) <= ADOPTIONS_MAX


def test_bytes_go_nowhere_once_the_offer_is_withdrawn() -> None:
    """The queue pairs of the source are gone before `withdraw` returns, whatever the reader still wants."""
    with serving() as (source, offer, endpoint), contextlib.closing(rdma.RdmaTransport()) as reader:
        link = reader.connect(endpoint, deadline=far())
        link.open(KEY, 1, deadline=far())
        (pairs,) = source._server._backend._pairs.values()
        assert pairs[0].endpoint.queue_pair in rdma_fakes._pairs
        offer.withdraw()
        assert pairs[0].endpoint.queue_pair not in rdma_fakes._pairs


def test_configuration_by_the_environment(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.ports = [port("fake0"), port("fake1")]
    monkeypatch.setenv("TENSORHUB_RDMA_DEVICES", "fake1, fake0:1")
    with contextlib.closing(rdma.RdmaTransport()) as transport:
        assert [nic.port.device for nic in transport.nics] == ["fake1", "fake0"]
    with contextlib.closing(rdma.RdmaTransport(devices=["fake0"])) as transport:
        assert [nic.port.device for nic in transport.nics] == ["fake0"]
    monkeypatch.setenv("TENSORHUB_RDMA_DEVICES", "fake7")
    with pytest.raises(UsageError, match="fake7.*fake0:1"):
        rdma.RdmaTransport()
    monkeypatch.setenv("TENSORHUB_RDMA_GID_INDEX", "three")
    with pytest.raises(UsageError, match="three"):
        rdma.RdmaTransport()


@pytest.mark.parametrize("endpoint", ["tcp://h:1", "rdma://h", "rdma://:1", "rdma://h:x", ""])
def test_what_is_no_endpoint(endpoint: str) -> None:
    with contextlib.closing(rdma.RdmaTransport()) as reader, pytest.raises(UsageError, match="no endpoint of rdma"):
        reader.connect(endpoint, deadline=far())


def test_the_benchmark_reads_and_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as (_, _, endpoint):
        monkeypatch.setattr(bench, "perftest_gb_per_s", lambda host, arguments: 2.0)
        report = bench.be_reader(endpoint, 2, None)
        assert report["size_bytes"] == SIZE and len(report["later_s"]) == 2
        assert report["ratio"] == pytest.approx(report["gb_per_s"] / 2)
        monkeypatch.setattr(bench, "perftest_gb_per_s", lambda host, arguments: None)
        assert "unknown" in bench.as_text(bench.be_reader(endpoint, 1, None))


def test_what_ib_read_bw_prints() -> None:
    printed = """
---------------------------------------------------------------------------------------
                    RDMA_Read BW Test
 #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
 1048576    1000             197.32             196.40             0.023413
---------------------------------------------------------------------------------------
"""
    assert bench.parse_perftest(printed) == pytest.approx(24.55)
    assert bench.parse_perftest("Couldn't connect to 10.0.0.1:18515") is None


def test_a_card_that_cannot_be_opened_is_not_counted_on(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that shows a card in sysfs, and has no /dev/infiniband: the client goes over tcp, and runs."""

    class Closed:
        def __init__(self, port: Port) -> None:
            raise VerbsError(f"cannot open {port.device}: Permission denied")

    monkeypatch.setattr(rdma, "why_not", lambda: None)
    monkeypatch.setattr(rdma, "Nic", Closed)
    assert rdma.RdmaTransport.available() == "cannot open fake0: Permission denied"
    monkeypatch.setattr(rdma, "Nic", rdma_fakes.Nic)
    assert rdma.RdmaTransport.available() is None


@pytest.mark.parametrize(
    ("has_card", "names", "level"),
    [
        (True, DEFAULT_TRANSPORTS, logging.WARNING),
        (False, DEFAULT_TRANSPORTS, logging.INFO),
        (False, ("rdma", "tcp"), logging.WARNING),
    ],
)
def test_who_has_a_card_hears_that_it_is_not_used(
    has_card: bool,
    names: tuple[str, ...],
    level: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(rdma, "why_not", lambda: "libibverbs.so.1 cannot be loaded")
    monkeypatch.setattr(rdma, "has_link", lambda: has_card)
    with caplog.at_level(logging.INFO):
        for transport in usable(names, Advertised("127.0.0.1", ANY_PORT), DEFAULT_LIMITS, None).values():
            transport.close()
    (record,) = [record for record in caplog.records if "no rdma here" in record.getMessage()]
    assert record.levelno == level and "libibverbs.so.1" in record.getMessage()


def test_where_there_is_no_device_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdma, "why_not", lambda: "there is no RDMA device")
    with pytest.raises(UsageError, match="'rdma' cannot be used here: there is no RDMA device"):
        create("rdma")
