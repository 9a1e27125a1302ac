"""Where every source tensor goes; and that none is silently left as it was."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.reads import NOT_WANTED, check_cover, plan
from tensorhub_plugins.core.values import TensorSpec, stream_offsets


def spec(name: str, size: int = 4, dtype: str = "uint8", stride: tuple[int, ...] | None = None) -> TensorSpec:
    return TensorSpec(name, dtype, (size,), size, stride)


def test_an_equal_shard_is_placed_where_it_was():
    tensors = (spec("a", 3), spec("b", 5), spec("c", 0), spec("d", 1))
    assert plan(tensors, tensors) == [0, 3, 8, 8]


def test_two_shards_interleave_in_one_target_and_what_is_not_wanted_is_said():
    target = (spec("a", 3), spec("b", 5), spec("c", 7))
    assert plan((spec("a", 3), spec("c", 7), spec("z", 9)), target) == [0, 8, NOT_WANTED]
    assert plan((spec("b", 5),), target) == [3]


def test_nothing_in_nothing():
    assert plan((), ()) == []
    assert plan((spec("a"),), ()) == [NOT_WANTED]
    assert plan((), (spec("a"),)) == []


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
        plan((source,), (target,))
    assert all(word in str(caught.value) for word in [*words, "publish and replicate the same dtype"])


def test_every_wanted_tensor_has_exactly_one_source():
    check_cover({0: ["a", "b"], 1: ["c", "not wanted"]}, ["a", "b", "c"])
    with pytest.raises(UsageError, match=r"2 tensors would not be updated.*\['c', 'd'\]"):
        check_cover({0: ["a", "b"]}, ["a", "d", "b", "c"])
    with pytest.raises(UsageError, match="tensor 'b' is published by shard 0 and by shard 1"):
        check_cover({0: ["a", "b"], 1: ["b"]}, ["a", "b"])


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.booleans()), max_size=12))
def test_placed_tensors_never_overlap_and_fill_what_they_cover(drawn):
    """Source tensors split over any shards land side by side in the target."""
    specs = tuple(spec(f"t{index:02}", size) for index, (size, _, _) in enumerate(drawn))
    target = tuple(s for s, (_, _, wanted) in zip(specs, drawn, strict=True) if wanted)
    filled = bytearray(sum(s.size_bytes for s in target))
    for shard in range(4):
        source = tuple(s for s, (_, owner, _) in zip(specs, drawn, strict=True) if owner == shard)
        for s, place in zip(source, plan(source, target), strict=True):
            if place != NOT_WANTED:
                assert not any(filled[place : place + s.size_bytes])
                filled[place : place + s.size_bytes] = b"\x01" * s.size_bytes
                assert place == stream_offsets(target)[target.index(s)]
    assert all(filled)
