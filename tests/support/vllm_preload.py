"""The imports of the fork server from which tests/support/vllm_engines.py forks its engines."""

import vllm.entrypoints.llm
import vllm.model_executor.models.mixtral
import vllm.model_executor.models.qwen2
import vllm.v1.executor.uniproc_executor
import vllm.v1.worker.cpu_worker  # noqa: F401
