"""One module touches devices: what it promises, on the simulated device; and what it asks of torch.cuda."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import threading
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from simulated import Simulation

from tensorhub_plugins.core.device import devices, drivers
from tensorhub_plugins.core.device.devices import Device
from tensorhub_plugins.core.device.drivers import Cuda
from tensorhub_plugins.core.device.graph_capture import Gate
from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.manifest import TensorSpec
from tensorhub_plugins.core.memory import pinning
from tensorhub_plugins.core.memory.pinning import prefer
from tensorhub_plugins.core.memory.pool import SlabPool
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.memory.staging import copy_all

SPECS = [TensorSpec("w", "uint8", (100_000,), 100_000)]
PATIENCE_S = 20.0


def in_thread(call, name="other"):
    """What it returns, called in a thread of its own."""
    found = []
    thread = threading.Thread(target=lambda: found.append(call()), name=name)
    thread.start()
    thread.join(PATIENCE_S)
    assert found
    return found[0]


def flats(simulation, sizes):
    content = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    return content, [simulation.put(each, f"t{number}") for number, each in enumerate(content)]


# --- copies ---


@pytest.mark.parametrize("seed", range(20))
def test_copies_of_every_size_arrive_and_are_ordered(seed):
    """Tiny ones that are gathered, large ones that are cut, and all between, down and up again."""
    with Simulation(seed, piece_size_bytes=70_000) as simulation:
        sizes = simulation.random.choices([1, 3, 70_000, 69_999, 64 << 10, (64 << 10) - 1, 200_001, 5], k=12)
        content, there = flats(simulation, sizes)
        host, here = torch.empty(sum(sizes), dtype=torch.uint8), simulation.devices[0]
        here.down(there, host)
        assert host.tolist() == torch.cat(content).tolist()
        _, others = flats(simulation, sizes)
        here.up(host, others)
        assert [simulation.content(each) for each in others] == [bytes(each.tolist()) for each in content]
        simulation.check()


def test_hundreds_of_tiny_tensors_are_few_copies():
    with Simulation(0) as simulation:
        content, there = flats(simulation, [16] * 300)
        host = torch.empty(16 * 300, dtype=torch.uint8)
        simulation.devices[0].down(there, host)
        assert bytes(host.tolist()) == bytes(torch.cat(content).tolist())
        assert simulation.calls["copy"] == simulation.calls["launch"] == 1
        simulation.devices[0].up(host, there)
        assert simulation.calls["copy"] == simulation.calls["launch"] == 2
        simulation.fail("scratch")  # without room to gather them they are copied one by one
        simulation.devices[0].down(there, host)
        assert simulation.calls["copy"] == 302
        simulation.check()


def test_streams_are_made_once_for_each_direction():
    with Simulation(0) as simulation:
        _, there = flats(simulation, [10])
        host = torch.empty(10, dtype=torch.uint8)
        for _ in range(3):
            simulation.devices[0].down(there, host)
            simulation.devices[0].up(host, there)
        assert simulation.calls["make_stream"] == 2


def test_pieces_come_while_the_next_one_is_on_its_way():
    with Simulation(3) as simulation:
        content, (there,) = flats(simulation, [1000])
        ranges = [(start, min(start + 300, 1000)) for start in range(0, 1000, 300)]
        found = b""
        for number, piece in enumerate(simulation.devices[0].pieces(lambda a, b: [there[a:b]], ranges)):
            simulation.touch(piece, "the digest")
            assert (simulation.calls["copy"], simulation.calls["wait"]) == (min(number + 2, 4), number + 1)
            found += bytes(piece.tolist())
        assert found == bytes(content[0].tolist())
        assert simulation.calls["buffer"] == 2
        simulation.check()


def test_a_piece_that_nobody_waits_for_is_not_there():
    """The control: without the wait the bytes are not there, and the checker names who has not waited for whom."""
    with Simulation(3) as simulation:
        _, (there,) = flats(simulation, [1000])
        driver = simulation.devices[0]._driver
        driver.wait = lambda event: None
        piece = next(iter(simulation.devices[0].pieces(lambda a, b: [there[a:b]], [(0, 1000)])))
        simulation.touch(piece, "the digest")
        with pytest.raises(AssertionError, match=r"unordered: copy #1 of stream 0/copies 1 writes .*the digest reads"):
            simulation.check()


def test_what_a_failed_copy_was_writing_is_waited_for():
    with Simulation(1) as simulation:
        _, there = flats(simulation, [70_000, 70_000])
        host = torch.empty(140_000, dtype=torch.uint8)
        driver, copies = simulation.devices[0]._driver, []

        def copy(source, target, stream, copy=driver.copy):
            simulation.fail("copy", len(copies))
            copies.append(copy(source, target, stream))

        driver.copy = copy
        with pytest.raises(torch.OutOfMemoryError):
            simulation.devices[0].down(there, host)
        simulation.touch(host, "its next owner", writes=True)
        simulation.check()


@pytest.mark.parametrize("waits", [True, False])
def test_a_copy_runs_behind_what_this_thread_has_queued(waits):
    """A gather on this thread's stream, for example. The control: without `after` both are named."""
    with Simulation(5) as simulation, simulation.stream("gather"):
        weight = simulation.put(torch.zeros(100, dtype=torch.uint8), "weight")
        simulation.kernel(weight, 7, "gather")
        host, here = torch.empty(100, dtype=torch.uint8), simulation.devices[0]
        here.down([weight], host, after=here.mark() if waits else None)
        if waits:
            assert host.tolist() == [7] * 100
            simulation.check()
        else:
            with pytest.raises(AssertionError, match=r"unordered: kernel sets 7 .* writes weight\[0:\], copy .* reads"):
                simulation.check()


