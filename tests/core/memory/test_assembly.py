"""Views of parts in whole tensors: what lies where, against torch's own slices, and what is found once."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tensorhub_plugins.core.manifest import Part, TensorSpec, TensorTable
from tensorhub_plugins.core.memory import moves
from tensorhub_plugins.core.memory.assembly import view_of, whole_of
from tensorhub_plugins.core.memory.slab import Slab

DTYPES = (torch.bfloat16, torch.float32, torch.uint8)


def cut(shape: tuple[int, ...], random_: random.Random) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Boxes (start, shape) that cover a tensor of this shape, each element once."""
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((0,) * len(shape), shape)]
    for _ in range(random_.randrange(4)):
        start, size = boxes.pop(random_.randrange(len(boxes)))
        axis = random_.randrange(len(shape))
        if size[axis] < 2:
            boxes.append((start, size))
            continue
        at = random_.randrange(1, size[axis])
        low, high = list(size), list(size)
        low[axis], high[axis] = at, size[axis] - at
        beyond = list(start)
        beyond[axis] += at
        boxes += [(start, tuple(low)), (tuple(beyond), tuple(high))]
    return boxes


def table_of(seed: int) -> tuple[TensorTable, dict[str, tuple[str, tuple[slice, ...]]]]:
    """Parts of some tensors in one shard, and where each lies: (tensor, slices)."""
    random_ = random.Random(seed)
    specs, places = [], {}
    for number in range(random_.randrange(1, 5)):
        shape = tuple(random_.randrange(1, 9) for _ in range(random_.randrange(1, 4)))
        dtype = random_.choice(DTYPES)
        for k, (start, size) in enumerate(cut(shape, random_)):
            name, tensor = f"{k}/t{number}", f"t{number}"
            elements = torch.Size(size).numel()
            part = Part(shape, start, tensor)
            specs.append(
                TensorSpec(name, str(dtype).removeprefix("torch."), size, elements * dtype.itemsize, None, part)
            )
            places[name] = tensor, tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))
    return TensorTable.of(specs), places


def blocks_of(table: TensorTable) -> list[Slab]:
    wholes = {spec.tensor: whole_of(spec) for spec in table}
    return [Slab.allocate(wholes.values(), pin=False)]


@pytest.mark.parametrize("seed", range(60))
def test_what_is_written_to_a_view_lies_where_torch_has_its_slices(seed: int) -> None:
    table, places = table_of(seed)
    blocks = blocks_of(table)
    for version in (1, 2):  # the second one with what was found for the first
        view = view_of(table, blocks)
        numbers = torch.manual_seed(seed + version)
        given = torch.randint(0, 256, (view.size_bytes,), dtype=torch.uint8, generator=numbers)
        with view.writable(0, view.size_bytes) as pieces:
            at = 0
            for piece in pieces:
                piece[:] = given.numpy()[at : at + len(piece)]
                at += len(piece)
        assert at == view.size_bytes
        wholes, start = blocks[0].tensors(), 0
        for spec in table:
            tensor, slices = places[spec.name]
            expected = given[start : start + spec.size_bytes]
            start = table.offsets[table.positions[spec.name]] + spec.size_bytes
            for here in (wholes[tensor][slices], view.tensors([spec.name])[spec.name]):
                assert torch.equal(here.contiguous().view(-1).view(torch.uint8), expected)
        assert view.tensors().keys() == places.keys()


class Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return function(*args, **(kwargs or {}))


def rows_and_columns(rows: int, columns: int) -> TensorTable:
    """Of two matrices: one by rows, one by columns."""
    size, element = (64, 64), 2
    specs = []
    for k in range(rows):
        part = Part(size, (64 // rows * k, 0), "r")
        specs.append(TensorSpec(f"r/{k}", "bfloat16", (64 // rows, 64), 64 * 64 // rows * element, None, part))
    for k in range(columns):
        part = Part(size, (0, 64 // columns * k), "c")
        specs.append(TensorSpec(f"c/{k}", "bfloat16", (64, 64 // columns), 64 * 64 // columns * element, None, part))
    return TensorTable.of(specs)


def test_a_version_makes_tensors_of_columns_only() -> None:
    """Of a million parts hardly any is ever asked for as a tensor."""
    table = rows_and_columns(rows=32, columns=4)
    blocks = blocks_of(table)
    with Counted() as counted:
        view = view_of(table, blocks)
    assert counted.calls < 12  # a few for each whole tensor, one for each part by columns
    with Counted() as counted:
        assert len(view.tensors()) == 36
    assert counted.calls >= 36  # the control


def test_what_lies_where_is_found_once_for_two_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[TensorTable] = []
    original = moves._plan_by_tensor

    def counted(source: TensorTable, *args: Any) -> Any:
        planned.append(source)
        return original(source, *args)

    monkeypatch.setattr(moves, "_plan_by_tensor", counted)
    table = rows_and_columns(4, 4)
    blocks = blocks_of(table)
    for _ in range(3):
        view_of(table, blocks)
    assert planned == [table]
    # Other memory of the same tensors knows it, and another table does not.
    view_of(table, blocks_of(table))
    assert planned == [table]
    view_of(rows_and_columns(8, 4), blocks)
    assert len(planned) == 2


def test_what_was_found_without_some_tensors_is_not_taken_for_all() -> None:
    table = rows_and_columns(4, 4)
    (block,) = blocks_of(table)
    columns = {f"c/{k}" for k in range(4)}
    without, everything = moves.plan(table, block.specs, without=columns), moves.plan(table, block.specs)
    assert sum(move.size_bytes for move in without) == 64 * 64 * 2 == sum(move.size_bytes for move in everything) // 2
    assert moves.plan(table, block.specs, without=columns) == without
    assert moves.plan(table, block.specs, without={"c/0"}) != without
    assert moves.plan(table, block.specs, without=set(columns)) == without


def test_nothing_of_a_table_is_kept_when_it_is_gone() -> None:
    table = rows_and_columns(4, 4)
    blocks = blocks_of(table)
    view = view_of(table, blocks)
    gc.collect()  # of other tests
    before = len(moves._plans)
    del view, blocks, table
    gc.collect()
    assert len(moves._plans) == before - 1
