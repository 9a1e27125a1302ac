"""One source of one shard: a thread that opens a link, reads what it is asked for and compares digests.

It decides nothing: whatever happens becomes an event of the `Replication`, in the queue of the transfer.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tensorhub_plugins.core import resources
from tensorhub_plugins.core.deadline import TIMEOUT_S_MAX, Deadline
from tensorhub_plugins.core.errors import (
    ProtocolError,
    ResourceRefused,
    SourceLost,
    TensorHubError,
    UsageError,
    VersionGone,
)
from tensorhub_plugins.core.manifest import Manifest
from tensorhub_plugins.core.memory.loans import Borrowed
from tensorhub_plugins.core.memory.moves import Move
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.protocol import messages
from tensorhub_plugins.core.protocol.reach import at_all_hosts, is_of_one_host
from tensorhub_plugins.core.security import tls
from tensorhub_plugins.core.threads import Thread
from tensorhub_plugins.core.transfer import events, replication
from tensorhub_plugins.core.transports import Bases, Link, More, NotServable, Transport, choices, nothing_in_common
from tensorhub_plugins.core.transports.stream.channel import Disconnected, Full
from tensorhub_plugins.core.transports.stream.messages import OtherRelease
from tensorhub_plugins.core.transports.ways import FASTER, WAYS
from tensorhub_plugins.core.types import DISTANCES, FAR, HOST, NOTHING, ShardKey, distance

WITHIN_A_HOST = ("cuda_ipc", "shm")
# A source with several endpoints.
MEASURED = ("tcp", "tls")
SEGMENTS_PER_WAY = 8  # of a shard, else there is little to gain
FORBIDDEN = "; this host does not permit it, and that is not the source's fault: see its routes, firewall and sandbox"


class _Corrupt(SourceLost):
    """Other bytes than were published have come: of the source, or of what is between it and this endpoint."""


@dataclass
class Target:
    """Where the bytes of one source shard go."""

    manifest: Manifest
    slab: Slab
    moves: Sequence[Move]
    bases: Bases | None = None


@dataclass
class _Batch:
    """Segments to read. after: readers that may have been asked for some of them before: they must end first."""

    segments: tuple[int, ...]
    after: list[SourceReader]


class SourceReader:
    """Reads one shard from the source of `grant`; `machine` has the deadline, and whether digests are compared. deltas:
    a source on another host may send them."""

    def __init__(
        self,
        key: ShardKey,
        grant: messages.Grant,
        transports: Mapping[str, Transport],
        machine: replication.Replication,
        inbox: Events,
        *,
        deltas: bool = False,
    ) -> None:
        self.key = key
        self.shard = key.shard
        self.grant = grant
        self.transport, self.request_id, self.has_waited = "", 0, False  # waited: for its turn
        self.came = NOTHING  # verified
        self._transports, self._machine = transports, machine
        self._limits = machine.limits
        self._verify = machine.verify
        self._away = distance(machine.location, grant.location)
        self._borrows, self._far = machine.borrows and self._away == HOST, self._away == FAR
        self._deltas = deltas and self._away != HOST
        self.deltas: dict[int, int] = {}  # segments that came as a delta, and its size in bytes
        self._inbox = inbox
        self._changed = threading.Condition()
        self._batches: deque[_Batch] = deque()
        self._target: Target | None = None
        self._to_confirm = False
        self._link: Link | None = None
        self._is_open = False
        self._spare: Link | None = None  # over another of the source's endpoints, while they are measured
        self._endpoints: list[str] = []  # of the transport that was tried last
        self._unmeasured: list[str] = []
        self._opening_s = 0.0  # how long the source took to open
        self._proven: Link | None = None  # bytes that were published have come over it
        self._closed = False
        self._refused = False  # the source's address refuses connections
        self._forbidden = False  # this host's system does not let us connect there
        self._cut = self._full = False  # a connection was closed before it was opened, as the source is full
        self._misled = False  # connected to an address that leads elsewhere from other hosts
        self._slower = ""  # the ways that it does not take, and why
        self._busy = 0  # segments that were asked for and have not arrived
        self._expected_at = float("inf")  # until it is started
        self._told_waiting_at = 0.0
        self._thread = Thread(target=self._run, name=f"tensorhub-read-{grant.worker}")

    @property
    def stalls_at(self) -> float:
        """Return the instant at which to drop this source. Notices that it waits for bytes itself postpone it."""
        if self._is_open and not self._busy and not self._to_confirm:
            return float("inf")  # it has nothing to do
        heard_at = self._link.progress.heard_at if self._link is not None else 0.0
        return max(self._expected_at, heard_at + self._limits.stall_s)

    def source_waits(self) -> bool:
        """Return whether the source has reported, since the last call, that it waits for bytes itself."""
        waiting_at = self._link.progress.waiting_at if self._link is not None else 0.0
        before, self._told_waiting_at = self._told_waiting_at, max(waiting_at, self._told_waiting_at)
        return waiting_at > before

    @property
    def way(self) -> str:
        """Return how it is read: how far away the source is, and the transport."""
        return f"{DISTANCES[self._away]} {self.transport}"

    def count(self, segment: int, size_bytes: int) -> int:
        """Count a segment that was verified; return how many bytes were sent for it."""
        wire_size_bytes = self.deltas.get(segment, size_bytes)
        _, before, wire_before = self.came
        self.came = self.way, before + size_bytes, wire_before + wire_size_bytes
        return wire_size_bytes

    @property
    def lives(self) -> bool:
        """Return whether its thread still runs."""
        return self._thread.is_alive()

    @property
    def writes(self) -> bool:
        """Return whether it was ever asked for bytes; else it may still be connecting, and need not be waited for."""
        return self._target is not None

    def start(self) -> None:
        """Start its thread."""
        self._expected_at = time.monotonic() + self._limits.open_s + self._limits.stall_s
        self._thread.start()

    def read(self, segments: tuple[int, ...], target: Target, after: list[SourceReader]) -> None:
        """Read these after what was asked for before, and not before the readers `after` have ended."""
        with self._changed:
            if not self._busy:
                self._expected_at = time.monotonic() + self._limits.stall_s
            self._busy += len(segments)
            self._target = target
            self._batches.append(_Batch(segments, after))
            self._changed.notify()

    def take_loan(self) -> Borrowed | None:
        """Return the source's own memory, if it has lent it."""
        return None if self._link is None else self._link.take_loan()

    def confirm_epoch(self) -> None:
        """Ask the source, when all is read, whether it has withdrawn its offer meanwhile."""
        with self._changed:
            self._expected_at = time.monotonic() + self._limits.stall_s
            self._to_confirm = True
            self._changed.notify()

    def close(self) -> None:
        """Make the thread end soon, without waiting for it."""
        with self._changed:
            self._closed = True
            links = (self._link, self._spare) if self.writes or not self._is_open else ()  # else the thread rests it
            self._changed.notify()
        for link in links:
            if link is not None:
                link.close()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the end of its thread, if it was started."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    # --- the thread ---

    def _run(self) -> None:
        try:
            link, manifest = self._open()
            self._is_open = True
            self._notify(events.Opened(self.shard, self.grant.session, manifest, self._slower))
            while self._wait():
                if self._batches and self._unmeasured:
                    link = self._measure(link)
                elif self._batches:
                    self._read(link)
                else:
                    # What comes over a socket is a copy, made before; but nothing else shows that without digests.
                    waits = not self._verify or self.transport not in MEASURED
                    unchanged = link.check(deadline=self._soon(), waits=waits)
                    self._notify(events.EpochChecked(self.shard, self.grant.session, unchanged))
                    return
        except (TensorHubError, OSError) as error:
            if (lacking := resources.refusal(error)) is not None:
                self._notify(lacking)  # what this process lacks is not the fault of its source
            else:
                self._lost(error)
        except Exception as error:  # a bug of ours: raise it in the caller instead of retrying
            self._notify(error)
        finally:
            for each in (self._link, self._spare):
                if each is not None:
                    each.close()

    def _soon(self) -> float:
        return min(self._machine.deadline, Deadline.after(self._limits.open_s))

    def _wait(self) -> bool:
        """Wait until there is something to do; return False when it is over."""
        with self._changed:
            while not (self._batches or self._to_confirm or self._closed):
                self._changed.wait()
            return not self._closed

    def _more(self) -> list[int]:
        """Return the segments that were added since, once the readers before it have ended."""
        segments: list[int] = []
        while self._batches:
            batch = self._batches.popleft()
            for reader in batch.after:
                reader.join()
            segments += batch.segments
        return segments

    def _open(self) -> tuple[Link, Manifest]:
        """Open the best transport that both ends have and that reaches the source; return its link and manifest."""
        refused: ResourceRefused | None = None
        problems, where = dict[str, str](), {"far": self._far, "tls_only": tls.is_required()}
        endpoints = at_all_hosts(self.grant.endpoints, self.grant.hosts)
        for name, endpoint in choices(tuple(self._transports), endpoints, **where):
            self._endpoints = endpoint.split(",")
            open_ = self._open_at if len(self._endpoints) == 1 else self._open_one
            try:
                link, manifest = open_(name, endpoint, self._soon())
                self.transport, self._misled = name, False
                self._slower = _slower_way(name, problems, self.grant, tuple(self._transports), self._away)
                self._unmeasured = self._to_measure(name, manifest) if len(self._endpoints) > 1 else []
                return link, manifest
            except VersionGone as error:
                raise SourceLost(str(error), peer=self.grant.worker, phase="open") from error
            except (SourceLost, UsageError, OSError, ValueError, RuntimeError) as error:
                problems[name] = str(error)
                found = self._note_unopened(error)
                refused = refused or found
        if refused is not None:  # on this side: no other source could be read either
            raise refused
        why = _listed(problems) or nothing_in_common(self.grant.endpoints, **where)
        raise SourceLost(why + FORBIDDEN * self._forbidden, peer=self.grant.worker, phase="open")

    def _note_unopened(self, error: Exception) -> ResourceRefused | None:
        """Note why a transport did not open the source; return what this process lacked for it, if anything."""
        found = resources.refusal(error)
        if found is None and isinstance(error, RuntimeError):
            raise error
        self._refused |= isinstance(error.__cause__, ConnectionRefusedError)
        self._forbidden |= resources.is_forbidden(error.__cause__)
        self._cut |= isinstance(error.__cause__, Disconnected)
        self._full |= isinstance(error.__cause__, Full)
        if self._link is not None:
            self._link.close()
        return found

    def _open_one(self, name: str, endpoint: str, deadline: float) -> tuple[Link, Manifest]:
        """Open what is to be read at one of several endpoints. Some of them may lead to another worker, or to
        what does not answer, which leaves half of the time to the others."""
        left = endpoint.split(",")
        while True:
            began = time.monotonic()
            until = deadline if len(left) == 1 else (began + deadline) / 2
            try:
                link, manifest = self._open_at(name, ",".join(left), until)
                self._opening_s = time.monotonic() - began
                if len(left) == 1 or manifest.root() == self.grant.root:
                    return link, manifest
            except (VersionGone, NotServable, SourceLost, ProtocolError):
                if self._closed or len(left) == 1 or self._link is None or self._link.peer not in left:
                    raise
            assert self._link is not None
            self._link.close()
            WAYS.shut(self._link.peer, time.monotonic())
            left = [each for each in left if each != self._link.peer]

    def _open_at(self, name: str, endpoint: str, deadline: float, kept_until: float = 0.0) -> tuple[Link, Manifest]:
        """Open the best of these endpoints. kept_until: for all connections that were kept; 0.0: half of the time."""
        link = self._transports[name].connect(endpoint, deadline=deadline, far=self._far)
        with self._changed:
            if self._closed:
                link.close()
                raise SourceLost("abandoned while it was opened", peer=self.grant.worker, phase="open")
            self._link = link
            self._misled = self._away != HOST and all(map(is_of_one_host, endpoint.split(",")))
        link.digests, link.ticket, link.borrows = self._verify, self.grant.ticket, self._borrows
        link.wants_deltas = self._deltas
        is_kept = link.progress.is_kept  # and may be lost, unnoticed
        kept_until = kept_until or (time.monotonic() + deadline) / 2
        try:
            return link, link.open(self.key, self.grant.as_of, deadline=kept_until if is_kept else deadline)
        except SourceLost:
            if self._closed or not is_kept:
                raise
        return self._open_at(name, endpoint, deadline, kept_until)

    def _to_measure(self, name: str, manifest: Manifest) -> list[str]:
        """Return the endpoints over which a segment is to be read before the others, see `_measure`."""
        found = WAYS.unmeasured(self._endpoints, time.monotonic()) if name in MEASURED and self._verify else []
        return found if found and manifest.segment_count >= SEGMENTS_PER_WAY * len(found) else []

    def _measure(self, link: Link) -> Link:
        """Read a segment over each of the source's endpoints, that of this link first; return the link over the fastest
        one. A slower one is left as soon as that shows."""
        batch = deque(self._more())
        best_s = self._timed(link, batch, self._machine.deadline)
        for endpoint in [each for each in self._unmeasured if each != link.peer]:
            if not batch or best_s is None or (other := self._open_other(endpoint)) is None:
                continue
            began, took_s, limit_s = time.monotonic(), None, best_s * FASTER + self._limits.measure_s
            try:
                took_s = self._timed(other, batch, min(self._machine.deadline, began + limit_s))
            except (SourceLost, ProtocolError) as error:
                if self._closed or isinstance(error, _Corrupt):
                    raise
                if time.monotonic() < began + limit_s:
                    WAYS.shut(endpoint, began)
                else:
                    start, stop = self._segment_range(batch[0])
                    WAYS.measured(endpoint, (stop - start) / limit_s, began)  # at most
            if took_s is not None and took_s * FASTER < best_s:
                link, other, best_s = other, link, took_s
            other.close()
            self._link, self._spare = link, None
        self._unmeasured = []
        self._batches.appendleft(_Batch(tuple(batch), []))
        return link

    def _open_other(self, endpoint: str) -> Link | None:
        """Open another endpoint of the source, if it takes no longer than the first. The present link is kept open
        meanwhile."""
        self._spare, now = self._link, time.monotonic()
        limit_s = min(self._opening_s * FASTER, self._limits.stall_s / 2) + self._limits.measure_s
        try:
            link, manifest = self._open_at(self.transport, endpoint, min(self._machine.deadline, now + limit_s))
            if manifest.root() != self.grant.root:
                raise SourceLost("another worker is there", peer=endpoint, phase="open")
            return link
        except (TensorHubError, OSError) as error:
            if resources.refusal(error) is None and not self._closed:
                WAYS.shut(endpoint, now)
            if self._link is not None and self._link is not self._spare:
                self._link.close()
            self._link, self._spare = self._spare, None
            return None
        finally:
            self._misled = False

    def _timed(self, link: Link, batch: deque[int], deadline: float) -> float | None:
        """Read the first of these segments; return in how many seconds; None: the source has waited for it itself."""
        start, stop = self._segment_range(batch[0])
        began, took_s = time.monotonic(), 0.0
        for segment in self._arriving(link, [batch[0]], deadline):
            batch.popleft()
            if segment not in link.progress.delayed_segments:
                took_s = time.monotonic() - began
                WAYS.measured(link.peer, (stop - start) / took_s, began)
        return took_s or None

    def _segment_range(self, segment: int) -> tuple[int, int]:
        assert self._target is not None
        return self._target.manifest.segment_range(segment)

    def _read(self, link: Link) -> None:
        grows = self._machine.wanted.grows  # then the deadline moves meanwhile, and `close` ends the read
        deadline = Deadline.after(TIMEOUT_S_MAX) if grows else self._machine.deadline
        for _ in self._arriving(link, self._more(), deadline, self._more):
            pass

    def _arriving(self, link: Link, segments: list[int], deadline: float, more: More | None = None) -> Iterator[int]:
        """Read these segments and further ones, tell of each that has arrived, and yield it."""
        assert self._target is not None
        manifest, slab, moves = self._target.manifest, self._target.slab, self._target.moves
        is_measured = more is None  # by whole segments
        link.bases = self._target.bases if self._deltas and not is_measured else None
        for segment in link.read(segments, slab, moves, deadline=deadline, more=more):
            by_delta = segment in link.progress.deltas
            if by_delta:
                self.deltas[segment] = link.progress.deltas[segment]
            intact = not self._verify or link.digest(segment) == manifest.digest(segment)
            self._expected_at = time.monotonic() + self._limits.stall_s
            with self._changed:  # the caller's thread adds to it
                self._busy -= 1
            waited = segment in link.progress.delayed_segments
            names = () if intact else tuple(dict.fromkeys(spec.tensor for spec in manifest.specs_in([segment])))
            if not intact:
                self._shut(link)  # before the next reader is begun
            self._notify(events.Arrived(self.shard, self.grant.session, segment, intact, waited, names, by_delta))
            if not intact:
                raise _Corrupt("sent corrupt bytes", peer=self.grant.worker, phase="read")
            self._proven = link
            yield segment

    def _lost(self, error: Exception) -> None:
        if not self._closed:
            why = str(error) if isinstance(error, TensorHubError) else repr(error)
            is_cut, answers = isinstance(error.__cause__, Disconnected), isinstance(error, OtherRelease)
            self._notify(self.lost(why, is_cut=is_cut, answers=answers))

    def lost(self, why: str, *, is_cut: bool = False, answers: bool = False) -> events.Lost:
        """Return the event that this source is lost, and whether it was ever reached. If it has several endpoints, the
        next reader tries another one first, unless bytes had come over this one before the source cut it."""
        link = self._link
        if link is not None and not (is_cut and link is self._proven):
            self._shut(link)
        is_unreached = (link is None or self._misled) and not (self._forbidden or self._full or answers)
        is_refused = self._refused and is_unreached
        return events.Lost(self.shard, self.grant.session, why, is_refused, is_unreached, self._cut and not is_refused)

    def _shut(self, link: Link) -> None:
        if len(self._endpoints) > 1:
            WAYS.shut(link.peer, time.monotonic())

    def _notify(self, event: events.Event | Exception) -> None:
        self._inbox.put((self, event))


def _slower_way(taken: str, problems: Mapping[str, str], grant: messages.Grant, ours: Sequence[str], away: int) -> str:
    """Return by which faster ways a source is not read, and why, for people; "" if it is read by the fastest."""
    if taken in WITHIN_A_HOST:
        return ""
    faster = ("rdma", *WITHIN_A_HOST) if away == HOST else ("rdma",)
    why = {name: problem for name, problem in problems.items() if name in faster}
    if away == HOST and "shm" in ours and "shm" not in grant.endpoints:
        why["shm"] = "it does not serve that"
    if not why:
        return ""
    hint = "; if it is on another machine of the same name, set TENSORHUB_HOST on each" if away == HOST else ""
    return f"{grant.worker} is read over {taken}, and not over a faster way: {_listed(why)}{hint}"


def _listed(problems: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {problem}" for name, problem in problems.items())


# With the reader it came from: events of a closed one are ignored, even if the same source is read again.
Events: TypeAlias = "queue.SimpleQueue[tuple[SourceReader | None, events.Event | BaseException]]"
