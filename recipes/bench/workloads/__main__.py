"""The three workloads of the TensorHub paper with real vLLM engines: the store, a plain star, and what verl does today.

    python -m recipes.bench.workloads [standalone elastic cross] [--rounds 3] [--quick] [--out FOLDER]

Hosts are network namespaces with shaped links (root, `ip`, `tc`; for `cross` also /dev/net/tun and `cc`). Paths take
turns in every round. FOLDER keeps what happened as JSON, the report, and a picture of all workloads measured there.
Returns 1 when a goal was not reached or an engine had other weights than the trainer.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from recipes.bench import network
from recipes.bench.workloads import report as reports

ROOT = Path(__file__).resolve().parents[3]
# All of this process, from which those of the hosts are forked.
ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "eth0",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # else: a host without a name has no name
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m recipes.bench.workloads", description=__doc__.splitlines()[0])
    parser.add_argument(
        "workloads", nargs="*", metavar="workload", help=f"of {', '.join(reports.GOALS)} (default: all)"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--versions", type=int, default=10, help="of a run that count")
    parser.add_argument("--sequences", type=int, default=2, help="that an engine generates at a time")
    parser.add_argument("--size", choices=("tiny", "small", "deep"), default="small", help="of the model")
    parser.add_argument("--mbit", type=float, default=1000.0, help="of every host's link, each way")
    parser.add_argument("--wan-mbit", type=float, default=100.0)
    parser.add_argument("--rtt-ms", type=float, default=50.0, help="between the sites")
    parser.add_argument("--quick", action="store_true", help="one round, two versions, standalone: does it work at all")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ROOT / "out")) / "bench/workloads")
    options = parser.parse_args()
    unknown = set(options.workloads) - reports.GOALS.keys()
    if unknown:
        parser.error(f"no workload {', '.join(sorted(unknown))}: choose of {', '.join(reports.GOALS)}")
    if options.quick:
        options.rounds, options.versions = 1, 2
    network.require()
    os.environ.update(ENVIRONMENT)
    options.out.mkdir(parents=True, exist_ok=True)
    chosen = options.workloads or (["standalone"] if options.quick else list(reports.GOALS))
    reason = network.cannot_delay()
    for workload in chosen:
        if workload == "cross" and reason is not None:
            print(f"cross: not run: {reason}")
            continue
        plays = measure(workload, options)
        (options.out / f"{workload}.json").write_text(
            json.dumps({"options": vars(options), "plays": plays}, default=str)
        )
    return show(options.out)


def measure(workload: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    from recipes.bench.workloads import stage

    model, bare = make_model(options)
    setting = stage.Setting(
        model, bare, options.versions, options.sequences, options.mbit, options.wan_mbit, options.rtt_ms
    )
    stage.import_all()
    plays = []
    for number in range(options.rounds):
        imports_s = None  # once a round: they take long
        paths = reports.PATHS[workload]
        first = number % len(paths)  # none always runs first
        for path in paths[first:] + paths[:first]:
            began = time.monotonic()
            play = {"round": number + 1, **stage.play(workload, path, setting, imports_s)}
            imports_s = (play["join"] and play["join"]["imports_s"]) or imports_s
            plays.append(play)
            print(
                f"{workload} round {number + 1} {path:7} {summary(workload, play)} ({time.monotonic() - began:.0f} s)",
                flush=True,
            )
    return plays


def summary(workload: str, play: dict[str, Any]) -> str:
    return ", ".join(f"{m.what} {m.value(play):.3f}" for m in reports.MEASURES[workload])


def make_model(options: argparse.Namespace) -> tuple[Path, Path]:
    """Make folders with and without weights."""
    model = options.out / f"model-{options.size}"
    bare = options.out / f"model-{options.size}-without-weights"
    if not model.exists():
        make = [sys.executable, "-m", "recipes.verl_grpo.make_model", str(model), "--size", options.size]
        subprocess.run(make, check=True, cwd=ROOT)
    shutil.rmtree(bare, ignore_errors=True)
    shutil.copytree(model, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    return model, bare


def show(out: Path) -> int:
    from recipes.bench.workloads.picture import draw

    found = [
        json.loads((out / f"{name}.json").read_text()) for name in reports.GOALS if (out / f"{name}.json").exists()
    ]
    if not found:
        return 1
    made = [reports.make_report(each["plays"][0]["workload"], each["plays"]) for each in found]
    for report in made:
        print("\n" + reports.table(report))
    (out / "report.json").write_text(json.dumps([report.to_dict() for report in made], indent=1))
    draw(made, {each["plays"][0]["workload"]: each["plays"] for each in found}, out / "stalls.png")
    print(f"\n{out / 'report.json'}\n{out / 'stalls.png'}")
    return 0 if all(report.reached for report in made) else 1


if __name__ == "__main__":
    sys.exit(main())
