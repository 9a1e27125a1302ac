"""How the workers of one engine agree: each says a few bytes, and hears all of them in shard order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tensorhub_plugins.vllm.worker.fingerprint import group_of, parallel_ranks

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
    places = [place for place in ("tp", "pp", "dp") if ranks.get(f"{place}_size", 1) > 1]
    shard, stride = 0, 1
    for place in places:
        shard, stride = shard + ranks[place] * stride, stride * ranks[f"{place}_size"]

    def gather(message: bytes) -> list[bytes]:
        assert len(message) == VOTE_SIZE_BYTES
        rows = torch.frombuffer(bytearray(message), dtype=torch.uint8)[None]
        for place in places:
            rows = torch.cat(_all_gather(rows, group_of(place)))
        return [bytes(row.numpy()) for row in rows]

    return gather, shard


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


def first_name(gather: Gather, name: str) -> str:
    """What the engine's first worker is called, for all of them: on other hosts it may be called otherwise."""
    encoded = name.encode()
    chunks = [
        gather(_padded(encoded[start : start + VOTE_SIZE_BYTES]))[0]
        for start in range(0, first_says(gather, len(encoded)), VOTE_SIZE_BYTES)
    ]
    return b"".join(chunks).rstrip(b"\0").decode()


def _padded(message: bytes) -> bytes:
    return message.ljust(VOTE_SIZE_BYTES, b"\0")
