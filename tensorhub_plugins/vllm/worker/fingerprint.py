"""The fingerprint that decides which workers may copy raw weights from each other.

Equal names, dtypes, shapes and strides are not enough: kernels permute weights within the same shape. The fingerprint
therefore covers everything that decides what the bytes mean: vLLM's version, the processor, the model's configuration,
quantization, the kernel every layer chose, and each worker's place in the parallel groups. It is one string for the
whole replica; worker k of one replica copies from worker k of another.
"""

from __future__ import annotations

import enum
import hashlib
import json
import platform
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from tensorhub_plugins.vllm.worker import weights


def fingerprint(model: torch.nn.Module, vllm_config: Any, *, ranks: Mapping[str, int]) -> bytes:
    """Return 32 bytes that are equal for two workers exactly when their runtime tensors may be copied raw.

    `ranks`: this worker's position in its parallel groups (see `parallel_ranks`)."""
    import vllm
    from vllm.platforms import current_platform

    model_config, parallel = vllm_config.model_config, vllm_config.parallel_config
    hf_config = {
        key: value
        for key, value in model_config.hf_config.to_dict().items()
        if not key.startswith("_") and key != "transformers_version"  # its provenance, not its contents
    }
    chip = _cpu_isa() if current_platform.is_cpu() else str(current_platform.get_device_capability())
    description = {
        "vllm": vllm.__version__,
        "platform": [current_platform.device_type, platform.machine(), chip],
        "model": hf_config,
        "class": type(model).__qualname__,
        "dtype": str(model_config.dtype),
        "quantization": str(model_config.quantization),
        "kv_cache_dtype": str(vllm_config.cache_config.cache_dtype),
        "expert_placement": str(getattr(parallel, "expert_placement_strategy", None)),
        "ranks": dict(ranks),
        "kernels": dict(_kernels(model)),
        "tensors": {name: _meaning(tensor) for name, tensor in weights.all_tensors(model)},
        "copied": {name: _meaning(tensor) for name, tensor in weights.tensors(model).items()},
    }
    return hashlib.sha256(json.dumps(description, sort_keys=True, default=str).encode()).digest()


def replica_layout(fingerprints: Iterable[bytes]) -> str:
    """Return the layout string of a replica, from the fingerprints of its workers in shard order.

    All workers of a replica publish under this one string; tensors are compared one by one on top of it."""
    return "runtime:" + hashlib.sha256(b"".join(fingerprints)).hexdigest()[:32]


def parallel_ranks(vllm_config: Any) -> dict[str, int]:
    """Return rank and size of this worker in the groups that decide which part of the weights it holds."""
    parallel, places = vllm_config.parallel_config, ["tp", "pp"]
    if parallel.data_parallel_size > 1:  # a mixture of experts; ranks of a dense model are engines of their own
        places.append("dp")
    if parallel.enable_expert_parallel:
        places.append("ep")
    groups = {place: group_of(place) for place in places}
    ranks = {place: group.rank_in_group for place, group in groups.items()}
    return ranks | {f"{place}_size": group.world_size for place, group in groups.items()}


def ends_of(ranks: Mapping[str, int], name: str) -> tuple[bool, bool]:
    """Return whether this worker is the first, and the last, of those that share this tensor of a checkpoint.

    Data parallel ranks share experts as tensor parallel ones do, and have the rest in full."""
    shared_by = ("tp", "dp") if ".experts." in name else ("tp",)
    places = [(ranks[place], ranks[f"{place}_size"]) for place in shared_by if place in ranks]
    return all(rank == 0 for rank, _ in places), all(rank == size - 1 for rank, size in places)


def group_of(place: str) -> Any:
    """Return vLLM's group of this worker: "tp", "pp", "dp" or "ep"."""
    from vllm import distributed

    return getattr(distributed, f"get_{place}_group")()


def _kernels(model: torch.nn.Module) -> Iterator[tuple[str, list[str]]]:
    """Yield the kernels that each layer chose, because they decide how its weights are packed.

    Names of classes, enums and flags only: nothing that may differ between two equal engines, such as addresses."""
    for name, module in model.named_modules():
        choices: list[str] = []
        for role in ("quant_method", "scheme", "impl"):
            chosen = getattr(module, role, None)
            if chosen is None or isinstance(chosen, (torch.Tensor, torch.nn.Module)):
                continue
            choices.append(f"{role}={type(chosen).__qualname__}")
            for key, value in sorted(getattr(chosen, "__dict__", {}).items()):
                if isinstance(value, (bool, enum.Enum)):
                    choices.append(f"{role}.{key}={value}")
                elif isinstance(value, type):
                    choices.append(f"{role}.{key}={value.__qualname__}")
                elif key in ("kernel", "moe_kernel", "fp8_linear") and value is not None:
                    choices.append(f"{role}.{key}={type(value).__qualname__}")
        if choices:
            yield name, choices


def _cpu_isa() -> str:
    amx = getattr(torch.cpu, "_is_amx_tile_supported", bool)()
    return f"{torch.backends.cpu.get_cpu_capability()}{'+AMX' if amx else ''}"


def _meaning(tensor: torch.Tensor) -> tuple[str, str, list[int], list[int]]:
    stride = [step if n > 1 else 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True)]
    return str(tensor.dtype), tensor.device.type, list(tensor.shape), stride
