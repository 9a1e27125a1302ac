#!/usr/bin/env bash
# run.sh [OpenRLHF's arguments...]: ../openrlhf_grpo_elastic, whose engines say when they hear nothing from the other site.
# Environment: as ../openrlhf_grpo/run.sh, and SITES (see ../cluster.py); STALENESS_S (default 60).
export HUB="${HUB:-tensorhub:?staleness_s=${STALENESS_S:-60}}"
exec "$(dirname "${BASH_SOURCE[0]}")/../openrlhf_grpo_elastic/run.sh" "$@"
