"""The tensors of a checkpoint whose model only vLLM knows: derived from vLLM's class, which is made without memory.

What the class fuses is taken apart again by its own tables: `packed_modules_mapping`, `get_expert_mapping`, the sizes
of a fused layer's outputs. A wrong guess does no harm: vLLM then refuses to load the checkpoint, because it names or
lacks tensors.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

Shapes = dict[str, torch.Size]

USUAL_EXPERTS = {
    "routed_experts.w13_weight": (("gate_proj", "w1"), ("up_proj", "w3")),
    "routed_experts.w2_weight": (("down_proj", "w2"),),
}
USUAL = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def checkpoint_shapes(folder: Path, packed: Mapping[str, list[str]]) -> Shapes:
    """Return the shapes for the model of this folder's config.json. packed: fused layers' parts, beyond vLLM's tables.

    Call it in a process of its own: it starts torch.distributed.
    """
    model = _made(folder)
    tables = {**USUAL, **getattr(model, "packed_modules_mapping", {}), **packed}
    experts = _expert_names(model)
    shapes: Shapes = {}
    for module_name, module in model.named_modules():
        for parameter_name, parameter in module.named_parameters(recurse=False):
            name = f"{module_name}.{parameter_name}"
            parts = list(_experts(name, parameter, experts))
            shapes.update(parts or _parts(module_name, module, parameter_name, parameter, tables))
    return shapes


def _made(folder: Path) -> torch.nn.Module:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = EngineArgs(model=str(folder), enforce_eager=True, max_model_len=128).create_engine_config()
    with tempfile.NamedTemporaryFile() as meeting, set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{meeting.name}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"):
            return initialize_model(vllm_config=config)


def _expert_names(model: torch.nn.Module) -> list[tuple[str, str, int, str]]:
    """Return (part of the parameter's name, part of the checkpoint's name, expert, "w1", "w2" or "w3") of each."""
    for module in model.modules():
        get_mapping: Any = getattr(module, "get_expert_mapping", list)
        mapping = list(get_mapping())
        if mapping:
            return mapping
    return []


def _experts(
    name: str, parameter: torch.Tensor, names: list[tuple[str, str, int, str]]
) -> Iterator[tuple[str, torch.Size]]:
    """Yield the experts' tensors: w13_weight is (experts, 2 x width, hidden), w2_weight (experts, hidden, width)."""
    tail = next((tail for tail in USUAL_EXPERTS if name.endswith(tail)), "")
    if tail and not any(of_parameter in name for of_parameter, _, _, _ in names):  # the class has no table
        names = [
            (tail.removesuffix("weight"), f"{expert}.{part}.", expert, shard)
            for expert in range(parameter.shape[0])
            for part, shard in USUAL_EXPERTS[tail]
        ]
    for of_parameter, of_checkpoint, _, part in names:
        if of_parameter in name:
            shape = list(parameter.shape[1:])
            if part in ("w1", "w3"):
                shape[0] //= 2
            # A table of the experts' own is relative to them, and their module is vLLM's.
            yield name.replace(of_parameter, of_checkpoint).replace("routed_experts.", ""), torch.Size(shape)


def _parts(
    module_name: str,
    module: Any,
    parameter_name: str,
    parameter: torch.Tensor,
    tables: Mapping[str, list[str]],
) -> Iterator[tuple[str, torch.Size]]:
    parent, _, leaf = module_name.rpartition(".")
    prefix = f"{parent}." if parent else ""
    shape = parameter.shape
    if hasattr(module, "org_vocab_size"):  # rows are padded to a multiple of 64
        shape = torch.Size([module.org_vocab_size, *shape[1:]])
    sizes = list(getattr(module, "output_sizes", []))
    names = tables.get(leaf, [])
    if len(names) < 2 or len(names) != len(sizes) or parameter.shape[0] != sum(sizes):
        yield f"{prefix}{leaf}.{parameter_name}" if leaf else parameter_name, shape
        return
    for name, size in zip(names, sizes, strict=True):
        yield f"{prefix}{name}.{parameter_name}", torch.Size([size, *shape[1:]])
