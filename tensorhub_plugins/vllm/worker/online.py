"""Layers whose floats vLLM itself quantizes as they are loaded: `--quantization fp8`, `fp8_per_block`, `mxfp8`, ...

vLLM calls that online quantization. Such a layer has no memory until it has got all of its floats; then its
quantization method makes what the kernel reads of them, scales included. A reload does the same again (reload.py), so a
checkpoint of floats needs nothing more; its first load is what has to be brought to its end here. Kernels that remember
the scales of a reload are led back to the layer's own (references.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tensorhub_plugins.core import UsageError

KINDS = "--quantization fp8 (or fp8_per_channel, fp8_per_block)"
OPAQUE = ("torchao", "bitsandbytes")  # of floats they make tensors of classes of their own, which no raw copy brings


def quantizes(layer: torch.nn.Module) -> bool:
    """Whether vLLM makes this layer's weights of floats."""
    return bool(getattr(getattr(layer, "quant_method", None), "uses_meta_device", False))


def any_quantizes(model: torch.nn.Module) -> bool:
    return any(map(quantizes, model.modules()))


def quantized_otherwise(model: torch.nn.Module) -> list[str]:
    """Names of the layers whose weights are loaded as they are quantized."""
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
    """Quantize what has not got all of its floats: layers with a padding, or where nothing was loaded, all of them."""
    if not any_quantizes(model):
        return
    from vllm.model_executor.model_loader.reload import finalize_layerwise_processing

    with torch.no_grad():
        finalize_layerwise_processing(model, model_config)


def check(vllm_config: Any) -> None:
    """Raise UsageError for a way of quantizing that cannot be updated."""
    name = vllm_config.model_config.quantization
    if name in OPAQUE:
        raise UsageError(f"what {name} makes of weights cannot be updated in place: start without it, or with {KINDS}")


def advice(model: torch.nn.Module, vllm_config: Any, tensors: Mapping[str, torch.Tensor]) -> str:
    """What to do about a checkpoint that was refused, where the reason may be how engine or checkpoint are quantized."""
    named = vllm_config.model_config.quantization
    quantized = [name for name, tensor in tensors.items() if tensor.element_size() == 1 or name.endswith(".qweight")]
    if quantized and any_quantizes(model):
        return (
            f". {quantized[0]} is quantized already, and this engine quantizes floats itself (--quantization {named}): "
            "publish floats, or start it without --quantization and with the checkpoint's quantization_config"
        )
    if not quantized and quantized_otherwise(model):
        return (
            f". This engine takes weights that are quantized already ({named}): publish them so, or start it with {KINDS} "
            "and without a quantization_config, or with one of FP8 by blocks (weight_block_size), which are made of floats"
        )
    return ""
