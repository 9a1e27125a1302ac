"""Where a plan's pieces lie is worked out once, and again for what comes in another way: counted, not timed."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from tensorhub_plugins.vllm.worker import conversion
from tensorhub_plugins.vllm.worker.conversion import Pairs, Places
from tensorhub_plugins.vllm.worker.plan import Held, Piece, Plan, Region, view, view_in

SHAPE = (12, 8)
NAMES = tuple(f"layer{number}.weight" for number in range(6))


@pytest.fixture
def looked_for(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The boxes that were looked for in what has come."""
    boxes: list[object] = []
    real = conversion.place_in

    def place_in(held, whole, box):
        boxes.append(box)
        return real(held, whole, box)

    monkeypatch.setattr(conversion, "place_in", place_in)
    return boxes


def halves(random_: random.Random) -> tuple[Region, Region]:
    """The rows of a tensor, cut into two at random."""
    cut = random_.randrange(1, SHAPE[0])
    return (Region((0, 0), (cut, SHAPE[1])), Region((cut, 0), (SHAPE[0] - cut, SHAPE[1])))


def plan_of(needed: dict[str, tuple[Region, ...]], random_: random.Random) -> Plan:
    """Of each region some box, or all of it, into the same place of a parameter."""
    pieces = []
    for name, each in needed.items():
        for region in each:
            rows = random_.randrange(1, region.shape[0] + 1)
            box = Region(region.start, (rows, region.shape[1])).box_in(SHAPE)
            pieces.append(Piece(name, box, name, box))
    return Plan({name: (torch.float32, torch.Size(SHAPE)) for name in needed}, tuple(pieces), needed, frozenset())


def come(needed: dict[str, tuple[Region, ...]], *, turned: bool = False) -> dict[str, list[Held]]:
    """A version in new memory, all numbers different. turned: with other strides."""
    found = {}
    for name, each in needed.items():
        whole = torch.rand(SHAPE)
        parts = [region.of(whole) for region in each]
        found[name] = [
            Held(region, part.t().contiguous().t() if turned else part.contiguous())
            for region, part in zip(each, parts, strict=True)
        ]
    return found


def live() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(SHAPE) for name in NAMES}


def slowly(plan: Plan, to: dict[str, torch.Tensor], held: dict[str, list[Held]]) -> Pairs:
    pieces = plan.by_source(without=frozenset())
    return [(view(to[p.target], p.written), view_in(held[name], SHAPE, p.taken)) for name in held for p in pieces(name)]


def installed(pairs: Pairs, to: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    for target, source in pairs:
        target.copy_(source)
    return list(to.values())


def same(places: Places, plan: Plan, held: dict[str, list[Held]]) -> bool:
    """Whether what is known makes of these what the long way does, in parameters of which both have their own."""
    mine, theirs = live(), live()
    quickly = [pair for name, each in held.items() for pair in places.pairs(mine, name, each)]
    one, other = installed(quickly, mine), installed(slowly(plan, theirs, held), theirs)
    return all(map(torch.equal, one, other)) and any(tensor.any() for tensor in one)


def drawn(seed: int) -> tuple[Plan, dict[str, tuple[Region, ...]]]:
    random_ = random.Random(seed)
    needed = {name: halves(random_) for name in NAMES}
    return plan_of(needed, random_), needed


@pytest.mark.parametrize("seed", range(20))
def test_a_later_version_in_other_memory_is_copied_without_a_look(seed: int, looked_for: list[object]) -> None:
    plan, needed = drawn(seed)
    places = Places(plan, frozenset())
    assert same(places, plan, come(needed)) and len(looked_for) == len(plan.pieces)
    for _ in range(2):
        assert same(places, plan, come(needed))
    assert len(looked_for) == len(plan.pieces)
    Places(plan, frozenset()).pairs(live(), NAMES[0], come(needed)[NAMES[0]])
    assert len(looked_for) > len(plan.pieces)  # the control: what is not kept is looked for again


@pytest.mark.parametrize("seed", range(20))
def test_what_comes_in_another_way_is_looked_for_anew(seed: int, looked_for: list[object]) -> None:
    plan, needed = drawn(seed)
    places, wholes = Places(plan, frozenset()), {name: (Region((0, 0), SHAPE),) for name in NAMES}
    ways = (come(needed), come(wholes), come(needed, turned=True), come(needed))
    for number, held in enumerate(ways):
        assert same(places, plan, held), number
        assert len(places._known) == len(NAMES)  # as it came the last time, and no more
    stale = Places(plan, frozenset())
    for name, each in ways[0].items():
        stale.pairs(live(), name, each)
        stale._known[name] = [(region, tensor.stride()) for region, tensor in ways[2][name]], stale._known[name][1]
    assert not same(stale, plan, ways[2])  # the control: what was right of one is wrong for the other


def test_they_are_of_one_plan_and_of_its_layers() -> None:
    plan, _ = drawn(0)
    places = Places(plan, frozenset())
    assert places.are_of(plan, frozenset())
    assert not places.are_of(replace(plan), frozenset()) and not places.are_of(plan, frozenset({"layer0"}))


def test_what_is_wanted_is_put_together_once() -> None:
    plan, _ = drawn(0)
    assert plan.wanted is plan.wanted
