"""cuda_ipc, all but CUDA's own calls: on a simulated device that other processes can open."""

from __future__ import annotations

import contextlib
import os

import ipc_devices
import numpy as np
import pytest
import torch
from forks import forked
from simulated_ipc import SimulatedIpc
from transport_helpers import FORGED, KEY, served, soon, until
from transport_suite import SimpleShelf, TransportSuite
from transport_suite.material import read_equal
from transport_suite.peers import Peer, remote_tensors

from tensorhub_plugins.core.device import drivers
from tensorhub_plugins.core.device.devices import Device
from tensorhub_plugins.core.errors import ProtocolError, SourceLost, UsageError
from tensorhub_plugins.core.memory.loans import is_over
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.transports import DEFAULT_TRANSPORTS, NotServable, Offer, create, unavailable
from tensorhub_plugins.core.transports.cuda_ipc import memory, transport
from tensorhub_plugins.core.transports.cuda_ipc.driver import Allocation, NotShareable
from tensorhub_plugins.core.transports.cuda_ipc.memory import SourceMemory
from tensorhub_plugins.core.transports.cuda_ipc.transport import CudaIpcTransport
from tensorhub_plugins.core.transports.stream import channel, unix_socket
from tensorhub_plugins.core.types import ShardKey

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


@pytest.fixture(scope="module", params=["apart", "together"])
def device_and_suite(request):
    with (
        ipc_devices.simulated() as simulation,
        TransportSuite(
            getattr(ipc_devices, request.param),
            processes=request.param == "apart",
            slabs="adopted",
            garbage=FORGED,
            patience_s=60.0,
            adopt=ipc_devices.adopt,
            adopt_in_peers=ipc_devices.adopt,
        ) as suite,
    ):
        yield simulation, suite


@pytest.mark.parametrize("case", TransportSuite.CASES)
def test_conformance(device_and_suite, case):
    simulation, suite = device_and_suite
    if reason := suite.skip_reason(case):
        pytest.skip(reason)
    suite.run(case)
    simulation.check()


# --- one source and one reader ---


@pytest.fixture
def simulation():
    with ipc_devices.simulated() as simulation:
        yield simulation


def tensors_of(simulation, count=3):
    return {f"t{number}": torch.arange(40_000 + 7 * number, dtype=torch.int32) for number in range(count)}


@contextlib.contextmanager
def source_of(tensors, segment_size_bytes=10_000):
    """Served on a device that other processes can open."""
    with ipc_devices.adopt(tensors) as slab, contextlib.closing(ipc_devices.apart()) as source:
        offer = Offer(KEY, slab.manifest(segment_size_bytes), slab)
        offer.mark_all_ready()
        yield offer, source.serve(SimpleShelf(offer))


def read(link, target, *, digests=True):
    """All segments into this slab, compared."""
    link.digests = digests
    manifest = link.open(KEY, 1, deadline=soon())
    for segment in read_equal(link, range(manifest.segment_count), target, deadline=soon()):
        assert not digests or link.digest(segment) == manifest.digest(segment)
    assert link.check(deadline=soon())


@pytest.mark.parametrize("digests", [True, False])
@pytest.mark.parametrize("where", ["device", "host"])
def test_bytes_arrive(simulation, digests, where):
    tensors = tensors_of(simulation)
    target = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    with source_of(tensors) as (_, endpoint), contextlib.closing(ipc_devices.apart()) as reader:
        slab = ipc_devices.adopt(target) if where == "device" else Slab.adopt(target)
        read(reader.connect(endpoint, deadline=soon()), slab, digests=digests)
        assert all(torch.equal(target[name], tensors[name]) for name in tensors)
    simulation.check()


@pytest.mark.parametrize("algorithm", ["xxh3_128", "blake3"])
def test_digests_are_made_on_the_device(simulation, monkeypatch, algorithm):
    """What comes to the host is their lanes and tails. The control: those that no kernel makes need all of it."""
    came, down = [], Device._queue
    monkeypatch.setattr(
        Device,
        "_queue",
        lambda self, way, flats, host, after: came.append(host.numel()) or down(self, way, flats, host, after),
    )
    tensors = {"w": torch.arange(250_000, dtype=torch.int32)}
    with ipc_devices.adopt(tensors) as source, contextlib.closing(ipc_devices.apart()) as serving:
        offer = Offer(KEY, source.manifest(100_000, algorithm=algorithm), source)
        offer.mark_all_ready()
        target = {"w": torch.zeros_like(tensors["w"])}
        with ipc_devices.adopt(target) as slab, contextlib.closing(ipc_devices.apart()) as reader:
            link = reader.connect(serving.serve(SimpleShelf(offer)), deadline=soon())
            came.clear()
            read(link, slab)
            link.close()
        assert torch.equal(target["w"], tensors["w"])
    assert (sum(came) == source.size_bytes) == (algorithm == "blake3")
    assert algorithm == "blake3" or not came
    simulation.check()


