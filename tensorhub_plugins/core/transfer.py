"""The shell of one replicate(): carries out what the pure `Replication` decides.

One thread per source shard opens a link, reads and verifies; the caller's thread runs the machine and is the only one
that decides. A link on which nothing is heard for `STALL_S` is given up like a dead one, so that a frozen source costs
seconds and not the whole deadline.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import msgspec
from typing_extensions import assert_never

from tensorhub_plugins.core import messages, reads, replication
from tensorhub_plugins.core.errors import SourceLost, TensorHubError, UsageError, VersionGone
from tensorhub_plugins.core.hublink import HubLink
from tensorhub_plugins.core.slab import Slab
from tensorhub_plugins.core.transports import Link, Transport, choices
from tensorhub_plugins.core.values import Manifest, ShardKey

log = logging.getLogger("tensorhub.client")

STALL_S = 5.0  # without one segment (4 MiB): below 1 MB/s a link is as good as dead, and longer than a loaded host naps
OPEN_S = 10.0  # to connect and receive a manifest


class Targets(Protocol):
    """Where the bytes of a transfer go, and who is told of progress; called in the caller's thread."""

    def prepare(self, key: ShardKey, manifest: Manifest) -> Slab:
        """Memory for this source shard. Raise UsageError when its tensors do not fit."""

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
        hub: HubLink,
        transports: Mapping[str, Transport],
        targets: Targets,
    ) -> None:
        self._machine = machine
        self._hub = hub
        self._transports = transports
        self._targets = targets
        # With the reader it came from: words of one that was closed mean nothing, even if its source is the same again.
        self._events: _Events = queue.SimpleQueue()
        self._readers: dict[int, _Reader] = {}
        self._previous: dict[int, _Reader] = {}  # closed, perhaps not yet ended: the next one waits for it
        self._manifests: dict[int, Manifest] = {}
        self._slabs: dict[int, Slab] = {}
        self._granted_at: float | None = None
        self._leases: set[int] = set()  # requests whose lease may still be open
        self._ended = False
        self._error: TensorHubError | None = None
        self._bytes_from: Counter[str] = Counter()
        self._bytes_by: Counter[str] = Counter()

    def source_gone(self, session: bytes) -> None:
        """May be called from any thread."""
        self._events.put((None, replication.SourceGone(session)))

    def run(self) -> Outcome:
        """Raise the TensorHubError that ended it otherwise; then no thread of it writes any more."""
        began = time.monotonic()
        event: replication.Event = replication.Begin()
        try:
            while True:
                self._before(event)
                for effect in self._machine.handle(event, time.monotonic()):
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
                due = min(due, reader.stalls_at)
            try:
                source, event = self._events.get(timeout=max(0.0, due - now))
            except queue.Empty:
                return replication.Tick()
            if source is not None and self._readers.get(source.shard) is not source:
                continue
            if isinstance(event, Exception):
                raise event
            return event

    def _before(self, event: replication.Event) -> None:
        """What must be there before the machine decides to read."""
        if isinstance(event, replication.Opened) and event.shard not in self._slabs:
            reader = self._readers.get(event.shard)
            if reader is not None and event.manifest.root() == reader.grant.root:
                self._slabs[event.shard] = self._targets.prepare(reader.key, event.manifest)
                self._manifests[event.shard] = event.manifest
        elif isinstance(event, replication.Answer) and isinstance(event.reply, messages.Granted):
            self._granted_at = self._granted_at or time.monotonic()

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
                self._bytes_from.clear()
                self._bytes_by.clear()
            case replication.Open(key, grant, request):
                reader = _Reader(key, grant, request, self._transports, self._machine, self._events)
                self._readers[key.shard] = reader
                reader.start(after=self._previous.get(key.shard))
            case replication.Read(shard, _, segments):
                manifest, slab = self._manifests[shard], self._slabs[shard]
                self._readers[shard].begin(segments, manifest, slab, reads.plan(manifest.tensors, slab.specs))
            case replication.Close(shard, _):
                reader = self._readers.pop(shard)
                reader.close()
                self._previous[shard] = reader
            case replication.EndLease(request, shard, lost):
                self._hub.end_lease(request, shard, lost=lost)
                if shard is None:
                    self._leases.discard(request)
            case replication.Verified(shard, segment):
                reader = self._readers[shard]
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
            return msgspec.structs.replace(acquire, request=number)

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
            self._events.put((None, replication.Answer(numbers[0], reply)))

        future.add_done_callback(answered)

    def _join_all(self) -> None:
        for reader in (*self._readers.values(), *self._previous.values()):
            reader.close()
            reader.join()

    def _end(self) -> None:
        """Nothing writes into the targets and no lease is held once run() has returned, however it ended."""
        self._join_all()
        for request in self._leases:
            self._hub.end_lease(request)


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
        self._work: queue.SimpleQueue[tuple[tuple[int, ...], Manifest, Slab, list[int]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._closed = False
        self._expected_at = time.monotonic() + OPEN_S + STALL_S
        self._thread: threading.Thread | None = None

    @property
    def stalls_at(self) -> float:
        """When this link is given up; a source that waits for bytes itself says so, and is not."""
        return max(self._expected_at, getattr(self._link, "heard_at", 0.0) + STALL_S)

    def start(self, *, after: _Reader | None) -> None:
        """after: the shard's previous reader, which must have stopped writing before this one begins."""
        self._thread = threading.Thread(
            target=self._run, args=(after,), name=f"tensorhub-read-{self.grant.worker}", daemon=True
        )
        self._thread.start()

    def begin(self, segments: tuple[int, ...], manifest: Manifest, slab: Slab, placement: list[int]) -> None:
        self._expected_at = time.monotonic() + STALL_S
        self._work.put((segments, manifest, slab, placement))

    def close(self) -> None:
        """Make the thread end soon; does not wait for it."""
        with self._lock:
            self._closed = True
            link = self._link
        self._work.put(None)
        if link is not None:
            link.close()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _run(self, after: _Reader | None) -> None:
        try:
            if after is not None:
                after.join()
            link, manifest = self._open()
            self._tell(replication.Opened(self.shard, self.grant.session, manifest))
            work = self._work.get()
            if work is not None:
                self._read(link, *work)
        except TensorHubError as error:
            self._lost(str(error))
        except OSError as error:
            self._lost(f"{type(error).__name__}: {error}")
        except Exception as error:  # a fault of ours: the caller must see it, not a retry
            self._tell(error)
        finally:
            if self._link is not None:
                self._link.close()

    def _open(self) -> tuple[Link, Manifest]:
        """The best transport that both ends have and that reaches the source."""
        problems = []
        for name, endpoint in choices(tuple(self._transports), self.grant.endpoints):
            deadline = min(self._deadline, time.monotonic() + OPEN_S)
            try:
                link = self._transports[name].connect(endpoint, deadline=deadline)
                with self._lock:
                    if self._closed:
                        link.close()
                        raise SourceLost("given up while it was opened", peer=self.grant.worker, phase="open")
                    self._link = link
                manifest = link.open(self.key, self.request, deadline=deadline).check()
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

    def _read(
        self, link: Link, segments: tuple[int, ...], manifest: Manifest, slab: Slab, placement: list[int]
    ) -> None:
        for segment in link.read(segments, slab, placement, deadline=self._deadline):
            intact = not self._verify or link.digest(segment) == manifest.digest(segment)
            self._expected_at = time.monotonic() + STALL_S
            self._tell(replication.Arrived(self.shard, self.grant.session, segment, intact))
            if not intact:
                return
        same_epoch = link.check(deadline=min(self._deadline, time.monotonic() + OPEN_S))
        self._tell(replication.ReadEnded(self.shard, self.grant.session, same_epoch))

    def _lost(self, why: str) -> None:
        if not self._closed:
            self._tell(replication.Lost(self.shard, self.grant.session, why))

    def _tell(self, event: replication.Event | Exception) -> None:
        self._events.put((self, event))


_Events: TypeAlias = "queue.SimpleQueue[tuple[_Reader | None, replication.Event | Exception]]"
