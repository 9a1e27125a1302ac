"""All tensors and floats that are reachable from a model, wherever they are.

    for name, value in walk(model): ...     "model.layers.0.mixer.conv_weights", a tensor or a Python float

A model computes with more than its parameters and buffers: tensors kept as plain attributes, in lists and dicts, in the
closures of functions and in what functools.partial has bound, in quantization methods and attention back ends. Nothing
states whether an update renews those, so a proof that it does has to find them all.

What is found
    Parameters and buffers first, under the names that the model gives them. Then the rest, nearest first, so that what
    can be reached on several ways has its shortest name. One object once. Numpy arrays and numbers count. What is left
    out
    KV caches, which no checkpoint determines, and how long loading took. Configurations, process groups, loggers,
    threads and the store's own objects, behind which nothing is computed with. Empty tensors and those on the meta
    device. Classes and modules of Python: what a class holds belongs to all of its objects, of any model.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy
import torch

# Attributes of vLLM's attention, Mamba and linear attention layers; and of its quantization, by 0.32.
LEFT_OUT = frozenset({"kv_cache", "kv_caches", "online_quantization_time"})

# Packages whose objects are not entered. Modules of a model (torch.nn.Module) always are.
STRANGERS = (
    "vllm.config", "vllm.distributed", "vllm.logger", "torch.distributed", "torch._dynamo", "torch._inductor",
    "transformers", "logging", "threading", "concurrent", "tensorhub_plugins",
)  # fmt: skip

_OF_MODULES = frozenset({"_modules", "_parameters", "_buffers"})  # visited under their public names
_LEAVES = (str, bytes, bytearray, bool, int, complex, type(None), type, range, torch.dtype, torch.device, torch.Size)
_Way = tuple[str, Any]  # a name, and the value


def walk(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor | float]]:
    """Yield names and live values: writing into a tensor changes the model. Equal models give equal names, in order."""
    visited: dict[int, Any] = {}  # by id; with the objects, or an id might be reused
    modules = list(model.named_modules())
    visited.update((id(module), module) for _, module in modules)
    ways: deque[_Way] = deque()
    for name, module in modules:
        own = [*module._parameters.items(), *module._buffers.items()]
        ways.extend((_join(name, key), tensor) for key, tensor in own if tensor is not None)
    for name, module in modules:
        ways.extend(_attributes(name, module))
    while ways:
        name, value = ways.popleft()
        if isinstance(value, (float, numpy.floating)):
            yield name, float(value)
            continue
        if isinstance(value, _LEAVES) or id(value) in visited:
            continue
        visited[id(value)] = value
        if isinstance(value, numpy.ndarray):
            if value.dtype.kind in "biuf" and value.size:
                yield name, torch.from_numpy(numpy.ascontiguousarray(value))
            continue
        if isinstance(value, torch.Tensor) and value.numel() and not value.is_meta:
            yield name, value.detach()
        ways.extend(_behind(name, value))


def _behind(name: str, value: Any) -> Iterator[_Way]:
    """Yield what can be reached from this value in one step."""
    if isinstance(value, Mapping):
        for position, (key, item) in enumerate(value.items()):
            simple = isinstance(key, (str, int, torch.dtype, torch.device))
            yield _join(name, str(key) if simple else f"#{position}"), item
    elif isinstance(value, (list, tuple, deque)):
        yield from ((_join(name, str(position)), item) for position, item in enumerate(value))
    elif isinstance(value, (set, frozenset)):  # unordered, so they share one name
        yield from ((_join(name, "#"), item) for item in value)
    elif isinstance(value, functools.partial):
        yield _join(name, "func"), value.func
        yield _join(name, "args"), value.args
        yield _join(name, "keywords"), value.keywords
    elif isinstance(value, types.MethodType):
        yield _join(name, "__self__"), value.__self__
        yield _join(name, "__func__"), value.__func__
    elif isinstance(value, types.FunctionType):
        yield from _of_function(name, value)
    elif isinstance(value, torch.nn.Module):  # not a registered one: in a list, for example
        own = [*value._modules.items(), *value._parameters.items(), *value._buffers.items()]
        yield from ((_join(name, key), item) for key, item in own if item is not None)
        yield from _attributes(name, value)
    elif not _is_stranger(value):
        yield from _attributes(name, value)


def _attributes(name: str, value: Any) -> Iterator[_Way]:
    for key, item in list(getattr(value, "__dict__", {}).items()):
        if key not in LEFT_OUT and not (key in _OF_MODULES and isinstance(value, torch.nn.Module)):
            yield _join(name, key), item
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for key in (slots,) if isinstance(slots, str) else slots:
            if key not in LEFT_OUT and hasattr(value, key):
                yield _join(name, key), getattr(value, key)


def _of_function(name: str, function: types.FunctionType) -> Iterator[_Way]:
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield _join(name, variable), cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield _join(name, "__defaults__"), function.__defaults__
    yield _join(name, "__kwdefaults__"), function.__kwdefaults__
    yield from _attributes(name, function)


def _is_stranger(value: Any) -> bool:
    if isinstance(value, types.ModuleType):
        return True
    origin = type(value).__module__
    return any(origin == stranger or origin.startswith(f"{stranger}.") for stranger in STRANGERS)


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key
