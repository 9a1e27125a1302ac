"""The events and effects of `Replication`: what happens to a transfer, and what is done about it. PURE."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from tensorhub_plugins.core import errors
from tensorhub_plugins.core.manifest import Manifest
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.protocol.directive import Directive
from tensorhub_plugins.core.types import ShardKey

# --- events ---


class Begin(msgspec.Struct, frozen=True):
    """The transfer begins: comes first, once."""


class Answer(msgspec.Struct, frozen=True):
    """The hub's answer to an AskSources, or its refusal; HubUnreachable: no answer in time."""

    request_id: int
    reply: m.Granted | errors.TensorHubError
    additional: bool = False  # the request asked for one in addition to sources that it named


class Opened(msgspec.Struct, frozen=True):
    """The source of this shard has sent its manifest (already checked for consistency). slower: faster ways by which it
    is not read, and why, for the log; "": it is read by the fastest."""

    shard: int
    session: bytes
    manifest: Manifest
    slower: str = ""


class Prepared(msgspec.Struct, frozen=True):
    """The answer to Prepare: memory is allocated. needed: the segments with bytes that are wanted, in order.

    is_borrowed: it is the memory of the source that Prepare named. size_bytes: of these segments, about. based: how
    many have an earlier version here, so that they may come as what has changed."""

    shard: int
    needed: tuple[int, ...]
    is_borrowed: bool = False
    size_bytes: int = 0
    based: int = 0


class Arrived(msgspec.Struct, frozen=True):
    """A segment is in place; intact: its digest is the manifest's. waited: it had to reach its source first.

    tensors: those that have bytes in it, where it is not intact. by_delta: what has changed in it came."""

    shard: int
    session: bytes
    segment: int
    intact: bool
    waited: bool = False
    tensors: tuple[str, ...] = ()
    by_delta: bool = False


class SourceWaiting(msgspec.Struct, frozen=True):
    """The source of this shard is alive, and waits for bytes itself."""

    shard: int
    session: bytes


class EpochChecked(msgspec.Struct, frozen=True):
    """The answer to ConfirmEpoch. unchanged: the source had not withdrawn what was read until then."""

    shard: int
    session: bytes
    unchanged: bool


class Lost(msgspec.Struct, frozen=True):
    """The source of this shard failed: refused, died, froze or disconnected us. refused: its address refuses
    connections. unreached: no connection to it was ever made. cut: it took one, and closed it before it was opened."""

    shard: int
    session: bytes
    why: str
    refused: bool = False
    unreached: bool = False
    cut: bool = False


class SourceGone(msgspec.Struct, frozen=True):
    """The hub has reported that this worker is gone."""

    session: bytes


class Directed(msgspec.Struct, frozen=True):
    """The hub has sent a directive, by which versions may be over."""

    directive: Directive


class Tick(msgspec.Struct, frozen=True):
    """Time has passed: check the timers."""


Event: TypeAlias = (
    Begin | Answer | Opened | Prepared | Arrived | SourceWaiting | EpochChecked | Lost | SourceGone | Directed | Tick
)

# --- effects ---


class AskSources(msgspec.Struct, frozen=True):
    """Send this Acquire. The shell numbers it; the answer carries the number."""

    acquire: m.Acquire


class Restart(msgspec.Struct, frozen=True):
    """Forget everything that was read: the transfer goes on in another layout, or in other memory."""

    layout: str


class Open(msgspec.Struct, frozen=True):
    """Connect to this source and ask for the shard's manifest."""

    key: ShardKey
    grant: m.Grant
    request_id: int


class Read(msgspec.Struct, frozen=True):
    """Read these segments after those asked for before."""

    shard: int
    session: bytes
    segments: tuple[int, ...]


class Prepare(msgspec.Struct, frozen=True):
    """Find memory for this source shard; answered by Prepared. lender: the source that may lend its own memory."""

    key: ShardKey
    manifest: Manifest
    lender: bytes | None = None


class ConfirmEpoch(msgspec.Struct, frozen=True):
    """Nothing more is read from this source: ask whether it has withdrawn its offer meanwhile."""

    shard: int
    session: bytes


class Close(msgspec.Struct, frozen=True):
    """Close the link to this shard's source. What it was asked for and has not arrived may be asked of another at once:
    before the new one writes, the old one must have stopped."""

    shard: int
    session: bytes


class Verified(msgspec.Struct, frozen=True):
    """This segment, which came from that source, may be served to others."""

    shard: int
    session: bytes
    segment: int


class Complete(msgspec.Struct, frozen=True):
    """All bytes have arrived, and are verified where that was asked for. Nothing follows."""


class GiveUp(msgspec.Struct, frozen=True):
    """The transfer failed: raise this error. Nothing follows."""

    error: errors.TensorHubError


Effect: TypeAlias = (
    AskSources | Restart | Open | Prepare | Read | ConfirmEpoch | Close | m.Release | Verified | Complete | GiveUp
)
