"""What a layer is loaded from goes to its device in one batch, before its loaders run.

vLLM's reload keeps what loaders are given until their layer is complete, and then calls them one by one. From host
memory each call would be a transfer that the device and this thread wait for, ten thousand times for the experts of a
large model; from memory that is not pinned, as what is borrowed on most cards, by one thread and at a tenth of the
bus's rate. A batch waits once, and goes through pinned pieces where it has to (core's `copy_all`). It takes as much of
the device as the layer does; where that is not free, loaders get what they were given.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch

from tensorhub_plugins.core import copy_all
from tensorhub_plugins.core.log import get_logger
from tensorhub_plugins.vllm.plugin import replaced
from tensorhub_plugins.vllm.worker.partial import Partial

logger = get_logger(__name__)


@contextmanager
def by_layer(device: torch.device) -> Iterator[None]:
    """Have vLLM's reload do so for each layer, on this device; nothing where that is the host."""
    if device.type == "cpu":
        yield
        return
    from vllm.model_executor.model_loader.reload import layerwise

    process = layerwise._layerwise_process

    def processed(layer: torch.nn.Module, info: Any) -> None:
        upload((given.arguments for _, given in info.loaded_weights), device)
        process(layer, info)

    with replaced(layerwise, _layerwise_process=processed):
        yield


def upload(calls: Iterable[MutableMapping[str, Any]], device: torch.device) -> None:
    """Replace what these calls of loaders are given in host memory by the same on the device."""
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    moved: list[tuple[MutableMapping[str, Any], str, torch.Tensor]] = []
    try:
        for arguments in calls:
            for name, value in arguments.items():
                if isinstance(value, Partial):
                    moved.append((arguments, name, value.there(copies)))
                elif isinstance(value, torch.Tensor) and value.device.type == "cpu":
                    made = torch.empty(value.shape, dtype=value.dtype, device=device)
                    copies.append((made, value.detach()))
                    moved.append((arguments, name, made))
    except torch.OutOfMemoryError:
        logger.debug("no room on %s for what a layer is loaded from: its tensors go there one by one", device)
        return
    copy_all(copies)
    for arguments, name, tensor in moved:
        arguments[name] = tensor
