#!/usr/bin/env bash
# run.sh [OpenRLHF's arguments...]: ../openrlhf_grpo with partial rollout and one engine; `tensorhub fleet` does the rest.
# Environment: as ../openrlhf_grpo/run.sh.
export ENGINES="${ENGINES:-1}"
exec "$(dirname "${BASH_SOURCE[0]}")/../openrlhf_grpo/run.sh" partial tensorhub \
  --data.max_samples 4096 --train.num_episodes 100 "$@"
