"""One GPU: how close the store comes to what the machine can do, each figure beside a limit measured in the same run.

    python -m recipes.bench.gpu --json out/gpu.json         # about two minutes, 40 GB of the GPU's memory
    python -m recipes.bench.gpu --device cpu                # the same lines at a small size, to see that they run

The tensors are Qwen2.5-7B's in bfloat16. What arrives is compared with the source, every byte. Each figure is the
median of some times, after one to warm up; limits are measured before and after, and the better counts.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from recipes.bench.gpu import decoding, store
from recipes.bench.gpu.limits import Limits, measure
from recipes.bench.gpu.machine import Machine, shapes_of
from recipes.bench.gpu.store import Figure, NotRun, Setting
from recipes.bench.results import save

FIGURES = {**store.FIGURES, **decoding.FIGURES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--layers", type=int, help="of Qwen2.5-7B, which has 28")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=sorted(FIGURES), help="these figures alone")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("torch finds no CUDA device: nothing was measured. --device cpu shows that the benchmark runs")
        return
    machine = Machine(options.device)
    shapes = shapes_of(28 if options.layers is None else options.layers, is_small=not machine.is_gpu)
    setting = Setting(machine, shapes, options.times)
    print(f"{machine.name}: {setting.size_bytes / 1e9:.3g} GB in {len(shapes)} tensors")
    if not machine.is_gpu:
        print("NOT OF A GPU: sizes are small and all copies are memcpy; no figure here says anything about one")
    before = measure(machine, setting.limit_size_bytes)
    rows: list[Figure] = []
    for name in options.only or FIGURES:
        rows += run(name, setting, before)
    limits = before.best_of(measure(machine, setting.limit_size_bytes))
    print("limits, GB/s: " + ", ".join(f"{name} {gb_s:.3g}" for name, gb_s in asdict(limits).items()))
    rows = [row.against(limits) for row in rows]
    for row in rows:
        print(row.as_text(), flush=True)
    save(
        options.json,
        {
            "of_a_gpu": machine.is_gpu,
            "device": machine.name,
            "torch": torch.__version__,
            "python": sys.version.split()[0],
            "load": os.getloadavg()[0],
            "size_bytes": setting.size_bytes,
            "tensors": len(shapes),
            "limits_gb_s": asdict(limits),
            "figures": [asdict(row) for row in rows],
        },
    )


def run(name: str, setting: Setting, limits: Limits) -> list[Figure]:
    """Return the figures of one measurement; one that says why there is none, if it cannot be made here."""
    figure: Callable[[Setting, Limits], list[Figure]] = FIGURES[name]
    with contextlib.ExitStack() as closing:
        closing.callback(setting.machine.release)
        try:
            return figure(setting, limits)
        except NotRun as reason:
            return [Figure(name, not_run=str(reason))]


if __name__ == "__main__":
    main()
