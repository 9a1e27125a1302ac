"""The devices: nothing else here calls torch.cuda, copies between host and device, pins memory or knows a stream.

Order
    Bytes are copied on streams of their own, one down (to the host) and one up for each device, made at first use. Work
    of others is waited for where it is named: `after` an event of `mark` (this thread's stream), or `synchronize` (all
    that is queued on the device, by whomever). A copy has arrived when the call returns, or when `pieces` yields it.
Threads
    A new thread's current device is 0, and the first call would make a context there. Each call takes its own device.
Graphs
    While an engine captures CUDA graphs, any other thread's call invalidates the capture: they wait at `gate`.

`Device` puts copies together; a `Driver` carries them out: `Cuda`, `Other` (any accelerator of torch's), `Plain` (what
has no queues), and a simulated one that checks their order (testing/simulated.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy.typing as npt
import torch

from tensorhub_plugins.core import libcuda
from tensorhub_plugins.core.capturing import gate
from tensorhub_plugins.core.kernels.launch import Computation
from tensorhub_plugins.core.kernels.moving import move

logger = logging.getLogger(__name__)
_cuda: Any = torch.cuda  # much of it has no types

PIECE_SIZE_BYTES = 32 << 20  # at this size a copy has reached the bus's speed, and others wait a millisecond for it
HOST_REGISTER_READ_ONLY = 8  # cudaHostRegisterReadOnly, driver_types.h
SMALL_SIZE_BYTES = 64 << 10  # to launch a copy takes as long as to copy this; smaller ones are gathered on the device

Event = Any
Stream = Any
Key = TypeVar("Key")
Cut = Callable[[int, int], Sequence[torch.Tensor]]  # the device's memory of a range, as uint8 tensors


class Driver(Protocol):
    """One device's calls, each of which only queues what it says. Tensors are uint8, contiguous, but those of a single
    copy. stream: None is the calling thread's own."""

    def current(self) -> AbstractContextManager[object]:
        """Within it this is the calling thread's device."""

    def buffer(self, size_bytes: int) -> torch.Tensor:
        """Host memory that copies are fast from and to."""

    def make_stream(self) -> Stream:
        """A stream that is ordered with no other."""

    def scratch(self, size_bytes: int, stream: Stream | None) -> torch.Tensor:
        """Device memory for this stream. torch.OutOfMemoryError."""

    def copy(self, source: torch.Tensor, target: torch.Tensor, stream: Stream | None) -> None:
        """One copy, from where to where the two lie."""

    def launch(
        self, computation: Computation, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], stream: Stream
    ) -> None:
        """Compute on the device's memory."""

    def record(self, stream: Stream | None) -> Event:
        """An event behind all that is queued on the stream."""

    def order(self, stream: Stream, event: Event) -> None:
        """What is queued on the stream from now on runs after the event."""

    def wait(self, event: Event) -> None:
        """The host waits for the event."""

    def synchronize(self) -> None:
        """The host waits for all streams of the device."""

    def free_size_bytes(self) -> int:
        """Memory that `scratch` can have."""

    def numa_node(self) -> int | None:
        """The host's node that it is on; None: not known."""

    def register(self, memory: torch.Tensor, *, read_only: bool = False) -> str:
        """Pin this host memory; why that failed, "" when it is done. A failure leaves no error behind. read_only: it
        must not be written to."""

    def unregister(self, memory: torch.Tensor) -> None:
        """Undo `register`."""

    def allocation(self, address: int) -> tuple[int, int]:
        """The first address and the one behind the last of the allocation that this lies in. OSError."""

    def export_dma_buf(self, start: int, size_bytes: int) -> int:
        """A descriptor of whole pages of the device's memory, which the caller closes. OSError."""


# --- one device ---


