#!/usr/bin/env bash
# The GRPO recipe's run.sh with another algorithm: same modes, stores, model, data, reward and environment variables.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export ALGORITHM="$here/ppo.args"
exec "$here/../verl_grpo/run.sh" "$@"
