"""Which boxes of a checkpoint tensor are needed, and that a part of it gives the same views as the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tensorhub_plugins.vllm.worker.plan import Given, Piece, Plan, Region, filled, region_of, view

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
    region = region_of([box(wanted)], WHOLE)
    assert region == expected
    given = Given({"w": region.of(whole).clone()}, {"w": (whole.dtype, whole.shape)}, {"w": region}, nonsense=True)
    assert torch.equal(given.box("w", box(wanted)), wanted)
    strided = Given({"w": region.of(whole)}, {"w": (whole.dtype, whole.shape)}, {"w": region})  # a view of a larger one
    assert torch.equal(strided.box("w", box(wanted)), wanted)
    expanded = dict(given.whole())["w"]
    assert torch.equal(view(expanded, box(wanted)), wanted)
    assert (expanded == whole).sum() == torch.Size(region.shape).numel()  # the rest is nonsense


def test_a_region_of_several_views_holds_all_of_them() -> None:
    whole = numbers((6, 4))
    region = region_of([box(whole[1:2]), box(whole[4:, 2:])], (6, 4))
    assert region == Region((1, 0), (5, 4))
    assert region_of([], (6, 4)) == Region((0, 0), (6, 4))


def test_what_is_not_there_is_not_given() -> None:
    whole = numbers()
    region = Region((1, 0, 0), (2, 6, 5))
    given = Given({"w": region.of(whole)}, {"w": (whole.dtype, whole.shape)}, {"w": region})
    assert torch.equal(given.box("w", box(whole[2])), whole[2])
    for outside in (whole[3], whole[:2], whole):
        with pytest.raises(ValueError, match="not within"):
            given.box("w", box(outside))


def test_a_layer_that_is_reloaded_takes_its_tensors_and_those_that_are_pieces_of_nothing() -> None:
    row = (0, (4,), (1,))
    pieces = (Piece("q", row, "attn.weight", row), Piece("r", row, "moe.scale", row))
    shapes = {name: (torch.float32, torch.Size([4])) for name in ("q", "r", "made", "unused")}
    needed = {name: Region((0,), (4,)) for name in ("q", "r", "made")}
    plan = Plan(shapes, pieces, needed, frozenset({"moe"}))
    assert plan.sources_of(plan.process) == ["r", "made"]
    assert plan.by_source(without=plan.process)("q") == [pieces[0]] and not plan.by_source(without=plan.process)("r")
    assert (plan.needed_bytes, plan.checkpoint_bytes) == (48, 64)


def test_elements_are_counted_once() -> None:
    tensor = torch.zeros(6, 4)
    assert filled(24, [box(tensor[:3]), box(tensor[3:])]) == 24
    assert filled(24, [box(tensor[:4]), box(tensor[2:5])]) == 20  # 28 elements were written, and a row is missing
