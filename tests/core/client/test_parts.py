"""Whole tensors out of parts: put together where they land, served on as they came, refused where parts are missing."""

from __future__ import annotations

import gc
import sys

import msgspec
import pytest
import torch
from client_stage import client
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorhub_plugins.core import CHECKPOINT, Manifest, Part, ShardKey, TensorTable, UsageError, contiguous_spec
from tensorhub_plugins.core.client import destinations
from tensorhub_plugins.core.client.budget import Budget
from tensorhub_plugins.core.client.parts import Held, Ownership, Turns, held_run, held_split
from tensorhub_plugins.core.client.publisher import Publisher
from tensorhub_plugins.core.client.serving import Serving
from tensorhub_plugins.core.deadline import NEVER
from tensorhub_plugins.core.memory import assembly
from tensorhub_plugins.core.memory.pool import SlabPool

ROWS, COLUMNS = 1000, 257  # 1 MB, in several segments, and no row on a boundary


def model(seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        "columns": torch.randn(64, 96, generator=generator),
        "norm": torch.randn(7, generator=generator).bfloat16(),
        "rows": torch.randn(ROWS, COLUMNS, generator=generator),
        "runs": torch.randn(61, 13, 3, generator=generator).bfloat16(),
        "scalar": torch.randn((), generator=generator),
    }


def of_rank(whole, rank):
    """Of two ranks: rows cut unevenly, columns, a run that ends within a row, and what only one of them has."""
    cut = (0, 617, ROWS)
    rows = slice(*cut[rank : rank + 2])
    half = slice(48 * rank, 48 * rank + 48)
    ends = (0, 1000, whole["runs"].numel())
    flat = whole["runs"].reshape(-1)[ends[rank] : ends[rank + 1]]
    tensors = {"rows": whole["rows"][rows], "columns": whole["columns"][:, half], "runs": flat}
    parts = {
        "rows": Part((ROWS, COLUMNS), (cut[rank], 0)),
        "columns": Part((64, 96), (0, 48 * rank)),
        "runs": Part((61, 13, 3), (ends[rank],)),
    }
    alone = {"norm": whole["norm"]} if rank == 0 else {"scalar": whole["scalar"]}
    return {**tensors, **alone}, parts


@pytest.fixture
def ranks(address):
    trainers = [client(address, "trainer", rank, 2) for rank in range(2)]
    yield trainers
    for trainer in trainers:
        trainer.close()


def publish(ranks, version):
    whole = model(version)
    for rank, trainer in enumerate(ranks):
        tensors, parts = of_rank(whole, rank)
        trainer.publish(version, tensors, parts=parts)
    return whole


def assert_same(tensors, expected):
    assert sorted(tensors) == sorted(expected)
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype and tensors[name].shape == tensor.shape, name
        assert torch.equal(tensors[name], tensor), name


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_what_was_published_in_parts_is_fetched_whole_and_served_on_in_the_same_parts(address, ranks, transport):
    first, second = (client(address, name, transports=(transport,)) for name in ("first", "second"))
    for version in (1, 2, 3):
        whole = publish(ranks, version)
        fetched = first.fetch(version, serve=True)
        assert_same(fetched.tensors(), whole)
        assert set(fetched.report.sources) == {"trainer/0", "trainer/1"}
        for trainer in ranks:
            trainer.unpublish(version)
        again = second.fetch(version)
        assert_same(again.tensors(), whole)
        assert set(again.report.sources) == {"first/0"}
        assert again.report.roots == fetched.report.roots
        again.release()
        if version > 1:
            first.unpublish(version - 1)
    first.close()
    second.close()


def test_the_roots_are_of_the_bytes_that_are_there(address, ranks):
    reader = client(address, "reader")
    publish(ranks, 1)
    fetched = reader.fetch(1, serve=False)
    assert fetched.roots() == fetched.report.roots and sorted(fetched.roots()) == [0, 1]
    for name, shards in {"norm": {0}, "scalar": {1}, "columns": {0}, "rows": {0}}.items():  # the first byte of each
        byte = fetched.tensors()[name].reshape(-1)[:1].view(torch.uint8)[:1]
        byte ^= 1
        assert {shard for shard, root in fetched.roots().items() if root != fetched.report.roots[shard]} == shards
        byte ^= 1
    assert fetched.roots() == fetched.report.roots
    reader.close()


