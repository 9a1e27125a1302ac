"""What a worker needs of a checkpoint, and where it goes: derived from what its loaders did (checkpoint_contract.py).

    region   a box of a checkpoint tensor of which the loaders took something. Only regions are fetched: of a tensor
             that q, k and v share, one for each.
    piece    a box of a checkpoint tensor that a loader wrote, as it was, into a box of a parameter. Elements in order.
    process  a layer with a parameter that is not made of pieces, each element of one: what is cast and reordered by its
             loaders, or packed and quantized afterwards, goes through vLLM's reload.

A plan is a guess until it has been validated (conversion.py): loaders may read what no rehearsal showed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, reduce
from itertools import chain
from typing import Any, NamedTuple

import torch

from tensorhub_plugins.core import Fetched, Part, TensorSpec, TensorTable, common_box

Strided = tuple[int, tuple[int, ...], tuple[int, ...]]  # storage offset, shape, strides, in elements
Shapes = Mapping[str, tuple[torch.dtype, torch.Size]]

REGIONS_MAX = 64  # of one tensor: no known model takes more than six, and every copy searches them


class Region(NamedTuple):
    """A box of a tensor: its start and its size, in elements, by axis."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    def covers(self, other: Region) -> bool:
        return common_box(self.box, other.box) == other.box

    def meets(self, other: Region) -> bool:
        """Return whether they have an element in common."""
        return common_box(self.box, other.box) is not None

    def around(self, other: Region) -> Region:
        """Return the smallest region that contains both."""
        start = tuple(map(min, self.start, other.start))
        return Region(start, tuple(max(pair) - at for *pair, at in zip(self.ends, other.ends, start, strict=True)))

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(start + size for start, size in zip(self.start, self.shape, strict=True))

    @property
    def box(self) -> tuple[tuple[int, int], ...]:
        """Return [start, stop) on each axis."""
        return tuple(zip(self.start, self.ends, strict=True))

    def box_in(self, whole: Sequence[int]) -> Strided:
        """Return it as a view of a contiguous tensor of this shape."""
        steps = contiguous_strides(whole)
        return sum(start * step for start, step in zip(self.start, steps, strict=True)), self.shape, steps

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the same box of this tensor."""
        return tensor[tuple(slice(start, end) for start, end in zip(self.start, self.ends, strict=True))]


class Held(NamedTuple):
    """The part of a checkpoint tensor that is here: a region, as a tensor of that shape."""

    region: Region
    tensor: torch.Tensor


class Piece(NamedTuple):
    """A copy: the box `taken` of the checkpoint tensor `source` becomes the box `written` of the parameter `target`.

    Both boxes have one shape; their offsets count from the beginning of the tensor."""

    source: str
    taken: Strided
    target: str
    written: Strided


@dataclass(frozen=True)
class Plan:
    """What a worker needs of a checkpoint, and how it uses it. shapes: the checkpoint's. needed: disjoint regions by
    tensor; a tensor without any is not needed. process: names of layers."""

    shapes: Shapes
    pieces: tuple[Piece, ...]
    needed: Mapping[str, tuple[Region, ...]]
    process: frozenset[str]

    @cached_property
    def wanted(self) -> TensorTable:
        """Return the table to fetch: tensors, and where they lie in what is published."""
        specs = (specs_of(name, *self.shapes[name], regions) for name, regions in self.needed.items())
        return TensorTable.of(chain.from_iterable(specs))

    @property
    def is_cut(self) -> bool:
        """Return whether it needs less than a whole tensor of any."""
        wholes = {name: (whole_region(shape),) for name, (_, shape) in self.shapes.items()}
        return any(regions != wholes[name] for name, regions in self.needed.items())

    @property
    def needed_bytes(self) -> int:
        return self.wanted.size_bytes

    @cached_property
    def checkpoint_bytes(self) -> int:
        return sum(dtype.itemsize * shape.numel() for dtype, shape in self.shapes.values())

    def by_source(self, *, without: frozenset[str]) -> Callable[[str], list[Piece]]:
        """Return a function that gives the pieces of a checkpoint tensor, except those of these layers."""
        pieces: dict[str, list[Piece]] = {}
        for piece in self.pieces:
            if layer_of(piece.target) not in without:
                pieces.setdefault(piece.source, []).append(piece)
        return lambda name: pieces.get(name, [])

    def sources_of(self, layers: Iterable[str]) -> list[str]:
        """Return the checkpoint tensors that contribute to these layers: all that are not a piece of another."""
        chosen = set(layers)
        elsewhere = {piece.source for piece in self.pieces if layer_of(piece.target) not in chosen}
        within = {piece.source for piece in self.pieces if layer_of(piece.target) in chosen}
        return [name for name in self.needed if name in within or name not in elsewhere]

    def sources_beside(self, layers: Iterable[str]) -> list[str]:
        """Return the checkpoint tensors that contribute to more than these layers, or to nothing that is known."""
        chosen = set(layers)
        elsewhere = {piece.source for piece in self.pieces if layer_of(piece.target) not in chosen}
        within = {piece.source for piece in self.pieces if layer_of(piece.target) in chosen}
        return [name for name in self.shapes if name in elsewhere or name not in within]


def layer_of(parameter: str) -> str:
    """Return the module that holds it."""
    return parameter.rpartition(".")[0]


def specs_of(name: str, dtype: torch.dtype, whole: torch.Size, regions: Sequence[Region]) -> list[TensorSpec]:
    """Return these regions of a tensor of this shape, under names of their own where there are several."""
    specs = []
    for number, region in enumerate(regions):
        size_bytes = dtype.itemsize * torch.Size(region.shape).numel()
        called = name if len(regions) == 1 else f"{name}/{number:03}"
        part = (
            None if region.shape == tuple(whole) else Part(tuple(whole), region.start, "" if called == name else name)
        )
        specs.append(TensorSpec(called, str(dtype).removeprefix("torch."), region.shape, size_bytes, None, part))
    return specs


def given_by(fetched: Fetched) -> Given:
    """Return what has been fetched, with its published shapes."""
    tensors = fetched.tensors()
    if fetched.wanted is None:
        return Given.of(tensors)
    shapes = _published([manifest.tensors for manifest in fetched.manifests.values()])
    held: dict[str, tuple[Held, ...]] = {}
    for spec in fetched.wanted:
        region = Region(spec.part.start, spec.shape) if spec.part is not None else whole_region(spec.shape)
        held[spec.tensor] = (*held.get(spec.tensor, ()), Held(region, tensors[spec.name]))
    return Given(held, shapes)


def _published(tables: Sequence[TensorTable]) -> Shapes:
    """Return the shapes of all tensors in these tables. The last result is kept: a later version has the same tables,
    which may have dropped their specs, and decoding a million of them again takes a second."""
    global _found
    refs, shapes = _found
    if len(refs) == len(tables) and all(ref() is table for ref, table in zip(refs, tables, strict=True)):
        return shapes
    specs = {spec.tensor: spec for table in tables for spec in table}
    shapes = {
        name: (getattr(torch, spec.dtype), torch.Size(spec.part.global_shape if spec.part else spec.shape))
        for name, spec in specs.items()
    }
    _found = tuple(map(weakref.ref, tables)), shapes
    return shapes


_found: tuple[tuple[weakref.ref[TensorTable], ...], Shapes] = ((), {})  # one value: any thread may replace it


def whole_region(shape: Sequence[int]) -> Region:
    return Region((0,) * len(shape), tuple(shape))


def regions_of(boxes: Iterable[Strided], whole: Sequence[int]) -> tuple[Region, ...]:
    """Return the fewest regions of a contiguous tensor of this shape that hold exactly these views of it; for more than
    REGIONS_MAX, the smallest one around all.

    A view whose axes are not the tensor's counts as all the rows from its first element to its last."""
    found = {_around(box, tuple(whole)) for box in boxes} or {whole_region(whole)}
    before = 0
    while len(found) != before:
        before = len(found)
        for axis in reversed(range(len(whole))):
            found = _joined(found, axis)
    return apart(sorted(found)) if len(found) <= REGIONS_MAX else (reduce(Region.around, found),)


