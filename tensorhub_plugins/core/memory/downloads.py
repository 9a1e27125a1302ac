"""Copies of a device's tensors into host memory: queued one after the other, and waited for at the end.

A tensor is first copied on the device, on the calling thread's stream, and cast if the target has another dtype.
Whatever that thread queues afterwards (the next gather, an optimizer step) comes later in the device's own order, so
the tensor may change, or be freed, while its copy is transferred. Nothing waits on the host as long as there is memory
for such copies. Where the device has room for a whole slab, its digests are taken in the same pass (stream_copy.py).

Host tensors (of an offloaded model) are copied, and cast, by several threads before the call returns.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from tensorhub_plugins.core import resources
from tensorhub_plugins.core.deadline import NEVER, check_time
from tensorhub_plugins.core.device.devices import Device, of
from tensorhub_plugins.core.device.drivers import Event
from tensorhub_plugins.core.machine import cores
from tensorhub_plugins.core.manifest import TensorTable
from tensorhub_plugins.core.memory import staging
from tensorhub_plugins.core.memory.stream_copy import StreamCopy
from tensorhub_plugins.core.memory.tensors import flat_bytes, shaped_as, stride_of

logger = logging.getLogger(__name__)

ROOM_SIZE_BYTES_MAX = 4 << 30  # if no more is given: the next step may need more than those before it
FILLED_FROM_BYTES = 8 << 20  # of host memory, by a thread at a time
HOST_THREADS_MAX = 8  # of each rank of a host; one casts 3 to 5 GB/s
ROOM_SIZE_BYTES = 1 << 30  # a large tensor and the next one: keeps the bus busy, takes little of the device


class _Coming(NamedTuple):
    device: Device
    event: Event | None
    copy: torch.Tensor  # must not be reused before the event
    size_bytes: int  # counted against the room
    target: torch.Tensor | None = None  # not begun: a copy to memory that is not pinned returns when it is done


class Downloads:
    """A batch of copies that is waited for at the end of `with`. One thread adds; it or another one waits.

    room_size_bytes: device memory for copies; None: what nothing else has needed so far, ROOM_SIZE_BYTES_MAX at most.
    digested: the table of a slab that receives all its tensors through this object, and whose digests are wanted.
    lacks_room: the device had less; none is used after that."""

    def __init__(self, room_size_bytes: int | None = ROOM_SIZE_BYTES, *, digested: TensorTable | None = None) -> None:
        self._room_size_bytes, self._digested = room_size_bytes, digested
        self._whole: StreamCopy | None = None
        self._coming: deque[_Coming] = deque()
        self._devices: set[Device] = set()
        self._filling: ThreadPoolExecutor | None = None
        self.lacks_room = False

    def __enter__(self) -> Downloads:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    def add(self, source: torch.Tensor, target: torch.Tensor, *, name: str = "", stays: bool = False) -> None:
        """Copy a device's tensor over a dense host tensor of the same shape. name: its name in the table of what is
        digested. stays: the source is complete and does not change before `wait`; it is not copied first."""
        device = of(source)
        assert device is not None
        self._devices.add(device)
        is_alike = source.dtype == target.dtype and stride_of(source) == stride_of(target)
        if not target.numel():
            return
        room_size_bytes = self._room_of(device)
        if self._whole is not None and self._whole.device is device:
            with contextlib.suppress(torch.OutOfMemoryError):
                copy = self._whole.write(name, source, target)
                self._begin(device, copy, target, after=self._whole.event, size_bytes=0)
                return
        if stays and is_alike:
            self._begin(device, flat_bytes(source), target, after=None)
            return
        found = self._copied(device, source, target, room_size_bytes, is_alike=is_alike)
        if found is not None:
            self._begin(device, found, target, after=device.mark())
        elif is_alike:
            staging.down(device, [flat_bytes(source)], flat_bytes(target), device.mark())
        else:
            staging.copy_all([(target, source)])

    def fill(self, source: torch.Tensor, target: torch.Tensor, deadline: float = NEVER) -> None:
        """Copy a host tensor over one of the same shape, cast to its dtype, now. Raise DeadlineExceeded when that takes
        longer: nothing is written after `wait`, or `finish`."""
        if source.dtype == target.dtype:
            if stride_of(source) == stride_of(target) and not (source.is_conj() or source.is_neg()):
                source, target = flat_bytes(source), flat_bytes(target)
            else:
                target, source = staging.as_bytes(target, source)
        if source.nbytes < FILLED_FROM_BYTES:
            target.copy_(source)
        else:
            self._fill_in_parts(source, target, deadline)

    def _fill_in_parts(self, source: torch.Tensor, target: torch.Tensor, deadline: float) -> None:
        if self._filling is None:
            self._filling = resources.pool_of(min(HOST_THREADS_MAX, cores()), "tensorhub-fill")

        def fill(pair: staging.Pair) -> None:
            check_time(deadline)
            staging.fill(*pair)

        list(self._filling.map(fill, staging.parts(target, source, FILLED_FROM_BYTES)))

    def digests(self, segment_size_bytes: int) -> bytes | None:
        """Return the XXH3-128 of each segment of the slab, joined, if they were taken on the device. Call once, after
        `wait`: this releases their memory."""
        whole, self._whole = self._whole, None
        return None if whole is None else whole.digests(segment_size_bytes)

    def wait(self) -> None:
        """Wait until all copies have arrived."""
        while self._coming:
            self._wait_for_one()
        self._end_filling()

    def finish(self) -> None:
        """Wait until nothing writes to the targets any more, wherever `add` or `fill` was interrupted."""
        self._end_filling()
        for device in self._devices:
            device.synchronize()

    def _end_filling(self) -> None:
        filling, self._filling = self._filling, None
        if filling is not None:
            filling.shutdown(cancel_futures=True)

    def _begin(
        self,
        device: Device,
        flat: torch.Tensor,
        target: torch.Tensor,
        *,
        after: Event | None,
        size_bytes: int | None = None,
    ) -> None:
        host, size_bytes = flat_bytes(target), flat.numel() if size_bytes is None else size_bytes
        if device.is_fast(host):
            self._coming.append(_Coming(device, device.begin_down([flat], host, after=after), flat, size_bytes))
        else:
            self._coming.append(_Coming(device, after, flat, size_bytes, host))

    def _room_of(self, device: Device) -> int:
        """Return how much is left for copies of single tensors. The first call reserves memory for the slab."""
        if self._room_size_bytes is None:
            self._room_size_bytes = min(device.room_size_bytes(), ROOM_SIZE_BYTES_MAX)
        table, self._digested = self._digested, None
        if table is not None and StreamCopy.size_of(table) <= self._room_size_bytes:
            try:
                self._whole = StreamCopy(device, table)
                self._room_size_bytes -= StreamCopy.size_of(table)
            except torch.OutOfMemoryError:
                self._forgo_room(device, table.size_bytes)
        return self._room_size_bytes

    def _copied(
        self, device: Device, source: torch.Tensor, target: torch.Tensor, room_size_bytes: int, *, is_alike: bool
    ) -> torch.Tensor | None:
        """Return a copy on the device, as uint8 in the target's dtype and layout; None if there is no room."""
        size_bytes = target.numel() * target.element_size()
        if size_bytes > room_size_bytes:
            return None
        while sum(each.size_bytes for each in self._coming) + size_bytes > room_size_bytes:
            self._wait_for_one()
        try:
            with device.calling() as driver:
                copy = driver.scratch(size_bytes, None)
                if is_alike:
                    driver.copy(flat_bytes(source), copy, None)
                else:
                    driver.copy(source, shaped_as(target, copy), None)
                return copy
        except torch.OutOfMemoryError:
            self._forgo_room(device, size_bytes)
            return None

    def _forgo_room(self, device: Device, size_bytes: int) -> None:
        """Take none any more: each try makes torch return what it has cached, and wait for the device."""
        logger.info("%s has no room for a copy of %d bytes: publishes wait for copies to the host", device, size_bytes)
        self._room_size_bytes, self.lacks_room = 0, True

    def _wait_for_one(self) -> None:
        device, event, copy, _, host = self._coming[0]
        if host is not None:
            staging.down(device, [copy], host, event)
        elif event is not None:
            device.wait(event)
        self._coming.popleft()
