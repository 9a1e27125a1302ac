"""The shell of one replicate(): carries out what the pure `Replication` decides.

One thread per source opens a link, reads and verifies; the caller's thread runs the machine and is the only one that
decides. A link on which nothing is heard for `STALL_S` is given up like a dead one, so that a frozen source costs
seconds and not the whole deadline.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import msgspec
from typing_extensions import assert_never

from tensorhub_plugins.core.errors import SourceLost, TensorHubError, UsageError, VersionGone
from tensorhub_plugins.core.manifest import (
    Manifest,
)
from tensorhub_plugins.core.memory import moves as reads
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.protocol import messages
from tensorhub_plugins.core.transfer import replication
from tensorhub_plugins.core.transports import Link, Transport, choices
from tensorhub_plugins.core.types import (
    FAR,
    ShardKey,
    distance,
)

log = logging.getLogger("tensorhub.client")

STALL_S = 5.0  # without one segment (4 MiB): below 1 MB/s a link is as good as dead, and longer than a loaded host naps
OPEN_S = 10.0  # to connect and receive a manifest


class Hub(Protocol):
    """The hub, as a transfer asks it; `client.connection.HubLink` is one."""

    def ask(self, make: Callable[[int], messages.Acquire], deadline: float) -> Future[messages.Reply]:
        """Send the request that `make` builds from its number. deadline: on time.monotonic()."""

    def end_lease(self, request: int, shard: int | None = None, *, lost: bool = False) -> None:
        """The lease of an Acquire is over, whole (shard None) or for one shard. lost: the source has failed."""


class Targets(Protocol):
    """Where the bytes of a transfer go, and who is told of progress; called in the caller's thread."""

    def prepare(self, key: ShardKey, manifest: Manifest) -> Slab:
        """Memory for this source shard. Raise UsageError when its tensors do not fit."""

    def expect(self, key: ShardKey) -> None:
        """This shard is about to be read: whoever asks for it may wait for `prepare`."""

    def verified(self, shard: int, segment: int) -> None: ...

    def restart(self) -> None:
        """Everything prepared so far is void: the transfer goes on in another layout."""


@dataclass
class Outcome:
    """What a finished transfer did. seconds: "find" (until sources were granted), "read" (until all was verified)."""

    version: int
    layout: str
    shard_count: int
    manifests: dict[int, Manifest]
    claimed: ShardKey | None
    size_bytes: int
    seconds: dict[str, float]
    sources: Counter[str] = field(default_factory=Counter)
    transports: Counter[str] = field(default_factory=Counter)
    losses: tuple[str, ...] = ()


