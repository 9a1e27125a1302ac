"""The weights of a live vLLM model: which tensors they are, and how they are copied.

Two layouts
    `checkpoint`     Hugging Face names. Goes in through vLLM's own layerwise reload (reload.py), which fuses, shards,
                     quantizes and packs, and writes into the storages already in use.
    `runtime:<hex>`  vLLM's own tensors, byte for byte. Go in by plain copies (`copy_tensors`), from a worker with the
                     same fingerprint (fingerprint.py).
Both keep every storage where it is, so captured CUDA graphs and compiled code stay valid.

What a runtime copy must cover (`tensors`)
    Parameters, buffers (rotary caches, scales) and the tensors that some layers keep as plain attributes. Not
    the KV cache. Tied and aliased tensors once: one storage, one entry.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tensorhub_plugins.core import Slab, UsageError, copy_all, flat_bytes, in_memory_order, synchronize, without_aliases
from tensorhub_plugins.vllm.worker import draft

# Tensors that layers keep as plain attributes: the matrices MLA absorbs (names differ by version and back
# end), and the unpacked convolution weight of the CPU build. Everything else a model computes with is a
# parameter or a buffer.
PLAIN_ATTRIBUTES = (
    "W_UV", "W_UK", "W_UK_T", "W_UK_T_dcp_qrep", "W_K", "W_K_scale", "W_V", "W_V_scale",
    "_cpu_unpacked_conv_weight",
)  # fmt: skip

WRAPPED = ".base_layer"  # in the names of layers that vLLM has wrapped for LoRA adapters, once the model was loaded

REFRESHED_SCALARS = ("_q_scale_float", "_k_scale_float", "_v_scale_float")
# While it is None: by FlashInfer, HunYuan's vision, and TokenSpeed, by names that are constants in others.
MADE_ONCE = {"bmm1_scale", "o_sf_scale", "bmm2_scale", "_o_scale_float", "patch_pos_embed"}
BY_TOKENSPEED = {"softmax_scale", "output_scale"}
GATES = "_combined_gate_weight"  # of MoERunner


def tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return every tensor the model computes with, by name, each storage range once, without the KV cache.

    The tensors are the live ones: writing into them changes the model. All are contiguous: what the model keeps
    transposed is given in the order of its memory, what it keeps with gaps as one flat run with the gaps in it. The
    fingerprint covers what such bytes mean."""
    found = dict(all_tensors(model))
    return _joined(without_aliases({name: in_memory_order(tensor) for name, tensor in found.items()}))


