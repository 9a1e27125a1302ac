#!/usr/bin/env bash
# run.sh [Hydra overrides...]: ../verl_grpo_elastic, whose replicas say when they hear nothing from the other site.
# Environment: as ../verl_grpo/run.sh, and SITES (see ../cluster.py); STALENESS_S (default 60).
store=actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.tensorhub
exec "$(dirname "${BASH_SOURCE[0]}")/../verl_grpo_elastic/run.sh" "+$store.staleness_s=${STALENESS_S:-60}" "$@"
