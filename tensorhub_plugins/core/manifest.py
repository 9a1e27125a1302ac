"""The table of a shard's tensors, and the digests of its bytes: immutable, ready for the wire, free of torch.

One flat stream
    A shard's tensors are sorted by name. The shard's *stream* is the concatenation of their raw bytes in that order,
    without padding. Segment k is the stream's bytes [k*S, min((k+1)*S, size)), where S is `segment_size_bytes`. Big
    tensors are thus split and tiny ones share a segment, with no table to send: names, sizes and S say it all. Every
    offset in this package is a stream offset; where a tensor physically lies is its slab's private matter.

What makes two shards interchangeable
    Equal layout and equal `Manifest.root()`: same tensors, same bytes, checked segment by segment by every reader.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache, wraps
from itertools import accumulate, pairwise
from typing import TypeAlias, TypeVar

import msgspec
import xxhash

from tensorhub_plugins.core.errors import ProtocolError

SEGMENT_SIZE_BYTES = 4 << 20  # at most: per-segment work vanishes at 10 GB/s, and a repair stays small
SEGMENT_SIZE_BYTES_MIN = 256 << 10
SEGMENTS_AIM = 256  # of one shard: a chain of readers delays its end by one segment each
DIGEST_SIZE_BYTES = 16
DIGEST_ALGORITHM = "xxh3_128"  # position sensitive, memory speed; guards against accidents, not forgery
TENSORS_MAX = 1 << 20  # a 1T-parameter mixture-of-experts checkpoint has about 200,000 tensors
SHARD_SIZE_BYTES_MAX = 1 << 44  # 16 TiB: far above any one worker's memory, far below overflow
TABLES_KEPT = 8  # tables of tensors that are remembered: a layout has one for each shard
NO_DIGESTS = "none"  # what is said in their place then stands for one publish and nothing else


class Part(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a tensor lies in a larger one of the same name: that one's shape, and where this one's first element is."""

    global_shape: tuple[int, ...]
    start: tuple[int, ...]


class TensorSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):  # thousands, and no cycles
    """One tensor without its bytes.

    dtype is torch's name without the prefix ("bfloat16"); shape counts elements; stride is None for row-major
    contiguous tensors, else a dense permutation in elements (no overlap, no holes), whose bytes are the storage's.
    part: None when it is all there is of that name.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    stride: tuple[int, ...] | None = None
    part: Part | None = None


class Manifest(msgspec.Struct, frozen=True, dict=True):
    """The tensors of one shard in stream order, with a digest for every segment of the stream; or, where these are
    switched off, with DIGEST_SIZE_BYTES random bytes, so that no two publishes are taken for the same bytes."""

    tensors: tuple[TensorSpec, ...]
    digests: bytes
    segment_size_bytes: int = SEGMENT_SIZE_BYTES
    digest_algorithm: str = DIGEST_ALGORITHM

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Stream offset of every tensor, in bytes."""
        return stream_offsets(self.tensors)

    @cached_property
    def size_bytes(self) -> int:
        return self.offsets[-1] + self.tensors[-1].size_bytes if self.tensors else 0

    @property
    def segment_count(self) -> int:
        return -(-self.size_bytes // self.segment_size_bytes)

    def segment_range(self, segment: int) -> tuple[int, int]:
        """Stream range [start, stop) of a segment, in bytes."""
        start = segment * self.segment_size_bytes
        return start, min(start + self.segment_size_bytes, self.size_bytes)

    @property
    def has_digests(self) -> bool:
        return self.digest_algorithm != NO_DIGESTS

    def digest(self, segment: int) -> bytes:
        return self.digests[segment * DIGEST_SIZE_BYTES : (segment + 1) * DIGEST_SIZE_BYTES]

    def root(self) -> bytes:
        """16 bytes that stand for all of it: equal roots mean equal tensors with equal bytes."""
        return self._root

    @cached_property
    def _root(self) -> bytes:
        return xxhash.xxh3_128_digest(self.encoded)

    @cached_property
    def encoded(self) -> bytes:
        """For the wire; `decode` turns it back."""
        table = msgspec.Raw(_encoded_table(self.tensors))
        outline = _Outline(table, self.digests, self.segment_size_bytes, self.digest_algorithm)
        return msgspec.msgpack.encode(outline)

    @classmethod
    def decode(cls, encoded: bytes) -> Manifest:
        """A manifest that holds together, or ProtocolError."""
        try:
            outline = _outlines.decode(encoded)
            tensors = _tensors_of(bytes(outline.tensors))
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"a manifest that does not decode: {error}") from error
        manifest = cls(tensors, outline.digests, outline.segment_size_bytes, outline.digest_algorithm)
        manifest.__dict__["encoded"] = encoded  # passed on, and its root taken, as it came
        return manifest._check_segments()

    def check(self) -> Manifest:
        """Return self, or raise ProtocolError when it does not hold together."""
        _check_tensors(self.tensors)
        return self._check_segments()

    def _check_segments(self) -> Manifest:
        if self.size_bytes > SHARD_SIZE_BYTES_MAX:
            raise ProtocolError(f"manifest claims {self.size_bytes} bytes, the limit is {SHARD_SIZE_BYTES_MAX}")
        if self.digest_algorithm not in (DIGEST_ALGORITHM, NO_DIGESTS):
            raise ProtocolError(f"manifest uses digest {self.digest_algorithm!r}, this build {DIGEST_ALGORITHM!r}")
        if self.segment_size_bytes <= 0 or len(self.digests) != DIGEST_SIZE_BYTES * (
            self.segment_count if self.has_digests else 1
        ):
            raise ProtocolError("manifest digests do not match its segments")
        return self


