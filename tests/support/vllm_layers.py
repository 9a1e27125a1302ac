"""vLLM's own layers in this process, without an engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


@contextmanager
def only_rank(folder: Path) -> Iterator[Any]:
    """vLLM's configuration for an FP8 model, in a process that is the only rank of its group."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        destroy_distributed_environment,
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
    )

    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder / 'store'}", 0, "gloo")
        initialize_model_parallel(1)
        config.model_config = SimpleNamespace(dtype=torch.bfloat16, quantization="fp8")
        yield config
    destroy_model_parallel()
    destroy_distributed_environment()
