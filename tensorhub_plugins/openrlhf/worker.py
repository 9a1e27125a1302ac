"""What runs inside every vLLM worker process of a rollout engine."""

from __future__ import annotations

from typing import Any

from tensorhub_plugins.vllm.orphans import end_with_owner
from tensorhub_plugins.vllm.worker import TensorHubWorkerExtension


class TensorHubOpenRLHFWorkerExtension(TensorHubWorkerExtension):
    """vLLM mixes this class into its worker; no attribute may be named as one of the worker's."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        worker = super().__new__(cls, *args, **kwargs)
        end_with_owner()
        return worker
