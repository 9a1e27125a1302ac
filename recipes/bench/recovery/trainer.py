"""What a trainer does with its weights: one rank, by its checkpoint and by the store."""

from __future__ import annotations

from typing import Any

import torch

from tensorhub_plugins.core import Client, Held, Publisher, Recovery, contiguous_spec

TENSOR_SIZE_BYTES = 16_000_000
TIMEOUT_S = 300.0


def made(mb: int) -> dict[str, torch.Tensor]:
    count = max(1, mb * 1_000_000 // TENSOR_SIZE_BYTES)
    return {f"w{number}": torch.randn(TENSOR_SIZE_BYTES // 2).bfloat16() for number in range(count)}


def recovery(client: Client, weights: dict[str, torch.Tensor]) -> Recovery:
    held = [Held(contiguous_spec(name, each.dtype, each.shape), each) for name, each in weights.items()]
    publisher = Publisher(client, rank=0, ranks=1, worker="trainer/0", keep=1, timeout_s=TIMEOUT_S)
    return Recovery(
        publisher, "resumed_step", weights=lambda: held, held=lambda: held, by_parts=True, gather=lambda word: [word]
    )


def load(file: Any, parameters: dict[str, torch.Tensor]) -> None:
    """Put the weights of a checkpoint, a path or an open file, into these parameters."""
    copy(torch.load(file, weights_only=False), parameters)


def copy(weights: dict[str, torch.Tensor], into: dict[str, torch.Tensor]) -> None:
    for name, tensor in weights.items():
        into[name].copy_(tensor)
