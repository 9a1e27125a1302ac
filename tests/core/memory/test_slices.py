"""The order in which matrices are published for tensor parallel readers: every element once, a slice in one stretch."""

from __future__ import annotations

from math import prod

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorhub_plugins.core import Part, TensorTable, contiguous_spec, held_run
from tensorhub_plugins.core.client.parts import held_box
from tensorhub_plugins.core.manifest import SEGMENT_SIZE_BYTES
from tensorhub_plugins.core.memory.moves import check_cover, with_parts
from tensorhub_plugins.core.memory.slices import Least, slices_of

ALL = Least(1, 1, 1, 1, 1)  # everything is large enough


def names(held, count):
    return [piece.spec.name for piece in slices_of(held, count)]


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(["a.o_proj.weight", "a.q_proj.weight", "a.experts.3.w2.weight"]),
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.integers(1, 5),
    st.booleans(),
    st.data(),
)
def test_slices_of_whatever_the_ranks_hold_have_every_element_once(name, shape, count, experts, data):
    whole = torch.arange(prod(shape)).view(shape)
    spec = contiguous_spec(name, whole.dtype, shape)
    how = data.draw(st.sampled_from(["runs", "rows", "columns"]))
    total = {"runs": whole.numel(), "rows": shape[0], "columns": shape[1]}[how]
    cuts = sorted(data.draw(st.lists(st.integers(0, total), max_size=3)))
    tables = {}
    for rank, (low, high) in enumerate(zip([0, *cuts], [*cuts, total], strict=True)):
        held = {
            "runs": lambda low, high: held_run(spec, whole.view(-1)[low:high], low),
            "rows": lambda low, high: held_box(spec, whole[low:high], (low, 0)),
            "columns": lambda low, high: held_box(spec, whole[:, low:high], (0, low)),
        }[how](low, high)
        if held.tensor is None:
            continue
        (here,) = with_parts(
            [contiguous_spec(name, whole.dtype, held.tensor.shape)], {name: held.part} if held.part else {}
        )
        found = slices_of(here, count, ALL, experts=experts)
        tables[rank] = TensorTable.of(piece.spec for piece in found).check()
        for piece in found:
            view, part = piece.of(held.tensor), piece.spec.part
            assert tuple(view.shape) == piece.spec.shape
            assert piece.spec.tensor == name
            if part is None:
                assert torch.equal(view, whole)
            elif part.is_run:
                assert torch.equal(view, whole.view(-1)[part.start[0] : part.start[0] + view.numel()])
            else:
                (row, column), (rows, columns) = part.start, view.shape
                assert torch.equal(view, whole[row : row + rows, column : column + columns])
    check_cover(tables, TensorTable.of([spec]))


def test_the_first_slices_of_all_matrices_lie_together_and_then_the_second_ones():
    shapes = {"l.o_proj.weight": (4, 8), "l.q_proj.weight": (8, 4), "l.norm.weight": (8,), "embed.weight": (8, 4)}
    pieces = [
        piece.spec
        for n, shape in shapes.items()
        for piece in slices_of(contiguous_spec(n, torch.float32, shape), 2, ALL)
    ]
    table = TensorTable.of(pieces)
    assert [(spec.name, spec.part) for spec in table] == [
        ("000/embed.weight", Part((8, 4), (0, 0), "embed.weight")),
        ("000/l.o_proj.weight", Part((4, 8), (0, 0), "l.o_proj.weight")),
        ("000/l.q_proj.weight", Part((8, 4), (0, 0), "l.q_proj.weight")),
        ("001/embed.weight", Part((8, 4), (4, 0), "embed.weight")),
        ("001/l.o_proj.weight", Part((4, 8), (0, 4), "l.o_proj.weight")),
        ("001/l.q_proj.weight", Part((8, 4), (4, 0), "l.q_proj.weight")),
        ("l.norm.weight", None),
    ]


def test_how_many_parts_there_are_is_bounded():
    """46,000 experts, and what a rank holds of a model of many ranks, add none."""

    def spec(name, rows, columns):
        return contiguous_spec(name, torch.bfloat16, (rows, columns))

    assert names(spec("a.q_proj.weight", 1024, 1023), 8) == ["a.q_proj.weight"]  # less than 2 MiB
    assert len(names(spec("a.q_proj.weight", 1024, 1024), 2)) == 2
    assert names(spec("a.q_proj.weight", 1024, 1024), 8) == ["a.q_proj.weight"]  # slices of 256 KiB
    expert = spec("a.experts.7.up_proj.weight", 1024, 1024)
    assert len(slices_of(expert, 8, experts=True)) == 8  # but there are many of them
    assert len(names(spec("a.mlp.experts.7.down_proj.weight", 7168, 2048), 8)) == 1
    assert len(names(spec("a.mlp.experts.7.gate_proj.weight", 65536, 2048), 8)) == 1
    large = spec("a.mlp.experts.7.w2.weight", 8192, 4 * SEGMENT_SIZE_BYTES // 8192)
    assert names(large, 2) == ["experts/a.mlp.experts.7.w2.weight/000", "experts/a.mlp.experts.7.w2.weight/001"]
    one_row = contiguous_spec("a.o_proj.weight", torch.bfloat16, (8, 8192))
    (of_rank,) = with_parts([one_row], {"a.o_proj.weight": Part((8192, 8192), (64, 0))})
    assert names(of_rank, 8) == ["a.o_proj.weight"]
    assert len(names(spec("a.o_proj.weight", 8192, 8192), 8)) == 8
    for whole in ("mlp.gate", "self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"):
        assert names(spec(f"a.{whole}.weight", 8192, 8192), 8) == [f"a.{whole}.weight"]
    assert names(spec("a.o_proj.weight", 8192, 8192), 1) == ["a.o_proj.weight"]
    assert names(contiguous_spec("a.conv.weight", torch.float32, (64, 64, 4096)), 8) == ["a.conv.weight"]


def test_experts_are_cut_like_all_others_where_each_worker_takes_a_slice_of_each():
    pieces = [
        piece.spec
        for expert in range(2)
        for kind, shape in (("down_proj", (1024, 2048)), ("up_proj", (2048, 1024)))
        for piece in slices_of(
            contiguous_spec(f"l.experts.{expert}.{kind}.weight", torch.bfloat16, shape), 2, experts=True
        )
    ]
    assert [spec.name for spec in TensorTable.of(pieces)] == [
        f"{worker:03}/l.experts.{expert}.{kind}.weight"
        for worker in range(2)
        for expert in range(2)
        for kind in ("down_proj", "up_proj")
    ]
