"""What vLLM's CPU build lacks to run `--quantization` as it loads: operations and kernels, in plain torch.

    fp8_per_channel, dense      the matrix product, for speed alone (oneDNN's reference takes a second for a token)
    fp8, fp8_per_tensor         the operation that divides floats by a scale and rounds them
    fp8_per_block               the matrix product (the CPU build's wants AMX)
    mxfp8                       the choice of vLLM's own emulation
    experts of any of them      the choice of Triton's experts, of which everything is made but the Triton kernel

Whatever makes, reloads and remembers weights is vLLM's own.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm_faults import FaultyExtension

from tensorhub_plugins.vllm.doctor.check_sync import Patient
from tensorhub_plugins.vllm.worker import kernel_references
from tensorhub_plugins.vllm.worker.conversion import Conversion
from tensorhub_plugins.vllm.worker.extension import TensorHubWorkerExtension

FP8_MAX = 448.0


def stand_in() -> None:
    """Install the stand-ins in this process, before the model is made."""
    for owner, name, value in stand_ins():
        setattr(owner, name, value)


def stand_ins() -> list[tuple[Any, str, Any]]:
    """Return owner, name and new value of every attribute."""
    from vllm import _custom_ops
    from vllm.model_executor.kernels.linear.mxfp8.emulation import EmulationMxfp8LinearKernel
    from vllm.model_executor.kernels.linear.mxfp8.Mxfp8LinearKernel import Mxfp8LinearLayerConfig
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.fused_moe.oracle.int8 import Int8MoeBackend
    from vllm.model_executor.layers.quantization.online import fp8, int8, mxfp8
    from vllm.model_executor.layers.quantization.online.moe_base import OnlineMoEMethodBase

    of_vllm = fp8.init_fp8_linear_kernel

    def linear_kernel(*, weight_quant_key: Any, **settings: Any) -> Any:
        if weight_quant_key == fp8.kFp8Static128BlockSym:
            return BlockKernel()
        return of_vllm(weight_quant_key=weight_quant_key, **settings)

    def experts(**settings: Any) -> Any:
        return Fp8MoeBackend.TRITON, TritonExperts

    def int8_experts(**settings: Any) -> Any:
        return Int8MoeBackend.TRITON, TritonExperts

    return [
        (torch, "_scaled_mm", scaled_mm),
        (_custom_ops, "scaled_fp8_quant", scaled_fp8_quant),
        (fp8, "init_fp8_linear_kernel", linear_kernel),
        (fp8, "select_fp8_moe_backend", experts),
        (mxfp8, "select_mxfp8_moe_backend", experts),
        (int8, "select_int8_moe_backend", int8_experts),
        (mxfp8, "init_mxfp8_linear_kernel", lambda: EmulationMxfp8LinearKernel(Mxfp8LinearLayerConfig())),
        (OnlineMoEMethodBase, "is_monolithic", True),
        (OnlineMoEMethodBase, "apply_monolithic", apply_experts),
    ]


def scaled_fp8_quant(
    input: torch.Tensor,
    scale: torch.Tensor | None = None,
    *,
    use_per_token_if_dynamic: bool = False,
    **unused: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do as the CUDA operation: return FP8 and the scale, which is computed by rows or for all if none is given."""
    if scale is None:
        largest = input.abs().amax(dim=1, keepdim=True) if use_per_token_if_dynamic else input.abs().amax().view(1)
        scale = (largest.float() / FP8_MAX).clamp_min(1 / (FP8_MAX * 512))
    return (input.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Do as torch's operation, with scales for all or by rows of a and columns of b."""
    product = (a.float() @ b.float()) * scale_a * scale_b
    return (product if bias is None else product + bias).to(out_dtype)


class BlockKernel:
    def process_weights_after_loading(self, layer: Any) -> None: ...

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.nn.functional.linear(x, dequantized(layer.weight, layer.weight_scale_inv, x.dtype), bias)


def dequantized(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a matrix, from one scale, one for every row, or one for every block of it."""
    if scale.dtype == torch.uint8:  # an exponent
        scale = torch.exp2(scale.float() - 127)
    if scale.dim() < 2:
        return (weight.float() * scale.view(-1, 1)).to(dtype)
    for axis, size in enumerate(weight.shape):
        block = 32 if scale.shape[1] == size // 32 and axis else 128
        if scale.shape[axis] not in (1, size):
            scale = scale.repeat_interleave(block, axis).narrow(axis, 0, size)
    return (weight.float() * scale).to(dtype)


def apply_experts(method: Any, layer: Any, x: torch.Tensor, router_logits: torch.Tensor, **unused: Any) -> torch.Tensor:
    """Compute with the scales that the kernel remembers, as the real ones do."""
    remembered = method.moe_kernel.fused_experts.quant_config
    chosen, ids = router_logits.float().softmax(-1).topk(method.moe.experts_per_token)
    chosen = chosen / chosen.sum(-1, keepdim=True)
    out = torch.zeros_like(x)
    for expert in range(layer.w13_weight.shape[0]):
        w13 = dequantized(layer.w13_weight[expert], remembered.w1_scale[expert], x.dtype)
        w2 = dequantized(layer.w2_weight[expert], remembered.w2_scale[expert], x.dtype)
        gate, up = torch.nn.functional.linear(x, w13).chunk(2, dim=-1)
        share = (chosen * (ids == expert)).sum(-1, keepdim=True).to(x.dtype)
        out += share * torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, w2)
    return out


class OnlineExtension(TensorHubWorkerExtension):
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        stand_in()
        return super().__new__(cls, *args, **kwargs)


class OnlinePatient(OnlineExtension, Patient):
    pass


class FaultyOnline(OnlineExtension, FaultyExtension):
    pass


class FailsOnce(OnlineExtension):
    """A second rank whose first conversions fail, as the engine starts."""

    times = 1

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        original, left = Conversion.install, [cls.times]

        def install(conversion: Any, given: Any) -> Any:
            from vllm.distributed import get_tp_group

            if get_tp_group().rank_in_group == 1 and left[0]:
                left[0] -= 1
                raise RuntimeError("injected: this worker's conversion failed")
            return original(conversion, given)

        Conversion.install = install  # type: ignore[method-assign]
        return super().__new__(cls, *args, **kwargs)


class FailsTwice(FailsOnce):
    times = 2


class UnboundPatient(OnlinePatient):
    """A patient that leaves what kernels remember of a reload unchanged."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        kernel_references.rebind = lambda root, moved, skip: 0  # type: ignore[assignment]
        return super().__new__(cls, *args, **kwargs)
