"""The interface of transports: `Transport` serves a `Shelf` of offers, a `Link` reads one of them. Nothing is optional.

What every transport promises, and `check_transport` of tests/support/transport_suite checks:

* A segment is yielded once all its bytes are in place, and they are what was published: never bytes that were read
  after the offer was withdrawn.
* Nothing waits beyond its deadline, nor long for a peer that has died, frozen or become unreachable.
* A source that waits for bytes itself reports so while it waits: `Link.progress`.
* `Offer.withdraw` cuts every reader off and returns when no thread of this process reads its memory for them any more.
  A reader that has the memory itself (shm) may still read: it detects that before it yields anything.
* Whatever bytes an untrusted peer sends, the source survives, bounds what it allocates, and logs one line about it.
* Bytes are never pickled, and copied as few times as the medium allows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from tensorhub_plugins.core.deltas.frame import Step
from tensorhub_plugins.core.deltas.pace import Pace
from tensorhub_plugins.core.errors import UsageError, VersionGone
from tensorhub_plugins.core.manifest import Manifest
from tensorhub_plugins.core.protocol.messages import Ticket
from tensorhub_plugins.core.transports.offer import Offer
from tensorhub_plugins.core.types import ShardKey

if TYPE_CHECKING:
    from tensorhub_plugins.core.memory.loans import Borrowed
    from tensorhub_plugins.core.memory.moves import Move
    from tensorhub_plugins.core.memory.slab import Slab

CHECK_S = 0.05  # how soon a thread that waits for an offer notices that its reader is gone
EXPECT_S_MAX = 5.0  # for a source to begin its own read of the shard: less than its reader waits for an answer


class NotServable(UsageError):
    """This transport cannot serve this shard: try the next one. Shared memory and an adopted slab, for example."""


class Shelf(Protocol):
    """The offers of a source. Called from serving threads."""

    def find(self, key: ShardKey) -> Offer | None:
        """Return the offer of this shard, or None when there is none (any more)."""

    def await_offer(self, key: ShardKey, as_of: int, deadline: float) -> Offer | None:
        """Do as `find`, but wait for an offer that is about to be made, because this worker was told to read the shard.

        Return None at the deadline, an instant of time.monotonic(), and at once when no such offer is to come."""


def find_offer(shelf: Shelf, key: ShardKey, as_of: int, check: Callable[[], None]) -> Offer:
    """Return the offer that a reader was granted, after waiting for it if it is about to be made, or raise VersionGone.

    check: called now and then during the wait; it raises to end the wait."""
    offer = shelf.find(key) or _await_offer(shelf, key, as_of, check)
    if offer is None or offer.created_after > as_of:
        raise VersionGone("the source does not offer it")
    return offer


def _await_offer(shelf: Shelf, key: ShardKey, as_of: int, check: Callable[[], None]) -> Offer | None:
    expires_at = time.monotonic() + EXPECT_S_MAX
    while True:
        check()
        looks_at = min(expires_at, time.monotonic() + CHECK_S)
        offer = shelf.await_offer(key, as_of, looks_at)
        if offer is not None or looks_at == expires_at or time.monotonic() < looks_at:  # or none is to come
            return offer


class Transport(Protocol):
    """One way to move bytes. An instance serves one shelf at most and connects to any number of sources."""

    name: str

    @staticmethod
    def available() -> str | None:
        """Return None where this transport works; else the reason why it does not, as half a sentence."""

    def serve(self, shelf: Shelf) -> str:
        """Serve this shelf in threads of its own from now on; return the endpoint that peers connect to."""

    def connect(self, endpoint: str, *, deadline: float, far: bool = False) -> Link:
        """Connect to a source. `deadline` is a value of time.monotonic(). Raise SourceLost if it is unreachable.

        endpoint: of a transport that leaves the host it may be several that lead to the source, with commas between.
        far: it is in another data centre."""

    def close(self) -> None:
        """Stop serving, cut readers off, end all threads. Idempotent."""


class Bases(Protocol):
    """What a reader holds of other versions of the stream that it reads into a slab with the same stream. Used by the
    thread that reads; only a transport that sends deltas does."""

    @property
    def count(self) -> int:
        """Return for how many segments there is a base."""

    def named(self, segment: int) -> tuple[bytes, ...]:
        """Return the digests of what is here of this segment, at most two."""

    def forget(self, segment: int) -> None:
        """Forget what the slab held of this segment: it is about to be overwritten."""

    def patch(self, segment: int, frame: memoryview, views: Sequence[memoryview]) -> list[Step] | None:
        """Make the segment of a base and of the deltas in the frame, in these views, and return the deltas; None: that
        is not possible."""

    def patched(self, segment: int, steps: Sequence[Step] | None) -> None:
        """Note that the result of these has the digest of what was published, and keep them, for others; None: that
        nothing right came of it."""

    def pace(self, peer: str) -> Pace:
        """Return how fast this peer was read so far; kept up to date by the link."""


class LinkProgress:
    """The last reported activity of a link's source. Written by the threads that read, read by any.

    heard_at: its last sign of life, which may be that it waits for bytes itself; an instant of time.monotonic().
    waiting_at: when it last reported that it waits for bytes itself; 0.0: never. A source that waits is not slow.
    delayed_segments: those of this read for which the source had to wait. deltas: those of this read that came as a
    delta, and its size in bytes. is_kept: the connection has served another link: it may be lost by now, unnoticed."""

    def __init__(self, *, is_kept: bool = False) -> None:
        self.is_kept = is_kept
        self.heard_at = time.monotonic()
        self.waiting_at = 0.0
        self.delayed_segments: set[int] = set()
        self.deltas: dict[int, int] = {}

    def begin_read(self) -> None:
        """Note that a read begins: no segment of it was delayed yet."""
        self.delayed_segments.clear()
        self.deltas.clear()

    def heard(self) -> None:
        """Note that something came from the source."""
        self.heard_at = time.monotonic()

    def waiting(self) -> None:
        """Note that the source reports that it waits for bytes itself."""
        self.heard_at = self.waiting_at = time.monotonic()


More: TypeAlias = Callable[[], Sequence[int]]  # additional segments to read; empty: none now


class Link(Protocol):
    """One reader's connection to one source, used by one thread at a time; any thread may call `close`. After an error
    other than VersionGone and NotServable it is closed.

    peer: the endpoint it is connected to. progress: the source's last reported activity. digests: whether `read`
    computes them, for `digest`. ticket: the lease's, for `open`. borrows: whether `open` asks for a loan. bases: what
    the reader of `read` holds of other versions; None: it wants no deltas now. wants_deltas: whether it could take
    some, if not of this version then of the next one."""

    peer: str
    progress: LinkProgress
    digests: bool
    ticket: Ticket | None
    borrows: bool
    bases: Bases | None
    wants_deltas: bool

    def open(self, key: ShardKey, as_of: int, *, deadline: float) -> Manifest:
        """Begin to read an offer. VersionGone if it is not offered, NotServable if not over this transport.

        as_of: the grant's; an offer that was created after it is another one."""

    def take_loan(self) -> Borrowed | None:
        """Return the source's own memory of what was opened, owned by the caller from now on; None: it lends none.

        A slab over it (`Slab.borrow`) may be the target of `read`, which then waits for the segments and digests them.
        """

    def read(
        self, segments: Sequence[int], target: Slab, moves: Sequence[Move], *, deadline: float, more: More | None = None
    ) -> Iterator[int]:
        """Read these segments into `target` and yield each once its bytes are in place, in any order.

        more: called repeatedly for further segments, so that the source never runs out of work; the read ends when all
        have arrived and there are no more.

        moves: which bytes of the source's stream go where in the target's, in the source's order, as `moves.plan` makes
        them; bytes in no move are not wanted. The memory of a segment that was not yielded may hold anything. An
        iterator that is not exhausted costs the link. Once it has ended, for whatever reason, nothing writes into
        `target` any more. Raises SourceLost."""

    def digest(self, segment: int) -> bytes:
        """Return the digest of the bytes received for a segment, unwanted ones too, to compare with the manifest's.

        Valid from the moment `read` yields it until the next `read` or `open`."""

    def check(self, *, deadline: float, waits: bool = True) -> bool:
        """End what `open` began; return whether the offer is still the same. waits: False: or that is unknown."""

    def close(self) -> None:
        """Close the link. Idempotent."""
