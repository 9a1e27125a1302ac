"""The order in which a matrix is published for readers that each take one slice of it. PURE: no memory is touched.

A worker of a tensor parallel engine needs one of `count` slices of nearly every matrix: rows of most, columns of those
whose outputs the workers add up. It reads whole segments, as these are the unit of verification, and a segment of full
rows has columns for everybody. So a matrix is published as its slices, each a part by itself, and the first slices of
all matrices lie together in the stream, then all second ones, and so on: what a worker needs is one stretch of it.

    000/model.layers.0.mlp.down_proj.weight       columns of the first worker
    000/model.layers.0.mlp.gate_proj.weight       rows of it
    ...
    001/model.layers.0.mlp.down_proj.weight       columns of the second worker
    ...
    model.norm.weight                             what is not cut, behind them

The names decide which matrices are cut by columns. A wrong guess costs no more than no guess would: workers read all of
that matrix. The table gives the location of every part, so the bytes are right in any case.

What is not cut: small tensors, of which there may be tens of thousands, those of which a trainer rank holds little, and
what every worker runs whole: cut, it would lie here and there among what only one of them needs. Experts are cut like
all others for engines whose workers each take a slice of every expert. For expert parallel ones, which take whole
experts, they stay in one piece, and lie together, apart from all else: a norm or a router between the experts of two
layers would cost every worker two segments of theirs. Only where slices of columns are as large as segments are they
cut, and lie side by side.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from tensorhub_plugins.core.manifest import SEGMENT_SIZE_BYTES, Part, TensorSpec

if TYPE_CHECKING:
    import torch

SLICES_MAX = 999
EXPERT = ".experts."
APART = "experts/"  # prefix of the name of a tensor that stays in one piece
# Matrices whose outputs are added up (vLLM's RowParallelLinear), by the last word before ".weight".
CUT_BY_COLUMNS = frozenset(
    (
        "o_proj", "out_proj", "wo", "dense", "c_proj", "o", "proj", "out_lin",  # behind the attention
        "down_proj", "w2", "fc2", "dense_4h_to_h", "fc_out", "linear_2", "lin2",  # behind the activation
    )
)  # fmt: skip
# Matrices that every worker runs whole (vLLM's ReplicatedLinear): routers, and what DeepSeek's attention begins with.
WHOLE = frozenset(
    ("gate", "router", "shared_expert_gate", "q_a_proj", "kv_a_proj_with_mqa", "wq_a", "wkv_a", "fused_qkv_a_proj")
)


class Least(NamedTuple):
    """The sizes in bytes below which nothing is cut: of a matrix (all smaller ones of a 7B model are less than 1 % of
    it); of its slice, except for experts, many of which lie side by side (several workers may need the same key and
    value heads); of the columns that a rank holds (their table entry is far smaller), and the same for the many
    experts; of the columns of an expert."""

    matrix: int = 2 << 20
    slice: int = 768 << 10
    columns: int = 32 << 10
    expert_columns: int = 64 << 10
    expert: int = SEGMENT_SIZE_BYTES


LEAST = Least()
_End: TypeAlias = tuple[str, int, int]  # of one slice: its name, and [start, stop) along the axis


class Slice(NamedTuple):
    """One published slice. spec: its description and its location in the larger tensor. The rest locates it in the
    tensor held: the box `box` of its elements [start, stop) viewed with `shape`; None: all elements, as they are."""

    spec: TensorSpec
    box: tuple[slice, ...] = ()
    elements: tuple[int, int] | None = None
    shape: tuple[int, ...] = ()

    def of(self, held: torch.Tensor) -> torch.Tensor:
        """Return a view of the slice in the tensor held."""
        if self.elements is not None:
            held = held[self.elements[0] : self.elements[1]].view(self.shape)
        return held[self.box] if self.box else held


def slices_of(held: TensorSpec, count: int, least: Least = LEAST, *, experts: bool = False) -> list[Slice]:
    """Return how all or a part of a tensor is published for readers that each take one of `count` slices.

    held: the name, dtype and shape held, and which part of the tensor it is. experts: readers take slices of experts,
    too, instead of whole experts. The slices cover it, each element once."""
    whole = held.part.global_shape if held.part is not None else held.shape
    size_bytes = held.size_bytes // max(prod(held.shape), 1) * prod(whole)
    kind, is_expert = held.tensor.removesuffix(".weight").rpartition(".")[2], EXPERT in held.tensor
    smallest = least.matrix if is_expert else max(least.matrix, count * least.slice)
    if count < 2 or len(whole) != 2 or kind in WHOLE or size_bytes < smallest or not held.size_bytes:
        return [Slice(held)]
    axis = 1 if kind in CUT_BY_COLUMNS else 0
    stays = is_expert and not experts
    if stays and (axis == 0 or size_bytes < count * least.expert):
        return [Slice(_spec(held, f"{APART}{held.name}", held.shape, held.part.start if held.part else (0, 0)))]
    if axis == 1 and held.size_bytes < count * (least.expert_columns if is_expert else least.columns):
        return [Slice(held)]
    width = -(-whole[axis] // count)
    names = (f"{APART}{held.name}/{k:03}" if stays else f"{k:03}/{held.name}" for k in range(count))
    ends = [(name, min(k * width, whole[axis]), min((k + 1) * width, whole[axis])) for k, name in enumerate(names)]
    return list(_cut(held, whole, axis, ends))


def _cut(held: TensorSpec, whole: tuple[int, int], axis: int, ends: list[_End]) -> Iterator[Slice]:
    if held.part is None or not held.part.is_run:
        yield from _boxes(held, (0, prod(held.shape)), held.part.start if held.part else (0, 0), held.shape, axis, ends)
        return
    row, start = whole[1], held.part.start[0]
    stop = start + held.shape[0]
    if axis == 0:
        for name, low, high in ends:
            first, last = max(start, low * row), min(stop, high * row)
            if first < last:
                yield _run(held, name, first, last)
        return
    first, last = -(-start // row), stop // row
    if first >= last:
        yield Slice(held)
        return
    if start < first * row:  # the end of a row that begins elsewhere
        yield _run(held, f"{held.name}/head", start, first * row)
    elements = first * row - start, last * row - start
    yield from _boxes(held, elements, (first, 0), (last - first, row), axis, ends)
    if last * row < stop:
        yield _run(held, f"{held.name}/tail", last * row, stop)


def _boxes(
    held: TensorSpec,
    elements: tuple[int, int],
    start: tuple[int, ...],
    shape: tuple[int, ...],
    axis: int,
    ends: list[_End],
) -> Iterator[Slice]:
    """Yield the slices of the box of this shape at `start` in the tensor, which are these elements of what is held."""
    for name, low, high in ends:
        first, last = max(start[axis], low), min(start[axis] + shape[axis], high)
        if first >= last:
            continue
        place = (first, start[1]) if axis == 0 else (start[0], first)
        size = (last - first, shape[1]) if axis == 0 else (shape[0], last - first)
        index = tuple(slice(p - s, p - s + n) for p, s, n in zip(place, start, size, strict=True))
        is_run = held.part is not None and held.part.is_run
        yield Slice(_spec(held, name, size, place), index, elements if is_run else None, shape)


def _run(held: TensorSpec, name: str, first: int, last: int) -> Slice:
    """Return the slice with these elements [first, last) of the tensor, from a run."""
    assert held.part is not None
    start = held.part.start[0]
    return Slice(_spec(held, name, (last - first,), (first,)), (slice(first - start, last - start),))


def _spec(held: TensorSpec, name: str, shape: tuple[int, ...], start: tuple[int, ...]) -> TensorSpec:
    element = held.size_bytes // prod(held.shape)
    whole = held.part.global_shape if held.part is not None else held.shape
    return TensorSpec(name, held.dtype, shape, element * prod(shape), None, Part(whole, start, held.tensor))
