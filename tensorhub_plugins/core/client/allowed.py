"""The time that one call is allowed: from its first line, for all that it does."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tensorhub_plugins.core.deadline import Deadline, timeout_for
from tensorhub_plugins.core.errors import DeadlineExceeded
from tensorhub_plugins.core.memory.slab import Slab


@dataclass(frozen=True)
class Allowed:
    """The time limit of a call. began: its first line. timeout_s: for tensors of its caller. begins_with: the deadline
    before it is known how much is read. grows: that extends it, and each segment that arrives."""

    began: float
    timeout_s: float
    begins_with: Deadline
    grows: bool

    @classmethod
    def begin(cls, timeout_s: float | None, tensors: object = None, *, grows: bool = False) -> Allowed:
        """Begin a call that moves these tensors; has to be its first line. Without a timeout it grows in any case."""
        began = time.monotonic()
        allowed_s = timeout_for(timeout_s, _size_of(tensors) if timeout_s is None else 0)
        return cls(began, allowed_s, Deadline(began + timeout_for(timeout_s, 0)), timeout_s is None or grows)

    @property
    def deadline(self) -> Deadline:
        """Return the deadline for all that is done with the tensors of the caller."""
        return Deadline(self.began + self.timeout_s)

    @contextmanager
    def naming(self, version: int | str) -> Iterator[None]:
        """Add the version to a DeadlineExceeded that was raised within, by this process and not by a peer."""
        try:
            yield
        except DeadlineExceeded as error:
            if error.timeout_s is not None:
                raise
            text = "the deadline passed before all tensors were looked at, copied and digested here"
            number = version if isinstance(version, int) else None
            raise error.within(text, version=number, phase=error.phase, timeout_s=self.timeout_s) from error


def _size_of(tensors: object) -> int:
    """Return the bytes of these tensors, of a slab or a mapping; 0 for anything else, which is refused later."""
    if isinstance(tensors, Slab):
        return tensors.size_bytes
    found = tensors.values() if isinstance(tensors, Mapping) else ()
    try:
        return sum(each.numel() * each.element_size() for each in found if isinstance(each, torch.Tensor))
    except (RuntimeError, ValueError):  # of a tensor that has no size yet, or not one
        return 0