@pytest.mark.parametrize("places", ["neighbours at both ends", "scattered", "gathered", "far from each other"])
def test_small_tensors_are_copied_together(simulation, places):
    source = simulation.put(torch.arange(200, dtype=torch.uint8))
    target = simulation.put(torch.zeros(200, dtype=torch.uint8))
    steps = {"scattered": (10, 20), "gathered": (20, 10), "far from each other": (20, 20)}.get(places, (10, 10))
    pairs = [(source[at * steps[0] :][:10], target[at * steps[1] :][:10]) for at in range(8)]
    stream = simulation.devices[0]._driver.make_stream()
    transport.copy_pairs(simulation.devices[0], stream, [*pairs, (source[199:], target[199:])])
    expected = torch.zeros(200, dtype=torch.uint8)
    for at in range(8):
        expected[at * steps[1] :][:10] = torch.arange(200)[at * steps[0] :][:10]
    expected[199] = 199
    assert simulation.content(target) == bytes(expected.tolist())
    assert simulation.calls["launch"] <= 2 and not simulation.calls["copy"]
    simulation.check()


@pytest.mark.parametrize("waits", [True, False])
def test_copies_are_waited_for(simulation, monkeypatch, waits):
    """The control: a copy that nobody waits for is not there, and the checker says who has not waited for whom."""
    simulation.random.random = lambda: 1.0  # nothing runs that nobody waits for
    tensors = tensors_of(simulation)
    target = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    with source_of(tensors) as (_, endpoint), contextlib.closing(ipc_devices.apart()) as reader:
        link, slab = reader.connect(endpoint, deadline=soon()), ipc_devices.adopt(target)
        if not waits:
            monkeypatch.setattr(simulation, "wait", lambda events: None)
        if waits:
            read(link, slab)
            assert all(torch.equal(target[name], tensors[name]) for name in tensors)
            simulation.check()
        else:
            with pytest.raises(AssertionError):
                read(link, slab)
            assert any("unordered" in fault for fault in simulation.faults)


def test_memory_is_opened_once_for_all_versions_and_closed_with_its_owner(simulation):
    tensors = tensors_of(simulation)
    target = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    with contextlib.closing(ipc_devices.apart()) as reader, ipc_devices.adopt(target) as slab:
        with contextlib.closing(ipc_devices.apart()) as source:
            for version in (1, 2, 3):
                with ipc_devices.adopt(tensors) as of_version:
                    offer = Offer(ShardKey(version, "checkpoint"), of_version.manifest(10_000), of_version)
                    offer.mark_all_ready()
                    if version == 1:
                        shelf = SimpleShelf(offer)
                        endpoint = source.serve(shelf)
                    link = reader.connect(endpoint, deadline=soon())
                    shelf.put(offer)
                    manifest = link.open(offer.key, 1, deadline=soon())
                    list(read_equal(link, range(manifest.segment_count), slab, deadline=soon()))
                    link.close()
                    offer.withdraw()  # else its slab stays open
            assert set(simulation.opened.values()) == {1} and simulation.calls["ipc_close"] == 0
            del offer, of_version, shelf
        tensors.clear()  # what is known of them goes with them, and with that the pipe
        until(lambda: simulation.calls["ipc_close"] == len(simulation.opened))
    simulation.check()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_readers_hear_of_the_end_of_memory_though_a_child_of_its_owner_lives():
    """They would keep it open, and it would not be freed."""
    exported = memory.Exported(SourceMemory("", bytes(16), "", [], b""))
    seen = os.dup(exported.owner_liveness_fd)
    with forked():
        assert not is_over(seen)
        del exported
        assert is_over(seen)
    os.close(seen)


def test_memory_is_closed_when_its_owner_is_killed(simulation):
    peer = Peer()
    endpoint = peer.ask("serve", ipc_devices.apart, "adopted", ipc_devices.adopt, KEY)
    with contextlib.closing(ipc_devices.apart()) as reader:
        link = reader.connect(endpoint, deadline=soon())
        manifest = link.open(KEY, 1, deadline=soon())
        target = {name: torch.zeros_like(tensor) for name, tensor in remote_tensors().items()}
        reading = read_equal(link, range(manifest.segment_count), ipc_devices.adopt(target), deadline=soon())
        next(reading)
        assert simulation.calls["ipc_open"] == 1 and not simulation.calls["ipc_close"]
        peer.kill()
        with pytest.raises(SourceLost):
            list(reading)
        link.close()
        del link, reading
        until(lambda: simulation.calls["ipc_close"] == 1)
    simulation.check()


