"""The installation of a checkpoint by vLLM's layerwise reload, and what that derives from the weights."""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from tensorhub_plugins.core import copy_all, synchronize
from tensorhub_plugins.core.log import get_logger
from tensorhub_plugins.vllm.plugin import replaced
from tensorhub_plugins.vllm.worker import cpu, draft, weights
from tensorhub_plugins.vllm.worker.kernel_references import rebound_references
from tensorhub_plugins.vllm.worker.partial import Partial
from tensorhub_plugins.vllm.worker.preserved import preserved

# Those of them that are computed from weights (a scale may be a constant).
DERIVED_ATTRIBUTES = tuple(name for name in weights.PLAIN_ATTRIBUTES if not name.endswith("_scale"))


def reload_checkpoint(
    model: torch.nn.Module,
    vllm_config: Any,
    checkpoint: Iterable[tuple[str, torch.Tensor]],
    layers: Collection[str] | None = None,
    in_place: Collection[str] = (),
) -> None:
    """Replace all weights of the model by those of a checkpoint, through vLLM's layerwise reload.

    The checkpoint must fill the model (see checkpoint_contract.py), or these layers of it: the others keep what they
    have, and attention layers derive their values again. in_place: parameters that loaders fill to the last element,
    which are loaded where they are, if vLLM computes with them as they are loaded. When anything raises, the model
    has its live tensors back and can be reloaded again; their bytes are mixed. Nothing may compute then."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    with torch.no_grad(), set_current_vllm_config(vllm_config), cpu.live_layers(), preserved(model):
        cpu.forget_expert_kernels(model, layers)
        with (
            defined_paddings(),
            loaded_in_place(model, in_place),
            by_layer(weights.device_of(model)),
            without_false_alarms(),
            rebound_references(model),
        ):
            initialize_layerwise_reload(model)
            draft.load(model, checkpoint)
            finalize_layerwise_reload(model, vllm_config.model_config)
        cpu.refresh_convolutions(model)
        weights.refresh_derived(model)
    synchronize(model.parameters())


def defined_paddings() -> AbstractContextManager[None]:
    """Zero what a checkpoint does not fill, such as the padding of a kernel, instead of keeping old bytes."""
    from vllm.model_executor.model_loader.reload import meta

    original = meta.materialize_meta_tensor
    return replaced(meta, materialize_meta_tensor=lambda tensor: original(tensor).zero_())


@contextmanager
def loaded_in_place(model: torch.nn.Module, names: Collection[str]) -> Iterator[None]:
    """Have vLLM's reload load these parameters into their own memory, and copy no memory onto itself."""
    from vllm.model_executor.model_loader.reload import layerwise, meta

    prefixes = {layer: f"{name}." if name else "" for name, layer in model.named_modules()}
    process, materialize = layerwise._layerwise_process, meta.materialize_meta_tensor
    restore = layerwise._copy_and_restore_kernel_tensors
    own: dict[int, torch.Tensor] = {}  # by the id of the parameter without memory: the live one

    def processed(layer: torch.nn.Module, info: Any) -> None:
        live = {} if info.kernel_tensors is None else info.kernel_tensors[0]
        for name, parameter in layer._parameters.items():
            if prefixes[layer] + name in names and name in live and parameter is not None and parameter.is_meta:
                own[id(parameter)] = live[name]
        process(layer, info)
        own.clear()

    def materialized(tensor: torch.Tensor) -> torch.Tensor:
        live = own.get(id(tensor))
        if live is None or (live.shape, live.stride(), live.dtype) != (tensor.shape, tensor.stride(), tensor.dtype):
            return materialize(tensor)
        made = live.data
        made.__class__, made.__dict__ = tensor.__class__, tensor.__dict__.copy()
        return made

    def restored(layer: torch.nn.Module, info: Any) -> None:
        parameters, buffers = info.kernel_tensors
        elsewhere = {}
        for name, live in parameters.items():
            now = getattr(layer, name)
            if now.untyped_storage().data_ptr() == live.untyped_storage().data_ptr():
                if (now.data_ptr(), now.shape, now.stride()) == (live.data_ptr(), live.shape, live.stride()):
                    continue
                now.data = now.data.clone()  # turned where it lies
            elsewhere[name] = live
        info.kernel_tensors = elsewhere, buffers
        restore(layer, info)
        if len(elsewhere) < len(parameters):
            info.kernel_tensors = parameters, buffers
            layerwise._place_kernel_tensors(layer, info)  # all, in the order that they had

    with (
        replaced(layerwise, _layerwise_process=processed, _copy_and_restore_kernel_tensors=restored),
        replaced(meta, materialize_meta_tensor=materialized),
    ):
        yield


@contextmanager
def without_false_alarms() -> Iterator[None]:
    """Suppress vLLM's warning about every layer that a checkpoint does not fill, such as a rotary embedding.

    A rehearsal has shown before that nothing is missing (checkpoint_contract.py)."""
    layerwise = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")

    def passes(record: logging.LogRecord) -> bool:
        return "Failed to load weights" not in record.getMessage()

    layerwise.addFilter(passes)
    try:
        yield
    finally:
        layerwise.removeFilter(passes)


def derived(model: torch.nn.Module) -> list[str]:
    """Return the names of those `weights.tensors` that are made from other weights, and must change with them."""
    live = weights.tensors(model)
    names = [name for name in live if name.rpartition(".")[2] in DERIVED_ATTRIBUTES]
    # A model of vLLM has this module; a stand-in in a test need not.
    layerwise = sys.modules.get("vllm.model_executor.model_loader.reload.layerwise")
    if layerwise is None:
        return names
    recorded = {name: layerwise.LAYERWISE_INFO.get(layer) for name, layer in model.named_modules()}
    if any(info is not None and any(info.restore_metadata) for info in recorded.values()):
        from vllm.model_executor.model_loader.reload.meta import SKIP_MODULES, SKIP_TENSORS

        # Buffers that were views of a parameter when the model was made: vLLM's record of it leaves them out.
        for prefix, layer in model.named_modules():
            if type(layer).__name__ in SKIP_MODULES:
                continue
            info = recorded[prefix]
            views = layer._non_persistent_buffers_set - set(info.restore_metadata[1] if info else ()) - SKIP_TENSORS
            names += [f"{prefix}.{view}" if prefix else view for view in views]
    return [name for name in names if name in live]


# --- what a layer is loaded from goes to its device in one batch, before its loaders run ------------------------------

# vLLM's reload keeps what loaders are given until their layer is complete, and then calls them one by one. From host
# memory each call would be a transfer that the device and this thread wait for, ten thousand times for the experts of a
# large model; from memory that is not pinned, as what is borrowed on most cards, by one thread and at a tenth of the
# bus's rate. A batch waits once, and goes through pinned pieces where it has to (core's `copy_all`). It takes as much
# of the device as the layer does; where that is not free, loaders get what they were given.
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
