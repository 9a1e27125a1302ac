"""What memory was last verified to hold, segment by segment, from one version to the next.

It is a hint, not a promise: others may have written there since. A user of it compares the bytes with the digest, so a
wrong hint costs time, and never a wrong byte.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from weakref import WeakKeyDictionary

from tensorhub_plugins.core.manifest import Manifest
from tensorhub_plugins.core.memory.runs import Runs
from tensorhub_plugins.core.memory.slab import Slab


class Contents:
    """The digests of what one memory holds of the segments of one stream."""

    def __init__(self, like: Manifest) -> None:
        """Begin with nothing known. like: names the stream: its tensors, its segments and the digests' algorithm."""
        self._like = like
        self._digests: dict[int, bytes] = {}
        self.whole: Collection[int] = range(like.segment_count)  # the others are here in part

    def fits(self, manifest: Manifest) -> bool:
        """Return whether the segments of this manifest can be compared with these."""
        return is_alike(self._like, manifest)

    def get(self, segment: int) -> bytes | None:
        """Return the digest of the bytes there; None: unknown."""
        return self._digests.get(segment)

    def note(self, segment: int, digest: bytes) -> None:
        """Note that the bytes of this segment were verified."""
        if segment in self.whole:
            self._digests[segment] = digest

    def forget(self, segments: Iterable[int]) -> dict[int, bytes]:
        """Forget these segments, which are about to be written; return the digests of what was there."""
        return {segment: self._digests.pop(segment) for segment in segments if segment in self._digests}


class KnownContents:
    """The contents of all memory of one worker, by where it lies. It keeps no memory alive. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_runs: WeakKeyDictionary[Runs, dict[int, Contents]] = WeakKeyDictionary()

    def of(self, slab: Slab, manifest: Manifest, shard: int = 0) -> Contents | None:
        """Return what the slab is known to have of this source shard, to be kept up to date by the caller; None where
        nothing can be compared."""
        if not manifest.has_digests or slab.borrowed is not None:
            return None
        with self._lock:
            of_slab = self._by_runs.setdefault(slab.runs, {})
            found = of_slab.get(shard)
            if found is None or not found.fits(manifest):
                found = of_slab[shard] = Contents(manifest)
            return found


def is_alike(one: Manifest, other: Manifest) -> bool:
    """Return whether two manifests have digests of the same segments of the same tensors."""
    return (
        one.has_digests
        and one.digest_algorithm == other.digest_algorithm
        and one.segment_size_bytes == other.segment_size_bytes
        and one.tensors == other.tensors
    )
