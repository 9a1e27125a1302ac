"""A checkpoint into a live model: by vLLM's layerwise reload, or by plain copies where those are shown to do the same.

The engine stands still for it. The reload works through every layer in Python. For an unquantized dense model on one
worker it comes down to writing each tensor where `weights.checkpoint_view` says that it is. But a model may rename,
permute and scale what it loads and derive more from it, and a reload may leave behind what it derived the first time.
So the first conversion of a checkpoint is a trial

    reload the checkpoint      state 1
    copy noise                 state 2, where copies are possible at all
    reload noise               state 3
    install the checkpoint     state 4

of the digests of all weights, and of every other tensor and number that hangs on the model (hidden.py).
    2 equals 3      copies do what a reload does: from now on they are used
    1 equals 4      an install leaves nothing of the version before, or the model is refused
    1 unlike 3      in every weight that is derived from others, or the model is refused
    hidden, 1 unlike 3      derived, and no part of a raw copy: raw copies are not traded with peers
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from tensorhub_plugins.core import UsageError, without_aliases
from tensorhub_plugins.core.log import get_logger
from tensorhub_plugins.vllm.worker import reload, weights
from tensorhub_plugins.vllm.worker.contract import Shapes, shapes_of, some
from tensorhub_plugins.vllm.worker.hidden import walk

logger = get_logger(__name__)

NOISE_LENGTH = 1_048_583  # elements; a prime, so that rows and blocks of a weight do not repeat with it
NOISE_STEP = 7_919  # between the noise of one tensor and that of the next

Weights = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class _State:
    """Digests, or values, by name."""

    weights: dict[str, str]
    hidden: dict[str, object]


class Conversion:
    """hidden: what the model computes with, follows its weights, and no raw copy would carry; known after a trial."""

    def __init__(self, model: torch.nn.Module, vllm_config: Any) -> None:
        self._model, self._vllm_config = model, vllm_config
        self._tried: Shapes | None = None  # the checkpoint that was put to the test
        self._copies_are_right = False
        self.hidden: tuple[str, ...] = ()

    def install(self, checkpoint: Mapping[str, torch.Tensor]) -> Literal["copy", "reload"]:
        """Replace all weights of the model by these, under their Hugging Face names. Says how.

        Raises whatever a loader raises, or UsageError for a model whose updates are shown to be wrong; its weights are
        mixed then.
        """
        shapes = shapes_of(checkpoint)
        if self._tried != shapes:
            self._try(shapes, checkpoint)
            self._tried = shapes
        else:
            self._install(checkpoint)
        return "copy" if self._copies_are_right else "reload"

    def _install(self, checkpoint: Mapping[str, torch.Tensor]) -> None:
        (self._copy if self._copies_are_right else self._reload)(checkpoint.items())

    def _try(self, shapes: Shapes, checkpoint: Mapping[str, torch.Tensor]) -> None:
        self._copies_are_right, self.hidden = False, ()
        self._reload(checkpoint.items())
        first, noisy = self._state(), None
        try:
            copied = None
            if self._can_copy(shapes):
                self._copy(noise(shapes, checkpoint))
                copied = self._state().weights
            self._reload(noise(shapes, checkpoint))
            noisy = self._state()
            self._copies_are_right = copied == noisy.weights
        except Exception:
            logger.exception("how this model follows updates was not put to the test, so raw copies are not traded")
        self._install(checkpoint)
        self._judge(first, noisy, self._state())
        how = "plain copies" if self._copies_are_right else "vLLM's reload"
        logger.info("checkpoints become live weights by %s", how)

    def _judge(self, first: _State, noisy: _State | None, last: _State) -> None:
        stale = _differ(first.weights, last.weights)
        if noisy is None:
            self.hidden = ("what has not been put to the test",)
        else:
            derived = reload.derived(self._model)
            stale += [name for name in derived if noisy.weights.get(name) == first.weights.get(name)]
            # What follows returns with the checkpoint, or lags one install behind; counters and scratch do neither.
            self.hidden = tuple(
                name
                for name in _differ(first.hidden, noisy.hidden)
                if last.hidden.get(name) in (first.hidden.get(name), noisy.hidden.get(name))
            )
        if stale:
            raise UsageError(
                f"{len(stale)} tensors of this model do not follow an update: {some(sorted(stale))}. It cannot be "
                "updated in place with this vLLM: start a new engine for every version"
            )
        if self.hidden:
            logger.info(
                "derived and kept beside the weights, so raw copies are not traded: %s", some(sorted(self.hidden))
            )

    def _can_copy(self, shapes: Shapes) -> bool:
        targets = {name: target for name, target in self._targets().items() if name in shapes}
        return bool(targets) and all(
            target.shape == shapes[name][1] and shapes[name][0].is_floating_point for name, target in targets.items()
        )

    def _copy(self, checkpoint: Weights) -> None:
        targets = self._targets()
        with torch.no_grad():
            for name, tensor in checkpoint:
                if name in targets:
                    targets[name].copy_(tensor, non_blocking=True)
        weights.wait_for_devices(target.device for target in targets.values())
        weights.refresh_scalars(self._model)

    def _targets(self) -> dict[str, torch.Tensor]:
        """Where the tensors of a checkpoint would go; {} if copies are out of the question."""
        view = weights.checkpoint_view(self._model, self._vllm_config) or {}
        return without_aliases(view)  # a tied head comes under the name of the embedding, which is first

    def _reload(self, checkpoint: Weights) -> None:
        reload.reload_checkpoint(self._model, self._vllm_config, checkpoint)

    def _state(self) -> _State:
        live = weights.tensors(self._model)
        own = {tensor.untyped_storage().data_ptr() for tensor in live.values()}
        hidden: dict[str, object] = {}
        for name, value in walk(self._model):
            if isinstance(value, torch.Tensor):
                if value.untyped_storage().data_ptr() not in own:
                    hidden[name] = weights.digest(value.contiguous())
            elif not weights.is_refreshed(name):
                hidden[name] = repr(value)  # NaN is equal to itself there
        return _State({name: weights.digest(tensor) for name, tensor in live.items()}, hidden)


def _differ(one: Mapping[str, object], other: Mapping[str, object]) -> list[str]:
    return [name for name in one.keys() | other.keys() if one.get(name) != other.get(name)]


def noise(shapes: Shapes, checkpoint: Mapping[str, torch.Tensor] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """A checkpoint of these names, dtypes and shapes, the same every time, whose tensors are unlike each other.

    Of `checkpoint`, whole numbers stay as they are: they may be indices.
    """
    block = torch.randn(NOISE_LENGTH, generator=torch.Generator().manual_seed(0))
    endless = {dtype: torch.cat([block, block]).to(dtype) for dtype in {dtype for dtype, _ in shapes.values()}}
    for number, (name, (dtype, shape)) in enumerate(shapes.items()):
        if checkpoint is not None and not dtype.is_floating_point:
            yield name, checkpoint[name]
            continue
        first = number * NOISE_STEP % NOISE_LENGTH
        values = endless[dtype][first : first + min(NOISE_LENGTH, shape.numel())]
        if shape.numel() > NOISE_LENGTH:
            values = values.repeat(-(-shape.numel() // NOISE_LENGTH))[: shape.numel()]
        yield name, values.reshape(shape)