class Device:
    """Copies between host memory and one device. Any thread may call; flats are uint8 tensors in the device's memory,
    one after the other in a stream of bytes."""

    def __init__(self, name: str, driver: Driver, *, piece_size_bytes: int = PIECE_SIZE_BYTES) -> None:
        self.name = name
        self.piece_size_bytes = piece_size_bytes
        self._driver = driver
        self._lock = threading.Lock()
        self._streams: dict[str, Stream] = {}  # by direction

    def __repr__(self) -> str:
        return f"<Device {self.name}>"

    @contextmanager
    def calling(self) -> Iterator[Driver]:
        """Around every call: this thread's device, and no graph is captured."""
        with gate.passing(), self._driver.current():
            yield self._driver

    def stream(self, direction: str) -> Stream:
        """That of all copies "down" to the host, or "up". Within `calling`."""
        with self._lock:
            if direction not in self._streams:
                self._streams[direction] = self._driver.make_stream()
            return self._streams[direction]

    def mark(self) -> Event:
        """An event of what this thread has queued on its stream."""
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

    def free_size_bytes(self) -> int:
        """Its memory that is not in use."""
        with self.calling() as driver:
            return driver.free_size_bytes()

    def numa_node(self) -> int | None:
        """The host's node that it is on; None: not known."""
        with self.calling() as driver:
            return driver.numa_node()

    def buffer(self, size_bytes: int) -> torch.Tensor:
        """uint8[size_bytes] of host memory, pinned: what has been used before is used again."""
        with self.calling() as driver:
            return driver.buffer(size_bytes)

    def down(self, flats: Sequence[torch.Tensor], host: torch.Tensor, *, after: Event | None = None) -> None:
        """Copy to host memory of the same size; it is there when this returns. after: what must have been done."""
        with self.calling() as driver:
            driver.wait(self._queue("down", flats, host, after))

    def begin_down(self, flats: Sequence[torch.Tensor], host: torch.Tensor, *, after: Event | None = None) -> Event:
        """`down`, which is done at this event: see `wait`. Until then nobody may let go of any of the memory."""
        with self.calling():
            return self._queue("down", flats, host, after)

    def up(self, host: torch.Tensor, flats: Sequence[torch.Tensor], *, after: Event | None = None) -> None:
        """Copy host memory to the device; it is there when this returns. after: what must have been done."""
        with self.calling() as driver:
            driver.wait(self._queue("up", flats, host, after))

    def allocation(self, address: int) -> tuple[int, int]:
        """The first address and the one behind the last of the allocation that this lies in. OSError."""
        with self.calling() as driver:
            return driver.allocation(address)

    def export_dma_buf(self, address: int, size_bytes: int) -> tuple[int, int]:
        """(descriptor, which the caller closes, and offset in it) of a range of the device's memory, for a network
        card. OSError, with the driver's reason."""
        start = address // mmap.PAGESIZE * mmap.PAGESIZE
        stop = -(-(address + size_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        with self.calling() as driver:
            return driver.export_dma_buf(start, stop - start), address - start

    def pieces(self, cut: Cut, ranges: Iterable[tuple[int, int]]) -> Iterator[torch.Tensor]:
        """Host copies of these ranges, each good until the next one is asked for: that one is on its way meanwhile."""
        buffers: dict[int, torch.Tensor] = {}
        coming: tuple[Event, torch.Tensor] | None = None
        try:
            for number, (start, stop) in enumerate(ranges):
                before, size_bytes = coming, stop - start
                if number % 2 not in buffers or buffers[number % 2].numel() < size_bytes:
                    buffers[number % 2] = self.buffer(size_bytes)
                host = buffers[number % 2][:size_bytes]
                with self.calling() as driver:
                    coming = self._queue("down", cut(start, stop), host, None), host
                    if before is not None:
                        driver.wait(before[0])
                if before is not None:
                    yield before[1]
            if coming is not None:
                self.wait(coming[0])
                yield coming[1]
        finally:
            if coming is not None:
                self.wait(coming[0])  # a buffer that is still written to must not be anybody else's

    def _queue(self, direction: str, flats: Sequence[torch.Tensor], host: torch.Tensor, after: Event | None) -> Event:
        driver, stream = self._driver, self.stream(direction)
        if after is not None:
            driver.order(stream, after)
        at = 0
        try:
            for group, size_bytes in _groups(flats, self.piece_size_bytes):
                part = host[at : at + size_bytes]
                at += size_bytes
                self._queue_group(direction, group, part, stream)
        except BaseException:
            driver.wait(driver.record(stream))  # the caller lets go of memory that some of it may still be writing
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
                    driver.copy(scratch, host, stream)
                else:
                    driver.copy(host, scratch, stream)
                    driver.launch(move, [scratch], group, stream)
                return
        at = 0
        for flat in group:
            part = host[at : at + flat.numel()]
            at += flat.numel()
            driver.copy(*((flat, part) if is_down else (part, flat)), stream)


def _groups(flats: Iterable[torch.Tensor], size_bytes_max: int) -> Iterator[tuple[list[torch.Tensor], int]]:
    """What is copied at once, and its size: a large one, or a part of it; several small ones that follow each other."""
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


# --- what carries it out ---


class Plain:
    """Copies as torch makes them, done when the call returns: what has no queues."""

    def current(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def buffer(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)

    def make_stream(self) -> Stream:
        return None

    def scratch(self, size_bytes: int, stream: Stream | None) -> torch.Tensor:
        raise torch.OutOfMemoryError("nothing is gathered here")

    def copy(self, source: torch.Tensor, target: torch.Tensor, stream: Stream | None) -> None:
        target.copy_(source)

    def launch(
        self, computation: Computation, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], stream: Stream
    ) -> None:
        computation(reads, writes, torch.from_numpy)

    def record(self, stream: Stream | None) -> Event:
        return None

    def order(self, stream: Stream, event: Event) -> None:
        pass

    def wait(self, event: Event) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def free_size_bytes(self) -> int:
        return 0

    def numa_node(self) -> int | None:
        return None

    def register(self, memory: torch.Tensor, *, read_only: bool = False) -> str:
        return "this device needs none"

    def unregister(self, memory: torch.Tensor) -> None:
        pass

    def allocation(self, address: int) -> tuple[int, int]:
        return 0, 1 << 64  # nothing is known of it

    def export_dma_buf(self, start: int, size_bytes: int) -> int:
        raise OSError("this device's memory is not exported")


class Other(Plain):
    """A device of which we know what torch knows of every accelerator: its copies follow the calling thread's stream,
    those to and from the host are done when the call returns, and all of its streams can be waited for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self._device)


class Cuda(Plain):
    """One CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current(self) -> AbstractContextManager[object]:
        guard: AbstractContextManager[object] = _cuda.device(self._device)
        return guard

    def buffer(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)  # torch keeps pinned blocks, and frees them

    def make_stream(self) -> Stream:
        return _cuda.Stream(self._device)

    def scratch(self, size_bytes: int, stream: Stream | None) -> torch.Tensor:
        with _cuda.stream(stream):  # whose memory it is: it is used again behind what is queued there
            return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)

    def copy(self, source: torch.Tensor, target: torch.Tensor, stream: Stream | None) -> None:
        with _cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def launch(
        self, computation: Computation, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], stream: Stream
    ) -> None:
        with _cuda.stream(stream):
            computation(reads, writes, self._upload)

    def _upload(self, table: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(table).to(self._device, non_blocking=True)  # pageable memory is read before it returns

    def record(self, stream: Stream | None) -> Event:
        event = _cuda.Event(blocking=True)  # who waits for it leaves its core to others
        event.record(_cuda.current_stream(self._device) if stream is None else stream)
        return event

    def order(self, stream: Stream, event: Event) -> None:
        stream.wait_event(event)

    def wait(self, event: Event) -> None:
        event.synchronize()

    def synchronize(self) -> None:
        _cuda.synchronize(self._device)

    def free_size_bytes(self) -> int:
        free, _ = _cuda.mem_get_info(self._device)  # and what torch keeps of it
        return int(free + _cuda.memory_reserved(self._device) - _cuda.memory_allocated(self._device))

    def numa_node(self) -> int | None:
        try:
            node = int(Path(f"/sys/bus/pci/devices/{_pci_address(self._device)}/numa_node").read_text())
        except (OSError, ValueError):
            return None
        return node if node >= 0 else None  # -1: the host has one, or does not say

    def register(self, memory: torch.Tensor, *, read_only: bool = False) -> str:
        flags = HOST_REGISTER_READ_ONLY if read_only else 0
        code = int(_cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), flags))
        if not code:
            return ""
        # torch only returns it, and the next kernel that this thread launches would fail with it.
        get_last_error = _get_last_error()
        if get_last_error is not None:
            get_last_error()
        else:
            with contextlib.suppress(RuntimeError):  # that of torch raises it, and it is gone
                torch.zeros(1, device=self._device)
        return f"error {code}"

    def unregister(self, memory: torch.Tensor) -> None:
        _cuda.cudart().cudaHostUnregister(memory.data_ptr())

    def allocation(self, address: int) -> tuple[int, int]:
        self._get_context()
        return libcuda.allocation(address)

    def export_dma_buf(self, start: int, size_bytes: int) -> int:
        self._get_context()
        return libcuda.export_dma_buf(start, size_bytes)

    def _get_context(self) -> None:
        """From the runtime: torch makes a new thread none on device 0, which it takes to be chosen already."""
        _cuda.current_stream(self._device).query()


