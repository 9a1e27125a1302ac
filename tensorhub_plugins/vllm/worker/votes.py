"""How the workers of one engine agree: each says a few bytes, and hears all of them in shard order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tensorhub_plugins.vllm.worker.fingerprint import parallel_ranks

VOTE_SIZE_BYTES = 32  # a fingerprint, a version and a verdict, or a number

Gather = Callable[[bytes], list[bytes]]  # one VOTE_SIZE_BYTES message per worker of the engine, in shard order


@dataclass(frozen=True)
class ShardPosition:
    """Which part of which replica this worker is, and the runtime layout of that replica."""

    shard: int
    shard_count: int
    layout: str


def engine_gather(vllm_config: Any) -> tuple[Gather, int]:
    """All-gather of one small message over the workers of this engine, in shard order; and this worker's shard."""
    ranks = parallel_ranks(vllm_config)
    if ranks["tp_size"] * ranks["pp_size"] == 1:
        return lambda message: [message], 0
    from vllm.distributed import get_pp_group, get_tp_group

    def gather(message: bytes) -> list[bytes]:
        assert len(message) == VOTE_SIZE_BYTES
        mine = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        tensor_parallel = _all_gather(mine, get_tp_group())
        everyone = _all_gather(torch.stack(tensor_parallel), get_pp_group())
        return [bytes(row.numpy()) for stage in everyone for row in stage]

    return gather, ranks["pp"] * ranks["tp_size"] + ranks["tp"]


def _all_gather(tensor: torch.Tensor, group: Any) -> list[torch.Tensor]:
    gathered = [torch.empty_like(tensor) for _ in range(group.world_size)]
    torch.distributed.all_gather(gathered, tensor, group=group.cpu_group)
    return gathered


def all_willing(gather: Gather, version: int, willing: bool) -> bool:
    """Whether every worker is willing, for the same version."""
    votes = gather(_padded(version.to_bytes(8, "big") + bytes([willing])))
    return willing and all(vote == votes[0] for vote in votes)


def anyone(gather: Gather, here: bool) -> bool:
    """Whether it is so in any worker."""
    return any(vote[0] for vote in gather(_padded(bytes([here]))))


def first_says(gather: Gather, number: int) -> int:
    """What the engine's first worker says, for all of them."""
    return int.from_bytes(gather(_padded(number.to_bytes(8, "big")))[0][:8], "big")


def _padded(message: bytes) -> bytes:
    return message.ljust(VOTE_SIZE_BYTES, b"\0")
