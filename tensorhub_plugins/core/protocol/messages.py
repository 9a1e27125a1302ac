"""All messages between a client and the hub. PURE.

Client to hub: `ClientMessage`. Hub to client: `HubMessage`. Frames are two magic bytes, one protocol-version byte and
one msgpack array whose first element is the type's tag; msgspec checks every field's type while it decodes, and the
limits below bound what one message may hold. Nothing is ever unpickled. Requests carry `request_id`, a number that is
unique within the session. A request may be sent again with the same number (the wire may lose it, the hub may have been
restarted): the hub answers a number it has answered before with the same reply. Deadlines travel as seconds that are
left, never as clock times, because clocks differ. But they do not expire while a request waits in a buffer: one that
changes something also carries the instant until which it is valid (`Until`), on the hub's clock, see its messages.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec

from tensorhub_plugins.core.errors import ProtocolError
from tensorhub_plugins.core.protocol.directive import NO_DIRECTIVE, Directive
from tensorhub_plugins.core.protocol.fields import (
    Count,
    Domains,
    Endpoints,
    HubLife,
    Layouts,
    LeaseName,
    Name,
    Number,
    Processes,
    Requests,
    Root,
    Seconds,
    Serial,
    Session,
    Sessions,
    Shard,
    ShardCount,
    Shards,
    Text,
    Word,
    WorkerName,
)
from tensorhub_plugins.core.protocol.lineage import Attempt, Mark, Step
from tensorhub_plugins.core.types import DECODE_ERRORS, SHARDS_MAX, Across, Hosts, Location, ShardKey, VersionInfo

MAGIC = b"TH"
PROTOCOL = 1
RETAIN_MAX = 1024  # versions
REFUSED_MAX = 64  # versions that one engine cannot install, the last ones: far more than are held at any time
NOT_HELD_MAX = 8  # that a Welcome names: the next Welcome names the next ones
GRANTS_MAX = 4096  # in one answer: with the longest names it is below FROM_HUB_SIZE_BYTES_MAX
SERVED_MAX = 1024  # leases that one heartbeat names; the next one names the rest
CORRUPT_MAX = 16  # segments that one message names: after a few a source is not asked again
HOLDINGS_MAX = 8192  # of one worker: its shard in some layouts of some versions
FROM_CLIENT_SIZE_BYTES_MAX = 4 << 20  # a hello with 1,024 holdings is below 200 KB
FROM_HUB_SIZE_BYTES_MAX = 20 << 20  # status of 8,192 workers is about 4 MB

ErrorCode: TypeAlias = Literal[
    "DeadlineExceeded", "NotPublished", "ProtocolError", "Superseded", "UsageError", "VersionGone"
]
Origin: TypeAlias = Literal["published", "replicated"]  # by a trainer, or read from another worker


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Base class of messages, without reference cycles: the garbage collector need not track them (gc=False)."""


class Holding(_Message, frozen=True):
    """A shard that the worker holds. complete: all of it, verified; else it is arriving, and served meanwhile."""

    key: ShardKey
    root: Root
    size_bytes: Count
    complete: bool = True
    origin: Origin = "published"  # replicated: from a visible version, which is evidence after a hub's restart


class HeldLease(_Message, frozen=True):
    """The shards that a worker reads, from which sources, under a lease that a restarted hub has forgotten."""

    request_id: Count
    version: Number
    layout: Name
    sources: Annotated[dict[Shard, Session], msgspec.Meta(max_length=SHARDS_MAX)]
    seconds_left: Seconds
    shard_count: ShardCount = 1


