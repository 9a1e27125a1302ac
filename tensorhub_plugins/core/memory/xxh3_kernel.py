"""The kernel of xxh3.py. Importing it needs Triton, in whose interpreter (TRITON_INTERPRET=1) it runs on the host."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import torch

from tensorhub_plugins.core.memory.xxh3 import LANES, secret_words

triton: Any = import_module("triton")
tl: Any = import_module("triton.language")

SEGMENTS_AT_ONCE = 4  # of one program: 32 lanes, a warp's threads
STRIPES = 16  # of a block
SECRET_OF_MIXING = 128


def lanes_of_blocks(words: torch.Tensor, count: int, step: int, blocks: int) -> torch.Tensor:
    """int64[count, 8]: the lanes of each segment after so many whole blocks. words: int64, the memory of all segments;
    step: words from one segment to the next."""
    out = torch.empty(count, len(LANES), dtype=torch.int64, device=words.device)
    constants = np.concatenate([np.array(LANES, np.uint64), secret_words(SECRET_OF_MIXING, len(LANES))])
    keys = np.stack([secret_words(8 * stripe, len(LANES)) for stripe in range(STRIPES)])
    table = torch.from_numpy(np.concatenate([constants, keys.reshape(-1)]).view(np.int64))
    on_words = torch.empty_like(table, device=words.device)
    on_words.copy_(table)
    grid = (-(-count // SEGMENTS_AT_ONCE),)
    _blocks[grid](words, on_words, out, count, step, blocks, SEGMENTS_AT_ONCE, num_warps=1)
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _blocks(words, table, out, count, step, blocks, AT_ONCE: tl.constexpr):  # type: ignore[no-untyped-def]
    segment = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    lives = segment < count
    lane = tl.arange(0, 8)
    stripe = tl.arange(0, 16)
    low_half = tl.full((1, 1, 1), 0xFFFFFFFF, tl.uint64)
    prime = tl.full((1, 1), 0x9E3779B1, tl.uint64)
    key = tl.load(table + 16 + stripe[:, None] * 8 + lane[None, :]).to(tl.uint64)
    mixing = tl.load(table + 8 + lane).to(tl.uint64)
    sums = tl.load(table + segment[:, None] * 0 + lane[None, :]).to(tl.uint64)
    start = segment.to(tl.int64) * step
    for block in range(blocks):
        at = start[:, None, None] + block * 128 + stripe[None, :, None] * 8
        word = tl.load(words + at + lane[None, None, :], mask=lives[:, None, None], other=0).to(tl.uint64)
        beside = tl.load(words + at + (lane ^ 1)[None, None, :], mask=lives[:, None, None], other=0).to(tl.uint64)
        keyed = word ^ key[None, :, :]
        sums += tl.sum(beside + (keyed & low_half) * (keyed >> 32), 1)
        sums = ((sums ^ (sums >> 47)) ^ mixing[None, :]) * prime
    tl.store(out + segment[:, None] * 8 + lane[None, :], sums.to(tl.int64), mask=lives[:, None])
