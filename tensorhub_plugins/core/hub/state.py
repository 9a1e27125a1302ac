"""The hub's records: workers, the shards they hold, the leases under which they read, the requests that wait. PURE.

A history (one model in one run) has versions and workers; a version has holdings, which are its workers'. Nothing here
decides anything: `registry.Registry` keeps all indexes in step with each other, `hub.Hub` decides.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, TypeVar

from tensorhub_plugins.core.hub.candidates import Sources
from tensorhub_plugins.core.hub.copy_counts import Copies, Counted
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.protocol.directive import NO_DIRECTIVE, WITHDRAWN_MAX, Directive, directive_checksum
from tensorhub_plugins.core.protocol.fields import COUNT_MAX
from tensorhub_plugins.core.protocol.lineage import is_superseded
from tensorhub_plugins.core.types import CHECKPOINT, Across, Role, ShardKey, VersionInfo

Key = TypeVar("Key")
Value = TypeVar("Value")
GroupId: TypeAlias = tuple[str, int, Role, str]  # replica, shard count, role, job: equal for all members
ROOTS_KEPT_MAX = 65_536  # shards of versions that no worker holds any more: 250 versions of 256 shards, 16 MB
VERSION_SIZE_BYTES = 64  # of one version in an answer, about, without the names
SHOWN_MAX = WITHDRAWN_MAX + 1  # one is left if all that a directive can name are withdrawn
READ_BYTES_MAX = 1 << 62
LOST_MAX = 64  # workers of one model, the last ones: operators look at them one by one


class _Nothing(dict[Any, Any]):
    """An empty table that stays so."""

    __slots__ = ()
    __hash__ = object.__hash__  # type: ignore[assignment]  # a dataclass takes no other default

    def _refuse(self, *_: object, **__: object) -> Any:
        raise TypeError("this table is shared by all that have none: use `put`")

    __setitem__ = setdefault = update = __ior__ = _refuse  # all that can put something into a dict


NONE = _Nothing()  # of almost all workers, in most of their tables


def put(owner: Worker | Lease, table: str, key: object, value: object) -> None:
    """Put a record into a table that may be NONE."""
    if getattr(owner, table) is NONE:
        setattr(owner, table, {})
    getattr(owner, table)[key] = value


def count(owner: Worker | Lease, table: str, key: object, change: int) -> None:
    """Change a counter in a table that may be NONE, and drop it when it is zero."""
    number = getattr(owner, table).get(key, 0) + change
    if number:
        put(owner, table, key, number)
    else:
        drop(getattr(owner, table), key)


def drop(records: dict[Key, Value], key: Key) -> Value | None:
    """Remove and return a record, or None. With the last one goes the table, which a dict keeps: of ten tables most of
    a worker's are empty most of the time."""
    if not records:
        return None
    found = records.pop(key, None)
    if not records:
        records.clear()
    return found


@dataclass(slots=True)
class Room:
    """How much more an answer may hold, and how many entries were left out of it."""

    size_bytes: int
    left_out: int = 0
    is_full: bool = False  # something did not fit: what comes after it is left out, too

    def takes(self, size_bytes: int) -> bool:
        """Return whether an entry of this size still fits, and count it in or out."""
        fits = size_bytes <= self.size_bytes and not self.is_full
        self.is_full |= not fits
        self.size_bytes -= size_bytes if fits else 0
        self.left_out += not fits
        return fits


def _size_bytes(name: str) -> int:
    return 8 + (len(name) if name.isascii() else 4 * len(name))


@dataclass(slots=True)
class Holding:
    """A shard that one worker has, or is reading (complete: False)."""

    worker: Worker
    key: ShardKey
    root: bytes
    size_bytes: int
    complete: bool
    origin: m.Origin
    as_of: int  # the worker's latest request that named it
    offered: int = 0  # the Publish that brought it; 0: not known, because a Hello did
    unpublishing: int | None = None  # the request that withdraws it
    must_retain: bool = False  # the worker wanted to unpublish it, and it is the last copy
    counted: Counted = Counted()  # noqa: RUF009  (a tuple) kept by `Registry.count_copy`

    @property
    def is_published(self) -> bool:
        """Return whether a trainer has published it, which is what makes versions. An engine publishes what it has
        converted, in its own layout."""
        return self.origin == "published" and self.worker.role != "reader" and self.key.layout == CHECKPOINT

    @property
    def stays(self) -> bool:
        """Return whether it may be read and counts as a copy: it is not about to go."""
        return self.unpublishing is None or self.must_retain