def _joined(found: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Use one name, the first, for memory that several tensors share in part: MLA derives two views from a quantized
    layer that alternate in one matrix."""
    joined: dict[str, torch.Tensor] = {}
    last = ""
    for name in sorted(found, key=lambda each: found[each].data_ptr()):
        tensor, before = found[name], joined.get(last)
        if before is not None and _overlap(before, tensor):
            span = tensor.storage_offset() + tensor.numel() - before.storage_offset()
            joined[last] = before.as_strided((span,), (1,))
        else:
            joined[name] = tensor
            last = name
    return dict(sorted(joined.items()))


def _overlap(before: torch.Tensor, tensor: torch.Tensor) -> bool:
    storages = {each.untyped_storage().data_ptr() for each in (before, tensor)}
    return len(storages) == 1 and before.dtype == tensor.dtype and tensor.data_ptr() < before.data_ptr() + before.nbytes


def all_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all of them as the model has them, also the same one under several names."""
    for named in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in named:
            if tensor.numel() and not tensor.is_meta:
                yield name.replace(WRAPPED, ""), tensor.detach()
    for module_name, module in model.named_modules():
        for attribute, tensor in plain_of(module).items():
            if tensor.numel():
                yield f"{module_name}.{attribute}".replace(WRAPPED, ""), tensor.detach()


def plain_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that this layer keeps as plain attributes."""
    own = vars(module)
    if own.keys().isdisjoint(PLAIN_ATTRIBUTES):
        return {}
    return {name: own[name] for name in PLAIN_ATTRIBUTES if isinstance(own.get(name), torch.Tensor)}


def modules_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the model and all that is in it, under all names. torch's nested generators take three times as long."""
    found = [model]
    for module in found:  # grows meanwhile
        found += [each for each in module._modules.values() if each is not None]
    return found


def device_of(model: torch.nn.Module) -> torch.device:
    """Return where its parameters are."""
    return next((each.device for each in model.parameters() if not each.is_meta), torch.device("cpu"))


def by_name(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return its parameters, under all their names."""
    return {name: parameter.detach() for name, parameter in model.named_parameters(remove_duplicate=False)}


def copy_tensors(live: Mapping[str, torch.Tensor], source: Mapping[str, torch.Tensor]) -> None:
    """Copy every source tensor over the live tensor of its name, and wait until the bytes are there.

    Raises UsageError, with nothing written, unless both hold the same names, dtypes and shapes."""
    check_same_tensors(live, source)
    with torch.inference_mode():  # it can write inference tensors and others
        copy_all((as_bytes(tensor), as_bytes(source[name])) for name, tensor in live.items())


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose elements are bytes as those: torch copies some such dtypes in no other way."""
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


def check_same_tensors(live: Mapping[str, torch.Tensor], source: Mapping[str, torch.Tensor]) -> None:
    """Raise UsageError naming what differs, unless names, dtypes and shapes are equal."""
    if live.keys() != source.keys():
        missing, unknown = sorted(live.keys() - source.keys()), sorted(source.keys() - live.keys())
        raise UsageError(f"runtime tensors differ: the source lacks {missing[:5]}, the model lacks {unknown[:5]}")
    for name, tensor in live.items():
        if (tensor.dtype, tensor.shape) != (source[name].dtype, source[name].shape):
            mine, theirs = ((str(t.dtype), list(t.shape)) for t in (tensor, source[name]))
            raise UsageError(f"runtime tensor {name!r} differs: the model has {mine}, the source {theirs}")


@torch.inference_mode()  # in which the first step was computed
def refresh_derived(model: torch.nn.Module, *, is_raw: bool = False) -> None:
    """Set what layers derive from their weights by themselves, after those have changed: Python floats, and what vLLM
    computes in the first step and keeps, where captured graphs read it. is_raw: by a raw copy, which has buffers.

    The engine stands still for it. Most modules have nothing of it, and torch is slow to say what one lacks."""
    module: Any
    scales: dict[tuple[torch.device, torch.dtype], list[tuple[dict[str, Any], str, torch.Tensor]]] = {}
    for module in modules_of(model):
        own = vars(module)
        for made in (own, getattr(own.get("impl"), "__dict__", {})):  # impl: of attention
            if not made.keys().isdisjoint(MADE_ONCE | BY_TOKENSPEED):
                known = MADE_ONCE | (BY_TOKENSPEED if made.keys() >= BY_TOKENSPEED else set())
                made.update(dict.fromkeys(made.keys() & known))
        if "cos_coef" in module._parameters and not is_raw:  # FourierRotaryEmbedding
            module.cos_sin_cache.copy_(module._compute_cos_sin_cache())
        if own.get(GATES) is not None:
            torch.cat([module.gate.weight, module.shared_expert_gate.weight], out=own[GATES])
        for derived in REFRESHED_SCALARS if not own.keys().isdisjoint(REFRESHED_SCALARS) else ():
            scale = getattr(module, derived.removesuffix("_float"), None)
            if derived in own and isinstance(scale, torch.Tensor) and scale.numel() == 1:
                scales.setdefault((scale.device, scale.dtype), []).append((own, derived, scale.reshape(())))
    for alike in scales.values():  # read at once: each alone would wait for its device
        for (own, derived, _), number in zip(alike, torch.stack([each for *_, each in alike]).tolist(), strict=True):
            own[derived] = float(number)


def digest(tensor: torch.Tensor) -> str:
    """Return the hex digest of a contiguous tensor's bytes: equal to a slab's of the same range of its stream."""
    slab = Slab.adopt({"": flat_bytes(tensor)})
    synchronize([tensor])
    return slab.digest(0, slab.size_bytes).hex()


def checkpoint_view(model: torch.nn.Module, vllm_config: Any) -> dict[str, torch.Tensor] | None:
    """Return the live weights under their Hugging Face names, as views; None where the names are unknown.

    For unquantized dense models on one worker, whose fused tensors are plain concatenations; without what drafts for
    them. A tied head appears under its own name too, after what it is tied to. So an engine can be compared with what
    the trainer published, and `conversion` knows where to copy."""
    parallel = vllm_config.parallel_config
    if parallel.tensor_parallel_size * parallel.pipeline_parallel_size > 1:
        return None
    if vllm_config.model_config.quantization is not None or _renames_weights(model):
        return None
    packed = getattr(model, "packed_modules_mapping", {})
    view: dict[str, torch.Tensor] = {}
    for module_name, module in model.named_modules():
        if module_name.startswith(draft.NAME):
            continue
        for parameter_name, parameter in module.named_parameters(recurse=False):
            parts = _parts(module_name, module, parameter_name, parameter.detach(), packed)
            if parts is None:
                return None
            view.update(parts)
    return view


def _renames_weights(model: torch.nn.Module) -> bool:
    """Return whether loading does more than fuse layers, so that the model's names are not the checkpoint's."""
    rules = vars(getattr(model, "hf_to_vllm_mapper", None) or object).items()
    return any(rule for kind, rule in rules if kind.startswith("orig_to_new") and kind != "orig_to_new_stacked")


def _parts(
    module_name: str,
    module: torch.nn.Module,
    parameter_name: str,
    tensor: torch.Tensor,
    packed: Mapping[str, list[str]],
) -> dict[str, torch.Tensor] | None:
    parent, _, leaf = module_name.rpartition(".")
    prefix = f"{parent}." if parent else ""
    if parameter_name not in ("weight", "bias"):
        return None
    if hasattr(module, "org_vocab_size"):  # rows are padded to a multiple of 64
        return {f"{prefix}{leaf}.{parameter_name}": tensor[: module.org_vocab_size]}
    names = packed.get(leaf, [leaf])
    if len(names) == 1:
        return {f"{prefix}{names[0]}.{parameter_name}": tensor}
    sizes = list(getattr(module, "output_sizes", []))
    if len(sizes) != len(names) or sum(sizes) != tensor.shape[0]:
        return None
    pieces = torch.split(tensor, sizes, dim=0)
    return {f"{prefix}{name}.{parameter_name}": piece for name, piece in zip(names, pieces, strict=True)}
