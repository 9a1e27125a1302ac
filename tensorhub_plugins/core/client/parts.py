"""What one trainer rank holds of a sharded model: parts of its tensors, found without communication.

Every rank asks this of the same model, and all of them decide the same: which rank publishes what several ranks hold,
so that every element of every tensor is published exactly once. Nothing is gathered, cast or copied for it; the tensors
are the model's own memory.

    fsdp2.py   parameters are DTensors: boxes, of any number of dimensions and any mesh
    fsdp1.py   parameters are concatenated in flat memory, which is split anywhere: runs of their elements
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple, TypeAlias

import msgspec
import torch

from tensorhub_plugins.core.device.devices import settle_host
from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.manifest import Part, TensorSpec
from tensorhub_plugins.core.memory.tensors import contiguous_spec


class Held(NamedTuple):
    """The part of one tensor that this rank is to publish.

    whole: all of it, contiguous, in the model's dtype. tensor: this rank's part, on any device; None: it has none.
    part: its position; None if it is the whole tensor. Of several parts that a rank has of one tensor, all but the
    first have `part.tensor` set."""

    whole: TensorSpec
    tensor: torch.Tensor | None = None
    part: Part | None = None

    @property
    def is_further(self) -> bool:
        """Return whether this is another part of a tensor of which this rank has had one already."""
        return self.part is not None and self.part.tensor != ""

    @property
    def name(self) -> str:
        """Return the name under which this rank publishes it."""
        start = ".".join(map(str, self.part.start)) if self.part is not None else ""
        return f"{self.whole.name}@{start}" if self.is_further else self.whole.name

    def named(self, name: str) -> Held:
        """Return the same under another name."""
        return self._replace(whole=msgspec.structs.replace(self.whole, name=name))


Piece: TypeAlias = tuple[str, int, tuple[int, ...]]  # name, first element, shape


class Ownership:
    """Assigns each tensor to one of `ranks` trainer ranks: the one with the fewest bytes so far, the lowest of equals.

    All ranks see the same tensors in the same order, so all of them decide the same without a message."""

    def __init__(self, ranks: int) -> None:
        self._next = [(0, rank) for rank in range(ranks)]  # a heap: there may be 1,000 ranks and 50,000 tensors

    def give(self, size_bytes: int) -> int:
        """Return the owner of the next tensor."""
        given, owner = self._next[0]
        heapq.heapreplace(self._next, (given + size_bytes, owner))
        return owner


class Turns:
    """Decides which rank publishes what several ranks hold alike, with as many bytes for each of them."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self._among: dict[int, Ownership] = {}

    def is_mine(self, mine: int, count: int, size_bytes: int) -> bool:
        """Return whether it is the turn of the `mine`th of `count` that hold the next tensor of so many bytes."""
        return self._among.setdefault(count, Ownership(count)).give(size_bytes) == mine

    def one_of_all(self, name: str, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Held:
        """Return a whole tensor that every rank has, and one of them publishes, in this dtype (None: its own)."""
        whole = contiguous_spec(name, dtype or tensor.dtype, tensor.shape)
        mine = self.is_mine(self.rank, self.ranks, whole.size_bytes)
        if mine and dtype not in (None, tensor.dtype):
            settle_host([tensor])  # casting reads it
        return Held(whole, tensor.detach().to(dtype or tensor.dtype) if mine else None)


class AllHeld(Turns):
    """Every rank's turn, for all that it holds: what it reads, and not what it publishes."""

    def is_mine(self, mine: int, count: int, size_bytes: int) -> bool:
        """Return that it is."""
        return True


def of_all_ranks(given: Any) -> list[Any]:
    """Return what every trainer rank gives, in the order of ranks, on all of them; alone without torch.distributed."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return [given]
    everything: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everything, given)
    return everything


def held_box(whole: TensorSpec, tensor: torch.Tensor, start: tuple[int, ...]) -> Held:
    """Return a box of the whole tensor whose first element is at `start`."""
    if tuple(tensor.shape) == whole.shape:
        return Held(whole, tensor)
    return Held(whole, tensor, Part(whole.shape, start)) if tensor.numel() else Held(whole)


def held_run(whole: TensorSpec, flat: torch.Tensor, start: int) -> Held:
    """Return consecutive elements of the whole tensor from `start` on, as a tensor of one dimension."""
    count, shape = flat.numel(), whole.shape
    elements: int = prod(shape)
    if not count and elements:
        return Held(whole)
    if count == elements:
        return Held(whole, flat.view(shape))
    row: int = prod(shape[1:])
    if start % row or count % row:
        return Held(whole, flat, Part(whole.shape, (start,)))
    inner = shape[1:]
    return Held(whole, flat.view(count // row, *inner), Part(whole.shape, (start // row, *[0] * len(inner))))


def held_split(held: Held, pieces: Sequence[Piece]) -> Iterator[Held]:
    """Yield what is held of some smaller tensors, each contiguous in the whole one (the weights of one expert, of
    all experts in one). Raise UsageError for a part that is not contiguous itself."""
    element = held.whole.size_bytes // max(prod(held.whole.shape), 1)
    first, flat = _flat(held)
    for name, start, shape in pieces:
        whole = TensorSpec(name, held.whole.dtype, shape, element * prod(shape))
        if flat is None:
            yield Held(whole)
            continue
        low, high = max(first, start), min(first + flat.numel(), start + prod(shape))
        yield held_run(whole, flat[low - first : high - first], low - start) if low < high else Held(whole)


def _flat(held: Held) -> tuple[int, torch.Tensor | None]:
    """Return the first element's index, and all elements from there, in one dimension."""
    if held.tensor is None:
        return 0, None
    if held.part is not None and held.part.is_run:
        return held.part.start[0], held.tensor
    if not held.tensor.is_contiguous():
        settle_host([held.tensor])  # it will be copied
    if held.part is None:
        return 0, held.tensor.reshape(-1)
    if held.tensor.shape[1:] != held.part.global_shape[1:]:
        raise UsageError(f"tensor {held.whole.name!r} is cut along more than its first dimension")
    return held.part.start[0] * prod(held.part.global_shape[1:]), held.tensor.reshape(-1)
