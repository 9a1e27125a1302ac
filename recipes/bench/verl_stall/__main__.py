"""How long trainer and rollouts stand still for a new policy: verl's own path against the store's, same job, one go.

    python -m recipes.bench.verl_stall [--rounds 3] [--steps 8] [--size small] [--out FOLDER]

Each round runs the job once with verl's stock path and once in pull mode. Prints medians and ratios; FOLDER/report.json
has every number. Returns 1 when a ratio is below --target.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from recipes.bench.verl_stall import stalls

ROOT = Path(__file__).resolve().parents[3]
PATHS = ("stock", "pull")
WARM_UP_STEPS = 2
RUN_DEADLINE_S = 900
# Long answers, all of the same length, more of them than run at once, and generating is what takes longest: whenever an
# update comes, every replica is in the middle of some and has others waiting.
JOB = (
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.rollout.max_num_seqs=4",
    "data.max_response_length=256",
    "actor_rollout_ref.rollout.max_model_len=288",
    "actor_rollout_ref.rollout.ignore_eos=True",
    "algorithm.rollout_correction.bypass_mode=True",
    "trainer.v1.separate_async.num_warmup_batches=2",
)
# What verl's own path does not offer: to move what the engines run instead of the trainer's fp32 masters.
STORE_JOB = ("+actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.tensorhub.dtype=bfloat16",)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m recipes.bench.verl_stall", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="of training in each run")
    parser.add_argument("--size", choices=("tiny", "small"), default="small", help="of the model")
    parser.add_argument("--target", type=float, default=6.7, help="ratio that is asked for (the paper's figure)")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ROOT / "out")) / "bench/verl_stall")
    parser.add_argument("overrides", nargs="*", help="for verl's configuration, of both paths")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    plugin = write_plugin(out)
    rounds = []
    for number in range(arguments.rounds):
        for path in PATHS[:: 1 if number % 2 == 0 else -1]:  # neither path always runs first
            folder = out / f"{number}-{path}"
            started = time.monotonic()
            run(path, folder, plugin, arguments)
            found = stalls.read_round(path, folder, WARM_UP_STEPS)
            found.memcpy_s = memcpy_s(folder, arguments.size)
            rounds.append(found)
            print(summary(number, found, time.monotonic() - started), flush=True)
    lines = stalls.compare(rounds)
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


def write_plugin(out: Path) -> Path:
    """A folder for PYTHONPATH whose metadata make vLLM load the probe."""
    info = out / "plugin/verl_stall_probe-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: verl-stall-probe\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nverl_stall_probe = recipes.bench.verl_stall.probe:register\n"
    )
    return info.parent


def run(path: str, folder: Path, plugin: Path, arguments: argparse.Namespace) -> None:
    folder.mkdir(parents=True)
    command = [
        str(ROOT / "recipes/verl_grpo/run.sh"),
        "separate_async",
        path,
        f"trainer.total_training_steps={arguments.steps}",
        *JOB,
        *(STORE_JOB if path == "pull" else ()),
        *arguments.overrides,
    ]
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(plugin), os.environ.get("PYTHONPATH")])),
        "SIZE": arguments.size,
        "RUN": str(folder),
        "OUT": str(arguments.out.resolve().parents[1]),
        "TENSORHUB_EVENTS": str(folder / "events"),
        "VERL_STALL_PROBE": str(folder / "probe"),
    }
    with open(folder / "verl.log", "wb") as log:
        ended = subprocess.run(command, stdout=log, stderr=log, env=environment, timeout=RUN_DEADLINE_S)
    if ended.returncode:
        tail = "\n".join((folder / "verl.log").read_text(errors="replace").splitlines()[-30:])
        raise SystemExit(f"{tail}\nverl ended with {ended.returncode}; its log is {folder / 'verl.log'}")


def memcpy_s(folder: Path, size: str) -> float:
    """The physical limit: the model's bytes copied once from memory to memory, by one thread, on a quiet machine."""
    import torch

    weights = folder.parents[2] / "models" / size / "model.safetensors"
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


if __name__ == "__main__":
    sys.exit(main())
