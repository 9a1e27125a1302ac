"""The cases that need verbs. Each takes the crew, and fails by an exception."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from calls import (
    FAR_S,
    KEY,
    PATIENCE_S,
    SEGMENT_SIZE_BYTES,
    SIZE_BYTES,
    count_packets,
    count_tcp_bytes,
    far,
    hold_back,
    interface_of,
    join,
    join_with,
    kept,
    make_blank,
    make_client,
    pair_of_transports,
    publish,
    read_it,
    readers_of,
    replaced,
    replicate,
    replicate_fails,
    retain_nothing,
    serve_all,
    serve_alone,
    tensor_of,
    unpublish,
    unread,
    until,
)
from crew import Crew, Member
from transport_suite import SimpleShelf, TransportSuite
from transport_suite.material import read_equal

from tensorhub_plugins.core import Client, start_server
from tensorhub_plugins.core.device.devices import Device
from tensorhub_plugins.core.device.drivers import Cuda, Plain
from tensorhub_plugins.core.errors import SourceLost
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.transports import NotServable
from tensorhub_plugins.core.transports import create as create_transport
from tensorhub_plugins.core.transports.rdma.bindings import VerbsError
from tensorhub_plugins.core.transports.rdma.rails import find_ports
from tensorhub_plugins.core.transports.rdma.transport import RdmaTransport
from tensorhub_plugins.core.transports.rdma.verbs import Nic, open_nics
from tensorhub_plugins.core.transports.stream.messages import HEADER
from tensorhub_plugins.core.types import ShardKey

MEMBERS = 30  # the cases take 26
PEERS = 6
OTHER_HOST = "10.79.0.2"
OTHER_HUB = f"tcp://{OTHER_HOST}:7070"
RDMA = ("rdma", "tcp")
SMOKE = (  # what `make test` runs: a read, a kill, a cut, closed memory, the other binding on a real link
    "ctypes/two_readers_one_sided",
    "ctypes/source_killed_in_mid_read",
    "ctypes/unpublish_cuts_off",
    "ctypes/wrong_keys_and_closed_memory",
    "pyverbs/two_hosts",
)


def all_cases() -> dict[str, Callable[[Crew], None]]:
    suite = {f"transport:{name}": functools.partial(_conformance, name) for name in TransportSuite.CASES}
    own = [
        two_readers_one_sided,
        source_is_stopped_while_it_is_read,
        source_killed_in_mid_read,
        source_frozen_in_mid_read,
        unpublish_cuts_off,
        wrong_keys_and_closed_memory,
        queue_pair_in_error,
        source_may_not_lock_memory,
        reader_may_not_lock_memory,
        not_reached,
        connections_and_registrations_are_kept,
        memory_of_a_device_that_verbs_refuses,
        two_rails,
        two_hosts,
    ]
    return {**{case.__name__: case for case in own}, **suite}


# --- the transport by itself ---


def _conformance(case: str, crew: Crew) -> None:
    with TransportSuite(RdmaTransport, patience_s=PATIENCE_S, make_peer=crew.take_peer) as suite:
        reason = suite.skip_reason(case)
        assert reason is None, reason  # nothing is skipped for this one
        suite.run(case)


def heard_of(link: Any) -> list[int]:
    """What the link hears of ready segments from now on, one entry each."""
    heard, announced = [], getattr(link, "_announced", None)

    def noted(*arguments: Any) -> int | None:
        length = announced(*arguments)
        heard.extend([] if length is None else [length])
        return length

    if announced is not None:
        link._announced = noted
    return heard


def source_is_stopped_while_it_is_read(crew: Crew) -> None:
    """One-sided: a source whose process does not run at all is read to the end. Over tcp it is not."""
    for name, one_sided in (("rdma", True), ("tcp", False)):
        source = crew.take()
        endpoint, manifest_size = source.ask(serve_alone, name)
        with contextlib.closing(create_transport(name)) as transport:
            link = transport.connect(endpoint, deadline=far())
            manifest = link.open(KEY, 1, deadline=far())
            assert manifest.size_bytes == manifest_size
            target = {"a": torch.zeros(SIZE_BYTES, dtype=torch.uint8)}
            reading = read_equal(
                link,
                range(manifest.segment_count),
                Slab.adopt(target),
                deadline=far() if one_sided else time.monotonic() + 20,
            )
            heard = heard_of(link)
            got = [next(reading)]
            if one_sided:  # "ready" is said by the source itself, for all segments at once
                told = HEADER.size * manifest.segment_count
                until(
                    lambda link=link, told=told, heard=heard: unread(link) + HEADER.size * len(heard) >= told,
                    "the source has said that all is ready",
                )
            source.freeze()
            try:
                got += reading
                finished = True
            except SourceLost:
                finished = False
            finally:
                source.thaw()
            assert finished == one_sided, f"{name}: {len(got)} of {manifest.segment_count} segments were read"
            if one_sided:
                assert sorted(got) == list(range(manifest.segment_count))
                assert torch.equal(target["a"], tensor_of(1))
                assert link.check(deadline=far())
            print(f"      {name}: {len(got)} of {manifest.segment_count} segments of a stopped source", flush=True)
            link.close()
        source.kill()


def wrong_keys_and_closed_memory(crew: Crew) -> None:
    """A wrong key, a range past the end, memory closed before and during a read: SourceLost, and a new link works."""
    with pair_of_transports() as (source, offer, reader):
        endpoint = source.serve(SimpleShelf(offer))

        def lost(spoil: Callable[[Any], None]) -> str:
            link = reader.connect(endpoint, deadline=far())
            manifest = link.open(KEY, 1, deadline=far())
            spoil(link)
            began = time.monotonic()
            try:
                list(read_equal(link, range(manifest.segment_count), Slab.adopt(make_blank()), deadline=far()))
            except SourceLost as error:
                assert time.monotonic() - began < FAR_S / 2
                return str(error)
            finally:
                link.close()
            raise AssertionError("SourceLost was due")

        def wrong_key(link: Any) -> None:
            regions = link._remote._regions
            link._remote._regions = [replaced(r, keys=tuple(key ^ 0x5500 for key in r.keys)) for r in regions]

        def past_the_end(link: Any) -> None:
            regions = link._remote._regions
            link._remote._regions = [replaced(r, address=r.address + SIZE_BYTES) for r in regions]

        def close_memory(link: Any) -> None:
            source.memory.of(offer.slab).close()

        for what, spoil in (("a wrong key", wrong_key), ("past the end", past_the_end), ("closed", close_memory)):
            text = lost(spoil)
            assert "REM_ACCESS_ERR" in text, text
            print(f"      {what}: {text}", flush=True)
            read_it(reader, endpoint)

        link = reader.connect(endpoint, deadline=far())
        manifest = link.open(KEY, 1, deadline=far())
        target = Slab.adopt(make_blank())
        reading = read_equal(link, range(manifest.segment_count), target, deadline=far())
        got = [next(reading)]
        close_memory(link)
        try:
            got += reading
            raise AssertionError("SourceLost was due")
        except SourceLost as error:
            assert "REM_ACCESS_ERR" in str(error) or "RETRY_EXC_ERR" in str(error), error
            print(f"      closed in mid-read, after {len(got)} segments: {error}", flush=True)
        assert all(link.digest(segment) == manifest.digest(segment) for segment in got)
        read_it(reader, endpoint)


def queue_pair_in_error(crew: Crew) -> None:
    """The source's queue pair goes to error and its connection stays: retries run out, within seconds."""
    with pair_of_transports() as (source, offer, reader):
        endpoint = source.serve(SimpleShelf(offer))
        link = reader.connect(endpoint, deadline=far())
        manifest = link.open(KEY, 1, deadline=far())
        for pairs in source._server._backend._pairs.values():
            for queue_pair in pairs:
                queue_pair.abort()
        began = time.monotonic()
        try:
            list(read_equal(link, range(manifest.segment_count), Slab.adopt(make_blank()), deadline=far()))
            raise AssertionError("SourceLost was due")
        except SourceLost as error:
            assert "RETRY_EXC_ERR" in str(error), error
            print(f"      after {time.monotonic() - began:.1f} s: {error}", flush=True)
        read_it(reader, endpoint)


