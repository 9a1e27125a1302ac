"""Every transport between sources and readers whose tensors are on a device: the suite, on the simulated one."""

import functools

import pytest
import torch

from tensorhub_plugins.core.device import Device
from tensorhub_plugins.core.testing import ConformanceError, TransportSuite
from tensorhub_plugins.core.testing.simulated import Simulation
from tensorhub_plugins.core.transports.inproc import MemoryTransport
from tensorhub_plugins.core.transports.shm.transport import ShmTransport
from tensorhub_plugins.core.transports.tcp import TcpTransport

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

TRANSPORTS = {
    "memory": (MemoryTransport, {"processes": False, "slabs": "adopted"}),
    "tcp": (TcpTransport, {"slabs": "adopted"}),
    "tcp-3-streams": (functools.partial(TcpTransport, streams=3, offload_size_bytes=0), {"slabs": "adopted"}),
    "shm": (ShmTransport, {"slabs": "adopted"}),
}
CASES = [case for case in TransportSuite.CASES if "garbage" not in case]  # which counts all memory of this process


@pytest.fixture(scope="module", params=TRANSPORTS)
def device_and_suite(request):
    make, options = TRANSPORTS[request.param]
    with (
        Simulation(0) as simulation,
        TransportSuite(make, **options, patience_s=60.0, adopt=simulation.adopt_in_place) as suite,
    ):
        yield simulation, suite


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
            TransportSuite(MemoryTransport, processes=False, slabs="adopted", adopt=simulation.adopt_in_place) as suite,
            pytest.raises(ConformanceError),
        ):
            suite.run("exact_bytes")


def test_in_place_means_that_tests_see_what_the_device_has():
    with Simulation(0) as simulation:
        tensors = {"w": torch.arange(100)}
        with simulation.adopt_in_place(tensors) as slab:
            assert slab.addresses() is None
            assert bytes(slab.readable(0, 800)[0]) == bytes(tensors["w"].view(torch.uint8).tolist())
        simulation.check()