# --- threads ---


def test_each_thread_takes_the_device_that_is_meant():
    """Of eight devices the seventh: nobody makes a context on the first one."""
    with Simulation(0, count=8) as simulation:
        content = torch.arange(100, dtype=torch.uint8)
        weight = simulation.put(content, "weight", device=7)
        with Slab.adopt({"w": weight}) as slab:
            read = in_thread(lambda: bytes(slab.readable(0, 100)[0]), name="server")
        assert read == bytes(content.tolist())
        assert simulation.contexts == {7: {"server"}}
        in_thread(lambda: simulation.devices[7]._driver.buffer(1), name="careless")  # the control
        assert simulation.contexts == {0: {"careless"}, 7: {"server"}}


def test_memory_is_pinned_for_the_device_of_the_thread_that_made_the_pool():
    with Simulation(0, count=8) as simulation:
        with simulation.choosing(7):
            pool = SlabPool()
        slab = in_thread(lambda: pool.take(SPECS), name="updater")
        assert slab._pinned.done.wait(PATIENCE_S)
        assert simulation.contexts == {7: {"tensorhub-pin"}}
        slab.close()
        pool.close()


# --- pinned memory ---


@contextmanager
def slow_pages(monkeypatch):
    """Pages are not made until the event is set; says how often some were asked for."""
    goes_on, asked = threading.Event(), []

    def populate(memory):
        asked.append(memory.numel())
        assert goes_on.wait(PATIENCE_S)

    monkeypatch.setattr(pinning, "_populate", populate)
    try:
        yield goes_on, asked
    finally:
        goes_on.set()


def test_nobody_waits_for_memory_to_be_pinned(monkeypatch):
    """It is usable before: to allocate it takes no longer than to map it, however long pinning takes."""
    with Simulation(0) as simulation, slow_pages(monkeypatch) as (goes_on, _), Slab.allocate(SPECS) as slab:
        assert not simulation.registered
        content, (there,) = flats(simulation, [100_000])
        slab.write("w", there)
        assert bytes(slab.readable(0, 100_000)[0]) == bytes(content[0].tolist())
        goes_on.set()
        assert slab._pinned.done.wait(PATIENCE_S)
        assert list(simulation.registered.values()) == [slab.tensors()["w"].untyped_storage().nbytes()]
        simulation.check()


def test_a_slab_that_is_closed_while_it_is_pinned_lets_go_soon(monkeypatch):
    monkeypatch.setattr(pinning.Pinned, "piece_size_bytes", 4096)
    with Simulation(0) as simulation, slow_pages(monkeypatch) as (goes_on, asked):
        slab = Slab.allocate(SPECS)
        pinned = slab._pinned
        slab.close()
        goes_on.set()
        assert pinned.done.wait(PATIENCE_S)
        assert len(asked) <= pinning.POPULATE_THREADS_MAX and not simulation.registered


def test_what_was_pinned_is_released():
    with Simulation(0) as simulation:
        slab = Slab.allocate(SPECS, pin=True)
        assert simulation.registered
        slab.close()
        pinning.wait_for_background(PATIENCE_S)
        assert not simulation.registered and simulation.calls["unregister"] == 1