def connections_and_registrations_are_kept(crew: Crew) -> None:
    """A second link to a source has the first one's queue pairs; a slab is registered once, and read often."""
    registered = []
    register = Nic.register

    def counted(nic: Nic, address: int, size_bytes: int, owner: Any = None) -> Any:
        if size_bytes > SIZE_BYTES // 2:
            registered.append((nic, address))
        return register(nic, address, size_bytes, owner)

    Nic.register = counted  # type: ignore[method-assign]
    try:
        with pair_of_transports() as (source, offer, reader):
            endpoint = source.serve(SimpleShelf(offer))
            target = Slab.adopt(make_blank())
            connections = set()
            for _ in range(3):
                link = reader.connect(endpoint, deadline=far())
                connections.add((link._connection, link._connection.rails[0] if link._connection.rails else None))
                manifest = link.open(KEY, 1, deadline=far())
                list(read_equal(link, range(manifest.segment_count), target, deadline=far()))
                assert link.check(deadline=far())
                link.close()
            assert len({connection for connection, _ in connections}) == 1, connections
            assert sum(map(len, source._server._backend._pairs.values())) == 1
            assert len(registered) == 2, f"{registered} for one source slab and one target slab"
    finally:
        Nic.register = register  # type: ignore[method-assign]


def memory_of_a_device_that_verbs_refuses(crew: Crew) -> None:
    """No CUDA here, and soft-RoCE takes no dma-buf: both are asked, each in its real way, and their answers told."""
    nowhere = 1 << 46  # an address of no memory of ours, as a device's is
    nic = open_nics(find_ports()[0])[0]

    class NoDmaBuf(Plain):
        def export_dma_buf(self, start: int, size_bytes: int) -> int:
            return os.memfd_create("no dma-buf")

    try:
        for driver, reasons in (
            (Cuda(torch.device("cuda", 0)), ("CUDA",)),
            (NoDmaBuf(), ("ibv_reg_dmabuf_mr", "dma-buf MR")),
        ):
            try:
                nic.register(nowhere, 4096, Device("cuda:0", driver))
            except VerbsError as error:
                print(f"      {error}", flush=True)
                assert any(reason in str(error).rpartition("as a dma-buf")[2] for reason in reasons), error
                assert "ibv_reg_mr" in str(error) or "Failed to register a MR" in str(error), error
            else:
                raise AssertionError("memory of nobody was registered")
    finally:
        nic.close()


