"""Which layers of a model are of one kind: the same code, over tensors of the same dtypes, shapes and strides.

What a trial shows of the first and the last layer of a kind holds for those between. To the trial (conversion.py) a
layer that vLLM packs costs as much as three installs of it, and a large model has a hundred of them.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from typing import Any

import torch

DEPTH = 3  # a layer, its quantization method, that one's kernel, the kernel's experts
PLAIN = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")  # layers of which no kernel packs anything on a GPU


def of_layers(model: torch.nn.Module, layers: Collection[str]) -> list[list[str]]:
    """Return the names of these layers by kind, in the order of the model."""
    kinds: dict[object, list[str]] = {}
    for name, layer in model.named_modules():
        if name in layers:
            kinds.setdefault(_kind(layer, DEPTH), []).append(name)
    return list(kinds.values())


def between(model: torch.nn.Module, layers: Collection[str]) -> frozenset[str]:
    """Return those of these layers that are neither the first nor the last of their kind."""
    return frozenset(name for names in of_layers(model, layers) for name in names[1:-1])


def may_pack(layer: torch.nn.Module) -> bool:
    """Return whether vLLM may keep this layer's weights in another order, or as other numbers, than they are loaded."""
    method = getattr(layer, "quant_method", None)
    return method is not None and type(method).__name__ not in PLAIN


def _kind(value: Any, depth: int) -> object:
    """Return what is equal for layers of one kind. Numbers and texts are left out: they name a layer, and count it."""
    if isinstance(value, torch.Tensor):
        return type(value), value.dtype, tuple(value.shape), () if value.is_meta else value.stride()
    if value is None or isinstance(value, (bool, torch.dtype, enum.Enum)):
        return value
    own = getattr(value, "__dict__", None)
    if depth == 0 or own is None or isinstance(value, type):
        return type(value)
    if isinstance(value, torch.nn.Module):
        if depth < DEPTH:
            return type(value)  # a layer of its own
        own = {**own, **value._parameters, **value._buffers, **value._modules}
    return type(value), frozenset((name, _kind(each, depth - 1)) for name, each in own.items())
