"""The transport "memory": within one process, a copy from slab to slab. Importing this registers it by its name."""

from __future__ import annotations

import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from tensorhub_plugins.core.errors import SourceLost, UsageError, VersionGone
from tensorhub_plugins.core.manifest import Manifest
from tensorhub_plugins.core.memory.copying import copy_views
from tensorhub_plugins.core.memory.moves import Move
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.protocol.messages import Ticket
from tensorhub_plugins.core.security.leases import Gate
from tensorhub_plugins.core.transports import MODULES
from tensorhub_plugins.core.transports.interface import Bases, LinkProgress, More, Shelf, find_offer
from tensorhub_plugins.core.transports.offer import Offer
from tensorhub_plugins.core.transports.pump import pump
from tensorhub_plugins.core.transports.read_plan import ReadPlan, check_segments
from tensorhub_plugins.core.types import ShardKey

SCHEME = "memory://"
CLOSED_S = 0.05  # how soon a waiting reader notices that its link was closed

_served: dict[str, MemoryTransport] = {}  # endpoint -> the transport that serves it
_lock = threading.Lock()


class MemoryTransport:
    """A transport whose endpoints are names in a table of this process."""

    name = "memory"

    def __init__(self, gate: Gate | None = None, limits: object = None) -> None:
        """Make a transport. gate: learns which leases are read under; it is not asked to admit readers."""
        self._gate = gate
        self._endpoint: str | None = None
        self._shelf: Shelf | None = None
        self._links: weakref.WeakSet[MemoryLink] = weakref.WeakSet()  # that read from it or through it
        self._closed = False

    @staticmethod
    def available() -> str | None:
        return None

    def serve(self, shelf: Shelf) -> str:
        with _lock:
            if self._closed or self._endpoint is not None:
                raise UsageError("this transport is closed or serves already: one transport, one shelf")
            self._shelf = shelf
            self._endpoint = SCHEME + uuid.uuid4().hex
            _served[self._endpoint] = self
            return self._endpoint

    def connect(self, endpoint: str, *, deadline: float, far: bool = False) -> MemoryLink:
        with _lock:
            if self._closed:
                raise UsageError("the transport is closed")
            source = _served.get(endpoint)
            if source is None or source._shelf is None:
                raise SourceLost("nobody serves this endpoint in this process", peer=endpoint, phase="connect")
            link = MemoryLink(endpoint, source._shelf, source._gate)
            self._links.add(link)
            source._links.add(link)
            return link

    def close(self) -> None:
        with _lock:
            self._closed = True
            _served.pop(self._endpoint or "", None)
            links = list(self._links)
        for link in links:
            link.close()