def _joined(regions: Iterable[Region], axis: int) -> set[Region]:
    """Return the same elements, with one region for those that are adjacent, or overlap, along an axis."""
    beside: dict[tuple[object, ...], list[Region]] = {}
    for region in sorted(regions, key=lambda each: each.start[axis]):
        others = tuple(pair for k, pair in enumerate(zip(region.start, region.shape, strict=True)) if k != axis)
        row = beside.setdefault(others, [])
        if row and region.start[axis] <= row[-1].ends[axis]:
            row[-1] = row[-1].around(region)
        else:
            row.append(region)
    return {region for row in beside.values() for region in row}


def apart(regions: Sequence[Region]) -> tuple[Region, ...]:
    """Return disjoint regions: one around those that have an element in common."""
    found: list[Region] = []
    for region in regions:
        while meeting := [other for other in found if other.meets(region)]:
            region = reduce(Region.around, meeting, region)
            found = [other for other in found if other not in meeting]
        found.append(region)
    return tuple(sorted(found))


def _around(box: Strided, whole: tuple[int, ...]) -> Region:
    """Return the smallest region that contains a view."""
    first, last = _corners(box, whole)
    return Region(tuple(first), tuple(b - a + 1 for a, b in zip(first, last, strict=True)))


def _corners(box: Strided, whole: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Return the first and last index on each axis of the whole."""
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


class Lazy(Mapping[str, Sequence[Held]]):
    """The regions of some tensors, made each time they are asked for: they may take memory as long as they are used."""

    def __init__(self, names: Iterable[str], make: Callable[[str], Sequence[Held]]) -> None:
        self._names, self._make = dict.fromkeys(names), make

    def __getitem__(self, name: str) -> Sequence[Held]:
        if name not in self._names:
            raise KeyError(name)
        return self._make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names


class Given:
    """A checkpoint of which perhaps only regions are here, as whole tensors or by boxes.

    held: by tensor, its regions. shapes: as they were published, of all tensors. plan: how this worker would use a
    whole one."""

    def __init__(self, held: Mapping[str, Sequence[Held]], shapes: Shapes, *, plan: Plan | None = None) -> None:
        self.held, self.shapes, self.plan = held, shapes, plan

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], plan: Plan | None = None) -> Given:
        """Make one that is complete."""
        return cls({name: held_whole(t) for name, t in tensors.items()}, shapes_of(tensors), plan=plan)

    @property
    def is_whole(self) -> bool:
        """Return whether every tensor is here in full."""
        if self.held.keys() != self.shapes.keys():
            return False
        return all(one[0].region.shape == tuple(self.shapes[name][1]) for name, one in self.held.items())

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that are one region, or whole."""
        return {name: held[0].tensor for name, held in self.held.items() if len(held) == 1}

    def cut(self, needed: Mapping[str, Sequence[Region]]) -> Given:
        """Return only these regions of what is here."""

        def cut(name: str) -> list[Held]:
            shape, held = self.shapes[name][1], self.held[name]
            return [Held(each, view_in(held, shape, each.box_in(shape))) for each in needed[name]]

        return Given(Lazy(needed, cut), self.shapes)


def held_whole(tensor: torch.Tensor) -> tuple[Held, ...]:
    return (Held(whole_region(tensor.shape), tensor),)


def shapes_of(tensors: Mapping[str, torch.Tensor]) -> Shapes:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


def view_in(held: Sequence[Held], whole: Sequence[int], box: Strided) -> torch.Tensor:
    """Return this view of a contiguous tensor of this shape, which lies within one of its held regions."""
    index, place = place_in(held, whole, box)
    return view(in_order(held[index], whole), place)


def in_order(held: Held, whole: Sequence[int]) -> torch.Tensor:
    """Return it with its elements in the order of the whole: copied if it arrived whole but, say, transposed."""
    return held.tensor.contiguous() if held.region.shape == tuple(whole) else held.tensor


def place_in(held: Sequence[Held], whole: Sequence[int], box: Strided) -> tuple[int, Strided]:
    """Return the index of the held region that contains such a view, and its box in that region's tensor."""
    if held[0].region.shape == tuple(whole):
        return 0, box
    around = _around(box, tuple(whole))
    for index, (region, tensor) in enumerate(held):
        if region.covers(around):
            return index, _within(box, tuple(whole), region, tensor.stride())
    raise ValueError(f"box {box} of a tensor {whole} is not within {[each.region for each in held]}")


def within(held: Sequence[Held], whole: Sequence[int], box: Strided) -> Iterator[Held]:
    """Yield the parts of held regions that lie in the smallest region around this view of a tensor of this shape."""
    around = _around(box, tuple(whole))
    for region, tensor in held:
        common = common_box(region.box, around.box)
        if common is not None:
            part = Region(tuple(low for low, _ in common), tuple(high - low for low, high in common))
            here = tuple(low - start for low, start in zip(part.start, region.start, strict=True))
            yield Held(part, Region(here, part.shape).of(tensor))


def view(tensor: torch.Tensor, box: Strided) -> torch.Tensor:
    """Return this box of a contiguous tensor."""
    offset, shape, strides = box
    return tensor.as_strided(shape, strides, tensor.storage_offset() + offset)


def _within(box: Strided, whole: tuple[int, ...], region: Region, mine: tuple[int, ...]) -> Strided:
    """Return the box of a view of the whole in the tensor of a region, which has these strides."""
    offset, shape, strides = box
    steps = contiguous_strides(whole)
    at = [offset // step % size for step, size in zip(steps, whole, strict=True)]
    start = sum((here - begin) * step for here, begin, step in zip(at, region.start, mine, strict=True))
    moved = []
    for count, stride in zip(shape, strides, strict=True):
        axis = next((k for k, step in enumerate(steps) if whole[k] > 1 and stride >= step and stride % step == 0), 0)
        moved.append(stride // steps[axis] * mine[axis] if count > 1 else 0)
    return start, shape, tuple(moved)


@cache
def is_view(operation: Any) -> bool:
    """Return whether this operation of torch only views its first tensor differently, according to its schema."""
    given, made = operation._schema.arguments, operation._schema.returns
    writes = any(each.alias_info is not None and each.alias_info.is_write for each in (*given, *made))
    return not writes and bool(made) and all(each.alias_info is not None for each in made)


def is_run(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether such a box is contiguous."""
    step = 1
    for size, each in sorted(zip(shape, stride, strict=True), key=lambda pair: (pair[1], pair[0])):
        if size != 1 and each != step:
            return False
        step *= size
    return True


def filled(size: int, boxes: Iterable[Strided]) -> int:
    """Return how many of so many elements lie in at least one of the boxes."""
    boxes = set(boxes)
    spans = sorted((offset, offset + torch.Size(shape).numel()) for offset, shape, step in boxes if is_run(shape, step))
    if len(spans) == len(boxes) and all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False)):
        return sum(end - start for start, end in spans)
    written = torch.zeros(size, dtype=torch.bool)
    for offset, shape, stride in boxes:
        written.as_strided(shape, stride, offset).fill_(True)
    return int(written.sum())
