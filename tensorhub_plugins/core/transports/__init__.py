"""How bytes get from a source's slab into a target's: one protocol, several transports.

A source has a *shelf* of *offers*, one for each shard it has published, and serves it on every transport it knows. A
reader connects, opens one offer by its `ShardKey`, reads segments of it straight into its own slab, checks that
nothing changed meanwhile, and closes. What every transport promises, and `testing.check_transport` checks:

* A segment is yielded once all its bytes are in place, and they are what was published: never bytes that were read
  after the offer was withdrawn.
* Nothing waits beyond its deadline, nor long for a peer that has died, frozen or gone away.
* `Offer.withdraw` cuts every reader off and returns when no thread of this process reads its memory for them any more.
  A reader that has the memory itself (shm) may still read: it finds out before it yields anything.
* Whatever bytes a stranger sends, the source lives, bounds what it allocates, and says so in one line of its log.
* Bytes are never pickled, and copied as few times as the medium allows.

Which transport two workers use is decided by trying: the reader goes through those it prefers in order, as far as the
source has an endpoint for them, until one connects and opens.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

from tensorhub_plugins.core.errors import SourceLost, UsageError, VersionGone
from tensorhub_plugins.core.manifest import (
    Manifest,
)
from tensorhub_plugins.core.types import (
    ShardKey,
)

if TYPE_CHECKING:
    from tensorhub_plugins.core.memory.moves import Move
    from tensorhub_plugins.core.memory.slab import Slab

# Imported when first asked for: importing the package opens nothing and needs nothing.
MODULES: dict[str, tuple[str, str]] = {
    "memory": ("tensorhub_plugins.core.transports.inproc", "MemoryTransport"),
    "shm": ("tensorhub_plugins.core.transports.shm.transport", "ShmTransport"),
    "tcp": ("tensorhub_plugins.core.transports.tcp", "TcpTransport"),
    "rdma": ("tensorhub_plugins.core.transports.rdma.transport", "RdmaTransport"),
}
# What a worker uses when it names none, best first, as far as its machine has them.
DEFAULT_TRANSPORTS = ("shm", "rdma", "tcp")
CUT_S_MAX = 10.0  # a cut reader's thread only has to leave one system call; beyond this something is broken


class NotServable(UsageError):
    """This transport cannot serve this shard: try the next one. Shared memory and an adopted slab, for example."""


class Shelf(Protocol):
    """What a source has to offer. Called from serving threads.

    expect(key, lease, deadline) (optional): `find` that waits for an offer that is about to be made, because this
    worker has just been told where to read it.
    """

    def find(self, key: ShardKey) -> Offer | None:
        """The offer of this shard, or None when there is none (any more)."""
        ...


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


More: TypeAlias = Callable[[], Sequence[int]]  # further segments; empty: none now


class Link(Protocol):
    """One reader's way to one source, used by one thread at a time; `close` may come from any thread. After an error
    other than VersionGone and NotServable it is closed.

    heard_at (optional): time.monotonic() of the source's last sign of life, which may be that it waits for bytes
    itself; without it only a segment that arrives is one. alive_at, late (optional): when it last said that it waits,
    and the segments of this read for which it did: what waits is not slow. digests: whether `read` computes them, for
    `digest`.
    """

    digests: bool

    def open(self, key: ShardKey, lease: int, *, deadline: float) -> Manifest:
        """Begin to read an offer. VersionGone when it is not offered, NotServable when not over this transport.

        lease: the grant's `as_of`; an offer that is younger is another one."""
        ...

    def read(
        self,
        segments: Sequence[int],
        target: Slab,
        placement: Sequence[int] | Sequence[Move],
        *,
        deadline: float,
        more: More | None = None,
    ) -> Iterator[int]:
        """Read these segments into `target` and yield each once its bytes are in place, in any order.

        more: asked after every segment for what else is to be read, so that the source never runs out of work.

        placement: the moves of `reads.plan`; or, when tensors are wanted whole or not at all, for every tensor of the
        source's manifest its stream offset in `target`, -1: not wanted. A segment
        that was not yielded may hold anything. An iterator that is not exhausted costs the link. Raises SourceLost.
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


class Offer:
    """One published shard, and who reads it. Shared by the publisher and all serving threads.

    Segments are served once they are marked ready: all at once by a publisher, one by one by a reader that passes on
    what it has verified.
    """

    def __init__(self, key: ShardKey, manifest: Manifest, slab: Slab, epoch: int = 0, *, birth: int = 0) -> None:
        """birth: a number of the session with the hub from before the hub was told of it."""
        self.key = key
        self.birth = birth
        self.manifest = manifest
        self.slab = slab
        self.epoch = epoch  # told to readers, who compare it after reading
        self._ready = bytearray(manifest.segment_count)
        self._changed = threading.Condition()
        self._withdrawn = False
        self._readers: dict[int, Callable[[], None]] = {}
        self._next_reader = 0
        self._before: tuple[Slab, set[int]] | None = None  # where the bytes lay, and who may still read them there

    @property
    def version(self) -> int:
        return self.key.version

    # --- readiness ---

    def mark_ready(self, segment: int) -> None:
        """This segment's bytes are in the slab, and verified."""
        with self._changed:
            self._ready[segment] = 1
            self._changed.notify_all()

    def mark_all_ready(self) -> None:
        """Every segment's bytes are in the slab, and verified."""
        with self._changed:
            self._ready = bytearray(b"\x01") * len(self._ready)
            self._changed.notify_all()

    def wait_ready(self, segment: int, deadline: float) -> None:
        """Return when the segment may be read. SourceLost when the offer is withdrawn, or at the deadline."""
        if not self.poll_ready(segment, deadline):
            raise SourceLost(
                f"segment {segment} did not arrive at its source in time", version=self.version, phase="wait"
            )

    def poll_ready(self, segment: int, deadline: float) -> bool:
        """`wait_ready` that answers False at the deadline."""
        with self._changed:
            while not self._ready[segment]:
                if self._withdrawn:
                    break
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
            if self._withdrawn:
                raise SourceLost("the source withdrew its offer", version=self.version, phase="wait")
            return True

    # --- readers ---

    def move(self, slab: Slab) -> None:
        """The same bytes lie in this slab from now on. The one before is kept for those that read from it, who may have
        been told its addresses."""
        with self._changed:
            self._before = (self.slab, set(self._readers)) if self._readers else None
            self.slab = slab

    def attach(self, cut: Callable[[], None]) -> int:
        """A reader begins. `cut` must make its thread stop at once and not block. VersionGone when withdrawn."""
        with self._changed:
            if self._withdrawn:
                raise VersionGone("the source has withdrawn its offer", version=self.version, phase="open")
            reader = self._next_reader
            self._next_reader += 1
            self._readers[reader] = cut
            return reader

    def detach(self, reader: int) -> None:
        """A reader has ended, whatever the reason. Idempotent."""
        with self._changed:
            self._readers.pop(reader, None)
            if self._before is not None and self._before[1].isdisjoint(self._readers):
                self._before = None
            self._changed.notify_all()

    @property
    def active_readers(self) -> int:
        """Connections that have opened this offer and neither checked nor closed since; a link may have several."""
        with self._changed:
            return len(self._readers)

    def wait_no_readers(self, deadline: float) -> bool:
        """Wait until nobody reads; False at the deadline."""
        with self._changed:
            while self._readers:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
            return True

    @property
    def withdrawn(self) -> bool:
        with self._changed:
            return self._withdrawn

    def withdraw(self) -> None:
        """Raise the epoch, refuse new readers, cut off those there are, and return when they have left. Idempotent.

        To let readers finish first, end their leases and call `wait_no_readers` before. RuntimeError if a serving
        thread does not let go of the memory, which would be a bug: then the bytes must not be touched.
        """
        with self._changed:
            if not self._withdrawn:
                self._withdrawn = True
                self.epoch += 1
            # Under the lock: a reader that detaches meanwhile may already use its connection for another offer.
            for cut in list(self._readers.values()):
                cut()
            self._changed.notify_all()
        if not self.wait_no_readers(time.monotonic() + CUT_S_MAX):
            raise RuntimeError(f"{self.active_readers} readers of version {self.version} did not end when cut off")


def create(name: str, *, advertise_host: str | None = None) -> Transport:
    """A transport by name. UsageError when there is none of that name, or it does not work here (and why).

    advertise_host: the address of this host that peers reach, for transports that leave it; None: this host only.
    """
    reason = unavailable(name)
    if reason is not None:
        raise UsageError(f"transport {name!r} cannot be used here: {reason}")
    options = {"advertise_host": advertise_host} if name in ("tcp", "rdma") else {}
    return cast(Transport, _kind(name)(**options))


def unavailable(name: str) -> str | None:
    """Why this transport does not work on this machine, as half a sentence; None: it does. UsageError: no such name."""
    return cast("str | None", _kind(name).available())


def _kind(name: str) -> Any:
    if name not in MODULES:
        raise UsageError(f"there is no transport {name!r}; known are {', '.join(sorted(MODULES))}")
    module, attribute = MODULES[name]
    return getattr(import_module(module), attribute)


def choices(preferred: Sequence[str], endpoints: Mapping[str, str]) -> list[tuple[str, str]]:
    """(transport, endpoint) to try, best first: what the reader prefers as far as the source has it."""
    return [(name, endpoints[name]) for name in preferred if name in endpoints]
