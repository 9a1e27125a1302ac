"""A copy of a slab's whole stream in device memory, cast and summed for its digests in the pass that writes it.

Segments span tensors, and tensors come one by one, in any order. So each is written at its place in the stream. Cast
tensors are summed block by block as they are written; all other blocks, and those that two tensors share, after the
last tensor. The digests are then known without reading the bytes again, here or on the host. They cover what was
written on the device: the readers detect damage on the way to the host.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch

from tensorhub_plugins.core.device.devices import Device
from tensorhub_plugins.core.device.drivers import Driver, Event, Stream
from tensorhub_plugins.core.device.kernels.casting import SOURCE, TARGET, cast_at, mix, sum_up
from tensorhub_plugins.core.device.kernels.xxh3 import BLOCK_SIZE_BYTES, LANES_SIZE_BYTES, constants
from tensorhub_plugins.core.manifest import TensorTable
from tensorhub_plugins.core.memory.device_digests import digests_there
from tensorhub_plugins.core.memory.tensors import flat_bytes, shaped_as, stride_of

logger = logging.getLogger(__name__)

SUMMED_FROM_BYTES = 1 << 20  # of bfloat16: smaller ones would cost a launch each, and are summed together


class StreamCopy:
    """A copy of a slab with this table. One thread writes, on its stream; it or another one takes the digests.

    Takes `size_of(table)` bytes of device memory, or raises torch.OutOfMemoryError."""

    def __init__(self, device: Device, table: TensorTable, *, summed_from: int = SUMMED_FROM_BYTES) -> None:
        self.device, self._table, self._summed_from = device, table, summed_from
        self._written: set[str] = set()
        self._summed: list[tuple[int, int]] = []  # blocks [first, last)
        blocks = -(-table.size_bytes // BLOCK_SIZE_BYTES)
        known = torch.from_numpy(constants()).view(torch.uint8)
        with torch.inference_mode(False), device.calling() as driver:
            # Pinned, or the copy could wait for what this thread has queued. Kept until the copy is done.
            self._host = driver.buffer(len(known))
            self._host.copy_(known)
            sizes = [blocks * BLOCK_SIZE_BYTES, blocks * LANES_SIZE_BYTES, len(known)]
            self._bytes, self._sums, self._constants = torch.split(driver.scratch(sum(sizes), None), sizes)
            driver.copy(self._host, self._constants, None)
            self.event: Event = driver.record(None)  # after all that was written so far

    @staticmethod
    def size_of(table: TensorTable) -> int:
        """Return about how much device memory it takes, in bytes."""
        return table.size_bytes + table.size_bytes // BLOCK_SIZE_BYTES * LANES_SIZE_BYTES

    @torch.inference_mode(False)
    def write(self, name: str, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Queue the copy of a tensor to its place in the stream, with the dtype and dimension order of `target`. Return
        that memory, uint8. After torch.OutOfMemoryError it is not written."""
        position = self._table.positions[name]
        start, size_bytes = self._table.offsets[position], self._table[position].size_bytes
        stop = start + size_bytes
        place = self._bytes[start:stop]
        is_alike = stride_of(source) == stride_of(target)
        is_aligned = start % target.element_size() == 0
        is_cast = (source.dtype, target.dtype) == (SOURCE, TARGET)
        is_plain = is_alike and is_aligned and target.is_contiguous() and size_bytes >= self._summed_from
        first, last = -(-start // BLOCK_SIZE_BYTES), stop // BLOCK_SIZE_BYTES
        with self.device.calling() as driver:
            if is_cast and is_plain and first < last:
                reads, writes = [flat_bytes(source), self._constants], [place, self._sums_of(first, last)]
                driver.launch(cast_at(start % BLOCK_SIZE_BYTES), reads, writes, None)
                self._summed.append((first, last))
            elif source.dtype == target.dtype and is_alike:
                driver.copy(flat_bytes(source), place, None)  # also packed dtypes, for which torch has no copy
            else:
                beside = place if is_aligned else driver.scratch(size_bytes, None)
                driver.copy(source, shaped_as(target, beside), None)
                if not is_aligned:
                    driver.copy(beside, place, None)
            self.event = driver.record(None)
        self._written.add(name)
        return place

    @torch.inference_mode(False)
    def digests(self, segment_size_bytes: int) -> bytes | None:
        """Return the XXH3-128 of each segment, joined; None if a tensor was not written, the device lacks memory, or
        segments are not whole blocks."""
        if segment_size_bytes % BLOCK_SIZE_BYTES or any(
            spec.size_bytes and spec.name not in self._written for spec in self._table
        ):
            return None
        rest = list(self._not_summed())
        stream: Stream = None
        try:
            with self.device.calling() as driver:
                stream = self.device.stream("down")
                driver.order(stream, self.event)
                if rest:
                    runs = [self._bytes[first * BLOCK_SIZE_BYTES : last * BLOCK_SIZE_BYTES] for first, last in rest]
                    sums = [self._sums_of(first, last) for first, last in rest]
                    driver.launch(sum_up, [*runs, self._constants], sums, stream)
            return digests_there(
                self.device,
                lambda start, stop: [self._bytes[start:stop]] if start < stop else [],
                self._table.size_bytes,
                segment_size_bytes,
                lanes=self._queue_lanes,
            )
        except torch.OutOfMemoryError:
            logger.debug("%s has no room for digests", self.device.name)
            return None
        finally:
            if stream is not None:  # memory freed with this goes back to the writing stream at once
                with self.device.calling() as driver:
                    driver.wait(driver.record(stream))

    def _queue_lanes(
        self, driver: Driver, stream: Stream, start: int, flats: list[torch.Tensor], lanes: torch.Tensor
    ) -> None:
        size_bytes = sum(flat.numel() for flat in flats)
        sums = self._sums_of(start // BLOCK_SIZE_BYTES, -(-(start + size_bytes) // BLOCK_SIZE_BYTES))
        driver.launch(mix, [sums, self._constants], [lanes], stream)

    def _sums_of(self, first: int, last: int) -> torch.Tensor:
        return self._sums[first * LANES_SIZE_BYTES : last * LANES_SIZE_BYTES]

    def _not_summed(self) -> Iterator[tuple[int, int]]:
        """Yield the runs of whole blocks that are not summed yet."""
        done = 0
        for first, last in [*sorted(self._summed), (self._table.size_bytes // BLOCK_SIZE_BYTES, 0)]:
            if done < first:
                yield done, first
            done = max(done, last)
