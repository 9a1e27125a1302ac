#!/usr/bin/env bash
# run.sh MODE STORE [Hydra overrides...]
#   MODE   separate_async | one_step_off | fully_async
#   STORE  stock | dropin | pull
# Environment: PYTHON (default python), OUT (default <repository>/out), SIZE (tiny | small, default small),
#   MODEL and DATA (folders; made under OUT when not given), RUN (folder of this run's logs), ALGORITHM (an args file),
#   NODES ("2 2 2": a Ray cluster on this machine, with so many pretended GPUs a node; see ../cluster.py).
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(cd "$here/../.." && pwd)"
mode="${1:?run.sh MODE STORE [overrides]: see the top of this file}"
store="${2:?run.sh MODE STORE [overrides]: see the top of this file}"
shift 2

export PYTHON="${PYTHON:-python}" OUT="${OUT:-$root/out}"
mkdir -p "$OUT"
OUT="$(cd "$OUT" && pwd)"
size="${SIZE:-small}"
model="${MODEL:-$OUT/models/$size}"
data="${DATA:-$OUT/data}"
export RUN="${RUN:-$OUT/runs/$(basename "${ALGORITHM:-grpo.args}" .args)-$mode-$store}"
mkdir -p "$RUN"
cd "$RUN" # verl and Ray leave files where they run

case "$mode" in
separate_async) module=verl.trainer.main_ppo ;;
one_step_off) module=verl.experimental.one_step_off_policy.main_ppo ;;
fully_async) module=verl.experimental.fully_async_policy.fully_async_main ;;
*) echo "run.sh: unknown mode $mode (separate_async, one_step_off or fully_async)" >&2; exit 2 ;;
esac

cpu=
"$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || cpu=yes

export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0 RAY_DEDUP_LOGS=0 VLLM_NO_USAGE_STATS=1
export HF_HOME="$OUT/cache/huggingface" XDG_CACHE_HOME="$OUT/cache" TORCHINDUCTOR_CACHE_DIR="$OUT/cache/inductor"
export VLLM_CACHE_ROOT="$OUT/cache/vllm" TRITON_CACHE_DIR="$OUT/cache/triton" VLLM_CONFIG_ROOT="$OUT/cache/vllm"
export VERL_FILE_LOGGER_PATH="$RUN/metrics.jsonl"

arguments=("$here/common.args" "${ALGORITHM:-$here/grpo.args}" "$here/modes/$mode.args")
if [[ $cpu ]]; then
  [[ $store == pull ]] || export RECIPE_CPU_STOCK=1 # verl itself loads the weights into vLLM
  . "$root/recipes/cpu/environment.sh"
  arguments+=("$here/cpu.args")
  [[ $store != stock ]] || store=stock_cpu
fi
# Only separate_async reads model.external_lib where the replicas are made; elsewhere the environment names the plug-in.
[[ $store != pull || $mode == separate_async ]] ||
  export VERL_USE_EXTERNAL_MODULES="${VERL_USE_EXTERNAL_MODULES:+$VERL_USE_EXTERNAL_MODULES,}tensorhub_plugins.verl"
arguments+=("$here/stores/$store.args")
for file in "${arguments[@]}"; do
  [[ -f $file ]] || { echo "run.sh: no $file" >&2; exit 2; }
done

[[ -f $model/config.json ]] || "$PYTHON" "$here/make_model.py" "$model" --size "$size"
[[ -f $data/train.parquet ]] || "$PYTHON" "$here/make_data.py" "$data"

# verl's experimental modes look for its configuration relative to the working folder.
verl="$("$PYTHON" -c 'import importlib.util as u; print(u.find_spec("verl").submodule_search_locations[0])')"
[[ $mode == separate_async ]] || set -- "hydra.searchpath=[file://$verl/trainer/config]" "$@"

# Ray puts sockets under its folder, whose path may have 107 characters at most.
ray="$(mktemp -d "${TMPDIR:-/tmp}/recipe.XXXXXX")"
since="$(date +%s)"
. "$root/recipes/cluster.sh"
trap 'end_cluster; "$PYTHON" "$root/recipes/sweep.py" "$RUN" "$since"; rm -rf "$ray"' EXIT

sed -e 's/#.*//' -e 's/[[:space:]]*$//' -e '/^$/d' "${arguments[@]}" >"$RUN/arguments"
mapfile -t overrides <"$RUN/arguments"
if [[ ${NODES:-} ]]; then
  start_cluster "$ray" $NODES
  # What a driver says of nodes that it starts itself, it may not say of others.
  mapfile -t overrides < <(grep -v 'ray_kwargs\.ray_init\.' "$RUN/arguments")
else
  overrides+=("++ray_kwargs.ray_init._temp_dir=$ray")
fi
"$PYTHON" -m "$module" "${overrides[@]}" \
  data.train_files="$data/train.parquet" data.val_files="$data/test.parquet" \
  actor_rollout_ref.model.path="$model" \
  reward.custom_reward_function.path="$here/reward.py" \
  trainer.experiment_name="$mode-$store" trainer.default_local_dir="$RUN/checkpoints" \
  hydra.run.dir="$RUN/hydra" \
  "$@"
