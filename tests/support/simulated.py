"""A simulated device, for `devices.using`: the real copies and waits of devices.py, on memory whose order is checked.

    with Simulation(seed=1) as simulation:
        weight = simulation.put(torch.ones(1000), "weight")     # host access to its memory dies of SIGSEGV
        with Slab.adopt({"weight": weight}) as slab: ...
        assert simulation.content(weight) == ...
        simulation.check()                                      # AssertionError with every fault that was seen

Streams are queues. What is queued runs when the host waits for it, in a seeded random order that streams and events
permit, together with some not yet waited for; until then its destination holds POISON, or what was there before.
The addresses of its memory are protected: a pointer of the device that is used as one of the host, by torch, by a
socket or by us, ends the process, and Python's faulthandler says where. Found are
* two operations that touch the same bytes, one of them writing, while no event or wait says which comes first: both are
  named. The host counts as one thread here, that waits and queues in the order in which its threads do;
* memory that is freed while a stream other than the one it was taken for may still touch it: torch hands it out
  again at once;
* calls to the device by another thread than the one that captures, or with another device than the call is for (each
  device that a thread has touched is in `contexts`);
* a copy that touches a registration and memory beside it, which CUDA refuses.
Host memory that a queued copy still writes (`offload`) holds POISON as well, and `is_coming` until it is waited for.
`fail` makes calls fail. As in torch, no stream waits for the default one.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import random
import threading
import weakref
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch

from tensorhub_plugins.core.device import devices
from tensorhub_plugins.core.device.graph_capture import acting
from tensorhub_plugins.core.device.kernels.launch import Computation
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.memory.tensors import flat_bytes, is_dense, span_of

POISON = 0x5A
EAGER = 0.3  # how often an operation runs that was not waited for

Clock = dict[str, int]  # how much of each stream is known to be done
DEFAULT = "default"


@dataclass
class _Region:
    """Device memory. true: its bytes, which are not those at its address unless it was adopted in place."""

    device: int
    name: str
    start: int
    stop: int
    true: torch.Tensor  # uint8
    stream: str  # in whose order it is handed out again


@dataclass(frozen=True)
class _Access:
    start: int
    stop: int
    writes: bool
    where: str  # for people


@dataclass
class _Event:
    stream: _Stream
    position: int
    clock: Clock


@dataclass
class _Operation:
    label: str
    run: Callable[[], None]
    accesses: list[_Access]
    stream: str
    tick: int


@dataclass
class _Stream:
    name: str
    device: int
    queue: deque[_Operation | _Event] = field(default_factory=deque)  # an event: to be waited for
    queued: int = 0
    done: int = 0
    clock: Clock = field(default_factory=dict)


class Simulation:
    """All devices of a process, `count` of them. Any thread may call."""

    def __init__(self, seed: int, *, count: int = 1, piece_size_bytes: int = devices.PIECE_SIZE_BYTES) -> None:
        self.random = random.Random(seed)
        self.devices = [
            devices.Device(f"simulated:{index}", Simulated(self, index), piece_size_bytes=piece_size_bytes)
            for index in range(count)
        ]
        self.contexts: dict[int, set[str]] = {}  # device -> names of the threads that have touched it
        self.calls: Counter[str] = Counter()
        self.registered: dict[int, int] = {}  # address -> size
        self.buffers: dict[int, int] = {}  # the same, of pinned memory that the driver has handed out
        self.read_only: set[int] = set()  # of them
        self.registers_at_most = 1 << 60  # bytes in one call, as some kernels do
        self.pins_read_only = True  # most cards do not
        self.pageable_bytes = 0  # that were copied from or to host memory that is not pinned
        self.room_size_bytes = 1 << 40  # that nothing else has needed
        self.numa_nodes: dict[int, int] = {}  # of devices that are beside one
        self.faults: list[str] = []
        self._fails: Counter[str] = Counter()
        self._lock = threading.RLock()
        self._mine = threading.local()
        self._regions: list[_Region] = []  # by address
        self._starts: list[int] = []
        self._streams: dict[tuple[int, str], _Stream] = {}
        self._host: Clock = {}
        self._recent: list[_Operation] = []  # what the host has not waited for
        self._capturing: int | None = None
        self._using: AbstractContextManager[None] | None = None
        self._offloaded: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __enter__(self) -> Simulation:
        self._using = devices.using(self)
        self._using.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._using is not None
        self._using.__exit__(None, None, None)

    # --- the platform ---

    def of(self, tensor: torch.Tensor) -> devices.Device | None:
        region = self._region(tensor.data_ptr())
        return None if region is None else self.devices[region.device]

    def here(self, *, begins: bool = False) -> devices.Device | None:
        return self.devices[self.current]

    def in_use(self) -> Sequence[devices.Device]:
        return self.devices

    def carried(self) -> Callable[[], AbstractContextManager[None]]:
        chosen = dict(self._mine.__dict__)

        @contextmanager
        def there() -> Iterator[None]:
            before = dict(self._mine.__dict__)
            self._mine.__dict__.update(chosen)
            try:
                yield
            finally:
                self._mine.__dict__.clear()
                self._mine.__dict__.update(before)

        return there

    # --- for tests ---

    def put(self, tensor: torch.Tensor, name: str = "", *, device: int = 0) -> torch.Tensor:
        """Return a copy of a dense host tensor, of the same dtype, shape and strides, in this device's memory."""
        memory = self._protected(device, name, flat_bytes(tensor).clone(), self.stream_of(device, DEFAULT))
        return torch.empty(0, dtype=tensor.dtype).set_(memory.untyped_storage(), 0, tensor.shape, tensor.stride())

    def adopt_in_place(self, tensors: dict[str, torch.Tensor], *, device: int = 0) -> Slab:
        """Return a slab of these host tensors, whose memory counts as the device's from now on. Tests can read it."""
        for name, tensor in tensors.items():
            if tensor.numel() and self._region(tensor.data_ptr()) is None:
                self.take(tensor, name, device=device)
        return Slab.adopt(tensors)

    def take(self, tensor: torch.Tensor, name: str = "", *, device: int = 0) -> None:
        """Count the memory of this host tensor as the device's from now on, though tests can read it."""
        flat = flat_bytes(tensor)
        stream = self.stream_of(device, DEFAULT).name
        self._add(_Region(device, name, flat.data_ptr(), flat.data_ptr() + flat.numel(), flat, stream))

    def content(self, tensor: torch.Tensor) -> bytes:
        """Return its bytes, as far as operations have run."""
        return self.true(flat_bytes(tensor)).numpy().tobytes()

    @torch.inference_mode(False)
    def true(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the device's real bytes of such a tensor, as far as operations have run; a host tensor itself."""
        region = self._region(tensor.data_ptr()) if tensor.numel() else None
        if region is None:
            return tensor
        offset = region.true.storage_offset() + tensor.data_ptr() - region.start
        found = torch.empty(0, dtype=tensor.dtype)
        storage = region.true.untyped_storage()
        return found.set_(storage, offset // tensor.element_size(), tensor.shape, tensor.stride())

    def kernel(self, tensor: torch.Tensor, value: int, stream: str = "compute", *, device: int = 0) -> None:
        """Queue a kernel that sets each byte to a value."""
        fill = self._filling(tensor, value)
        self._queue(f"kernel sets {value}", device, stream, [], [tensor], fill)

    def offload(self, host: torch.Tensor, value: int, *, device: int = 0) -> None:
        """Queue a kernel, and behind it a copy of what it makes into this (pinned) host memory, as a framework does
        that offloads weights with non_blocking=True: POISON is there until the device is waited for."""
        made = self.put(torch.zeros(flat_bytes(host).numel(), dtype=torch.uint8), "offloaded", device=device)
        self.kernel(made, value, "offload", device=device)
        self.copy(device, made, flat_bytes(host), "offload")
        self._offloaded.append((made, host))  # neither goes while the copy is queued

    def is_coming(self, host: torch.Tensor) -> bool:
        """Return whether a queued operation writes this host memory and has not been waited for."""
        mine = self._access(host, False)
        with self._lock:
            accesses = [access for each in self._recent for access in each.accesses]
        return any(access.writes and _overlap(access, mine) for access in accesses)

    def reading_kernel(self, tensor: torch.Tensor, stream: str = "compute", *, device: int = 0) -> list[bytes]:
        """Queue a kernel that reads a tensor. The list gets what it has read, when it has run."""
        found: list[bytes] = []
        true = self.true(flat_bytes(tensor))
        self._queue("kernel", device, stream, [tensor], [], lambda: found.append(true.numpy().tobytes()))
        return found

    def touch(self, memory: torch.Tensor, what: str, *, writes: bool = False) -> None:
        """Note that the host reads or writes this host memory now, which must not overlap a copy."""
        self._compare(what, self._host, [self._access(memory, writes)])

    def fail(self, call: str, times: int = 1) -> None:
        """Let the next calls of this name fail for want of memory: "register", "copy", "scratch", "buffer"."""
        self._fails[call] += times

    @contextmanager
    def stream(self, name: str) -> Iterator[None]:
        """Set the calling thread's own stream."""
        before, self._mine.stream = getattr(self._mine, "stream", DEFAULT), name
        try:
            yield
        finally:
            self._mine.stream = before

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Capture a graph in the calling thread."""
        self._capturing = acting()
        try:
            yield
        finally:
            self._capturing = None

    def check(self) -> None:
        """AssertionError that names what was found."""
        if self.faults:
            raise AssertionError("\n".join(self.faults))

    @property
    def current(self) -> int:
        """Return the calling thread's device; 0 until it has chosen one."""
        return getattr(self._mine, "device", 0)

    # --- for the driver ---

    @contextmanager
    def choosing(self, device: int) -> Iterator[None]:
        """Set the calling thread's device."""
        before, self._mine.device = self.current, device
        try:
            yield
        finally:
            self._mine.device = before

    def called(self, call: str) -> None:
        """Note a thread's call. Raise torch.OutOfMemoryError if it is to fail."""
        with self._lock:
            self.calls[call] += 1
            thread = threading.current_thread().name
            self.contexts.setdefault(self.current, set()).add(thread)
            if self._capturing not in (None, acting()):
                self.faults.append(f"{call} by thread {thread} while graphs are captured")
                raise RuntimeError("operation not permitted when stream is capturing")
            if self._fails[call]:
                self._fails[call] -= 1
                raise torch.OutOfMemoryError(f"simulated, at {call}")

    def stream_of(self, device: int, name: str | None) -> _Stream:
        """Return the stream of this name; None: the calling thread's own."""
        name = getattr(self._mine, "stream", DEFAULT) if name is None else name
        with self._lock:
            return self._streams.setdefault((device, name), _Stream(f"{device}/{name}", device))

    def copy(self, device: int, source: torch.Tensor, target: torch.Tensor, stream: str | None) -> None:
        """Queue one copy."""
        for side in (source, target):
            if self._region(side.data_ptr()) is None:
                start = side.data_ptr()
                self.pageable_bytes += 0 if self.is_pinned(side) else side.nbytes
                self._check_registration(start, start + span_of(side), writes=side is target)

        # The bytes alone: what is queued does not keep the device's memory, as it does not on a real one.
        true_target, true_source = self.true(target), self.true(source)
        self._queue("copy", device, stream, [source], [target], lambda: _set(true_target, true_source))

    def is_pinned(self, host: torch.Tensor) -> bool:
        """Return whether this host memory is within one registration, or a buffer."""
        start, known = host.data_ptr(), [*self.buffers.items(), *self.registered.items()]
        return any(first <= start and start + host.nbytes <= first + size_bytes for first, size_bytes in known)

    def launch(
        self,
        device: int,
        computation: Computation,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        stream: str | None,
    ) -> None:
        """Queue one computation on the device's memory."""
        true_reads, true_writes = list(map(self.true, reads)), list(map(self.true, writes))

        def run() -> None:
            computation(true_reads, true_writes, torch.from_numpy)

        self._queue(computation.__name__, device, stream, reads, writes, run)

    def scratch(self, device: int, size_bytes: int, stream: str | None) -> torch.Tensor:
        """Device memory with nothing in it, for this stream."""
        empty = torch.full((size_bytes,), POISON, dtype=torch.uint8)
        return self._protected(device, "scratch", empty, self.stream_of(device, stream))

    def record(self, device: int, stream: str | None) -> _Event:
        """Return an event after everything queued so far."""
        with self._lock:
            of = self.stream_of(device, stream)
            return _Event(of, of.queued, dict(of.clock))

    def order(self, device: int, stream: str, event: _Event) -> None:
        """Have the stream wait."""
        with self._lock:
            of = self.stream_of(device, stream)
            of.queue.append(event)
            of.queued += 1
            _join(of.clock, event.clock)

    def wait(self, events: Sequence[_Event]) -> None:
        """Have the host wait."""
        with self._lock:
            for event in events:
                self._run_to(event)
                _join(self._host, event.clock)
            self._recent = [each for each in self._recent if self._host.get(each.stream, 0) < each.tick]

    def wait_for_all(self, device: int) -> None:
        """Have the host wait for every stream of a device."""
        with self._lock:
            of = [stream for stream in self._streams.values() if stream.device == device]
            self.wait([_Event(stream, stream.queued, stream.clock) for stream in of])

    # --- inside ---

    def _protected(self, device: int, name: str, true: torch.Tensor, stream: _Stream) -> torch.Tensor:
        """Return uint8 over protected addresses: the device's while the tensor, or a view of it, lives."""
        size_bytes = true.numel()
        mapped = mmap.mmap(-1, max(size_bytes, 1))
        held = (ctypes.c_uint8 * len(mapped)).from_buffer(mapped)
        memory = torch.frombuffer(held, dtype=torch.uint8)
        start = memory.data_ptr()
        assert not ctypes.CDLL(None).mprotect(ctypes.c_void_p(start), ctypes.c_size_t(len(mapped)), 0)
        region = _Region(device, name, start, start + size_bytes, true, stream.name)
        self._add(region)
        # It keeps the mapping: until the region is removed, no other memory comes to lie at these addresses.
        weakref.finalize(held, self._remove, region, mapped).atexit = False
        return memory[:size_bytes]

    def _add(self, region: _Region) -> None:
        with self._lock:
            at = bisect_right(self._starts, region.start)
            self._starts.insert(at, region.start)
            self._regions.insert(at, region)

    def _remove(self, region: _Region, _mapped: mmap.mmap) -> None:
        with self._lock:
            at = next(at for at, each in enumerate(self._regions) if each is region)
            del self._starts[at], self._regions[at]
            whole = _Access(region.start, region.stop, True, region.name)
            known = next(each.clock for each in self._streams.values() if each.name == region.stream)
            for each in self._recent:
                touched = [access for access in each.accesses if _overlap(access, whole)]
                if touched and known.get(each.stream, 0) < each.tick:
                    self.faults.append(f"let go of: {touched[0].where}, while {each.label} may still touch it")
                # What comes to lie at these addresses is other memory.
                each.accesses = [access for access in each.accesses if access not in touched]

    def _filling(self, tensor: torch.Tensor, value: int) -> Callable[[], None]:
        true = self.true(flat_bytes(tensor)) if is_dense(tensor.shape, tensor.stride()) else None

        def fill() -> None:
            if true is not None:  # else there are others between its elements
                true.fill_(value)

        return fill

    def _region(self, address: int) -> _Region | None:
        with self._lock:
            at = bisect_right(self._starts, address) - 1
            return self._regions[at] if at >= 0 and address < self._regions[at].stop else None

    def _access(self, tensor: torch.Tensor, writes: bool) -> _Access:
        start, region = tensor.data_ptr(), self._region(tensor.data_ptr())
        where = f"host memory {start:#x}" if region is None else f"{region.name}[{start - region.start}:]"
        return _Access(start, start + span_of(tensor), writes, where)

    def _check_registration(self, start: int, stop: int, *, writes: bool) -> None:
        for first, size_bytes in list(self.registered.items()):  # at once: another thread may pin some
            if first in self.read_only and writes and first < stop and start < first + size_bytes:
                self.faults.append(f"a copy to [{start:#x}, {stop:#x}) writes to memory that was registered to be read")
                raise RuntimeError("CUDA error: invalid argument")
            if first < stop and start < first + size_bytes and not first <= start <= stop <= first + size_bytes:
                self.faults.append(f"a copy of [{start:#x}, {stop:#x}) touches a registration and memory beside it")
                raise RuntimeError("CUDA error: invalid argument")

    def _queue(
        self,
        what: str,
        device: int,
        stream: str | None,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        run: Callable[[], None],
    ) -> None:
        with self._lock:
            of = self.stream_of(device, stream)
            _join(of.clock, self._host)
            of.queued += 1
            of.clock[of.name] = of.queued
            accesses = [*(self._access(flat, False) for flat in reads), *(self._access(flat, True) for flat in writes)]
            label = f"{what} #{of.queued} of stream {of.name}"
            self._compare(label, of.clock, accesses)
            for flat, access in zip(writes, accesses[len(reads) :], strict=True):
                if not any(_overlap(access, other) for each in self._recent for other in each.accesses):
                    self._filling(flat, POISON)()  # it must not be relied on any more
            operation = _Operation(label, run, accesses, of.name, of.queued)
            of.queue.append(operation)
            self._recent.append(operation)
            if self.random.random() < EAGER:
                self._run_any()

    def _compare(self, label: str, clock: Clock, accesses: Sequence[_Access]) -> None:
        with self._lock:
            for each in self._recent:
                if clock.get(each.stream, 0) >= each.tick:
                    continue
                for one in each.accesses:
                    for other in accesses:
                        if (one.writes or other.writes) and _overlap(one, other):
                            verbs = ["writes" if access.writes else "reads" for access in (one, other)]
                            self.faults.append(
                                f"unordered: {each.label} {verbs[0]} {one.where}, {label} {verbs[1]} {other.where}"
                            )

    def _runnable(self, stream: _Stream) -> bool:
        head = stream.queue[0] if stream.queue else None
        return head is not None and (isinstance(head, _Operation) or head.stream.done >= head.position)

    def _step(self, stream: _Stream) -> None:
        head = stream.queue.popleft()
        stream.done += 1
        if isinstance(head, _Operation):
            head.run()

    def _run_any(self) -> None:
        runnable = [stream for stream in self._streams.values() if self._runnable(stream)]
        if runnable:
            self._step(self.random.choice(runnable))

    def _run_to(self, event: _Event) -> None:
        while event.stream.done < event.position:
            needed, at = [event.stream], 0
            while at < len(needed):  # whatever a needed stream waits for is needed
                heads = [item.stream for item in needed[at].queue if isinstance(item, _Event)]
                needed += [stream for stream in heads if stream not in needed]
                at += 1
            runnable = [stream for stream in needed if self._runnable(stream)]
            assert runnable, "the streams wait for each other"
            self._step(self.random.choice(runnable))
            if self.random.random() < EAGER:
                self._run_any()


class Simulated:
    """The driver of one of them."""

    def __init__(self, simulation: Simulation, index: int) -> None:
        self._simulation, self._index = simulation, index
        self._streams = itertools.count(1)

    def current(self) -> AbstractContextManager[object]:
        return self._simulation.choosing(self._index)

    def buffer(self, size_bytes: int) -> torch.Tensor:
        self._simulation.called("buffer")
        held = (ctypes.c_uint8 * max(size_bytes, 1))()
        host = torch.frombuffer(held, dtype=torch.uint8).fill_(POISON)
        buffers, address = self._simulation.buffers, host.data_ptr()
        buffers[address] = size_bytes
        weakref.finalize(held, buffers.pop, address, None).atexit = False
        return host[:size_bytes]

    def make_stream(self) -> str:
        self._simulation.called("make_stream")
        return f"copies {next(self._streams)}"

    def scratch(self, size_bytes: int, stream: str | None) -> torch.Tensor:
        self._simulation.called("scratch")
        return self._simulation.scratch(self._index, size_bytes, stream)

    def copy(self, source: torch.Tensor, target: torch.Tensor, stream: str | None) -> None:
        self._simulation.called("copy")
        self._simulation.copy(self._index, source, target, stream)

    def launch(
        self,
        computation: Computation,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        stream: str | None,
    ) -> None:
        self._simulation.called("launch")
        self._simulation.launch(self._index, computation, reads, writes, stream)

    def record(self, stream: str | None) -> _Event:
        self._simulation.called("record")
        return self._simulation.record(self._index, stream)

    def order(self, stream: str, event: _Event) -> None:
        self._simulation.called("order")
        self._simulation.order(self._index, stream, event)

    def wait(self, event: _Event) -> None:
        self._simulation.called("wait")
        self._simulation.wait([event])

    def synchronize(self) -> None:
        self._simulation.called("synchronize")
        self._simulation.wait_for_all(self._index)

    def room_size_bytes(self) -> int:
        return self._simulation.room_size_bytes

    def numa_node(self) -> int | None:
        return self._simulation.numa_nodes.get(self._index)

    def register(self, memory: torch.Tensor, *, read_only: bool = False) -> str:
        try:
            self._simulation.called("register")
        except torch.OutOfMemoryError as error:
            return str(error)
        if memory.numel() > self._simulation.registers_at_most:
            return "error 1"
        if read_only and not self._simulation.pins_read_only:
            return "error 801"
        self._simulation.registered[memory.data_ptr()] = memory.numel()
        if read_only:
            self._simulation.read_only.add(memory.data_ptr())
        return ""

    def unregister(self, memory: torch.Tensor) -> None:
        self._simulation.called("unregister")
        del self._simulation.registered[memory.data_ptr()]
        self._simulation.read_only.discard(memory.data_ptr())

    def is_fast(self, host: torch.Tensor) -> bool:
        return self._simulation.is_pinned(host)

    def allocation(self, address: int) -> tuple[int, int]:
        self._simulation.called("allocation")
        region = self._simulation._region(address)
        if region is None:
            raise OSError(f"{address:#x} is none of this device's")
        return region.start, region.stop

    def export_dma_buf(self, start: int, size_bytes: int) -> int:
        raise OSError("simulated memory is not exported")


@torch.inference_mode()  # in which a model's inference tensors can be written, and others
def _set(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


def _join(clock: Clock, other: Clock) -> None:
    for name, tick in other.items():
        clock[name] = max(tick, clock.get(name, 0))


def _overlap(one: _Access, other: _Access) -> bool:
    return one.start < other.stop and other.start < one.stop
