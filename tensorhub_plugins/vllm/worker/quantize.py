"""A checkpoint of floats for an engine whose weights are FP8 with a scale for each block: quantized as it is installed.

That is what verl does for its rollouts (`rollout.quantization=fp8`), by the formula of its Triton kernel and with the
same names: of `X` come X in FP8 and `X_scale_inv` in float32, from where vLLM's own loaders and kernels go on
(reload.py). Which tensors those are is asked of the loaders, too: all that they would put into FP8 parameters as they
are (checkpoint_contract.py). What this worker needs of the FP8 says what it needs of the floats: whole blocks. A tensor
is quantized when it is its turn, on the device, and takes no memory afterwards. The engine serves the result in its
runtime layout, so that its peers do not quantize again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from tensorhub_plugins.core import TensorTable, VersionRefused, copy_all
from tensorhub_plugins.vllm.worker import checkpoint_contract, draft
from tensorhub_plugins.vllm.worker.plan import Given, Held, Lazy, Plan, Region, Shapes, apart, specs_of

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
SCALE = "_scale_inv"
LARGEST_MIN = 1e-10  # verl's: the least that a block's largest element is taken to be

ELEMENTS_AT_ONCE = 1 << 22  # there are three temporary copies of them in float32

Block = tuple[int, int]  # rows and columns that have one scale


def block_of(vllm_config: Any) -> Block | None:
    """Return the block of an engine whose checkpoint is FP8 by blocks; None: it is not."""
    config = getattr(vllm_config, "quant_config", None)
    size = getattr(config, "weight_block_size", None)
    if size is None or not getattr(config, "is_checkpoint_fp8_serialized", False):
        return None
    rows, columns = size
    return rows, columns


def memory_bytes(model: torch.nn.Module) -> int:
    """Return by how many bytes a version of floats, two bytes an element, exceeds what this worker makes of it."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.dtype == FP8)


