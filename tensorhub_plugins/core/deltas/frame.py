"""A chain of deltas on the wire: for each the digest of the bytes that it starts from, its size, and the delta."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from tensorhub_plugins.core.digests import DIGEST_SIZE_BYTES

CHAIN_MAX = 4  # deltas, one after the other, instead of one that is not there
HEAD = struct.Struct(f"!{DIGEST_SIZE_BYTES}sI")


class Step(NamedTuple):
    """One delta of a chain, and the digest of the bytes that it starts from."""

    base: bytes
    delta: bytes


def frame_of(steps: Sequence[Step]) -> list[bytes]:
    """Return the parts of the frame of a chain."""
    return [part for step in steps for part in (HEAD.pack(step.base, len(step.delta)), step.delta)]


def steps_of(frame: memoryview) -> list[Step]:
    """Return the chain of a frame, 1 to CHAIN_MAX deltas. Raise ValueError."""
    steps: list[Step] = []
    while len(frame) >= HEAD.size and len(steps) < CHAIN_MAX:
        base, size_bytes = HEAD.unpack_from(frame)
        frame = frame[HEAD.size :]
        if size_bytes > len(frame):
            break
        steps.append(Step(base, bytes(frame[:size_bytes])))
        frame = frame[size_bytes:]
    if frame or not steps:
        raise ValueError("a frame that is no chain of deltas")
    return steps


def links_of(steps: Sequence[Step], wanted: bytes) -> list[tuple[bytes, bytes]]:
    """Return what each delta of a chain turns into what, as digests. wanted: what the last one makes."""
    return list(zip((step.base for step in steps), [*(step.base for step in steps[1:]), wanted], strict=True))
