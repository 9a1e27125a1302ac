"""A checkpoint into a live model: by vLLM's layerwise reload, or by plain copies where those are shown to do the same.

The engine stands still for it. The reload is always right and works through every layer in Python. For an unquantized
dense model on one worker it comes down to writing each tensor where `runtime.checkpoint_view` says that it is. But a
model may rename, permute and scale what it loads and derive more from it, so the first conversion tries both ways

    reload the checkpoint    copy noise    digest of all weights
                             reload noise  digest of all weights

and if the digests are equal, copies. What a copy leaves out, puts elsewhere or does not derive still has the bytes of
the checkpoint in the first digest and those of the noise in the second.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import torch

from tensorhub_plugins.core.slab import Slab
from tensorhub_plugins.vllm import runtime

logger = logging.getLogger("vllm.tensorhub")  # vLLM's logging configuration only knows names below "vllm"

NOISE_LENGTH = 1_048_583  # elements; a prime, so that rows and blocks of a weight do not repeat with it
NOISE_STEP = 7_919  # between the noise of one tensor and that of the next

Shapes = dict[str, tuple[torch.dtype, torch.Size]]
Weights = Iterable[tuple[str, torch.Tensor]]


class Conversion:
    def __init__(self, model: torch.nn.Module, vllm_config: Any) -> None:
        self._model, self._vllm_config = model, vllm_config
        self._tried: Shapes | None = None  # the checkpoint with which copies were put to the test
        self._copies_are_right = False

    def install(self, weights: Mapping[str, torch.Tensor]) -> Literal["copy", "reload"]:
        """Replace all weights of the model by these, under their Hugging Face names. Says how.

        Raises UsageError as `runtime.reload_checkpoint` does; the model is mixed then.
        """
        shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in weights.items()}
        if self._tried != shapes:
            self._tried, self._copies_are_right = shapes, self._can_copy(shapes) and self._try(shapes, weights)
            how = "plain copies" if self._copies_are_right else "vLLM's reload"
            logger.info("checkpoints become live weights by %s", how)
        if self._copies_are_right:
            self._copy(weights.items())
            return "copy"
        self._reload(weights.items())
        return "reload"

    def _can_copy(self, shapes: Shapes) -> bool:
        targets = {name: target for name, target in self._targets().items() if name in shapes}
        return bool(targets) and all(
            target.shape == shapes[name][1] and shapes[name][0].is_floating_point for name, target in targets.items()
        )

    def _try(self, shapes: Shapes, weights: Mapping[str, torch.Tensor]) -> bool:
        """Leaves noise in the model."""
        self._reload(weights.items())
        try:
            self._copy(noise(shapes))
            copied = self._digest()
            self._reload(noise(shapes))
            return self._digest() == copied
        except Exception:
            logger.exception("copies were not put to the test")
            return False

    def _copy(self, weights: Weights) -> None:
        targets = self._targets()
        with torch.no_grad():
            for name, tensor in weights:
                if name in targets:
                    targets[name].copy_(tensor, non_blocking=True)
        runtime.wait_for_devices(target.device for target in targets.values())
        runtime.refresh_scalars(self._model)

    def _targets(self) -> dict[str, torch.Tensor]:
        """Where the tensors of a checkpoint would go; {} if copies are out of the question."""
        view = runtime.checkpoint_view(self._model, self._vllm_config) or {}
        return runtime.without_aliases(view)  # a tied head comes under the name of the embedding, which is first

    def _reload(self, weights: Weights) -> None:
        runtime.reload_checkpoint(self._model, self._vllm_config, weights)

    def _digest(self) -> bytes:
        return Slab.adopt(runtime.tensors(self._model)).manifest().root()


def noise(shapes: Shapes) -> Iterator[tuple[str, torch.Tensor]]:
    """A checkpoint of these names, dtypes and shapes, the same every time, whose tensors are unlike each other."""
    block = torch.randn(NOISE_LENGTH, generator=torch.Generator().manual_seed(0))
    endless = {dtype: torch.cat([block, block]).to(dtype) for dtype in {dtype for dtype, _ in shapes.values()}}
    for number, (name, (dtype, shape)) in enumerate(shapes.items()):
        first = number * NOISE_STEP % NOISE_LENGTH
        values = endless[dtype][first : first + min(NOISE_LENGTH, shape.numel())]
        if shape.numel() > NOISE_LENGTH:
            values = values.repeat(-(-shape.numel() // NOISE_LENGTH))[: shape.numel()]
        yield name, values.reshape(shape)
