"""Where the elements of a Megatron parameter belong, found by having it converted: conversions of the kinds that the
bridges do, written here in torch alone, against the parts that each rank finds out for itself.

tests/adapters/verl/test_megatron.py has the bridges themselves.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tensorhub_plugins.core import UsageError
from tensorhub_plugins.verl import megatron
from tensorhub_plugins.verl.megatron import Found, Place, Source, found_in, held_places, places, shares_of


def qkv(shards, *, groups, heads, size):
    """Of each query group its queries, its key and its value, in turn; cut anywhere."""
    merged = torch.cat(shards)
    each = merged.view(groups, (heads + 2) * size, *merged.shape[1:])
    split = each.split([heads * size, size, size], dim=1)
    return [(name, part.reshape(-1, *merged.shape[1:])) for name, part in zip("qkv", split, strict=True)]


def gated(shards):
    gates, ups = zip(*(shard.chunk(2) for shard in shards), strict=True)
    return [("gate", torch.cat(gates)), ("up", torch.cat(ups))]


def rows(shards, *, name="rows", vocabulary=None):
    return [(name, torch.cat(shards)[:vocabulary])]


def columns(shards):
    return [("columns", torch.cat(shards, dim=1))]


def same(shards):
    return [("norm", shards[0])]


def converted(kind, rank, ranks, asked):
    """What a rank's bridge makes of its shard, where it has nothing of the others."""
    return kind([asked if each == rank else megatron.nothing(asked) for each in range(ranks)])


def assembled(kind, shards):
    """Put together what each rank finds that it holds; every element must come once."""
    made, count = {}, {}
    for rank, shard in enumerate(shards):
        found = places(tuple(shard.shape), partial(converted, kind, rank, len(shards)), ranks=len(shards))
        for name in dict.fromkeys(place.name for place in found):
            for held in held_places(shard, [place for place in found if place.name == name]):
                assert held.tensor.untyped_storage()._cdata == shard.untyped_storage()._cdata  # a view
                start = held.part.start if held.part is not None else [0] * shard.ndim
                box = tuple(slice(s, s + n) for s, n in zip(start, held.tensor.shape, strict=True))
                whole = made.setdefault(name, torch.full(held.whole.shape, float("nan"), dtype=shard.dtype))
                whole[box] = held.tensor
                count[name] = count.get(name, 0) + held.tensor.numel()
    assert count == {name: tensor.numel() for name, tensor in made.items()}
    return made


def random(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)).bfloat16()


CASES = {
    "a group on every rank": (partial(qkv, groups=4, heads=3, size=5), [(25, 40)] * 4),
    "two groups on each": (partial(qkv, groups=4, heads=3, size=5), [(50, 40)] * 2),
    "fewer groups than ranks": (partial(qkv, groups=2, heads=2, size=6), [(12, 40)] * 4),
    "biases": (partial(qkv, groups=4, heads=3, size=5), [(50,)] * 2),
    "few columns": (partial(qkv, groups=2, heads=1, size=4), [(12, 3)] * 2),
    "one rank": (partial(qkv, groups=4, heads=3, size=5), [(100, 40)]),
    "gate and up": (gated, [(24, 40)] * 3),
    "columns": (columns, [(40, 24)] * 3),
    "rows": (rows, [(16, 40)] * 3),
    "a padded vocabulary": (partial(rows, vocabulary=41), [(16, 40)] * 3),
    "a rank with padding alone": (partial(rows, vocabulary=29), [(16, 40)] * 3),
    "a convolution": (rows, [(6, 3, 2, 2)] * 2),
}


@pytest.mark.parametrize(("kind", "shapes"), CASES.values(), ids=CASES)
def test_the_parts_of_all_ranks_are_what_their_gathered_shards_are_converted_to(kind, shapes):
    shards = [random(*shape) * (rank + 1) for rank, shape in enumerate(shapes)]
    made = assembled(kind, shards)
    assert sorted(made) == sorted(name for name, _ in kind(shards))
    assert all(torch.equal(made[name], tensor) for name, tensor in kind(shards))


def test_heads_that_are_taken_for_others_are_seen():
    """The control: a query group that were laid out as q, v, k."""
    shards = [random(50, 40), 2 * random(50, 40)]
    kind = partial(qkv, groups=4, heads=3, size=5)
    wrong = {"k": "v", "v": "k"}
    made = assembled(lambda given: [(wrong.get(name, name), tensor) for name, tensor in kind(given)], shards)
    truth = dict(kind(shards))
    assert [name for name in "qkv" if torch.equal(made[name], truth[name])] == ["q"]


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(("ranks", "size", "across"), [(1, 1, 1), (1, 12, 11), (3, 4, 5), (2, 30, 20)])
def test_any_order_of_rows_and_of_columns_is_found(axis, ranks, size, across):
    order = torch.randperm(ranks * size, generator=torch.Generator().manual_seed(size))
    shards = [random(*((size, across) if axis == 0 else (across, size))) + rank for rank in range(ranks)]

    def shuffled(given):
        return [("w", torch.cat(given, dim=axis).index_select(axis, order))]

    assert torch.equal(assembled(shuffled, shards)["w"], shuffled(shards)[0][1])