@cache
def _get_last_error() -> Callable[[], int] | None:
    """cudaGetLastError of the library that torch has loaded: it says the calling thread's error, and forgets it."""
    with contextlib.suppress(OSError, AttributeError):
        paths = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcudart" in line]
        if paths:
            found: Callable[[], int] = ctypes.CDLL(paths[0]).cudaGetLastError
            return found
    return None


# --- which devices there are ---


class Platform(Protocol):
    """All devices of this process."""

    def of(self, tensor: torch.Tensor) -> Device | None:
        """The device whose memory this is; None: the host's."""

    def here(self, *, begins: bool = False) -> Device | None:
        """The calling thread's device, if this process uses one already, or, with `begins`, if there is one."""


class _Torch:
    """torch's own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[torch.device, Device] = {}

    def of(self, tensor: torch.Tensor) -> Device | None:
        device = tensor.device
        return None if device.type == "cpu" else self._known.get(device) or self._make(device)

    def here(self, *, begins: bool = False) -> Device | None:
        # A forked child of a process that uses CUDA cannot, and is_initialized() knows.
        if not _cuda.is_initialized() and not (begins and _cuda.is_available()):
            return None
        device = torch.device("cuda", _cuda.current_device())
        return self._known.get(device) or self._make(device)

    def _make(self, device: torch.device) -> Device:
        with self._lock:
            if device not in self._known:
                self._known[device] = Device(str(device), _driver_of(device))
            return self._known[device]


def _driver_of(device: torch.device) -> Driver:
    if device.type == "cuda":
        return Cuda(device)
    accelerator = torch.accelerator.current_accelerator()
    return Other(device) if accelerator is not None and accelerator.type == device.type else Plain()


_platforms: list[Platform] = [_Torch()]


def of(tensor: torch.Tensor) -> Device | None:
    """The device whose memory this tensor is; None: the host's."""
    return _platforms[-1].of(tensor)