def test_the_memory_is_one_copy_and_is_used_again(address, ranks):
    reader = client(address, "reader")
    used, held = [], []
    for version in (1, 2, 3, 4):
        whole = publish(ranks, version)
        fetched = reader.fetch(version, serve=True)
        size_bytes = sum(tensor.nbytes for tensor in whole.values())
        assert sum(slab.size_bytes for slab in fetched.slabs.values()) == size_bytes
        used.append({tensor.data_ptr() for tensor in fetched.tensors().values()})
        if version > 1:
            reader.unpublish(version - 1)
            held.pop().release()
        held.append(fetched)
    assert used[0] == used[2] and used[1] == used[3] and not used[0] & used[1]
    reader.close()


def test_memory_that_is_offered_does_not_go_back_to_the_pool(address, ranks):
    reader = client(address, "reader")
    whole = publish(ranks, 1)
    served = reader.fetch(1, serve=True)
    kept = {name: tensor.clone() for name, tensor in served.tensors().items()}
    views = served.tensors()
    served.release()  # it is on offer still
    publish(ranks, 2)
    reader.fetch(2)
    assert_same(views, kept)
    reader.unpublish(1)
    publish(ranks, 3)
    later = reader.fetch(3).tensors()  # the control: now it does
    assert {tensor.data_ptr() for tensor in later.values()} == {tensor.data_ptr() for tensor in views.values()}
    assert_same(later, model(3))
    assert not torch.equal(views["rows"], whole["rows"])
    reader.close()


def test_what_is_served_already_and_fetched_again_keeps_no_memory(address, ranks):
    reader = client(address, "reader")
    publish(ranks, 1)
    used = set()
    for _ in range(5):
        fetched = reader.fetch(1, serve=True)
        used |= {tensor.data_ptr() for tensor in fetched.tensors().values()}
        fetched.release()
    assert len(used) == 2 * len(model(1))  # what is served, and what the other fetches have used in turn
    assert len(reader._serving._lent) == len(reader.serving()) == 2
    reader.unpublish(1)
    assert not reader._serving._lent
    reader.close()


@pytest.mark.parametrize("broken", ["missing", "twice", "shape"])
def test_parts_that_do_not_make_a_whole_are_refused_and_the_next_version_is_read(address, ranks, broken):
    reader = client(address, "reader")
    publish(ranks, 1)
    reader.fetch(1).release()
    for rank, trainer in enumerate(ranks):
        tensors, parts = of_rank(model(2), rank)
        if rank == 1 and broken == "missing":
            tensors["rows"], parts["rows"] = tensors["rows"][:-1], Part((ROWS, COLUMNS), (617, 0))
        elif rank == 0 and broken == "twice":
            tensors["rows"] = model(2)["rows"][:618]
        elif rank == 1 and broken == "shape":
            parts["rows"] = Part((ROWS + 1, COLUMNS), (617, 0))
        trainer.publish(2, tensors, parts=parts)
    words = {"missing": "not all of them", "twice": "published by shard 0 and by shard 1", "shape": "'rows' is float32"}
    with pytest.raises(UsageError, match=words[broken]):
        reader.fetch(2)
    assert_same(reader.fetch(1).tensors(), model(1))  # the control
    publish(ranks, 3)
    assert_same(reader.fetch(3).tensors(), model(3))
    reader.close()


def test_other_tensors_than_the_last_time_leave_no_old_ones_behind(address, ranks):
    reader = client(address, "reader")
    publish(ranks, 1)
    reader.fetch(1).release()
    whole = model(2)
    for rank, trainer in enumerate(ranks):
        tensors, parts = of_rank(whole, rank)
        del tensors["columns"], parts["columns"]
        trainer.publish(2, tensors, parts=parts)
    del whole["columns"]
    assert_same(reader.fetch(2).tensors(), whole)
    reader.close()


