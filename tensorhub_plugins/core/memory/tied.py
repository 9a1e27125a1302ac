"""Reading into tensors of which some are the same memory under several names: tied weights.

What was published under two names may differ, although the reader has one memory for both. If both were read into it,
each segment's digest would be right when it is taken, and the memory would hold whichever tensor came last. To digest
everything once more at the end would not do: it needs digests, and comes too late for what was served to others and
overwritten afterwards.

So only the first name of each memory is read in place, the others are read into memory of their own (scratch). Nothing
depends on the order in which segments come, and what is served on meanwhile are the published bytes of every name. At
the end the scratch is compared with the shared memory byte for byte, and let go: from then on all names are served from
the tensors themselves. The price is host memory for the further names while they are read; no more of it than one
checkpoint has of them, and none where nothing is tied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch

from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.manifest import (
    stream_offsets,
)
from tensorhub_plugins.core.memory.slab import Slab

COMPARE_SIZE_BYTES = 4 << 20  # at once: what is on a device is brought to the host for it


class LiveTensors:
    """Tensors to read into in place. UsageError, as of `Slab.adopt`, for some that cannot be."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._whole = Slab.adopt(tensors)
        self.specs = self._whole.specs
        self._scratch: Slab | None = None
        if self._whole.ties:
            further = [spec for spec in self.specs if spec.name in self._whole.ties]
            self._scratch = Slab.allocate(further, pin=False)

    @property
    def tied(self) -> bool:
        """Whether some are read into scratch: then `check` and `settled` are due at the end."""
        return self._scratch is not None

    def adopt(self, names: Iterable[str] | None = None) -> Slab:
        """These tensors (None: all) as a slab to read into."""
        scratch = self._scratch.tensors() if self._scratch is not None else None
        if names is None:
            return Slab.adopt(self._tensors, scratch=scratch) if scratch else self._whole
        return Slab.adopt({name: self._tensors[name] for name in names}, scratch=scratch)

    def check(self, version: int) -> None:
        """Everything has arrived. UsageError naming two names whose memory is the same, and whose bytes are not."""
        if self._scratch is None:
            return
        places = {
            spec.name: (at, spec.size_bytes)
            for spec, at in zip(self.specs, stream_offsets(self.specs), strict=True)
            if spec.name in self._whole.ties
        }
        for spec, at in zip(self._scratch.specs, stream_offsets(self._scratch.specs), strict=True):
            place, size_bytes = places[spec.name]
            if not _same(self._whole, place, self._scratch, at, size_bytes):
                names = f"{self._whole.ties[spec.name]!r} and {spec.name!r}"
                raise UsageError(
                    f"tensors {names} are the same memory here, but were published with different bytes: give each a "
                    "tensor of its own, or read only one of the names",
                    version=version,
                )

    def settled(self, slab: Slab) -> Slab:
        """The same names, all in the tensors themselves. Only after `check`."""
        settled = Slab.adopt({spec.name: self._tensors[spec.name] for spec in slab.specs})
        settled.specs = slab.specs
        return settled


def _same(one: Slab, place: int, other: Slab, at: int, size_bytes: int) -> bool:
    """Whether one tensor's bytes are the same in both; each lies in one piece."""
    for skip in range(0, size_bytes, COMPARE_SIZE_BYTES):
        count = min(COMPARE_SIZE_BYTES, size_bytes - skip)
        [mine] = one.readable(place + skip, place + skip + count)
        [theirs] = other.readable(at + skip, at + skip + count)
        if not np.array_equal(np.frombuffer(mine, np.uint8), np.frombuffer(theirs, np.uint8)):
            return False
    return True
