"""Reading into tensors of which some are the same memory under several names: tied weights.

What was published under two names may differ, although the reader has one memory for both. If both were read into it,
each segment's digest would be right when it is taken, and the memory would hold whichever tensor came last. Digesting
everything once more at the end would not do: it needs digests, and comes too late for what was served to others and
overwritten afterwards.

So only the first name of each memory is read in place, the others are read into memory of their own (scratch). Nothing
depends on the order in which segments arrive, and the bytes served meanwhile are the published ones of every name. At
the end the scratch is compared with the shared memory byte for byte, and freed: from then on all names are served from
the tensors themselves. The price is host memory for the further names while they are read; no more of it than one
checkpoint has of them, and none where nothing is tied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from tensorhub_plugins.core.deadline import NEVER, until
from tensorhub_plugins.core.device.devices import synchronize
from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.machine import Room
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.memory.tensors import check_kept, held, same_bytes


class LiveTensors:
    """The tensors that are read into in place. Raises UsageError, as `Slab.adopt` does, for some that cannot be.
    deadline: for what is done here; the caller may move it."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], deadline: float = NEVER) -> None:
        self._tensors, self.deadline = held(tensors, deadline), deadline
        self.whole = Slab.adopt(self._tensors, deadline=deadline)
        if type(tensors) is not dict:
            check_kept(tensors, self._tensors, deadline)
        self.whole.check_writable()
        self.specs = self.whole.specs
        self._scratch: Slab | None = None
        if self.whole.ties:
            further = [spec for spec in self.specs if spec.name in self.whole.ties]
            Room().take(sum(spec.size_bytes for spec in further))
            self._scratch = Slab.allocate(further, pin=False, deadline=deadline)

    def settle(self) -> None:
        """Wait for what is queued on their device: a forward pass that still runs would read mixed weights."""
        synchronize(until(self.deadline, self._tensors.values()))

    @property
    def tied(self) -> bool:
        """Return whether some are read into scratch: then `check` and `settled` are due at the end."""
        return self._scratch is not None

    def adopt(self, names: Iterable[str] | None = None) -> Slab:
        """Return these tensors (None: all) as a slab to read into."""
        scratch = self._scratch.tensors() if self._scratch is not None else None
        if names is None:
            return Slab.adopt(self._tensors, scratch=scratch, deadline=self.deadline) if scratch else self.whole
        return Slab.adopt({name: self._tensors[name] for name in names}, scratch=scratch, deadline=self.deadline)

    def check(self, version: int) -> None:
        """Compare tied names once everything has arrived. Raise UsageError naming two with different bytes."""
        if self._scratch is None:
            return
        for name, read in until(self.deadline, self._scratch.tensors().items()):
            if not same_bytes(self._tensors[name], read):
                names = f"{self.whole.ties[name]!r} and {name!r}"
                raise UsageError(
                    f"tensors {names} are the same memory here, but were published with different bytes: give each a "
                    "tensor of its own, or read only one of the names",
                    version=version,
                )

    def settled(self, slab: Slab) -> Slab:
        """Return a slab with the same names, all in the tensors themselves. Only after `check`."""
        settled = Slab.adopt({spec.name: self._tensors[spec.name] for spec in slab.specs}, deadline=self.deadline)
        settled.specs = slab.specs
        return settled