class Quantizer:
    """The quantizer of one model, which may have nothing to quantize. `learn` runs the model's loaders for a checkpoint
    of other shapes than the last: call it where the model does not compute then."""

    def __init__(self, model: torch.nn.Module, vllm_config: Any) -> None:
        self._model, self._vllm_config, block = model, vllm_config, block_of(vllm_config)
        self._block, self._quantizes = block or (1, 1), block is not None
        self._floats: Shapes | None = None  # the last checkpoint's
        self._names: frozenset[str] = frozenset()  # the tensors of it that are quantized
        # On their device; asked now, as during a reload all may be without memory.
        self._like = next((each.new_empty(0) for each in model.parameters() if not each.is_meta), torch.empty(0))

    def knows(self, shapes: Shapes) -> bool:
        """Return whether `learn` would learn nothing."""
        return not self._quantizes or self._floats == shapes

    def learn(self, shapes: Shapes) -> None:
        """Find out what is quantized of a checkpoint of these shapes. Raise VersionRefused if it is wrong."""
        if self.knows(shapes):
            return
        tensors = checkpoint_contract.without_memory(shapes)
        names = _without_scales(cast_to_fp8(self._model, self._vllm_config, tensors), tensors)
        self._names = frozenset(name for name in names if tensors[name].dim() == 2)
        self._floats = shapes

    def plan(self, floats: Shapes, rehearse: Callable[[Shapes], Plan | None]) -> Plan | None:
        """Return the plan for what is made of a checkpoint of these shapes; None: none before it is here."""
        try:
            self.learn(floats)
        except VersionRefused:
            return None
        return rehearse(self.shapes(floats))

    def shapes(self, floats: Shapes) -> Shapes:
        """Return the shapes of what `given` makes of a checkpoint of these."""
        shapes: dict[str, tuple[torch.dtype, torch.Size]] = {}
        for name, (dtype, shape) in floats.items():
            shapes[name] = (FP8 if name in self._names else dtype), shape
            if name in self._names:
                blocks = [-(-size // each) for size, each in zip(shape, self._block, strict=True)]
                shapes[name + SCALE] = torch.float32, torch.Size(blocks)
        return shapes

    def wanted(self, plan: Plan) -> TensorTable:
        """Return what is needed of a checkpoint of floats for a plan of what is made of it: whole blocks."""
        floats = self._floats
        if floats is None or not self._names:
            return plan.wanted
        needed: dict[str, list[Region]] = {}
        for name, regions in plan.needed.items():
            of = name.removesuffix(SCALE) if name not in floats else name
            blocks = self._block if of != name else (1, 1)  # a scale is a block's
            if of in self._names:
                regions = tuple(self._blocks_around(region, blocks, floats[of][1]) for region in regions)
            needed.setdefault(of, []).extend(regions)
        specs = (specs_of(name, *floats[name], apart(sorted(regions))) for name, regions in needed.items())
        return TensorTable.of(spec for each in specs for spec in each)

    def _blocks_around(self, region: Region, unit: Block, whole: torch.Size) -> Region:
        axes = list(zip(region.start, region.ends, unit, self._block, whole, strict=True))
        start = [first * one // block * block for first, _, one, block, _ in axes]
        ends = [min(-(-last * one // block) * block, size) for _, last, one, block, size in axes]
        return Region(tuple(start), tuple(end - at for at, end in zip(start, ends, strict=True)))

    def given(self, floats: Given) -> Given:
        """Return a checkpoint as the loaders want it. Its shapes are known."""
        return _Quantized(floats, self) if self._names else floats

    def quantizes(self, name: str) -> bool:
        return name in self._names

    def made(self, held: Held) -> tuple[Held, Held]:
        """Return what is made of a region of floats, and its scales."""
        values, scales = quantize(held.tensor, self._block, self._vllm_config.model_config.dtype, self._like)
        start = [first // block for first, block in zip(held.region.start, self._block, strict=True)]
        return Held(held.region, values), Held(Region(tuple(start), tuple(scales.shape)), scales)

    def names(self, floats: Given) -> list[str]:
        """Return the names of what is made of these floats."""
        return [name for of in floats.held for name in ((of, of + SCALE) if of in self._names else (of,))]

    def others(self, floats: Given) -> dict[str, torch.Tensor]:
        """Return the tensors that stay as they are."""
        return {name: tensor for name, tensor in floats.tensors.items() if name not in self._names}


class _Quantized(Given):
    """What is made of a checkpoint of floats."""

    def __init__(self, floats: Given, quantizer: Quantizer) -> None:
        super().__init__(Lazy(quantizer.names(floats), self._regions), quantizer.shapes(floats.shapes))
        self._floats, self._quantizer = floats, quantizer
        self._made: tuple[str, list[tuple[Held, Held]]] = "", []  # of the last tensor

    def _regions(self, name: str) -> list[Held]:
        """Return what is made of a tensor, or its scales: both at once, as its loaders ask for one after the other."""
        of = name if name in self._floats.held else name.removesuffix(SCALE)
        if not self._quantizer.quantizes(of):
            return list(self._floats.held[name])
        if self._made[0] != of:
            self._made = of, [self._quantizer.made(held) for held in self._floats.held[of]]
        found = [each[of != name] for each in self._made[1]]
        self._made = self._made if of == name else ("", [])  # the memory is the next one's
        return found

    @property
    def is_whole(self) -> bool:
        return self._floats.is_whole

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return self._quantizer.others(self._floats)


def cast_to_fp8(model: torch.nn.Module, vllm_config: Any, tensors: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """Return the float tensors that the model's loaders would write into FP8 parameters, without a scale."""
    from vllm.config import set_current_vllm_config

    with torch.no_grad(), set_current_vllm_config(vllm_config), checkpoint_contract._stand_ins(model) as places:
        recorder = checkpoint_contract._Recorder(places)
        with recorder:
            try:
                draft.load(model, draft.Again(partial(recorder.watched, tensors)))
            except Exception as error:
                raise VersionRefused(recorder.explain(error)) from error
    return frozenset(recorder.cast_to_fp8)


def _without_scales(names: frozenset[str], tensors: Mapping[str, torch.Tensor]) -> frozenset[str]:
    scales = sorted(name + SCALE for name in names if name + SCALE in tensors)
    if scales:
        raise VersionRefused(
            f"{checkpoint_contract.some(scales)}: scales of weights that are published in floats; publish both as they "
            "are quantized, or the floats alone"
        )
    return names


def quantize(
    tensor: torch.Tensor, block: Block, dtype: torch.dtype | None = None, like: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix in FP8, and the factor of each block in float32: one row of scales for every row of blocks, the
    last of which may be smaller. dtype: what it is rounded to first; None: nothing. like: a tensor on the device where
    it is made; None: the matrix."""
    like, (rows, columns), (high, wide) = tensor if like is None else like, tensor.shape, block
    values = like.new_empty((rows, columns), dtype=FP8)
    scales = like.new_empty((-(-rows // high), -(-columns // wide)), dtype=torch.float32)
    step = max(ELEMENTS_AT_ONCE // max(columns * high, 1), 1) * high
    for start in range(0, rows, step):
        some = tensor[start : start + step]
        if some.device != like.device:
            here = like.new_empty(some.shape, dtype=some.dtype)
            copy_all([(here, some)])
            some = here
        some = some if dtype is None else some.to(dtype)
        padded = torch.nn.functional.pad(some, (0, -columns % wide, 0, -len(some) % high)).float()
        blocks = padded.view(padded.shape[0] // high, high, padded.shape[1] // wide, wide)
        factors = blocks.abs().amax(dim=(1, 3), keepdim=True).clamp_min_(LARGEST_MIN) / FP8_MAX
        made = (blocks * factors.reciprocal()).clamp_(-FP8_MAX, FP8_MAX).to(FP8).view(padded.shape)
        values[start : start + step] = made[: len(some), :columns]
        scales[start // high : (start + step) // high] = factors[:, 0, :, 0]
    return values, scales
