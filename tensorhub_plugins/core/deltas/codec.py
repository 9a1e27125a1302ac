"""A segment encoded as what has changed since an earlier one of the same size, exactly. No state, no clock, no thread.

An optimizer step moves a small share of the elements, and most of these by one in the last place. So what is encoded is
where elements differ, and by how much as integers: the raw bits, new - old modulo 2**bits, zigzag (0, -1, 1, -2, ...).

    segment   its spans, one after the other. Both ends know them: they follow from the table of tensors
    span      mode (one byte); UNCHANGED: nothing more; VERBATIM: the new bytes; else positions, steps, large steps
    positions GAPS: before each changed element, how many did not change, in bytes of which 255 adds 255 and goes on.
              BITMAP, where much has changed: a bit for each element, the lowest of a byte first
    steps     four bits for each changed element, the lower ones of a byte first; 15: it is in the large steps
    large     the steps from 15 on, as many planes as an element has bytes, the lowest byte of each first
    stream    each of these: the size as a varint of size * 2 + 1 if deflated, else size * 2; bytes

The hot loops have two forms, numpy here and C in native.py, which make and take the same bytes. What is decoded may be
anything: nothing is allocated or written beyond the size of the segment, and what cannot be is a ValueError. Then the
target is mixed; and whether the base was the right one, only the digest of the result shows.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

fast_zlib: Any = zlib
with contextlib.suppress(ImportError):  # the same format, several times faster; some platforms have no wheels of it
    fast_zlib = import_module("isal.isal_zlib")

Bytes: TypeAlias = "npt.NDArray[np.uint8]"
Elements: TypeAlias = "npt.NDArray[Any]"

WORTH = 0.5  # of the segment's size: a larger delta is not made
BITMAP_FROM = 0.2  # share of changed elements from which a bit for each is smaller, or as small and faster
UNCHANGED, GAPS, BITMAP, VERBATIM = range(4)
SIZES = (8, 4, 2, 1)  # of elements, in bytes
UNSIGNED: dict[int, np.dtype[Any]] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
SMALL = 15  # steps below it take four bits
GAP_MAX = 255
SAMPLES, SAMPLE = 16, 256  # pieces that are looked at first, and the elements of each
DEFLATE_FROM = 64  # bytes: less is not made smaller by codes of its own
FAST_FROM = 1 << 14  # bytes of positions: less takes little time anyway, and is smaller without references
STEPS_FAST_FROM = 3 << 13  # bytes of steps: more take half the time with references, and are a fifth larger
SPANS_MAX = 64  # more, of thousands of tiny tensors of several kinds, take longer than they save: then all are bytes
BLOCK = 1 << 16  # elements that numpy compares at a time: they stay in the cache


class Span(NamedTuple):
    """A range of a segment, in bytes, whose elements have one size."""

    start: int
    stop: int
    element_size: int


class Streams(NamedTuple):
    """What differs between two arrays of elements."""

    positions: Bytes
    steps: Bytes  # two in each
    large: Elements


class Kernel(Protocol):
    """The loops over elements. Arrays are contiguous, and may be unaligned."""

    def difference(self, old: Elements, new: Elements, *, bitmap: bool) -> Streams:
        """Return what differs between these arrays of one size."""

    def apply(self, target: Elements, streams: Streams, *, bitmap: bool) -> None:
        """Change the target in place. Raise ValueError for streams that are not of an array of this size."""


def encode(old: Bytes, new: Bytes, spans: Sequence[Span], kernel: Kernel) -> bytes | None:
    """Return the delta from `old` to `new`; None: it is not worth it. spans: all of both, in order."""
    most = WORTH * new.size
    pairs = [
        (old[start:stop].view(UNSIGNED[size]), new[start:stop].view(UNSIGNED[size])) for start, stop, size in spans
    ]
    estimates = [_estimate(*pair) for pair in pairs]
    if sum(size_bytes for _, size_bytes in estimates) > 1.1 * most:  # a sample shows it, in microseconds
        return None
    made = b""
    for pair, (share, _) in zip(pairs, estimates, strict=True):
        made += b"".join(_encode_span(*pair, bitmap=share >= BITMAP_FROM, kernel=kernel))
        if len(made) > most:
            return None
    return made


def apply(target: Bytes, delta: bytes | bytearray | memoryview, spans: Sequence[Span], kernel: Kernel) -> None:
    """Turn the bytes that the delta was made from into those that it was made for, in place. Raise ValueError."""
    rest = memoryview(delta)
    for start, stop, size in spans:
        if not rest:
            raise ValueError("it ends too early")
        rest = _apply_span(target[start:stop], rest[0], rest[1:], size, kernel)
    if rest:
        raise ValueError(f"{len(rest)} bytes too many")


def spans_of(pieces: Iterable[tuple[int, int, int]], size_bytes: int) -> list[Span]:
    """Return the spans of a segment of so many bytes. pieces: of each tensor in it, in order, where it begins and ends
    in the segment (below 0 and above the size, where it goes on) and the size of its elements, or of what they are
    made of. Elements that the segment's ends cut are bytes."""
    spans: list[Span] = []
    for first, last, whole in pieces:
        size = next(each for each in SIZES if whole % each == 0) if whole else 1
        start, stop = max(first, 0), min(last, size_bytes)
        if start >= stop:
            continue
        inner_start = start + -(start - first) % size
        inner_stop = stop - (stop - first) % size
        if inner_start >= inner_stop:
            _add(spans, start, stop, 1)
            continue
        _add(spans, start, inner_start, 1)
        _add(spans, inner_start, inner_stop, size)
        _add(spans, inner_stop, stop, 1)
    return spans if len(spans) <= SPANS_MAX else [Span(0, size_bytes, 1)]


