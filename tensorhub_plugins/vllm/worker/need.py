"""The host memory that the workers of an engine will need, reported before anything is read."""

from __future__ import annotations

from typing import Any

import torch

from tensorhub_plugins.core import Client
from tensorhub_plugins.core.options import Need
from tensorhub_plugins.vllm.config import shares_experts
from tensorhub_plugins.vllm.worker import online, quantize, weights

MEND = 'use a larger tensor_parallel_size over more hosts, or install="direct"'


def say(client: Client, copies: int, model: torch.nn.Module, vllm_config: Any) -> None:
    """Log it, or raise UsageError if it does not fit."""
    size_bytes = sum(tensor.nbytes for tensor in weights.tensors(model).values())
    more = quantize.memory_bytes(model) if quantize.block_of(vllm_config) else online.more_bytes(model)
    need = Need(size_bytes, copies, more, "while it quantizes a checkpoint of floats")
    client.budget.check(need, workers=workers_of_host(vllm_config), mend=MEND)


def workers_of_host(vllm_config: Any) -> int:
    """Return how many workers of this engine are on this host."""
    parallel = getattr(vllm_config, "parallel_config", None)
    workers = int(getattr(parallel, "local_world_size", 1))
    if parallel is not None and shares_experts(vllm_config):
        workers *= parallel.data_parallel_size_local
    return workers
