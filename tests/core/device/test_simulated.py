"""The simulated device's memory: whose addresses nobody may touch, and who has them when."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal

import pytest
import torch
from simulated import Simulation

from tensorhub_plugins.core.device import devices


def read_as_numbers(weight):
    return weight.sum().item()


def write_in_place(weight):
    weight.add_(1)


def read_as_bytes(weight):
    return bytes((ctypes.c_char * weight.numel()).from_address(weight.data_ptr()))


def ask_for_its_shape(weight):
    return weight[3:].shape, weight.data_ptr()


@pytest.mark.parametrize("use", [read_as_numbers, write_in_place, read_as_bytes, ask_for_its_shape])
def test_a_devices_pointer_is_no_memory_of_the_host(use, tmp_path):
    """Who takes it for that dies at once, and is named. The control, which does not, ends well."""
    with Simulation(0) as simulation, (tmp_path / "said").open("w+") as said:
        weight = simulation.put(torch.zeros(100, dtype=torch.uint8))
        pid = os.fork()
        if not pid:
            faulthandler.disable()  # pytest's may lie below a library's handler: one that is begun anew comes first
            faulthandler.enable(said)
            use(weight)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        said.seek(0)
        is_control = use is ask_for_its_shape
        assert (code, f"in {use.__name__}" in said.read()) == ((0, False) if is_control else (-signal.SIGSEGV, True))


def test_the_kernel_refuses_to_send_from_a_devices_pointer():
    reading, writing = os.pipe()
    try:
        with Simulation(0) as simulation:
            weight = simulation.put(torch.zeros(100, dtype=torch.uint8))
            with pytest.raises(OSError, match="Bad address"):
                os.write(writing, (ctypes.c_char * 100).from_address(weight.data_ptr()))
    finally:
        os.close(reading)
        os.close(writing)


def test_memory_of_a_device_that_nobody_has_any_more_is_gone():
    """Its addresses may come back as the host's, or for another tensor."""
    with Simulation(0) as simulation:
        weight = simulation.put(torch.zeros(100_000, dtype=torch.uint8))
        part = weight[5:]
        del weight
        assert devices.of(part) is not None and len(simulation._regions) == 1
        del part
        assert not simulation._regions


@pytest.mark.parametrize("waits", [True, False])
def test_memory_of_a_device_is_let_go_of_when_no_other_stream_touches_it(waits):
    """The control: torch hands it out again at once, to whoever goes on on the stream that it was taken for."""
    with Simulation(0) as simulation:
        here = simulation.devices[0]
        with here.calling() as driver:
            memory = driver.scratch(100, None)
        event = here.begin_down([memory], torch.empty(100, dtype=torch.uint8))
        if waits:
            here.wait(event)
        del memory
        if waits:
            simulation.check()
        else:
            with pytest.raises(AssertionError, match=r"let go of: scratch\[0:\], while copy #1 .* may still touch it"):
                simulation.check()


def test_addresses_are_nobody_elses_until_the_region_is_gone(monkeypatch):
    """Another thread takes memory of the same size while that of this one is being let go of. Were it at the same
    addresses, what the former owner's stream has yet to do would be taken for a fault of the new one's."""
    with Simulation(0) as simulation:
        one, other, here = "copies 1", "copies 2", simulation.devices[0]
        remove, taken = simulation._remove, []

        def take_meanwhile(region, *kept):
            if not taken:
                with here.calling() as driver:
                    taken.append(driver.scratch(100_000, other))
                    driver.copy(torch.ones(100_000, dtype=torch.uint8), taken[0], other)
            remove(region, *kept)

        monkeypatch.setattr(simulation, "_remove", take_meanwhile)
        with here.calling() as driver:
            memory = driver.scratch(100_000, one)
            driver.copy(torch.zeros(100_000, dtype=torch.uint8), memory, one)
        del memory
        assert len(simulation._regions) == 1
        simulation.check()