def test_a_reader_takes_its_rows_out_of_runs(address, ranks):
    whole = publish(ranks, 1)
    reader = client(address, "reader")
    mine = torch.zeros(20, 13, 3, dtype=torch.bfloat16)
    report = reader.replicate({"runs": mine}, parts={"runs": Part((61, 13, 3), (15, 0, 0))}, serve=False)
    assert torch.equal(mine, whole["runs"][15:35])
    assert set(report.sources) == {"trainer/0", "trainer/1"}
    inner = torch.zeros(61, 5, 3, dtype=torch.bfloat16)
    reader.replicate({"runs": inner}, parts={"runs": Part((61, 13, 3), (0, 4, 0))}, serve=False)
    assert torch.equal(inner, whole["runs"][:, 4:9])
    reader.close()


# --- the publisher ---


def publishers(address, ranks, **options):
    return [
        Publisher(
            client(address, "trainer", rank, ranks),
            rank=rank,
            ranks=ranks,
            worker=f"trainer/{rank}",
            keep=2,
            timeout_s=10,
            **options,
        )
        for rank in range(ranks)
    ]


def flat_shares(whole, rank, ranks):
    """As FSDP1 and ZeRO-3 cut: every tensor in equal runs, the last one shorter or empty."""
    for name, tensor in whole.items():
        size = -(-tensor.numel() // ranks)
        flat = tensor.reshape(-1)[rank * size : (rank + 1) * size]
        yield held_run(contiguous_spec(name, tensor.dtype, tensor.shape), flat, min(rank * size, tensor.numel()))


@pytest.mark.parametrize("gathers", [False, True], ids=["parts", "gathered"])
def test_what_keeps_its_dtype_is_not_cast(address, gathers):
    (trainer,), reader = publishers(address, 1, dtype=torch.bfloat16, keeps_dtype=exact), client(address, "reader")
    whole = model(1)
    if gathers:
        trainer.publish(1, whole.items())
    else:
        trainer.publish_parts(1, flat_shares(whole, 0, 1))
    expected = {name: tensor if name in ("norm", "scalar") else tensor.bfloat16() for name, tensor in whole.items()}
    assert expected["scalar"].dtype == torch.float32
    assert_same(reader.fetch(1).tensors(), expected)
    for each in (trainer, reader):
        each.close()


def exact(spec):
    return len(spec.shape) < 2


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_ranks_publish_what_they_hold_once_and_cast_it(address, ranks):
    trainers, reader = publishers(address, ranks, dtype=torch.bfloat16), client(address, "reader")
    for version in (1, 2):
        whole = model(version)
        size_bytes = [t.publish_parts(version, flat_shares(whole, t.rank, ranks)) for t in trainers]
        expected = {name: tensor.bfloat16() for name, tensor in whole.items()}
        assert sum(m["tensorhub/publish/bytes"] for m in size_bytes) == sum(t.nbytes for t in expected.values())
        assert trainers[0].whole_size_bytes == sum(t.nbytes for t in expected.values())
        assert_same(reader.fetch(version).tensors(), expected)
    with pytest.raises(UsageError, match=r"1 missing: 'norm'"):
        trainers[0].publish_parts(3, [held for held in flat_shares(whole, 0, ranks) if held.whole.name != "norm"])
    assert trainers[0].publish_parts(2, flat_shares(model(2), 0, ranks)) == {}  # once more, and nothing changed
    with pytest.raises(UsageError, match="other weights were given"):
        trainers[0].publish_parts(2, flat_shares(model(5), 0, ranks))
    for each in (*trainers, reader):
        each.close()


def interleaved(whole, rank, ranks):
    """As Megatron has heads: of each tensor every so manieth pair of rows, each pair a part."""
    for name, tensor in whole.items():
        spec, starts = contiguous_spec(name, tensor.dtype, tensor.shape), range(2 * rank, len(tensor), 2 * ranks)
        for number, start in enumerate(starts):
            at = (start, *[0] * (tensor.ndim - 1))
            yield Held(spec, tensor[start : start + 2], Part(spec.shape, at, name if number else ""))
        if not starts:
            yield Held(spec)


@pytest.mark.parametrize("slices", [1, 2])
def test_a_rank_has_several_parts_of_one_tensor(address, slices):
    trainers, reader = publishers(address, 2, dtype=torch.bfloat16, slices=slices), client(address, "reader")
    for version in (1, 2):
        generator = torch.Generator().manual_seed(version)
        shapes = {"q_proj.weight": (20, 1 << 17), "q_proj.bias": (20,), "mlp.experts.1.up_proj.weight": (2, 3)}
        whole = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        for trainer in trainers:
            trainer.publish_parts(version, interleaved(whole, trainer.rank, 2))
        fetched = reader.fetch(version)
        assert_same(fetched.tensors(), {name: tensor.bfloat16() for name, tensor in whole.items()})
        tables = [manifest.tensors for manifest in fetched.manifests.values()]
        parts = [spec for table in tables for spec in table if spec.tensor == "q_proj.weight"]
        assert len(parts) == 10
        fetched.release()
    lost = [held for held in interleaved(whole, 0, 2) if held.is_further]
    with pytest.raises(UsageError, match="q_proj.weight@4.0 is a further part of a tensor of which there is no first"):
        trainers[0].publish_parts(3, lost)
    first, *others = interleaved(whole, 0, 2)
    with pytest.raises(UsageError, match="q_proj.weight is there twice"):  # one of them would be read for both
        trainers[0].publish_parts(3, [first, first, *others])
    for trainer in trainers:  # the control
        trainer.publish_parts(4, interleaved(whole, trainer.rank, 2))
    for each in (*trainers, reader):
        each.close()


def test_a_rank_with_nothing_publishes_nothing_and_the_version_is_whole(address):
    trainers, reader = publishers(address, 3), client(address, "reader")
    whole = {"one": torch.ones(1), "two": torch.ones(2)}
    for trainer in trainers:
        trainer.publish_parts(1, flat_shares(whole, trainer.rank, 3))
    assert trainers[2].client.find(ShardKey(1, CHECKPOINT, 2, 3)).manifest.size_bytes == 0
    assert_same(reader.fetch(1).tensors(), whole)
    for each in (*trainers, reader):
        each.close()
    gc.collect()


# --- pure ---


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.integers(1, 5),
    st.data(),
)
def test_experts_are_split_out_of_any_run(shape, ranks, data):
    """One tensor of all experts, cut anywhere, becomes a tensor for each of them: every element comes once."""
    experts = data.draw(st.integers(1, 4))
    whole = torch.arange(experts * torch.Size(shape).numel()).view(experts, *shape)
    spec = contiguous_spec("w", whole.dtype, whole.shape)
    one = whole[0].numel()
    pieces = [(f"w.{k}", k * one, tuple(shape)) for k in range(experts)]
    cuts = sorted(data.draw(st.lists(st.integers(0, whole.numel()), min_size=ranks - 1, max_size=ranks - 1)))
    made = {name: torch.full(shape, -1) for name, _, _ in pieces}
    for low, high in zip([0, *cuts], [*cuts, whole.numel()], strict=True):
        for held in held_split(held_run(spec, whole.reshape(-1)[low:high], low), pieces):
            if held.tensor is None:
                continue
            target = made[held.whole.name]
            if held.part is not None and held.part.is_run:
                place = target.view(-1)[held.part.start[0] : held.part.start[0] + held.tensor.numel()]
            elif held.part is not None:
                rows = held.part.start[0]
                place = target[rows : rows + held.tensor.shape[0]]
            else:
                place = target
            assert bool((place == -1).all())  # once
            place.copy_(held.tensor)
    for k in range(experts):
        assert torch.equal(made[f"w.{k}"], whole[k])