def two_rails(crew: Crew) -> None:
    """Two cards side by side: both carry a fair share, and the bytes are right."""
    cards = ("rxe0", "rxe1")
    with pair_of_transports(devices=cards) as (source, offer, reader):
        endpoint = source.serve(SimpleShelf(offer))
        before = [count_packets(card) for card in cards]
        read_it(reader, endpoint)
        moved = [count_packets(card) - old for card, old in zip(cards, before, strict=True)]
        print(f"      packets: {dict(zip(cards, moved, strict=True))}", flush=True)
        assert min(moved) > sum(moved) / 4, moved


# --- hub and clients ---


def two_readers_one_sided(crew: Crew) -> None:
    """One publisher, two readers, three processes: by RDMA the source's CPU and TCP move next to nothing."""
    measured = {}
    for transports in (RDMA, ("tcp",)):
        with start_server() as hub:
            publisher, *readers = crew.take(), crew.take(), crew.take()
            publisher.ask(publish, hub.address, "trainer", 1, transports)
            for index, reader in enumerate(readers):
                reader.ask(join, hub.address, f"rollout-{index}", transports)
            before = publisher.cpu_s(), count_tcp_bytes(), count_packets("rxe0")
            for reader in readers:
                reader.start(replicate, 1, False)
            reports = [reader.result() for reader in readers]
            after = publisher.cpu_s(), count_tcp_bytes(), count_packets("rxe0")
            cpu_s, tcp_bytes, packets = (b - a for a, b in zip(before, after, strict=True))
            measured[transports[0]] = cpu_s, tcp_bytes, packets
            print(
                f"      {transports[0]}: 2 x {SIZE_BYTES >> 20} MiB, the source's CPU {cpu_s:.2f} s, TCP {tcp_bytes} "
                f"bytes, RDMA {packets} packets; {[report['transports'] for report in reports]}",
                flush=True,
            )
            for report in reports:
                assert report["transports"] == {transports[0]: SIZE_BYTES}, report
                assert report["sources"] == {"trainer/0": SIZE_BYTES}, report
            for member in (publisher, *readers):
                member.kill()
    _, tcp_bytes, packets = measured["rdma"]
    assert tcp_bytes < SIZE_BYTES / 16, "weights went over TCP"
    assert packets * 4096 >= 2 * SIZE_BYTES, "weights did not go over RDMA"
    _, tcp_bytes, packets = measured["tcp"]
    assert tcp_bytes >= 2 * SIZE_BYTES and packets * 4096 < SIZE_BYTES / 16, "the counters do not count"
    # The source's CPU seconds are shown, not judged: soft-RoCE's interrupt work is charged to whoever is running.


