"""The layout of a source's segments in a target slab, shared by all transports.

Source tensors that follow each other in the target as they do in the source form one *stretch*, and so do neighbours
that are not wanted. Reading a whole shard into an equal one is a single stretch; a shard whose tensors interleave with
other shards' has about as many as it has tensors.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from tensorhub_plugins.core.digests import digest_of
from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.manifest import Manifest
from tensorhub_plugins.core.memory.moves import Move
from tensorhub_plugins.core.memory.runs import Extents
from tensorhub_plugins.core.memory.slab import Slab

UNWANTED = -1


def check_segments(manifest: Manifest, segments: Iterable[int]) -> None:
    """Raise UsageError naming a segment that the shard does not have."""
    for segment in segments:
        if not 0 <= segment < manifest.segment_count:
            raise UsageError(f"there is no segment {segment} in a shard of {manifest.segment_count}")


class ReadPlan:
    """The plan of one read: a source's manifest laid over a target slab, and the digests of what has arrived."""

    def __init__(self, manifest: Manifest, target: Slab, moves: Sequence[Move], *, digests: bool = True) -> None:
        """Plan the read. moves: what of the source is wanted, and where, in the source's order. Raise UsageError when
        bytes would land outside the target. digests: compute them; else none is known."""
        self.computes, self._manifest, self.target = digests, manifest, target
        self._digests: dict[int, bytes] = {}
        self._starts: list[int] = []  # in the source's stream
        self._offsets: list[int] = []  # in the target's stream, or UNWANTED
        end = 0
        for start, offset, size_bytes in moves:
            fits = 0 <= offset <= target.size_bytes - size_bytes
            if not fits or not end <= start <= manifest.size_bytes - size_bytes:
                raise UsageError(
                    f"{size_bytes} bytes at offset {start} of the source do not fit at offset {offset} of a target of "
                    f"{target.size_bytes} bytes"
                )
            if start > end:
                self._stretch(end, UNWANTED)
            self._stretch(start, offset)
            end = start + size_bytes
        if end < manifest.size_bytes:
            self._stretch(end, UNWANTED)

    def _stretch(self, start: int, offset: int) -> None:
        if self._offsets:
            before = self._offsets[-1]
            follows = offset == UNWANTED if before == UNWANTED else before + start - self._starts[-1] == offset
            if follows:
                return
        self._starts.append(start)
        self._offsets.append(offset)

    @contextmanager
    def receiving(self, segment: int, host: torch.Tensor | None = None) -> Iterator[list[memoryview]]:
        """Provide memory for exactly this segment's bytes, in order. When the block ends without an exception, they are
        digested (so that the caller can verify them) and committed to a device. Unwanted bytes are dropped.

        host: as of `Slab.writable_ranges`."""
        pieces = list(self._pieces(*self._manifest.segment_range(segment)))
        wanted = [(offset, offset + count) for offset, count in pieces if offset != UNWANTED]
        with self.target.writable_ranges(wanted, host) as views:
            if len(wanted) != len(pieces):
                views = _with_spill(pieces, views)
            yield views
            if self.computes:
                self._digests[segment] = digest_of(views, self._manifest.digest_algorithm)

    def is_there(self, segment: int) -> bool:
        """Return whether the target has this segment already, of which every byte is wanted."""
        pieces = self._pieces(*self._manifest.segment_range(segment))
        views = [view for start, count in pieces for view in self.target.readable(start, start + count)]
        return digest_of(views, self._manifest.digest_algorithm) == self._manifest.digest(segment)

    def digest_in_place(self, segment: int) -> None:
        """Digest a segment that is in place already, in a target with the source's layout."""
        if self.computes:
            views = self.target.readable(*self._manifest.segment_range(segment))
            self._digests[segment] = digest_of(views, self._manifest.digest_algorithm)

    def flats(self, start: int, stop: int) -> list[tuple[int, torch.Tensor]]:
        """Return the wanted parts of a range of the source's stream: the offset in the range, and the target, as uint8
        on the target's device."""
        wanted, at = [], 0
        for offset, size_bytes in self._pieces(start, stop):
            if offset != UNWANTED:
                into = at
                for flat in self.target.flats(offset, offset + size_bytes):
                    wanted.append((into, flat))
                    into += flat.numel()
            at += size_bytes
        return wanted

    def digested(self, segment: int, digest: bytes) -> None:
        """Set the digest of what arrived of a segment by other means than `receiving`."""
        self._digests[segment] = digest

    def addresses(self, start: int, stop: int) -> Extents | None:
        """Return the target addresses of a range of the source's stream, as `Slab.addresses`; None for a device, or
        where part of it is not wanted."""
        extents = []
        for offset, size_bytes in self._pieces(start, stop):
            of_piece = None if offset == UNWANTED else self.target.addresses(offset, offset + size_bytes)
            if of_piece is None:
                return None
            extents.append(of_piece)
        return np.concatenate(extents) if len(extents) != 1 else extents[0]

    def digest(self, segment: int) -> bytes:
        """Return what `receiving` computed. Raise UsageError when that segment has not been received."""
        if segment not in self._digests:
            raise UsageError(f"segment {segment} was not read by the last read()")
        return self._digests[segment]

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield (offset in the target or UNWANTED, size) of the parts of a source range."""
        for index, skip, size_bytes in parts_in(self._starts, start, stop):
            offset = self._offsets[index]
            yield (offset if offset == UNWANTED else offset + skip), size_bytes


def parts_in(starts: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield the parts of a range of a stream whose pieces begin at these offsets: a piece's index, how many of its
    bytes come before the part, and the part's size."""
    index = bisect_right(starts, start) - 1
    while start < stop:
        end = min(stop, starts[index + 1]) if index + 1 < len(starts) else stop
        yield index, start - starts[index], end - start
        start, index = end, index + 1


def _with_spill(pieces: Sequence[tuple[int, int]], views: Sequence[memoryview]) -> list[memoryview]:
    """Return the views of the wanted pieces with memory for the unwanted ones between them."""
    merged: list[memoryview] = []
    pending = iter(views)
    for offset, count in pieces:
        if offset == UNWANTED:
            merged.append(memoryview(bytearray(count)))
            continue
        while count:  # one piece may be several views
            view = next(pending)
            merged.append(view)
            count -= len(view)
    return merged


def runs_of(segments: Sequence[int]) -> list[tuple[int, int]]:
    """Return [3, 4, 5, 9] as [(3, 6), (9, 10)]: short on the wire for what is usually one run. Order is kept."""
    runs: list[tuple[int, int]] = []
    for segment in segments:
        if runs and runs[-1][1] == segment:
            runs[-1] = (runs[-1][0], segment + 1)
        else:
            runs.append((segment, segment + 1))
    return runs
