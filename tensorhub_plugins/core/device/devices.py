"""The devices: how bytes are copied between them and the host, and on which of them a tensor is.

Order
    Bytes are copied on streams of their own, one down (to the host) and one up for each device, made at first use. All
    other work is waited for where it is named: `after` an event of `mark` (this thread's stream), or `synchronize` (all
    that is queued on the device, by any thread). A copy has arrived when the call returns, or when `pieces` yields it.
    Host memory may be written by a foreign copy that is only queued (`tensor.to("cpu", non_blocking=True)`, as of an
    offload). Nothing shows which: `settle_host` waits for every device that this process uses.
Threads
    A new thread's current device is 0, and the first call would make a context there. Each call takes its own device.
Graphs
    While an engine captures CUDA graphs, any other thread's call invalidates the capture: they wait at `gate`.

`Device` composes copies; a driver (drivers.py) carries them out.
"""

from __future__ import annotations

import logging
import mmap
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from typing import Protocol, TypeVar

import torch

from tensorhub_plugins.core.device import drivers
from tensorhub_plugins.core.device.drivers import Driver, Event, Stream
from tensorhub_plugins.core.device.graph_capture import acting, acts_for, gate
from tensorhub_plugins.core.device.kernels.moving import move

logger = logging.getLogger(__name__)

PIECE_SIZE_BYTES = 32 << 20  # a copy of this size reaches the bus's speed, and delays others by a millisecond
SMALL_SIZE_BYTES = 64 << 10  # copying this takes as long as a launch; smaller ones are gathered on the device

Key = TypeVar("Key")
Cut = Callable[[int, int], Sequence[torch.Tensor]]  # the device's memory of a range, as uint8 tensors


# --- one device ---


