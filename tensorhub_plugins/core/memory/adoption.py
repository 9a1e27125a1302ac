"""Facts about live tensors, kept by the tensors' identity from one version to the next.

A training loop publishes the same tensors in every step, and an engine reads into the same ones; checking thousands of
them takes longer than reading their bytes. So what was found when they were adopted is kept for as long as the same
tensor objects still lie at the same addresses, which is checked each time. This keeps none of their memory alive.

Others that learn something about the same memory (RDMA registers it) key it by `Adoption.runs`, which stays the same
object for as long as this one is valid.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from operator import attrgetter
from typing import Any, ClassVar

import torch

from tensorhub_plugins.core.deadline import NEVER, until
from tensorhub_plugins.core.device.devices import Device, of
from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.manifest import TensorSpec, TensorTable
from tensorhub_plugins.core.memory.runs import Run, Runs, memory_at, memory_of
from tensorhub_plugins.core.memory.tensors import Extent, check_tensors, flat_bytes, spec_of, ties_of

ADOPTIONS_MAX = 4  # sets of tensors that are remembered: a worker publishes one, reads into one or two

# All there is to a tensor but its bytes.
_TRAITS: tuple[Callable[[torch.Tensor], Any], ...] = (
    id,
    torch.Tensor.data_ptr,
    attrgetter("dtype", "shape"),
    torch.Tensor.stride,
)


class Adoption:
    """One set of live tensors: their table `specs`, the `runs` of their stream, the `device` they are on (None: host
    memory), and their `ties`: name -> the first other name of the very same memory."""

    _kept: ClassVar[deque[Adoption]] = deque()
    _lock: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], deadline: float = NEVER) -> Adoption:
        """Return what is known of these tensors, or find it out now. Raise UsageError that names a tensor that cannot
        be adopted, DeadlineExceeded when so many take longer."""
        with cls._lock:
            candidates = list(cls._kept) if hasattr(tensors, "values") else []
        for kept in candidates:
            if kept._is_of(tensors, deadline):
                return kept
        found = cls(tensors, deadline)
        with cls._lock:
            for kept in candidates:
                # The same objects, which have other memory now: what is known of the old is stale.
                if [ids for ids, *_ in kept._traits] == [ids for ids, *_ in found._traits]:
                    kept._forget(None)
            cls._kept.append(found)
            if len(cls._kept) > ADOPTIONS_MAX:
                cls._kept[0]._forget(None)
        return found

    def __init__(self, tensors: Mapping[str, torch.Tensor], deadline: float = NEVER) -> None:
        specs: list[TensorSpec] = []
        runs: list[Run] = []
        extents: list[Extent] = []
        found: set[Device | None] = set()
        start = 0
        for name in until(deadline, check_tensors(tensors, deadline)):
            tensor = tensors[name]
            spec = spec_of(name, tensor)
            specs.append(spec)
            if not spec.size_bytes:
                continue
            if tensor.is_meta:
                raise UsageError(f"tensor {name!r} is on the meta device: it has no bytes to read or write")
            address = tensor.data_ptr()
            extents.append((str(tensor.device), address, spec.size_bytes, name))
            device = of(tensor)
            found.add(device)
            view = memory_at(address, spec.size_bytes) if device is None else None
            runs.append(Run(start, spec.size_bytes, address, view))
            start += spec.size_bytes
        self.ties = ties_of(extents)
        if len(found) > 1:
            names = sorted("cpu" if device is None else device.name for device in found)
            raise UsageError(f"one shard's tensors lie on several devices ({names}): adopt one shard each")
        self.device = next(iter(found), None)
        self.specs = TensorTable.of(specs)
        self.runs = Runs(runs)
        self._names = list(tensors)
        some_at_a_time = until(deadline, _some_at_a_time(tensors), 1)
        self._traits = [[list(map(trait, some)) for trait in _TRAITS] for some in some_at_a_time]
        self._tensors = [weakref.ref(tensor, self._forget) for tensor in until(deadline, tensors.values())]

    def runs_with(self, scratch: Mapping[str, torch.Tensor]) -> Runs:
        """Return the runs, with those of these names replaced by other host memory."""
        with_bytes = (spec for spec in self.specs if spec.size_bytes)
        runs = []
        for spec, run in zip(with_bytes, self.runs.all, strict=True):
            if spec.name in scratch:
                flat = flat_bytes(scratch[spec.name])
                run = Run(run.start, run.size_bytes, flat.data_ptr(), memory_of(flat))
            runs.append(run)
        return Runs(runs)

    def _is_of(self, tensors: Mapping[str, torch.Tensor], deadline: float) -> bool:
        """Return whether these are the same tensor objects, all alive (see `_forget`), unmoved and unreshaped."""
        return self._names == list(tensors) and all(
            list(map(trait, some)) == before  # the identities come first: other objects may lack the rest
            for some, traits in zip(until(deadline, _some_at_a_time(tensors), 1), self._traits, strict=True)
            for trait, before in zip(_TRAITS, traits, strict=True)
        )

    def _forget(self, _: object) -> None:
        # With no name of this module: it is empty already when the last tensors die with the interpreter.
        try:  # noqa: SIM105
            self._kept.remove(self)
        except ValueError:
            pass
        self._tensors.clear()  # their callbacks refer to this object: without them it is freed at once


def forget_live_memory() -> None:
    """Forget what is known of live tensors that are about to leave their memory: other memory may be behind the same
    addresses later, as in an engine's sleep. Only open slabs keep what they know; no network card has the memory
    registered afterwards."""
    with Adoption._lock:
        kept = list(Adoption._kept)
    for each in kept:
        each._forget(None)


def _some_at_a_time(tensors: Mapping[str, torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield the tensors in groups: large enough that no line of Python runs for each tensor, small enough that they are
    still in the cache when the next trait is read."""
    rest = iter(tensors.values())
    while some := list(islice(rest, 256)):
        yield some