class Transfer:
    """Run `machine` to its end. `transports` in order of preference."""

    def __init__(
        self,
        machine: replication.Replication,
        hub: Hub,
        transports: Mapping[str, Transport],
        targets: Targets,
    ) -> None:
        self._machine = machine
        self._hub = hub
        self._transports = transports
        self._targets = targets
        # With the reader it came from: words of one that was closed mean nothing, even if its source is the same again.
        self._events: _Events = queue.SimpleQueue()
        self._readers: dict[tuple[int, bytes], _Reader] = {}  # by shard and source
        self._manifests: dict[int, Manifest] = {}
        self._slabs: dict[int, Slab] = {}
        self._placements: dict[int, list[reads.Move]] = {}
        self._left: list[_Reader] = []  # closed, and perhaps still writing
        self._granted_at: float | None = None
        self._leases: set[int] = set()  # requests whose lease may still be open
        self._arrived_from = b""
        self._ended = False
        self._error: TensorHubError | None = None
        self._bytes_from: Counter[str] = Counter()
        self._bytes_by: Counter[str] = Counter()

    def source_gone(self, session: bytes) -> None:
        """May be called from any thread."""
        self._events.put((None, replication.SourceGone(session)))

    def withdrawn(self, versions: tuple[int, ...]) -> None:
        """May be called from any thread."""
        self._events.put((None, replication.Withdrawn(versions)))

    def run(self) -> Outcome:
        """Raise the TensorHubError that ended it otherwise; then no thread of it writes any more."""
        began = time.monotonic()
        event: replication.Event = replication.Begin()
        try:
            while True:
                for effect in self._machine.handle(self._before(event), time.monotonic()):
                    self._carry_out(effect)
                if self._ended:
                    break
                event = self._next_event()
        finally:
            self._end()
        if self._error is not None:
            raise self._error
        ended = time.monotonic()
        granted = self._granted_at if self._granted_at is not None else ended
        return Outcome(
            self._machine.version,
            self._machine.layout,
            self._machine.shard_count,
            self._manifests,
            self._machine.claimed,
            sum(manifest.size_bytes for manifest in self._manifests.values()),
            {"find": granted - began, "read": ended - granted},
            self._bytes_from,
            self._bytes_by,
            tuple(self._machine.losses),
        )

    def _next_event(self) -> replication.Event:
        while True:
            now = time.monotonic()
            due = self._machine.next_deadline()
            for reader in self._readers.values():
                if reader.stalls_at <= now:
                    return replication.Lost(reader.shard, reader.grant.session, f"no progress for {STALL_S:g} s")
                if reader.waits():
                    return replication.Waits(reader.shard, reader.grant.session)
                due = min(due, reader.stalls_at)
            try:
                source, event = self._events.get(timeout=max(0.0, due - now))
            except queue.Empty:
                return replication.Tick()
            if source is not None and self._readers.get((source.shard, source.grant.session)) is not source:
                continue
            if isinstance(event, Exception):
                raise event
            if isinstance(event, replication.Arrived):
                self._arrived_from = event.session
            return event

    def _before(self, event: replication.Event) -> replication.Event:
        """What must be there before the machine decides to read."""
        if isinstance(event, replication.Opened):
            reader = self._readers.get((event.shard, event.session))
            if reader is None or event.manifest.root() != reader.grant.root:
                return event
            if self._machine.verify and not event.manifest.has_digests:
                raise UsageError(
                    f"{reader.key} was published without digests: read with verify=False, or publish with verify=True",
                    peer=reader.grant.worker,
                )
            if event.shard not in self._slabs:
                slab = self._targets.prepare(reader.key, event.manifest)
                self._slabs[event.shard] = slab
                self._manifests[event.shard] = event.manifest
                self._placements[event.shard] = reads.plan(event.manifest.tensors, slab.specs)
            needed = reads.needed(event.manifest, self._placements[event.shard])
            return msgspec.structs.replace(event, needed=needed)
        if isinstance(event, replication.Answer) and isinstance(event.reply, messages.Granted):
            self._granted_at = self._granted_at or time.monotonic()
        return event

    def _carry_out(self, effect: replication.Effect) -> None:
        match effect:
            case replication.AskSources(acquire):
                self._ask(acquire)
            case replication.Restart(layout):
                log.info("going on in layout %s", layout)
                self._join_all()
                self._targets.restart()
                self._slabs.clear()
                self._manifests.clear()
                self._placements.clear()
                self._bytes_from.clear()
                self._bytes_by.clear()
            case replication.Open(key, grant, request):
                self._targets.expect(key)
                far = distance(self._machine.location, grant.location) == FAR
                reader = _Reader(key, grant, request, self._transports, self._machine, self._events, far=far)
                self._readers[key.shard, grant.session] = reader
                reader.start()
            case replication.Read(shard, session, segments):
                self._left = [reader for reader in self._left if reader.lives()]
                work = _Work(segments, [reader for reader in self._left if reader.shard == shard and reader.writes()])
                reader = self._readers[shard, session]
                reader.begin(work, self._manifests[shard], self._slabs[shard], self._placements[shard])
            case replication.Check(shard, session):
                self._readers[shard, session].check()
            case replication.Close(shard, session):
                reader = self._readers.pop((shard, session))
                reader.close()
                self._left.append(reader)
            case replication.EndLease(request, shard, lost):
                self._hub.end_lease(request, shard, lost=lost)
                if shard is None:
                    self._leases.discard(request)
            case replication.Verified(shard, segment):
                reader = self._readers[shard, self._arrived_from]
                start, stop = self._manifests[shard].segment_range(segment)
                self._bytes_from[reader.grant.worker] += stop - start
                self._bytes_by[reader.transport] += stop - start
                self._targets.verified(shard, segment)
            case replication.Complete():
                self._ended = True
            case replication.GiveUp(error):
                self._ended, self._error = True, error
            case _:
                assert_never(effect)

    def _ask(self, acquire: messages.Acquire) -> None:
        numbers: list[int] = []

        def make(number: int) -> messages.Acquire:
            numbers.append(number)
            self._leases.add(number)
            return msgspec.structs.replace(acquire, request_id=number)

        future = self._hub.ask(make, self._machine.deadline)

        def answered(_: object) -> None:
            error = future.exception()
            reply: messages.Granted | messages.Refused | None = None
            if error is None:
                result = future.result()
                assert isinstance(result, messages.Granted)
                reply = result
            elif isinstance(error, TensorHubError) and type(error).__name__ != "HubUnreachable":
                reply = messages.Refused(numbers[0], type(error).__name__, error.message[:4096])
            self._events.put((None, replication.Answer(numbers[0], reply, bool(acquire.beside))))

        future.add_done_callback(answered)

    def _join_all(self) -> None:
        readers = [*self._readers.values(), *self._left]
        for reader in readers:
            reader.close()
        for reader in readers:
            reader.join()

    def _end(self) -> None:
        """Nothing writes into the targets and no lease is held once run() has returned, however it ended."""
        self._join_all()
        for request in self._leases:
            self._hub.end_lease(request)


