"""Agreement among the workers of one engine: each sends a few bytes, and receives all of them in shard order.

votes: once before an install and once after it; all workers install, or none does. Steps: in between, where a reload of
weights that ranks share has them wait for each other (vLLM's online quantization makes one scale of the largest element
on any rank).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tensorhub_plugins.core import TensorHubError
from tensorhub_plugins.vllm.worker.fingerprint import group_of, parallel_ranks

VOTE_SIZE_BYTES = 32  # a fingerprint, a version and a verdict, or a number
STAGE = ("tp", "dp")  # the groups of ranks that share the weights of one pipeline stage

Gather = Callable[[bytes], list[bytes]]  # one VOTE_SIZE_BYTES message per worker of the engine, in shard order


@dataclass(frozen=True)
class ShardPosition:
    """The part of a replica that this worker is, and the runtime layout of that replica."""

    shard: int
    shard_count: int
    layout: str


def engine_gather(vllm_config: Any) -> tuple[Gather, int]:
    """Return an all-gather of a small message over this engine's workers, in shard order; and our shard."""
    ranks = parallel_ranks(vllm_config)
    shard, count = 0, 1
    for place in (*STAGE, "pp"):
        shard += count * ranks.get(place, 0)
        count *= ranks.get(f"{place}_size", 1)
    return (lambda message: _in_engine(_in_stage(message))) if count > 1 else (lambda message: [message]), shard


def _in_stage(message: bytes) -> torch.Tensor:
    """Return one row for each rank of this worker's stage."""
    if len(message) != VOTE_SIZE_BYTES:
        raise AssertionError(f"a vote of {len(message)} bytes")
    rows = torch.frombuffer(bytearray(message), dtype=torch.uint8)[None]
    for place in STAGE:
        rows = _all_gather(rows, group_of(place))
    return rows


def _in_engine(of_stage: torch.Tensor) -> list[bytes]:
    return [bytes(row.numpy()) for row in _all_gather(of_stage, group_of("pp"))]


class OutOfStep(TensorHubError):
    """Another worker of this engine has failed, or does something else: fetch and install a version again."""


class Steps:
    """The coordination of one engine's workers: votes, and what the ranks of a stage do together in between.

    A rank that fails there skips to its vote. The others receive that vote in their next step, which raises OutOfStep,
    and send nothing more. So no rank waits for a missing one, and no vote is mistaken for another."""

    def __init__(self, gather: Gather, *, together: bool) -> None:
        """Begin before a vote. together: whether there are such steps; if not, workers go on alone between votes."""
        self._gather, self.together = gather, together
        self._heard = False  # the next vote was received in a step

    def vote(self, version: int, willing: bool, way: str = "") -> bool:
        """Return whether every worker is willing, for the same version; and by the same way, if there are steps."""
        heard, self._heard = self._heard, False
        return not heard and all_willing(self._gather, version, willing, way if self.together else "")

    def all(self, what: str, here: bool = True) -> bool:
        """Return whether it is true in all ranks; without steps, here. Raise OutOfStep unless all ask the same."""
        if not self.together:
            return here
        if not self._heard:
            asks = b"step" + hashlib.sha256(what.encode()).digest()[:16]
            votes = _in_stage(_padded(asks + bytes([here])))
            answers = [bytes(vote.numpy()) for vote in votes]
            if all(answer.startswith(asks) for answer in answers):
                return all(answer[len(asks)] for answer in answers)
            self._heard = True
            _in_engine(votes)  # other stages wait for the votes of this one
        raise OutOfStep(f"another worker of this engine has failed, or is not at {what} as this one is")


ALONE = Steps(lambda message: [message], together=False)


def _all_gather(rows: torch.Tensor, group: Any) -> torch.Tensor:
    if group.world_size == 1:
        return rows
    gathered = [torch.empty_like(rows) for _ in range(group.world_size)]
    torch.distributed.all_gather(gathered, rows, group=group.cpu_group)
    return torch.cat(gathered)


def all_willing(gather: Gather, version: int, willing: bool, way: str = "") -> bool:
    """Return whether every worker is willing, for the same version, by the same way."""
    votes = gather(_padded(version.to_bytes(8, "big") + bytes([willing]) + hashlib.sha256(way.encode()).digest()[:16]))
    return willing and all(vote == votes[0] for vote in votes)


def anyone(gather: Gather, here: bool) -> bool:
    """Return whether it is true in any worker."""
    return any(vote[0] for vote in gather(_padded(bytes([here]))))


def first_says(gather: Gather, number: int) -> int:
    """Return the number of the engine's first worker, in all of them."""
    return int.from_bytes(gather(_padded(number.to_bytes(8, "big")))[0][:8], "big")


def first_name(gather: Gather, name: str) -> str:
    """Return the name of the engine's first worker, in all of them: workers on other hosts may have another."""
    encoded = name.encode()
    chunks = [
        gather(_padded(encoded[start : start + VOTE_SIZE_BYTES]))[0]
        for start in range(0, first_says(gather, len(encoded)), VOTE_SIZE_BYTES)
    ]
    return b"".join(chunks).rstrip(b"\0").decode()


def _padded(message: bytes) -> bytes:
    return message.ljust(VOTE_SIZE_BYTES, b"\0")
