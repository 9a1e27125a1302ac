"""The predictions of the table of sizes for two models, each to be requested in a process of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from recipes.bench.sizes import models, predict, real


def of_a_deep_model(layers: int) -> tuple[Any, Any]:
    """Return the plan made from the layers that are alike, and from all."""
    from recipes.bench.sizes.ranks import Rank

    model = models.Model("Qwen2", (256, 512, layers, 4, 2, 512), ranks=1, tp=(2,))
    found = []
    for unlike in (0, layers - 2):
        worker = models.worker_of(replace(model, unlike=unlike), Rank(2, 1))
        found.append((dict(worker.plan.shapes), dict(worker.plan.needed), worker.holds_bytes))
    return found[0], found[1]


def of_experts(ranks: int, *, by_experts: bool = True) -> list[tuple[int, int, int, int]]:
    """Return for each rank of an engine: its experts' tensors, bytes that it needs, those that it reads of a trainer
    that does not cut experts, and those of the checkpoint. by_experts: it has whole ones."""
    from recipes.bench.sizes.ranks import Rank

    more = {"head_dim": 64, "num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
    more |= {"moe_intermediate_size": 1536}
    model = models.Model("Qwen3Moe", (1024, 2048, 4, 16, 8, 512), ranks=4, tp=(), ep=(ranks,), more=more)
    found = []
    for rank in range(ranks):
        worker = models.worker_of(model, Rank(ranks, rank), experts=by_experts)
        plan = worker.plan
        tables = predict.trainer_tables(plan.shapes, model.ranks, ranks, experts=False)
        count = sum(".experts." in name for name in plan.needed)
        found.append((count, plan.needed_bytes, sum(map(worker.reads, tables)), plan.checkpoint_bytes))
    return found


def of_whole_matrices() -> dict[str, int]:
    return real.predicted(slices=1)
