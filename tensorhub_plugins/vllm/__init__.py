"""vLLM's side of the store: weights are pulled inside vLLM's worker processes, while the engine generates.

Give an engine `worker_extension_cls="tensorhub_plugins.vllm.TensorHubWorkerExtension"` and drive it with
`collective_rpc`; `worker` says how. Importing this package loads neither torch nor vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensorhub_plugins.vllm.worker import TensorHubWorkerExtension

__all__ = ["TensorHubWorkerExtension"]


def __getattr__(name: str) -> object:
    if name in __all__:
        from tensorhub_plugins.vllm import worker

        return getattr(worker, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
