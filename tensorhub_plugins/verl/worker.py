"""What runs inside every vLLM worker process of a pull-mode replica: verl's own extension and the store's."""

from __future__ import annotations

from typing import Any

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from tensorhub_plugins.vllm.orphans import end_with_owner
from tensorhub_plugins.vllm.worker import TensorHubWorkerExtension


class TensorHubVerlWorkerExtension(TensorHubWorkerExtension, vLLMColocateWorkerExtension):
    """vLLM mixes this class into its worker; no attribute may be named as one of the worker's."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        worker = super().__new__(cls, *args, **kwargs)
        end_with_owner()
        return worker

    def tensorhub_ping(self) -> bool:
        """The engine's loop and this worker answer."""
        return True
