"""How long trainer and engines stand still for a new policy: OpenRLHF's own path against the store's, same job, one go.

    python -m recipes.bench.openrlhf_stall [--rounds 3] [--steps 8] [--size small] [--out FOLDER]

Each round runs the job once with OpenRLHF's own path and once with the store. The stopwatch is that of verl_stall, on
both sides. Prints medians and ratios; FOLDER/report.json has every number. Returns 1 when a ratio is below --target.
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
from recipes.bench.verl_stall.__main__ import memcpy_s, print_table, summary, write_plugin
from recipes.openrlhf_grpo.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[3]
PATHS = {"stock": "stock", "pull": "tensorhub"}  # verl_stall's names: run.sh's STORE
WAIT = "(a) the trainer waits in broadcast_to_vllm"
WARM_UP_STEPS = 2
RUN_DEADLINE_S = 900
# Partial rollout, the mode in which OpenRLHF itself stops engines in the middle of answers. Long answers, twice as many
# as are trained on at once: whenever an update comes, every engine is in the middle of some.
JOB = (
    *("--rollout.batch_size", "4", "--rollout.vllm_generate_batch_size", "8", "--rollout.n_samples_per_prompt", "4"),
    *("--train.batch_size", "16", "--data.max_len", "288", "--rollout.max_new_tokens", "256"),
)
PROMPTS_A_STEP = 4


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m recipes.bench.openrlhf_stall", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="of training in each run")
    parser.add_argument("--size", choices=("tiny", "small"), default="small", help="of the model")
    parser.add_argument("--target", type=float, default=6.7, help="ratio that is asked for (the paper's figure)")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ROOT / "out")) / "bench/openrlhf_stall")
    parser.add_argument("arguments", nargs="*", help="for OpenRLHF, on both paths")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    plugin = write_plugin(out)
    rounds = []
    for number in range(arguments.rounds):
        for path in list(PATHS)[:: 1 if number % 2 == 0 else -1]:  # neither path always runs first
            folder = out / f"{number}-{path}"
            started = time.monotonic()
            run(path, folder, plugin, arguments)
            found = read_round(path, folder)
            found.memcpy_s = memcpy_s(folder, f"{arguments.size}-openrlhf")
            rounds.append(found)
            print(summary(number, found, time.monotonic() - started), flush=True)
    lines = stalls.compare(rounds)
    for line in lines:
        line.what = WAIT if line.what == stalls.WAIT else line.what
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


def read_round(path: str, folder: Path) -> stalls.Round:
    """The first updates are warm-up: connections, first allocations."""
    found = stalls.Round(path)
    for row in read_metrics(folder / "tensorboard"):
        if row["step"] > WARM_UP_STEPS:
            found.waits_s.append(row["data"]["timing/broadcast"])
    for file in sorted((folder / "probe").glob("*.jsonl")):
        notes = [json.loads(line) for line in file.read_text().split("\n")[:-1]]
        found.stalls += stalls.find_stalls(notes)[WARM_UP_STEPS:]
    return found


def run(path: str, folder: Path, plugin: Path, arguments: argparse.Namespace) -> None:
    folder.mkdir(parents=True)
    count = str(arguments.steps * PROMPTS_A_STEP)
    recipe = str(ROOT / "recipes/openrlhf_grpo/run.sh")
    command = [recipe, "partial", PATHS[path], *JOB, "--data.max_samples", count, *arguments.arguments]
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
    with open(folder / "openrlhf.log", "wb") as log:
        ended = subprocess.run(command, stdout=log, stderr=log, env=environment, timeout=RUN_DEADLINE_S)
    if ended.returncode:
        tail = "\n".join((folder / "openrlhf.log").read_text(errors="replace").splitlines()[-30:])
        raise SystemExit(f"{tail}\nOpenRLHF ended with {ended.returncode}; its log is {folder / 'openrlhf.log'}")


if __name__ == "__main__":
    sys.exit(main())