class _Referred:
    """Base class of what timers refer to weakly."""

    __slots__ = ("__weakref__",)


@dataclass(eq=False, slots=True)
class Lease(_Referred):
    """The right of a reader to read these sources until the deadline."""

    reader: Worker
    request_id: int
    version: int
    layout: str
    shard_count: int
    sources: dict[int, bytes]  # shard -> session of its source
    deadline: float
    serves: bool = False  # what is read is served to others while it arrives
    beside: bool = False  # it is additional: other sources are read, too
    is_announced: bool = False  # a Hello has reported it; we have not granted it
    served_at: dict[bytes, float] = NONE  # by source: its last use, see `Registry.record_used`
    shards_of: Counter[bytes] = field(init=False)  # source -> how many of the shards

    def __post_init__(self) -> None:
        self.shards_of = Counter(self.sources.values())

    def shard_keys(self) -> list[ShardKey]:
        """Return the keys of the shards that are read."""
        return [self.key(shard) for shard in self.sources]

    def key(self, shard: int) -> ShardKey:
        """Return the key of one of its shards."""
        return ShardKey(self.version, self.layout, shard, self.shard_count)


@dataclass(slots=True)
class Bound:
    """How long the leases of one request may last, whatever is reported: until then, and while the read goes on."""

    until: float
    progress_at: float
    progress: int = 0  # bytes, as its reader counts them
    bytes_per_s: float = 0.0  # between the last two heartbeats

    def renew(self, progress: int, now: float) -> None:
        """Take a new count. The first one is no rate: the hub may have been started in the middle of the read."""
        if progress > self.progress:
            if self.progress and now > self.progress_at:
                self.bytes_per_s = min((progress - self.progress) / (now - self.progress_at), float(COUNT_MAX))
            self.progress, self.progress_at = progress, now


@dataclass(eq=False, slots=True)
class Claim(_Referred):
    """The duty of this worker to convert a shard into a layout that no worker holds, until the deadline."""

    worker: Worker
    version: Version
    key: ShardKey
    deadline: float  # it moves as the worker works, until the next
    until: float
    request_id: int = 0  # the Acquire with which it was assigned; 0: a Hello has reported it
    is_waited_for: bool = True  # others wait for its layout, see `Registry.add_claim`
    charged_s: float = 0.0  # to be refunded if it is fulfilled


Waiting: TypeAlias = m.Acquire | m.Unpublish | m.Wait | m.Target | m.Pin | m.Withdraw | m.Begin  # may take a while


def items_of(message: m.Request) -> int:
    """Return how many shards and sessions are named by a request, which are kept while it waits."""
    match message:
        case m.Unpublish():
            return len(message.keys)
        case m.Acquire():
            return sum(map(len, (message.shards, message.avoid, message.exclude, message.beside)))
        case _:
            return 0


@dataclass(eq=False, slots=True)
class Pending(_Referred):
    """A request that has no answer yet."""

    worker: Worker
    message: Waiting
    deadline: float
    since: float = 0.0  # when it arrived
    order: int = 0  # of arrival
    version: int = 0  # the one that "latest" was resolved to
    gives_way_until: float = 0.0  # waits until then for another engine to convert; 0.0: not so far
    queue: tuple[int, object] | None = None  # where it is parked: version and `waiters.wait_key`
    id: tuple[bytes, int] = field(init=False)  # session and request

    def __post_init__(self) -> None:
        self.id = self.worker.session, self.message.request_id

    def is_overdue(self, now: float) -> bool:
        """Return whether its caller has abandoned it."""
        until = getattr(self.message, "until", None)
        return until is not None and now > until.clock


