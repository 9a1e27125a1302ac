"""The table of real sizes: its arithmetic on a trainer's parts, and beside a real trainer and real engines."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
pytest.importorskip("transformers")

from sizes_of_models import of_a_deep_model, of_experts, of_whole_matrices
from vllm_ranks import alone

from recipes.bench.sizes import costs, megatron, models, predict, real
from tensorhub_plugins.core import segment_size_for
from tensorhub_plugins.vllm.worker.plan import Plan, whole_region

BFLOAT16 = torch.bfloat16


def shapes_of(**shapes: tuple[int, ...]) -> dict[str, Any]:
    return {name.replace("__", "."): (BFLOAT16, torch.Size(shape)) for name, shape in shapes.items()}


def test_simulated_ranks_hold_what_fsdp2_would_give_them() -> None:
    experts = {f"l__experts__{k}__up_proj__weight": (2048, 1024) for k in range(5)}
    shapes = shapes_of(a=(10, 3), b=(2,), l__up_proj__weight=(2049, 1024), l__down_proj__weight=(1024, 2048), **experts)
    tables = predict.trainer_tables(shapes, 3, 2)
    held = [{name: 0 for name in shapes} for _ in tables]
    for mine, table in zip(held, tables, strict=True):
        for spec in table:
            mine[spec.tensor] += spec.size_bytes
    for name, (dtype, shape) in shapes.items():
        rows = [len(each) for each in torch.zeros(shape[0]).chunk(3)]
        if "experts" in name:  # two experts for each rank, and the last one for the last
            rows = [shape[0] if int(name.split(".")[2]) // 2 == rank else 0 for rank in range(3)]
        row_bytes = dtype.itemsize * shape[1:].numel()
        assert [mine[name] for mine in held] == [row_bytes * count for count in (*rows, 0)[:3]]
    cut = {spec.name for spec in tables[0]}
    assert {"000/l.up_proj.weight", "001/l.down_proj.weight", "001/l.experts.1.up_proj.weight", "a"} <= cut


def test_a_worker_reads_the_segments_that_it_needs_of_every_rank() -> None:
    shapes = shapes_of(l__up_proj__weight=(8192, 1024), l__norm__weight=(7,))
    whole = {name: (whole_region(shape),) for name, (_, shape) in shapes.items()}
    half = {"l.up_proj.weight": (whole_region((4096, 1024)),)}
    tables = predict.trainer_tables(shapes, 2, 2)
    size_bytes = sum(table.size_bytes for table in tables)
    for needed, expected in ((whole, size_bytes), (half, size_bytes // 2 - 7), ({}, 0)):
        worker = models.Worker(Plan(shapes, (), needed, frozenset()), 0)
        read = sum(map(worker.reads, tables))
        assert expected <= read <= expected + segment_size_for(tables[0].size_bytes)


def test_what_lies_between_experts_that_are_not_cut_costs_none_of_them() -> None:
    layers = {
        f"l__{layer}__mlp__{name}__weight": shape
        for layer in range(8)
        for name, shape in {"a_norm": (7,), "experts__0__up_proj": (4096, 1024), "gate": (4, 1024)}.items()
    }
    shapes = shapes_of(**layers)
    needed = {name: (whole_region(shape),) for name, (_, shape) in shapes.items() if "experts" not in name}
    worker = models.Worker(Plan(shapes, (), needed, frozenset()), 0)

    def read(slices: int) -> int:
        (table,) = predict.trainer_tables(shapes, 1, slices, experts=False)
        return worker.reads(table)

    (table,) = predict.trainer_tables(shapes, 1, 2, experts=False)
    assert read(2) <= 2 * segment_size_for(table.size_bytes)
    assert read(1) >= 7 * segment_size_for(table.size_bytes)  # the control: one stream in the order of names


def a_model() -> dict[str, Any]:
    layers = {
        f"model__layers__{layer}__{name}": shape
        for layer in range(4)
        for name, shape in {
            **{
                "q_proj__weight": (64, 32),
                "k_proj__weight": (16, 32),
                "k_proj__bias": (16,),
            },
            **{"v_proj__weight": (16, 32), "o_proj__weight": (32, 64), "norm__weight": (32,)},
            **{f"experts__{k}__{name}_proj__weight": (16, 32) for k in range(8) for name in ("gate", "up")},
        }.items()
    }
    return shapes_of(
        model__embed_tokens__weight=(80, 32), **layers, lm_head__weight=(80, 32), model__norm__weight=(32,)
    )


@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("ep", [1, 2, 4])
def test_the_ranks_of_a_megatron_trainer_publish_each_byte_once(tp: int, pp: int, ep: int) -> None:
    shapes = a_model()
    whole = sum(dtype.itemsize * shape.numel() for dtype, shape in shapes.values())
    ranks = megatron.published(shapes, megatron.Groups(16, tp, pp, ep), 4, 4)
    assert len(ranks) == 16 and sum(rank.size_bytes for rank in ranks) == whole
    sole = {name: each for name, each in shapes.items() if "experts" not in name}  # what one of each stage has
    parts = megatron.published(sole, megatron.Groups(tp * pp, tp, pp), 4, 4)
    cut = 2 + 4 * (4 * 4 // tp + 1)  # ends, four of query groups, outputs; and norms, which one of all has
    assert sum(rank.parts for rank in parts) == cut * tp + 4 + 1


def test_query_groups_are_as_many_parts_as_a_bridge_makes_of_them() -> None:
    from tensorhub_plugins.verl.megatron import places

    def split(asked: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        each = torch.cat([asked, torch.full_like(asked, float("nan"))]).view(4, -1, asked.shape[1])  # of two ranks
        return [(f"{n}_proj", part.flatten(0, 1)) for n, part in zip("qkv", each.split([16, 4, 4], 1), strict=True)]

    found = places((2 * 24, 32), split, ranks=2)
    counted = megatron._pieces("model.layers.0.q_proj.weight", 4 // 2)
    assert [sum(place.name == f"{n}_proj" for place in found) for n in "qkv"] == [counted] * 3 == [2] * 3


def test_layers_that_are_alike_stand_for_the_others() -> None:
    three = {"embed": 1, "model.layers.0.w": 5, "model.layers.1.w": 2, "model.layers.2.w": 2}
    assert models.deepened(three, 3, 5) == {**three, "model.layers.3.w": 2, "model.layers.4.w": 2}
    assert models.deepened(three, 3, 3) == three
    with pytest.raises(ValueError, match="0 and 1 are not alike"):
        models.deepened(three, 2, 5)


def test_the_check_names_what_is_off_by_more_than_it_may_be() -> None:
    predicted = {"read": 1000, "collectives": 0}
    assert real.check({"read": 1019, "collectives": 0, "more": 1}, predicted) == []
    assert len(real.check({"read": 1021, "collectives": 1}, predicted)) == 2
    assert real.check({"read": 979, "collectives": 0}, predicted) == ["read: measured 979, predicted 1000"]
    assert len(real.check({}, predicted)) == 2


@pytest.mark.slow
def test_every_step_of_a_small_version_is_measured_and_shown() -> None:
    shapes = shapes_of(l__up_proj__weight=(2048, 1024), l__down_proj__weight=(1024, 2048), l__norm__weight=(8,))
    stage = costs.Stage(costs.plan_without_loaders(shapes), 4, 2)
    found = [costs.asdict(cost) for cost in costs.measured(costs.steps(stage))]
    rows = list(costs.rows(found))
    assert len(rows) == len(found) + 2 and {row.count("|") for row in rows} == {7}
    again = {each["step"] for each in found if not each["once"]}
    assert {each["step"] for each in found} == again  # what a first version pays for alone comes again, cheaper


# --- with vLLM ---


@pytest.mark.heavy
@pytest.mark.timeout(300)
def test_a_model_of_few_layers_says_the_same_of_many() -> None:
    few, all_ = alone(of_a_deep_model, 6)
    assert few == all_ and len({name for name in few[1] if "layers.5." in name}) == 12


@pytest.mark.heavy
@pytest.mark.timeout(300)
def test_expert_parallel_ranks_read_whole_experts_and_little_else() -> None:
    ranks = alone(of_experts, 4)
    assert [experts for experts, *_ in ranks] == [4 * 3 * 8 // 4] * 4  # of each layer three tensors of two experts
    for _, needed, read, checkpoint in ranks:
        assert needed < 0.27 * checkpoint and read < 1.2 * needed
    for _, needed, read, _ in alone(partial(of_experts, by_experts=False), 4):  # the control: a slice of each expert
        assert read > 2 * needed


@pytest.mark.heavy
@pytest.mark.long  # starts seven processes that import torch, six of them vLLM
@pytest.mark.timeout(900)
def test_real_processes_agree_with_the_table() -> None:
    predicted, measured = alone(real.predicted), real.measured()
    assert real.check(measured, predicted) == []
    # The control: trainers that do not cut matrices would have their readers fetch more.
    wrong = real.check(measured, alone(of_whole_matrices))
    assert [line.partition(":")[0] for line in wrong] == [
        *(f"fetched by worker {rank}" for rank in range(2)),
        "into the host, from others",
    ]
