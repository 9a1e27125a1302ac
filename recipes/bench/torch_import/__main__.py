"""What the `torch.backends` hook costs `import torch` where it has nothing to do: with it and without, in turns.

    python -m recipes.bench.torch_import [--rounds 20] [--out FOLDER]

Every import is a process of its own; times are CPU time, so that other work on the machine counts little. `empty` is a
hook that does nothing: what any entry point costs, and so the limit. Returns 1 when loading and calling the hook takes
a larger share of the import than --target (whole imports differ by more than that from one to the next).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SIDES = ("without", "with", "empty")
OURS = "tensorhub_plugins.openrlhf.autoload:install"
IMPORT_TIMEOUT_S = 300
# All sides go through the same wrapper, which gives torch what it would find, without ours or with the empty one in its
# place, and takes the time of each.
CHILD = """
import importlib.metadata as metadata, json, sys, time
side, ours = sys.argv[1:]
stock, spent, called = metadata.entry_points, [], []
class Timed:
    def __init__(self, point):
        self.point, self.name = point, point.name
    def load(self):
        began = time.process_time()
        function = self.point.load()
        def run():
            function()
            spent.append(time.process_time() - began)
            called.append(self.point.value)
        return run
def entry_points(**given):
    found = stock(**given)
    if given.get("group") != "torch.backends":
        return found
    chosen = [point for point in found if side == "with" and point.value == ours]
    if side == "empty":
        chosen = [metadata.EntryPoint("empty", "torch_import_empty:install", "torch.backends")]
    return [Timed(point) for point in chosen]
metadata.entry_points = entry_points
wall, cpu = time.perf_counter(), time.process_time()
import torch
print(json.dumps({"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall,
                  "hook_s": sum(spent), "called": called}))
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m recipes.bench.torch_import", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--target", type=float, default=0.01, help="share of the import that is allowed")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ROOT / "out")) / "bench/torch_import")
    arguments = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "torch_import_empty.py").write_text("def install():\n    pass\n")
        for side in SIDES:  # warm-up: files into memory, bytecode written
            measure(side, folder)
        for number in range(arguments.rounds):
            for side in SIDES[number % 3 :] + SIDES[: number % 3]:  # none always runs first
                found[side].append(measure(side, folder))
    cpu_s = {side: statistics.median(one["cpu_s"] for one in found[side]) for side in SIDES}
    hook_s = {side: statistics.median(one["hook_s"] for one in found[side]) for side in ("with", "empty")}
    ratio = cpu_s["with"] / cpu_s["without"]
    print(f"median of {arguments.rounds} imports of torch, CPU time")
    for side in SIDES:
        fields = sorted(one["cpu_s"] for one in found[side])
        spread = f"{1000 * fields[len(fields) // 4]:.0f} to {1000 * fields[3 * len(fields) // 4]:.0f}"
        hook = f", of it the hook {1000 * hook_s[side]:.2f} ms" if side in hook_s else ""
        print(f"  {side:8} {1000 * cpu_s[side]:8.1f} ms (quartiles {spread} ms){hook}")
    share = hook_s["with"] / cpu_s["without"]
    print(f"with / without: {ratio:.3f}; the hook is {100 * share:.2f} % of the import")
    reached = share <= arguments.target
    print(f"{'reached' if reached else 'NOT reached'}: at most {100 * arguments.target:g} %")
    arguments.out.mkdir(parents=True, exist_ok=True)
    report = {"cpu_s": cpu_s, "hook_s": hook_s, "ratio": ratio, "share": share, "target": arguments.target}
    report["imports"] = found
    (arguments.out / "report.json").write_text(json.dumps(report, indent=1))
    return 0 if reached else 1


def measure(side: str, folder: str) -> dict[str, float]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, str(ROOT)])}
    command = [sys.executable, "-c", CHILD, side, OURS]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S)
    if ended.returncode:
        raise SystemExit(f"{ended.stderr[-2000:]}\nimport torch ended with {ended.returncode}")
    one = json.loads(ended.stdout.splitlines()[-1])
    expected = {"without": [], "with": [OURS], "empty": ["torch_import_empty:install"]}[side]
    if one["called"] != expected:
        raise SystemExit(f"{side}: torch called {one['called']}, not {expected}: install this package first")
    return one


if __name__ == "__main__":
    sys.exit(main())
