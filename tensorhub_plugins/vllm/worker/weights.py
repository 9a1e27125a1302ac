"""The weights of a live vLLM model: which tensors they are, who may trade them, how they are replaced.

Two layouts
    `checkpoint`     Hugging Face names. Goes in through vLLM's own layerwise reload (`reload_checkpoint`), which
                     fuses, shards, quantizes and packs, and writes into the storages already in use.
    `runtime:<hex>`  vLLM's own tensors, byte for byte. Go in by plain copies (`copy_tensors`).
Both keep every storage where it is, so captured CUDA graphs and compiled code stay valid.

What a runtime copy must cover (`tensors`)
    Parameters, buffers (rotary caches, scales) and the tensors that some layers keep as plain attributes. Not
    the KV cache. Tied and aliased tensors once: one storage, one entry.

Who may copy from whom (`fingerprint`, `replica_layout`)
    Equal names, dtypes, shapes and strides are not enough: kernels permute weights within the same shape. The
    fingerprint therefore covers everything that decides what the bytes mean: vLLM's version, the processor,
    the model's configuration, quantization, the kernel every layer chose, and each worker's place in the
    parallel groups. It is one string for the whole replica; worker k of one replica trades with worker k of
    another.

vLLM on a CPU
    The stock CPU build hides weights from us: linear layers move them into a oneDNN handle and leave an empty
    parameter, output heads keep the parameter but compute with a packed copy (a tied head then looks up new
    rows and scores with old ones, silently), and experts are packed only the first time they are loaded.
    `live_cpu_layers` keeps linears and heads on their parameters, and `reload_checkpoint` makes experts pack
    again. Neither does anything on a GPU.
"""

from __future__ import annotations

import enum
import hashlib
import json
import logging
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import xxhash

from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.vllm.worker.contract import preserved
from tensorhub_plugins.vllm.worker.references import rebound_references

# vLLM's logging configuration only knows names below "vllm".
logger = logging.getLogger("vllm.tensorhub")

VERSIONS_SUPPORTED = ((0, 26), (0, 33))  # first and last minor version with these interfaces

# Tensors that layers keep as plain attributes: the matrices MLA absorbs (names differ by version and back
# end), and the unpacked convolution weight of the CPU build. Everything else a model computes with is a
# parameter or a buffer.
PLAIN_ATTRIBUTES = (
    "W_UV",
    "W_UK",
    "W_UK_T",
    "W_UK_T_dcp_qrep",
    "W_K",
    "W_K_scale",
    "W_V",
    "W_V_scale",
    "_cpu_unpacked_conv_weight",
)
# Of these, the ones that are computed from weights (a scale may be a constant).
DERIVED_ATTRIBUTES = tuple(name for name in PLAIN_ATTRIBUTES if not name.endswith("_scale"))

REFRESHED_SCALARS = ("_q_scale_float", "_k_scale_float", "_v_scale_float")


def check_version(version: str) -> None:
    """Raise UsageError unless this module was written for that vLLM version."""
    try:
        minor = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    except ValueError:
        minor = ()
    first, last = VERSIONS_SUPPORTED
    if not (first <= minor <= last):
        raise UsageError(
            f"vLLM {version} is outside the supported range {_dotted(first)} to {_dotted(last)}: "
            "install a version in that range, or use the engine's own weight update instead of tensorhub"
        )


# -------------------------------------------------------------------------------------------- which tensors


def tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor the model computes with, by name, each storage range once, without the KV cache.

    The tensors are the live ones: writing into them changes the model. All are contiguous: what the model keeps
    transposed is given in the order of its memory, what it keeps with gaps as one flat run with the gaps in it.
    What such bytes mean is the fingerprint's business.
    """
    found = dict(_all_tensors(model))
    return without_aliases({name: _in_memory_order(tensor) for name, tensor in found.items()})


def _all_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """As the model has them, the same one under several names too."""
    for named in (
        model.named_parameters(remove_duplicate=False),
        model.named_buffers(remove_duplicate=False),
    ):
        for name, tensor in named:
            if tensor.numel() and not tensor.is_meta:
                yield name, tensor.detach()
    for module_name, module in model.named_modules():
        for attribute in PLAIN_ATTRIBUTES:
            tensor = module.__dict__.get(attribute)
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                yield f"{module_name}.{attribute}", tensor.detach()


def _in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous view of all the memory between the tensor's first and last element."""
    order = sorted(range(tensor.dim()), key=lambda d: tensor.stride(d), reverse=True)
    permuted = tensor.permute(order)
    if permuted.is_contiguous():
        return permuted
    span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return torch.as_strided(tensor, (span,), (1,))


