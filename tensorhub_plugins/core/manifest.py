"""The table of a shard's tensors, and the digests of its bytes: immutable, ready for the wire. PURE.

One flat stream
    A shard's tensors are sorted by name. The shard's *stream* is the concatenation of their raw bytes in that order,
    without padding. Segment k is the stream's bytes [k*S, min((k+1)*S, size)), where S is `segment_size_bytes`. Big
    tensors are thus split and tiny ones share a segment, with no table to send: names, sizes and S determine it. Every
    offset in this package is a stream offset; the physical position of a tensor is private to its slab.

What makes two shards interchangeable
    Equal layout and equal `Manifest.root()`: same tensors, same bytes, checked segment by segment by every reader.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple, overload
from weakref import WeakValueDictionary

import msgspec

from tensorhub_plugins.core.digests import DIGEST_SIZE_BYTES, KNOWN, NO_DIGESTS, XXH3, digest_of
from tensorhub_plugins.core.errors import ProtocolError, UsageError
from tensorhub_plugins.core.types import DECODE_ERRORS

SEGMENT_SIZE_BYTES = 4 << 20  # at most: the work per segment is negligible at 10 GB/s, and a repair stays small
SEGMENT_SIZE_BYTES_MIN = 256 << 10
SEGMENTS_AIM = 256  # of one shard: a chain of readers delays its end by one segment each
TENSORS_MAX = 1 << 20  # a 1T-parameter mixture-of-experts checkpoint has about 200,000 tensors
TABLE_SIZE_BYTES_MAX = 160 << 20  # encoded: with the digests of 16 TiB it is one message of a transport
SHARD_SIZE_BYTES_MAX = 1 << 44  # 16 TiB: far above any one worker's memory, far below overflow
LARGE_SIZE_BYTES = 4 << 20  # of a table, about 50,000 tensors: decoding all at once would block other threads
ELEMENTS_MAX = 1 << 62  # that torch's numbers can hold
KEPT_OF_TABLES = ("encoded", "size_bytes", "_holds_together")  # all else is forgotten
ALIGNMENT_BYTES = 64  # of tensors in a block: a cache line, the widest vector, and what torch's own allocator gives
PIECE_SIZE_BYTES = 64 << 20  # of a block, or one tensor: after so many bytes a tensor begins at a page, see pinning.py
PAGE_SIZE_BYTES = 64 << 10  # the largest that kernels have


class Part(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The position of a tensor in a larger one: that one's shape, and the index of this one's first element.

    A box has a start in every dimension. A run has one number, whatever the shape of the larger one: it is a
    tensor of one dimension, whose elements follow that many of the larger one's in row-major order. Trainers that shard
    parameters as flat memory (FSDP1, ZeRO-3) hold runs that begin and end anywhere in a row.

    tensor: the larger one's name; "": the same. A shard that holds several parts of one has each under another name."""

    global_shape: tuple[int, ...]
    start: tuple[int, ...]
    tensor: str = ""

    @property
    def is_run(self) -> bool:
        """Return whether it is a run: of one dimension, in a tensor of more (or none). In a vector a run is a box."""
        return len(self.start) == 1 != len(self.global_shape)


class TensorSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):  # thousands, and no cycles
    """One tensor without its bytes.

    dtype is torch's name without the prefix ("bfloat16"); shape counts elements; stride is None for row-major
    contiguous tensors, else a dense permutation in elements (no overlap, no holes), whose bytes are the storage's.
    part: None when it is the whole tensor of that name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    stride: tuple[int, ...] | None = None
    part: Part | None = None

    @property
    def tensor(self) -> str:
        """Return the name of the tensor that this is all or a part of."""
        return self.name if self.part is None else self.part.tensor or self.name


class Span(NamedTuple):
    """Stream bytes that are contiguous in an allocated block: [start, start + size_bytes) of the stream, which begin at
    `offset` of the block."""

    start: int
    size_bytes: int
    offset: int

    @property
    def slice(self) -> slice:
        """Return where the bytes are in the block."""
        return slice(self.offset, self.offset + self.size_bytes)


class TensorTable(Sequence[TensorSpec]):
    """The tensors of one shard in stream order, and all that follows from them, each computed once.

    A model has the same thousands of tensors in every version, and describing, decoding or comparing them takes longer
    than reading their bytes. So equal tables made by `of` and `decode` are one object, as long as anything uses it:
    comparing two costs nothing, and what is computed for one is reused for the next version. Immutable."""

    def __init__(self, specs: Iterable[TensorSpec]) -> None:
        """Take specs as they are, unchecked, as an object of their own. Use `of`."""
        self.__dict__["specs"] = tuple(specs)

    @classmethod
    def of(cls, specs: Iterable[TensorSpec]) -> TensorTable:
        """Return the table of these tensors, by name. Raise UsageError for a name that comes twice, or too many."""
        if isinstance(specs, TensorTable):
            return specs
        made = cls(sorted(specs, key=lambda spec: spec.name))
        for one, other in pairwise(made.specs):
            if one.name == other.name:
                raise UsageError(f"tensor {one.name!r} is there twice")
        return _tables.setdefault(made.within_limits().encoded, made)

    @classmethod
    def decode(cls, encoded: bytes) -> TensorTable:
        """Return the table that was encoded. Raise ProtocolError, or msgspec's, for an inconsistent one."""
        known = _tables.get(encoded)
        if known is None:
            is_large = len(encoded) > LARGE_SIZE_BYTES
            known = cls(map(_spec.decode, _raws.decode(encoded)) if is_large else _specs.decode(encoded)).check()
            known = _tables.setdefault(known.encoded, known)
            if is_large:  # it takes seconds: do it here, in the thread of its sender, not where a deadline is kept
                _ = known.block_offsets, known.offsets, known.spans
        return known.check()

    def check(self) -> TensorTable:
        """Return self, or raise ProtocolError: too many, names not sorted or not unique, or a negative size."""
        _ = self._holds_together
        return self

    def within_limits(
        self,
        tensors_max: int = TENSORS_MAX,
        size_bytes_max: int = SHARD_SIZE_BYTES_MAX,
        table_size_bytes_max: int = TABLE_SIZE_BYTES_MAX,
    ) -> TensorTable:
        """Return self, or raise UsageError for what no reader would accept as one shard."""
        is_small = len(self) <= tensors_max and len(self.encoded) <= table_size_bytes_max
        if not is_small or self.size_bytes > size_bytes_max:
            raise UsageError(
                f"{len(self)} tensors of {self.size_bytes} bytes, with {len(self.encoded)} of names and shapes: the "
                f"limits of a shard are {tensors_max}, {size_bytes_max} and {table_size_bytes_max}; use several"
            )
        return self

    @cached_property
    def _holds_together(self) -> bool:
        if len(self) > TENSORS_MAX:
            raise ProtocolError(f"manifest has {len(self)} tensors, the limit is {TENSORS_MAX}")
        if any(one.name >= other.name for one, other in pairwise(self.specs)):
            raise ProtocolError("manifest tensors are not sorted by unique name")
        if any(spec.size_bytes < 0 or min(spec.shape, default=0) < 0 for spec in self.specs):
            raise ProtocolError("manifest has a tensor of negative size")
        for spec in self.specs:
            if not _is_consistent(spec):
                raise ProtocolError(f"the manifest's tensor {spec.name!r:.80} has sizes that contradict each other")
        return True

    def forget_specs(self) -> None:
        """Keep the encoding, which takes a fifth of the memory, and compute all else again when it is asked for.

        A worker that reads from hundreds of shards needs their tables, between versions, only to see that they are
        still the same."""
        _ = self.encoded, self.size_bytes  # computed before, and kept
        for found in [name for name in self.__dict__ if name not in KEPT_OF_TABLES]:
            del self.__dict__[found]

    # --- what follows from the specs ---

    @cached_property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Return the tensors themselves. Decoded only after `forget_specs`."""
        return _specs.decode(self.encoded)

    @cached_property
    def encoded(self) -> bytes:
        """Return its msgpack encoding, which is part of a manifest on the wire."""
        return msgspec.msgpack.encode(self.specs)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Return the stream offset of every tensor, in bytes."""
        return tuple(accumulate((spec.size_bytes for spec in self.specs[:-1]), initial=0)) if self.specs else ()

    @cached_property
    def size_bytes(self) -> int:
        """Return the size of the stream in bytes."""
        return self.offsets[-1] + self.specs[-1].size_bytes if self.specs else 0

    @cached_property
    def positions(self) -> dict[str, int]:
        """Return the index of each tensor in the table, by its name."""
        return {spec.name: position for position, spec in enumerate(self.specs)}

    def get(self, name: str) -> TensorSpec | None:
        """Return the tensor of this name; None: there is none."""
        position = self.positions.get(name)
        return None if position is None else self.specs[position]

    @cached_property
    def of_tensor(self) -> dict[str, tuple[int, ...]]:
        """Return the indexes of all entries that are all or a part of a tensor, by its name."""
        found: dict[str, list[int]] = {}
        for position, spec in enumerate(self.specs):
            found.setdefault(spec.tensor, []).append(position)
        return {name: tuple(positions) for name, positions in found.items()}

    @cached_property
    def block_offsets(self) -> tuple[int, ...]:
        """Return where each tensor begins in an allocated block, in bytes. Part of the shm protocol: a process that is
        passed the block knows its layout from the manifest alone."""
        return self._layout[0]

    @property
    def block_size_bytes(self) -> int:
        """Return the size of an allocated block in bytes, paddings included."""
        return self.block_borders[-1]

    @property
    def block_borders(self) -> tuple[int, ...]:
        """Return where a block can be cut: at pages, and between tensors; 0 and its size at the ends."""
        return self._layout[1]

    @cached_property
    def _layout(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        starts, borders, end = [], [0], 0
        for spec in self.specs:
            if end > borders[-1] and end + spec.size_bytes > borders[-1] + PIECE_SIZE_BYTES:
                end = -(-end // PAGE_SIZE_BYTES) * PAGE_SIZE_BYTES
                borders.append(end)
            starts.append(end)
            end += -(-spec.size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return tuple(starts), (*borders, end)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Return the layout of an allocated block in as few spans as possible: neighbours without a gap are one.
        Tensors whose sizes are multiples of ALIGNMENT_BYTES are a single span."""
        merged: list[Span] = []
        begin, end, size_bytes = 0, -1, 0  # the current span: start in the stream, end in the block
        for spec, start, offset in zip(self.specs, self.offsets, self.block_offsets, strict=True):
            if not spec.size_bytes:
                continue
            if offset != end:
                if size_bytes:
                    merged.append(Span(begin, size_bytes, end - size_bytes))
                begin, size_bytes = start, 0
            size_bytes += spec.size_bytes
            end = offset + spec.size_bytes
        if size_bytes:
            merged.append(Span(begin, size_bytes, end - size_bytes))
        return tuple(merged)

    # --- as a sequence and as a value ---

    def __iter__(self) -> Iterator[TensorSpec]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)

    @overload
    def __getitem__(self, index: int) -> TensorSpec: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[TensorSpec, ...]: ...
    def __getitem__(self, index: int | slice) -> TensorSpec | tuple[TensorSpec, ...]:
        return self.specs[index]

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, TensorTable) and self.encoded == other.encoded)

    def __hash__(self) -> int:
        return hash(self.encoded)

    def __reduce__(self) -> tuple[Any, ...]:
        return TensorTable.of, (self.specs,)

    def __repr__(self) -> str:
        return f"<TensorTable, {len(self)} tensors, {self.size_bytes} bytes>"


def _is_consistent(spec: TensorSpec) -> bool:
    """Return whether its sizes agree with each other: a reader's plan divides by them. Without a generator: there may
    be a million specs, of all shards that one worker reads from."""
    shape, part, count = spec.shape, spec.part, prod(spec.shape)
    if spec.size_bytes % count if count else spec.size_bytes:
        return False
    stride = spec.stride or ()
    if stride and (len(stride) != len(shape) or min(stride) < 0):
        return False
    if max(_elements(shape, count), *stride, 0) > ELEMENTS_MAX:
        return False
    if part is None:
        return True
    whole, start = part.global_shape, part.start
    if _elements(whole, count) > ELEMENTS_MAX:
        return False
    if part.is_run:
        return min(whole, default=0) >= 0 and holds_run(part, shape)
    if not len(start) == len(whole) == len(shape):
        return False
    for first, size, limit in zip(start, shape, whole, strict=True):  # noqa: SIM110
        if not 0 <= first <= limit - size:
            return False
    return True


def _elements(shape: Sequence[int], count: int) -> int:
    """Return the number that torch computes for a shape, even an empty one. count: 0 where it, or a part of it, is."""
    return prod(shape) if count else prod(max(size, 1) for size in shape)


def holds_run(part: Part, shape: Sequence[int]) -> bool:
    """Return whether a tensor of this shape is a run of the larger one's elements."""
    return len(shape) == 1 and 0 <= part.start[0] <= prod(part.global_shape) - shape[0]


_tables: WeakValueDictionary[bytes, TensorTable] = WeakValueDictionary()  # by their encoding, while they are in use
_specs = msgspec.msgpack.Decoder(tuple[TensorSpec, ...])
_raws = msgspec.msgpack.Decoder(list[msgspec.Raw])
_spec = msgspec.msgpack.Decoder(TensorSpec)


class Manifest(msgspec.Struct, frozen=True, dict=True):
    """The tensors of one shard in stream order, with a digest for every segment of the stream; or, where these are
    switched off, with DIGEST_SIZE_BYTES random bytes, so that no two publishes are taken for the same bytes."""

    tensors: TensorTable
    digests: bytes
    segment_size_bytes: int = SEGMENT_SIZE_BYTES
    digest_algorithm: str = XXH3

    @property
    def offsets(self) -> tuple[int, ...]:
        """Return the stream offset of every tensor, in bytes."""
        return self.tensors.offsets

    @property
    def size_bytes(self) -> int:
        """Return the size of the stream in bytes."""
        return self.tensors.size_bytes

    @property
    def segment_count(self) -> int:
        """Return the number of segments of the stream; the last one may be shorter than the others."""
        return -(-self.size_bytes // self.segment_size_bytes)

    def segment_range(self, segment: int) -> tuple[int, int]:
        """Return the stream range [start, stop) of a segment, in bytes."""
        start = segment * self.segment_size_bytes
        return start, min(start + self.segment_size_bytes, self.size_bytes)

    def specs_in(self, segments: Iterable[int]) -> tuple[TensorSpec, ...]:
        """Return the tensors that have bytes in these segments, in the stream's order."""
        positions: dict[int, None] = {}
        for start, stop in map(self.segment_range, segments):
            first, last = bisect_right(self.offsets, start) - 1, bisect_left(self.offsets, stop)
            positions.update(dict.fromkeys(p for p in range(first, last) if self.tensors[p].size_bytes))
        return tuple(self.tensors[position] for position in sorted(positions))

    @property
    def has_digests(self) -> bool:
        """Return whether there are digests; else a reader has to trust the source that nothing changed."""
        return self.digest_algorithm != NO_DIGESTS

    def digest(self, segment: int) -> bytes:
        """Return the digest of a segment's bytes, DIGEST_SIZE_BYTES long; every bit and its position counts. segment:
        from 0 to segment_count - 1; meaningless without `has_digests`."""
        return self.digests[segment * DIGEST_SIZE_BYTES : (segment + 1) * DIGEST_SIZE_BYTES]

    def root(self) -> bytes:
        """Return 16 bytes that identify all of it: equal roots mean equal tensors with equal bytes."""
        return self._root

    @cached_property
    def _root(self) -> bytes:
        return digest_of((self.encoded,), self.digest_algorithm)

    @cached_property
    def encoded(self) -> bytes:
        """Return its encoding for the wire, which `decode` reverses."""
        table = msgspec.Raw(self.tensors.encoded)
        outline = _Outline(table, self.digests, self.segment_size_bytes, self.digest_algorithm)
        return msgspec.msgpack.encode(outline)

    @classmethod
    def decode(cls, encoded: bytes) -> Manifest:
        """Return a consistent manifest, or raise ProtocolError."""
        try:
            outline = _outlines.decode(encoded)
            tensors = TensorTable.decode(bytes(outline.tensors))
        except DECODE_ERRORS as error:
            raise ProtocolError(f"a manifest that does not decode: {error}") from error
        manifest = cls(tensors, outline.digests, outline.segment_size_bytes, outline.digest_algorithm)
        manifest.__dict__["encoded"] = encoded  # served to others, and hashed for its root, as it came
        return manifest._check_segments()

    def check(self) -> Manifest:
        """Return self, or raise ProtocolError when it is inconsistent."""
        self.tensors.check()
        return self._check_segments()

    def _check_segments(self) -> Manifest:
        if self.size_bytes > SHARD_SIZE_BYTES_MAX:
            raise ProtocolError(f"manifest claims {self.size_bytes} bytes, the limit is {SHARD_SIZE_BYTES_MAX}")
        if self.digest_algorithm not in KNOWN:
            raise ProtocolError(f"manifest uses digest {self.digest_algorithm!r}, this build {', '.join(KNOWN)}")
        if self.segment_size_bytes <= 0 or len(self.digests) != DIGEST_SIZE_BYTES * (
            self.segment_count if self.has_digests else 1
        ):
            raise ProtocolError("manifest digests do not match its segments")
        return self


class _Outline(msgspec.Struct):
    """A manifest on the wire; its tensors are decoded, and encoded, by themselves."""

    tensors: msgspec.Raw
    digests: bytes
    segment_size_bytes: int
    digest_algorithm: str


_outlines = msgspec.msgpack.Decoder(_Outline)


def segment_size_for(size_bytes: int) -> int:
    """Return the segment size for a shard of this size: about `SEGMENTS_AIM` segments, a power of two bytes each."""
    size = SEGMENT_SIZE_BYTES_MIN
    while size < SEGMENT_SIZE_BYTES and size * SEGMENTS_AIM < size_bytes:
        size *= 2
    return size