class Claim(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Names a reader (by its lease) that may read until an instant of this hub's clock. See security/leases.py."""

    hub: HubLife
    reader: LeaseName
    expires: float


class Until(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An instant on the clock of one incarnation of the hub: its request is valid until then, and for no other hub."""

    hub: HubLife
    clock: float

    def is_over(self, hub: bytes, now: float) -> bool:
        """Return whether this hub, at `now` on its clock, must not act on the request any more."""
        return self.hub != hub or now > self.clock


class Ticket(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A claim, and the key by which its reader proves it."""

    claim: Claim
    key: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class Grant(_Message, frozen=True):
    """The right to read one shard from one source until the lease ends.

    as_of: `request_id` of the source's latest message about this shard when the grant was issued. The reader rejects an
    offer created after it: the source has since withdrawn the shard and published it again."""

    shard: Count
    session: Session
    worker: WorkerName
    endpoints: Endpoints
    location: Location
    root: Root
    size_bytes: Count
    as_of: Count = 0
    ticket: Ticket | None = None  # where the hub has a secret
    hosts: Hosts = ()  # of the source, see Hello


# --- client to hub ---


class Hello(_Message, frozen=True):
    """Opens a session, and rebuilds the hub's records of this worker when the hub has lost them.

    It is complete: what is not in it is over. request_id: a fresh number, by which the hub recognizes a Hello that was
    delayed or duplicated on the way; of the requests up to it only `pending` are still wanted. seen: the newest version
    in an answer to this worker. generation, resolved: the last generation of "latest" of its replica in which it was
    answered, and with which version, for the replica's other shards. hub: the incarnation of the hub that it is sent
    to, so that one that comes late, after a restart, is not believed (b"": the worker knows of none; None: it is older
    than this field). process: see process_lifetime.py. mark: of the attempt that it has begun; b"": none. job: shared
    only with its former and next incarnations. welcomed: the incarnation of the hub that has admitted this session;
    b"": none yet. retain_...: as in this worker's last Retain that was answered; None: none was. tls_only: other data
    centres are served over TLS only. until: when the first of these holdings whose Publish is unanswered is abandoned;
    None: none is. name_proof: of the last Alive, see hub/duplicate_names.py. hosts: beside that of `endpoints`, at the
    same ports."""

    run: Name
    model: Name
    replica: Name
    shard: Count
    shard_count: ShardCount
    location: Location
    endpoints: Endpoints
    holdings: Annotated[tuple[Holding, ...], msgspec.Meta(max_length=HOLDINGS_MAX)] = ()
    leases: Annotated[tuple[HeldLease, ...], msgspec.Meta(max_length=1024)] = ()
    claims: Annotated[tuple[ShardKey, ...], msgspec.Meta(max_length=1024)] = ()
    retain_newest: Count | None = None
    request_id: Count = 0
    pending: Requests = ()
    seen: Count = 0
    resolved: Count = 0
    generation: Count = 0
    directive: Directive = NO_DIRECTIVE
    hub: HubLife | None = None
    process: Word = ""
    mark: Mark = b""
    job: Word = ""
    welcomed: HubLife = b""
    retain_domains: Domains = 1
    retain_across: Across = "host"
    preemptible: bool = False  # this worker may be preempted at short notice: what only it has is not safe
    retain_serial: Serial = 0
    tls_only: bool = False
    until: Until | None = None
    name_proof: Annotated[bytes, msgspec.Meta(max_length=16)] = b""
    hosts: Hosts = ()
    restarts: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 0  # of hubs, that it has seen lately
    heartbeat_s: Seconds = 0.0  # between its heartbeats to the hub before; 0: there was none
    retain_also: Count = 0


class Heartbeat(_Message, frozen=True):
    """The worker is alive. Of its requests up to `last_request_id` only `pending` wait for an answer.

    hub: the session of the hub that has welcomed it last. leases: under which it reads, request -> number of shards; it
    reads under no others. holdings_checksum: 0 while what it holds is changing. directive_checksum: of the directive
    that it knows; 0: it is older than those. progress: the bytes that have come under each lease; without any for too
    long it loses the lease. room_bytes: free for copies that the hub may ask it to hold (`Alive.hold`); 0: none.
    leaving: what it holds is about to go. served: leases on it (`Claim.reader`) used since the last heartbeat."""

    hub: Session
    last_request_id: Count = 0
    pending: Requests = ()
    leases: Annotated[dict[Count, Count], msgspec.Meta(max_length=1024)] = {}
    holdings_checksum: Count = 0
    directive_checksum: Count = 0
    progress: Annotated[dict[Count, Count], msgspec.Meta(max_length=1024)] = {}
    room_bytes: Count = 0
    leaving: bool = False
    served: Annotated[tuple[LeaseName, ...], msgspec.Meta(max_length=SERVED_MAX)] | None = None
    unreached: Sessions = ()  # sources that it could not connect to, a minute ago at most
    worked: Count = 0  # pieces of work of its process: while they grow, others wait for what it converts
    lacks: Text = ""  # what the system has refused its process lately
    heartbeat_s: Seconds = 0.0  # until the next; 0: as in Welcome


class Bye(_Message, frozen=True):
    """The worker ends; what it held is gone."""


class Publish(_Message, frozen=True):
    """The worker holds this shard, and other workers may read it."""

    request_id: Count
    holding: Holding
    until: Until | None = None


class Unpublish(_Message, frozen=True):
    """Grant no more leases on these shards; answer when no reader is left, or at the deadline.

    gone: the worker does not have them any more, whatever the answer."""

    request_id: Count
    keys: Annotated[tuple[ShardKey, ...], msgspec.Meta(max_length=HOLDINGS_MAX)]
    timeout_s: Seconds
    gone: bool = False
    until: Until | None = None


class Acquire(_Message, frozen=True):
    """Asks for sources. version 0: the newest visible one, resolved once for the replica's group.

    layouts: in order of preference. The checkpoint layout is read whole (all shards); any other layout only in the
    shard that this worker is. claim: when no worker has the first layout, this one will convert the last into it.
    shards: of `shards_layout` in `shard_count` shards only these are needed (after a loss). avoid: sources that
    failed, the last resort. exclude: sources never to use again. serve: what arrives is served to others, except a
    checkpoint that is read in_part. beside: sources of these shards that the worker keeps; it asks for an additional
    one. urgent: because they are slow; else only one with no other reader is wanted. for_others: a copy that the hub
    asks for (`Alive.hold`), which does not affect what this replica reads. grows: timeout_s is for finding them only.
    """

    request_id: Count
    version: Count
    at_least: Count
    layouts: Layouts
    timeout_s: Seconds
    claim: bool = False
    shards: Shards = ()
    shards_layout: Text = ""
    shard_count: Count = 0
    avoid: Sessions = ()
    exclude: Sessions = ()
    serve: bool = False
    beside: Sessions = ()
    urgent: bool = False
    for_others: bool = False
    in_part: bool = False
    until: Until | None = None
    grows: bool = False


class Release(_Message, frozen=True):
    """The lease of an Acquire ends, whole (shard None) or for one shard.

    lost: the source has failed. corrupt: segments of that shard which the source has sent with other bytes than were
    published. refused: the source's address refuses connections. came: what was read of that shard."""

    request_id: Count
    shard: Count | None = None
    lost: bool = False
    corrupt: Annotated[tuple[Count, ...], msgspec.Meta(max_length=CORRUPT_MAX)] = ()
    refused: bool = False
    came: tuple[Word, Count, Count] = ("", 0, 0)


class Abandon(_Message, frozen=True):
    """The worker will not publish what it claimed to convert."""

    request_id: Count
    key: ShardKey


class Wait(_Message, frozen=True):
    """Asks for an answer when `version` (0: any that is newer than `newer_than`) is visible."""

    request_id: Count
    version: Count
    newer_than: Count
    timeout_s: Seconds


class Target(_Message, frozen=True):
    """Asks which version a follower is to run; answered as soon as that is not `installed` (0: none).

    It is the pinned one, if `pins`; else the newest visible one that is not in `refused`, and not below what is
    installed unless that was withdrawn. serial: of the directive under which the follower has refused versions. why:
    why it has refused the newest of them. failure: why a try since then has failed."""

    request_id: Count
    installed: Count
    timeout_s: Seconds
    refused: Annotated[tuple[Number, ...], msgspec.Meta(max_length=REFUSED_MAX)] = ()
    serial: Serial = 0
    pins: bool = True
    why: Text = ""
    failure: Text = ""


class Pin(_Message, frozen=True):
    """Asks all followers of this history to run this version; 0: the newest one again."""

    request_id: Count
    version: Count
    timeout_s: Seconds
    until: Until | None = None


class Withdraw(_Message, frozen=True):
    """Asks to withdraw a bad version: no worker is to read or run it any more."""

    request_id: Count
    version: Number
    timeout_s: Seconds
    until: Until | None = None


class Retain(_Message, frozen=True):
    """Asks to keep the last copies of so many of the newest versions, and of one more, in so many failure domains."""

    request_id: Count
    newest: Annotated[int, msgspec.Meta(ge=0, le=RETAIN_MAX)]
    domains: Domains = 1
    across: Across = "host"
    until: Until | None = None
    also: Count = 0


class Begin(_Message, frozen=True):
    """A trainer starts: asks for the next attempt, at the step that it resumes from (0: from none).

    Every shard of its replica asks, with the same step and the id of this launch, which its ranks share; all are
    answered at once. gone: processes of its former incarnations that have ended, as the worker has found out.
    waits: until rivals that may be alive are declared dead; else the answer names them at once."""

    request_id: Count
    step: Step
    timeout_s: Seconds
    launch_id: Word = ""
    gone: Processes = ()
    waits: bool = False
    until: Until | None = None


class AskVersions(_Message, frozen=True):
    """Asks for the versions of the session's history. Answered with `Versions`."""

    request_id: Count


class AskStatus(_Message, frozen=True):
    """Asks for the whole hub's state, for operators. Needs no session."""

    request_id: Count


# The requests of a session, which are answered. Each has a `request_id`.
Request: TypeAlias = (
    Publish | Unpublish | Acquire | Abandon | Wait | Target | Pin | Withdraw | Retain | Begin | AskVersions
)
# Requests that change something, and are valid until an instant. Those that only state a fact (Abandon, an Unpublish of
# what is gone) are true whenever they arrive.
Dated: TypeAlias = Publish | Unpublish | Acquire | Pin | Withdraw | Retain | Begin
ClientMessage: TypeAlias = Hello | Heartbeat | Bye | Release | AskStatus | Request

# --- hub to client ---


class Welcome(_Message, frozen=True):
    """Answers a Hello: the session is open. not_held: holdings in it that the hub has refused, and why."""

    hub: Session  # the hub's incarnation
    heartbeat_s: Seconds
    session_timeout_s: Seconds
    request_id: Count = 0  # of the Hello that it answers
    directive: Directive = NO_DIRECTIVE
    clock: float = 0.0  # the hub's, by which leases and requests expire
    not_held: Annotated[tuple[tuple[ShardKey, Text], ...], msgspec.Meta(max_length=NOT_HELD_MAX)] = ()


class Unknown(_Message, frozen=True):
    """The hub does not know this session, or not all of it (it was restarted, or the session expired): send Hello."""

    hub: HubLife = b""  # its incarnation, for the Hello to name; b"": it is older than this field
    clock: float = 0.0  # as in Welcome; 0: not given


class Alive(_Message, frozen=True):
    """Answers a heartbeat. resend: requests that the hub never received. directive: when the worker knows another one.

    It comes without a heartbeat when a directive is decided, when a reader has got other bytes from this worker than
    were published (`doubted` names the shard and its segments), when a reader has lost its lease on this worker because
    it got nothing under it for too long (`idle` names it), or when the worker is asked to read a version and to `hold`
    a copy of it for others. All of this is one message, so that older workers can read it."""

    resend: Requests = ()
    directive: Directive | None = None
    doubted: tuple[ShardKey, Annotated[tuple[Count, ...], msgspec.Meta(max_length=CORRUPT_MAX)]] | None = None
    clock: float = 0.0  # as in Welcome; 0: not given
    idle: Text = ""
    hold: Count = 0
    hub: HubLife = b""  # the one with this clock
    name_proof: Annotated[bytes, msgspec.Meta(max_length=16)] = b""  # proves this session's name to the next hub
    unreached: Text = ""  # for the worker's log: that a reader cannot connect to it
    heartbeat_s: Seconds = 0.0  # between heartbeats from now on; 0: as before


class Done(_Message, frozen=True):
    """The request was carried out (Publish, Retain, Abandon, Pin, Withdraw). serial: of a Retain, as in a directive."""

    request_id: Count
    serial: Serial = 0


class Unpublished(_Message, frozen=True):
    """Answers an Unpublish: no lease is left. cut_off: readers whose leases ended only because of the deadline.

    must_retain: this is the last copy of a retained version: move it to host memory and serve it from there."""

    request_id: Count
    cut_off: Annotated[tuple[WorkerName, ...], msgspec.Meta(max_length=65536)] = ()
    must_retain: bool = False


class Granted(_Message, frozen=True):
    """Answers an Acquire: a source for every shard that is needed, under one lease."""

    request_id: Count
    version: Count
    layout: Name
    shard_count: Count
    grants: Annotated[tuple[Grant, ...], msgspec.Meta(max_length=GRANTS_MAX)]
    claim: ShardKey | None = None  # the shard this reader is now expected to convert and publish
    generation: Count = 0  # the generation of "latest" in which its replica agreed on this version; 0: none
    hub: HubLife = b""  # the one that has granted it
    awaited: bool = True  # others read the layout of that claim


class Visible(_Message, frozen=True):
    """Answers a Wait or a Target: this version is visible."""

    request_id: Count
    version: Count


class Begun(_Message, frozen=True):
    """Answers a Begin of every shard of the trainer: this is their attempt."""

    request_id: Count
    attempt: Attempt
    hub: HubLife = b""  # the one that answers


class Rivals(_Message, frozen=True):
    """Answers a Begin that does not wait: workers that still count as the trainer, and their processes where known."""

    request_id: Count
    workers: Annotated[tuple[Text, ...], msgspec.Meta(max_length=1024)]
    processes: Processes


class Refused(_Message, frozen=True):
    """The request failed; `error` is the name of a class in errors.py, see `errors.refusal`."""

    request_id: Count
    error: ErrorCode
    message: Text


class Versions(_Message, frozen=True):
    """Answers AskVersions: the versions of the history that the hub knows of, in order. left_out: the number of names,
    layouts and versions that did not fit."""

    request_id: Count
    versions: Annotated[tuple[VersionInfo, ...], msgspec.Meta(max_length=65536)]
    left_out: Count = 0


class Status(_Message, frozen=True):
    """Answers AskStatus, see `report.report`."""

    request_id: Count
    report: dict[str, object]


class SourceGone(_Message, frozen=True):
    """A source that this worker reads from has left or was declared dead."""

    session: Session


class MayRelease(_Message, frozen=True):
    """Names copies that had to be retained and are not needed any more."""

    keys: Annotated[tuple[ShardKey, ...], msgspec.Meta(max_length=65536)]


# Each carries the `request_id` of its request.
Reply: TypeAlias = Done | Unpublished | Granted | Visible | Begun | Rivals | Refused | Versions | Status
HubMessage: TypeAlias = Welcome | Unknown | Alive | SourceGone | MayRelease | Reply


def holdings_checksum(held: Iterable[tuple[ShardKey, bool]]) -> int:
    """Return a number by which two sides check that they mean the same shards, and the same of them complete."""
    return 1 + zlib.crc32(msgspec.msgpack.encode(sorted(held)))


# --- frames ---

_HEADER = MAGIC + bytes([PROTOCOL])
_encoder = msgspec.msgpack.Encoder()
_from_client: msgspec.msgpack.Decoder[ClientMessage] = msgspec.msgpack.Decoder(ClientMessage)
_from_hub: msgspec.msgpack.Decoder[HubMessage] = msgspec.msgpack.Decoder(HubMessage)


def encode(message: ClientMessage | HubMessage) -> bytes:
    """Return one frame: the protocol's version, then the message in MessagePack."""
    return _HEADER + _encoder.encode(message)


def decode_from_client(frame: bytes) -> ClientMessage:
    """Decode a message. Raise ProtocolError unless a client of this protocol version may send it."""
    return _decode(frame, _from_client, FROM_CLIENT_SIZE_BYTES_MAX)


def decode_from_hub(frame: bytes) -> HubMessage:
    """Decode a message. Raise ProtocolError unless a hub of this protocol version may send it."""
    return _decode(frame, _from_hub, FROM_HUB_SIZE_BYTES_MAX)


_Decoded = TypeVar("_Decoded")


def _decode(frame: bytes, decoder: msgspec.msgpack.Decoder[_Decoded], size_bytes_max: int) -> _Decoded:
    if len(frame) > size_bytes_max:
        raise ProtocolError(f"message of {len(frame)} bytes, the limit is {size_bytes_max}", phase="decode")
    if frame[: len(MAGIC)] != MAGIC:
        raise ProtocolError("not a tensorhub message: is something else talking to this port?", phase="decode")
    if frame[: len(_HEADER)] != _HEADER:
        theirs, to_do = frame[2] if len(frame) > 2 else "missing", "install the same tensorhub_plugins on both sides"
        raise ProtocolError(f"protocol version {theirs}, this side speaks {PROTOCOL}: {to_do}", phase="decode")
    try:
        return decoder.decode(memoryview(frame)[len(_HEADER) :])
    except DECODE_ERRORS as error:
        raise ProtocolError(f"malformed message: {str(error):.300}", phase="decode") from error  # it may quote a lot