def without_aliases(found: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Drop what another entry's memory already contains; of equals, the first found stays."""
    kept: list[str] = []
    end_by_storage: dict[tuple[torch.device, int], int] = {}

    def extent(name: str) -> tuple[int, int]:
        start = found[name].data_ptr()
        return start, start + found[name].numel() * found[name].element_size()

    order = {name: position for position, name in enumerate(found)}
    for name in sorted(found, key=lambda n: (extent(n)[0], -extent(n)[1], order[n])):
        start, end = extent(name)
        storage = (found[name].device, found[name].untyped_storage().data_ptr())
        if end > end_by_storage.get(storage, start):
            kept.append(name)
            end_by_storage[storage] = end
    return {name: found[name] for name in sorted(kept)}


# ------------------------------------------------------------------------------------- who may copy from whom


def fingerprint(model: torch.nn.Module, vllm_config: Any, *, ranks: Mapping[str, int]) -> bytes:
    """32 bytes that are equal for two workers exactly when their runtime tensors may be copied raw.

    `ranks` says where this worker stands in its parallel groups (see `parallel_ranks`).
    """
    import vllm
    from vllm.platforms import current_platform

    model_config, parallel = vllm_config.model_config, vllm_config.parallel_config
    hf_config = {
        key: value
        for key, value in model_config.hf_config.to_dict().items()
        if not key.startswith("_") and key != "transformers_version"  # where it came from, not what it is
    }
    capability = None if current_platform.is_cpu() else current_platform.get_device_capability()
    description = {
        "vllm": vllm.__version__,
        "platform": [current_platform.device_type, platform.machine(), str(capability), _cpu_isa()],
        "model": hf_config,
        "class": type(model).__qualname__,
        "dtype": str(model_config.dtype),
        "quantization": str(model_config.quantization),
        "kv_cache_dtype": str(vllm_config.cache_config.cache_dtype),
        "expert_placement": str(getattr(parallel, "expert_placement_strategy", None)),
        "ranks": dict(ranks),
        "kernels": dict(_kernels(model)),
        "tensors": {name: _meaning(tensor) for name, tensor in _all_tensors(model)},
        "copied": {name: _meaning(tensor) for name, tensor in tensors(model).items()},
    }
    return hashlib.sha256(json.dumps(description, sort_keys=True, default=str).encode()).digest()


def replica_layout(fingerprints: Iterable[bytes]) -> str:
    """The layout string of a replica, from the fingerprints of its workers in shard order.

    All workers of a replica publish under this one string; tensors are compared one by one on top of it.
    """
    return "runtime:" + hashlib.sha256(b"".join(fingerprints)).hexdigest()[:32]


def parallel_ranks(vllm_config: Any) -> dict[str, int]:
    """Rank and size of this worker in the groups that decide which part of the weights it holds."""
    from vllm.distributed import get_pp_group, get_tp_group

    tp, pp = get_tp_group(), get_pp_group()
    ranks = {
        "tp": tp.rank_in_group,
        "tp_size": tp.world_size,
        "pp": pp.rank_in_group,
        "pp_size": pp.world_size,
    }
    if vllm_config.parallel_config.enable_expert_parallel:
        from vllm.distributed import get_ep_group

        ranks.update(ep=get_ep_group().rank_in_group, ep_size=get_ep_group().world_size)
    return ranks


def _kernels(model: torch.nn.Module) -> Iterator[tuple[str, list[str]]]:
    """What every layer chose to compute with, because that decides how its weights are packed.

    Names of classes, enums and flags only: nothing that may differ between two equal engines, such as
    addresses.
    """
    for name, module in model.named_modules():
        choices: list[str] = []
        for role in ("quant_method", "scheme", "impl"):
            chosen = getattr(module, role, None)
            if chosen is None or isinstance(chosen, (torch.Tensor, torch.nn.Module)):
                continue
            choices.append(f"{role}={type(chosen).__qualname__}")
            for key, value in sorted(getattr(chosen, "__dict__", {}).items()):
                if isinstance(value, (bool, enum.Enum)):
                    choices.append(f"{role}.{key}={value}")
                elif isinstance(value, type):
                    choices.append(f"{role}.{key}={value.__qualname__}")
                elif key in ("kernel", "moe_kernel", "fp8_linear") and value is not None:
                    choices.append(f"{role}.{key}={type(value).__qualname__}")
        if choices:
            yield name, choices


def _cpu_isa() -> str:
    amx = getattr(torch.cpu, "_is_amx_tile_supported", bool)()
    return f"{torch.backends.cpu.get_cpu_capability()}{'+AMX' if amx else ''}"


# --------------------------------------------------------------------------------------------- replacing them


def copy_tensors(live: Mapping[str, torch.Tensor], source: Mapping[str, torch.Tensor]) -> None:
    """Copy every source tensor over the live tensor of its name, and wait until the bytes are there.

    Raises UsageError, with nothing written, unless both hold the same names, dtypes and shapes.
    """
    check_same_tensors(live, source)
    with torch.no_grad():
        for name, tensor in live.items():
            flat_bytes(tensor).copy_(flat_bytes(source[name]), non_blocking=True)
    wait_for_devices(tensor.device for tensor in live.values())


def wait_for_devices(devices: Iterable[torch.device]) -> None:
    """Until what was queued on them is done."""
    for device in {device for device in devices if device.type == "cuda"}:
        torch.cuda.synchronize(device)


def digest(tensor: torch.Tensor) -> str:
    """Hex digest of a contiguous tensor's bytes: equal to what a slab says of the same range of its stream."""
    return xxhash.xxh3_128_hexdigest(flat_bytes(tensor).cpu().numpy())


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as bytes, one-dimensional; writing them writes the tensor."""
    return tensor.view(-1).view(torch.uint8)


def check_same_tensors(live: Mapping[str, torch.Tensor], source: Mapping[str, torch.Tensor]) -> None:
    """Raise UsageError naming what differs, unless names, dtypes and shapes are equal."""
    if live.keys() != source.keys():
        missing, unknown = sorted(live.keys() - source.keys()), sorted(source.keys() - live.keys())
        raise UsageError(f"runtime tensors differ: the source lacks {missing[:5]}, the model lacks {unknown[:5]}")
    for name, tensor in live.items():
        mine, theirs = ((str(t.dtype), list(t.shape)) for t in (tensor, source[name]))
        if mine != theirs:
            raise UsageError(f"runtime tensor {name!r} differs: the model has {mine}, the source {theirs}")


def reload_checkpoint(model: torch.nn.Module, vllm_config: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Replace all weights of the model by those of a checkpoint, through vLLM's layerwise reload.

    The checkpoint is one that fills the model (see contract.py). When anything raises, the model has its live tensors
    back and can be reloaded again; their bytes are mixed. The caller sees to it that nothing is computed meanwhile.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    with torch.no_grad(), set_current_vllm_config(vllm_config), live_cpu_layers(), preserved(model):
        _forget_cpu_expert_kernels(model)
        with _defined_paddings(), rebound_references(model):
            initialize_layerwise_reload(model)
            model.load_weights(weights)
            finalize_layerwise_reload(model, vllm_config.model_config)
        _refresh_cpu_convolutions(model)
    wait_for_devices(p.device for p in model.parameters())


@contextmanager
def _defined_paddings() -> Iterator[None]:
    """What a checkpoint does not fill, such as the padding of a kernel, is zero and not what the memory held before."""
    from vllm.model_executor.model_loader.reload import meta

    original = meta.materialize_meta_tensor
    meta.materialize_meta_tensor = lambda tensor: original(tensor).zero_()
    try:
        yield
    finally:
        meta.materialize_meta_tensor = original


def refresh_scalars(model: torch.nn.Module) -> None:
    """Set the Python floats that attention layers derive from their scale buffers, after a raw copy."""
    for module in model.modules():
        for derived in REFRESHED_SCALARS:
            scale = getattr(module, derived.removesuffix("_float"), None)
            if isinstance(scale, torch.Tensor) and scale.numel() == 1 and hasattr(module, derived):
                setattr(module, derived, float(scale))


def is_refreshed(name: str) -> bool:
    """Whether `refresh_scalars` sets the number of this name."""
    return name.rpartition(".")[2] in REFRESHED_SCALARS


def derived(model: torch.nn.Module) -> list[str]:
    """Of `tensors`, those that are made from other weights, so that they must change when all weights do."""
    live = tensors(model)
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


def _meaning(tensor: torch.Tensor) -> tuple[str, str, list[int], list[int]]:
    stride = [step if n > 1 else 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True)]
    return str(tensor.dtype), tensor.device.type, list(tensor.shape), stride


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


# ---------------------------------------------------------------------------------------------- vLLM on a CPU


@contextmanager
def live_cpu_layers() -> Iterator[None]:
    """Unquantized CPU layers that finish loading inside compute with their parameters from then on.

    Open around load_model and around a reload. Does nothing on other platforms.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        yield
        return
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    classes = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    stock = [cls.process_weights_after_loading for cls in classes]
    try:
        for cls, original in zip(classes, stock, strict=True):
            cls.process_weights_after_loading = _living(original)
        yield
    finally:
        for cls, original in zip(classes, stock, strict=True):
            cls.process_weights_after_loading = original


def _living(original: Any) -> Any:
    """A process_weights_after_loading that packs nothing, and stays with the quant method it once ran on."""

    def process_weights_after_loading(method: Any, layer: torch.nn.Module) -> None:
        if layer.weight.ndim != 2:  # convolutions pack within their own, visible, parameter
            original(method, layer)
            return
        layer.cpu_linear = torch.nn.functional.linear
        method.process_weights_after_loading = partial(process_weights_after_loading, method)

    return process_weights_after_loading


def check_cpu_layers(model: torch.nn.Module, vllm_config: Any) -> None:
    """Raise UsageError when this CPU engine computes with copies of its weights that nobody can update."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    if vllm_config.model_config.quantization is not None:
        raise UsageError("on the CPU build of vLLM tensorhub updates unquantized models only")
    if vllm_config.compilation_config.inductor_compile_config.get("max_autotune"):
        raise UsageError("inductor's max_autotune compiles CPU weights in as constants: switch it off")
    linear = torch.nn.functional.linear
    for name, module in model.named_modules():
        if getattr(module, "cpu_linear", linear) is not linear:
            raise UsageError(
                f"{name} computes with a packed copy of its weights: start this engine with --load-format tensorhub or "
                "worker_extension_cls=tensorhub_plugins.vllm.TensorHubWorkerExtension (or a subclass), which keep them "
                "live"
            )
        if getattr(module, "w13_bias", None) is not None:
            raise UsageError(f"{name}: experts with a bias cannot be updated on the CPU build of vLLM")


def _forget_cpu_expert_kernels(model: torch.nn.Module) -> None:
    """Make unquantized experts pack again: they do so only while they have no kernel."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if type(method).__name__ == "UnquantizedFusedMoEMethod":
            method.moe_kernel = None


def _refresh_cpu_convolutions(model: torch.nn.Module) -> None:
    """Mamba2 computes with a view of its convolution's weight, which the CPU build packs into other memory."""
    for mixer in model.modules():
        view = mixer._buffers.get("conv_weights")
        unpacked = getattr(getattr(mixer, "conv1d", None), "_cpu_unpacked_conv_weight", None)
        if view is not None and unpacked is not None:
            view.copy_(unpacked.view(view.shape))


# ---------------------------------------------------------------------------------------- the checkpoint view


def checkpoint_view(model: torch.nn.Module, vllm_config: Any) -> dict[str, torch.Tensor] | None:
    """The live weights under their Hugging Face names, as views; None where they cannot be told apart.

    For unquantized dense models on one worker, whose fused tensors are plain concatenations. A tied head appears
    under its own name too, after what it is tied to. So an engine can be compared with what the trainer published,
    and `conversion` knows where to copy.
    """
    parallel = vllm_config.parallel_config
    if parallel.tensor_parallel_size * parallel.pipeline_parallel_size > 1:
        return None
    if vllm_config.model_config.quantization is not None or _renames_weights(model):
        return None
    packed = getattr(model, "packed_modules_mapping", {})
    view: dict[str, torch.Tensor] = {}
    for module_name, module in model.named_modules():
        for parameter_name, parameter in module.named_parameters(recurse=False):
            parts = _parts(module_name, module, parameter_name, parameter.detach(), packed)
            if parts is None:
                return None
            view.update(parts)
    return view


def _renames_weights(model: torch.nn.Module) -> bool:
    """Whether loading does more than fuse layers, so that the model's names are not the checkpoint's."""
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