def test_memory_that_cannot_be_pinned_is_used_as_it_is(caplog):
    with Simulation(0) as simulation, caplog.at_level(logging.WARNING):
        simulation.fail("register", 2)
        with Slab.allocate(SPECS) as slab:
            assert slab._pinned.done.wait(PATIENCE_S)
            pinning.wait_for_background(PATIENCE_S)
            slab.write("w", torch.ones(100_000, dtype=torch.uint8))
        assert "simulated:0 cannot pin" in caplog.text and "about half as fast" in caplog.text
        with pytest.raises(UsageError, match="cannot pin"):
            Slab.allocate(SPECS, pin=True)


@pytest.mark.parametrize("node", [None, 1])
def test_pages_are_made_beside_their_device(monkeypatch, node):
    """B10: before they are there. The control: a host with one node is asked for nothing."""
    preferred, populated = [], []
    monkeypatch.setattr(pinning, "prefer", lambda *given: preferred.append((*given, len(populated))) or "")
    monkeypatch.setattr(pinning, "_populate", populated.append)
    with Simulation(0) as simulation:
        if node is not None:
            simulation.numa_nodes[0] = node
        with Slab.allocate(SPECS, pin=True) as slab:
            memory = slab.tensors()["w"].untyped_storage()
            assert preferred == ([] if node is None else [(memory.data_ptr(), memory.nbytes(), node, 0)])
        assert populated


def test_the_node_of_a_device_is_asked_of_the_system(cuda, monkeypatch):
    asked = []

    def read(path):
        asked.append(str(path))
        return answers.pop()

    monkeypatch.setattr(cuda, "get_device_properties", lambda which: properties, raising=False)
    monkeypatch.setattr(drivers.Path, "read_text", read)
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    answers = ["-1\n", "1\n"]
    assert [Cuda(torch.device("cuda", 0)).numa_node() for _ in range(2)] == [1, None]
    assert asked[0] == "/sys/bus/pci/devices/0000:3b:00.0/numa_node"


def test_the_kernel_is_told_the_node():
    """MPOL_PREFERRED, of node 0, for these pages and no others."""
    mapped = mmap.mmap(-1, 4 * mmap.PAGESIZE)
    memory = torch.frombuffer(mapped, dtype=torch.uint8)
    if reason := prefer(memory.data_ptr() + mmap.PAGESIZE, mmap.PAGESIZE, 0):
        pytest.skip(f"mbind: {reason}")
    about = Path("/proc/self/numa_maps").read_text().splitlines()
    addresses = {int(line.split()[0], 16): line.split()[1] for line in about}
    start = memory.data_ptr()
    assert addresses[start + mmap.PAGESIZE] == "prefer:0"
    assert "prefer" not in addresses.get(start, "") and "prefer" not in addresses[start + 2 * mmap.PAGESIZE]
    assert prefer(memory.data_ptr() + 1, mmap.PAGESIZE, 0) == "Invalid argument"  # not at a page's begin
    assert "node 5000" in prefer(memory.data_ptr(), mmap.PAGESIZE, 5000)


def test_populating_keeps_what_is_there():
    memory = torch.arange(100_000, dtype=torch.int64).view(torch.uint8)
    before = memory.clone()
    pinning._populate(memory[5:])
    assert torch.equal(memory, before)


# --- while graphs are captured ---


def test_other_threads_wait_while_graphs_are_captured():
    with Simulation(0) as simulation:
        weight = simulation.put(torch.zeros(100, dtype=torch.uint8), "weight")
        slab = Slab.adopt({"w": weight})
        devices.gate.close()
        try:
            with simulation.capturing():
                reader = threading.Thread(target=lambda: slab.readable(0, 100))
                reader.start()
                slab.readable(0, 100)  # who captures is not kept out of its own device
                while not devices.gate.waiting:
                    reader.join(0.01)
                    assert reader.is_alive()
        finally:
            devices.gate.open()
        reader.join(PATIENCE_S)
        assert not reader.is_alive()
        simulation.check()


def test_without_the_gate_a_capture_is_lost(monkeypatch):
    """The control."""
    monkeypatch.setattr(Gate, "passing", lambda self: nullcontext())
    with Simulation(0) as simulation:
        slab = Slab.adopt({"w": simulation.put(torch.zeros(100, dtype=torch.uint8), "weight")})
        with simulation.capturing():
            reader = threading.Thread(target=lambda: pytest.raises(RuntimeError, slab.readable, 0, 100), name="reader")
            reader.start()
            reader.join(PATIENCE_S)
        with pytest.raises(AssertionError, match="by thread reader while graphs are captured"):
            simulation.check()


