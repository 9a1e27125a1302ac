"""`Publisher(slices=)`: a worker that takes a slice reads it and nothing else, others read the same bytes as ever."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from client_stage import client

from tensorhub_plugins.core import Part, Publisher, TensorSpec, UsageError, contiguous_spec
from tensorhub_plugins.core.client.parts import held_box, held_run
from tensorhub_plugins.core.manifest import SEGMENT_SIZE_BYTES_MIN

SHAPES = {
    **{f"layers.{k}.self_attn.o_proj.weight": (512, 2048) for k in range(2)},
    **{f"layers.{k}.mlp.down_proj.weight": (512, 4096) for k in range(2)},
    **{f"layers.{k}.mlp.up_proj.weight": (4096, 512) for k in range(2)},
    **{f"layers.{k}.norm.weight": (512,) for k in range(2)},
}
COLUMNS = ("o_proj.weight", "down_proj.weight")


def publishers(address, ranks, slices, **options):
    return [
        Publisher(
            client(address, "trainer", rank, ranks),
            rank=rank,
            ranks=ranks,
            worker=f"trainer/{rank}",
            keep=2,
            timeout_s=10,
            slices=slices,
            **options,
        )
        for rank in range(ranks)
    ]


def model(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def gathered(whole, rank, ranks):
    return list(whole.items())


def rows(whole, rank, ranks):
    """As FSDP2 cuts."""
    for name, tensor in whole.items():
        size = -(-tensor.shape[0] // ranks)
        part = tensor[rank * size : (rank + 1) * size]
        start = (rank * size, *(0 for _ in tensor.shape[1:]))
        yield held_box(contiguous_spec(name, tensor.dtype, tensor.shape), part, start)


def runs(whole, rank, ranks):
    """As FSDP1 cuts: also within a row."""
    for name, tensor in whole.items():
        ends = [0, *(tensor.numel() * k // ranks + 77 * (tensor.dim() > 1) for k in range(1, ranks)), tensor.numel()]
        low, high = list(pairwise(ends))[rank]
        yield held_run(contiguous_spec(name, tensor.dtype, tensor.shape), tensor.view(-1)[low:high], low)


WAYS = {"gathered": gathered, "rows": rows, "runs": runs}


def publish(trainers, version, way, whole):
    for trainer in trainers:
        held = WAYS[way](whole, trainer.rank, trainer.ranks)
        (trainer.publish if way == "gathered" else trainer.publish_parts)(version, held)


def slice_of(name, worker, count):
    """What a worker needs: columns of some, rows of others, all of a vector."""
    shape = SHAPES[name]
    if len(shape) == 1:
        return TensorSpec(name, "bfloat16", shape, 2 * shape[0])
    axis = 1 if name.endswith(COLUMNS) else 0
    size = tuple(n // count if k == axis else n for k, n in enumerate(shape))
    start = tuple(worker * n // count if k == axis else 0 for k, n in enumerate(shape))
    return TensorSpec(name, "bfloat16", size, 2 * size[0] * size[1], None, Part(shape, start))


def view(spec, whole):
    tensor = whole[spec.name].bfloat16()
    if spec.part is None:
        return tensor
    return tensor[tuple(slice(a, a + n) for a, n in zip(spec.part.start, spec.shape, strict=True))]


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_worker_reads_little_more_than_its_slice(address, way, ranks, transport):
    read = {}
    for number, slices in enumerate((2, 1)):
        with client(address, f"reader-{slices}", transports=(transport,)) as reader:
            trainers = publishers(address, ranks, slices, dtype=torch.bfloat16)
            for version in (2 * number + 1, 2 * number + 2):
                whole = model(version)
                publish(trainers, version, way, whole)
                for worker in range(2):
                    wanted = [slice_of(name, worker, 2) for name in SHAPES]
                    fetched = reader.fetch(version, wanted=wanted)
                    tensors = fetched.tensors()
                    assert tensors.keys() == SHAPES.keys()
                    assert all(torch.equal(tensors[spec.name], view(spec, whole)) for spec in wanted)
                    read[slices] = sum(fetched.report.sources.values()) / sum(spec.size_bytes for spec in wanted)
                    fetched.release()
                everything = reader.fetch(version)
                assert everything.tensors().keys() == SHAPES.keys()
                assert all(torch.equal(t, whole[n].bfloat16()) for n, t in everything.tensors().items())
                assert everything.roots() == everything.report.roots
                everything.release()
            for trainer in trainers:
                trainer.close()
    total = sum(2 * torch.Size(shape).numel() for shape in SHAPES.values())
    # Of each rank's stretch the segments at both ends, and those of the vectors.
    assert read[2] < 1 + ranks * 3 * SEGMENT_SIZE_BYTES_MIN / (total / 2)
    assert read[1] > 1.5  # the control


def test_a_whole_copy_is_served_on_and_both_kinds_of_publish_may_follow_each_other(address):
    (trainer,) = publishers(address, 1, 4)
    with client(address, "one") as one, client(address, "two") as two:
        for version, way in enumerate(("gathered", "rows", "gathered", "runs"), 1):
            whole = model(version)
            publish([trainer], version, way, whole)
            first = one.fetch(version, serve=True)
            trainer.client.unpublish(version)
            second = two.fetch(version)
            assert set(second.report.sources) == {"one/0"}
            assert all(torch.equal(second.tensors()[name], tensor) for name, tensor in whole.items())
            assert first.report.roots == second.report.roots
            one.unpublish(version)
            for each in (first, second):
                each.release()
        into = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        publish([trainer], 9, "gathered", whole)
        one.replicate(into, 9)
        assert all(torch.equal(into[name], tensor) for name, tensor in whole.items())
    trainer.close()


def test_other_owners_than_the_last_time_publish_the_same_slices(address):
    """The tensors come in another order: whose they are is decided anew, and some were written already."""
    trainers = publishers(address, 2, 2)
    whole = model(1)
    for version, names in ((1, list(whole)), (2, list(whole)[::-1]), (3, list(whole))):
        for trainer in trainers:
            trainer.publish(version, [(name, whole[name]) for name in names])
    with client(address, "reader") as reader:
        assert all(torch.equal(tensor, whole[name]) for name, tensor in reader.fetch(3).tensors().items())
        wanted = [spec for spec in (slice_of(name, 1, 2) for name in SHAPES) if spec.part is None]
        with pytest.raises(UsageError, match="bfloat16"):
            reader.fetch(3, wanted=wanted)  # the control: it is float32
    for trainer in trainers:
        trainer.close()


@pytest.mark.parametrize(("way", "ranks"), [("gathered", 2), ("rows", 1), ("rows", 2)])
def test_what_lies_apart_in_one_piece_keeps_its_name(address, way, ranks):
    """Experts for expert parallel engines, and a matrix of which one slice is all: as parts that are the whole."""
    shapes = {f"layers.0.mlp.experts.{k}.w1.weight": (2048, 512) for k in range(2)} | {"up_proj.weight": (1, 1 << 20)}
    whole = {name: torch.randn(shape) for name, shape in shapes.items()}
    trainers = publishers(address, ranks, 2)
    publish(trainers, 1, way, whole)
    into = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    with client(address, "reader") as reader:
        reader.replicate(into, 1)
        for found in into, reader.fetch(1).tensors():
            assert found.keys() == whole.keys() and all(torch.equal(found[name], whole[name]) for name in whole)
    for trainer in trainers:
        trainer.close()


def test_a_size_that_no_engine_has_is_refused(address):
    with pytest.raises(UsageError, match="slices=0: give the tensor parallel size"):
        publishers(address, 1, 0)
