#!/usr/bin/env bash
# run.sh MODE STORE [OpenRLHF's arguments...]
#   MODE   sync | async | partial
#   STORE  tensorhub (our launcher) | hook (OpenRLHF's own command line) | stock (OpenRLHF's own way of moving weights)
# Environment: PYTHON (default python), OUT (default <repository>/out), SIZE (tiny | small | deep, default small),
#   MODEL (a folder) and DATA (a .jsonl file; both made under OUT when not given), RUN (folder of this run's logs),
#   ALGORITHM (an args file), ENGINES (default 2), HUB (tensorhub, or tensorhub://host:port?option=value),
#   NODES ("2 2 2": a Ray cluster on this machine, with so many pretended GPUs a node; see ../cluster.py).
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(cd "$here/../.." && pwd)"
mode="${1:?run.sh MODE STORE [arguments]: see the top of this file}"
store="${2:?run.sh MODE STORE [arguments]: see the top of this file}"
shift 2

export PYTHON="${PYTHON:-python}" OUT="${OUT:-$root/out}"
mkdir -p "$OUT"
OUT="$(cd "$OUT" && pwd)"
size="${SIZE:-small}"
model="${MODEL:-$OUT/models/$size-openrlhf}"
data="${DATA:-$OUT/data/sums.jsonl}"
algorithm="${ALGORITHM:-$here/grpo.args}"
export RUN="${RUN:-$OUT/runs/openrlhf-$(basename "$algorithm" .args)-$mode-$store}"
mkdir -p "$RUN"
cd "$RUN" # OpenRLHF and Ray leave files where they run

backend="${HUB:-tensorhub}"
case "$store" in
tensorhub) module=tensorhub_plugins.openrlhf.train_ppo_ray ;;
hook) module=openrlhf.cli.train_ppo_ray ;;
stock) module=openrlhf.cli.train_ppo_ray backend=nccl ;;
*) echo "run.sh: unknown store $store (tensorhub, hook or stock)" >&2; exit 2 ;;
esac
case "$mode" in
sync) flags=() ;;
async) flags=(--train.async_enable) ;;
partial) flags=(--train.async_enable --train.partial_rollout_enable) ;;
*) echo "run.sh: unknown mode $mode (sync, async or partial)" >&2; exit 2 ;;
esac

export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0 RAY_DEDUP_LOGS=0 TOKENIZERS_PARALLELISM=false
export VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 VLLM_CACHE_ROOT="$OUT/cache/vllm" VLLM_CONFIG_ROOT="$OUT/cache/vllm"
export HF_HOME="$OUT/cache/huggingface" XDG_CACHE_HOME="$OUT/cache" TORCHINDUCTOR_CACHE_DIR="$OUT/cache/inductor"
export TRITON_CACHE_DIR="$OUT/cache/triton"

since="$(date +%s)" ray=
. "$root/recipes/cluster.sh"
trap 'end_cluster; "$PYTHON" "$root/recipes/sweep.py" "$RUN" "$since"; [[ -z $ray ]] || rm -rf "$ray"' EXIT
# Ray puts sockets under its folder, whose path may have 107 characters at most.
[[ ! ${NODES:-} ]] || ray="$(mktemp -d "${TMPDIR:-/tmp}/recipe.XXXXXX")"

arguments=("$here/common.args" "$algorithm")
if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  [[ $store != stock ]] || export RECIPE_CPU_STOCK=1
  . "$root/recipes/cpu/openrlhf_environment.sh"
  arguments+=("$here/cpu.args")
  [[ $ray ]] || ray="$(mktemp -d "${TMPDIR:-/tmp}/recipe.XXXXXX")"
  # What a driver says of nodes that it starts itself, it may not say of others.
  [[ ${NODES:-} ]] || export RECIPE_RAY_INIT="{\"num_gpus\": 8, \"num_cpus\": 16, \"include_dashboard\": false, \"_temp_dir\": \"$ray\",
    \"object_store_memory\": 300000000, \"log_to_driver\": true}"
fi

[[ -f $model/config.json ]] || "$PYTHON" "$root/recipes/verl_grpo/make_model.py" "$model" --size "$size"
[[ -f $data ]] || "$PYTHON" "$here/make_data.py" "$data"

sed -e 's/#.*//' -e 's/[[:space:]]*$//' -e '/^$/d' "${arguments[@]}" | xargs -n1 >"$RUN/arguments"
mapfile -t given <"$RUN/arguments"
[[ ! ${NODES:-} ]] || start_cluster "$ray" $NODES
"$PYTHON" -m "$module" "${given[@]}" "${flags[@]}" \
  --actor.model_name_or_path "$model" --data.prompt_dataset "$data" --reward.remote_url "$here/reward.py" \
  --vllm.num_engines "${ENGINES:-2}" --vllm.sync_backend "$backend" \
  --ckpt.output_dir "$RUN/model" --ckpt.path "$RUN/checkpoints" --logger.tensorboard_dir "$RUN/tensorboard" \
  "$@"
