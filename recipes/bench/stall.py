"""How long trainer and rollouts stand still for a new policy, for any framework: the same job with the framework's own
path ("stock") and with the store ("pull"), in turns, in one go. A benchmark says how to run the job and where its
numbers are."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from recipes.bench.verl_stall import stalls

ROOT = Path(__file__).resolve().parents[2]
PATHS = ("stock", "pull")
RUN_TIMEOUT_S = 900
Command = Callable[[str, argparse.Namespace], Sequence[str]]
ReadRound = Callable[[str, Path], stalls.Round]


def measure(
    name: str,
    description: str,
    command: Command,
    read_round: ReadRound,
    *,
    wait: str,
    model: str = "{size}",
    size: str = "small",
) -> int:
    """Measure and report. name: the module's in recipes/bench. command: of one run, given the path and the arguments.
    read_round: from the path and the folder of a run. wait: what the trainer waits in. model: its folder below
    OUT/models. size: the model's, unless the command line sets another.

    Returns the exit status: 1 when a ratio is below --target."""
    parser = argparse.ArgumentParser(prog=f"python -m recipes.bench.{name}", description=description.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="of training in each run")
    parser.add_argument("--size", choices=("tiny", "small", "deep"), default=size, help="of the model")
    parser.add_argument("--target", type=float, default=6.7, help="ratio that is asked for (the paper's figure)")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ROOT / "out")) / "bench" / name)
    parser.add_argument("overrides", nargs="*", help="for the framework, on both paths")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    plugin = write_plugin(out)
    shared = out.parents[1]
    rounds = []
    for number in range(arguments.rounds):
        for path in PATHS[:: 1 if number % 2 == 0 else -1]:  # neither path always runs first
            folder = out / f"{number}-{path}"
            started = time.monotonic()
            run(command(path, arguments), folder, plugin, shared, arguments.size)
            found = read_round(path, folder)
            found.memcpy_s = memcpy_s(shared / "models" / model.format(size=arguments.size) / "model.safetensors")
            rounds.append(found)
            print(summary(number, found, time.monotonic() - started), flush=True)
    lines = stalls.compare(rounds, wait)
    limit_s = statistics.median(r.memcpy_s for r in rounds)
    print_table(lines, limit_s)
    reached = all(line.ratio >= arguments.target for line in lines if line.counts)
    report = {
        "target": arguments.target,
        "reached": reached,
        "memcpy_s": limit_s,
        "lines": [{**asdict(line), "ratio": line.ratio} for line in lines],
        "rounds": [asdict(r) for r in rounds],
    }
    (out / "report.json").write_text(json.dumps(report, indent=1))
    verdict = "reached" if reached else "NOT reached"
    print(f"\n{verdict}: {arguments.target} times less in (a) and (b); {out / 'report.json'}")
    return 0 if reached else 1


def run(command: Sequence[str], folder: Path, plugin: Path, shared: Path, size: str) -> None:
    folder.mkdir(parents=True)
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(plugin), os.environ.get("PYTHONPATH")])),
        "SIZE": size,
        "RUN": str(folder),
        "OUT": str(shared),
        "TENSORHUB_EVENTS": str(folder / "events"),
        "VERL_STALL_PROBE": str(folder / "probe"),
    }
    with open(folder / "run.log", "wb") as log:
        ended = subprocess.run(command, stdout=log, stderr=log, env=environment, timeout=RUN_TIMEOUT_S)
    if ended.returncode:
        tail = "\n".join((folder / "run.log").read_text(errors="replace").splitlines()[-30:])
        raise SystemExit(f"{tail}\nthe run ended with {ended.returncode}; its log is {folder / 'run.log'}")


def write_plugin(out: Path) -> Path:
    """Write a folder for PYTHONPATH whose metadata make vLLM load the probe."""
    info = out / "plugin/verl_stall_probe-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: verl-stall-probe\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nverl_stall_probe = recipes.bench.verl_stall.probe:register\n"
    )
    return info.parent


def memcpy_s(weights: Path) -> float:
    """Return the physical limit: the seconds to copy the model's bytes in memory, by one thread, on a quiet machine."""
    import torch

    source = torch.ones(weights.stat().st_size, dtype=torch.uint8)
    target = torch.zeros_like(source)
    times = []
    for _ in range(7):
        started = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def summary(number: int, found: stalls.Round, seconds: float) -> str:
    def middle(values: list[float]) -> str:
        return f"{1000 * statistics.median(values):7.0f} ms of {len(values):2d}" if values else "   nothing"

    return (
        f"round {number + 1} {found.path:5}  trainer waits {middle(found.waits_s)}"
        f"  rollout cannot generate {middle([s.closed_s for s in found.stalls])}"
        f"  gives no token {middle([s.silent_s for s in found.stalls])}  ({seconds:.0f} s)"
    )


def print_table(lines: list[stalls.Line], limit_s: float) -> None:
    print(f"\n{'median of all updates':42} {'stock':>10} {'store':>10} {'ratio':>7} {'store / one memcpy':>20}")
    for line in lines:
        print(
            f"{line.what:42} {1000 * line.stock_s:7.0f} ms {1000 * line.ours_s:7.0f} ms {line.ratio:6.1f}x"
            f" {line.ours_s / limit_s:19.1f}x"
        )
    print(f"{'limit: one memcpy of the model':42} {'':10} {1000 * limit_s:7.1f} ms")
