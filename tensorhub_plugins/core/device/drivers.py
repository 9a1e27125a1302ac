"""The calls of one device, and their implementations: nothing else calls torch.cuda, pins memory or makes streams.

Drivers
    Cuda       one CUDA device
    Other      any accelerator that torch knows: it copies, and waits for all that is queued
    Plain      a device without queues
    Simulated  checks the order in which it is used (testing/simulated.py)
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy.typing as npt
import torch

from tensorhub_plugins.core.device import libcuda
from tensorhub_plugins.core.device.graph_capture import gate
from tensorhub_plugins.core.device.kernels.launch import Computation

_cuda: Any = torch.cuda  # much of it has no types

HOST_REGISTER_READ_ONLY = 8  # cudaHostRegisterReadOnly, driver_types.h
CUDA_ERRORS = {
    1: "invalid value: Linux 6.11 to 6.13 refuses more than 2 GB at once",
    2: "out of memory: free host memory, or raise the container's limit",
    801: "not supported: this card cannot pin what may only be read",
}

ROOM_KEPT = 64  # a part of the device's memory that is never used: steps differ

Event = Any
Stream = Any


class Driver(Protocol):
    """One device's calls, each of which only queues work. Tensors are uint8 and contiguous, except in a single copy.
    stream: None is the calling thread's own."""

    def current(self) -> AbstractContextManager[object]:
        """Make this the calling thread's device within the context."""

    def buffer(self, size_bytes: int) -> torch.Tensor:
        """Return host memory that copies are fast from and to."""

    def make_stream(self) -> Stream:
        """Return a stream that is not ordered with any other."""

    def scratch(self, size_bytes: int, stream: Stream | None) -> torch.Tensor:
        """Return device memory for this stream. Raise torch.OutOfMemoryError."""

    def copy(self, source: torch.Tensor, target: torch.Tensor, stream: Stream | None) -> None:
        """Copy source to target, each on the host or the device."""

    def launch(
        self, computation: Computation, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], stream: Stream
    ) -> None:
        """Compute on the device's memory."""

    def record(self, stream: Stream | None) -> Event:
        """Return an event after all that is queued on the stream."""

    def order(self, stream: Stream, event: Event) -> None:
        """Make what is queued on the stream from now on run after the event."""

    def wait(self, event: Event) -> None:
        """Make the host wait for the event."""

    def synchronize(self) -> None:
        """Make the host wait for all streams of the device."""

    def room_size_bytes(self) -> int:
        """Return the bytes of memory that `scratch` can have, and that nothing in this process has needed so far."""

    def numa_node(self) -> int | None:
        """Return the host's NUMA node that it is attached to; None: not known."""

    def register(self, memory: torch.Tensor, *, read_only: bool = False) -> str:
        """Pin this host memory; return why that failed, "" when it is done. A failure leaves no error behind.
        read_only: it must not be written to."""

    def unregister(self, memory: torch.Tensor) -> None:
        """Undo `register`."""

    def is_fast(self, host: torch.Tensor) -> bool:
        """Return whether copies from and to this host memory are as fast as they can be."""

    def allocation(self, address: int) -> tuple[int, int]:
        """Return the first address and the one after the last of the allocation around this one. Raise OSError."""

    def export_dma_buf(self, start: int, size_bytes: int) -> int:
        """Return a descriptor of whole pages of the device's memory, which the caller closes. Raise OSError."""


def driver_of(device: torch.device) -> Driver:
    """Return a new driver of a device that is not the host."""
    if device.type == "cuda":
        return Cuda(device)
    accelerator = torch.accelerator.current_accelerator()
    return Other(device) if accelerator is not None and accelerator.type == device.type else Plain()


class Plain:
    """The driver of a device without queues: copies are torch's, and done when the call returns."""

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

    def room_size_bytes(self) -> int:
        return 0

    def numa_node(self) -> int | None:
        return None

    def register(self, memory: torch.Tensor, *, read_only: bool = False) -> str:
        return "this device needs none"

    def unregister(self, memory: torch.Tensor) -> None:
        pass

    def is_fast(self, host: torch.Tensor) -> bool:
        return True

    def allocation(self, address: int) -> tuple[int, int]:
        return 0, 1 << 64  # not known

    def export_dma_buf(self, start: int, size_bytes: int) -> int:
        raise OSError("this device's memory is not exported")