_Result = TypeVar("_Result")
_OfTable: TypeAlias = "Callable[[Sequence[TensorSpec]], _Result]"


def remembered_of_table(function: _OfTable[_Result]) -> _OfTable[_Result]:
    """For one that asks all of a model's tensors: the same tuple (see `shared_table`) is asked once."""
    kept: deque[tuple[Sequence[TensorSpec], _Result]] = deque(maxlen=TABLES_KEPT)

    @wraps(function)
    def remembering(specs: Sequence[TensorSpec]) -> _Result:
        for known, result in list(kept):
            if known is specs:
                return result
        result = function(specs)
        if isinstance(specs, tuple):  # else it may change
            kept.append((specs, result))
        return result

    return remembering


class _Outline(msgspec.Struct):
    """A manifest on the wire; its tensors are decoded, and encoded, by themselves."""

    tensors: msgspec.Raw
    digests: bytes
    segment_size_bytes: int
    digest_algorithm: str


_outlines = msgspec.msgpack.Decoder(_Outline)
_tables = msgspec.msgpack.Decoder(tuple[TensorSpec, ...])


@lru_cache(maxsize=TABLES_KEPT)
def _tensors_of(encoded: bytes) -> tuple[TensorSpec, ...]:
    """The very same object for the same bytes: a model's tensors do not change from version to version, and thousands
    of them take longer to decode, to check and to compare than to read."""
    tensors = _tables.decode(encoded)
    _check_tensors(tensors)
    return tensors


@remembered_of_table
def _encoded_table(tensors: Sequence[TensorSpec]) -> bytes:
    return msgspec.msgpack.encode(tensors)


def same_table(one: Sequence[TensorSpec], other: Sequence[TensorSpec]) -> bool:
    """Whether two tables are equal. What it takes is remembered, and needed for a manifest's root anyway."""
    return one is other or _encoded_table(one) == _encoded_table(other)


def shared_table(tensors: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """The same table as the object that a decoded manifest of these tensors has: to compare the two costs nothing."""
    try:
        return _tensors_of(msgspec.msgpack.encode(tensors))  # nothing is remembered of a tuple that is not passed on
    except ProtocolError:  # it will be said where it matters
        return tensors


def _check_tensors(tensors: Sequence[TensorSpec]) -> None:
    names = [t.name for t in tensors]
    if len(names) > TENSORS_MAX:
        raise ProtocolError(f"manifest has {len(names)} tensors, the limit is {TENSORS_MAX}")
    if any(a >= b for a, b in pairwise(names)):
        raise ProtocolError("manifest tensors are not sorted by unique name")
    if any(t.size_bytes < 0 or min(t.shape, default=0) < 0 for t in tensors):
        raise ProtocolError("manifest has a tensor of negative size")


def segment_size_for(size_bytes: int) -> int:
    """How a shard of this size is cut: into about `SEGMENTS_AIM` segments, a power of two bytes each."""
    size = SEGMENT_SIZE_BYTES_MIN
    while size < SEGMENT_SIZE_BYTES and size * SEGMENTS_AIM < size_bytes:
        size *= 2
    return size


@remembered_of_table
def stream_offsets(specs: Sequence[TensorSpec]) -> tuple[int, ...]:
    """Stream offset of every tensor, in bytes."""
    return tuple(accumulate((t.size_bytes for t in specs[:-1]), initial=0)) if specs else ()
