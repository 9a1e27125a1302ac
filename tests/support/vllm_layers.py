"""vLLM's own layers in this process, without an engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


def only_rank(folder: Path) -> AbstractContextManager[Any]:
    """Return vLLM's configuration for an FP8 model, in a process that is the only rank of its group."""
    return rank_of(folder, 0, 1)


@contextmanager
def rank_of(folder: Path, rank: int, count: int, stages: int = 1) -> Iterator[Any]:
    """Yield the same for one of so many tensor parallel ranks, in each of so many stages."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        destroy_distributed_environment,
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
    )

    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    with set_current_vllm_config(config):
        init_distributed_environment(count * stages, rank, f"file://{folder / 'store'}", rank, "gloo")
        initialize_model_parallel(count, stages)
        config.model_config = SimpleNamespace(dtype=torch.bfloat16, quantization="fp8")
        yield config
    destroy_model_parallel()
    destroy_distributed_environment()