def withdrawn_while_copied(monkeypatch, digests):
    """Read segment 0, whose memory is withdrawn and overwritten while it is copied: what is yielded, what arrived."""
    tensors = {"a": torch.zeros(9000, dtype=torch.uint8)}
    target = {"a": torch.full((9000,), 7, dtype=torch.uint8)}
    copy = transport.copy_pairs
    with source_of(tensors) as (offer, endpoint), contextlib.closing(ipc_devices.apart()) as reader:

        def copy_pairs(*arguments):
            offer.withdraw()
            offer.slab.tensors()["a"].fill_(255)
            copy(*arguments)

        monkeypatch.setattr(transport, "copy_pairs", copy_pairs)
        link = reader.connect(endpoint, deadline=soon())
        link.digests = digests
        link.open(KEY, 1, deadline=soon())
        got = []
        with contextlib.suppress(SourceLost):
            got.extend(read_equal(link, [0], ipc_devices.adopt(target), deadline=soon()))
        return got, set(target["a"].tolist())


@pytest.mark.parametrize("digests", [True, False])
def test_nothing_is_yielded_that_was_overwritten_while_it_was_copied(simulation, monkeypatch, digests):
    got, arrived = withdrawn_while_copied(monkeypatch, digests)
    assert got == [] and arrived == ({7} if digests else {255})  # with digests it did not even reach the live tensor


def test_without_looking_at_the_connection_it_would_be(simulation, monkeypatch):
    monkeypatch.setattr(channel.Channel, "is_cut", lambda self: False)
    assert withdrawn_while_copied(monkeypatch, False) == ([0], {255})


def test_a_reader_closes_nothing_that_is_being_copied(simulation):
    """The control of that rule: the simulated device names who closes too early."""
    tensors = {"a": torch.zeros(100_000, dtype=torch.uint8)}
    with source_of(tensors) as (offer, _):
        exported = memory.Exports(SimulatedIpc(simulation)).of(offer.slab)
        reader, here = SimulatedIpc(simulation, "reader"), simulation.devices[0]
        opened = reader.open(here, exported.memory.allocations[0])
        simulation.random.random = lambda: 1.0
        simulation.copy(0, opened[:100], simulation.put(torch.zeros(100, dtype=torch.uint8)), "copies")
        reader.close(here, opened)
        with pytest.raises(AssertionError, match="unordered: copy .*to close its handle"):
            simulation.check()


# --- what is refused ---


@pytest.mark.parametrize("what", ["host memory", "a pool"])
def test_what_cannot_be_opened_is_refused_with_the_reason(simulation, what):
    tensor = torch.zeros(1000, dtype=torch.uint8)
    if what == "a pool":
        tensor = simulation.put(tensor)
    kind = {"kind": "allocated"} if what != "a pool" else {"kind": "adopted"}
    with (
        served(ipc_devices.apart(), {"a": tensor}, **kind) as (_, endpoint),
        contextlib.closing(ipc_devices.apart()) as reader,
    ):
        link = reader.connect(endpoint, deadline=soon())
        with pytest.raises(NotServable, match="expandable segments" if what == "a pool" else "which shm serves"):
            link.open(KEY, 1, deadline=soon())


def test_memory_that_cannot_be_opened_is_left_to_the_next_transport(simulation):
    """Found out when it is read; from then on said at once."""
    tensors = tensors_of(simulation)
    target = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    with source_of(tensors) as (_, endpoint), contextlib.closing(ipc_devices.apart()) as reader:
        simulation.fail("ipc_open")
        slab = ipc_devices.adopt(target)
        with pytest.raises(SourceLost, match="simulated:0 cannot open its memory"):
            read(reader.connect(endpoint, deadline=soon()), slab)
        with pytest.raises(NotServable, match="simulated:0 cannot open its memory"):
            read(reader.connect(endpoint, deadline=soon()), slab)
        assert not simulation._open
    simulation.check()


@pytest.mark.parametrize("is_freed", [True, False])
def test_memory_that_was_freed_since_says_nothing_of_the_next_ones(simulation, is_freed):
    """A source that is killed before its memory is opened would send all readers of its device elsewhere for ever. The
    control: one that lives."""
    liveness, alive = os.pipe()
    told = SourceMemory("another", bytes(16), "simulated:0", [Allocation(0, 1000, bytes(64))], b"")
    with contextlib.closing(ipc_devices.apart()) as reader:
        if is_freed:
            os.close(alive)
        simulation.fail("ipc_open")
        with pytest.raises(SourceLost, match="simulated:0 cannot open its memory"):
            reader.open(told, simulation.devices[0], liveness)
        assert (reader.refusal(told) is None) == is_freed
    for fd in [liveness] if is_freed else [liveness, alive]:
        os.close(fd)


