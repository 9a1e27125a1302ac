"""What a transport is: `Transport` serves a `Shelf` of offers, a `Link` reads one of them. Nothing here is optional.

What every transport promises, and `testing.check_transport` checks:

* A segment is yielded once all its bytes are in place, and they are what was published: never bytes that were read
  after the offer was withdrawn.
* Nothing waits beyond its deadline, nor long for a peer that has died, frozen or gone away.
* A source that waits for bytes itself says so while it waits: `Link.progress`.
* `Offer.withdraw` cuts every reader off and returns when no thread of this process reads its memory for them any more.
  A reader that has the memory itself (shm) may still read: it finds out before it yields anything.
* Whatever bytes an untrusted peer sends, the source lives, bounds what it allocates, and logs one line about it.
* Bytes are never pickled, and copied as few times as the medium allows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from tensorhub_plugins.core.errors import UsageError, VersionGone
from tensorhub_plugins.core.manifest import Manifest
from tensorhub_plugins.core.protocol.messages import Ticket
from tensorhub_plugins.core.transports.offer import Offer
from tensorhub_plugins.core.types import ShardKey

if TYPE_CHECKING:
    from tensorhub_plugins.core.memory.loans import Borrowed
    from tensorhub_plugins.core.memory.moves import Move
    from tensorhub_plugins.core.memory.slab import Slab

CHECK_S = 0.05  # how soon one that waits for an offer notices that nobody wants it any more
EXPECT_S_MAX = 5.0  # for a source to begin to read what its own reader wants: below what that one waits for an answer


class NotServable(UsageError):
    """This transport cannot serve this shard: try the next one. Shared memory and an adopted slab, for example."""


class Shelf(Protocol):
    """What a source has to offer. Called from serving threads."""

    def find(self, key: ShardKey) -> Offer | None:
        """The offer of this shard, or None when there is none (any more)."""
        ...

    def expect(self, key: ShardKey, as_of: int, deadline: float) -> Offer | None:
        """`find` that waits for an offer that is about to be made, because this worker was told to read the shard.

        None at the deadline, an instant of time.monotonic(), and at once when no such offer is to come."""
        ...


def find_offer(shelf: Shelf, key: ShardKey, as_of: int, check: Callable[[], None]) -> Offer:
    """The offer that a reader was granted, waited for where it is about to be made. VersionGone without one.

    check: called now and then while this waits; raises what ends the wait."""
    offer = shelf.find(key)
    expires_at = time.monotonic() + EXPECT_S_MAX
    while offer is None:
        check()
        looks_at = min(expires_at, time.monotonic() + CHECK_S)
        offer = shelf.expect(key, as_of, looks_at)
        if looks_at == expires_at or time.monotonic() < looks_at:  # in vain, or no such offer is to come
            break
    if offer is None or offer.created_after > as_of:
        raise VersionGone("the source does not offer it")
    return offer


class Transport(Protocol):
    """One way to move bytes. An instance serves one shelf at most and connects to any number of sources."""

    name: str

    @staticmethod
    def available() -> str | None:
        """None where this transport works; else the reason why it does not, as half a sentence."""
        ...

    def serve(self, shelf: Shelf) -> str:
        """Serve this shelf in threads of its own from now on; returns the endpoint that peers connect to."""
        ...

    def connect(self, endpoint: str, *, deadline: float, far: bool = False) -> Link:
        """Reach a source. `deadline` is a value of time.monotonic(). SourceLost when it cannot be reached.

        far: it is in another data centre."""
        ...

    def close(self) -> None:
        """Stop serving, cut readers off, end all threads. Idempotent."""
        ...


class LinkProgress:
    """What the source of a link was last heard to do. Written by the threads that read, looked at by any.

    heard_at: its last sign of life, which may be that it waits for bytes itself; an instant of time.monotonic().
    waiting_at: when it last said that it waits for bytes itself; 0.0: never. A source that waits is not slow.
    delayed_segments: those of this read for which the source had to wait.
    """

    def __init__(self) -> None:
        self.heard_at = time.monotonic()
        self.waiting_at = 0.0
        self.delayed_segments: set[int] = set()

    def begin_read(self) -> None:
        """A read begins: no segment of it was waited for yet."""
        self.delayed_segments.clear()

    def heard(self) -> None:
        """Anything at all came from the source."""
        self.heard_at = time.monotonic()

    def waiting(self) -> None:
        """The source says that it waits for bytes itself."""
        self.heard_at = self.waiting_at = time.monotonic()

    def delayed(self, segment: int) -> None:
        """The source had to wait for this segment before it could serve it."""
        self.delayed_segments.add(segment)


More: TypeAlias = Callable[[], Sequence[int]]  # additional segments to read; empty: none now


class Link(Protocol):
    """One reader's way to one source, used by one thread at a time; `close` may come from any thread. After an error
    other than VersionGone and NotServable it is closed.

    progress: what the source was last heard to do. digests: whether `read` computes them, for `digest`. ticket: of
    the lease, for `open`. borrows: whether `open` asks for a loan."""

    progress: LinkProgress
    digests: bool
    ticket: Ticket | None
    borrows: bool

    def open(self, key: ShardKey, as_of: int, *, deadline: float) -> Manifest:
        """Begin to read an offer. VersionGone when it is not offered, NotServable when not over this transport.

        as_of: the grant's; an offer that was created after it is another one."""
        ...

    def take_loan(self) -> Borrowed | None:
        """The source's own memory of what was opened, the caller's from now on; None: it lends none.

        A slab over it (`Slab.borrow`) may be the target of `read`, which then waits for the segments and digests
        them."""
        ...

    def read(
        self,
        segments: Sequence[int],
        target: Slab,
        moves: Sequence[Move],
        *,
        deadline: float,
        more: More | None = None,
    ) -> Iterator[int]:
        """Read these segments into `target` and yield each once its bytes are in place, in any order.

        more: asked again and again for what else is to be read, so that the source never runs out of work; the read
        ends when all has arrived and there is no more.

        moves: which bytes of the source's stream go where in the target's, in the source's order, as `moves.plan`
        makes them; what is in none is not wanted. A segment that was not yielded may hold anything. An iterator that
        is not exhausted costs the link. Once it has ended, however that was, nothing writes into `target` any more.
        Raises SourceLost.
        """
        ...

    def digest(self, segment: int) -> bytes:
        """Digest of the bytes received for a segment, unwanted ones included, to be compared with the manifest's.

        Valid from the moment `read` yields it until the next `read` or `open`.
        """
        ...

    def check(self, *, deadline: float) -> bool:
        """End what `open` began and say whether the offer is still the one that was opened; False: withdrawn."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...
