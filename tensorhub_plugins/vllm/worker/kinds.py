"""Which layers of a model are of one kind: the same code, over tensors of the same dtypes, shapes and strides, and with
the same numbers and texts, but for those that differ in each of them: they name a layer, and count it.

What a trial shows of the first and the last layer of a kind holds for those between. To the trial (conversion.py) a
layer that vLLM packs costs as much as three installs of it, and a large model has a hundred of them.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from typing import Any, TypeAlias

import torch

_Said: TypeAlias = "dict[str, str]"  # by place in a layer: a number, or a text

DEPTH = 3  # a layer, its quantization method, that one's kernel, the kernel's experts
PLAIN = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")  # layers of which no kernel packs anything on a GPU


class Kinds:
    """The kinds of a model's layers, as they were before any of them was loaded again, which may count its loads."""

    def __init__(self, model: torch.nn.Module, layers: Collection[str]) -> None:
        self._seen: dict[str, tuple[object, _Said]] = {}
        for name, layer in model.named_modules():
            if name in layers:
                said: _Said = {}
                self._seen[name] = _kind(layer, DEPTH, "", said), said

    def of_layers(self, layers: Collection[str]) -> list[list[str]]:
        """Return the names of these layers by kind, in the order of the model. One that was not named before is of a
        kind of its own."""
        alike: dict[object, dict[str, _Said]] = {}
        for name, (code, said) in self._seen.items():
            if name in layers:
                alike.setdefault(code, {})[name] = said
        kinds: dict[object, list[str]] = {}
        for code, said_by in alike.items():
            places = sorted(frozenset[str]().union(*said_by.values()))
            shared = [place for place in places if len({said.get(place) for said in said_by.values()}) < len(said_by)]
            for name, said in said_by.items():
                kinds.setdefault((code, *map(said.get, shared)), []).append(name)
        return [*kinds.values(), *([name] for name in layers if name not in self._seen)]

    def between(self, layers: Collection[str]) -> frozenset[str]:
        """Return those of these layers that are neither the first nor the last of their kind."""
        return frozenset(name for names in self.of_layers(layers) for name in names[1:-1])


def may_pack(layer: torch.nn.Module) -> bool:
    """Return whether vLLM may keep this layer's weights in another order, or as other numbers, than they are loaded."""
    method = getattr(layer, "quant_method", None)
    return method is not None and type(method).__name__ not in PLAIN


def _kind(value: Any, depth: int, place: str, said: _Said) -> object:
    """Return what is equal for layers of one kind. said: gets the numbers and texts, by place."""
    if isinstance(value, torch.Tensor):
        return type(value), value.dtype, tuple(value.shape), () if value.is_meta else value.stride()
    if value is None or isinstance(value, (bool, torch.dtype, enum.Enum)):
        return value
    if isinstance(value, (int, float, str)):
        said[place] = repr(value)
        return type(value)
    own = getattr(value, "__dict__", None)
    if depth == 0 or own is None or isinstance(value, type):
        return type(value)
    if isinstance(value, torch.nn.Module):
        if depth < DEPTH:
            return type(value)  # a layer of its own
        own = {**own, **value._parameters, **value._buffers, **value._modules}
    return type(value), frozenset((name, _kind(each, depth - 1, f"{place}.{name}", said)) for name, each in own.items())
