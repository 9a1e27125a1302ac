"""Noise to load instead of a checkpoint: views of one block, as memory of its own for each tensor would be a pass over
what the worker takes, while the engine stands still."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tensorhub_plugins.core import copy_all
from tensorhub_plugins.core.log import get_logger

logger = get_logger(__name__)

NOISE_LENGTH = 1_048_583  # elements; a prime, so that rows and blocks of a weight do not repeat with it
NOISE_STEP = 7_919  # offset between the noise of one tensor and of the next


class Noise:
    """Blocks of noise, the same every time, of which tensors are views."""

    def __init__(self, lengths: Iterable[tuple[torch.dtype, int]], device: torch.device) -> None:
        """Make them long enough for tensors of these dtypes and lengths, on this device if it has room."""
        longest: dict[torch.dtype, int] = {}
        for dtype, length in lengths:
            longest[dtype] = max(longest.get(dtype, 0), length)
        values = torch.randn(NOISE_LENGTH, generator=torch.Generator().manual_seed(0))
        self._blocks: dict[torch.dtype, torch.Tensor] = {}
        for dtype, length in longest.items():
            try:
                self._blocks[dtype] = _repeated(values.to(dtype), NOISE_LENGTH + length, device)
            except torch.OutOfMemoryError:
                logger.debug("no room for %d numbers of noise on %s", length, device)
                self._blocks[dtype] = _repeated(values.to(dtype), NOISE_LENGTH + length, values.device)

    def of(self, number: int, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
        """Return a contiguous tensor, for each number another. Do not write into it: others are views of its memory."""
        first = number * NOISE_STEP % NOISE_LENGTH
        return self._blocks[dtype][first : first + shape.numel()].view(shape)


def _repeated(values: torch.Tensor, length: int, device: torch.device) -> torch.Tensor:
    block = torch.empty(length, dtype=values.dtype, device=device)
    copy_all((part, values[: len(part)]) for part in torch.split(block, len(values)))
    return block
