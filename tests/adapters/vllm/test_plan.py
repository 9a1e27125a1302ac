"""Which boxes of a checkpoint tensor are needed, and that a part of it gives the same views as the whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from simulated import Simulation

from tensorhub_plugins.core import Slab, TensorTable, copy_all
from tensorhub_plugins.vllm.worker.conversion import Places
from tensorhub_plugins.vllm.worker.partial import NotEnough
from tensorhub_plugins.vllm.worker.partial import whole as whole_tensors
from tensorhub_plugins.vllm.worker.plan import (
    REGIONS_MAX,
    Given,
    Held,
    Piece,
    Plan,
    Region,
    filled,
    given_by,
    held_whole,
    regions_of,
    specs_of,
    view_in,
    whole_region,
)

WHOLE = (4, 6, 5)


def numbers(shape: tuple[int, ...] = WHOLE) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def box(tensor: torch.Tensor) -> Any:
    return tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride())


VIEWS: dict[str, tuple[Any, Region]] = {
    "all": (lambda t: t, Region((0, 0, 0), WHOLE)),
    "rows": (lambda t: t[1:3], Region((1, 0, 0), (2, 6, 5))),
    "one row": (lambda t: t[2], Region((2, 0, 0), (1, 6, 5))),
    "columns": (lambda t: t[:, 2:5], Region((0, 2, 0), (4, 3, 5))),
    "last axis": (lambda t: t[..., 1:3], Region((0, 0, 1), (4, 6, 2))),
    "corner": (lambda t: t[1:2, 3:, 4:], Region((1, 3, 4), (1, 3, 1))),
    "one element": (lambda t: t[3, 5, 4], Region((3, 5, 4), (1, 1, 1))),
    "transposed": (lambda t: t[:, :2].transpose(0, 2), Region((0, 0, 0), (4, 2, 5))),
    "every other": (lambda t: t[:, 1::2], Region((0, 1, 0), (4, 5, 5))),
    "two axes as one": (lambda t: t.view(24, 5)[7:16], Region((1, 0, 0), (2, 6, 5))),  # not a box: the rows it is in
    "broadcast": (lambda t: t[1:2].expand(3, 6, 5), Region((1, 0, 0), (1, 6, 5))),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_region_holds_its_views_and_gives_them_again(name: str) -> None:
    cut, expected = VIEWS[name]
    whole = numbers()
    wanted = cut(whole)
    (region,) = regions_of([box(wanted)], WHOLE)
    assert region == expected
    for here in (region.of(whole).clone(), region.of(whole)):  # also as a view of a larger one
        assert torch.equal(view_in([Held(region, here)], WHOLE, box(wanted)), wanted)
    given = Given.of({"w": whole}).cut({"w": [region]})
    (expanded,) = (tensor for _, tensor in whole_tensors(given, ["w"], torch.device("cpu")))
    assert torch.equal(cut(expanded) + 0, wanted)
    if region.shape != WHOLE:
        with pytest.raises(NotEnough):
            expanded + 0
    assert given.is_whole == (region.shape == WHOLE)


SEVERAL: dict[str, tuple[Any, list[Region]]] = {  # of a tensor of 12 rows and 4 columns
    "q, k and v of the first of two": ([(0, 3), (6, 7), (9, 10)], [(0, 3), (6, 1), (9, 1)]),
    "of the only one": ([(0, 6), (6, 9), (9, 12)], [(0, 12)]),
    "one after the other": ([(4, 6), (2, 4), (8, 9)], [(2, 4), (8, 1)]),
    "with rows in common": ([(0, 3), (2, 5), (7, 8)], [(0, 5), (7, 1)]),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_views_that_are_apart_are_regions_of_their_own(name: str) -> None:
    taken, expected = SEVERAL[name]
    whole = numbers((12, 4))
    views = [whole[start:stop] for start, stop in taken]
    regions = regions_of([box(each) for each in views], (12, 4))
    assert list(regions) == [Region((start, 0), (count, 4)) for start, count in expected]
    given = Given.of({"w": whole}).cut({"w": regions})
    for each in views:
        assert torch.equal(view_in(given.held["w"], (12, 4), box(each)), each)
    rows = {row for start, count in expected for row in range(start, start + count)}
    expanded = dict(whole_tensors(given, ["w"], torch.device("cpu")))["w"]
    for row in range(12):
        if row in rows:
            assert torch.equal(expanded[row] + 0, whole[row])
        else:
            with pytest.raises(NotEnough):
                expanded[row] + 0


def test_the_same_rows_of_many_experts_are_one_region() -> None:
    """Experts that are one tensor, whose gates and ups are taken one by one."""
    whole = numbers((128, 8, 3))
    boxes = [box(whole[expert, first : first + 2]) for expert in range(128) for first in (0, 4)]
    assert regions_of(boxes, whole.shape) == (Region((0, 0, 0), (128, 2, 3)), Region((0, 4, 0), (128, 2, 3)))


def test_boxes_that_meet_at_a_corner_and_those_that_are_too_many_are_one_region() -> None:
    whole = numbers((300, 4))
    assert regions_of([box(whole[:2, :3]), box(whole[1:3, 2:])], (300, 4)) == (Region((0, 0), (3, 4)),)
    far = [box(whole[2 * row + 1 : 2 * row + 2]) for row in range(REGIONS_MAX + 1)]
    assert len(regions_of(far[1:], (300, 4))) == REGIONS_MAX
    assert regions_of(far, (300, 4)) == (Region((1, 0), (2 * REGIONS_MAX + 1, 4)),)
    assert regions_of([], (300, 4)) == (Region((0, 0), (300, 4)),)


def test_what_is_not_there_is_not_given() -> None:
    whole = numbers()
    first, last = Region((0, 0, 0), (1, 6, 5)), Region((2, 0, 0), (2, 6, 5))
    held = [Held(region, region.of(whole)) for region in (first, last)]
    assert torch.equal(view_in(held, WHOLE, box(whole[2])), whole[2])
    for outside in (whole[1], whole[1:3], whole[:3], whole):
        with pytest.raises(ValueError, match="not within"):
            view_in(held, WHOLE, box(outside))


def test_a_layer_that_is_reloaded_takes_its_tensors_and_those_that_are_pieces_of_nothing() -> None:
    row = (0, (4,), (1,))
    pieces = (Piece("q", row, "attn.weight", row), Piece("r", row, "moe.scale", row))
    shapes = {name: (torch.float32, torch.Size([4])) for name in ("q", "r", "made", "unused")}
    needed = {name: (Region((0,), (4,)),) for name in ("q", "r", "made")}
    plan = Plan(shapes, pieces, needed, frozenset({"moe"}))
    assert plan.sources_of(plan.process) == ["r", "made"]
    assert plan.by_source(without=plan.process)("q") == [pieces[0]] and not plan.by_source(without=plan.process)("r")
    assert (plan.needed_bytes, plan.checkpoint_bytes) == (48, 64)


def test_elements_are_counted_once() -> None:
    tensor = torch.zeros(6, 4)
    assert filled(24, [box(tensor[:3]), box(tensor[3:])]) == 24
    assert filled(24, [box(tensor[:4]), box(tensor[2:5])]) == 20  # 28 elements were written, and a row is missing


def test_what_is_wanted_of_one_tensor_has_names_of_its_own() -> None:
    shapes = {name: (torch.bfloat16, torch.Size([12, 4])) for name in ("qkv", "o", "norm")}
    rows = [Region((start, 0), (count, 4)) for start, count in ((0, 3), (6, 1), (0, 12))]
    plan = Plan(shapes, (), {"qkv": (rows[0], rows[1]), "o": (rows[0],), "norm": (rows[2],)}, frozenset())
    found = [(spec.name, spec.tensor, spec.part and spec.part.start, spec.size_bytes) for spec in plan.wanted]
    assert found == [
        ("norm", "norm", None, 96),
        ("o", "o", (0, 0), 24),
        ("qkv/000", "qkv", (0, 0), 24),
        ("qkv/001", "qkv", (6, 0), 8),
    ]
    assert (plan.needed_bytes, plan.checkpoint_bytes) == (152, 288)


@pytest.mark.parametrize("by_name", [True, False])
def test_what_experts_have_beside_each_other_is_one_copy(by_name: bool) -> None:
    """N15: gate and up of each, which a parameter and what is fetched have in this order. The control: in another."""
    experts, rows, columns = 12, 8, 8
    live = {"w13": torch.empty(experts, 2 * rows, columns), "w2": torch.empty(experts, columns, rows)}
    pieces, taken = [], {}
    for k in range(experts):
        boxes = {
            "gate": ("w13", live["w13"][k, :rows]),
            "up": ("w13", live["w13"][k, rows:]),
            "down": ("w2", live["w2"][k]),
        }
        for number, (leaf, (target, place)) in enumerate(boxes.items()):
            taken[f"experts.{k}.{leaf}"] = tensor = place.fill_(3 * k + number).clone()
            pieces.append(Piece(f"experts.{k}.{leaf}", box(tensor), target, box(place)))
    shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in taken.items()}
    needed = {name: (whole_region(tensor.shape),) for name, tensor in taken.items()}
    plan = Plan(shapes, tuple(pieces), needed, frozenset())
    with Simulation(0) as simulation, Slab.allocate(plan.wanted, pin=True) as slab:
        held = {name: held_whole(tensor.copy_(taken[name])) for name, tensor in slab.tensors().items()}
        there = {name: simulation.put(torch.zeros(tensor.shape), name) for name, tensor in live.items()}
        simulation.calls.clear()
        places, names = Places(plan, frozenset()), sorted(held, reverse=not by_name)
        copy_all(pair for name in names for pair in places.pairs(there, name, held[name]))
        assert all(torch.equal(simulation.true(there[name]), tensor) for name, tensor in live.items())
        assert simulation.calls["copy"] == (2 if by_name else 3) * experts
        simulation.check()


def test_a_later_version_of_the_same_tables_does_not_decode_them_again() -> None:
    def table(rows: int) -> TensorTable:
        whole, mine = torch.Size((rows, 6)), Region((1, 0), (2, 6))
        return TensorTable(specs_of("w", torch.bfloat16, whole, [mine]))  # with an identity of its own

    def shapes(*tables: TensorTable) -> Any:
        manifests = {shard: SimpleNamespace(tensors=each) for shard, each in enumerate(tables)}
        fetched: Any = SimpleNamespace(tensors=dict, wanted=TensorTable([]), manifests=manifests)
        found = given_by(fetched).shapes
        for each in tables:
            is_decoded.append("specs" in each.__dict__)
            each.forget_specs()
        return found

    is_decoded: list[bool] = []
    first, like_it, other = table(4), table(4), table(8)
    of_four, of_eight = ({"w": (torch.bfloat16, torch.Size((rows, 6)))} for rows in (4, 8))
    assert shapes(first) == shapes(first) == of_four and is_decoded == [True, False]
    is_decoded.clear()
    assert shapes(other) == shapes(first, other) == of_eight and is_decoded == [True, True, True]  # the control
    is_decoded.clear()
    assert shapes(like_it) == of_four and is_decoded == [True]


def test_where_pieces_lie_is_known_from_the_last_version_only_while_it_is_so() -> None:
    """Whatever comes: whole, its region alone, as a view of something larger, or from another place in memory."""
    pieces, needed = [], {}
    for number, (cut, region) in enumerate(VIEWS.values()):
        name, target = f"w{number}", f"layer.{number}.weight"
        wanted = cut(numbers())
        written = (0, tuple(wanted.shape), tuple(torch.empty(wanted.shape).stride()))
        pieces.append(Piece(name, box(wanted), target, written))
        needed[name] = (region,)
    shapes = {name: (torch.float32, torch.Size(WHOLE)) for name in needed}
    places = Places(Plan(shapes, tuple(pieces), needed, frozenset()), frozenset())
    forms: list[Any] = [
        lambda region, whole: [Held(region, region.of(whole).clone())],
        lambda region, whole: [Held(region, region.of(whole))],
        lambda region, whole: [Held(Region((0, 0, 0), WHOLE), whole)],
        lambda region, whole: [Held(Region((0, 0, 0), WHOLE), torch.stack([whole, whole])[1])],
        lambda region, whole: [Held(region, region.of(whole).clone())],
        lambda region, whole: [Held(Region((0, 0, 0), WHOLE), whole.permute(2, 1, 0).contiguous().permute(2, 1, 0))],
    ]
    for version, form in enumerate(forms * 2):
        for piece, (cut, region) in zip(pieces, VIEWS.values(), strict=True):
            whole = numbers() + 1000 * version
            live = {piece.target: torch.zeros(piece.written[1])}
            for target, source in places.pairs(live, piece.source, form(region, whole)):
                target.copy_(source)
            assert torch.equal(live[piece.target], cut(whole)), (version, piece.source)