@dataclass
class _Work:
    """Segments to read. after: readers that may have been asked for some of them before: they must have ended."""

    segments: tuple[int, ...]
    after: list[_Reader]


class _Reader:
    """One thread that reads one shard from one source."""

    def __init__(
        self,
        key: ShardKey,
        grant: messages.Grant,
        request: int,
        transports: Mapping[str, Transport],
        machine: replication.Replication,
        events: _Events,
        *,
        far: bool,
    ) -> None:
        self.key = key
        self.shard = key.shard
        self.grant = grant
        self.request = request
        self.transport = ""
        self._transports = transports
        self._deadline = machine.deadline
        self._verify = machine.verify
        self._events = events
        self._far = far
        self._changed = threading.Condition()
        self._work: deque[_Work] = deque()
        self._into: tuple[Manifest, Slab, list[reads.Move]] | None = None
        self._to_check = False
        self._link: Link | None = None
        self._closed = False
        self._busy = 0  # segments that were asked for and have not arrived
        self._expected_at = time.monotonic() + OPEN_S + STALL_S
        self._told_waiting_at = 0.0
        self._thread: threading.Thread | None = None

    @property
    def stalls_at(self) -> float:
        """When this link is given up; a source that waits for bytes itself says so, and is not."""
        if self._link is not None and self._into is not None and not self._busy and not self._to_check:
            return float("inf")  # it has nothing to do
        heard_at = self._link.progress.heard_at if self._link is not None else 0.0
        return max(self._expected_at, heard_at + STALL_S)

    def waits(self) -> bool:
        """Whether the source has said, since the last time, that it waits for bytes itself."""
        waiting_at = self._link.progress.waiting_at if self._link is not None else 0.0
        before, self._told_waiting_at = self._told_waiting_at, max(waiting_at, self._told_waiting_at)
        return waiting_at > before

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=f"tensorhub-read-{self.grant.worker}", daemon=True)
        self._thread.start()

    def begin(self, work: _Work, manifest: Manifest, slab: Slab, placement: list[reads.Move]) -> None:
        """Read this after what was asked for before."""
        with self._changed:
            if not self._busy:
                self._expected_at = time.monotonic() + STALL_S
            self._busy += len(work.segments)
            self._into = manifest, slab, placement
            self._work.append(work)
            self._changed.notify()

    def check(self) -> None:
        with self._changed:
            self._expected_at = time.monotonic() + STALL_S
            self._to_check = True
            self._changed.notify()

    def close(self) -> None:
        """Make the thread end soon; does not wait for it."""
        with self._changed:
            self._closed = True
            link = self._link
            self._changed.notify()
        if link is not None:
            link.close()

    def lives(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def writes(self) -> bool:
        """Whether it was ever asked for bytes; if not, it may still be connecting, and nobody need wait for that."""
        return self._into is not None

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            link, manifest = self._open()
            self._tell(replication.Opened(self.shard, self.grant.session, manifest))
            while self._wait():
                if self._work:
                    self._read(link)
                else:
                    same_epoch = link.check(deadline=min(self._deadline, time.monotonic() + OPEN_S))
                    self._tell(replication.ReadEnded(self.shard, self.grant.session, same_epoch))
                    return
        except TensorHubError as error:
            self._lost(str(error))
        except OSError as error:
            self._lost(f"{type(error).__name__}: {error}")
        except Exception as error:  # a fault of ours: the caller must see it, not a retry
            self._tell(error)
        finally:
            if self._link is not None:
                self._link.close()

    def _wait(self) -> bool:
        """Until there is something to do; False: it is over."""
        with self._changed:
            while not (self._work or self._to_check or self._closed):
                self._changed.wait()
            return not self._closed

    def _more(self) -> list[int]:
        """What else is to be read by now."""
        segments: list[int] = []
        while self._work:
            work = self._work.popleft()
            for reader in work.after:
                reader.join()
            segments += work.segments
        return segments

    def _open(self) -> tuple[Link, Manifest]:
        """The best transport that both ends have and that reaches the source."""
        problems = []
        for name, endpoint in choices(tuple(self._transports), self.grant.endpoints):
            deadline = min(self._deadline, time.monotonic() + OPEN_S)
            try:
                link = self._transports[name].connect(endpoint, deadline=deadline, far=self._far)
                with self._changed:
                    if self._closed:
                        link.close()
                        raise SourceLost("given up while it was opened", peer=self.grant.worker, phase="open")
                    self._link = link
                link.digests = self._verify
                manifest = link.open(self.key, self.grant.as_of, deadline=deadline)
                self.transport = name
                return link, manifest
            except VersionGone as error:
                raise SourceLost(str(error), peer=self.grant.worker, phase="open") from error
            except (SourceLost, UsageError, OSError) as error:
                problems.append(f"{name}: {error}")
                if self._link is not None:
                    self._link.close()
        raise SourceLost(
            "; ".join(problems) or f"no common transport: it has {sorted(self.grant.endpoints)}",
            peer=self.grant.worker,
            phase="open",
        )

    def _read(self, link: Link) -> None:
        segments = self._more()
        assert self._into is not None
        manifest, slab, placement = self._into
        for segment in link.read(segments, slab, placement, deadline=self._deadline, more=self._more):
            intact = not self._verify or link.digest(segment) == manifest.digest(segment)
            self._expected_at = time.monotonic() + STALL_S
            with self._changed:  # the machine's thread adds to it
                self._busy -= 1
            waited = segment in link.progress.delayed_segments
            self._tell(replication.Arrived(self.shard, self.grant.session, segment, intact, waited))
            if not intact:
                raise SourceLost("sent corrupt bytes", peer=self.grant.worker, phase="read")

    def _lost(self, why: str) -> None:
        if not self._closed:
            self._tell(replication.Lost(self.shard, self.grant.session, why))

    def _tell(self, event: replication.Event | Exception) -> None:
        self._events.put((self, event))


_Events: TypeAlias = "queue.SimpleQueue[tuple[_Reader | None, replication.Event | Exception]]"
