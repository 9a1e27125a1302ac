"""One worker of a parallel engine without the others: the model that vLLM makes for a rank, in this process.

What a rank loads depends on its numbers and on the sizes of its groups only. So groups are described and never asked:
the model can be made, loaded and planned for, and not run. On the meta device it takes no memory, whatever its size.
"""

from __future__ import annotations

import copy
import itertools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Rank(NamedTuple):
    """One rank of the tensor, the pipeline and the data parallel group: the size of each, and the rank in it."""

    tp_size: int = 1
    tp: int = 0
    pp_size: int = 1
    pp: int = 0
    dp_size: int = 1
    dp: int = 0

    @staticmethod
    def all_of(tp_size: int = 1, pp_size: int = 1, dp_size: int = 1) -> list[Rank]:
        """Return all ranks in the order of their shards."""
        places = itertools.product(range(dp_size), range(pp_size), range(tp_size))
        return [Rank(tp_size, tp, pp_size, pp, dp_size, dp) for dp, pp, tp in places]


class Made(NamedTuple):
    model: torch.nn.Module
    vllm_config: Any


@contextmanager
def made(folder: Path, rank: Rank, *, device: str = "meta", **options: Any) -> Iterator[Made]:
    """Yield the model of this folder's config.json as that rank has it, not loaded; within the block this is that rank.

    options: of vLLM's engine. Call it in a process of its own: it starts torch.distributed.
    """
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    options = {"enforce_eager": True, "max_model_len": 128, "skip_tokenizer_init": True, **options}
    sizes = {"tensor_parallel_size": rank.tp_size, "pipeline_parallel_size": rank.pp_size}
    arguments = EngineArgs(model=str(folder), data_parallel_size=rank.dp_size, **sizes, **options)
    config = arguments.create_engine_config()
    with set_current_vllm_config(VllmConfig()):
        _start_alone()
    with set_current_vllm_config(config):
        of_experts = (rank.dp_size * rank.tp_size, rank.dp * rank.tp_size + rank.tp)
        groups = {"_TP": (rank.tp_size, rank.tp), "_PP": (rank.pp_size, rank.pp), "_DP": (rank.dp_size, rank.dp)}
        alone = {name: getattr(parallel_state, name) for name in (*groups, "_EP")}
        for name, (size, number) in {**groups, "_EP": of_experts}.items():
            if alone[name] is not None:
                setattr(parallel_state, name, _described(alone[name], size, number))
        try:
            with set_default_torch_dtype(config.model_config.dtype), torch.device(device), _real_expert_maps():
                model = initialize_model(vllm_config=config)
            yield Made(model, config)
        finally:
            for name, group in alone.items():
                setattr(parallel_state, name, group)


@contextmanager
def _real_expert_maps() -> Iterator[None]:
    """Compute the expert maps on the CPU: a rank's experts are looked up while a layer is made."""
    from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager

    original = ExpertMapManager.__init__

    def init(manager: Any, *args: Any, **kwargs: Any) -> None:
        with torch.device("cpu"):
            original(manager, *args, **kwargs)

    ExpertMapManager.__init__ = init
    try:
        yield
    finally:
        ExpertMapManager.__init__ = original


def _described(alone: Any, size: int, number: int) -> Any:
    group = copy.copy(alone)
    group.ranks, group.world_size = list(range(size)), size
    group.rank = group.rank_in_group = number
    return group


def _start_alone() -> None:
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

    if not torch.distributed.is_initialized():
        with tempfile.NamedTemporaryFile() as meeting:
            init_distributed_environment(1, 0, f"file://{meeting.name}", 0, "gloo")
            ensure_model_parallel_initialized(1, 1)