def test_what_is_cut_along_two_dimensions_is_not_split():
    spec = contiguous_spec("w", torch.float32, (4, 4))
    with pytest.raises(UsageError, match="'w' is cut along more than its first dimension"):
        list(held_split(Held(spec, torch.zeros(4, 2), Part((4, 4), (0, 0))), [("a", 0, (2, 4))]))


@given(st.lists(st.integers(0, 100), max_size=50), st.integers(1, 9))
def test_turns_are_the_same_for_all_and_fair(sizes, count):
    turns = [Turns(rank, count) for rank in range(count)]
    given_bytes = [0] * count
    for size in sizes:
        owners = [rank for rank in range(count) if turns[rank].is_mine(rank, count, size)]
        assert len(owners) == 1
        assert given_bytes[owners[0]] == min(given_bytes)
        given_bytes[owners[0]] += size


def test_ownership_of_many_ranks_costs_a_heap_and_no_search():
    """Counted, as a time would not be the same everywhere: comparisons of one step at 1,024 ranks."""
    compared = 0

    class Counted(int):
        def __lt__(self, other):
            nonlocal compared
            compared += 1
            return int(self) < int(other)

        def __eq__(self, other):
            return int(self) == int(other)

        def __add__(self, other):
            return Counted(int(self) + int(other))

        __hash__ = int.__hash__

    ownership = Ownership(1024)
    ownership._next = [(Counted(given), rank) for given, rank in ownership._next]
    for size in range(2000):
        ownership.give(size)
    assert compared < 2000 * 64


