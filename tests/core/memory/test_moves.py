"""Where every source tensor goes; and that none is silently left as it was."""

from __future__ import annotations

import contextlib
import math
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transport_suite import SimpleShelf

from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.manifest import Manifest, Part, TensorSpec, TensorTable
from tensorhub_plugins.core.memory.moves import Move, check_cover, needed, plan, with_parts
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.transports import Offer
from tensorhub_plugins.core.transports.tcp import TcpTransport
from tensorhub_plugins.core.types import ShardKey


def table(*specs: TensorSpec) -> TensorTable:
    return TensorTable.of(specs)


def spec(name: str, size: int = 4, dtype: str = "uint8", stride: tuple[int, ...] | None = None) -> TensorSpec:
    return TensorSpec(name, dtype, (size,), size, stride)


def test_an_equal_shard_is_placed_where_it_was():
    tensors = table(spec("a", 3), spec("b", 5), spec("c", 0), spec("d", 1))
    assert plan(tensors, tensors) == [Move(0, 0, 9)]


def test_two_shards_interleave_in_one_target_and_what_is_not_wanted_is_said():
    target = table(spec("a", 3), spec("b", 5), spec("c", 7))
    assert plan(table(spec("a", 3), spec("c", 7), spec("z", 9)), target) == [Move(0, 0, 3), Move(3, 8, 7)]
    assert plan(table(spec("b", 5)), target) == [Move(0, 3, 5)]


def test_nothing_in_nothing():
    assert plan(table(), table()) == []
    assert plan(table(spec("a")), table()) == []
    assert plan(table(), table(spec("a"))) == []


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        (spec("w"), TensorSpec("w", "int8", (4,), 4), ["'w'", "uint8[4]", "int8[4]"]),
        (spec("w"), TensorSpec("w", "uint8", (2, 2), 4), ["'w'", "uint8[4]", "uint8[2, 2]"]),
        (
            TensorSpec("w", "uint8", (2, 3), 6),
            TensorSpec("w", "uint8", (2, 3), 6, (1, 2)),
            ["'w'", "uint8[2, 3]", "strided (1, 2)"],
        ),
    ],
    ids=["dtype", "shape", "stride"],
)
def test_a_tensor_that_differs_is_named_with_both_descriptions(source, target, words):
    with pytest.raises(UsageError) as caught:
        plan(table(source), table(target))
    assert all(word in str(caught.value) for word in [*words, "publish and replicate the same dtype"])


def specs(*names: str) -> TensorTable:
    return table(*map(spec, names))


def test_every_wanted_tensor_has_exactly_one_source():
    check_cover({0: specs("a", "b"), 1: specs("c", "not wanted")}, specs("a", "b", "c"))
    with pytest.raises(UsageError, match=r"2 tensors would not be updated.*\['c', 'd'\]"):
        check_cover({0: specs("a", "b")}, specs("a", "d", "b", "c"))
    with pytest.raises(UsageError, match="tensor 'b' is published by shard 0 and by shard 1"):
        check_cover({0: specs("a", "b"), 1: specs("b")}, specs("a", "b"))


# --- parts ---


def box(name: str, whole: tuple[int, ...], start: tuple[int, ...], shape: tuple[int, ...]) -> TensorSpec:
    (made,) = with_parts([TensorSpec(name, "int16", shape, 2 * math.prod(shape))], {name: Part(whole, start)})
    return made


def test_rows_are_one_move_and_columns_one_for_each_row():
    whole = box("w", (6, 4), (0, 0), (6, 4))
    assert whole.part is None  # all there is
    assert plan(table(whole), table(box("w", (6, 4), (2, 0), (3, 4)))) == [Move(16, 0, 24)]
    assert plan(table(whole), table(box("w", (6, 4), (0, 1), (2, 2)))) == [Move(2, 0, 4), Move(10, 4, 4)]
    assert plan(table(box("w", (6, 4), (0, 0), (3, 4))), table(box("w", (6, 4), (3, 0), (3, 4)))) == []


def test_a_ranks_rows_need_only_their_segments():
    manifest = Manifest(table(TensorSpec("w", "int16", (64, 8), 1024)), bytes(16 * 16), 64)
    assert needed(manifest, plan(manifest.tensors, table(box("w", (64, 8), (16, 0), (16, 8))))) == (4, 5, 6, 7)
    assert needed(manifest, []) == ()


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"w": Part((4,), (0,))}, "no part of"),
        ({"w": Part((4, 4), (3, 0))}, "no part of"),
        ({"w": Part((4, 4), (-1, 0))}, "no part of"),
        ({"v": Part((4, 4), (0, 0))}, "not there"),
    ],
)
def test_a_part_that_cannot_be_is_refused(parts, words):
    with pytest.raises(UsageError, match=words):
        with_parts([TensorSpec("w", "int16", (2, 4), 16)], parts)


def test_parts_of_different_wholes_and_holes_and_overlaps_are_named():
    with pytest.raises(UsageError, match=r"at \[0, 0\] of \[8, 4\]"):
        plan(table(box("w", (8, 4), (0, 0), (2, 4))), table(box("w", (6, 4), (0, 0), (2, 4))))
    top, middle, bottom = (table(box("w", (6, 4), (row, 0), (2, 4))) for row in (0, 2, 4))
    whole = table(box("w", (6, 4), (0, 0), (6, 4)))
    check_cover({0: top, 1: middle, 2: bottom}, whole)
    with pytest.raises(UsageError, match="not all of them.*'w'"):
        check_cover({0: top, 2: bottom}, whole)
    with pytest.raises(UsageError, match="tensor 'w' is published by shard 0 and by shard 1"):
        check_cover({0: top, 1: table(box("w", (6, 4), (1, 0), (5, 4)))}, whole)


