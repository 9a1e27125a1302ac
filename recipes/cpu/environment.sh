# Source this before a recipe on a machine without a GPU. Needs OUT (a writable folder) and PYTHON (an interpreter).
# Every line is explained in README.md.
_cpu="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
_vllm="$(PYTHONPATH= "$PYTHON" "$_cpu/make_stand_ins.py" "$OUT/cpu")"
export PYTHONPATH="$_cpu/stand_ins${_vllm:+:$_vllm}${PYTHONPATH:+:$PYTHONPATH}"
export VERL_USE_EXTERNAL_MODULES="recipe_cpu_platform${VERL_USE_EXTERNAL_MODULES:+,$VERL_USE_EXTERNAL_MODULES}" VERL_PLATFORM=cpu VERL_ENGINE_DEVICE=cuda
export VERL_LOGGING_LEVEL=WARN
export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-1}" VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1
export RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0
