"""The kernels. Importing them needs Triton, in whose interpreter (TRITON_INTERPRET=1) they run on the host."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

triton: Any = import_module("triton")
tl: Any = import_module("triton.language")

SEGMENTS_AT_ONCE = 4  # for one program: 32 lanes, a warp's threads
BLOCKS_AT_ONCE = 4  # of one program, or of one round of it: 4 KiB, 32 bytes for each of 128 threads
BLOCK_ELEMENTS = 512  # of bfloat16


def lanes(addresses: torch.Tensor, table: torch.Tensor, out: torch.Tensor, count: int, blocks: int) -> None:
    """Queue xxh3.lanes_of. addresses: int64[count], of the segments. table: int64, initial lanes, mixing words, keys of
    stripes. out: int64[8 * count]."""
    grid = (-(-count // SEGMENTS_AT_ONCE),)
    _lanes[grid](addresses, table, out, count, blocks, SEGMENTS_AT_ONCE, num_warps=1)


def copy(rows: torch.Tensor, count: int, word_size_bytes: int, piece_size_bytes: int) -> None:
    """Queue moving.move. rows: int64[count, 3]: source address, target address, size in words of 8 bytes or 1."""
    word = tl.int64 if word_size_bytes == 8 else tl.uint8
    _copy[(count,)](rows, word, piece_size_bytes // word_size_bytes, num_warps=4)


def cast(source: torch.Tensor, table: torch.Tensor, target: torch.Tensor, sums: torch.Tensor, head: int) -> None:
    """Queue casting.cast_at. source: int32, target: int16, one for each element. sums: int64[8 * whole blocks]. head:
    the number of elements before the first whole block. table: as of `lanes`."""
    first = -1 if head else 0  # that one is not whole
    grid = (triton.cdiv(triton.cdiv(len(source) - head, BLOCK_ELEMENTS) - first, BLOCKS_AT_ONCE),)
    _cast[grid](source, table, target, sums, head, len(source), first, len(sums) // 8, BLOCKS_AT_ONCE, num_warps=4)


def sum_up(rows: torch.Tensor, count: int, table: torch.Tensor) -> None:
    """Queue casting.sum_up. rows: int64[count, 3]: source address, target address, number of blocks."""
    _sum_up[(count,)](rows, table, BLOCKS_AT_ONCE, num_warps=4)


def mix(sums: torch.Tensor, table: torch.Tensor, out: torch.Tensor, count: int) -> None:
    """Queue casting.mix. sums: int64, 8 a block, of `count` segments. out: int64[8 * count]."""
    _mix[(triton.cdiv(count, SEGMENTS_AT_ONCE),)](
        sums, table, out, count, len(sums) // len(out), SEGMENTS_AT_ONCE, num_warps=1
    )


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
    for block in tl.range(0, blocks, num_stages=4):  # or each round would wait for memory
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


@triton.jit
def _sums_of(word, table):  # type: ignore[no-untyped-def]
    """Return uint64[blocks, 8]: what blocks of 16 stripes of 8 words add to the lanes."""
    lane = tl.arange(0, 8)
    stripe = tl.arange(0, 16)
    key = tl.load(table + 16 + stripe[:, None] * 8 + lane[None, :]).to(tl.uint64)
    keyed = word ^ key[None, :, :]
    own = tl.sum((keyed & tl.full((1, 1, 1), 0xFFFFFFFF, tl.uint64)) * (keyed >> 32), 1)
    plain = tl.sum(word, 1)
    is_beside = (lane[:, None] ^ 1) == lane[None, :]
    return own + tl.sum(tl.where(is_beside[None, :, :], plain[:, None, :], tl.full((1, 1, 1), 0, tl.uint64)), 2)


@triton.jit  # type: ignore[untyped-decorator]
def _cast(source, table, target, sums, head, count, first, whole, AT_ONCE: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.program_id(0).to(tl.int64) * AT_ONCE + tl.arange(0, AT_ONCE) + first
    lane = tl.arange(0, 8)
    stripe = tl.arange(0, 16)
    place = tl.arange(0, 4)
    of_block = stripe[:, None, None] * 32 + lane[None, :, None] * 4 + place[None, None, :]
    at = head + block[:, None, None, None] * 512 + of_block[None, :, :, :]
    lives = (at >= 0) & (at < count)
    bits = tl.load(source + at, mask=lives, other=0).to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    half = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)
    tl.store(target + at, half.to(tl.int16), mask=lives)
    word = tl.sum(half.to(tl.uint64) << (place * 16).to(tl.uint64)[None, None, None, :], 3)
    found = _sums_of(word, table).to(tl.int64)
    is_whole = (block >= 0) & (block < whole)
    tl.store(sums + block[:, None] * 8 + lane[None, :], found, mask=is_whole[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _sum_up(rows, table, AT_ONCE: tl.constexpr):  # type: ignore[no-untyped-def]
    row = rows + tl.program_id(0) * 3
    source = tl.load(row).to(tl.pointer_type(tl.int64))
    target = tl.load(row + 1).to(tl.pointer_type(tl.int64))
    count = tl.load(row + 2)
    lane = tl.arange(0, 8)
    stripe = tl.arange(0, 16)
    for first in range(0, count, AT_ONCE):
        block = first + tl.arange(0, AT_ONCE)
        lives = block < count
        at = block[:, None, None] * 128 + stripe[None, :, None] * 8 + lane[None, None, :]
        word = tl.load(source + at, mask=lives[:, None, None], other=0).to(tl.uint64)
        tl.store(target + block[:, None] * 8 + lane[None, :], _sums_of(word, table).to(tl.int64), mask=lives[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _mix(sums, table, out, count, blocks, AT_ONCE: tl.constexpr):  # type: ignore[no-untyped-def]
    segment = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    lives = (segment < count)[:, None]
    lane = tl.arange(0, 8)
    prime = tl.full((1, 1), 0x9E3779B1, tl.uint64)
    mixing = tl.load(table + 8 + lane).to(tl.uint64)[None, :]
    lanes = tl.load(table + segment[:, None] * 0 + lane[None, :]).to(tl.uint64)
    at = sums + segment.to(tl.int64)[:, None] * blocks * 8 + lane[None, :]
    for block in tl.range(0, blocks - 1, num_stages=4):
        lanes += tl.load(at + block * 8, mask=lives, other=0).to(tl.uint64)
        lanes = ((lanes ^ (lanes >> 47)) ^ mixing) * prime
    tl.store(out + segment[:, None] * 8 + lane[None, :], lanes.to(tl.int64), mask=lives)
