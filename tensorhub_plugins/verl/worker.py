"""What runs inside every vLLM worker process of a pull-mode replica: verl's own extension and the store's."""

from __future__ import annotations

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from tensorhub_plugins.vllm.worker import TensorHubWorkerExtension


class TensorHubVerlWorkerExtension(TensorHubWorkerExtension, vLLMColocateWorkerExtension):
    """vLLM mixes this class into its worker; no attribute may be named as one of the worker's."""

    def tensorhub_ping(self) -> bool:
        """The engine's loop and this worker answer."""
        return True
