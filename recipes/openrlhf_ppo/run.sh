#!/usr/bin/env bash
# PPO with a critic; the same arguments as ../openrlhf_grpo/run.sh.
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
ALGORITHM="$here/ppo.args" exec "$here/../openrlhf_grpo/run.sh" "$@"
