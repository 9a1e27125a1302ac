"""Every transport between sources and readers whose tensors are on a device: the suite, on the simulated one."""

import contextlib
import functools
import threading
import time

import pytest
import rdma_fakes
import torch
from simulated import Simulation
from transport_suite import ConformanceError, SimpleShelf, TransportSuite
from transport_suite.material import read_equal

from tensorhub_plugins.core.device.devices import Device
from tensorhub_plugins.core.device.graph_capture import gate
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.transports import Offer
from tensorhub_plugins.core.transports.limits import TransportLimits
from tensorhub_plugins.core.transports.rdma.transport import RdmaTransport
from tensorhub_plugins.core.transports.shm.transport import ShmTransport
from tensorhub_plugins.core.transports.tcp import TcpTransport
from tensorhub_plugins.core.types import ShardKey

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

TRANSPORTS = {
    "tcp": (TcpTransport, {"slabs": "adopted"}),
    "tcp-3-streams": (functools.partial(TcpTransport, streams=3, offload_size_bytes=0), {"slabs": "adopted"}),
    "rdma": (RdmaTransport, {"processes": False, "slabs": "adopted"}),  # over fake verbs, which take no device memory
    "shm": (ShmTransport, {"slabs": "adopted"}),
}
CASES = [case for case in TransportSuite.CASES if "garbage" not in case]  # which counts all memory of this process


@pytest.fixture(scope="module", params=TRANSPORTS)
def device_and_suite(request):
    make, options = TRANSPORTS[request.param]
    with (
        rdma_fakes.installed(),
        Simulation(0) as simulation,
        TransportSuite(make, **options, patience_s=60.0, adopt=simulation.adopt_in_place) as suite,
    ):
        yield simulation, suite


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_conformance(device_and_suite, case):
    simulation, suite = device_and_suite
    if reason := suite.skip_reason(case):
        pytest.skip(reason)
    suite.run(case)
    simulation.check()


@pytest.mark.parametrize("direction", ["down", "up"])
def test_copies_that_nobody_waits_for_are_found(monkeypatch, direction):
    """The control: what was sent, or handed over, is not there yet."""
    queue = Device._queue

    def asked(self, way, flats, host, after):
        event = queue(self, way, flats, host, after)
        return self._driver.record("nothing") if way == direction else event

    monkeypatch.setattr(Device, "_queue", asked)
    with Simulation(0) as simulation:
        simulation.random.random = lambda: 1.0  # nothing runs that nobody waits for
        with (
            TransportSuite(TcpTransport, processes=False, slabs="adopted", adopt=simulation.adopt_in_place) as suite,
            pytest.raises(ConformanceError),
        ):
            suite.run("exact_bytes")


@pytest.mark.parametrize("direction", ["down", "up"])
def test_over_rdma_a_device_is_copied_from_and_to_what_the_card_reads(monkeypatch, direction):
    """One copy at each end: through memory that is registered with the card and pinned for the device."""
    copied = set()
    queue = Device._queue

    def asked(self, way, flats, host, after):
        copied.add((way, host.data_ptr()))
        return queue(self, way, flats, host, after)

    registered = []
    register = rdma_fakes.Nic.register

    def noted(self, address, size_bytes, owner=None):
        registered.append(range(address, address + size_bytes))
        return register(self, address, size_bytes, owner)

    monkeypatch.setattr(Device, "_queue", asked)
    monkeypatch.setattr(rdma_fakes.Nic, "register", noted)
    with rdma_fakes.installed(), Simulation(0) as simulation:
        content = torch.arange(40_001 * 8)
        source = {"w": content.clone()}
        target = {"w": torch.zeros_like(content)}
        with (
            contextlib.closing(RdmaTransport()) as serves,
            contextlib.closing(RdmaTransport()) as reads,
            simulation.adopt_in_place(source) as mine,
            simulation.adopt_in_place(target) as theirs,
        ):
            offer = Offer(ShardKey(1, "checkpoint"), mine.manifest(20_000), mine)
            offer.mark_all_ready()
            copied.clear()
            deadline = time.monotonic() + 60
            with contextlib.closing(reads.connect(serves.serve(SimpleShelf(offer)), deadline=deadline)) as link:
                segments = range(link.open(offer.key, 1, deadline=deadline).segment_count)
                assert sorted(read_equal(link, segments, theirs, deadline=deadline)) == list(segments)
            offer.withdraw()
        simulation.check()
        assert torch.equal(target["w"], content)
        places = [address for way, address in copied if way == direction]
        assert places and all(any(address in known for known in registered) for address in places)


@pytest.mark.parametrize("lies", ["on the device", "on the host"])
def test_a_reader_hears_that_a_source_which_captures_graphs_is_alive(lies):
    """N10: it was left after the time in which a source that is frozen is. What lies on the host is read meanwhile."""
    limits = TransportLimits(alive_s=0.01)
    with Simulation(0) as simulation:
        source, target = {"w": torch.arange(5_000)}, {"w": torch.zeros(5_000, dtype=torch.int64)}
        is_there = lies == "on the device"
        mine = simulation.adopt_in_place(source) if is_there else Slab.adopt(source)
        offer = Offer(ShardKey(1, "checkpoint"), mine.manifest(4_096), mine)
        offer.mark_all_ready()
        deadline = time.monotonic() + 60
        with (
            contextlib.closing(TcpTransport(limits=limits)) as serves,
            contextlib.closing(TcpTransport(limits=limits)) as reads,
            Slab.adopt(target) as theirs,
            contextlib.closing(reads.connect(serves.serve(SimpleShelf(offer)), deadline=deadline)) as link,
        ):
            link.open(offer.key, 1, deadline=deadline)
            heard, waiting, captures = [], link.progress.waiting, contextlib.ExitStack()

            def ends():
                captures.close()
                gate.open()

            link.progress.waiting = lambda: heard.append("alive") or ends() or waiting()
            read = read_equal(link, range(10), theirs, deadline=deadline)
            reader = threading.Thread(target=lambda: list(read))
            gate.close()
            try:
                captures.enter_context(simulation.capturing())
                reader.start()
                while reader.is_alive() and gate.closed:
                    reader.join(0.01)
            finally:
                ends()
            reader.join(60)
            assert bool(heard) == is_there and torch.equal(target["w"], torch.arange(5_000))
        offer.withdraw()
        simulation.check()


def test_in_place_means_that_tests_see_what_the_device_has():
    with Simulation(0) as simulation:
        tensors = {"w": torch.arange(100)}
        with simulation.adopt_in_place(tensors) as slab:
            assert slab.addresses() is None
            assert bytes(slab.readable(0, 800)[0]) == bytes(tensors["w"].view(torch.uint8).tolist())
        simulation.check()
