"""vLLM's side of the store: weights are pulled inside vLLM's worker processes, while the engine generates.

Give an engine `worker_extension_cls="tensorhub_plugins.vllm.TensorHubWorkerExtension"` and drive it with
`collective_rpc`; `worker` says how. A trainer names what it publishes by `checkpoint_tensors`, or, of a LoRA
adapter, by `adapter_tensors`; neither needs vLLM.
Importing this package loads neither torch nor vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensorhub_plugins.vllm.checkpoint_names import checkpoint_tensors
    from tensorhub_plugins.vllm.lora import adapter_of, adapter_tensors, lora_request
    from tensorhub_plugins.vllm.worker.extension import TensorHubWorkerExtension

__all__ = ["TensorHubWorkerExtension", "adapter_of", "adapter_tensors", "checkpoint_tensors", "lora_request"]


def __getattr__(name: str) -> object:
    if name == "TensorHubWorkerExtension":
        from tensorhub_plugins.vllm.worker.extension import TensorHubWorkerExtension

        return TensorHubWorkerExtension
    if name == "checkpoint_tensors":
        from tensorhub_plugins.vllm.checkpoint_names import checkpoint_tensors

        return checkpoint_tensors
    if name in ("adapter_of", "adapter_tensors", "lora_request"):
        from tensorhub_plugins.vllm import lora

        return getattr(lora, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
