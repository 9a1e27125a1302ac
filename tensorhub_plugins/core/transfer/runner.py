"""The shell of one replicate(): carries out what the pure `Replication` decides.

One thread per source opens a link, reads and verifies (source_reader.py); the caller's thread runs the machine and is
the only one that decides. A link that receives nothing for `stall_s` is dropped like a dead one, so that a frozen
source costs seconds and not the whole deadline.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

import msgspec
from typing_extensions import assert_never

from tensorhub_plugins.core.deadline import POLL_S_MAX, check_time, remaining_s, until
from tensorhub_plugins.core.errors import DeadlineExceeded, TensorHubError
from tensorhub_plugins.core.manifest import Manifest
from tensorhub_plugins.core.memory import moves
from tensorhub_plugins.core.memory.loans import Borrowed
from tensorhub_plugins.core.memory.moves import Move
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.progress import Progress
from tensorhub_plugins.core.protocol import messages
from tensorhub_plugins.core.protocol.directive import Directive
from tensorhub_plugins.core.transfer import events, replication
from tensorhub_plugins.core.transfer.report import ReplicateReport
from tensorhub_plugins.core.transfer.source_reader import Events, SourceReader, Target
from tensorhub_plugins.core.transfer.unreached import Unreached
from tensorhub_plugins.core.transports import Bases, Transport
from tensorhub_plugins.core.types import ShardKey, printable

log = logging.getLogger("tensorhub.client")

T = TypeVar("T")

LOOK_S = 0.02  # between two checks of all readers: with hundreds of them a check is as expensive as a segment
RENEW_S = 0.1  # between two reports that work is done here
TRY_S = 2.0  # a connection to a source that has refused one beside others: it may have been for another reason
TRY_ALONE_S = 0.2  # the same where none is open: others of this host have its places
OPENING_S = 0.2  # for all readers not asked for bytes: they may be decoding manifests, and write nothing


class Hub(Protocol):
    """The hub as a transfer uses it; implemented by `client.connection.HubLink`."""

    def ask(self, make: Callable[[int], messages.Acquire], deadline: float) -> Future[messages.Reply]:
        """Send the request that `make` builds from its number. deadline: on time.monotonic().

        The future holds Granted, or raises what the hub refused with, or HubUnreachable."""

    def end_lease(self, ended: messages.Release) -> None:
        """End the lease of an Acquire, whole or for one shard."""

    def renew(self, came: Mapping[int, int]) -> None:
        """Report progress under the leases of these Acquires: the bytes that have come."""


class Destinations(Protocol):
    """Where the bytes of a transfer go, and what is notified of its progress; called in the caller's thread."""

    @property
    def takes_deltas(self) -> bool:
        """Return whether sources on other hosts may send deltas."""

    def announce_read(self, key: ShardKey) -> None:
        """Announce that this shard will be read: peers that ask for it may wait for `prepare`."""

    def prepare(self, key: ShardKey, manifest: Manifest, loan: Borrowed | None = None) -> Slab:
        """Return memory for this source shard, that of its source (loan) where possible. Raise UsageError when its
        tensors do not fit."""

    def missing(
        self, key: ShardKey, manifest: Manifest, needed: tuple[int, ...], planned: Sequence[Move], paced: moves.Paced
    ) -> tuple[int, ...]:
        """Return those of these segments that are to be read: the others are in place already. planned: which bytes go
        where. paced: iterates over what takes as long as a segment."""

    def bases(self, shard: int) -> Bases | None:
        """Return what is here of other versions of this source shard, after `missing`; None: no deltas are wanted."""

    def verified(self, shard: int, segment: int) -> None:
        """Note that the bytes of this segment are in place and verified."""

    def restart(self) -> None:
        """Discard everything prepared: the transfer goes on in another layout, or in other memory."""


@dataclass
class Queued:
    """Readers of one source that are to be started. admitted: so many of them now; at `tries_at` `tries` more."""

    readers: deque[SourceReader] = field(default_factory=deque)
    admitted: int = 0
    tries: int = 1
    tries_at: float = 0.0


@dataclass
class Outcome:
    """The result of a finished transfer. manifests: by source shard. claimed: what this reader is to convert."""

    report: ReplicateReport
    manifests: dict[int, Manifest]
    claimed: ShardKey | None