class Aside(NamedTuple):
    """A reader's report that it holds a shard which no publisher has named yet."""

    holding: m.Holding
    as_of: int
    offered: int


@dataclass(eq=False, slots=True)
class Worker(_Referred):
    """One session: its identity, and what it holds and reads."""

    session: bytes
    hello: m.Hello
    history: History
    last_heard: float
    role: Role = "publisher"
    mark: bytes = b""  # of the attempt that it has begun as a trainer
    suspect: bool = False  # a reader lost it and it has not been heard since
    refuses: bool = False  # another worker found that it has ended, and it has not been heard since
    said_gone: bool = False  # the same, found by a process on its machine, or on a copy of that
    silence_at: float = 0.0  # when its silence is checked next
    beat_s: float = 1.0  # its next heartbeat comes within that
    has_proved_name: bool = False  # it showed a hub's proof of its name, or has one from this hub
    is_replaced: bool = False  # another process has sent Hello as this shard of this replica since
    last_request_id: int = 0  # the highest that is known
    settled: int = 0  # it has the answers to its requests up to this one,
    asked: tuple[int, ...] = ()  # but for these
    seen_version: int = 0
    dropped: tuple[int, int] = (0, 0)  # the last request that was overdue, and the version that was "latest" for it
    refusal: tuple[int, str] = (0, "")  # the newest version that it cannot install, and why; 0: none
    failure: str = ""  # of its last try to install one, as a follower; "": it went well
    installed: int | None = None  # what it runs, as a follower (0: nothing yet); None: it follows nothing
    installed_at: float = 0.0  # when it was first heard to run that
    runs_what_it_reads: bool = False  # a loop by hand: it asks for the next version by `wait`, and says nothing else
    holdings: dict[ShardKey, Holding] = field(default_factory=dict)
    leases: dict[int, Lease] = field(default_factory=dict)  # as a reader
    readers: dict[tuple[bytes, int], Lease] = field(default_factory=dict)  # as a source
    network_readers: int = 0  # of them, those on other hosts
    lease_bounds: dict[int, Bound] = field(default_factory=dict)  # by request
    sources: dict[bytes, int] = NONE  # as a reader: under how many leases from each
    reading: dict[ShardKey, int] = NONE  # under how many leases
    keeping: dict[ShardKey, int] = NONE  # the same, for leases that do not serve
    depth: dict[ShardKey, int] = field(default_factory=dict)  # of arriving shards: hops to a worker that has all of it
    pending: dict[int, Pending] = field(default_factory=dict)
    pending_items: int = 0  # `items_of` them
    replies: dict[int, m.Reply] = field(default_factory=dict)
    replies_size_bytes: int = 0  # of them, about
    withdrawn: dict[ShardKey, int] = NONE  # -> its Unpublish
    aside: dict[ShardKey, Aside] = NONE  # see permissions.py
    claims: dict[ShardKey, Claim] = NONE
    prefers: str = ""  # the engine's layout that it has asked for last
    holdings_checksum: int = 0  # `messages.holdings_checksum`; 0: to be computed again
    corrupt_segments: int = 0  # that readers got from it
    doubts: dict[tuple[ShardKey, bytes], float] = NONE  # (key, reader) of recent reports to it
    announced_shards: int = 0  # that it reads, as its Hello has reported
    layouts: dict[str, int] = NONE  # of a reader: how many shards it has of each
    unreached: dict[bytes, float] = NONE  # sources that it cannot connect to -> when it said so
    is_said_unreached: bool = False  # that a reader cannot connect to this one
    room_bytes: int = 0  # free for copies that others need, as last reported
    worked: int = 0  # likewise: pieces of work
    worked_at: float = 0.0  # when it last reported more of them
    lacks: str = ""  # likewise: what the system has refused its process lately
    is_leaving: bool = False  # it hands over what only it has
    published_size_bytes: int = 0  # what it holds of what it has published
    group: GroupId = field(init=False)  # the replica whose members agree on "latest"

    def hear(self, now: float) -> None:
        """Note that a message came: it is alive, whatever others have reported."""
        self.last_heard, self.suspect, self.refuses, self.said_gone = now, False, False, False

    def __post_init__(self) -> None:
        hello, reader = self.hello, self.role == "reader"
        self.group = hello.replica, hello.shard_count, self.role, hello.job if reader else ""

    @property
    def name(self) -> str:
        """Return its name in reports and errors: "replica/shard"."""
        return f"{self.hello.replica}/{self.hello.shard}"

    @property
    def is_zombie(self) -> bool:
        """Return whether it is a fenced trainer: one of an attempt that is over."""
        return b"" not in (self.mark, self.history.directive.mark) and self.mark != self.history.directive.mark