class Device:
    """Copies between host memory and one device. Any thread may call; flats are uint8 tensors in the device's memory,
    which are consecutive in a stream of bytes."""

    def __init__(self, name: str, driver: Driver, *, piece_size_bytes: int = PIECE_SIZE_BYTES) -> None:
        self.name, self.piece_size_bytes, self._driver = name, piece_size_bytes, driver
        self._lock = threading.Lock()
        self._streams: dict[str, Stream] = {}  # by direction
        self._registered: dict[int, int] = {}  # host memory: first address -> the one after the last
        self._borders: list[int] = []  # of all that is registered, or is about to be, sorted
        self._copying: dict[object, int] = {}  # copies that are being queued: by which thread
        self._queued = threading.Condition(self._lock)

    def __repr__(self) -> str:
        return f"<Device {self.name}>"

    @contextmanager
    def calling(self) -> Iterator[Driver]:
        """Enter this thread's device for a call, while no graph is captured."""
        with gate.passing(), self._driver.current():
            yield self._driver

    def stream(self, direction: str) -> Stream:
        """Return the stream of all copies "down" to the host, or "up". Call it within `calling`."""
        with self._lock:
            if direction not in self._streams:
                self._streams[direction] = self._driver.make_stream()
            return self._streams[direction]

    def mark(self) -> Event:
        """Return an event of what this thread has queued on its stream."""
        with self.calling() as driver:
            return driver.record(None)

    def wait(self, event: Event) -> None:
        """Wait for what was queued before it."""
        with self.calling() as driver:
            driver.wait(event)

    def synchronize(self) -> None:
        """Wait for everything that is queued on the device."""
        with self.calling() as driver:
            driver.synchronize()

    def room_size_bytes(self) -> int:
        with self.calling() as driver:
            return driver.room_size_bytes()

    def numa_node(self) -> int | None:
        with self.calling() as driver:
            return driver.numa_node()

    def buffer(self, size_bytes: int) -> torch.Tensor:
        """Return uint8[size_bytes] of pinned host memory; freed buffers are reused."""
        with self.calling() as driver:
            return driver.buffer(size_bytes)

    def register(self, memory: torch.Tensor, *, read_only: bool = False) -> str:
        """Pin host memory, whole pages. Return why that failed, else "". read_only: it must not be written to."""
        start, stop = memory.data_ptr(), memory.data_ptr() + memory.numel()
        with self._queued:  # from now on no copy spans its ends; those that may have begun before
            self._borders = sorted({*self._borders, start, stop})
            others = {copy for copy, thread in self._copying.items() if thread != threading.get_ident()}
            self._queued.wait_for(lambda: others.isdisjoint(self._copying))
        reason = "not registered"
        try:
            with self.calling() as driver:
                reason = driver.register(memory, read_only=read_only)
        finally:
            self._note_registered(start, None if reason else stop)
        return reason

    def unregister(self, memory: torch.Tensor) -> None:
        with self.calling() as driver:
            driver.unregister(memory)
        self._note_registered(memory.data_ptr(), None)

    def _note_registered(self, start: int, stop: int | None) -> None:
        with self._lock:
            registered = {first: last for first, last in self._registered.items() if first != start}
            self._registered = registered if stop is None else {**registered, start: stop}
            self._borders = sorted({*self._registered, *self._registered.values()})

    @contextmanager
    def queueing(self) -> Iterator[None]:
        """Let no memory become registered between a look at `piece_of` and the copy that follows from it."""
        copy = object()
        with self._lock:
            self._copying[copy] = threading.get_ident()
        try:
            yield
        finally:
            with self._queued:
                del self._copying[copy]
                self._queued.notify_all()

    def piece_of(self, address: int) -> int:
        """Return a number that is the same for addresses of one registration: no copy may span two of them. Call it
        within `queueing`."""
        return bisect_right(self._borders, address)

    def is_fast(self, host: torch.Tensor, known: dict[int, bool] | None = None) -> bool:
        """Return whether copies from and to this host memory are fast. known: for many calls, the same of storages
        that were not registered here."""
        start = host.data_ptr()
        index, borders = bisect_right(self._borders, start), self._borders
        stop = self._registered.get(borders[index - 1]) if index else None
        if stop is not None and start < stop:
            return start + host.nbytes <= stop
        known, storage = {} if known is None else known, host.untyped_storage().data_ptr()
        if storage not in known:
            with self.calling() as driver:
                known[storage] = driver.is_fast(host)
        return known[storage]

    def down(self, flats: Sequence[torch.Tensor], host: torch.Tensor, *, after: Event | None = None) -> None:
        """Copy to host memory of the same size; return when it has arrived. after: what must be done before."""
        with self.calling() as driver:
            driver.wait(self._queue("down", flats, host, after))

    def begin_down(self, flats: Sequence[torch.Tensor], host: torch.Tensor, *, after: Event | None = None) -> Event:
        """Begin `down`, which is done at the returned event: see `wait`. Keep all of the memory until then."""
        with self.calling():
            return self._queue("down", flats, host, after)

    def up(self, host: torch.Tensor, flats: Sequence[torch.Tensor], *, after: Event | None = None) -> None:
        """Copy host memory to the device; return when it has arrived. after: what must be done before."""
        with self.calling() as driver:
            driver.wait(self._queue("up", flats, host, after))

    def allocation(self, address: int) -> tuple[int, int]:
        with self.calling() as driver:
            return driver.allocation(address)

    def export_dma_buf(self, address: int, size_bytes: int) -> tuple[int, int]:
        """Return (descriptor, which the caller closes, and offset in it) of a range of the device's memory, for a
        network card. Raise OSError, with the driver's reason."""
        start = address // mmap.PAGESIZE * mmap.PAGESIZE
        stop = -(-(address + size_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        with self.calling() as driver:
            return driver.export_dma_buf(start, stop - start), address - start

    def pieces(
        self, cut: Cut, ranges: Iterable[tuple[int, int]], *, after: Event | None = None
    ) -> Iterator[torch.Tensor]:
        """Yield host copies of these ranges, each valid until the next is requested, which is on its way meanwhile."""
        buffers: dict[int, torch.Tensor] = {}
        coming: tuple[Event, torch.Tensor] | None = None
        try:
            for number, (start, stop) in enumerate(ranges):
                before, size_bytes = coming, stop - start
                if number % 2 not in buffers or buffers[number % 2].numel() < size_bytes:
                    buffers[number % 2] = self.buffer(size_bytes)
                host = buffers[number % 2][:size_bytes]
                with self.calling() as driver:
                    coming = self._queue("down", cut(start, stop), host, after), host
                    if before is not None:
                        driver.wait(before[0])
                if before is not None:
                    yield before[1]
            if coming is not None:
                self.wait(coming[0])
                yield coming[1]
        finally:
            if coming is not None:
                self.wait(coming[0])  # a buffer that is still written to must not be reused

    def _queue(self, direction: str, flats: Sequence[torch.Tensor], host: torch.Tensor, after: Event | None) -> Event:
        driver, stream = self._driver, self.stream(direction)
        if after is not None:
            driver.order(stream, after)
        at = 0
        try:
            with self.queueing():
                for group, size_bytes in _groups(flats, self.piece_size_bytes):
                    part = host[at : at + size_bytes]
                    at += size_bytes
                    self._queue_group(direction, group, part, stream)
        except BaseException:
            driver.wait(driver.record(stream))  # the caller releases memory that a queued copy may still write
            raise
        return driver.record(stream)

    def _queue_group(self, direction: str, group: list[torch.Tensor], host: torch.Tensor, stream: Stream) -> None:
        driver, is_down = self._driver, direction == "down"
        if len(group) > 1:
            try:
                scratch = driver.scratch(host.numel(), stream)
            except torch.OutOfMemoryError:
                logger.debug("%s has no room to gather %d bytes", self.name, host.numel())
            else:
                if is_down:
                    driver.launch(move, group, [scratch], stream)
                self._copy(direction, scratch, host, stream)
                if not is_down:
                    driver.launch(move, [scratch], group, stream)
                return
        at = 0
        for flat in group:
            self._copy(direction, flat, host[at : at + flat.numel()], stream)
            at += flat.numel()

    def _copy(self, direction: str, flat: torch.Tensor, host: torch.Tensor, stream: Stream) -> None:
        """Queue the copies of this memory: CUDA refuses one that spans two registrations."""
        start, borders = host.data_ptr(), self._borders
        inside = borders[bisect_right(borders, start) : bisect_left(borders, start + host.numel())]
        for first, last in pairwise([0, *(border - start for border in inside), host.numel()]):
            pair = flat[first:last], host[first:last]
            self._driver.copy(*(pair if direction == "down" else pair[::-1]), stream)


def _groups(flats: Iterable[torch.Tensor], size_bytes_max: int) -> Iterator[tuple[list[torch.Tensor], int]]:
    """Yield what is copied at once, and its size: a large one, or a part of it; several consecutive small ones."""
    small: list[torch.Tensor] = []
    size_bytes = 0
    for flat in flats:
        count = flat.numel()
        is_small = count < SMALL_SIZE_BYTES
        if small and (not is_small or size_bytes + count > size_bytes_max):
            yield small, size_bytes
            small, size_bytes = [], 0
        if is_small:
            small.append(flat)
            size_bytes += count
        else:
            for start in range(0, count, size_bytes_max):
                part = flat[start : start + size_bytes_max]
                yield [part], part.numel()
    if small:
        yield small, size_bytes


# --- which devices there are ---


class Platform(Protocol):
    """All devices of this process."""

    def of(self, tensor: torch.Tensor) -> Device | None:
        """Return the device whose memory this is; None: the host's."""

    def here(self, *, begins: bool = False) -> Device | None:
        """Return the calling thread's device, if this process uses one already, or, with `begins`, if there is one."""

    def in_use(self) -> Sequence[Device]:
        """Return all devices that this process uses already."""

    def carried(self) -> Callable[[], AbstractContextManager[None]]:
        """Return a context with the calling thread's device and streams, for another thread to enter."""


class _Torch:
    """The devices of torch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[torch.device, Device] = {}

    def of(self, tensor: torch.Tensor) -> Device | None:
        device = tensor.device
        return None if device.type == "cpu" else self._known.get(device) or self._make(device)

    def here(self, *, begins: bool = False) -> Device | None:
        device = drivers.cuda_in_use(begins=begins)
        return None if device is None else self._known.get(device) or self._make(device)

    def in_use(self) -> Sequence[Device]:
        used = drivers.devices_in_use()
        known = [device for device in list(self._known) if any(device.type == each.type for each in used)]
        return [self._known.get(device) or self._make(device) for device in dict.fromkeys([*used, *known])]

    def carried(self) -> Callable[[], AbstractContextManager[None]]:
        return drivers.carried()

    def _make(self, device: torch.device) -> Device:
        with self._lock:
            if device not in self._known:
                self._known[device] = Device(str(device), drivers.driver_of(device))
            return self._known[device]


_platforms: list[Platform] = [_Torch()]


def of(tensor: torch.Tensor) -> Device | None:
    """Return the device whose memory this tensor is; None: the host's."""
    return _platforms[-1].of(tensor)


def here(*, begins: bool = False) -> Device | None:
    """Return the calling thread's device; None where this process does not use one yet. begins: it may begin now."""
    return _platforms[-1].here(begins=begins)


def carried() -> Callable[[], AbstractContextManager[None]]:
    """Return a context with what the calling thread has chosen, for a thread that works for it to enter: devices,
    streams, torch's modes, and the right to call a device while it captures graphs."""
    chosen, thread, count = _platforms[-1].carried(), acting(), torch.get_num_threads()
    infers, differentiates = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    @contextmanager
    def there() -> Iterator[None]:
        if torch.get_num_threads() != count:
            torch.set_num_threads(count)
        with chosen(), acts_for(thread), torch.inference_mode(infers), torch.set_grad_enabled(differentiates):
            yield

    return there


@contextmanager
def using(platform: Platform) -> Iterator[None]:
    """Use these devices, in all threads, instead of torch's. For tests."""
    _platforms.append(platform)
    try:
        yield
    finally:
        _platforms.remove(platform)


# --- tensors, on the host or on devices ---


def settle_host(tensors: Iterable[torch.Tensor]) -> None:
    """Wait for all that is queued on the devices in use, where some of these are in host memory: a copy from a device
    may still write it. Where no device is in use, wait for nothing, and begin to use none."""
    if any(isinstance(tensor, torch.Tensor) and of(tensor) is None for tensor in tensors):
        for device in _platforms[-1].in_use():
            device.synchronize()


def settled(
    named: Iterable[tuple[Key, torch.Tensor]], *, host_only: bool = False
) -> Iterator[tuple[Key, torch.Tensor]]:
    """Yield these once all that was queued on their devices before the first of them is done, on any stream: else the
    copy could see half of an optimizer step or an offload. Host memory likewise, whichever device writes it: once for a
    collection, whose tensors all exist, and else for each, which may just have been offloaded.

    host_only: tensors on a device are waited for by other means."""
    waited: set[Device] = set()
    is_settled = False
    for name, tensor in named:
        device = of(tensor) if isinstance(tensor, torch.Tensor) else None  # the consumer will refuse what is no tensor
        if device is None and not is_settled:
            settle_host([tensor])
            is_settled = isinstance(named, Collection)
        elif device is not None and device not in waited and not host_only:
            device.synchronize()
            waited.add(device)
        yield name, tensor


def on_host(flat: torch.Tensor) -> torch.Tensor:
    """Return a uint8 tensor's bytes in host memory: the tensor itself where it is there."""
    device = of(flat)
    if device is None:
        return flat
    host = device.buffer(flat.numel())
    device.down([flat], host, after=device.mark())
    return host


def synchronize(tensors: Iterable[torch.Tensor]) -> None:
    """Wait for all that is queued on the devices of these tensors; for host memory, on all that are in use."""
    found = {of(tensor) for tensor in tensors}  # one pass, which the caller's iterable may end at a deadline
    used = _platforms[-1].in_use() if None in found else ()
    for device in {device for device in (*found, *used) if device is not None}:
        device.synchronize()
