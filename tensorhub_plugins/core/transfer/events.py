"""What happens to a transfer, and what is done about it: the events and effects of `Replication`. PURE."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from tensorhub_plugins.core import errors
from tensorhub_plugins.core.manifest import Manifest
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.types import ShardKey

# --- events ---


class Begin(msgspec.Struct, frozen=True):
    """The transfer begins: comes first, once."""


class Answer(msgspec.Struct, frozen=True):
    """The hub's answer to an AskSources, or what it refused with; HubUnreachable: no answer in time."""

    request_id: int
    reply: m.Granted | errors.TensorHubError
    additional: bool = False  # the question named sources that it came beside


class Opened(msgspec.Struct, frozen=True):
    """The source of this shard has shown its manifest (already checked to hold together)."""

    shard: int
    session: bytes
    manifest: Manifest


class Prepared(msgspec.Struct, frozen=True):
    """The answer to Prepare: there is memory. needed: the segments with bytes that are wanted, in order.

    is_borrowed: it is the memory of the source that Prepare named. size_bytes: of these segments, about."""

    shard: int
    needed: tuple[int, ...]
    is_borrowed: bool = False
    size_bytes: int = 0


class Arrived(msgspec.Struct, frozen=True):
    """A segment is in place; intact: its digest is the manifest's. waited: it had to reach its source first.

    tensors: that have bytes in it, where it is not intact.
    """

    shard: int
    session: bytes
    segment: int
    intact: bool
    waited: bool = False
    tensors: tuple[str, ...] = ()


class SourceWaiting(msgspec.Struct, frozen=True):
    """The source of this shard lives, and waits for bytes itself."""

    shard: int
    session: bytes


class EpochChecked(msgspec.Struct, frozen=True):
    """The answer to ConfirmEpoch. unchanged: the source had not withdrawn what was read until then."""

    shard: int
    session: bytes
    unchanged: bool


class Lost(msgspec.Struct, frozen=True):
    """The source of this shard failed: refused, died, froze or cut us off. refused: nobody listens at its address.
    unreached: it was never connected to."""

    shard: int
    session: bytes
    why: str
    refused: bool = False
    unreached: bool = False


class SourceGone(msgspec.Struct, frozen=True):
    """The hub says that this worker is no more."""

    session: bytes


class Directed(msgspec.Struct, frozen=True):
    """Which versions are over, as the worker has heard."""

    directive: m.Directive


class Tick(msgspec.Struct, frozen=True):
    """Time has passed: timers are looked at."""


Event: TypeAlias = (
    Begin | Answer | Opened | Prepared | Arrived | SourceWaiting | EpochChecked | Lost | SourceGone | Directed | Tick
)

# --- effects ---


class AskSources(msgspec.Struct, frozen=True):
    """Send this Acquire. The shell numbers it; the answer says which number it had."""

    acquire: m.Acquire


class Restart(msgspec.Struct, frozen=True):
    """Forget everything that was read: it goes on in another layout, or in other memory."""

    layout: str


class Open(msgspec.Struct, frozen=True):
    """Connect to this source and ask for the shard's manifest."""

    key: ShardKey
    grant: m.Grant
    request_id: int


class Read(msgspec.Struct, frozen=True):
    """Read these after those asked for before."""

    shard: int
    session: bytes
    segments: tuple[int, ...]


class Prepare(msgspec.Struct, frozen=True):
    """Find memory for this source shard; answered by Prepared. lender: the source that may be asked for its own."""

    key: ShardKey
    manifest: Manifest
    lender: bytes | None = None


class ConfirmEpoch(msgspec.Struct, frozen=True):
    """Nothing more is read from this source: ask whether it has withdrawn its offer meanwhile."""

    shard: int
    session: bytes


class Close(msgspec.Struct, frozen=True):
    """Close the link to this shard's source. What it was asked for and has not arrived may be asked of another at once:
    nothing of the old may be written any more when the new begins."""

    shard: int
    session: bytes


class EndLease(msgspec.Struct, frozen=True):
    """Tell the hub that nothing more is read under this grant. shard: None for all. lost: its source failed. corrupt:
    segments that came with other bytes than were published. refused: as in `Lost`."""

    request_id: int
    shard: int | None
    lost: bool
    corrupt: tuple[int, ...] = ()
    refused: bool = False


class Verified(msgspec.Struct, frozen=True):
    """This segment, which came from that source, may be served on."""

    shard: int
    session: bytes
    segment: int


class Complete(msgspec.Struct, frozen=True):
    """All bytes are here, and verified where that was asked for. Nothing follows."""


class GiveUp(msgspec.Struct, frozen=True):
    """The transfer failed: this is to be raised. Nothing follows."""

    error: errors.TensorHubError


Effect: TypeAlias = (
    AskSources | Restart | Open | Prepare | Read | ConfirmEpoch | Close | EndLease | Verified | Complete | GiveUp
)
