"""The walker finds tensors and floats wherever they hang, and nothing that belongs to somebody else."""

from __future__ import annotations

import functools
import logging
import threading
from typing import Any

import numpy
import torch

from tensorhub_plugins.vllm.worker.reachable_tensors import walk


class BackEnd:
    """Neither a module nor a tensor."""

    def __init__(self) -> None:
        self.scale = 0.5
        self.table = {"cos": torch.ones(2), torch.float16: torch.ones(3)}
        self.count, self.name, self.lock = 7, "eager", threading.Lock()

    def method(self) -> None: ...


class Slotted:
    __slots__ = ("packed",)

    def __init__(self) -> None:
        self.packed = torch.ones(4)


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.register_buffer("seen", torch.ones(1))
        self.conv_weights = self.linear.weight.data.view(4)  # memory of a parameter, an object of its own
        vars(self)["again"] = self.linear.weight  # not registered a second time
        self.kv_cache = [torch.ones(9)]
        self.online_quantization_time = 0.25
        self.empty, self.meta = torch.empty(0), torch.empty(3, device="meta")


def found(module: torch.nn.Module) -> dict[str, Any]:
    pairs = list(walk(module))
    assert len({name for name, _ in pairs}) == len(pairs)
    own = {"linear.weight", "linear.bias", "linear.in_features", "seen", "conv_weights"}
    assert own - {"linear.in_features"} <= {name for name, _ in pairs}
    return {name: value for name, value in pairs if name not in own}


def test_parameters_buffers_and_plain_attributes_have_the_model_s_names() -> None:
    model = torch.nn.Sequential(Layer())
    names = [name for name, _ in walk(model)]
    assert names == ["0.seen", "0.linear.weight", "0.linear.bias", "0.conv_weights"]


def test_it_looks_into_objects_containers_closures_partials_and_methods() -> None:
    layer, captured, default = Layer(), torch.ones(5), torch.ones(6)

    def closure(x: torch.Tensor = default) -> torch.Tensor:
        return captured * x

    layer.impl = BackEnd()
    layer.forward_fn = closure
    layer.apply_fn = functools.partial(torch.add, torch.ones(7), alpha=2.5)
    layer.list = [[torch.ones(8)], Slotted(), numpy.ones(9), numpy.float32(1.5)]
    layer.loader = BackEnd().method
    layer.linear.bias.packed = torch.ones(10)
    layer.outside = [torch.nn.Linear(3, 1)]
    assert {name: value if isinstance(value, float) else value.numel() for name, value in found(layer).items()} == {
        "impl.scale": 0.5,
        "impl.table.cos": 2,
        "impl.table.torch.float16": 3,
        "forward_fn.captured": 5,
        "forward_fn.__defaults__.0": 6,
        "apply_fn.args.0": 7,
        "apply_fn.keywords.alpha": 2.5,
        "list.0.0": 8,
        "list.1.packed": 4,
        "list.2": 9,
        "list.3": 1.5,
        "loader.__self__.scale": 0.5,
        "loader.__self__.table.cos": 2,
        "loader.__self__.table.torch.float16": 3,
        "linear.bias.packed": 10,
        "outside.0.weight": 3,
        "outside.0.bias": 1,
    }


def test_it_ends_and_leaves_strangers_alone() -> None:
    layer = Layer()
    layer.circle = {"me": layer, "list": []}
    layer.circle["list"].append(layer.circle)
    layer.logger = logging.getLogger("x")
    layer.logger.tensor = torch.ones(3)  # type: ignore[attr-defined]
    layer.torch, layer.kind = torch, Layer
    assert found(layer) == {}


def test_values_are_live() -> None:
    layer = Layer()
    dict(walk(layer))["conv_weights"].zero_()  # type: ignore[union-attr]
    assert not layer.linear.weight.any()