def test_what_was_opened_before_another_could_not_be_is_closed(simulation):
    tensors = {name: torch.zeros(2 << 20, dtype=torch.uint8) for name in "abc"}
    with source_of(tensors, 1 << 20) as (_, endpoint), contextlib.closing(ipc_devices.apart()) as reader:
        called, calls = simulation.called, []

        def third_fails(call):
            calls.append(call)
            if calls.count("ipc_open") == 3 and call == "ipc_open":
                raise torch.OutOfMemoryError
            called(call)

        simulation.called = third_fails
        target = ipc_devices.adopt({name: tensor.clone() for name, tensor in tensors.items()})
        with pytest.raises(SourceLost):
            read(reader.connect(endpoint, deadline=soon()), target)
        assert calls.count("ipc_open") == 3 and calls.count("ipc_close") == 2 and not simulation._open


BROKEN = {
    "less than the manifest says": ([(0, 0, 999)], "not 1000 bytes"),
    "more than an allocation has": ([(0, 100, 1000)], "in none of the source's"),
    "an allocation that is not there": ([(1, 0, 1000)], "in none of the source's"),
    "a number that overflows": ([(0, (1 << 64) - 1, 1000)], "in none of the source's"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_no_source_is_believed_about_its_memory(simulation, what):
    extents, problem = BROKEN[what]
    allocation = Allocation(0, 1000, bytes(64))
    packed = np.array(extents, np.uint64).astype("<u8").tobytes()
    with pytest.raises(ProtocolError, match=problem):
        memory.check_memory(SourceMemory("other", b"0" * 16, "gpu", [allocation], packed), 1000)
    with pytest.raises(ProtocolError, match="cannot be read"):
        memory.check_memory(SourceMemory("other", b"0" * 16, "gpu", [allocation], packed + b"x"), 1000)
    fine = np.array([(0, 0, 1000)], "<u8").tobytes()
    memory.check_memory(SourceMemory("other", b"0" * 16, "gpu", [allocation], fine), 1000)


# --- the simulated device keeps CUDA's rules ---


def test_the_simulated_device_has_cudas_rules(simulation):
    tensors = {"a": torch.zeros(2 << 20, dtype=torch.uint8)}
    here = simulation.devices[0]
    with ipc_devices.adopt(tensors):
        own, other = SimulatedIpc(simulation), SimulatedIpc(simulation, "other")
        found = own.export(here, tensors["a"].data_ptr() + 5)
        assert (found.base, found.size_bytes) == (tensors["a"].data_ptr(), 2 << 20)
        with pytest.raises(NotShareable, match="this very process"):
            own.open(here, found)
        opened = other.open(here, found)
        other.open(here, found)
        with pytest.raises(AssertionError, match="opens a handle that it has open"):
            simulation.check()
        tensors["a"][3] = 9
        assert simulation.content(opened[3:4]) == b"\x09"
        simulation.free(tensors["a"])
        with pytest.raises(NotShareable, match="was freed"):
            SimulatedIpc(simulation, "third").open(here, found)


# --- where there is no CUDA ---


def test_where_there_is_no_cuda_it_says_so(monkeypatch):
    monkeypatch.setattr(drivers, "is_there", lambda: False)
    assert unavailable("cuda_ipc") in (
        "there is no libcuda.so.1, which comes with NVIDIA's driver",
        "torch finds no CUDA device",
    )
    with pytest.raises(UsageError, match="'cuda_ipc' cannot be used here: t"):
        create("cuda_ipc")


def test_it_is_no_default_before_it_has_run_on_a_gpu():
    assert "cuda_ipc" not in DEFAULT_TRANSPORTS and CudaIpcTransport.name == "cuda_ipc"


def test_readers_of_other_users_are_refused(simulation, monkeypatch, caplog):
    with source_of(tensors_of(simulation)) as (_, endpoint), contextlib.closing(ipc_devices.apart()) as reader:
        reader.connect(endpoint, deadline=soon()).close()
        uid = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: uid + 1000)
        monkeypatch.setattr(unix_socket, "peer_of", lambda sock: (1234, uid + 2000))
        monkeypatch.setattr(unix_socket, "check_owner", lambda sock: 1234)  # it would refuse itself to ask
        with pytest.raises(SourceLost):
            reader.connect(endpoint, deadline=soon())
    assert "belongs to user" in caplog.text