Contents: TypeAlias = dict[tuple[str, int, int], tuple[bytes, int]]  # layout, shard count, shard -> root, size in bytes


@dataclass(eq=False, slots=True)
class Version:
    """One version of a history: which workers hold which shards of it in which layouts."""

    number: int
    visible: bool = False
    was_visible: bool = False  # ever
    holdings: dict[tuple[str, int], dict[int, dict[bytes, Holding]]] = field(default_factory=dict)
    # (layout, shard_count) -> shard -> session -> holding
    contents: Contents = field(default_factory=dict)
    by_readers: set[tuple[str, int, int]] = field(default_factory=set)  # the contents that only readers have reported
    claims: dict[ShardKey, Claim] = field(default_factory=dict)
    sources: dict[ShardKey, Sources] = field(default_factory=dict)
    copies: Copies = field(default_factory=Copies)
    may_be_lost: bool = True  # a complete copy has gone, or is about to go, since the last check
    since: float = 0.0  # when it was heard of

    def key(self, layout: str, shard: int, shard_count: int) -> ShardKey:
        """Return the key of one of its shards."""
        return ShardKey(self.number, layout, shard, shard_count)

    def holders(self, key: ShardKey) -> dict[bytes, Holding]:
        """Return the holdings of this shard, whole or in part, by session."""
        return self.holdings.get((key.layout, key.shard_count), {}).get(key.shard, {})

    def layouts(self) -> Iterator[tuple[str, int]]:
        """Return (layout, shard count) of all that any worker holds."""
        return iter(self.holdings)

    def complete_holders(self, layout: str) -> list[Worker]:
        """Return the workers that have any shard of this layout, whole."""
        cuts = (by_shard for (name, _), by_shard in self.holdings.items() if name == layout)
        held = (h for by_shard in cuts for holders in by_shard.values() for h in holders.values() if h.complete)
        return list({h.worker.session: h.worker for h in held}.values())

    @property
    def published_size_bytes(self) -> int:
        """Return the size of all shards that trainers have published."""
        return sum(size for shard, (_, size) in self.contents.items() if shard not in self.by_readers)

    def held_text(self, reader: Worker) -> str:
        """Return the layouts that are held, as text for users, and whether this reader is their only holder."""
        held = [h for cut in self.holdings.values() for holders in cut.values() for h in holders.values()]
        layouts = ", ".join(sorted({layout for layout, _ in self.holdings})) or "nothing"
        return layouts + " by this worker itself, and it reads from others" * ({h.worker for h in held} == {reader})


