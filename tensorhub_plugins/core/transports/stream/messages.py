"""The messages that the socket transports (tcp, shm, rdma) share.

    reader                                  source
    HELLO magic, version            ->
                                    <-      HELLO magic, version, nonce
    StreamOpen(shard, lease)        ->
                                    <-      StreamOpened(epoch, manifest) or StreamRefused(reason);
                                            shm: its file (and a loan of it), or its addresses
    StreamRead(segment runs, seconds) ->    (any number, without waiting for what was asked for before)
                                    <-      for each segment, once it is ready: SEGMENT header, then its bytes; tcp,
                                            where the reader named a base: or DELTA header, then a frame of
                                            deltas/frame.py; shm,
                                            for all that are ready: READY header (the first of them, how many);
                                            ALIVE now and then while the source itself waits;
                                            StreamRefused at its deadline
    StreamFinish()                  ->
                                    <-      StreamFinished(current)

Everything after the HELLO is a frame: a 16-byte header (kind, segment, length) and `length` bytes. Control messages are
msgpack arrays whose types msgspec checks. A withdrawn offer has no message: the source shuts the connection down, which
no queue can delay. So does either end that receives something it does not understand.
"""

from __future__ import annotations

import struct
from typing import Annotated, Literal, TypeAlias

import msgspec

from tensorhub_plugins.core.digests import DIGEST_SIZE_BYTES
from tensorhub_plugins.core.errors import ProtocolError
from tensorhub_plugins.core.protocol.messages import Claim
from tensorhub_plugins.core.types import ShardKey

MAGIC = b"TENSORHB"
PROTOCOL = 7
NONCE_SIZE_BYTES = 16
HELLO = struct.Struct(f"!8sHH{NONCE_SIZE_BYTES}s")  # magic, protocol version, 0 or FULL, nonce of the source
FULL = 1  # the source closes the connection: it has no place for one more reader
# Kind, 1: the source had to wait for it, segment, length of what follows in bytes (READY: how many segments).
HEADER = struct.Struct("!BBxxIQ")
CONTROL, SEGMENT, ALIVE, READY, DELTA = 1, 2, 3, 4, 5
BASES_MAX = 2  # digests that a reader names of one segment: of what it reads into, and of what it serves
BASED_SEGMENTS_MAX = 1024  # that are asked for with bases at a time: such a request is below OPENING_SIZE_BYTES_MAX
NO_BASE = bytes(DIGEST_SIZE_BYTES)
NO_MANIFEST = msgspec.msgpack.encode(None)

REQUEST_SIZE_BYTES_MAX = 4 << 20  # every second segment of a 1 TB shard named one by one is 2 MB
OPENING_SIZE_BYTES_MAX = 64 << 10  # before a lease is accepted: a name and a proof are below 6 KB
RUN_SIZE_BYTES_MAX = 11  # two numbers below 2**32 and their array
REPLY_SIZE_BYTES_MAX = 256 << 20  # a manifest: about 100 bytes a tensor, 16 a segment
READ_S_MAX = 3600.0  # whatever a reader requests

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class StreamOpen(_Message, frozen=True):
    """A request to begin reading an offer."""

    key: ShardKey
    as_of: Count
    brief: bool = False  # another stream of the same reader has the manifest
    by_address: bool = False  # shm: the reader can read this process's memory itself
    lease: tuple[Claim, bytes] | None = None  # where the hub has a secret; with the proof of possession, see leases.py
    borrows: bool = False  # shm: the reader would use the memory in place, for as long as it needs
    deltas: bool = False  # tcp: the reader could take deltas, if not of this version then of the next one


class StreamRead(_Message, frozen=True):
    """A request to send these segments."""

    runs: Annotated[list[tuple[Count, Count]], msgspec.Meta(max_length=1 << 20)]  # of segments, [start, stop)
    seconds: Annotated[float, msgspec.Meta(ge=0)]  # until the reader's deadline
    # What the reader holds of other versions: each a digest for every segment asked for, or NO_BASE, in their order.
    bases: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=BASES_MAX)] = ()
    rate: Annotated[float, msgspec.Meta(ge=0)] = 0.0  # bytes a second at which whole segments come; 0: unknown


class StreamFinish(_Message, frozen=True):
    """A request to end what StreamOpen began, and to say whether the offer is still the one that was opened."""


StreamRequest: TypeAlias = StreamOpen | StreamRead | StreamFinish


class StreamOpened(_Message, frozen=True):
    """The answer to StreamOpen: the offer's manifest and epoch."""

    epoch: Count
    manifest: msgspec.Raw  # Manifest.encoded; NO_MANIFEST: brief
    addresses: bytes | None = None  # shm: addresses in the source's memory; None: `send_memory` follows
    is_lent: bool = False  # shm: it may be used in place, see memory/loans.py
    keeps: bool = False  # after a StreamFinish the connection may wait for the next StreamOpen as long as it likes


class StreamRefused(_Message, frozen=True):
    """The answer to StreamOpen, or the end of a StreamRead: why there is nothing (more) to read."""

    reason: Literal["gone", "not servable", "late"]
    message: Text


class StreamFinished(_Message, frozen=True):
    """The answer to StreamFinish. current: nothing was withdrawn meanwhile: all bytes are the published ones."""

    current: bool


StreamReply: TypeAlias = StreamOpened | StreamRefused | StreamFinished

# Made here and not by decode(type=...): two threads that do so for the first time at once crash msgspec 0.21.
request_decoder = msgspec.msgpack.Decoder[StreamRequest](StreamRequest)
reply_decoder = msgspec.msgpack.Decoder[StreamReply](StreamReply)


def request_size_bytes_max(segments: int | None) -> int:
    """Return how long a request may be: enough for every second segment of the open offer (None: none is open). So no
    stranger makes a source allocate more than 64 KiB, and no reader more than there is to ask for."""
    runs = 0 if segments is None else (segments + 1) // 2
    return min(OPENING_SIZE_BYTES_MAX + RUN_SIZE_BYTES_MAX * runs, REQUEST_SIZE_BYTES_MAX)


def bases_of(request: StreamRead) -> dict[int, tuple[bytes, ...]]:
    """Return the digests that a reader names, by segment. Raise ProtocolError for too many or too few."""
    if not request.bases:
        return {}
    count = sum(stop - start for start, stop in request.runs)
    if any(len(each) != count * DIGEST_SIZE_BYTES for each in request.bases):  # before so many are listed
        raise ProtocolError(f"bases of {list(map(len, request.bases))} bytes for {count} segments")
    segments = (segment for run in request.runs for segment in range(*run))
    found: dict[int, tuple[bytes, ...]] = {}
    for at, segment in enumerate(segments):
        digests = (each[at * DIGEST_SIZE_BYTES : (at + 1) * DIGEST_SIZE_BYTES] for each in request.bases)
        found[segment] = tuple(digest for digest in digests if digest != NO_BASE)
    return found


class OtherRelease(ProtocolError):
    """The other side speaks another version of this protocol."""


def check_hello(greeting: bytes | bytearray) -> int:
    """Return 0, or FULL. Raise ProtocolError when the other side speaks another protocol, OtherRelease for another
    version of it."""
    magic, version, state, _ = HELLO.unpack(greeting)
    if magic != MAGIC:
        raise ProtocolError(f"its first bytes are {magic!r}: this is no weight transfer of ours")
    if version != PROTOCOL:
        raise OtherRelease(
            f"it speaks transfer protocol {version}, this side {PROTOCOL}: install the same release on both"
        )
    return int(state)