class Other(Plain):
    """The driver of any accelerator, by what torch offers for all: copies follow the calling thread's stream, those to
    and from the host are done when the call returns, and all of its streams can be waited for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self._device)


class Cuda(Plain):
    """The driver of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current(self) -> AbstractContextManager[object]:
        guard: AbstractContextManager[object] = _cuda.device(self._device)
        return guard

    def buffer(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)  # torch caches pinned blocks, and frees them

    def make_stream(self) -> Stream:
        return _cuda.Stream(self._device)

    def scratch(self, size_bytes: int, stream: Stream | None) -> torch.Tensor:
        with _cuda.stream(stream):  # the stream that owns it: it is reused after what is queued there
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
        event = _cuda.Event(blocking=True)  # a thread that waits for it does not spin
        event.record(_cuda.current_stream(self._device) if stream is None else stream)
        return event

    def order(self, stream: Stream, event: Event) -> None:
        stream.wait_event(event)

    def wait(self, event: Event) -> None:
        event.synchronize()

    def synchronize(self) -> None:
        _cuda.synchronize(self._device)

    def room_size_bytes(self) -> int:
        # What torch has cached is in pieces, and the next step's. Its peak shows that of the last ones.
        free, total = _cuda.mem_get_info(self._device)
        never = free + _cuda.memory_reserved(self._device) - _cuda.max_memory_allocated(self._device)
        return int(max(0, min(free, never) - total // ROOM_KEPT))

    def numa_node(self) -> int | None:
        try:
            node = int(Path(f"/sys/bus/pci/devices/{_pci_address(self._device)}/numa_node").read_text())
        except (OSError, ValueError):
            return None
        return node if node >= 0 else None  # -1: the host has only one, or does not report it

    def register(self, memory: torch.Tensor, *, read_only: bool = False) -> str:
        flags = HOST_REGISTER_READ_ONLY if read_only else 0
        code = int(_cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), flags))
        if not code:
            return ""
        # torch only returns it, and the next kernel launch of this thread would fail with it.
        for get_last_error in _get_last_errors():
            get_last_error()
        if not _get_last_errors():
            with contextlib.suppress(RuntimeError):  # torch's next call raises it, which clears it
                torch.zeros(1, device=self._device)
        return f"error {code}, {CUDA_ERRORS[code]}" if code in CUDA_ERRORS else f"error {code}"

    def unregister(self, memory: torch.Tensor) -> None:
        _cuda.cudart().cudaHostUnregister(memory.data_ptr())

    def is_fast(self, host: torch.Tensor) -> bool:
        return host.is_pinned()

    def allocation(self, address: int) -> tuple[int, int]:
        self._get_context()
        return libcuda.allocation(address)

    def export_dma_buf(self, start: int, size_bytes: int) -> int:
        self._get_context()
        return libcuda.export_dma_buf(start, size_bytes)

    def _get_context(self) -> None:
        """Make the runtime's context: on device 0, which counts as chosen already, torch makes a new thread none."""
        _cuda.current_stream(self._device).query()


@cache
def _get_last_errors() -> list[Callable[[], int]]:
    """Return cudaGetLastError of each CUDA library that is loaded: it returns the calling thread's error, and clears
    it. Which of several is torch's is not known; one whose file was deleted is not found."""
    found: list[Callable[[], int]] = []
    with contextlib.suppress(OSError):
        maps = Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines()
        for path in dict.fromkeys(line.split(maxsplit=5)[-1] for line in maps if "libcudart" in line):
            with contextlib.suppress(OSError, AttributeError):
                found.append(ctypes.CDLL(path).cudaGetLastError)
    return found


# --- CUDA in this process ---


def is_there() -> bool:
    """Return whether torch finds a CUDA device. Makes no context, and does not begin to use one."""
    return bool(_cuda.is_available())


def peers() -> tuple[int, list[tuple[int, int]]]:
    """Return how many CUDA devices there are, and the pairs of which neither reads the other's memory directly."""
    count = _cuda.device_count()
    pairs = [(a, b) for a in range(count) for b in range(a)]
    return count, [pair for pair in pairs if not _cuda.can_device_access_peer(*pair)]


def cuda_in_use(*, begins: bool = False) -> torch.device | None:
    """Return the calling thread's device, if this process uses one already, or, with `begins`, if there is one."""
    # A forked child of a process that uses CUDA cannot, and is_initialized() knows.
    if not _cuda.is_initialized() and not (begins and _cuda.is_available()):
        return None
    return torch.device("cuda", _cuda.current_device())


def devices_in_use() -> list[torch.device]:
    """Return the devices, CUDA's or another accelerator's, that this process uses already; begin to use none."""
    if _cuda.is_initialized():  # not in a forked child
        count = range(_cuda.device_count())
        has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)  # in builds with CUDA or ROCm
        used = [_cuda.current_device()] if has_context is None else [index for index in count if has_context(index)]
        return [torch.device("cuda", index) for index in used]
    other = torch.accelerator.current_accelerator()
    return [] if other is None or other.type == "cuda" else _other_in_use(other)


def _other_in_use(other: torch.device) -> list[torch.device]:
    is_initialized = getattr(torch.get_device_module(other), "is_initialized", lambda: True)
    return [torch.device(other.type, torch.accelerator.current_device_index())] if is_initialized() else []


def carried() -> Callable[[], AbstractContextManager[None]]:
    """Return a context with the calling thread's CUDA device and streams, for a thread that works for it to enter."""
    return _carried() if _cuda.is_initialized() else contextlib.nullcontext


def _carried() -> Callable[[], AbstractContextManager[None]]:
    device = _cuda.current_device()
    streams = [_cuda.current_stream(index) for index in range(_cuda.device_count())]
    chosen = [stream for stream in streams if stream.cuda_stream]  # the default stream is shared by all threads

    @contextlib.contextmanager
    def there() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for stream in chosen:
                stack.enter_context(_cuda.stream(stream))
            stack.enter_context(_cuda.device(device))
            yield

    return there


def release_cached_memory() -> None:
    """Return torch's cached device memory to the system; do nothing where no device is used."""
    if _cuda.is_initialized():
        with gate.passing():
            _cuda.empty_cache()


def pci_address() -> str:
    """Return the calling thread's CUDA device ("0000:3b:00.0"); "" where none is in use, or torch is too old."""
    if not _cuda.is_initialized():
        return ""
    return _pci_address(_cuda.current_device())


def _pci_address(device: Any) -> str:
    properties = _cuda.get_device_properties(device)
    domain, bus, number = (getattr(properties, f"pci_{part}_id", -1) for part in ("domain", "bus", "device"))
    return "" if -1 in (domain, bus, number) else f"{domain:04x}:{bus:02x}:{number:02x}.0"