def test_a_capture_begins_when_the_last_call_has_ended():
    gate, entered, leaves, closed = Gate(), threading.Event(), threading.Event(), threading.Event()

    def work():
        with gate.passing(), gate.passing():
            entered.set()
            assert leaves.wait(PATIENCE_S)
            assert not closed.is_set()

    def capture():
        gate.close()
        closed.set()
        gate.open()

    threads = [threading.Thread(target=work), threading.Thread(target=capture)]
    threads[0].start()
    assert entered.wait(PATIENCE_S)
    threads[1].start()
    leaves.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert closed.is_set() and not gate.closed


def test_a_gate_that_nobody_opens_is_not_waited_for_for_ever(caplog):
    gate = Gate(closed_s_max=0.01)
    gate.close()

    def passes():
        with gate.passing():
            return True

    assert in_thread(passes)
    assert "more than 0.01 s" in caplog.text


# --- what is asked of torch.cuda ---


class FakeCuda:
    """torch.cuda as far as pinning asks it: cudaHostRegister fails, and leaves an error that the next launch raises."""

    def __init__(self) -> None:
        self.error = 0
        self.cleared = 0
        self.initialized = True

    def is_initialized(self):
        return self.initialized

    def is_available(self):
        raise AssertionError("asking this can make a context")

    def current_device(self):
        return 0

    def device(self, which):
        return nullcontext()

    def cudart(self):
        if not self.initialized:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
        return SimpleNamespace(cudaHostRegister=self._register)

    def _register(self, address, size, flags):
        self.error = 2
        return 2

    def get_last_error(self):
        self.error, error = 0, self.error
        self.cleared += error != 0
        return error


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(drivers, "_cuda", fake)
    monkeypatch.setattr(drivers, "_get_last_errors", lambda: [fake.get_last_error])
    return fake


def test_a_failed_registration_leaves_no_error_behind(cuda):
    """A10: it would be raised by the next kernel of this thread, which has done nothing wrong."""
    assert Cuda(torch.device("cuda", 0)).register(torch.zeros(10, dtype=torch.uint8)).startswith("error 2, out of")
    assert cuda.error == 0 and cuda.cleared == 1


def test_where_the_library_is_not_found_a_launch_takes_the_error(cuda, monkeypatch):
    launches = []

    def zeros(*_, **__):
        launches.append(cuda.get_last_error())
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(drivers, "_get_last_errors", lambda: [])
    memory = torch.ones(10, dtype=torch.uint8)
    monkeypatch.setattr(torch, "zeros", zeros)
    assert Cuda(torch.device("cuda", 0)).register(memory).startswith("error 2, out of")
    assert launches == [2] and cuda.error == 0


class FakeDriver:
    """libcuda: two allocations of 8 KiB that are neighbours. A thread that has asked the runtime for nothing has no
    context here, and is told so."""

    def __init__(self, cuda, monkeypatch):
        self.has_context = False
        self.exported = []
        cuda.current_stream = lambda device: SimpleNamespace(query=self._make_context)
        monkeypatch.setattr(ctypes, "CDLL", lambda name: self)

    def _make_context(self):
        self.has_context = True

    def cuMemGetAddressRange_v2(self, start, size, address):
        if not self.has_context:
            return 201
        if not 8192 <= address.value < 3 * 8192:
            return 1
        start._obj.value, size._obj.value = address.value // 8192 * 8192, 8192
        return 0

    def cuMemGetHandleForAddressRange(self, fd, start, size, kind, flags):
        if not self.has_context:
            return 201
        self.exported.append((start.value, size.value, kind.value))
        fd._obj.value = 77
        return 0

    def cuGetErrorString(self, code, reason):
        reason._obj.value = {1: b"invalid argument", 201: b"invalid device context"}[code.value]
        return 0


def test_the_driver_is_asked_by_a_thread_that_has_a_context(cuda, monkeypatch):
    """A14: torch gives a new thread none on device 0, which it takes to be chosen already."""
    driver = FakeDriver(cuda, monkeypatch)
    made = Device("cuda:0", Cuda(torch.device("cuda", 0)))
    assert made.allocation(8192 + 5) == (8192, 2 * 8192)
    driver.has_context = False
    assert made.export_dma_buf(2 * 4096 + 512, 4096) == (77, 512)
    assert driver.exported == [(2 * 4096, 2 * 4096, 1)], "whole pages"
    with pytest.raises(OSError, match="cuMemGetAddressRange_v2: invalid argument"):
        made.allocation(1)
    driver.has_context = False
    driver._make_context = lambda: None
    with pytest.raises(OSError, match="invalid device context"):
        made.allocation(8192)


