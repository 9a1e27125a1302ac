# Source this before an OpenRLHF recipe on a machine without a GPU. Needs OUT (a writable folder).
# Every line is explained in openrlhf/README.md.
_cpu="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export PYTHONPATH="$_cpu/openrlhf${PYTHONPATH:+:$PYTHONPATH}"
export DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR="$OUT/cache/torch_extensions"
export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-1}" VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1
export RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0 RAY_memory_monitor_refresh_ms=0
# A build that was killed leaves its lock, for which every later one waits: torch has no timeout there.
[[ ! -d $TORCH_EXTENSIONS_DIR ]] || find "$TORCH_EXTENSIONS_DIR" -name lock -mmin +15 -delete
