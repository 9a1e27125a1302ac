"""Tensors that arrive in parts, put together where they land: nothing is copied once it is there.

A source shard that holds parts is read into a *view*: a slab with that shard's own table, whose stream lies in pieces
within the whole tensors. So it is verified, and served to others, as the same shard that it was at the source.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from tensorhub_plugins.core.deadline import NEVER, until
from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.manifest import SHARD_SIZE_BYTES_MAX, TensorSpec, TensorTable
from tensorhub_plugins.core.memory.moves import check_cover, plan
from tensorhub_plugins.core.memory.runs import Run, Runs
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.memory.tensors import contiguous_spec, flat_bytes

ROW_SIZE_BYTES_MAX = 64 << 10  # longer rows are read, and written, in place


def has_parts(table: TensorTable) -> bool:
    """Return whether a shard holds less than all of some tensor."""
    return any(spec.part is not None for spec in table)


def whole_of(spec: TensorSpec) -> TensorSpec:
    """Return the contiguous tensor that this one is a part of. Raise UsageError for a dtype that torch lacks here."""
    dtype = getattr(torch, spec.dtype, None)
    if spec.part is None or not isinstance(dtype, torch.dtype):
        raise UsageError(f"tensor {spec.name!r} is no part of a larger one, or of a dtype unknown here: {spec.dtype!r}")
    return contiguous_spec(spec.tensor, dtype, spec.part.global_shape)


def view_of(table: TensorTable, blocks: Sequence[Slab], deadline: float = NEVER) -> Slab:
    """Make a slab with this table in the memory of allocated slabs, exactly one of which holds each name.

    The slabs may hold many more names: only the table's own are looked up, as hundreds of shards may share a slab.
    Raise UsageError for a tensor that they lack, or hold with another dtype or shape, DeadlineExceeded when so many
    take longer."""
    paced = partial(until, deadline)
    check_cover_of(table, blocks)
    whole = {name: tensor for block in blocks for name, tensor in block.tensors(table.of_tensor).items()}
    columns = _columns_of(table)
    flats = {name: flat_bytes(whole[name]) for name in paced({spec.tensor for spec in table if spec.name in columns})}
    addresses = {name: flat.data_ptr() for name, flat in flats.items()}
    runs = [
        Run(start, spec.size_bytes, addresses[spec.tensor] + column.start, None, column.of(flats[spec.tensor]))
        for spec, start in paced(zip(table, table.offsets, strict=True))
        if (column := columns.get(spec.name)) is not None
    ]
    placed = sorted(
        (move.source, move.target, move.size_bytes, index)
        for index, block in enumerate(blocks)
        for move in plan(table, block.specs, without=columns, paced=paced)
    )
    for start, target, size_bytes, index in paced(placed):
        memory = blocks[index].runs
        pieces = memory.pieces(target, target + size_bytes)
        for piece, (address, _) in zip(pieces, memory.addresses(target, target + size_bytes), strict=True):
            runs.append(Run(start, len(piece), int(address), piece))
            start += len(piece)
    runs.sort(key=lambda run: run.start)
    return Slab("view", table, Runs(runs), tensors=_Cuts(table, whole))


def check_cover_of(table: TensorTable, blocks: Sequence[Slab]) -> None:
    """Raise UsageError unless each tensor of the table has a place in exactly one of these slabs."""
    placed = [block.specs.positions for block in blocks]
    for name in table.of_tensor:
        if sum(name in positions for positions in placed) != 1:
            raise UsageError(f"tensor {name!r} has no place of its own in the memory that is read into")


def check_whole(tables: Mapping[int, TensorTable], deadline: float = NEVER) -> None:
    """Raise UsageError that names a tensor whose parts these source shards do not hold exactly once each."""
    paced = partial(until, deadline)
    specs = paced(spec for table in tables.values() for spec in table)
    wanted = {spec.tensor: whole_of(spec) for spec in specs if spec.part is not None}
    parts = {shard: TensorTable(spec for spec in table if spec.tensor in wanted) for shard, table in tables.items()}
    check_cover(parts, TensorTable.of(wanted.values()), paced)


def check_size(specs: Iterable[TensorSpec]) -> None:
    """Raise UsageError for whole tensors that no shard could hold: the sizes come from a peer, which is not trusted."""
    size_bytes = sum(spec.size_bytes for spec in specs)
    if size_bytes > SHARD_SIZE_BYTES_MAX:
        raise UsageError(f"parts of tensors that would have {size_bytes} bytes: the limit is {SHARD_SIZE_BYTES_MAX}")


class _Column(NamedTuple):
    """The location, in bytes, of a part that consists of many short rows at equal distances in its whole tensor."""

    start: int
    rows: int
    length: int
    distance: int

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return uint8[rows, bytes of a row]. whole: uint8[all bytes of the whole tensor]."""
        return whole.as_strided(self[1:3], (self.distance, 1), whole.storage_offset() + self.start)


def _columns_of(table: TensorTable) -> dict[str, _Column]:
    """Return the scattered parts of a table, by name."""
    found = _columns.get(table)
    if found is None:
        found = _columns[table] = {spec.name: column for spec in table if (column := _column(spec)) is not None}
    return found


_columns: WeakKeyDictionary[TensorTable, dict[str, _Column]] = WeakKeyDictionary()


def _column(spec: TensorSpec) -> _Column | None:
    part = spec.part
    if part is None or part.is_run or not spec.size_bytes:
        return None
    whole, depth = part.global_shape, len(spec.shape) - 1  # the dimensions after it are complete
    while depth > 0 and spec.shape[depth] == whole[depth]:
        depth -= 1
    rows: int = prod(spec.shape[:depth])
    length = spec.size_bytes // rows
    if rows == 1 or length > ROW_SIZE_BYTES_MAX or spec.shape[1:depth] != whole[1:depth]:
        return None
    element = spec.size_bytes // prod(spec.shape)
    steps = [element * prod(whole[axis + 1 :]) for axis in range(len(whole))]
    start = sum(at * step for at, step in zip(part.start, steps, strict=True))
    return _Column(start, rows, length, steps[depth - 1])


class _Cuts(Mapping[str, torch.Tensor]):
    """The tensors of a view, each made on access: of a million of them hardly any is used."""

    def __init__(self, table: TensorTable, whole: Mapping[str, torch.Tensor]) -> None:
        self._table, self._whole = table, whole

    def __getitem__(self, name: str) -> torch.Tensor:
        spec = self._table.specs[self._table.positions[name]]
        return _cut(spec, self._whole[spec.tensor])

    def __contains__(self, name: object) -> bool:
        return name in self._table.positions

    def __iter__(self) -> Iterator[str]:
        return iter(self._table.positions)

    def __len__(self) -> int:
        return len(self._table.positions)


def _cut(spec: TensorSpec, whole: torch.Tensor) -> torch.Tensor:
    part = spec.part
    if part is None:
        return whole
    if part.is_run:
        return whole.view(-1)[part.start[0] : part.start[0] + spec.shape[0]]
    return whole[tuple(slice(start, start + size) for start, size in zip(part.start, spec.shape, strict=True))]