def _add(spans: list[Span], start: int, stop: int, size: int) -> None:
    if start == stop:
        return
    if spans and spans[-1].element_size == size:
        spans[-1] = Span(spans[-1].start, stop, size)
    else:
        spans.append(Span(start, stop, size))


# --- one span ---


def _encode_span(old: Elements, new: Elements, *, bitmap: bool, kernel: Kernel) -> Iterator[bytes]:
    positions, steps, large = kernel.difference(old, new, bitmap=bitmap)
    if not steps.size:
        yield bytes([UNCHANGED])
        return
    streams = [_packed(positions), _packed(steps, fast_from=STEPS_FAST_FROM)]
    streams += [_packed(plane) for plane in _planes(large)]
    if sum(map(len, streams)) >= new.nbytes:
        yield bytes([VERBATIM]) + new.tobytes()
        return
    yield bytes([BITMAP if bitmap else GAPS])
    yield from streams


def _apply_span(target: Bytes, mode: int, rest: memoryview, size: int, kernel: Kernel) -> memoryview:
    if mode == UNCHANGED:
        return rest
    if mode == VERBATIM:
        if len(rest) < target.size:
            raise ValueError("new bytes are missing")
        target[:] = np.frombuffer(rest[: target.size], np.uint8)
        return rest[target.size :]
    if mode not in (GAPS, BITMAP):
        raise ValueError(f"there is no mode {mode}")
    elements = target.view(UNSIGNED[size])
    count = elements.size
    positions, rest = _unpacked(rest, -(-count // 8) if mode == BITMAP else count + count // GAP_MAX + 1)
    steps, rest = _unpacked(rest, -(-count // 2))
    planes = []
    for _ in range(size):
        plane, rest = _unpacked(rest, 2 * steps.size)
        planes.append(plane)
    if len({plane.size for plane in planes}) != 1:
        raise ValueError("planes of unequal sizes")
    large = np.ascontiguousarray(np.stack(planes, axis=1)).reshape(-1).view(UNSIGNED[size])
    kernel.apply(elements, Streams(positions, steps, large), bitmap=mode == BITMAP)
    return rest


def _estimate(old: Elements, new: Elements) -> tuple[float, float]:
    """Return the share of elements that have changed, and about how many bytes a delta takes, from a sample of them."""
    count = old.size
    if count > SAMPLES * SAMPLE:
        step = (count - SAMPLE) // (SAMPLES - 1)
        wanted = (np.arange(SAMPLES)[:, None] * step + np.arange(SAMPLE)).reshape(-1)
        old, new = old[wanted], new[wanted]
    steps = _zigzag(new[changed := old != new] - old[changed])
    share = steps.size / max(1, old.size)
    if not steps.size:
        return 0.0, 1.0
    large = steps[steps >= SMALL]
    bits = steps.size * _entropy(np.bincount(np.minimum(steps, SMALL).astype(np.uint8)))
    bits += large.size * sum(_entropy(np.bincount(plane)) for plane in _planes(large))
    bits += old.size * _entropy(np.array([steps.size, old.size - steps.size]))
    return share, bits / 8 * count / old.size


def _planes(large: Elements) -> Bytes:
    return np.ascontiguousarray(large.view(np.uint8).reshape(-1, large.dtype.itemsize).T)


def _entropy(counts: npt.NDArray[Any]) -> float:
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


# --- streams of bytes ---


def _packed(stream: Bytes, *, fast_from: int = FAST_FROM) -> bytes:
    """Return a stream as it is written. fast_from: the bytes from which the faster way is worth its larger result."""
    if stream.size >= DEFLATE_FROM:
        if fast_zlib is zlib or stream.size < fast_from:
            deflate: Any = zlib.compressobj(1, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
        else:
            deflate = fast_zlib.compressobj(1, zlib.DEFLATED, -15)
        made: bytes = deflate.compress(stream.data) + deflate.flush()
        if len(made) < stream.size:
            return _varint(len(made) * 2 + 1) + made
    return _varint(stream.size * 2) + stream.tobytes()


def _unpacked(rest: memoryview, size_max: int) -> tuple[Bytes, memoryview]:
    """Return the next stream, of at most so many bytes, and what follows it."""
    head, rest = _read_varint(rest)
    length, deflated = head // 2, head % 2
    if length > len(rest):
        raise ValueError("a stream is cut off")
    body, rest = rest[:length], rest[length:]
    if not deflated:
        if length > size_max:
            raise ValueError("a stream is too long")
        return np.frombuffer(body, np.uint8), rest
    inflate = fast_zlib.decompressobj(-15)
    try:
        made = inflate.decompress(body, size_max + 1)
    except fast_zlib.error as error:
        raise ValueError(str(error)) from error
    if len(made) > size_max or not inflate.eof or inflate.unused_data:
        raise ValueError("a stream is too long, or cut off")
    return np.frombuffer(made, np.uint8), rest


def _varint(number: int) -> bytes:
    made = bytearray()
    while number >= 128:
        made.append(number & 127 | 128)
        number >>= 7
    made.append(number)
    return bytes(made)


def _read_varint(rest: memoryview) -> tuple[int, memoryview]:
    number = 0
    for place in range(min(len(rest), 5)):
        number |= (rest[place] & 127) << 7 * place
        if rest[place] < 128:
            return number, rest[place + 1 :]
    raise ValueError("a size is cut off")


# --- the loops, by numpy ---


class NumpyKernel:
    """The loops by numpy: everywhere there, and the measure for the native ones."""

    def difference(self, old: Elements, new: Elements, *, bitmap: bool) -> Streams:
        if bitmap:
            changed = old != new
            positions = np.packbits(changed, bitorder="little")
            at = np.flatnonzero(changed)
        else:
            at = _differing(old, new)
            positions = _gaps(at)
        steps = _zigzag(new[at] - old[at])
        small = np.zeros(steps.size + steps.size % 2, np.uint8)
        small[: steps.size] = np.minimum(steps, SMALL)
        return Streams(positions, small[::2] | small[1::2] * np.uint8(16), steps[steps >= SMALL])

    def apply(self, target: Elements, streams: Streams, *, bitmap: bool) -> None:
        positions, pairs, large = streams
        at = _set_bits(positions, target.size) if bitmap else _after_gaps(positions, target.size)
        both = np.stack([pairs & SMALL, pairs >> 4], axis=1).reshape(-1)
        small = both[: at.size]
        if both.size != at.size + at.size % 2 or both[at.size :].any():
            raise ValueError("positions and steps differ in number")
        if int(np.count_nonzero(small == SMALL)) != large.size:
            raise ValueError("steps and large steps differ in number")
        steps = small.astype(target.dtype)
        steps[small == SMALL] = large
        target[at] += _unzigzag(steps)


def _differing(old: Elements, new: Elements) -> npt.NDArray[np.int64]:
    found = [
        np.flatnonzero(old[start : start + BLOCK] != new[start : start + BLOCK]) + start
        for start in range(0, old.size, BLOCK)
    ]
    return np.concatenate(found) if found else np.empty(0, np.int64)


def _zigzag(steps: Elements) -> Elements:
    bits = 8 * steps.dtype.itemsize
    sign = steps >> steps.dtype.type(bits - 1)
    zigzag: Elements = (steps << steps.dtype.type(1)) ^ (~sign + steps.dtype.type(1))
    return zigzag


def _unzigzag(steps: Elements) -> Elements:
    one = steps.dtype.type(1)
    straight: Elements = (steps >> one) ^ (~(steps & one) + one)
    return straight


def _gaps(at: npt.NDArray[np.int64]) -> Bytes:
    gaps = np.diff(at, prepend=-1) - 1
    if not gaps.size or gaps.max() < GAP_MAX:
        return gaps.astype(np.uint8)
    ends = np.cumsum(gaps // GAP_MAX + 1)
    made = np.full(int(ends[-1]), GAP_MAX, np.uint8)
    made[ends - 1] = gaps % GAP_MAX
    return made


def _after_gaps(gaps: Bytes, count: int) -> npt.NDArray[np.int64]:
    if gaps.size and gaps[-1] == GAP_MAX:
        raise ValueError("a gap is cut off")
    ends = np.flatnonzero(gaps != GAP_MAX)
    at = np.cumsum(gaps, dtype=np.int64)[ends] + np.arange(ends.size)
    if at.size and at[-1] >= count:
        raise ValueError("a position is outside")
    return at


def _set_bits(bitmap: Bytes, count: int) -> npt.NDArray[np.int64]:
    if bitmap.size != -(-count // 8):
        raise ValueError("a bitmap of another size")
    bits = np.unpackbits(bitmap, bitorder="little")
    if bits[count:].any():
        raise ValueError("a position is outside")
    return np.flatnonzero(bits[:count])


NUMPY = NumpyKernel()
