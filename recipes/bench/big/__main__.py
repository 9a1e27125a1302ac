"""How long an engine stands still for its first and for a later version: python -m recipes.bench.big [--beside REV]

One rank of a tensor parallel engine, made by vLLM with real layers, installs checkpoints of which it has what its plan
needs, as after a fetch: with one thread of torch, which is what vLLM leaves its workers. Each measurement is a process
of its own. With --beside the same runs with the package of another revision, in turns. Kinds: a dense model, a mixture
of experts, FP8 by blocks of a checkpoint of floats, and experts whose checkpoint is FP8 by blocks.

    first, later    seconds of the installs, and the same against one memcpy of the worker's slice into memory in use
    passes          bytes that copies wrote and digests read, in slices of this worker, counted in a run of its own
    fresh           memory of an install that the kernel had to hand out, in slices
    peak            memory taken beyond the model and what was fetched, at most, in slices, as the kernel counts it

The last table computes what the first install of real models takes: seconds for each GB of the checkpoint.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recipes.bench.results import save

ROOT = Path(__file__).resolve().parents[3]
KINDS = ("dense", "moe", "fp8", "fp8-moe")
REAL = {"7B, TP 1": (15.2, 1), "70B, TP 8": (141.0, 8), "235B, TP 8": (470.0, 8), "671B, TP 16": (1342.0, 16)}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--kind", choices=KINDS, nargs="+", default=list(KINDS))
    arguments.add_argument("--gb", type=float, nargs="+", default=[1.0, 4.0], help="sizes of the checkpoints")
    arguments.add_argument("--tp", type=int, nargs="+", default=[1, 8], help="sizes of the tensor parallel group")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--beside", metavar="REV", help="measure the package of this revision of git as well")
    arguments.add_argument("--json", type=Path)
    given = arguments.parse_args()
    medians: dict[str, dict[str, float]] = {}
    with packages(given.beside) as trees:
        for kind, gb, tp in itertools.product(given.kind, given.gb, given.tp):
            found: dict[str, list[dict[str, float]]] = {name: [] for name, _ in trees}
            for round_ in range(given.rounds):
                for name, tree in trees[:: (-1) ** round_]:
                    found[name].append(measure(tree, kind, gb, tp))
            for name, tree in trees:
                of = {what: statistics.median(one[what] for one in found[name]) for what in found[name][0]}
                of |= {what: n for what, n in measure(tree, kind, gb, tp, count=True).items() if "passes" in what}
                medians[key := f"{name} {kind} {gb:g} GB TP {tp}"] = of
                print(f"{key:28}", *(line(of, which) for which in ("first", "later")), sep="  ", flush=True)
    expected = {}
    for name, (model, (gb, tp)) in itertools.product(dict(trees), REAL.items()):
        each = [medians.get(f"{name} {kind} {max(given.gb):g} GB TP {8 if tp > 1 else 1}") for kind in given.kind]
        seconds = [of["first_s"] / of["gb"] * gb * min(8 / tp, 1) for of in each if of is not None]
        if not seconds:
            continue
        expected[f"{name}: {model}"] = seconds
        print(f"{name}: the first install of {model} takes {' to '.join(f'{s:.0f}' for s in sorted(seconds))} s here")
    save(given.json, {"medians": medians, "expected": expected})


def line(of: dict[str, float], which: str) -> str:
    seconds, *slices = (of[f"{which}_{what}"] for what in ("s", "passes", "fresh", "peak"))
    shown = ", ".join(f"{what} {n:.1f}" for what, n in zip(("passes", "fresh", "peak"), slices, strict=True))
    return f"{which} {seconds:6.2f} s ({seconds / of['memcpy_s']:5.1f} memcpy, {shown})"


@contextmanager
def packages(revision: str | None) -> Iterator[list[tuple[str, Path]]]:
    """Yield (name, folder) of the packages to measure: this one, and that of another revision."""
    if revision is None:
        yield [("here", ROOT)]
        return
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", revision, "tensorhub_plugins"], cwd=ROOT, check=True, stdout=subprocess.PIPE
        )
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        yield [("here", ROOT), (revision, Path(folder))]


def measure(tree: Path, kind: str, gb: float, tp: int, *, count: bool = False) -> dict[str, float]:
    """Return what one process measured that runs this package. count: the passes, at the expense of the seconds."""
    paths = f"{tree}{os.pathsep}{ROOT}"
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    environment |= {"COUNT": "1"} if count else {}
    command = [sys.executable, "-P", "-m", "recipes.bench.big.worker", kind, str(gb), str(tp)]
    ran = subprocess.run(command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    measured: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return measured


if __name__ == "__main__":
    main()
