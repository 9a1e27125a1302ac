#!/usr/bin/env bash
# run.sh [Hydra overrides...]: ../verl_grpo in pull mode, beginning with one replica; `tensorhub fleet` does the rest.
# Environment: as ../verl_grpo/run.sh.
exec "$(dirname "${BASH_SOURCE[0]}")/../verl_grpo/run.sh" separate_async pull \
  actor_rollout_ref.rollout.n_gpus_per_node=1 \
  trainer.total_training_steps=1000 trainer.total_epochs=1000 "$@"
