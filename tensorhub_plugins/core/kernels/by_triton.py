"""The kernels. Importing them needs Triton, in whose interpreter (TRITON_INTERPRET=1) they run on the host."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

triton: Any = import_module("triton")
tl: Any = import_module("triton.language")

SEGMENTS_AT_ONCE = 4  # of one program: 32 lanes, a warp's threads


def lanes(addresses: torch.Tensor, table: torch.Tensor, out: torch.Tensor, count: int, blocks: int) -> None:
    """xxh3.lanes_of. addresses: int64[count] of segments. table: int64, first lanes, mixing words, keys of stripes.
    out: int64[8 * count]."""
    grid = (-(-count // SEGMENTS_AT_ONCE),)
    _lanes[grid](addresses, table, out, count, blocks, SEGMENTS_AT_ONCE, num_warps=1)


def copy(rows: torch.Tensor, count: int, word_size_bytes: int, piece_size_bytes: int) -> None:
    """moving.move. rows: int64[count, 3], from, to, size in words of 8 bytes or 1."""
    word = tl.int64 if word_size_bytes == 8 else tl.uint8
    _copy[(count,)](rows, word, piece_size_bytes // word_size_bytes, num_warps=4)


@triton.jit  # type: ignore[untyped-decorator]
def _lanes(addresses, table, out, count, blocks, AT_ONCE: tl.constexpr):  # type: ignore[no-untyped-def]
    segment = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    lives = segment < count
    lane = tl.arange(0, 8)
    stripe = tl.arange(0, 16)
    low_half = tl.full((1, 1, 1), 0xFFFFFFFF, tl.uint64)
    prime = tl.full((1, 1), 0x9E3779B1, tl.uint64)
    key = tl.load(table + 16 + stripe[:, None] * 8 + lane[None, :]).to(tl.uint64)
    mixing = tl.load(table + 8 + lane).to(tl.uint64)
    sums = tl.load(table + segment[:, None] * 0 + lane[None, :]).to(tl.uint64)
    words = tl.load(addresses + segment, mask=lives, other=0).to(tl.pointer_type(tl.int64))[:, None, None]
    mask = lives[:, None, None]
    for block in range(blocks):
        at = words + block * 128 + stripe[None, :, None] * 8
        word = tl.load(at + lane[None, None, :], mask=mask, other=0).to(tl.uint64)
        beside = tl.load(at + (lane ^ 1)[None, None, :], mask=mask, other=0).to(tl.uint64)
        keyed = word ^ key[None, :, :]
        sums += tl.sum(beside + (keyed & low_half) * (keyed >> 32), 1)
        sums = ((sums ^ (sums >> 47)) ^ mixing[None, :]) * prime
    tl.store(out + segment[:, None] * 8 + lane[None, :], sums.to(tl.int64), mask=lives[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _copy(rows, WORD: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    row = rows + tl.program_id(0) * 3
    at = tl.arange(0, SIZE)
    lives = at < tl.load(row + 2)
    source = tl.load(row).to(tl.pointer_type(WORD)) + at
    target = tl.load(row + 1).to(tl.pointer_type(WORD)) + at
    tl.store(target, tl.load(source, mask=lives), mask=lives)
