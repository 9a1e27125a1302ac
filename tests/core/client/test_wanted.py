"""`fetch(wanted=...)`: parts of what is published, from the segments that hold a byte of them, each verified whole."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from client_stage import FIRST_HUB

from tensorhub_plugins.core import Client, CorruptBytes, Part, Server, TensorSpec, UsageError, start_server
from tensorhub_plugins.core.manifest import SEGMENT_SIZE_BYTES_MIN

ROWS, COLUMNS = 1024, 1024  # of float32: 4 MiB, 16 segments of the smallest size


@pytest.fixture
def hub() -> Iterator[Server]:
    with start_server(limits=FIRST_HUB) as server:
        yield server


def client(hub: Server, replica: str, **identity: int) -> Client:
    return Client(hub.address, run="r", model="m", replica=replica, **identity)


def numbers(first: int) -> torch.Tensor:
    return torch.arange(first, first + ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)


def rows(name: str, start: int, count: int) -> TensorSpec:
    part = None if count == ROWS else Part((ROWS, COLUMNS), (start, 0))
    return TensorSpec(name, "float32", (count, COLUMNS), 4 * count * COLUMNS, None, part)


def columns(name: str, start: int, count: int) -> TensorSpec:
    return TensorSpec(name, "float32", (ROWS, count), 4 * ROWS * count, None, Part((ROWS, COLUMNS), (0, start)))


def test_only_the_segments_that_hold_a_wanted_byte_are_read(hub: Server) -> None:
    tensors = {"a": numbers(0), "b": numbers(7), "c": numbers(9)}
    with client(hub, "trainer") as trainer, client(hub, "reader") as reader:
        trainer.publish(1, tensors)
        fetched = reader.fetch(1, wanted=[rows("a", 512, 512), columns("b", 3, 5)], serve=True)
        found = fetched.tensors()
        assert found.keys() == {"a", "b"}
        assert torch.equal(found["a"], tensors["a"][512:])
        assert torch.equal(found["b"], tensors["b"][:, 3:8])
        # Half of a's segments, all of b's, none of c's: of columns every segment holds some, and is verified whole.
        assert sum(fetched.report.sources.values()) == (8 + 16) * SEGMENT_SIZE_BYTES_MIN
        assert sum(slab.size_bytes for slab in fetched.slabs.values()) == 4 * COLUMNS * 512 + 4 * ROWS * 5
        assert reader.serving() == []  # it is no copy of the version, whatever was asked for
        fetched.release()
        whole = reader.fetch(1)
        assert whole.wanted is None and sum(whole.report.sources.values()) == 3 * 4 * ROWS * COLUMNS  # the control


def test_parts_are_put_together_from_what_several_ranks_publish(hub: Server) -> None:
    whole, other = numbers(0), numbers(3)
    with (
        client(hub, "trainer", shard=0, shard_count=2) as first,
        client(hub, "trainer", shard=1, shard_count=2) as last,
    ):
        halves = {"a": whole[:512]}, {"a": whole[512:], "b": other}
        for rank, (trainer, tensors) in enumerate(zip((first, last), halves, strict=True)):
            trainer.publish(1, tensors, parts={"a": Part((ROWS, COLUMNS), (512 * rank, 0))})
        with client(hub, "reader") as reader:
            fetched = reader.fetch(1, wanted=[rows("a", 500, 24), rows("b", 0, ROWS)])
            assert torch.equal(fetched.tensors()["a"], whole[500:524])
            assert torch.equal(fetched.tensors()["b"], other)
            fetched.release()
            alone = reader.fetch(1, wanted=[rows("a", 0, 8)])  # of one rank nothing is wanted
            assert torch.equal(alone.tensors()["a"], whole[:8])
            assert alone.report.sources == {"trainer/0": SEGMENT_SIZE_BYTES_MIN}


def test_several_boxes_of_one_tensor_come_from_their_segments_alone(hub: Server) -> None:
    whole = numbers(0)
    boxes = {"w/0": (0, 64), "w/1": (512, 8), "w/2": (1016, 8)}  # as q, k and v of a worker, in rows
    wanted = [
        TensorSpec(name, "float32", (count, COLUMNS), 4 * count * COLUMNS, None, Part((ROWS, COLUMNS), (at, 0), "w"))
        for name, (at, count) in boxes.items()
    ]
    with (
        client(hub, "trainer", shard=0, shard_count=2) as first,
        client(hub, "trainer", shard=1, shard_count=2) as last,
        client(hub, "reader") as reader,
    ):
        for rank, trainer in enumerate((first, last)):
            half = {"w": whole[512 * rank : 512 * (rank + 1)]}
            trainer.publish(1, half, parts={"w": Part((ROWS, COLUMNS), (512 * rank, 0))})
        fetched = reader.fetch(1, wanted=wanted)
        found = fetched.tensors()
        assert found.keys() == boxes.keys()
        for name, (at, count) in boxes.items():
            assert torch.equal(found[name], whole[at : at + count])
        assert sum(fetched.report.sources.values()) == 3 * SEGMENT_SIZE_BYTES_MIN
        twice = TensorSpec("w/3", "float32", (8, COLUMNS), 32 * COLUMNS, None, Part((ROWS, COLUMNS), (60, 0), "w"))
        with pytest.raises(UsageError, match="'w' that are wanted have something in common"):
            reader.fetch(1, wanted=[wanted[0], twice], timeout_s=5.0)


def test_a_damaged_segment_is_not_taken_for_the_part_of_it_that_is_right(hub: Server) -> None:
    tensors = {"a": numbers(0)}
    with client(hub, "trainer") as trainer, client(hub, "reader") as reader:
        trainer.publish(1, tensors, copy=False)
        tensors["a"][0, 0] = -1.0  # in the first segment, of which the wanted columns are still right
        with pytest.raises(CorruptBytes):
            reader.fetch(1, wanted=[columns("a", 512, 8)], timeout_s=5.0)
        tensors["a"][0, 0] = 0.0


@pytest.mark.parametrize(
    "wanted",
    [
        TensorSpec("a", "bfloat16", (ROWS, COLUMNS), 2 * ROWS * COLUMNS),
        TensorSpec("a", "float32", (8, COLUMNS), 32 * COLUMNS, None, Part((2 * ROWS, COLUMNS), (0, 0))),
        TensorSpec("b", "float32", (ROWS, COLUMNS), 4 * ROWS * COLUMNS),
    ],
    ids=["dtype", "shape", "name"],
)
def test_what_is_no_part_of_it_is_refused_by_name(wanted: TensorSpec, hub: Server) -> None:
    with client(hub, "trainer") as trainer, client(hub, "reader") as reader:
        trainer.publish(1, {"a": numbers(0)})
        with pytest.raises(UsageError, match=f"'{wanted.name}'"):
            reader.fetch(1, wanted=[wanted], timeout_s=5.0)
        with pytest.raises(UsageError, match="pass one of them"):
            reader.fetch(1, wanted=[wanted], into={"a": torch.zeros(ROWS, COLUMNS)})
        assert torch.equal(reader.fetch(1).tensors()["a"], numbers(0))


def test_another_layout_comes_whole(hub: Server) -> None:
    with client(hub, "trainer") as trainer, client(hub, "reader") as reader:
        trainer.publish(1, {"x": numbers(0)}, "runtime:f")
        fetched = reader.fetch(1, ("runtime:f", "checkpoint"), wanted=[rows("a", 0, 8)], converts=False)
        assert fetched.wanted is None and torch.equal(fetched.tensors()["x"], numbers(0))