def source_killed_in_mid_read(crew: Crew) -> None:
    _goes_on_elsewhere(crew, Member.kill)


def source_frozen_in_mid_read(crew: Crew) -> None:
    _goes_on_elsewhere(crew, Member.freeze)


def _goes_on_elsewhere(crew: Crew, lose: Callable[[Member], None]) -> None:
    """Two holders serve half; the one that is read from is lost; the rest comes from the other, nothing twice."""
    with start_server() as hub:
        holders = {"trainer/0": crew.take(), "rollout-0/0": crew.take()}
        reader = crew.take()
        holders["trainer/0"].ask(publish, hub.address, "trainer", 1, RDMA)
        holders["rollout-0/0"].ask(join, hub.address, "rollout-0", RDMA)
        holders["rollout-0/0"].ask(replicate, 1, True)
        for holder in holders.values():
            holder.ask(hold_back, 1, SIZE_BYTES // SEGMENT_SIZE_BYTES // 2)
        reader.ask(join_with, hub.address, "rollout-1", RDMA, {"sources_max": 1})  # a busy guest's is slow: no second
        read_from: list[str] = []

        def attached() -> bool:
            read_from[:] = [name for name, holder in holders.items() if holder.ask(readers_of, 1)]
            return bool(read_from)

        packets = count_packets("rxe0")
        reader.start(replicate, 1, False)
        half = SIZE_BYTES // 2
        until(lambda: (count_packets("rxe0") - packets) * 4096 >= half and attached(), "half of it was read")
        (lost,) = read_from
        (other,) = set(holders) - {lost}
        began = time.monotonic()
        lose(holders[lost])
        until(lambda: holders[other].ask(readers_of, 1), "the other source is read from")
        print(f"      {time.monotonic() - began:.1f} s until the other source was read from", flush=True)
        holders[other].ask(serve_all, 1)
        report = reader.result()
        print(f"      {report['sources']}, {report['losses']}", flush=True)
        assert report["transports"] == {"rdma": SIZE_BYTES}, report
        assert report["sources"] == {lost: half, other: half}, report
        assert any(lost.split("/")[0] in loss for loss in report["losses"]), report["losses"]
        for member in (*holders.values(), reader):
            with contextlib.suppress(ProcessLookupError, AssertionError):
                member.kill()


def unpublish_cuts_off(crew: Crew) -> None:
    """A reader that waits for more is cut off at unpublish's deadline, and ends in a typed error."""
    with start_server() as hub:
        publisher, reader = crew.take(), crew.take()
        publisher.ask(publish, hub.address, "trainer", 1, RDMA)
        publisher.ask(retain_nothing)
        publisher.ask(hold_back, 1, 2)
        # The source's word that it waits itself may come late in a busy guest: the reader must not leave by itself.
        reader.ask(join_with, hub.address, "rollout-0", RDMA, {"stall_s": int(PATIENCE_S)})
        reader.start(replicate_fails, 1)
        until(lambda: publisher.ask(readers_of, 1), "the source is read from")
        seconds, cut_off = publisher.ask(unpublish, 1, 1.0)
        name, message, _ = reader.result()
        print(
            f"      unpublish took {seconds:.1f} s, cut off {cut_off}; {name}: {message}",
            flush=True,
        )
        assert seconds < 20 and "rollout-0/0" in cut_off, (seconds, cut_off)
        assert name in ("VersionGone", "NotPublished", "DeadlineExceeded"), (name, message)
        for member in (publisher, reader):
            member.kill()


def source_may_not_lock_memory(crew: Crew) -> None:
    """The limit of locked memory is low at the source: all passes through a ring, and through it only. Where it is too
    low for that: NotServable that says so, and the client goes over tcp."""
    source, reader = crew.take(), crew.take()
    endpoint, _ = source.ask(serve_alone, "rdma", SIZE_BYTES // 2)
    with contextlib.closing(create_transport("rdma")) as transport:
        link = transport.connect(endpoint, deadline=far())
        segments = range(link.open(KEY, 1, deadline=far()).segment_count)
        assert link._ring is not None and link._ring.size_bytes < SIZE_BYTES // 2
        blank = make_blank()
        assert set(read_equal(link, segments, Slab.adopt(blank), deadline=far())) == set(segments)
        assert torch.equal(blank["a"], tensor_of(1))
        assert link.check(deadline=far())
        link.close()
    source.kill()
    source = crew.take()
    endpoint, _ = source.ask(serve_alone, "rdma", SEGMENT_SIZE_BYTES)
    with contextlib.closing(create_transport("rdma")) as transport:
        link = transport.connect(endpoint, deadline=far())
        try:
            link.open(KEY, 1, deadline=far())
            raise AssertionError("NotServable was due")
        except NotServable as error:
            assert "ulimit -l" in str(error), error
            print(f"      {error}", flush=True)
        link.close()
    source.kill()
    with start_server() as hub:
        source = crew.take()
        source.ask(publish, hub.address, "trainer", 1, RDMA, 128 << 10)
        reader.ask(join, hub.address, "rollout-0", RDMA)
        report = reader.ask(replicate, 1, False)
        assert report["transports"] == {"tcp": SIZE_BYTES}, report
        for member in (source, reader):
            member.kill()


def reader_may_not_lock_memory(crew: Crew) -> None:
    """The same at the reader: enough for two segments it reads by way of staging memory, else over tcp."""
    with start_server() as hub:
        source = crew.take()
        source.ask(publish, hub.address, "trainer", 1, RDMA)
        for memlock_size_bytes, transport in ((9 * SEGMENT_SIZE_BYTES // 4, "rdma"), (SEGMENT_SIZE_BYTES // 2, "tcp")):
            reader = crew.take()
            reader.ask(join, hub.address, f"rollout-{transport}", RDMA, memlock_size_bytes)
            report = reader.ask(replicate, 1, False)
            print(f"      {memlock_size_bytes >> 10} KiB: {report['transports']}, {report['losses']}", flush=True)
            assert report["transports"] == {transport: SIZE_BYTES}, report
            reader.kill()
        source.kill()


def not_reached(crew: Crew) -> None:
    """Both have RDMA, but no way leads from one to the other: found out once, remembered, and tcp it is."""
    with pair_of_transports() as (source, offer, reader):
        endpoint = source.serve(SimpleShelf(offer))
        nic = source.nics[0]
        nic.port = replaced(nic.port, gid="0000:0000:0000:0000:0000:ffff:0a4d:0063")  # 10.77.0.99, nobody
        link = reader.connect(endpoint, deadline=far())
        began = time.monotonic()
        try:
            link.open(KEY, 1, deadline=far())
            raise AssertionError("NotServable was due")
        except NotServable as error:
            print(f"      after {time.monotonic() - began:.1f} s: {error}", flush=True)
        link.close()
        began = time.monotonic()
        try:
            reader.connect(endpoint, deadline=far())
            raise AssertionError("SourceLost was due")
        except SourceLost as error:
            assert "a moment ago" in str(error) and time.monotonic() - began < 2, error
    with start_server() as hub:
        publisher, rollout = crew.take(), crew.take()
        publisher.ask(publish, hub.address, "trainer", 1, RDMA, None, "10.77.0.99")
        rollout.ask(join, hub.address, "rollout-0", RDMA)
        report = rollout.ask(replicate, 1, False)
        assert report["transports"] == {"tcp": SIZE_BYTES}, report
        for member in (publisher, rollout):
            member.kill()


# --- two hosts ---


def two_hosts(crew: Crew) -> None:
    """Over RoCEv2 between two guests, in both directions."""
    member = crew.take()
    packets, tcp_bytes = count_packets("rxe1"), count_tcp_bytes(interface_of("rxe1"))
    report = member.ask(visit_the_other_host)
    packets, tcp_bytes = count_packets("rxe1") - packets, count_tcp_bytes(interface_of("rxe1")) - tcp_bytes
    print(f"      {report}; {packets} RDMA packets on our card", flush=True)
    assert report["transports"] == {"rdma": SIZE_BYTES}, report
    assert packets * 4096 >= SIZE_BYTES
    member.kill()


def visit_the_other_host() -> dict[str, Any]:
    """In a member of the first guest: read what the second publishes, publish what it reads, wait until it has."""
    os.environ["TENSORHUB_RDMA_DEVICES"] = "rxe1"
    client = kept["client"] = make_client(OTHER_HUB, "guest-1", RDMA)
    target = make_blank()
    client.wait(1, timeout_s=PATIENCE_S)
    report = client.replicate(target, 1, timeout_s=PATIENCE_S)
    assert torch.equal(target["a"], tensor_of(1))
    client.publish(2, {"a": tensor_of(2)})
    client.wait(3, timeout_s=PATIENCE_S)  # the other host says: I have read it, by this transport
    answer = {"a": torch.zeros(1, dtype=torch.uint8)}
    client.replicate(answer, 3, timeout_s=PATIENCE_S)
    assert answer["a"].item() == 1, "the other host did not read ours over rdma"
    return {"transports": report.transports, "sources": report.sources}


def be_the_other_host() -> None:
    """The second guest: hub, publisher and reader. Ends when the first guest has left."""
    with (
        start_server(OTHER_HUB, insecure=True),
        make_client(OTHER_HUB, "guest-2", RDMA) as client,
    ):
        client.retain(0)
        client.publish(1, {"a": tensor_of(1)})
        print("publishes", flush=True)
        client.wait(2, timeout_s=1000)
        target = make_blank()
        report = client.replicate(target, 2, timeout_s=PATIENCE_S)
        right = torch.equal(target["a"], tensor_of(2)) and report.transports == {"rdma": SIZE_BYTES}
        print(f"read version 2: {report.transports}, {'right' if right else 'WRONG'}", flush=True)
        client.publish(3, {"a": torch.tensor([int(right)], dtype=torch.uint8)})
        until(lambda: not client.find(ShardKey(3, "checkpoint")).active_readers and _read_once(client), "answer taken")


def _read_once(client: Client) -> bool:
    """The first guest holds version 3 too, or is gone with it."""
    return any(len(holders) > 1 for v in client.versions() if v.version == 3 for holders in v.layouts.values())
