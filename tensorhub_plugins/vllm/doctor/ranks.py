"""One worker of a tensor parallel engine without the others: the model that vLLM makes for a rank, in this process.

What a rank loads depends on its number and on the size of its group only. So a group is described and never asked: the
model can be made, loaded and planned for, and not run. On the meta device it takes no memory, whatever its size.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Rank(NamedTuple):
    tp_size: int = 1
    tp: int = 0


class Made(NamedTuple):
    model: torch.nn.Module
    vllm_config: Any


@contextmanager
def made(folder: Path, rank: Rank, *, device: str = "meta", **options: Any) -> Iterator[Made]:
    """The model of this folder's config.json as that rank has it, not loaded; it is the rank within the block.

    options: of vLLM's engine. Call it in a process of its own: it starts torch.distributed.
    """
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    options = {"enforce_eager": True, "max_model_len": 128, "skip_tokenizer_init": True, **options}
    config = EngineArgs(model=str(folder), tensor_parallel_size=rank.tp_size, **options).create_engine_config()
    with set_current_vllm_config(config):
        _start_alone()
        alone = parallel_state.get_tp_group()
        group = copy.copy(alone)
        group.world_size, group.rank_in_group = rank.tp_size, rank.tp
        parallel_state._TP = group
        try:
            with set_default_torch_dtype(config.model_config.dtype), torch.device(device):
                model = initialize_model(vllm_config=config)
            yield Made(model, config)
        finally:
            parallel_state._TP = alone


def _start_alone() -> None:
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

    if not torch.distributed.is_initialized():
        with tempfile.NamedTemporaryFile() as meeting:
            init_distributed_environment(1, 0, f"file://{meeting.name}", 0, "gloo")
            ensure_model_parallel_initialized(1, 1)
