"""Pages are made by several threads, each of which writes zeros at a few GB/s. See test_devices.py, too."""

from __future__ import annotations

import mmap
import signal
import subprocess
import sys
import threading
from itertools import pairwise

import pytest
import torch
from simulated import Simulation

from tensorhub_plugins.core.device.graph_capture import gate
from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.machine import cores
from tensorhub_plugins.core.manifest import PIECE_SIZE_BYTES, TensorSpec, TensorTable
from tensorhub_plugins.core.memory import pinning
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.memory.staging import copy_all, down
from tensorhub_plugins.core.memory.tensors import spec_of
from tensorhub_plugins.core.threads import Thread

PATIENCE_S = 20.0
MB = 1 << 20
SIZE = 1 << 17


@pytest.mark.parametrize("pieces", [min(pinning.POPULATE_THREADS_MAX, cores()), 1])
def test_pages_are_made_by_several_threads(monkeypatch, pieces):
    """Each waits for all others. The control: memory of one piece is made by one."""
    made, together = [], threading.Barrier(pieces)

    def populate(memory):
        together.wait(PATIENCE_S)
        made.append((threading.current_thread().name, memory.numel()))

    monkeypatch.setattr(pinning, "_populate", populate)
    monkeypatch.setattr(pinning.Pinned, "piece_size_bytes", SIZE // pieces)
    with Simulation(0), Slab.allocate([spec_of("w", torch.zeros(SIZE, dtype=torch.uint8))], pin=True):
        assert {name for name, _ in made} == {"tensorhub-pages"}
        assert sum(size_bytes for _, size_bytes in made) == SIZE


@pytest.mark.parametrize("started", [0, 1])
def test_pages_are_made_by_the_threads_that_there_are(monkeypatch, started):
    made, start = [], Thread.start

    def refused(thread):
        if thread.name == "tensorhub-pages" and started <= sum(name == thread.name for name in running):
            raise RuntimeError("can't start new thread")
        running.append(thread.name)
        start(thread)

    running = []
    monkeypatch.setattr(Thread, "start", refused)
    monkeypatch.setattr(pinning, "cores", lambda: 4)
    monkeypatch.setattr(pinning, "_populate", lambda memory: made.append(memory.numel()))
    monkeypatch.setattr(pinning.Pinned, "piece_size_bytes", SIZE // 4)
    with Simulation(0), Slab.allocate([spec_of("w", torch.zeros(SIZE, dtype=torch.uint8))], pin=True):
        assert sum(made) == SIZE and len(made) == 4


def test_what_no_thread_was_there_for_is_done_when_there_is_one(monkeypatch):
    def refused(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(Thread, "start", refused)
        with pytest.raises(RuntimeError):
            pinning._in_background(lambda: None, "tensorhub-of-a-test")
    done = threading.Event()
    pinning._in_background(done.set, "tensorhub-of-a-test")
    assert done.wait(PATIENCE_S)


AT_EXIT = """
import threading, torch
from tensorhub_plugins.core.memory import pinning
begun = threading.Event()

def busy():
    begun.set()
    while not pinning._ending.is_set():
        torch.zeros(1 << 22)[1:].sum()

pinning._in_background(busy)
pinning._in_background(lambda: print("and no more"))
begun.wait()
"""


UNWATCHED = "import atexit\natexit.unregister(pinning._end)\n"


@pytest.mark.slow
def test_no_thread_is_in_torchs_code_when_the_interpreter_ends():
    """It would abort the process, as a trainer was that had closed its client just before: the control is."""
    ended, control = (
        subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=100, check=False)
        for text in (AT_EXIT, AT_EXIT + UNWATCHED)
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert control.returncode == -signal.SIGABRT


def table_of(*sizes_mb):
    """Tensors of so many MiB and some bytes: no border between two is a page's, if nobody sees to it."""
    sizes = [size * MB + 64 for size in sizes_mb]
    return TensorTable.of(TensorSpec(f"t{i:03}", "uint8", (size,), size) for i, size in enumerate(sizes))


@pytest.fixture
def no_pages(monkeypatch):
    """Blocks of gigabytes take no memory: only what a test writes."""
    monkeypatch.setattr(pinning, "_populate", lambda memory: None)


def check_pieces(simulation, slab, size_bytes_max):
    """Whole pages of their own, as large as allowed; each tensor in one."""
    pieces = sorted(simulation.registered.items())
    assert all(start % mmap.PAGESIZE == 0 and size <= size_bytes_max for start, size in pieces)
    assert all(start + size == after for (start, size), (after, _) in pairwise(pieces))
    for tensor in slab.tensors().values():
        assert any(start <= tensor.data_ptr() < tensor.data_ptr() + tensor.nbytes <= start + n for start, n in pieces)


def test_a_block_is_registered_in_pieces_between_tensors(no_pages):
    """N3: while one is, the driver keeps all processes of the host waiting. Copies across their borders are cut."""
    with Simulation(0) as simulation, Slab.allocate(table_of(*[100] * 25), pin=True) as slab:
        assert len(simulation.registered) == 3 and slab._pinned.reason == ""
        check_pieces(simulation, slab, 1 << 30)
        memory = slab.tensors()["t000"].new_empty(0).set_(slab.tensors()["t000"].untyped_storage())
        border = sorted(simulation.registered)[1] - memory.data_ptr()
        around = memory[border - 5000 : border + 5000]
        content = torch.randint(0, 256, (10_000,), dtype=torch.uint8)
        there = simulation.put(content, "t")
        simulation.devices[0].down([there], around)
        simulation.devices[0].up(around, [there])
        assert torch.equal(around, content) and simulation.calls["copy"] == 4
        simulation.check()
        with pytest.raises(RuntimeError, match="invalid argument"):  # the control: as one copy it is refused
            simulation.copy(0, there, around, "down")


def test_a_capture_begins_between_two_pieces(no_pages):
    """And so does whatever else waits for the driver. The control is the next piece, which waits for the capture."""
    with Simulation(0) as simulation:
        driver, closed = simulation.devices[0]._driver, threading.Event()
        register, capture = driver.register, threading.Thread(target=lambda: (gate.close(), closed.set()))

        def register_one(memory, **how):
            if not capture.ident:
                capture.start()
                while not gate.closed:
                    capture.join(0.001)
            return register(memory, **how)

        driver.register = register_one
        slab = Slab.allocate(table_of(*[100] * 25))
        assert closed.wait(PATIENCE_S)
        assert len(simulation.registered) == 1 and not slab._pinned.done.is_set()
        gate.open()
        assert slab._pinned.done.wait(PATIENCE_S) and len(simulation.registered) == 3
        capture.join()
        slab.close()


def test_pieces_are_smaller_where_large_ones_are_refused(no_pages):
    """Linux 6.11 to 6.13 pins no more than 2 GB at once: then nothing of ours was pinned."""
    with Simulation(0) as simulation:
        simulation.registers_at_most = 200 * MB
        with Slab.allocate(table_of(*[30] * 40), pin=True) as slab:
            assert slab._pinned.reason == ""
            check_pieces(simulation, slab, 200 * MB)
        with pytest.raises(UsageError, match=r"cannot pin 314\.6 MB of 377\.6 MB: error 1"):
            Slab.allocate(table_of(30, 300, 30), pin=True)
        slab = Slab.allocate(table_of(30, 300, 30))
        assert slab._pinned.done.wait(PATIENCE_S)
        pinned = [simulation.devices[0].is_fast(tensor) for tensor in slab.tensors().values()]
        assert pinned == [True, False, True]
        slab.close()
        pinning.wait_for_background(PATIENCE_S)
        assert not simulation.registered


def test_a_device_that_pins_nothing_is_asked_once_for_each_size(no_pages):
    with Simulation(0) as simulation:
        simulation.registers_at_most = 0
        slab = Slab.allocate(table_of(*[30] * 200))
        assert slab._pinned.done.wait(PATIENCE_S)
        assert simulation.calls["register"] < 8 and "6.3 GB of 6.3 GB" in slab._pinned.reason
        slab.close()


@pytest.mark.parametrize(
    ("size_bytes", "pinned_at_once", "copies"),
    [
        (64 << 10, None, 1),
        (64 << 10, 1 << 30, 1),
        pytest.param(PIECE_SIZE_BYTES, 2 * PIECE_SIZE_BYTES, 2, marks=pytest.mark.slow),
    ],
)
def test_neighbours_are_copied_together_and_never_over_two_pieces(size_bytes, pinned_at_once, copies):
    """N15: experts of a layer, of which each is a tensor. None: it is not pinned. Others are copied one by one."""
    with Simulation(0, piece_size_bytes=1 << 30) as simulation:
        simulation.registers_at_most, experts = pinned_at_once or 0, 4
        specs = [TensorSpec(f"t{k}", "uint8", (size_bytes,), size_bytes) for k in range(experts)]
        slab = Slab.allocate(specs, pin=pinned_at_once is not None)
        for k, tensor in enumerate(slab.tensors().values()):
            tensor.fill_(k + 1)
        live = simulation.put(torch.zeros(experts, size_bytes, dtype=torch.uint8))
        pairs = list(zip(live, slab.tensors().values(), strict=True))
        simulation.calls.clear()
        copy_all(pairs)
        assert [(each.min(), each.max()) for each in simulation.true(live)] == [(k + 1, k + 1) for k in range(experts)]
        assert simulation.calls["copy"] == copies
        simulation.calls.clear()
        copy_all(pairs[::-1])  # the control
        assert simulation.calls["copy"] == experts
        slab.close()
        simulation.check()


class Half:
    """A device's bytes, and unpinned host memory of two pieces; not shown where a test fails, as nobody may read it."""

    def __init__(self, simulation, host):
        self.simulation, self.device = simulation, simulation.devices[0]
        self.there = simulation.put(torch.zeros(2 * SIZE, dtype=torch.uint8))
        self.host, self.piece = host, host[:SIZE]

    def copy(self, direction):
        if direction == "down":
            self.device.down([self.there], self.host)
        else:
            self.device.up(self.host, [self.there])


@pytest.fixture
def half(no_pages):
    specs = [TensorSpec(name, "uint8", (SIZE,), SIZE) for name in "ab"]
    with Simulation(0) as simulation, Slab.allocate(specs, pin=False) as slab:
        yield Half(simulation, torch.as_strided(slab.tensors()["a"], (2 * SIZE,), (1,)))
        simulation.check()


@pytest.mark.parametrize("direction", ["down", "up"])
def test_a_copy_while_a_piece_is_pinned_does_not_span_it(half, direction, monkeypatch):
    """As of a version that is installed, or published, while its memory is pinned in the background."""
    register = half.device._driver.register

    def registering(memory, *, read_only=False):
        reason = register(memory, read_only=read_only)
        copy = threading.Thread(target=half.copy, args=[direction])
        copy.start()
        copy.join(PATIENCE_S)
        return reason

    monkeypatch.setattr(half.device._driver, "register", registering)
    assert half.device.register(half.piece) == ""
    assert half.simulation.faults == []
    half.device.unregister(half.piece)


def test_no_piece_is_pinned_between_the_look_at_pieces_and_the_copy(half):
    """Neighbours that are one copy, which is queued when the next pair is asked for."""
    pinning_it = threading.Thread(target=half.device.register, args=[half.piece])

    def pairs():
        yield half.there[:SIZE], half.host[:SIZE]
        yield half.there[SIZE:], half.host[SIZE:]
        pinning_it.start()
        while half.host.data_ptr() not in half.device._borders:  # it is noted, or even pinned
            pass
        yield half.host[:1], half.there[:1]

    copy_all(pairs())
    pinning_it.join(PATIENCE_S)
    assert half.simulation.faults == [] and half.device.is_fast(half.piece)  # it was pinned afterwards
    half.device.unregister(half.piece)


def test_a_pinning_that_fails_leaves_no_border(half):
    half.simulation.registers_at_most = 0
    assert half.device.register(half.piece) == "error 1" and half.device._borders == []
    half.simulation.registers_at_most = SIZE
    with half.device.queueing():  # by this thread itself: it is not waited for
        assert half.device.register(half.piece) == "" and len(half.device._borders) == 2
    half.device.unregister(half.piece)
    assert half.device._borders == []


@pytest.mark.parametrize("fails", ["what gives the pairs", "a copy"])
def test_copies_are_waited_for_after_an_error_too(fails):
    """Else a caller releases host memory that the device still writes, or reads."""
    with Simulation(0) as simulation:
        simulation.random.random = lambda: 1.0  # nothing runs that nobody waits for
        there, host = simulation.put(torch.full((200,), 7, dtype=torch.uint8)), torch.zeros(200, dtype=torch.uint8)

        def pairs():
            yield host[:100], there[100:]  # no neighbour of the next one
            yield host[100:], there[:100]
            if fails == "what gives the pairs":
                raise ValueError("no more")
            simulation.fail("copy")
            yield host[:1], there[5:6]

        with pytest.raises((ValueError, RuntimeError)):
            copy_all(pairs())
        assert set(host[:100].tolist()) == {7}
        simulation.check()


def test_what_only_seems_to_be_a_neighbour_is_copied_as_it_is():
    """Within one memory, transposed, of another dtype, in another order at one end."""
    source, target = torch.arange(64.0).view(8, 8), torch.zeros(8, 8)
    for name, pairs in {
        "one after the other": [(target[:4], source[:4]), (target[4:], source[4:])],
        "transposed": [(target[:, :4], source[:, :4]), (target[:, 4:], source[:, 4:])],
        "turned": [(target[:4], source[4:]), (target[4:], source[:4])],
        "cast": [(target[:4], source.half()[:4]), (target[4:], source.half()[4:])],
    }.items():
        copy_all(pairs)
        expected = torch.cat([source[4:], source[:4]]) if name == "turned" else source
        assert torch.equal(target, expected), name
    copy_all([(target[1:2], target[:1]), (target[2:3], target[1:2])])
    assert torch.equal(target[:3], source[:1].expand(3, 8))


@pytest.mark.parametrize("seed", range(6))
def test_memory_that_is_not_pinned_goes_by_way_of_pinned_pieces(seed):
    """N4: of any dtype and strides, up and down. The control: one copy of it is not."""
    with Simulation(seed, piece_size_bytes=9_000) as simulation:
        sources = [
            torch.randn(70, 50),
            torch.randn(50, 70).t(),
            torch.randn(1, 1, 9_000).bfloat16(),
            torch.randn(40, 60)[:, 7:29],
            torch.tensor(5),
            torch.randint(0, 256, (70_001,), dtype=torch.uint8),
            torch.zeros(0, 4),
        ]
        targets = [simulation.put(torch.zeros(source.shape, dtype=source.dtype)) for source in sources[:-1]]
        cast = simulation.put(torch.zeros(70, 50, dtype=torch.float64), "cast")
        copy_all([*zip(targets, sources, strict=False), (cast, sources[0])])
        for target, source in zip(targets, sources, strict=False):
            assert torch.equal(simulation.true(target), source)
        assert torch.equal(simulation.true(cast), sources[0].double())
        flats = [simulation.put(part) for part in torch.split(sources[5], [1, 30_000, 40_000])]
        host = torch.empty(70_001, dtype=torch.uint8)
        down(simulation.devices[0], flats, host, simulation.devices[0].mark())
        assert torch.equal(host, sources[5])
        assert simulation.pageable_bytes == 0
        simulation.check()
        simulation.devices[0].up(host[:100], [flats[2][:100]])
        assert simulation.pageable_bytes == 100
