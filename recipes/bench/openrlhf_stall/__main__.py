"""How long trainer and engines stand still for a new policy: OpenRLHF's own path against the store's, same job, one go.

    python -m recipes.bench.openrlhf_stall [--rounds 3] [--steps 8] [--size deep] [--out FOLDER]

Each round runs the job once with OpenRLHF's own path and once with the store. The stopwatch is that of verl_stall, on
both sides. Prints medians and ratios; FOLDER/report.json has every number. Returns 1 when a ratio is below --target.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from recipes.bench import stall
from recipes.bench.verl_stall import stalls
from recipes.openrlhf_grpo.metrics import read_metrics

STORES = {"stock": "stock", "pull": "tensorhub"}  # run.sh's
WARM_UP_STEPS = 2
# Partial rollout, the mode in which OpenRLHF itself stops engines in the middle of answers. Generating takes longer
# than training, and begins anew before it: whenever an update comes, most engines are in the middle of some answers.
JOB = (
    *("--rollout.batch_size", "4", "--rollout.n_samples_per_prompt", "4", "--train.batch_size", "16"),
    *("--data.max_len", "288", "--rollout.max_new_tokens", "256"),
)
PROMPTS_A_STEP = 4


def main() -> int:
    return stall.measure(
        "openrlhf_stall", __doc__, command, read_round, wait="broadcast_to_vllm", model="{size}-openrlhf", size="deep"
    )


def command(path: str, arguments: argparse.Namespace) -> list[str]:
    recipe = str(stall.ROOT / "recipes/openrlhf_grpo/run.sh")
    count = str(arguments.steps * PROMPTS_A_STEP)
    return [recipe, "partial", STORES[path], *JOB, "--data.max_samples", count, *arguments.overrides]


def read_round(path: str, folder: Path) -> stalls.Round:
    """Read what one run left. The first updates are warm-up: connections, first allocations."""
    found = stalls.Round(path)
    for row in read_metrics(folder / "tensorboard"):
        if row["step"] > WARM_UP_STEPS:
            found.waits_s.append(row["data"]["timing/broadcast"])
    for file in sorted((folder / "probe").glob("*.jsonl")):
        notes = [json.loads(line) for line in file.read_text().split("\n")[:-1]]
        found.stalls += stalls.find_stalls(notes, WARM_UP_STEPS)
    return found


if __name__ == "__main__":
    sys.exit(main())
