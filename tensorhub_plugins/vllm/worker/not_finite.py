"""KV that is not finite: what weights with NaN or Inf leave in a worker's caches for the versions after them.

vLLM gives a block of KV to the next request as it is. Kernels mask what lies beyond a request's tokens, and some (its
CPU build's, for one) by a weight of zero: zero times NaN is NaN. So good weights answered NaN until each such block had
been written over, and so did other requests' good adapters. Only blocks of hybrid models are cleared by vLLM.

The first step after a change of weights looks, when the memory of the caches is surely there (an engine that sleeps
may have its weights back and not those), and nothing has been computed yet. It looks at the last layer of each kind:

    a token's NaN or Inf in one layer's cache    its value is in the token's own sum, thus in what all later layers are
                                                 given; so it is in the last one's cache, too, in the same block
    quantized layers                             may make numbers of NaN again: all are looked at
    layers that read an encoder's outputs        each keeps what it makes of them by itself: all are looked at

Only what is not finite is set to zero. Formats of KV with scales among the bytes are left alone: kernels for them load
no more than a request's tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tensorhub_plugins.core.log import get_logger
from tensorhub_plugins.vllm.worker import draft

logger = get_logger(__name__)

PIECE_BYTES = 64 << 20  # looked at in one go where that takes memory
# Formats of KV that are plain fp8, in tensors of bytes. None: as the platform has it.
FP8 = {"fp8": None, "fp8_e4m3": None, "fp8_e5m2": torch.float8_e5m2}


def clear_after(worker: Any, changed: int) -> None:
    """Zero what is not finite in this worker's KV, unless that was done after this change of its weights."""
    if changed == getattr(worker, "tensorhub_cleared", 0):
        return
    worker.tensorhub_cleared = changed
    layers = worker.vllm_config.compilation_config.static_forward_context
    if clear(layers, _looked_at(worker, layers)):
        logger.warning("the weights before have left NaN or Inf in the KV cache: zero is there now")


@torch.inference_mode()
def clear(layers: dict[str, Any], looked_at: list[str]) -> bool:
    """Zero what is not finite in all caches, if anything is in those of these layers; return whether that is so."""
    found = [_is_finite(cache) for name in looked_at for cache in _caches(layers[name])]
    if not found or bool(torch.stack(found).all()):  # here alone the host waits for the device
        return False
    for cache in (cache for layer in layers.values() for cache in _caches(layer)):
        if cache.element_size() > 1:
            torch.nan_to_num_(cache, 0.0, 0.0, 0.0)
        else:
            for piece in _pieces(cache):
                piece.view(torch.uint8).masked_fill_(_bad_bytes(piece), 0)
    return True


def _looked_at(worker: Any, layers: dict[str, Any]) -> list[str]:
    """Return the names of layers of which one holds what is not finite if any does; none: vLLM clears each block."""
    known = getattr(worker.model_runner, "kv_cache_config", None)
    if getattr(known, "needs_kv_cache_zeroing", False):
        return []
    if getattr(worker.vllm_config, "quant_config", None) is not None:
        return [*layers]
    of_draft = {id(module) for module in getattr(draft.of_worker(worker), "modules", list)()}
    groups = enumerate(getattr(known, "kv_cache_groups", ()))
    group_of = {name: number for number, group in groups for name in group.layer_names}
    last: dict[Any, str] = {}
    for name, layer in layers.items():  # in the order in which they are computed
        if any(True for _ in _caches(layer)):
            alone = name if getattr(layer, "attn_type", "") == "encoder_decoder" else ""
            last[group_of.get(name, name), id(layer) in of_draft, type(layer), alone] = name
    return [*last.values()]


def _caches(layer: Any) -> Iterator[torch.Tensor]:
    """Yield what a layer keeps of requests: KV, or the states of a recurrence."""
    from vllm.platforms import current_platform

    kept = getattr(layer, "kv_cache", ())
    for cache in kept if isinstance(kept, (list, tuple)) else [kept]:
        if isinstance(cache, torch.Tensor) and cache.numel():
            if not cache.is_floating_point() and getattr(layer, "kv_cache_dtype", "") in FP8:
                cache = cache.view(FP8[layer.kv_cache_dtype] or current_platform.fp8_dtype())
            if cache.is_floating_point():
                yield cache


def _is_finite(cache: torch.Tensor) -> torch.Tensor:
    """Return it as a tensor, on the cache's device. NaN is the least and the largest of what it is among: one pass, no
    memory, and no sum that would be too large."""
    if cache.element_size() == 1:
        return ~torch.stack([_bad_bytes(piece).any() for piece in _pieces(cache)]).any()
    return torch.stack([bound for piece in _pieces(cache) for bound in piece.aminmax()]).isfinite().all()


def _bad_bytes(cache: torch.Tensor) -> torch.Tensor:
    """Return which bytes of fp8 are NaN or Inf."""
    given, least = cache.view(torch.uint8), 0x7C if cache.dtype == torch.float8_e5m2 else 0x7F
    return given == 0x80 if "fnuz" in str(cache.dtype) else (given & 0x7F) >= least


def _pieces(cache: torch.Tensor) -> Iterator[torch.Tensor]:
    """Split a cache by its blocks."""
    yield from cache.split(max(1, PIECE_BYTES * cache.shape[0] // cache.nbytes))
