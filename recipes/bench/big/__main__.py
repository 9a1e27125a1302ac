"""How long an engine stands still for its first and for a later version: python -m recipes.bench.big [--beside REV]

One rank of a tensor parallel engine, made by vLLM with real layers, installs checkpoints of which it has what its plan
needs, as after a fetch: with one thread of torch, which is what vLLM leaves its workers. Each measurement is a process
of its own. With --beside the same runs with the package of another revision, in turns.

    first, later    seconds of the installs, and the same against one memcpy of the worker's slice into memory in use
    fresh           memory of the first install that the kernel had to hand out, in slices of this worker
    peak            memory taken beyond the model and what was fetched, at most, in slices

The last table computes what the first install of real models takes: seconds for each GB of the checkpoint.
"""

from __future__ import annotations

import argparse
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
KINDS = ("dense", "moe")
REAL = {"7B, TP 1": (15.2, 1), "70B, TP 8": (141.0, 8), "235B, TP 8": (470.0, 8), "671B, TP 16": (1342.0, 16)}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--gb", type=float, nargs="+", default=[1.0, 4.0], help="sizes of the checkpoints")
    arguments.add_argument("--tp", type=int, nargs="+", default=[1, 8], help="sizes of the tensor parallel group")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--beside", metavar="REV", help="measure the package of this revision of git as well")
    arguments.add_argument("--json", type=Path)
    given = arguments.parse_args()
    found: dict[str, list[dict[str, float]]] = {}
    with packages(given.beside) as trees:
        for round_ in range(given.rounds):
            for kind in KINDS:
                for gb in given.gb:
                    for tp in given.tp:
                        for name, tree in trees[:: (-1) ** round_]:
                            found.setdefault(f"{name} {kind} {gb:g} GB TP {tp}", []).append(measure(tree, kind, gb, tp))
    medians = {key: {of: statistics.median(one[of] for one in each) for of in each[0]} for key, each in found.items()}
    for key, of in medians.items():
        print(
            f"{key:32}  first {of['first_s']:6.2f} s ({of['first_s'] / of['memcpy_s']:5.1f} memcpy)  later "
            f"{of['later_s']:5.2f} s ({of['later_s'] / of['memcpy_s']:4.1f})  fresh {of['fresh']:5.2f}  "
            f"peak {of['peak']:4.2f}"
        )
    expected = {}
    for name in dict(trees):
        for model, (gb, tp) in REAL.items():
            each = [medians.get(f"{name} {kind} {max(given.gb):g} GB TP {8 if tp > 1 else 1}") for kind in KINDS]
            seconds = [of["first_s"] / of["gb"] * gb * min(8 / tp, 1) for of in each if of is not None]
            expected[f"{name}: {model}"] = seconds
            print(
                f"{name}: the first install of {model} takes {' to '.join(f'{s:.0f}' for s in sorted(seconds))} s here"
            )
    save(given.json, {"medians": medians, "expected": expected})


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


def measure(tree: Path, kind: str, gb: float, tp: int) -> dict[str, float]:
    """Return what one process measured that runs this package."""
    paths = f"{tree}{os.pathsep}{ROOT}"
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, "-P", "-m", "recipes.bench.big.worker", kind, str(gb), str(tp)]
    ran = subprocess.run(command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    measured: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return measured


if __name__ == "__main__":
    main()