@st.composite
def splits(draw: st.DrawFn) -> tuple[tuple[int, ...], list[list[int]], list[list[int]]]:
    """A shape, and two ways to cut it along every dimension: at the source and at the targets."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))

    def cuts(size: int) -> list[int]:
        return [0, *sorted(draw(st.sets(st.integers(1, size - 1), max_size=3)) if size > 1 else ()), size]

    return shape, [cuts(size) for size in shape], [cuts(size) for size in shape]


def boxes(cuts: list[list[int]]) -> list[tuple[slice, ...]]:
    return list(product(*([slice(a, b) for a, b in pairwise(each)] for each in cuts)))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(drawn=st.lists(splits(), min_size=1, max_size=3), segment_size_bytes=st.integers(1, 40))
def test_from_any_parts_to_any_parts_the_bytes_are_those_of_plain_slices(drawn, segment_size_bytes):
    """Every source shard holds some boxes of each tensor, every target some others; read over a real link."""
    wholes = {
        f"t{index}": torch.arange(math.prod(shape), dtype=torch.int16).reshape(shape) + 1000 * index
        for index, (shape, _, _) in enumerate(drawn)
    }

    def parts(of: int) -> dict[int, dict[str, tuple[slice, ...]]]:
        """shard or target -> its box of each tensor."""
        dealt: dict[int, dict[str, tuple[slice, ...]]] = {}
        for index, cuts in enumerate(drawn):
            for number, each in enumerate(boxes(cuts[of])):
                dealt.setdefault(number, {})[f"t{index}"] = each
        return dealt

    def slab(of: dict[str, tuple[slice, ...]], *, blank: bool) -> Slab:
        tensors = {name: wholes[name][each].contiguous() for name, each in of.items()}
        made = Slab.adopt({name: torch.zeros_like(t) if blank else t for name, t in tensors.items()})
        where = {name: Part(tuple(wholes[name].shape), tuple(s.start for s in each)) for name, each in of.items()}
        made.specs = with_parts(made.specs, where)
        return made

    shelf, sources = SimpleShelf(), parts(1)
    for number, of in sources.items():
        source = slab(of, blank=False)
        offer = Offer(ShardKey(1, "checkpoint", number, len(sources)), source.manifest(segment_size_bytes), source)
        offer.mark_all_ready()
        shelf.put(offer)
    with contextlib.closing(TcpTransport()) as transport:
        link = transport.connect(transport.serve(shelf), deadline=math.inf)
        for of in parts(2).values():
            target = slab(of, blank=True)
            manifests = {
                n: link.open(ShardKey(1, "checkpoint", n, len(sources)), 0, deadline=math.inf) for n in sources
            }
            check_cover({n: manifest.tensors for n, manifest in manifests.items()}, target.specs)
            for number, manifest in manifests.items():
                link.open(ShardKey(1, "checkpoint", number, len(sources)), 0, deadline=math.inf)
                moves = plan(manifest.tensors, target.specs)
                if moves:
                    segments = needed(manifest, moves)
                    assert list(link.read(segments, target, moves, deadline=math.inf)) == list(segments)
                    assert all(link.digest(segment) == manifest.digest(segment) for segment in segments)
            for name, tensor in target.tensors().items():
                assert torch.equal(tensor, wholes[name][of[name]]), name


@st.composite
def boxes_of_a_tensor(draw):
    """Starts and shapes of parts, in a tensor of one to three axes."""
    axis = st.tuples(st.integers(0, 3), st.integers(1, 3))
    box = st.lists(axis, min_size=(axes := draw(st.integers(1, 3))), max_size=axes)
    return [tuple(zip(*one, strict=True)) for one in draw(st.lists(box, min_size=1, max_size=6))]


@given(boxes_of_a_tensor())
def test_an_overlap_is_found_wherever_it_is(boxes):
    """As by comparing every element."""
    whole = (6,) * len(boxes[0][0])
    elements = [set(product(*(range(a, a + n) for a, n in zip(*one, strict=True)))) for one in boxes]
    sources = {shard: table(box("w", whole, *one)) for shard, one in enumerate(boxes)}
    said = ""
    try:
        check_cover(sources, table(TensorSpec("w", "int16", whole, 2 * math.prod(whole))))
    except UsageError as error:
        said = str(error)
    once = sum(map(len, elements)) == len(set.union(*elements))
    assert ("is published by shard" in said) is not once
    assert bool(said) is not (once and sum(map(len, elements)) == math.prod(whole))


def test_ten_thousand_columns_of_as_many_shards_make_a_matrix():
    count = 10_000
    whole, target = (2, count), table(TensorSpec("w", "int16", (2, count), 4 * count))
    sources = {column: table(box("w", whole, (0, column), (2, 1))) for column in range(count)}
    check_cover(sources, target)
    with pytest.raises(UsageError, match="tensor 'w' is published by shard 77 and by shard 78"):
        check_cover(sources | {78: table(box("w", whole, (1, 77), (1, 2)))}, target)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.booleans()), max_size=12))
def test_placed_tensors_never_overlap_and_fill_what_they_cover(drawn):
    """Source tensors split over any shards land side by side in the target."""
    specs = tuple(spec(f"t{index:02}", size) for index, (size, _, _) in enumerate(drawn))
    target = table(*(s for s, (_, _, wanted) in zip(specs, drawn, strict=True) if wanted))
    filled = bytearray(sum(s.size_bytes for s in target))
    for shard in range(4):
        source = table(*(s for s, (_, owner, _) in zip(specs, drawn, strict=True) if owner == shard))
        for move in plan(source, target):
            assert not any(filled[move.target : move.target + move.size_bytes])
            filled[move.target : move.target + move.size_bytes] = b"\x01" * move.size_bytes
    assert all(filled)
