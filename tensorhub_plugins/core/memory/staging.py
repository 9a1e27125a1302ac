"""Copies of tensors, on the host and on devices, where host memory is not pinned by way of memory that is.

A copy between a device and ordinary memory is made by the driver in one thread, at a fifth of the bus's rate. Here
several threads fill one pinned piece while the other one is on its way.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Any, TypeAlias

import torch

from tensorhub_plugins.core import resources
from tensorhub_plugins.core.device.devices import Device, of
from tensorhub_plugins.core.device.drivers import Driver, Event
from tensorhub_plugins.core.machine import cores

THREADS_MAX = 4  # one copies 5 GB/s
ALIGNMENT_BYTES = 64

Pair: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"  # target and source


def copy_all(pairs: Iterable[Pair]) -> None:
    """Copy over each target its source, any strides and devices, on this thread's stream; then wait for all of them.
    Pairs that follow each other in memory, at both ends, are one copy."""
    drivers: dict[Device, Driver] = {}
    slow: dict[Device, list[Pair]] = {}
    pinned: dict[int, bool] = {}  # by storage
    with contextlib.ExitStack() as calling:

        def enter(device: Device) -> Driver:
            if device not in drivers:
                calling.enter_context(device.queueing())
                drivers[device] = calling.enter_context(device.calling())
            return drivers[device]

        try:
            for target, source in _joined(pairs, enter):
                device = of(target) or of(source)
                if device is None:
                    target.copy_(source)
                    continue
                driver = enter(device)
                if of(source) is None and target.shape == source.shape and not device.is_fast(source, pinned):
                    slow.setdefault(device, []).append((target, source))
                else:
                    driver.copy(source, target, None)
            for device, some in slow.items():
                if sum(source.nbytes for _, source in some) > device.piece_size_bytes:
                    _up(device, some)
                else:
                    for target, source in some:
                        drivers[device].copy(source, target, None)
        finally:  # after an error too: what the caller then releases must not be written, or read, any more
            for device in drivers:
                device.synchronize()


def _joined(pairs: Iterable[Pair], enter: Callable[[Device], object]) -> Iterator[Pair]:
    """Yield these, and one for several that are neighbours. To begin a copy takes 10 us. enter: their device."""
    first: Pair | None = None
    count, after = 0, None
    for pair in pairs:
        begins = _begins(pair, enter)
        if first is not None and begins is not None and begins == after:
            count += pair[0].numel()
        else:
            if first is not None:
                yield _over(first, count)
            first, count = pair, pair[0].numel()
        after = None if begins is None else (*(each + pair[0].nbytes for each in begins[:2]), *begins[2:])
    if first is not None:
        yield _over(first, count)


def _begins(pair: Pair, enter: Callable[[Device], object]) -> tuple[Any, ...] | None:
    """Return where both begin, as what, in which memory and pieces; None: they are no copy of one run of bytes."""
    target, source = pair
    memory = target.untyped_storage().data_ptr(), source.untyped_storage().data_ptr()
    if target.dtype != source.dtype or target.numel() != source.numel() or memory[0] == memory[1]:
        return None
    if not (target.is_contiguous() and source.is_contiguous()) or source.is_neg() or source.is_conj():
        return None
    device, begins = of(target) or of(source), (target.data_ptr(), source.data_ptr())
    if device is not None:
        enter(device)
    pieces = None if device is None else tuple(map(device.piece_of, begins))
    return *begins, target.dtype, memory, pieces


def _over(pair: Pair, count: int) -> Pair:
    """Return so many elements from the beginning of both."""
    if pair[0].numel() == count:
        return pair
    return torch.as_strided(pair[0], (count,), (1,)), torch.as_strided(pair[1], (count,), (1,))


def as_bytes(target: torch.Tensor, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return these as bytes where that is what their elements are: torch copies some such dtypes in no other way."""
    if tensor.element_size() > 1 or tensor.is_neg():
        return target, tensor
    return target.view(torch.uint8), tensor.view(torch.uint8)


def host_copy(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a contiguous copy in ordinary host memory, cast to this dtype."""
    host = torch.empty(tensor.shape, dtype=dtype)
    copy_all([(host, tensor.detach())])
    return host


def _filling() -> ThreadPoolExecutor:
    return resources.pool_of(min(THREADS_MAX, cores()), "tensorhub-stage")


@torch.inference_mode()
def fill(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy host memory over host memory, without the GIL."""
    target.copy_(source)


def down(device: Device, flats: Sequence[torch.Tensor], host: torch.Tensor, after: Event | None) -> None:
    """Do as `Device.down`."""
    if host.nbytes <= device.piece_size_bytes or device.is_fast(host):
        device.down(flats, host, after=after)
        return
    ends = list(accumulate(flat.numel() for flat in flats))
    size_bytes = device.piece_size_bytes

    def cut(start: int, stop: int) -> list[torch.Tensor]:
        first, last = bisect_right(ends, start), bisect_left(ends, stop)
        begins = [end - flat.numel() for end, flat in zip(ends[first : last + 1], flats[first : last + 1], strict=True)]
        each = zip(begins, flats[first : last + 1], strict=True)
        return [flat[max(start - begin, 0) : stop - begin] for begin, flat in each]

    ranges = [(start, min(start + size_bytes, host.numel())) for start in range(0, host.numel(), size_bytes)]
    with _filling() as pool:
        for (start, stop), piece in zip(ranges, device.pieces(cut, ranges, after=after), strict=True):
            part = -(-len(piece) // THREADS_MAX)
            list(pool.map(fill, torch.split(host[start:stop], part), torch.split(piece, part)))


def _up(device: Device, pairs: Iterable[Pair]) -> None:
    """Copy over each target, on the device, its source in host memory that is not pinned."""
    events: list[Event] = []
    with _filling() as pool, device.calling() as driver:
        pieces = [driver.buffer(device.piece_size_bytes) for _ in range(2)]
        try:
            for number, batch in enumerate(_batches(pairs, device.piece_size_bytes)):
                if number > 1:
                    driver.wait(events[-2])
                at, parts = 0, []
                for _, source in batch:
                    part = pieces[number % 2][at : at + source.nbytes]
                    parts.append(part.view(source.dtype).view(source.shape))
                    at += _padded(source.nbytes)
                list(pool.map(fill, parts, (source for _, source in batch)))
                for (target, _), part in zip(batch, parts, strict=True):
                    driver.copy(part, target, None)
                events.append(driver.record(None))
        finally:
            for event in events[-2:]:
                driver.wait(event)


def _batches(pairs: Iterable[Pair], size_bytes_max: int) -> Iterator[list[Pair]]:
    """Yield what fits into a piece, cut so that several threads have some of it."""
    batch: list[Pair] = []
    size_bytes = 0
    for pair in pairs:
        for target, source in parts(*pair, -(-size_bytes_max // THREADS_MAX)):
            if size_bytes + source.nbytes > size_bytes_max:
                yield batch
                batch, size_bytes = [], 0
            batch.append((target, source))
            size_bytes += _padded(source.nbytes)
    if batch:
        yield batch


def parts(target: torch.Tensor, source: torch.Tensor, size_bytes_max: int) -> Iterator[Pair]:
    """Yield the parts of a copy, each at most so large."""
    if source.nbytes <= size_bytes_max:
        if source.numel():
            yield target, source
    elif len(source) == 1:
        yield from parts(target[0], source[0], size_bytes_max)
    else:
        rows = max(size_bytes_max * len(source) // source.nbytes, 1)
        for some in zip(torch.split(target, rows), torch.split(source, rows), strict=True):
            yield from parts(*some, size_bytes_max)


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
