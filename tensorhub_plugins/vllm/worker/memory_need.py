"""The memory that the workers of an engine need: the host's, reported before anything is read; and the device's."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from tensorhub_plugins.core import Client
from tensorhub_plugins.core.log import get_logger
from tensorhub_plugins.core.options import Need
from tensorhub_plugins.vllm.config import shares_experts
from tensorhub_plugins.vllm.plugin import wrap
from tensorhub_plugins.vllm.worker import online_quantization, quantize, weights

logger = get_logger(__name__)

FREED_S = 10.0  # without more free memory: it is not that of a process that has just ended
FREED_INTERVAL_S = 0.25
MEND = 'use a larger tensor_parallel_size over more hosts, or install="direct"'


def say(client: Client, copies: int, model: torch.nn.Module, vllm_config: Any) -> None:
    """Log it, or raise UsageError if it does not fit."""
    size_bytes = sum(tensor.nbytes for tensor in weights.tensors(model).values())
    more = quantize.memory_bytes(model) if quantize.block_of(vllm_config) else online_quantization.more_bytes(model)
    need = Need(size_bytes, copies, more, "while it quantizes a checkpoint of floats")
    client.budget.check(need, workers=workers_of_host(vllm_config), mend=MEND)


def workers_of_host(vllm_config: Any) -> int:
    """Return how many workers of this engine are on this host."""
    parallel = getattr(vllm_config, "parallel_config", None)
    workers = int(getattr(parallel, "local_world_size", 1))
    if parallel is not None and shares_experts(vllm_config):
        workers *= parallel.data_parallel_size_local
    return workers


def wait_for_the_last(worker_class: type) -> None:
    """Have vLLM's worker wait for the device's memory before it refuses to start: of an engine that was killed the
    driver still frees it when the next one begins, which then fails until its restarts are used up."""
    module: Any = sys.modules.get(worker_class.__module__)
    if hasattr(module, "request_memory"):
        wrap(module, "request_memory", request_memory)


def request_memory(
    original: Callable[[Any, Any], int],
    snapshot: Any,
    cache_config: Any,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Call vLLM's when there is enough, or when no more has come for FREED_S."""
    needed = snapshot.total_memory * cache_config.gpu_memory_utilization
    most, since = snapshot.free_memory, now()
    if most < needed:
        logger.warning("%.1f GB of the device's memory are not free yet: waiting", (needed - most) / 1e9)
    while snapshot.free_memory < needed and now() - since < FREED_S:
        sleep(FREED_INTERVAL_S)
        snapshot.measure()
        if snapshot.free_memory > most:
            most, since = snapshot.free_memory, now()
    return original(snapshot, cache_config)