def here(*, begins: bool = False) -> Device | None:
    """The calling thread's device; None where this process has not begun to use one. begins: it may begin now."""
    return _platforms[-1].here(begins=begins)


def is_there() -> bool:
    """Whether torch finds a CUDA device. It makes no context, and begins to use none."""
    return bool(_cuda.is_available())


@contextmanager
def using(platform: Platform) -> Iterator[None]:
    """For tests: these devices, in all threads, instead of torch's."""
    _platforms.append(platform)
    try:
        yield
    finally:
        _platforms.remove(platform)


# --- tensors, wherever they lie ---


def settled(named: Iterable[tuple[Key, torch.Tensor]]) -> Iterator[tuple[Key, torch.Tensor]]:
    """These, when all that was queued on their devices before the first of them is done, on whatever stream: an
    optimizer or an offload that still runs would be copied half way."""
    waited: set[Device] = set()
    for name, tensor in named:
        device = of(tensor) if isinstance(tensor, torch.Tensor) else None  # who asks for it will refuse what is none
        if device is not None and device not in waited:
            device.synchronize()
            waited.add(device)
        yield name, tensor


def copy_flat(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy one uint8 tensor over another of the same size, behind what this thread has queued, and wait for it. At
    least one of them is on a device."""
    origin, destination = of(source), of(target)
    if origin is not None and destination is None:
        origin.down([source], target, after=origin.mark())
    elif destination is not None and origin is None:
        destination.up(source, [target], after=destination.mark())
    else:
        copy_all([(target, source)])


def copy_all(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy over each target its source, any strides and devices, on this thread's stream; then wait for all of them."""
    drivers: dict[Device, Driver] = {}
    with contextlib.ExitStack() as calling:
        for target, source in pairs:
            device = of(target) or of(source)
            if device is None:
                target.copy_(source)
                continue
            if device not in drivers:
                drivers[device] = calling.enter_context(device.calling())
            drivers[device].copy(source, target, None)
        for device in drivers:
            device.synchronize()


def host_copy(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A contiguous copy in ordinary host memory, cast to this dtype."""
    host = torch.empty(tensor.shape, dtype=dtype)
    copy_all([(host, tensor.detach())])
    return host


def on_host(flat: torch.Tensor) -> torch.Tensor:
    """A uint8 tensor's bytes in host memory: itself where it lies there."""
    device = of(flat)
    if device is None:
        return flat
    host = device.buffer(flat.numel())
    device.down([flat], host, after=device.mark())
    return host


def synchronize(tensors: Iterable[torch.Tensor]) -> None:
    """Wait for all that is queued on the devices of these tensors."""
    for device in {device for tensor in tensors if (device := of(tensor)) is not None}:
        device.synchronize()


def release_cached_memory() -> None:
    """Give what torch keeps of freed device memory back; nothing where no device is used."""
    if _cuda.is_initialized():
        with gate.passing():
            _cuda.empty_cache()


def pci_address() -> str:
    """Of the calling thread's CUDA device, as in sysfs ("0000:3b:00.0"); "" where none is in use, or torch is old."""
    if not _cuda.is_initialized():
        return ""
    return _pci_address(_cuda.current_device())


def _pci_address(device: Any) -> str:
    properties = _cuda.get_device_properties(device)
    domain, bus, number = (getattr(properties, f"pci_{part}_id", -1) for part in ("domain", "bus", "device"))
    return "" if -1 in (domain, bus, number) else f"{domain:04x}:{bus:02x}:{number:02x}.0"