class Looks(dict):
    """Counts what is looked up in it, one by one or all at once."""

    seen = 0

    def __contains__(self, name):
        Looks.seen += 1
        return super().__contains__(name)

    def __iter__(self):
        Looks.seen += len(self)
        return super().__iter__()


@pytest.mark.parametrize("passed_on", ["own slabs", "all slabs"])
def test_memory_for_the_parts_of_many_ranks_costs_what_each_of_them_has(monkeypatch, passed_on):
    """Counted: names looked up. Each rank has parts of a tensor of its own, and of one that all share."""

    def looked_up(count):
        serving = Serving("reader/0", SlabPool(), Budget("reader/0", 1 << 40))
        for version in (1, 2):  # at first a slab for each rank, then one for all
            into = destinations.Destinations(serving, serve=False)
            into.begin(lambda: NEVER)
            Looks.seen = 0
            for rank, table in enumerate(halves_of(count)):
                into.prepare(ShardKey(version, CHECKPOINT, rank, 2 * count), Manifest(table, bytes(16)))
                for slab in into.allocated.values():
                    slab.specs.__dict__["positions"] = Looks(slab.specs.positions)
            assert len([number for number in into.allocated if number < 0]) == (count if version == 1 else 1)
            into.complete(version, CHECKPOINT)
            for slab in into.allocated.values():
                serving.recycle(slab)
            yield Looks.seen / count

    if passed_on == "all slabs":  # the control: what it cost before

        def of_all(table, blocks, deadline):
            into = sys._getframe(1).f_locals["self"]
            return assembly.view_of(table, list(into.allocated.values()))

        monkeypatch.setattr(destinations, "view_of", of_all)
    few, many = list(looked_up(4)), list(looked_up(64))
    is_the_same = many[0] < 2 * few[0] and many[1] <= 2 * few[1]
    assert is_the_same == (passed_on == "own slabs"), (few, many)


def halves_of(count):
    """Tables of twice as many ranks: rank k has one half of tensor k // 2, and a row of a shared one."""
    for rank in range(2 * count):
        own = spec_of(f"own{rank // 2:03}", (2, 4), Part((4, 4), (2 * (rank % 2), 0)))
        yield TensorTable.of([own, spec_of("shared", (1, 4), Part((2 * count, 4), (rank, 0)))])


def spec_of(name, shape, part):
    return msgspec.structs.replace(contiguous_spec(name, torch.float32, shape), part=part)