@dataclass(slots=True)
class GroupResolution:
    """What "latest" means to the shards of one replica (rule 2): one version for each generation.

    A shard that asks again after its answer begins the next generation, for all of them."""

    generation: int = 0
    version: int = 0  # 0: none is agreed on
    notified_shards: set[int] = field(default_factory=set)
    refused: dict[int, tuple[bytes, int]] = field(default_factory=dict)  # shard -> session and request that was refused
    arrived: set[int] = field(default_factory=set)  # shards whose workers have come, in this start of the replica

    def begin(self, version: int) -> None:
        """Begin the next generation."""
        self.generation, self.version, self.notified_shards = self.generation + 1, version, set()

    def arrive(self, hello: m.Hello) -> None:
        """Note that the worker of a shard has come. The first new one of a start makes the group agree anew; what the
        group agrees on then is valid for those that come later, too."""
        if not hello.welcomed and hello.shard in self.arrived:
            self.arrived, self.version = set(), 0
        self.arrived.add(hello.shard)

    def forget_shard(self, shard: int) -> None:
        """Forget the worker of this shard, which is gone. Refusals stay: it may come back, and ask again."""
        self.notified_shards.discard(shard)

    def refuse(self, shard: int, session: bytes, request_id: int) -> None:
        """Refuse this request what the others took, also when the refusal is lost and it is sent again. It is answered
        in this generation: those that are still to ask get what the others took, or are refused as well."""
        refused_session, last = self.refused.get(shard, (b"", 0))
        self.refused[shard] = session, max(request_id, last) if session == refused_session else request_id
        self.notified_shards.add(shard)

    def has_refused(self, shard: int, session: bytes, request_id: int) -> bool:
        """Return whether this request of the shard, or a later one, was refused."""
        refused_session, last = self.refused.get(shard, (b"", 0))
        return session == refused_session and request_id <= last

    def recall(self, shard: int, generation: int, version: int) -> None:
        """Take the generation in which a shard was answered last: what was agreed on before a hub's restart."""
        if generation > self.generation:
            self.generation, self.version, self.notified_shards = generation, version, {shard}
        elif generation == self.generation:
            self.notified_shards.add(shard)
        else:
            self.notified_shards.discard(shard)  # the answer never reached it, and it asks again


@dataclass
class Missing:
    """A retained version that is in fewer failure domains than are wanted."""

    since: float
    asked: dict[bytes, float] = field(default_factory=dict)  # session -> when it was asked to hold a copy
    tried_at: float = float("-inf")  # when all workers were last considered for a copy
    why: str = ""  # why no worker can hold one


