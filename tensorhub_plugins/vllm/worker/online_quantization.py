"""Layers whose floats vLLM itself quantizes as they are loaded: `--quantization fp8`, `fp8_per_block`, `mxfp8`, ...

vLLM calls that online quantization. Such a layer has no memory until it has got all of its floats; then its
quantization method makes what the kernel reads of them, scales included. A reload does the same again (reload.py), so a
checkpoint of floats needs nothing more; its first load is what has to be brought to its end here. Kernels that remember
the scales of a reload are led back to the layer's own (kernel_references.py).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from tensorhub_plugins.core import UsageError
from tensorhub_plugins.vllm.plugin import replaced
from tensorhub_plugins.vllm.worker.votes import Steps

KINDS = "--quantization fp8 (or fp8_per_channel, fp8_per_block)"
QUANTIZATION = "vllm.model_executor.layers.quantization."
TOGETHER = ("amax_for_tp_weight_quant", "amax_for_moe_weight_quant")  # largest elements, over the ranks that share them
MAKERS = ("OnlineQuantizationConfig", "ExpertsInt8Config")  # they make weights from floats, or FP8 not in checkpoints
KNOWN = ("Fp8", "Int8", "Mxfp8")  # prefixes of the names of known quantization methods
OPAQUE = ("torchao", "bitsandbytes", "nvfp4_per_token")  # the first two make tensors that no raw copy carries


def quantizes(layer: torch.nn.Module) -> bool:
    """Return whether vLLM makes this layer's weights from floats."""
    return bool(getattr(getattr(layer, "quant_method", None), "uses_meta_device", False))


def any_quantizes(model: torch.nn.Module) -> bool:
    return any(map(quantizes, model.modules()))


def quantized_otherwise(model: torch.nn.Module) -> list[str]:
    """Return the names of the layers whose weights are loaded already quantized."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

    found = []
    for name, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        is_plain = isinstance(method, BaseKVCacheMethod) or type(method).__name__.startswith("Unquantized")
        if isinstance(method, QuantizeMethodBase) and not is_plain and not quantizes(layer):
            found.append(name)
    return found


def finish_first_load(model: torch.nn.Module, model_config: Any) -> None:
    """Quantize layers that did not get all of their floats: those with padding, or all if nothing was loaded."""
    if not any_quantizes(model):
        return
    from vllm.model_executor.model_loader.reload import finalize_layerwise_processing

    with torch.no_grad():
        finalize_layerwise_processing(model, model_config)


def more_bytes(model: torch.nn.Module) -> int:
    """Return by how many bytes a version of floats, two bytes an element, exceeds what this worker makes of it."""
    made = [parameter for layer in model.modules() if quantizes(layer) for parameter in layer.parameters(recurse=False)]
    return sum(parameter.numel() for parameter in made if parameter.element_size() == 1)


def shares_scales(vllm_config: Any) -> bool:
    """Return whether ranks of this engine make scales together; equal in all its workers, with such layers or not."""
    parallel, config = (getattr(vllm_config, name, None) for name in ("parallel_config", "quant_config"))
    makes = type(config).__name__ in MAKERS or getattr(config, "is_checkpoint_fp8_serialized", True) is False
    return makes and max(getattr(parallel, f"{which}_parallel_size", 1) for which in ("tensor", "data")) > 1


@contextmanager
def in_step(model: torch.nn.Module, steps: Steps) -> Iterator[None]:
    """Let ranks make a scale together only where all of them are at the same layer and none has failed."""
    if not steps.together:
        yield
        return
    from vllm.model_executor.model_loader.reload import layerwise

    names = {layer: name for name, layer in model.named_modules()}
    at = ""

    def processed(original: Any, layer: torch.nn.Module, info: Any) -> None:
        nonlocal at
        at = names[layer]
        original(layer, info)

    def together(original: Any, largest: torch.Tensor, ranks: int) -> torch.Tensor:  # or whether there are several
        if ranks is True or ranks > 1:
            steps.all(f"the scale of {at}")
        return original(largest, ranks)

    vllms = [module for name, module in sys.modules.items() if name.startswith(QUANTIZATION)]
    places: list[Any] = [(module, name, together) for module in vllms for name in TOGETHER if hasattr(module, name)]
    places.append((layerwise, "_layerwise_process", processed))
    with ExitStack() as stack:
        for module, name, new in places:
            stack.enter_context(replaced(module, **{name: partial(new, getattr(module, name))}))
        yield


def check(model: torch.nn.Module, vllm_config: Any) -> None:
    """Raise UsageError for a way of quantizing that is not known to follow updates."""
    named = vllm_config.model_config.quantization
    unknown = {type(layer.quant_method).__name__ for layer in model.modules() if quantizes(layer)}
    unknown = {name for name in unknown if not name.startswith(KNOWN)}
    if named in OPAQUE or unknown:
        raise UsageError(
            f"what {named} makes of weights is not known to follow updates{''.join(f' ({name})' for name in unknown)}: "
            f"start without it, or with {KINDS}"
        )


def advice(model: torch.nn.Module, vllm_config: Any, tensors: Mapping[str, torch.Tensor]) -> str:
    """Return what to do about a refused checkpoint, if the quantization of engine or checkpoint may be the reason."""
    named = vllm_config.model_config.quantization
    one_byte = [name for name, t in tensors.items() if t.element_size() == 1 and t.dtype != torch.bool]
    quantized = one_byte or [name for name in tensors if name.endswith(".qweight")]
    if quantized and any_quantizes(model):
        return (
            f". {quantized[0]} is quantized already, and this engine quantizes floats itself (--quantization {named}): "
            "publish floats, or start it without --quantization and with the checkpoint's quantization_config"
        )
    if not quantized and quantized_otherwise(model):
        return (
            f". This engine takes weights that are quantized already ({named}): publish them so, or have them made of "
            f"floats: start it with {KINDS} and without a quantization_config, or with one of FP8 by blocks "
            "(weight_block_size)"
        )
    return ""
