"""vLLM on a CPU, whose stock build hides weights from the store; nothing here has an effect on a GPU.

Linear layers move their weights into a oneDNN handle and leave an empty parameter. Output heads keep the parameter but
compute with a packed copy: a tied head then looks up new rows and scores with old ones, silently. MLA on a CPU with AMX
hides its packed matrices in the attention's implementation and empties the parameter that they are made of. Experts are
packed only the first time they are loaded. `live_layers` keeps linears and heads on their parameters and MLA's matrices
in one place, where they are seen; a reload makes experts pack again (`forget_expert_kernels`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from tensorhub_plugins.core import UsageError
from tensorhub_plugins.vllm.plugin import replaced
from tensorhub_plugins.vllm.worker import online_quantization

# MLA's matrices on a CPU with AMX: as weights.PLAIN_ATTRIBUTES has them, and as the implementation does.
AMX_MLA = {"W_K": "_w_uk_packed", "W_V": "_w_uv_packed", "W_K_scale": "_w_scale"}


@contextmanager
def live_layers() -> Iterator[None]:
    """Have unquantized CPU layers, and MLA, that finish loading inside compute with visible weights from then on.

    Open around load_model and around a reload. Does nothing on other platforms."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        yield
        return
    from vllm.model_executor.layers.attention import MLAAttention
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    living = {UnquantizedLinearMethod: _living, UnquantizedEmbeddingMethod: _living, MLAAttention: _living_mla}
    with ExitStack() as stack:
        for cls, wrapped in living.items():
            living_one = wrapped(cls.process_weights_after_loading)
            stack.enter_context(replaced(cls, process_weights_after_loading=living_one))
        yield


def _living(original: Any) -> Any:
    """Return a process_weights_after_loading that packs nothing, and stays on the quant method it once ran on."""

    def process_weights_after_loading(method: Any, layer: Any) -> None:
        if layer.weight.ndim != 2:  # convolutions pack within their own, visible, parameter
            original(method, layer)
            return
        layer.cpu_linear = torch.nn.functional.linear
        method.process_weights_after_loading = partial(process_weights_after_loading, method)

    return process_weights_after_loading


def _living_mla(original: Any) -> Any:
    """Return a process_weights_after_loading that leaves the matrices where the first were, and the parameter full."""

    def process_weights_after_loading(attention: Any, act_dtype: torch.dtype) -> None:
        if not getattr(attention, "is_amx_bmm_enabled", False):
            original(attention, act_dtype)
            return
        weight = attention.kv_b_proj.weight
        original(attention, act_dtype)
        attention.kv_b_proj.weight = weight
        for ours, theirs in AMX_MLA.items():
            packed, live = getattr(attention.impl, theirs, None), vars(attention).get(ours)
            if live is not None and packed is not None:
                setattr(attention.impl, theirs, live.copy_(packed))
            elif packed is not None:
                setattr(attention, ours, packed)

    return process_weights_after_loading


def check_layers(model: torch.nn.Module, vllm_config: Any) -> None:
    """Raise UsageError when this CPU engine computes with copies of its weights that cannot be updated."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    packed = online_quantization.quantized_otherwise(model)
    if packed:
        raise UsageError(
            f"{packed[0]} is quantized as the checkpoint is, and the CPU build of vLLM keeps packed copies of that: it "
            "updates models that are not quantized, or that vLLM quantizes as it loads them (--quantization "
            "fp8_per_channel)"
        )
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


def packed_experts(model: torch.nn.Module) -> list[str]:
    """Return the layers of unquantized experts that this build packs, whatever it has loaded."""
    from vllm.platforms import current_platform

    of_experts = "UnquantizedFusedMoEMethod" if current_platform.is_cpu() else None
    named = ((name, getattr(module, "quant_method", None)) for name, module in model.named_modules())
    return [name for name, method in named if type(method).__name__ == of_experts]


def forget_expert_kernels(model: torch.nn.Module, layers: Collection[str] | None = None) -> None:
    """Make unquantized experts (None: of all layers) pack again: they do so only while they have no kernel."""
    for name in packed_experts(model):
        if layers is None or name in layers:
            method: Any = model.get_submodule(name).quant_method
            method.moe_kernel = None


def refresh_convolutions(model: torch.nn.Module) -> None:
    """Refresh Mamba2's view of its convolution's weight, which the CPU build packs into other memory."""
    for mixer in model.modules():
        view = mixer._buffers.get("conv_weights")
        unpacked = getattr(getattr(mixer, "conv1d", None), "_cpu_unpacked_conv_weight", None)
        if view is not None and unpacked is not None:
            view.copy_(unpacked.view(view.shape))