class Transfer:
    """Runs `machine` to its end. `transports` in order of preference."""

    def __init__(
        self,
        machine: replication.Replication,
        hub: Hub,
        transports: Mapping[str, Transport],
        destinations: Destinations,
        unreached: Unreached | None = None,
        worker: str = "",
    ) -> None:
        """Set up the transfer. unreached: the sources that no transfer of this client could connect to. worker: the
        reader's name; the first one of an engine shows its progress."""
        self._machine, self._unreached = machine, unreached or Unreached()
        self._hub, self._transports = hub, transports
        self._destinations, self._progress = destinations, Progress(f"{worker} reads" * worker.endswith("/0"))
        self._events: Events = queue.SimpleQueue()
        self._next: deque[events.Event] = deque([events.Begin()])  # to be handled before any other
        self._readers: dict[tuple[int, bytes], SourceReader] = {}  # by shard and source
        self._opened: defaultdict[bytes, set[SourceReader]] = defaultdict(set)  # by source
        self._queues: dict[bytes, Queued] = {}  # by source that has refused one beside those
        self._left: list[SourceReader] = []  # closed, and perhaps still writing
        self._targets: dict[int, Target] = {}
        self._granted_at: float | None = None
        self._leases = Counter[int]()  # requests whose lease may still be open -> bytes that have come
        self.claimed: ShardKey | None = None  # also by an answer that came after the transfer had ended
        self._look_at, self._stalls_at = 0.0, float("inf")  # when readers are checked next; when the first one stalls
        self._ended, self._come = False, 0  # the bytes that had come at the last check
        self._error: TensorHubError | None = None
        self._bytes_from, self._bytes_by, self._came = Counter[str](), Counter[str](), dict[str, tuple[float, float]]()
        self._wire = self._by_delta = 0

    def source_gone(self, session: bytes) -> None:
        """Note that the hub has declared that worker dead. May be called from any thread."""
        self._events.put((None, events.SourceGone(session)))

    def direct(self, directive: Directive) -> None:
        """Take a directive, by which versions may be over. May be called from any thread."""
        self._events.put((None, events.Directed(directive)))

    def stop(self, error: BaseException) -> None:
        """Raise this from `run`. May be called from any thread."""
        self._events.put((None, error))

    def run(self) -> Outcome:
        """Run it; return its outcome, or raise the TensorHubError that ended it. Then no thread of it writes."""
        began = time.monotonic()
        try:
            while not self._ended:
                event = self._noted(self._next.popleft() if self._next else self._next_event())
                for effect in self._machine.handle(event, time.monotonic()):
                    self._carry_out(effect)
                self._start_queued()
        finally:
            self._end()
        if self._error is not None:
            raise self._error
        return self._outcome(began)

    def _noted(self, event: events.Event) -> events.Event:
        """Remember how its sources can be reached, for the client's other transfers, and what they wait for. Return the
        event: of a source that takes no more readers, that it was reached."""
        match event:
            case events.Arrived(shard, session, waited=waited):
                worker, now = self._readers[shard, session].grant.worker, time.monotonic()
                last, waited_s = self._came.get(worker, (self._granted_at or now, 0.0))
                self._came[worker] = (now, waited_s + waited * (now - last))
            case events.Lost(shard, session, why, _, is_unreached, is_cut):
                opened, now = self._opened[session], time.monotonic()
                is_alive = bool(opened) or (is_cut and (not is_unreached or self._unreached.was_reached(session)))
                reader = self._readers.get((shard, session))
                if is_alive and reader not in opened:  # it takes no more readers from here
                    queued = self._queues.setdefault(session, Queued())
                    queued.tries, queued.tries_at = 1, now + (TRY_S if opened else TRY_ALONE_S)
                    if reader is not None and reader.has_waited and opened and is_cut:  # the hub knew no other source
                        self._await_turn(reader.key, reader.grant, reader.request_id)
                        return events.Tick()
                    return msgspec.structs.replace(event, unreached=False)
                if is_unreached:
                    self._unreached.add(session, now)
                queued = self._queues.pop(session, Queued())
                self._next += [events.Lost(each.shard, session, why) for each in queued.readers if self._is_read(each)]
            case events.Opened(shard, session, _, slower):
                self._opened[session].add(self._readers[shard, session])
                self._unreached.reached(session)
                if slower and self._unreached.is_first_slow(session, slower):
                    log.warning("%s", printable(slower))
        return event

    def _outcome(self, began: float) -> Outcome:
        ended = time.monotonic()
        granted = self._granted_at if self._granted_at is not None else ended
        manifests = {shard: target.manifest for shard, target in self._targets.items()}
        over = Counter[str]()  # each transport, wherever from
        for way, size_bytes in self._bytes_by.items():
            over[way.partition(" ")[2]] += size_bytes
        report = ReplicateReport(
            self._machine.version,
            self._machine.layout,
            sum(manifest.size_bytes for manifest in manifests.values()),
            {"find": granted - began, "read": ended - granted},
            dict(self._bytes_from),
            dict(over),
            tuple(self._machine.losses),
            {shard: manifest.root().hex() for shard, manifest in manifests.items()},
            {shard: manifest.digest_algorithm for shard, manifest in manifests.items()},
            self._wire,
            self._by_delta,
            {worker: (at - began, waited_s) for worker, (at, waited_s) in self._came.items()},
            dict(self._bytes_by),
        )
        return Outcome(report, manifests, self._machine.claimed)

    def _next_event(self) -> events.Event:
        while True:
            now = time.monotonic()
            if now >= self._look_at:
                if (noticed := self._check_readers(now)) is not None:
                    return noticed
                self._stalls_at = min((reader.stalls_at for reader in self._readers.values()), default=float("inf"))
                self._look_at = now + LOOK_S
            tries_at = (each.tries_at for each in self._queues.values() if each.readers)
            due = min(self._machine.next_deadline(), self._stalls_at, *tries_at)
            try:
                source, event = self._events.get(timeout=min(remaining_s(due, now), POLL_S_MAX))
            except queue.Empty:
                self._look_at = 0.0
                return events.Tick()
            if source is not None and not self._is_read(source):
                continue
            if isinstance(event, BaseException):
                raise event
            return event

    def _is_read(self, reader: SourceReader) -> bool:
        """Return whether this reader was not left, or replaced by another one of the same source."""
        return self._readers.get((reader.shard, reader.grant.session)) is reader

    def _start_queued(self) -> None:
        """Start the readers that wait for others of their source to end, as many as have ended. Try more now and then:
        at first one, and twice as many where none was refused."""
        for queued in self._queues.values():
            if queued.readers and (now := time.monotonic()) >= queued.tries_at:
                queued.admitted += queued.tries
                queued.tries_at, queued.tries = now + TRY_S, 2 * queued.tries
            while queued.readers and queued.admitted:
                if self._is_read(reader := queued.readers.popleft()):
                    reader.start()
                    queued.admitted -= 1

    def _check_readers(self, now: float) -> events.Event | None:
        """Return the event of a source that has stalled, or that waits itself; None: there is none. While bytes arrive,
        or there is a reason why none do, renew the leases."""
        before, self._come = self._come, self._bytes_from.total()
        self._progress.note(self._come, now)
        if self._come != before:
            self._hub.renew(self._leases)
        for reader in self._readers.values():
            if reader.stalls_at <= now:
                why = f"no progress for {self._machine.limits.stall_s:g} s"
                return reader.lost(why)
            if reader.source_waits():
                self._hub.renew(self._leases)
                return events.SourceWaiting(reader.shard, reader.grant.session)
        return None

    def _carry_out(self, effect: events.Effect) -> None:
        match effect:
            case events.AskSources(acquire):
                known = self._unreached.sessions(time.monotonic())
                acquire = msgspec.structs.replace(acquire, avoid=tuple(dict.fromkeys((*acquire.avoid, *known))))
                self._ask(acquire)
            case events.Restart(layout):
                self._restart(layout)
            case events.Open(key, grant, request_id):
                self._open(key, grant, request_id)
            case events.Prepare(key, manifest, lender):
                self._next.append(self._prepare(key, manifest, lender))
            case events.Read(shard, session, segments):
                self._left = [reader for reader in self._left if reader.lives]
                after = [reader for reader in self._left if reader.shard == shard and reader.writes]
                self._readers[shard, session].read(segments, self._targets[shard], after)
            case events.Verified(shard, session, segment):
                reader = self._readers[shard, session]
                start, stop = self._targets[shard].manifest.segment_range(segment)
                self._bytes_from[reader.grant.worker] += stop - start
                self._bytes_by[reader.way] += stop - start
                self._leases[reader.request_id] += stop - start
                self._wire += reader.count(segment, stop - start)
                self._by_delta += stop - start if segment in reader.deltas else 0
                self._destinations.verified(shard, segment)
            case events.ConfirmEpoch(shard, session):
                self._readers[shard, session].confirm_epoch()
            case events.Close(shard, session):
                reader = self._readers.pop((shard, session))
                reader.close()
                self._left.append(reader)
                if session in self._queues:
                    self._queues[session].admitted += reader in self._opened[session]
                self._opened[session].discard(reader)
            case messages.Release(request_id, shard):
                last = self._left[-1] if self._left else None
                if last is not None and (last.request_id, last.shard) == (request_id, shard):
                    effect = msgspec.structs.replace(effect, came=last.came)
                self._hub.end_lease(effect)
                if shard is None:
                    self._leases.pop(request_id, None)
            case events.Complete():
                self._ended = True
            case events.GiveUp(error):
                self._ended, self._error = True, error
            case _:
                assert_never(effect)

    def _open(self, key: ShardKey, grant: messages.Grant, request_id: int) -> None:
        self._granted_at = self._granted_at or time.monotonic()
        self._destinations.announce_read(key)
        self._await_turn(key, grant, request_id)

    def _await_turn(self, key: ShardKey, grant: messages.Grant, request_id: int) -> None:
        """Start a reader of this source, at once or when it is to be tried again."""
        deltas = self._destinations.takes_deltas
        reader = SourceReader(key, grant, self._transports, self._machine, self._events, deltas=deltas)
        self._readers[key.shard, grant.session], reader.request_id = reader, request_id
        reader.has_waited = grant.session in self._queues
        if reader.has_waited:
            self._queues[grant.session].readers.append(reader)
        else:
            reader.start()

    def _prepare(self, key: ShardKey, manifest: Manifest, lender: bytes | None) -> events.Event:
        loan = None if lender is None else self._readers[key.shard, lender].take_loan()
        try:
            slab = self._destinations.prepare(key, manifest, loan)
            planned = moves.plan(manifest.tensors, slab.specs, paced=partial(until, self._machine.deadline))
            needed = moves.needed(manifest, planned)
            missing = self._destinations.missing(key, manifest, needed, planned, self._paced)
        except DeadlineExceeded:  # while planning its many tensors
            return events.Tick()  # the machine raises it, with the peer and what is missing
        is_borrowed = loan is not None and slab.borrowed is loan
        bases = None if is_borrowed else self._destinations.bases(key.shard)
        self._targets[key.shard] = Target(manifest, slab, planned, bases)
        self._progress.total += sum(stop - start for start, stop in map(manifest.segment_range, missing))
        based = 0 if bases is None else bases.count
        return events.Prepared(key.shard, missing, is_borrowed, len(missing) * manifest.segment_size_bytes, based)

    def _paced(self, items: Iterable[T]) -> Iterator[T]:
        """Yield these until the deadline, and renew the leases: nothing is read while what is here is compared."""
        renews_at = time.monotonic() + RENEW_S
        for item in items:
            if (now := time.monotonic()) >= renews_at:
                check_time(self._machine.deadline)
                self._hub.renew(self._leases)
                renews_at = now + RENEW_S
            yield item

    def _ask(self, acquire: messages.Acquire) -> None:
        numbers: list[int] = []

        def make(number: int) -> messages.Acquire:
            numbers.append(number)
            self._leases[number] = 0
            return msgspec.structs.replace(acquire, request_id=number)

        def answered(future: Future[messages.Reply]) -> None:
            reply = future.exception() or future.result()
            assert isinstance(reply, messages.Granted | TensorHubError)
            if isinstance(reply, messages.Granted):
                self.claimed = reply.claim or self.claimed
            self._events.put((None, events.Answer(numbers[0], reply, bool(acquire.beside))))

        self._hub.ask(make, self._machine.deadline).add_done_callback(answered)

    def _restart(self, layout: str) -> None:
        log.info("reading anew, in layout %s", layout)
        self._join_all()
        self._destinations.restart()
        self._targets.clear()
        self._bytes_from.clear()
        self._bytes_by.clear()
        self._wire = self._by_delta = 0
        self._came.clear()
        self._progress.total = 0

    def _join_all(self) -> None:
        readers = [*self._readers.values(), *self._left]
        for reader in readers:
            reader.close()
        by = time.monotonic() + OPENING_S
        for reader in readers:
            reader.join(None if reader.writes else remaining_s(by, time.monotonic()))

    def _end(self) -> None:
        """Make sure that nothing writes into the destinations and no lease is held once run() has returned."""
        self._progress.close()
        self._join_all()
        for request_id in self._leases:
            self._hub.end_lease(messages.Release(request_id))
