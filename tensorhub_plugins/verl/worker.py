"""What runs inside every vLLM worker process of a pull-mode replica: verl's own extension and the store's."""

from __future__ import annotations

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from tensorhub_plugins.vllm.ray.health import OwnedWorkerExtension


class TensorHubVerlWorkerExtension(OwnedWorkerExtension, vLLMColocateWorkerExtension):
    """vLLM mixes this class into its worker; no attribute may be named as one of the worker's."""