ODD = {
    "scaled": lambda w: w * 2,
    "shifted by one": lambda w: w + 1,  # norms around zero
    "negated": lambda w: -w,
    "rounded": lambda w: w.bfloat16().double(),
    "transposed": lambda w: w.t(),
    "twice the same row": lambda w: w[[0, 0, *range(2, len(w))]],
    "stacked": lambda w: w[None],
    "averaged": lambda w: (w + w.flip(0)) / 2,
}


@pytest.mark.parametrize("change", ODD.values(), ids=ODD)
@pytest.mark.parametrize("shape", [(320, 320), (320, 16), (12, 320), (5, 7)])
def test_what_a_bridge_computes_or_turns_is_refused(change, shape):
    with pytest.raises(UsageError, match="w: "):
        places(shape, lambda asked: [("w", change(asked))])


def test_a_bridge_that_needs_all_columns_is_asked_for_all_unless_there_are_too_many(monkeypatch):
    asked = []

    def needs_all(given):
        asked.append(tuple(given.shape))
        return [("w", given.view(-1, 40)[:, :40].flip(0))]

    assert len(places((20, 40), needs_all)) == 20  # row by row
    assert asked == [(20, 8), (20, 40)] or asked == [(20, 8), (8, 40), (20, 40)]
    monkeypatch.setattr(megatron, "PROBE_ELEMENTS_MAX", 100)
    with pytest.raises(UsageError):
        places((20, 41), needs_all)


# --- who publishes what ----------------------------------------------------------------------------------------------

TP, DP = 2, 3


def sources(tp, dp=0, copies=1, *, hidden=16, extra=()):
    """A rank's parameters of one layer: cut ones, and a norm that all ranks have."""
    given = {
        "qkv": (partial(qkv, groups=2, heads=1, size=4), "qkv", (12, hidden)),
        "fc2": (columns, ["columns"], (hidden, 24)),
    }
    given |= {"norm": (same, ["norm"], (hidden,)), **dict(extra)}
    for name, (kind, names, shape) in given.items():
        yield Source(name, random(*shape), list(names), partial(converted, kind, tp, TP), (TP, tp), (copies, dp))


def test_every_part_is_published_by_one_of_those_that_hold_it_and_all_ranks_know_all_tensors():
    found = [found_in(sources(tp, dp, DP), 0) for dp in range(DP) for tp in range(TP)]
    shares = [shares_of(found, own) for own in found]
    assert {one.problem for one in shares} == {""} and len({one.whole for one in shares}) == 1
    assert [spec.name for spec in shares[0].whole] == ["columns", "k", "norm", "q", "v"]
    publish = [sorted(name for name, (_, each) in one.mine.items() if each) for one in shares]
    assert sorted(name for each in publish for name in each) == sorted(["norm", *"qkv" * TP, *["columns"] * TP])
    assert publish == [["k", "norm", "q", "v"], ["k", "q", "v"], ["columns"], ["columns"], [], []]


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (lambda found: [*found[:-1], Found("it scales")], "it scales"),
        (lambda found: found[:1] + found[2:], "not the checkpoint"),  # nobody has a part
        (lambda found: [*found, found[1]], "not the checkpoint"),  # two have it
        (lambda found: [*found, found_in(sources(0, hidden=24), 0)], "on another"),
    ],
    ids=["a bridge that computes", "a part is missing", "a part comes twice", "other shapes"],
)
def test_ranks_gather_alike_where_the_parts_of_all_are_not_the_checkpoint(broken, why):
    found = broken([found_in(sources(tp), 0) for tp in range(TP)])
    assert [why in shares_of(found, own).problem for own in found] == [True] * len(found)


def test_an_embedding_that_two_stages_have_is_published_by_the_first():
    extra = {"embedding": (partial(rows, name="embed"), ["embed"], (8, 16))}.items()
    first = [found_in(sources(tp, extra=extra), 0) for tp in range(TP)]
    last = [found_in((one for one in sources(tp, extra=extra) if one.name == "embedding"), 1) for tp in range(TP)]
    found = [*first, *last]
    shares = [shares_of(found, own) for own in found]
    assert ["embed" in one.mine for one in shares] == [True, True, False, False]
    assert {one.problem for one in shares} == {""}


def test_experts_of_a_layer_are_asked_for_once():
    asked = []

    def expert(shards, name):
        asked.append(name)
        return [(name, torch.cat(shards))]

    def given(number):
        name = f"experts.{number}.up"
        weight = f"decoder.layers.0.mlp.experts.linear_fc1.weight{number}"
        return Source(
            weight, random(16, 40), [name], partial(converted, partial(expert, name=name), 0, 1), (1, 0), (1, 0)
        )

    found = found_in(map(given, range(3)), 0)
    assert asked == ["experts.0.up"] and sorted(found.mine) == [f"experts.{n}.up" for n in range(3)]
    assert found.mine["experts.2.up"] == (
        "decoder.layers.0.mlp.experts.linear_fc1.weight2",
        [Place("experts.2.up", (16, 40), 0, 0, 0, 16)],
    )
