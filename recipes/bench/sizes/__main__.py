"""What a version costs in bytes, memory and requests, from configurations alone: no weights, no GPU.

    python -m recipes.bench.sizes [--models Qwen2.5-7B,...] [--json FILE]
    python -m recipes.bench.sizes --megatron    # what ranks of a Megatron trainer publish, with or without a gather
    python -m recipes.bench.sizes --real        # the same arithmetic beside a real trainer and real engines
    python -m recipes.bench.sizes --costs [MODEL] [--ranks N] [--tp N]      # what it costs in Python: costs.py

vLLM's own classes and loaders on the meta device say what a worker needs; a trainer of simulated ranks, what lies in
which segment of which shard. Two hosts of eight GPUs (four, for engines of two hosts), full of engines. predict.py has
the ways that are compared, and what each column is; real.py, what is counted.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from pathlib import Path
from typing import Any

from recipes.bench.results import save
from recipes.bench.sizes import costs, megatron, predict, real
from recipes.bench.sizes.models import MODELS

COLUMNS = {
    "needed": "a worker needs",
    "fetched": "fetches",
    "first": "into its host",
    "other": "into another host",
    "memory": "host memory",
    "memory_live": "serving live",
    "part": "a rank's part",
    "trainer": "its memory",
    "gathered": "gathered",
    "requests": "requests",
}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--models", help="which of them, by name (default: all)")
    arguments.add_argument("--megatron", action="store_true", help="what a Megatron trainer's ranks publish")
    arguments.add_argument("--real", action="store_true", help="count it, in real processes (minutes, 5 GB)")
    arguments.add_argument("--costs", nargs="?", const="Qwen3-235B-A22B", choices=MODELS, help="measure Python's steps")
    arguments.add_argument("--ranks", type=int, help="of the trainer, with --costs (default: the model's own)")
    arguments.add_argument("--tp", type=int, help="of an engine, with --costs (default: the model's largest)")
    arguments.add_argument("--json", type=Path, help="write all figures here")
    given = arguments.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if given.costs:
        save(given.json, {given.costs: step_by_step(given.costs, given.ranks, given.tp)})
        return
    if given.megatron:
        save(given.json, megatron.table(given.models))
        return
    save(given.json, beside_each_other() if given.real else table(given.models))


def table(names: str | None) -> dict[str, Any]:
    print("|", " | ".join(["engine", "way", *COLUMNS.values()]), "|")
    print("|", " | ".join(["---"] * (len(COLUMNS) + 2)), "|")
    figures: dict[str, Any] = {}
    # vLLM makes other groups of processes for experts: each model in a process of its own.
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for engines in pool.imap(predict.ways_by_engine, names.split(",") if names else MODELS):
            figures |= engines
            for engine, rows in engines.items():
                for way, each in rows.items():
                    print("|", " | ".join([engine, way, *map(shown, each, each.values())]), "|", flush=True)
    return figures


def step_by_step(name: str, ranks: int | None, tp: int | None) -> list[dict[str, Any]]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply(costs.costs, (name, ranks, tp))
    print("\n".join(costs.rows(found)))
    return found


def shown(column: str, value: int) -> str:
    return f"{value:,}" if column == "requests" else f"{value / 1e9:.1f}"


def beside_each_other() -> dict[str, Any]:
    predicted, measured = real.predicted(), real.measured()
    for name, value in predicted.items():
        ratio = f"{measured[name] / value:.4f}" if value else ""
        print(f"{name:30} measured {measured[name]:12,}  predicted {value:12,}  {ratio}")
    wrong = real.check(measured, predicted)
    print(f"not within {real.TOLERANCE:.0%}: {', '.join(wrong)}" if wrong else f"all within {real.TOLERANCE:.0%}")
    if wrong:
        raise SystemExit(1)
    return {"measured": measured, "predicted": predicted}


if __name__ == "__main__":
    main()