@dataclass
class History:
    """All versions of one model in one run."""

    run: str
    model: str
    retain_newest: int = 1
    retain_domains: int = 1  # the number of failure domains in which copies of them are kept
    retain_across: Across = "host"
    retain_serial: int = 0  # of the last Retain
    retain_also: int = 0  # a version that is retained beside the newest; 0: none
    missing: dict[int, Missing] = field(default_factory=dict)  # by version, see failure_domains.py
    looked_at: float = float("-inf")  # when missing copies were last looked for
    is_short: bool = False  # a missing copy was logged
    published_size_bytes: int = 0  # by its trainers, and held by them
    is_over_budget: bool = False  # the excess was logged
    newest_visible: int = 0  # ever, except those that are over
    shown: dict[int, float] = field(default_factory=dict)  # the newest ever visible, sorted -> since when
    lost: dict[str, tuple[str, float]] = field(default_factory=dict)  # workers that were declared dead -> host, when
    corrupt_segments: int = 0  # that readers got, from workers that may have left since
    read_bytes: Counter[str] = field(default_factory=Counter)  # by way, of reads that have ended
    wire_bytes: int = 0  # sent for them
    directive: Directive = NO_DIRECTIVE
    withdrawn: frozenset[int] = frozenset()  # its versions
    begun_by: frozenset[tuple[bytes, int]] = frozenset()  # requests that have begun the newest attempt here
    marks_refused: dict[bytes, None] = field(default_factory=dict)  # of trainers that were warned of
    directive_checksum: int = field(default_factory=lambda: directive_checksum(NO_DIRECTIVE))
    versions: dict[int, Version] = field(default_factory=dict)
    roots: dict[int, Contents] = field(default_factory=dict)  # of versions that were visible and are forgotten
    roots_count: int = 0
    workers: dict[bytes, Worker] = field(default_factory=dict)
    converters: dict[tuple[str, int], str] = field(default_factory=dict)  # (layout, shard_count) -> the last replica
    owed_until: dict[tuple[str, int], float] = field(default_factory=dict)  # by failed claims: see `Registry.add_claim`
    groups: dict[GroupId, GroupResolution] = field(default_factory=dict)
    replicas: dict[str, dict[bytes, Worker]] = field(default_factory=dict)  # name -> its workers
    leases_on_unknown_sources: dict[bytes, dict[tuple[bytes, int], Lease]] = field(default_factory=dict)
    # source -> leases that readers have announced, after a hub's restart, before the source has sent its Hello
    aside: dict[int, dict[bytes, Worker]] = field(default_factory=dict)  # version -> workers that have some of it aside
    # Kept by `waiters.Waiters`:
    waiting: dict[tuple[bytes, int], Pending] = field(default_factory=dict)  # all, in order of arrival
    beginning: dict[tuple[bytes, int], Pending] = field(default_factory=dict)  # of them, those that begin an attempt
    ready: dict[tuple[bytes, int], Pending] = field(default_factory=dict)  # to be tried again
    leaving: dict[tuple[bytes, int], Pending] = field(default_factory=dict)  # as those, but each is an Unpublish
    changed: dict[int, bool] = field(default_factory=dict)  # versions whose queues have; True: there may be a source
    wait_queues: dict[int, dict[object, dict[tuple[bytes, int], Pending]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.id = self.run, self.model
        self.name = f"{self.run}/{self.model}"

    def version(self, number: int, now: float) -> Version:
        """Return what is known of this version, and create its record if there is none."""
        version = self.versions.get(number)
        if version is None:
            version = self.versions[number] = Version(number, since=now)
        return version

    def forget_version(self, number: int) -> None:
        """Forget a version that no worker holds. If one may have read it, its number still means the same bytes."""
        version = self.versions.pop(number)
        if version.was_visible:
            before = self.roots.pop(number, {})
            self.roots[number] = before | version.contents
            self.roots_count += len(self.roots[number]) - len(before)
        while self.roots_count > ROOTS_KEPT_MAX:
            self.roots_count -= len(self.roots.pop(next(iter(self.roots))))

    def group(self, worker: Worker) -> GroupResolution:
        """Return what the replica of this worker has agreed on."""
        return self.groups[worker.group]

    def members(self, worker: Worker) -> list[Worker]:
        """Return the workers of this worker's replica, with itself and former incarnations."""
        return [other for other in self.replicas[worker.hello.replica].values() if other.group == worker.group]

    def is_visible(self, number: int) -> bool:
        """Return whether readers may have this version."""
        version = self.versions.get(number)
        return version is not None and version.visible

    def visible(self) -> list[int]:
        """Return the visible versions, the newest first."""
        return sorted((n for n, v in self.versions.items() if v.visible), reverse=True)

    def show(self, number: int, now: float) -> None:
        """Note that this version is visible."""
        if number not in self.shown:
            self.shown = dict(sorted({**self.shown, number: now}.items())[-SHOWN_MAX:])
        self._refresh_newest()

    def note_read(self, way: str, size_bytes: int, wire_size_bytes: int) -> None:
        """Count what a read has brought. No sum of what peers say grows beyond what a message can hold."""
        self.read_bytes[way] = min(self.read_bytes[way] + size_bytes, READ_BYTES_MAX)
        self.wire_bytes = min(self.wire_bytes + wire_size_bytes, READ_BYTES_MAX)

    def note_lost(self, worker: Worker, now: float) -> None:
        """Remember a worker that was declared dead, for people, if it followed this model or held any of it."""
        if worker.installed is not None or worker.holdings:
            self.lost.pop(worker.name, None)
            self.lost[worker.name] = worker.hello.location.host, now
            while len(self.lost) > LOST_MAX:
                del self.lost[next(iter(self.lost))]

    def _refresh_newest(self) -> None:
        """Forget a newest version that is over: older ones are not gone, and the next is not too low."""
        self.newest_visible = next((n for n in reversed(self.shown) if not self.is_over(n)), 0)

    def retained(self) -> set[int]:
        """Return the versions whose last copy is not evicted: the newest, the pinned, and one that was asked for."""
        visible = self.visible()
        return {*visible[: self.retain_newest], *(n for n in visible if n in (self.directive.pin, self.retain_also))}

    def retain(self, newest: int, domains: int, across: Across, serial: int, also: int) -> None:
        """Keep copies of so many versions, and of one more, in so many failure domains."""
        self.retain_newest, self.retain_domains, self.retain_across = newest, domains, across
        self.retain_serial, self.retain_also = serial, also

    def recall_retain(self, hello: m.Hello) -> None:
        """Take what a worker has requested before, perhaps from a previous hub; it is ignored if a later request came
        since. Of two with one serial, which two hubs have assigned, the one that keeps more counts."""
        if (newest := hello.retain_newest) is None:
            return
        said = hello.retain_serial, newest, hello.retain_domains, hello.retain_across, hello.retain_also
        known = self.retain_serial, self.retain_newest, self.retain_domains, self.retain_across, self.retain_also
        if not self.retain_serial or said > known:
            serial, newest, domains, across, also = said
            self.retain(newest, domains, across, serial, also)

    def direct(self, directive: Directive) -> None:
        """Apply an operators' directive to this history."""
        if directive.mark != self.directive.mark:
            self.begun_by = frozenset()
        self.directive, self.withdrawn = directive, frozenset(directive.withdrawn)
        self._refresh_newest()
        self.directive_checksum = directive_checksum(directive)

    def is_over(self, number: int) -> bool:
        """Return whether this version is not to be used any more: it was withdrawn, or a newer attempt ended it."""
        return number in self.withdrawn or is_superseded(number, self.directive.attempts)

    def newest(self, at_least: int, without: Iterable[int] = ()) -> int | None:
        """Return the newest visible version from this one on; None: there is none."""
        visible = (n for n, v in self.versions.items() if v.visible and n >= at_least and n not in without)
        return max(visible, default=None)

    def latest(self, at_least: int) -> int | None:
        """Return what "latest" means: the pinned version if it is visible, else the newest one."""
        pin = self.directive.pin
        if pin:
            return pin if self.is_visible(pin) else None
        return self.newest(at_least)

    def floor(self, seen: int) -> int:
        """Return the version below which a worker that has seen this one does not go: 0, if that is over."""
        return 0 if self.is_over(seen) else seen

    def version_infos(self, room: Room) -> tuple[VersionInfo, ...]:
        """Return what `Client.versions` returns, oldest version first. room: where not all fits, the newest versions
        take precedence, then the checkpoint, and workers that have the run's secret."""
        found: list[VersionInfo] = []
        for number in sorted(self.versions, reverse=True):
            version = self.versions[number]
            layouts: dict[str, tuple[str, ...]] = {}
            fits = room.takes(VERSION_SIZE_BYTES)
            for layout in sorted({each for each, _ in version.holdings}, key=lambda name: (name != CHECKPOINT, name)):
                if fits and room.takes(_size_bytes(layout)):
                    holders = version.complete_holders(layout)
                    names = (w.name for w in sorted(holders, key=lambda w: (w.role == "reader", w.name)))
                    layouts[layout] = tuple(sorted({name for name in names if room.takes(_size_bytes(name))}))
            if fits:
                found.append(VersionInfo(number, version.visible, layouts))
        return tuple(reversed(found))


Timed: TypeAlias = Worker | Lease | Pending | Claim | None  # what has a deadline; None: the hub's own recovery


def beside(claim: Claim) -> Iterator[Claim]:
    """Yield the claims of the other shards of its replica."""
    key, group = claim.key, claim.worker.group
    for other in claim.version.claims.values():
        same = (other.key.layout, other.key.shard_count) == (key.layout, key.shard_count)
        if other is not claim and other.worker.group == group and same:
            yield other


def checksum_of(worker: Worker) -> int:
    """Return `messages.holdings_checksum` of all that this worker reports to hold."""
    held = {key: h.complete for key, h in worker.holdings.items()}
    aside = {key: said.holding.complete for key, said in worker.aside.items()}
    return m.holdings_checksum((held | aside).items())


def check_of(launch_id: str) -> bytes:
    """Return the end of the mark of an attempt that was begun with this launch id."""
    return zlib.crc32(launch_id.encode()).to_bytes(4, "big")
