"""How long trainer and rollouts stand still for a new policy: verl's own path against the store's, same job, one go.

    python -m recipes.bench.verl_stall [--rounds 3] [--steps 8] [--size small] [--out FOLDER]

Each round runs the job once with verl's stock path and once in pull mode. Prints medians and ratios; FOLDER/report.json
has every number. Returns 1 when a ratio is below --target.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from recipes.bench import stall
from recipes.bench.verl_stall import stalls

WARM_UP_STEPS = 2
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
    return stall.measure("verl_stall", __doc__, command, read_round, wait="update_weights")


def command(path: str, arguments: argparse.Namespace) -> list[str]:
    recipe = str(stall.ROOT / "recipes/verl_grpo/run.sh")
    steps = f"trainer.total_training_steps={arguments.steps}"
    job = [*JOB, *(STORE_JOB if path == "pull" else ())]
    return [recipe, "separate_async", path, steps, *job, *arguments.overrides]


def read_round(path: str, folder: Path) -> stalls.Round:
    return stalls.read_round(path, folder, WARM_UP_STEPS)


if __name__ == "__main__":
    sys.exit(main())
