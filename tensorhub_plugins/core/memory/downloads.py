"""A device's tensors on their way into host memory: queued one after the other, and waited for at the end.

A tensor is first copied on the device, on the calling thread's stream; cast too, where the target is of another dtype.
So whatever that thread queues from then on, a next gather or an optimizer's step, comes after it in the device's own
order: the tensor may change, or go, while its copy is on its way here. Nothing waits on the host as long as there is
room for such copies.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import NamedTuple

import torch

from tensorhub_plugins.core.device import Device, Event, copy_all, of
from tensorhub_plugins.core.memory.tensors import flat_bytes, stride_of

logger = logging.getLogger(__name__)

ROOM_SIZE_BYTES = 1 << 30  # a large tensor and the next one: the bus is busy, and little of the device is taken


class _Coming(NamedTuple):
    device: Device
    event: Event
    copy: torch.Tensor  # must not be anybody else's before the event

    @property
    def size_bytes(self) -> int:
        return self.copy.numel() * self.copy.element_size()


class Downloads:
    """Copies that are not waited for yet, but at the end of `with`. One thread adds, it or another one waits.

    room_size_bytes: for copies on the device; None: half of its free memory."""

    def __init__(self, room_size_bytes: int | None = ROOM_SIZE_BYTES) -> None:
        self._room_size_bytes = room_size_bytes
        self._coming: deque[_Coming] = deque()

    def __enter__(self) -> Downloads:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    def add(self, source: torch.Tensor, target: torch.Tensor, *, stays: bool = False) -> None:
        """Copy a device's tensor over a dense one of the host, of the same shape. stays: the source does not change
        before `wait`; it is not copied first, and must be done already."""
        device = of(source)
        assert device is not None
        is_alike = source.dtype == target.dtype and stride_of(source) == stride_of(target)
        if not target.numel():
            return
        if stays and is_alike:
            self._begin(device, flat_bytes(source), target, after=None)
            return
        copy = self._copied(device, source, target, is_alike=is_alike)
        if copy is not None:
            self._begin(device, copy, target, after=device.mark())
        elif is_alike:
            device.down([flat_bytes(source)], flat_bytes(target), after=device.mark())
        else:
            copy_all([(target, source)])

    def wait(self) -> None:
        """Until all of it is there."""
        while self._coming:
            self._wait_for_one()

    def _begin(self, device: Device, flat: torch.Tensor, target: torch.Tensor, *, after: Event | None) -> None:
        self._coming.append(_Coming(device, device.begin_down([flat], flat_bytes(target), after=after), flat))

    def _copied(
        self, device: Device, source: torch.Tensor, target: torch.Tensor, *, is_alike: bool
    ) -> torch.Tensor | None:
        """uint8, as the target will be; None: there is no room."""
        size_bytes = target.numel() * target.element_size()
        if self._room_size_bytes is None:
            self._room_size_bytes = device.free_size_bytes() // 2
        if size_bytes > self._room_size_bytes:
            return None
        while sum(each.size_bytes for each in self._coming) + size_bytes > self._room_size_bytes:
            self._wait_for_one()
        try:
            with device.calling() as driver:
                copy = driver.scratch(size_bytes, None)
                if is_alike:
                    driver.copy(flat_bytes(source), copy, None)
                else:
                    driver.copy(source, _shaped(copy, target), None)
                return copy
        except torch.OutOfMemoryError:
            logger.debug("%s has no room for a copy of %d bytes", device.name, size_bytes)
            return None

    def _wait_for_one(self) -> None:
        coming = self._coming[0]
        coming.device.wait(coming.event)
        self._coming.popleft()


@torch.inference_mode(False)
def _shaped(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This memory as a tensor of that dtype, shape and strides."""
    empty = torch.empty(0, dtype=like.dtype, device=flat.device)
    return empty.set_(flat.untyped_storage(), 0, like.shape, like.stride())
