"""Copies between lists of views, and the digests of a whole stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tensorhub_plugins.core import resources
from tensorhub_plugins.core.deadline import NEVER, until
from tensorhub_plugins.core.digests import digest_of
from tensorhub_plugins.core.machine import cores

COPY_GIL_SIZE_BYTES = 32 << 10  # below it releasing the GIL costs more than the copy (4 KiB: 13 us against 0.8)
DIGEST_THREADS_MAX = 4  # two cores already read at the memory's speed here; more help on hosts with many channels
DIGEST_THREADS_FROM_BYTES = 64 << 20  # below it starting threads costs more than it saves
DIGEST_PIECE_FROM_BYTES = 16 << 20  # of a device's memory: other pieces are digested before and after
DIGEST_SIZE_AT_ONCE_BYTES = 16 << 20  # to hand a piece to a thread and back takes as long as to read 1 MB

# --- views to views ---


def copy_views(sources: Sequence[memoryview], targets: Sequence[memoryview]) -> None:
    """Copy between two lists of views of equal total size but different boundaries; without the GIL where that pays."""
    if len(sources) == len(targets) == 1:
        copy_view(sources[0], targets[0])
        return
    rest = iter(sources)
    source = memoryview(b"")
    for target in targets:
        done = 0
        while done < len(target):
            if not len(source):
                source = next(rest)
                continue
            count = min(len(source), len(target) - done)
            copy_view(source[:count], target[done : done + count])
            source = source[count:]
            done += count


def copy_view(source: memoryview, target: memoryview) -> None:
    """Copy between two views of the same length; without the GIL where that pays."""
    if len(source) < COPY_GIL_SIZE_BYTES:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


# --- digests ---


def digests_of_segments(
    digest: Callable[[int, int], bytes],
    size_bytes: int,
    segment_size_bytes: int,
    *,
    threads: int | None = None,
    size_at_once_bytes: int = DIGEST_SIZE_AT_ONCE_BYTES,
    deadline: float = NEVER,
) -> bytes:
    """Return the digests of all segments of a stream, joined. digest(start, stop) digests one range.

    threads: None picks by size. size_at_once_bytes: how much one of several threads is handed at a time."""
    starts = range(0, size_bytes, segment_size_bytes)

    def digests_of(part: range) -> bytes:
        stops = (min(start + segment_size_bytes, size_bytes) for start in part)
        return b"".join(map(digest, until(deadline, part, 1), stops))

    if threads is None:
        big = size_bytes >= DIGEST_THREADS_FROM_BYTES
        threads = min(DIGEST_THREADS_MAX, cores()) if big else 1
    if threads <= 1:
        return digests_of(starts)
    with resources.pool_of(threads, "tensorhub-digest") as pool:
        step = max(1, size_at_once_bytes // segment_size_bytes)
        return b"".join(pool.map(digests_of, (starts[i : i + step] for i in range(0, len(starts), step))))


def digests_of_view(view: memoryview, segment_size_bytes: int, algorithm: str, threads: int | None = None) -> bytes:
    """Return the digests of the segments of host memory, joined; each segment by one of several threads."""
    if threads is None:
        threads = min(DIGEST_THREADS_MAX, cores()) if len(view) >= DIGEST_PIECE_FROM_BYTES else 1

    def digest(start: int, stop: int) -> bytes:
        return digest_of([view[start:stop]], algorithm)

    return digests_of_segments(
        digest, len(view), segment_size_bytes, threads=threads, size_at_once_bytes=segment_size_bytes
    )
