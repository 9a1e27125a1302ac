"""What the table of sizes says of two models, each to be asked for in a process of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from recipes.bench.sizes import models, real


def of_a_deep_model(layers: int) -> tuple[Any, Any]:
    """By the layers that are alike, and by all."""
    from tensorhub_plugins.vllm.doctor.ranks import Rank

    model = models.Model("Qwen2", (256, 512, layers, 4, 2, 512), ranks=1, tp=(2,))
    found = []
    for unlike in (0, layers - 2):
        worker = models.worker_of(replace(model, unlike=unlike), Rank(2, 1))
        found.append((dict(worker.plan.shapes), dict(worker.plan.needed), worker.holds_bytes))
    return found[0], found[1]


def of_whole_matrices() -> dict[str, int]:
    return real.predicted(slices=1)