class MemoryLink:
    """A link that reads another slab of this process directly."""

    def __init__(self, endpoint: str, shelf: Shelf, gate: Gate | None = None) -> None:
        self._endpoint = endpoint
        self._gate = gate
        self._shelf = shelf
        self._offer: Offer | None = None
        self._reader = -1
        self._plan: ReadPlan | None = None
        self._guard = threading.Lock()  # of the two below; never held while an offer's methods are called
        self._copying = False
        self._closed = False
        self.digests = True
        self.ticket: Ticket | None = None  # a reader in this process is no stranger
        self.borrows = False
        self.bases: Bases | None = None
        self.wants_deltas = False
        self.progress = LinkProgress()

    def open(self, key: ShardKey, as_of: int, *, deadline: float) -> Manifest:
        self._check_open("open")
        self._release()

        def check() -> None:
            self._check_open("open")
            if time.monotonic() >= deadline:
                raise SourceLost("the deadline passed", version=key.version, peer=self._endpoint, phase="open")

        try:
            offer = find_offer(self._shelf, key, as_of, check)
        except VersionGone as error:
            raise VersionGone(error.message, version=key.version, peer=self._endpoint, phase="open") from error
        self._reader = offer.attach(self._cut)
        self._offer = offer
        return offer.manifest

    def read(
        self,
        segments: Sequence[int],
        target: Slab,
        moves: Sequence[Move],
        *,
        deadline: float,
        more: More | None = None,
    ) -> Iterator[int]:
        self._check_open("read")
        if self._offer is None:
            raise UsageError("open a version before reading it")
        check_segments(self._offer.manifest, segments)
        self._plan = ReadPlan(self._offer.manifest, target, moves, digests=self.digests)
        self.progress.begin_read()
        stream = _InprocStream(self, self._offer, self._plan, deadline)
        return self._read(stream, segments, lambda due: more() if more is not None else ())

    def _read(
        self, stream: _InprocStream, segments: Sequence[int], additional: Callable[[int], Sequence[int]]
    ) -> Iterator[int]:
        finished = False
        try:
            yield from pump(stream, segments, additional)
            finished = True
        finally:
            if not finished:
                self.close()

    def take_loan(self) -> None:
        return None  # other users in this process could write to its memory

    def digest(self, segment: int) -> bytes:
        if self._plan is None:
            raise UsageError("nothing has been read")
        return self._plan.digest(segment)

    def check(self, *, deadline: float, waits: bool = True) -> bool:
        same = not self._closed and self._offer is not None and not self._offer.withdrawn
        self._release()
        return same

    def close(self) -> None:
        self._closed = True
        self._release()

    def _cut(self) -> None:
        """End the link at once, or with the copy under way: the source withdraws."""
        with self._guard:
            self._closed = True
            copying = self._copying
        if not copying:
            self._release()

    def _check_open(self, phase: str) -> None:
        if self._closed:
            raise SourceLost("the link is closed, or was cut off by the source", peer=self._endpoint, phase=phase)

    def _release(self) -> None:
        offer, self._offer = self._offer, None
        if offer is not None:
            offer.detach(self._reader)


class _InprocStream:
    """The segments of a slab of this process: announced by the offer, copied by the thread that reads."""

    window = batch = 1

    def __init__(self, link: MemoryLink, offer: Offer, plan: ReadPlan, deadline: float) -> None:
        self._link = link
        self._offer = offer
        self._plan = plan
        self._deadline = deadline
        self._copied: list[int] = []

    @property
    def in_flight(self) -> int:
        return len(self._copied)

    def request(self, segments: Sequence[int]) -> None:
        check_segments(self._offer.manifest, segments)

    def has_input(self) -> bool:
        return True  # `announced` looks at the offer, and returns soon

    def announced(self, due: deque[int]) -> list[int]:
        segment, progress = due[0], self._link.progress
        is_ready = self._offer.poll_ready(segment, 0.0)
        if self._link._gate is not None and self._link.ticket is not None:
            self._link._gate.serve(self._link.ticket.claim.reader)
        if not is_ready:
            progress.delayed(segment)
            is_ready = self._offer.poll_ready(segment, min(self._deadline, time.monotonic() + CLOSED_S))
            self._link._check_open("read")
        if time.monotonic() >= self._deadline:
            raise SourceLost(
                "the deadline passed", version=self._offer.version, peer=self._link._endpoint, phase="read"
            )
        if is_ready:
            progress.heard()
            return [due.popleft()]
        progress.waiting()  # the source shares this process
        return []

    def start(self, ready: deque[int]) -> bool:
        segment, link, offer = ready.popleft(), self._link, self._offer
        with link._guard:
            link._check_open("read")
            link._copying = True
        try:
            with self._plan.receiving(segment) as views:
                copy_views(offer.slab.readable(*offer.manifest.segment_range(segment)), views)
        finally:
            with link._guard:
                link._copying = False
        link._check_open("read")  # cut off meanwhile: these bytes may be torn
        self._copied.append(segment)
        return True

    def finished(self, *, wait: bool) -> list[int]:
        copied, self._copied = self._copied, []
        return copied

    def close(self) -> None:
        pass


MODULES["memory"] = (__name__, "MemoryTransport")
