"""Digests of device memory, computed on the device: its bytes need not be copied to the host for them.

Segments of equal size are digested together, each in its place. One that lies in several pieces, because it spans
several tensors, or begins at no multiple of 8 bytes, is first assembled in scratch memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from tensorhub_plugins.core.device.devices import Device
from tensorhub_plugins.core.device.drivers import Driver, Event, Stream
from tensorhub_plugins.core.device.kernels.moving import move
from tensorhub_plugins.core.device.kernels.xxh3 import (
    LANES_SIZE_BYTES,
    LONG_FROM_BYTES,
    WORD_SIZE_BYTES,
    finish,
    lanes_of,
    tail_start,
)
from tensorhub_plugins.core.digests import digest_of
from tensorhub_plugins.core.memory.runs import memory_of

logger = logging.getLogger(__name__)

SCRATCH_SIZE_BYTES = 256 << 20  # for assembled segments, on a device that others have filled
SEGMENTS_AT_ONCE = 1024  # a hundred are enough to be as fast as the memory

Cut = Callable[[int, int], list[torch.Tensor]]
Segment = list[torch.Tensor]  # the pieces that it lies in
# Queues the computation of the lanes of segments of equal size, from this stream offset on, into the last argument.
Lanes = Callable[[Driver, Stream, int, list[torch.Tensor], torch.Tensor], None]


def of_bytes(driver: Driver, stream: Stream, start: int, flats: list[torch.Tensor], lanes: torch.Tensor) -> None:
    """Queue the computation of the lanes from all bytes of the segments."""
    driver.launch(lanes_of, flats, [lanes], stream)


def digests_there(
    device: Device, cut: Cut, size_bytes: int, segment_size_bytes: int, *, lanes: Lanes = of_bytes
) -> bytes | None:
    """Return the XXH3-128 of each segment of a stream, joined; None without device memory, or for short segments.

    cut: returns the device memory of a stream range, as uint8 tensors. Work queued on the device must be done, or must
    not write to it: this is ordered only with the copies to the host."""
    if segment_size_bytes < LONG_FROM_BYTES or segment_size_bytes % WORD_SIZE_BYTES:
        return None
    whole = size_bytes // segment_size_bytes * segment_size_bytes
    segments = (cut(start, start + segment_size_bytes) for start in range(0, whole, segment_size_bytes))
    joined, start = b"", 0
    coming: list[_Coming] = []  # the next group is queued before the last one is finished: that takes as long
    try:
        for group in _groups(segments):
            coming.append(_queue(device, group, segment_size_bytes, start, lanes))
            start += len(group) * segment_size_bytes
            if len(coming) > 1:
                joined += _finish(device, coming.pop(0))
        last = cut(whole, size_bytes)
        if size_bytes - whole >= LONG_FROM_BYTES:
            coming.append(_queue(device, [last], size_bytes - whole, whole, lanes))
            last = []
    except torch.OutOfMemoryError:
        logger.debug("%s has no room for digests", device.name)
        return None
    finally:
        found = [_finish(device, each) for each in coming]  # in any case: the host's memory must not be reused before
    joined += b"".join(found)
    if not last:
        return joined
    host = device.buffer(size_bytes - whole)
    device.down(last, host)
    return joined + digest_of([memory_of(host)])


def _groups(
    segments: Iterator[Segment], scratch_size_bytes_max: int = SCRATCH_SIZE_BYTES, count_max: int = SEGMENTS_AT_ONCE
) -> Iterator[list[Segment]]:
    group: list[Segment] = []
    scratch_size_bytes = 0
    for segment in segments:
        group.append(segment)
        scratch_size_bytes += 0 if _is_at_hand(segment) else _size_of(segment)
        if scratch_size_bytes >= scratch_size_bytes_max or len(group) == count_max:
            yield group
            group, scratch_size_bytes = [], 0
    if group:
        yield group


class _Coming(NamedTuple):
    """The lanes and the tails of so many segments of this size, on their way to the host."""

    event: Event
    host: torch.Tensor
    segments: int
    size_bytes: int


def _queue(device: Device, segments: list[Segment], size_bytes: int, start: int, lanes_by: Lanes) -> _Coming:
    """Queue what the digests of segments of this size are made of, the first of which begins at `start`."""
    _, tail = tail_start(size_bytes)
    lanes_size_bytes = len(segments) * LANES_SIZE_BYTES
    with device.calling() as driver:
        stream = device.stream("down")
        launch = partial(driver.launch, stream=stream)
        apart = [segment for segment in segments if not _is_at_hand(segment)]
        together: Iterator[torch.Tensor] = iter(())
        if apart:
            scratch = driver.scratch(len(apart) * size_bytes, stream)
            launch(move, [flat for segment in apart for flat in segment], [scratch])
            together = iter(torch.split(scratch, size_bytes))
        flats = [segment[0] if _is_at_hand(segment) else next(together) for segment in segments]
        found = driver.scratch(lanes_size_bytes + len(segments) * (size_bytes - tail), stream)
        host = driver.buffer(found.numel())
        lanes_by(driver, stream, start, flats, found[:lanes_size_bytes])
        launch(move, [flat[tail:] for flat in flats], [found[lanes_size_bytes:]])
        driver.copy(found, host, stream)
        return _Coming(driver.record(stream), host, len(segments), size_bytes)


def _finish(device: Device, coming: _Coming) -> bytes:
    device.wait(coming.event)
    lanes, tails = np.split(coming.host.numpy(), [coming.segments * LANES_SIZE_BYTES])
    shape = coming.segments, -1
    return finish(lanes.view(np.uint64).reshape(shape), tails.reshape(shape), coming.size_bytes)


def _is_at_hand(segment: Segment) -> bool:
    if len(segment) > 1:
        return False
    address, offset = segment[0].data_ptr(), int(segment[0].storage_offset())
    return not (address | offset) % WORD_SIZE_BYTES


def _size_of(segment: Segment) -> int:
    return sum(flat.numel() for flat in segment)