def test_the_devices_in_use_are_those_with_a_context(cuda, monkeypatch):
    """To wait for another one would make it a context; and none is made where CUDA is not used."""
    monkeypatch.setattr(cuda, "device_count", lambda: 4, raising=False)
    assert drivers.devices_in_use() == [torch.device("cuda", 0)]  # a build that does not tell: this thread's
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda index: index in (1, 3), raising=False)
    assert drivers.devices_in_use() == [torch.device("cuda", 1), torch.device("cuda", 3)]
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    cuda.initialized = False
    assert drivers.devices_in_use() == []
    devices.settle_host([torch.zeros(1)])


def test_another_thread_takes_over_the_device_and_the_streams(cuda, monkeypatch):
    """The default stream of a device is every thread's, and to choose it would make the device a context."""
    chosen = []
    monkeypatch.setattr(cuda, "device_count", lambda: 3, raising=False)
    monkeypatch.setattr(cuda, "current_device", lambda: 1)
    streams = [SimpleNamespace(cuda_stream=handle) for handle in (7, 8, 0)]
    monkeypatch.setattr(cuda, "current_stream", streams.__getitem__, raising=False)

    @contextlib.contextmanager
    def choosing(what):
        chosen.append(what)
        yield
        chosen.append(f"no {what}")

    monkeypatch.setattr(cuda, "stream", lambda stream: choosing(f"stream {stream.cuda_stream}"), raising=False)
    monkeypatch.setattr(cuda, "device", lambda index: choosing(f"device {index}"), raising=False)
    with drivers.carried()():
        assert chosen == ["stream 7", "stream 8", "device 1"]  # a stream chooses its device, too
    assert chosen[3:] == ["no device 1", "no stream 8", "no stream 7"]  # that thread works for others, too
    cuda.initialized = False
    with drivers.carried()():
        assert len(chosen) == 6


def test_nothing_is_pinned_where_no_device_is_used(cuda):
    """A17: neither in a forked child, which cannot, nor in a process that never meant to."""
    cuda.initialized = False
    with Slab.allocate(SPECS) as slab:
        assert slab._pinned is None


def test_the_last_error_is_asked_of_every_library_that_is_loaded(monkeypatch, tmp_path):
    """N14: torch's need not be the first one."""
    asked = []

    def load(path):
        asked.append(path)
        if path.endswith(" (deleted)"):
            raise OSError(path)
        return SimpleNamespace(cudaGetLastError=lambda: 0)

    loaded = ["/opt/libcudart.so.13", "/lib/libc.so.6", "/x/libcudart.so.12 (deleted)", "/a b/libcudart.so.12"]
    maps = "".join(f"7f0{n % 4}-7f09 r-xp 00000000 00:00 {n}  {loaded[n % 4]}\n" for n in range(8))
    monkeypatch.setattr(drivers.Path, "read_text", lambda self, **how: maps)
    monkeypatch.setattr(ctypes, "CDLL", load)
    drivers._get_last_errors.cache_clear()
    found = drivers._get_last_errors()
    drivers._get_last_errors.cache_clear()
    assert len(found) == 2 and asked == [loaded[0], *loaded[2:]]


def test_a_forked_child_releases_nothing():
    with Simulation(0) as simulation:
        slab = Slab.allocate(SPECS, pin=True)
        pid = os.fork()
        if not pid:
            slab.close()
            pinning.wait_for_background(PATIENCE_S)
            os._exit(0 if simulation.registered else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        slab.close()


def test_devices_are_made_once_and_the_host_is_none():
    assert devices.of(torch.zeros(1)) is None
    meta = torch.zeros(1, device="meta")
    assert devices.of(meta) is devices.of(meta) and isinstance(devices.of(meta), Device)


@pytest.mark.parametrize("seed", range(5))
def test_copies_from_anywhere_to_anywhere_follow_this_threads_stream(seed):
    with Simulation(seed, count=2) as simulation, simulation.stream("engine"):
        content = [torch.full((100,), value, dtype=torch.uint8) for value in range(4)]
        live = [simulation.put(torch.zeros(100, dtype=torch.uint8), device=index) for index in (0, 1, 1)]
        host = torch.zeros(100, dtype=torch.uint8)
        simulation.kernel(live[0], 9, "engine")  # which no other stream would be ordered with
        copy_all([*zip(live, content, strict=False), (host, content[3])])
        assert [set(simulation.content(each)) for each in [*live, host]] == [{0}, {1}, {2}, {3}]
        copy_all([(live[2], live[1])])
        assert set(devices.on_host(live[2]).tolist()) == {1}
        simulation.check()
