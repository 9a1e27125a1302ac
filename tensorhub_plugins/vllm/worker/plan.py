"""What a worker needs of a checkpoint, and where it goes: baked from what the model's own loaders did (contract.py).

    region   the smallest box of a checkpoint tensor that holds all that the loaders took of it. Only that is fetched.
    piece    a box of a checkpoint tensor that a loader wrote, as it was, into a box of a parameter. Elements in order.
    process  a layer with a parameter that is not made of pieces, each element of one: what is cast and reordered by its
             loaders, or packed and quantized afterwards, goes through vLLM's reload.

A plan is a guess until it has been put to the test (conversion.py): loaders may read what they were not seen to read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tensorhub_plugins.core import Fetched, Part, TensorSpec

Box = tuple[int, tuple[int, ...], tuple[int, ...]]  # storage offset, shape, strides, in elements
Shapes = Mapping[str, tuple[torch.dtype, torch.Size]]

NONSENSE = 0x7F  # in every byte: 3e38 as a float of any kind


class Region(NamedTuple):
    """A box of a tensor: where it begins, and how large it is, in elements, by axis."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    def covers(self, other: Region) -> bool:
        mine, theirs = self.ends, other.ends
        return all(a <= b for a, b in zip(self.start, other.start, strict=True)) and all(
            a >= b for a, b in zip(mine, theirs, strict=True)
        )

    def within(self, other: Region) -> Region | None:
        """What both have in common, as a region of the other; None: nothing."""
        low = [max(pair) for pair in zip(self.start, other.start, strict=True)]
        high = [min(pair) for pair in zip(self.ends, other.ends, strict=True)]
        if any(a >= b for a, b in zip(low, high, strict=True)):
            return None
        start = tuple(a - b for a, b in zip(low, other.start, strict=True))
        return Region(start, tuple(b - a for a, b in zip(low, high, strict=True)))

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(start + size for start, size in zip(self.start, self.shape, strict=True))

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same box of this tensor."""
        return tensor[tuple(slice(start, end) for start, end in zip(self.start, self.ends, strict=True))]


class Piece(NamedTuple):
    """The box `taken` of the checkpoint tensor `source` becomes the box `written` of the parameter `target`.

    Both boxes have one shape; their offsets count from the beginning of the tensor.
    """

    source: str
    taken: Box
    target: str
    written: Box


@dataclass(frozen=True)
class Plan:
    """shapes: of the checkpoint. needed: regions by tensor; a tensor that is not named is not needed. process: names of
    layers."""

    shapes: Shapes
    pieces: tuple[Piece, ...]
    needed: Mapping[str, Region]
    process: frozenset[str]

    def wanted(self) -> list[TensorSpec]:
        """What is to be fetched: tensors, and where they lie in what is published."""
        return [spec_of(name, *self.shapes[name], region) for name, region in self.needed.items()]

    @property
    def needed_bytes(self) -> int:
        return sum(spec.size_bytes for spec in self.wanted())

    @property
    def checkpoint_bytes(self) -> int:
        return sum(dtype.itemsize * shape.numel() for dtype, shape in self.shapes.values())

    def by_source(self, *, without: frozenset[str]) -> Callable[[str], list[Piece]]:
        """The pieces of a checkpoint tensor, but those of these layers."""
        pieces: dict[str, list[Piece]] = {}
        for piece in self.pieces:
            if layer_of(piece.target) not in without:
                pieces.setdefault(piece.source, []).append(piece)
        return lambda name: pieces.get(name, [])

    def sources_of(self, layers: Iterable[str]) -> list[str]:
        """The checkpoint tensors from which something in these layers is made: all that are no piece of another."""
        chosen = set(layers)
        elsewhere = {piece.source for piece in self.pieces if layer_of(piece.target) not in chosen}
        within = {piece.source for piece in self.pieces if layer_of(piece.target) in chosen}
        return [name for name in self.needed if name in within or name not in elsewhere]


def layer_of(parameter: str) -> str:
    """The module that holds it."""
    return parameter.rpartition(".")[0]


def spec_of(name: str, dtype: torch.dtype, whole: torch.Size, region: Region) -> TensorSpec:
    part = None if region.shape == tuple(whole) else Part(tuple(whole), region.start)
    size_bytes = dtype.itemsize * torch.Size(region.shape).numel()
    return TensorSpec(name, str(dtype).removeprefix("torch."), region.shape, size_bytes, None, part)


def given_by(fetched: Fetched) -> Given:
    """What has been fetched, with its published shapes."""
    tensors = fetched.tensors()
    if fetched.wanted is None:
        return Given(tensors, {name: (t.dtype, t.shape) for name, t in tensors.items()})
    published = {spec.tensor: spec for manifest in fetched.manifests.values() for spec in manifest.tensors}
    shapes = {
        name: (getattr(torch, spec.dtype), torch.Size(spec.part.global_shape if spec.part else spec.shape))
        for name, spec in published.items()
    }
    regions = {spec.name: Region(spec.part.start, spec.shape) for spec in fetched.wanted if spec.part is not None}
    return Given(tensors, shapes, regions)


def whole_region(shape: Sequence[int]) -> Region:
    return Region((0,) * len(shape), tuple(shape))


def region_of(boxes: Iterable[Box], whole: Sequence[int]) -> Region:
    """The smallest region of a contiguous tensor of this shape that holds all of these views of it.

    Where a view's axes are not those of the tensor, it counts as all the rows from its first element to its last.
    """
    low: list[int] | None = None
    high: list[int] = []
    for box in boxes:
        start, end = _corners(box, tuple(whole))
        if low is None:
            low, high = start, end
        low, high = [min(pair) for pair in zip(low, start, strict=True)], [*map(max, high, end)]
    if low is None:
        return whole_region(whole)
    return Region(tuple(low), tuple(last + 1 - first for first, last in zip(low, high, strict=True)))


def _corners(box: Box, whole: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """First and last index on each axis of the whole."""
    offset, shape, strides = box
    steps = contiguous_strides(whole)
    first = [offset // step % size if size else 0 for step, size in zip(steps, whole, strict=True)]
    last = list(first)
    for count, stride in zip(shape, strides, strict=True):
        if count <= 1:
            continue
        axis = next((k for k, step in enumerate(steps) if whole[k] > 1 and stride >= step and stride % step == 0), None)
        if axis is None or last[axis] + (count - 1) * (stride // steps[axis]) >= whole[axis]:
            break
        last[axis] += (count - 1) * (stride // steps[axis])
    else:
        return first, last
    end = offset + sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True))
    rows = [offset // steps[0], end // steps[0]]
    return [rows[0], *(0 for _ in whole[1:])], [rows[1], *(size - 1 for size in whole[1:])]


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return tuple(strides)


class Given:
    """A checkpoint of which perhaps only regions are there, as whole tensors or by boxes.

    tensors: by name, each of the region's shape. shapes: as they were published, of all of them. regions: of those that
    are not whole. plan: how this worker would use a whole one. nonsense: `whole` has it where
    nothing is there, so that whoever takes from there is found out.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        shapes: Shapes,
        regions: Mapping[str, Region] | None = None,
        *,
        plan: Plan | None = None,
        nonsense: bool = False,
    ) -> None:
        self.tensors, self.shapes, self.plan, self._nonsense = tensors, shapes, plan, nonsense
        self.regions = {
            name: region
            for name, region in (regions or {}).items()
            if name in tensors and region.shape != tuple(shapes[name][1])
        }

    def whole(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """For loaders: tensors of the published shapes. What is not there is not initialised, and takes no memory
        but of the pages that are touched; each lives only as long as its user holds it."""
        for name in self.tensors if names is None else names:
            region, tensor = self.regions.get(name), self.tensors[name]
            if region is not None:
                dtype, shape = self.shapes[name]
                expanded = torch.empty(shape, dtype=dtype)
                if self._nonsense:
                    expanded.view(-1).view(torch.uint8).fill_(NONSENSE)
                region.of(expanded).copy_(tensor)
                tensor = expanded
            yield name, tensor

    def box(self, name: str, box: Box) -> torch.Tensor:
        """This view of the whole tensor, which lies within what is there of it."""
        region, tensor = self.regions.get(name), self.tensors[name]
        if region is None:
            return view(tensor, box)
        return _within(box, tuple(self.shapes[name][1]), region, tensor)


def view(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """This box of a contiguous tensor."""
    offset, shape, strides = box
    return tensor.as_strided(shape, strides, tensor.storage_offset() + offset)


def _within(box: Box, whole: tuple[int, ...], region: Region, tensor: torch.Tensor) -> torch.Tensor:
    offset, shape, strides = box
    steps = contiguous_strides(whole)
    first, last = _corners(box, whole)
    if not region.covers(Region(tuple(first), tuple(b - a + 1 for a, b in zip(first, last, strict=True)))):
        raise ValueError(f"box {box} of a tensor {whole} is not within {region}")
    mine = tensor.stride()
    at = [offset // step % size for step, size in zip(steps, whole, strict=True)]
    start = sum((here - begin) * step for here, begin, step in zip(at, region.start, mine, strict=True))
    moved = []
    for count, stride in zip(shape, strides, strict=True):
        axis = next((k for k, step in enumerate(steps) if whole[k] > 1 and stride >= step and stride % step == 0), 0)
        moved.append(stride // steps[axis] * mine[axis] if count > 1 else 0)
    return tensor.as_strided(shape, moved, tensor.storage_offset() + start)


def is_run(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether such a box lies in one piece."""
    step = 1
    for size, each in sorted(zip(shape, stride, strict=True), key=lambda pair: (pair[1], pair[0])):
        if size != 1 and each != step:
            return False
        step *= size
    return True


def filled(size: int, boxes: Iterable[Box]) -> int:
    """How many of so many elements lie in at least one of the boxes."""
    boxes = set(boxes)
    spans = sorted((offset, offset + torch.Size(shape).numel()) for offset, shape, step in boxes if is_run(shape, step))
    if len(spans) == len(boxes) and all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False)):
        return sum(end - start for start, end in spans)
    written = torch.zeros(size, dtype=torch.bool)
    for offset, shape, stride in boxes:
        written.as_strided(shape, stride, offset).fill_(True)
    return int(written.sum())
