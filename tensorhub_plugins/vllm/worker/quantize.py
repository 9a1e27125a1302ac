"""A checkpoint of floats for an engine whose weights are FP8 with a scale for each block: quantized as it is installed.

That is what verl does for its rollouts (`rollout.quantization=fp8`), by the formula of its Triton kernel and with the
same names: of `X` come X in FP8 and `X_scale_inv` in float32, from where vLLM's own loaders and kernels go on
(reload.py). Which tensors those are is asked of the loaders, too: all that they would put into FP8 parameters as they
are (contract.py). The engine serves the result in its runtime layout, so that its peers do not quantize again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tensorhub_plugins.core import VersionRefused
from tensorhub_plugins.vllm.worker import contract
from tensorhub_plugins.vllm.worker.plan import Given, Shapes

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
SCALE = "_scale_inv"
LARGEST_MIN = 1e-10  # verl's: the least that a block's largest element is taken to be

Block = tuple[int, int]  # rows and columns that have one scale


def block_of(vllm_config: Any) -> Block | None:
    """Return the block of an engine whose checkpoint is FP8 by blocks; None: it is not."""
    config = getattr(vllm_config, "quant_config", None)
    size = getattr(config, "weight_block_size", None)
    if size is None or not getattr(config, "is_checkpoint_fp8_serialized", False):
        return None
    rows, columns = size
    return rows, columns


def memory_bytes(model: torch.nn.Module, workers: int) -> int:
    """Return the host memory that quantizing takes until a version is installed: each worker of an engine of so many
    reads the whole checkpoint in floats, two bytes an element, and makes all of it in FP8."""
    quantized = sum(parameter.numel() for parameter in model.parameters() if parameter.dtype == FP8)
    return workers * quantized * (2 + FP8.itemsize)


class Quantizer:
    """The quantizer of one model. `given` runs the model's loaders for a checkpoint of other shapes than the last: call
    it where the model does not compute then."""

    def __init__(self, model: torch.nn.Module, vllm_config: Any, block: Block) -> None:
        self._model, self._vllm_config, self._block = model, vllm_config, block
        self._shapes: Shapes | None = None  # the last checkpoint's
        self._names: frozenset[str] = frozenset()  # the tensors of it that are quantized
        self._made: tuple[object, Given] | None = None

    @property
    def quantizes(self) -> bool:
        """Return whether the last checkpoint consisted of floats."""
        return bool(self._names)

    def knows(self, shapes: Shapes) -> bool:
        """Return whether `given` would only compute."""
        return self._shapes == shapes

    def given(self, of: object, checkpoint: Given) -> Given:
        """Return a whole checkpoint as the loaders want it; made once for each `of`. Raise VersionRefused if wrong."""
        made = self._made
        if made is not None and made[0] is of:
            return made[1]
        tensors = checkpoint.tensors
        if not self.knows(checkpoint.shapes):
            self._names = _without_scales(cast_to_fp8(self._model, self._vllm_config, tensors), tensors)
            self._shapes = checkpoint.shapes
        result = Given.of(self._quantized(tensors))
        self._made = of, result
        return result

    def forget(self) -> None:
        """Free the memory of the last result."""
        self._made = None

    def _quantized(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            if name in self._names and tensor.dim() == 2:
                precise = tensor.to(self._vllm_config.model_config.dtype)
                found[name], found[name + SCALE] = quantize(precise, self._block)
            else:
                found[name] = tensor
        return found


def cast_to_fp8(model: torch.nn.Module, vllm_config: Any, tensors: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """Return the float tensors that the model's loaders would write into FP8 parameters, without a scale."""
    from vllm.config import set_current_vllm_config

    with torch.no_grad(), set_current_vllm_config(vllm_config), contract._stand_ins(model) as places:
        recorder = contract._Recorder(places)
        with recorder:
            try:
                load_weights: Any = model.load_weights
                load_weights(recorder.watched(tensors))
            except Exception as error:
                raise VersionRefused(recorder.explain(error)) from error
    return frozenset(recorder.cast_to_fp8)


def _without_scales(names: frozenset[str], tensors: Mapping[str, torch.Tensor]) -> frozenset[str]:
    scales = sorted(name + SCALE for name in names if name + SCALE in tensors)
    if scales:
        raise VersionRefused(
            f"{contract.some(scales)}: scales of weights that are published in floats; publish both as they are "
            "quantized, or the floats alone"
        )
    return names


def quantize(tensor: torch.Tensor, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix in FP8, and the factor of each block in float32: one row of scales for every row of blocks, the
    last of which may be smaller."""
    (rows, columns), (high, wide) = tensor.shape, block
    padded = torch.nn.functional.pad(tensor, (0, -columns % wide, 0, -rows % high)).float()
    blocks = padded.view(padded.shape[0] // high, high, padded.shape[1] // wide, wide)
    scales = blocks.abs().amax(dim=(1, 3), keepdim=True).clamp_min_(LARGEST_MIN) / FP8_MAX
    values = (blocks * scales.reciprocal()).clamp_(-FP8_MAX, FP8_MAX).to(FP8).view(padded.shape)
    return values[:rows, :columns].contiguous(), scales[:, 0, :, 0].contiguous()
