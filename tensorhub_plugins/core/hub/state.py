"""What the hub knows: workers, the shards they hold, the leases under which they read, and who waits for what.

A history (one model in one run) has versions and workers; a version has holdings, which are its workers'. Nothing here
decides anything: `registry.Books` keeps these in step with each other, `hub.Hub` decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from tensorhub_plugins.core.hub.selection import Sources
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.types import (
    ShardKey,
    VersionInfo,
)


@dataclass(slots=True)
class Holding:
    worker: Worker
    key: ShardKey
    root: bytes
    size_bytes: int
    complete: bool
    origin: m.Origin
    sequence: int  # the number under which the worker has last spoken of it
    offered: int = 0  # the Publish with which it began; 0: not known, because a Hello said so
    unpublishing: int | None = None  # the request that withdraws it
    must_retain: bool = False  # the holder wanted to give it up and was told to keep it


@dataclass(eq=False, slots=True)
class Lease:
    reader: Worker
    request_id: int
    version: int
    layout: str
    shard_count: int
    sources: dict[int, bytes]  # shard -> session of its source
    deadline: float
    serves: bool = False  # what is read is passed on while it arrives
    beside: bool = False  # other sources are read from, too

    def shard_keys(self) -> list[ShardKey]:
        return [self.key(shard) for shard in self.sources]

    def key(self, shard: int) -> ShardKey:
        return ShardKey(self.version, self.layout, shard, self.shard_count)


@dataclass(eq=False, slots=True)
class Claim:
    worker: Worker
    version: Version
    key: ShardKey
    deadline: float


@dataclass(eq=False, slots=True)
class Pending:
    worker: Worker
    message: m.Acquire | m.Unpublish | m.Wait | m.Target | m.Pin | m.Withdraw
    deadline: float
    order: int = 0  # of arrival
    version: int = 0  # the one "latest" was resolved to
    line: tuple[int, object] | None = None  # in which it stands


@dataclass(eq=False, slots=True)
class Worker:
    session: bytes
    hello: m.Hello
    history: History
    last_heard: float
    suspect: bool = False  # a reader lost it and it has not been heard since
    sequence: int = 0  # the highest number it has used, as far as we know
    seen_version: int = 0
    holdings: dict[ShardKey, Holding] = field(default_factory=dict)
    leases: dict[int, Lease] = field(default_factory=dict)  # as a reader
    readers: dict[tuple[bytes, int], Lease] = field(default_factory=dict)  # as a source
    network_readers: int = 0  # of them, those on other hosts
    depth: dict[ShardKey, int] = field(default_factory=dict)  # of what arrives: hops to one who has all of it
    pending: dict[int, Pending] = field(default_factory=dict)
    replies: dict[int, m.Reply] = field(default_factory=dict)
    withdrawn: dict[ShardKey, int] = field(default_factory=dict)  # -> its Unpublish
    holdings_checksum: int = 0  # `messages.holdings_checksum`; 0: to be counted again

    @property
    def name(self) -> str:
        return f"{self.hello.replica}/{self.hello.shard}"


@dataclass(eq=False, slots=True)
class Version:
    number: int
    visible: bool = False
    holdings: dict[tuple[str, int], dict[int, dict[bytes, Holding]]] = field(default_factory=dict)
    # (layout, shard_count) -> shard -> session -> holding
    contents: dict[tuple[str, int, int], tuple[bytes, int]] = field(default_factory=dict)
    # (layout, shard_count, shard) -> root, size in bytes
    claims: dict[ShardKey, Claim] = field(default_factory=dict)
    sources: dict[ShardKey, Sources] = field(default_factory=dict)
    may_be_lost: bool = True  # a complete copy has gone, or is about to, since somebody was seen to hold it

    def holders(self, key: ShardKey) -> dict[bytes, Holding]:
        return self.holdings.get((key.layout, key.shard_count), {}).get(key.shard, {})

    def layouts(self) -> Iterator[tuple[str, int]]:
        return iter(self.holdings)

    def has(
        self, layout: str, shard_count: int, shards: Iterable[int], *, without: frozenset[int] = frozenset()
    ) -> bool:
        """Whether each of these shards has a complete holder that stays. without: ids of holdings not to count."""
        by_shard = self.holdings.get((layout, shard_count), {})
        return all(
            any(
                h.complete and (h.unpublishing is None or h.must_retain) and id(h) not in without
                for h in by_shard.get(shard, {}).values()
            )
            for shard in shards
        )

    def has_whole(self, layout: str, *, without: frozenset[int] = frozenset()) -> bool:
        return any(
            self.has(layout, count, range(count), without=without) for held, count in self.holdings if held == layout
        )

    def is_held(self, *, without: frozenset[int] = frozenset()) -> bool:
        return any(self.has_whole(layout, without=without) for layout, _ in self.holdings)

    def held_text(self) -> str:
        return ", ".join(sorted({layout for layout, _ in self.holdings})) or "nothing"


@dataclass
class Latest:
    """What the shards of a replica agree on. A shard that asks again begins the next generation, newer if it can be."""

    generation: int = 0
    version: int = 0  # 0: they agree on nothing
    told: set[int] = field(default_factory=set)  # shards


@dataclass
class History:
    """All versions of one model in one run."""

    run: str
    model: str
    retain_newest: int = 1
    newest_visible: int = 0  # ever
    directive: m.Directive = m.NO_DIRECTIVE
    withdrawn: frozenset[int] = frozenset()  # its versions
    directive_checksum: int = field(default_factory=lambda: m.directive_checksum(m.NO_DIRECTIVE))
    versions: dict[int, Version] = field(default_factory=dict)
    workers: dict[bytes, Worker] = field(default_factory=dict)
    latest: dict[str, Latest] = field(default_factory=dict)  # by replica
    replicas: dict[str, dict[bytes, Worker]] = field(default_factory=dict)  # name -> its workers
    leases_on_strangers: dict[bytes, dict[tuple[bytes, int], Lease]] = field(default_factory=dict)
    # source -> leases that readers have announced, after a hub's restart, before the source has
    waiting: dict[tuple[bytes, int], Pending] = field(default_factory=dict)  # in order of arrival
    # What `_settle` has to look at, and nothing else: it runs after every message, and thousands may wait.
    due: dict[tuple[bytes, int], Pending] = field(default_factory=dict)  # these requests
    changed: dict[int, bool] = field(default_factory=dict)  # and the lines of these versions; True: there may be room
    lines: dict[int, dict[object, dict[tuple[bytes, int], Pending]]] = field(default_factory=dict)
    # Who waits, by version and by what it needs of it: when the first of a line find no source, nor do the others.
    # Version ANY: for a version to become visible.

    def is_visible(self, number: int) -> bool:
        version = self.versions.get(number)
        return version is not None and version.visible

    def visible(self) -> list[int]:
        """The newest first."""
        return sorted((n for n, v in self.versions.items() if v.visible), reverse=True)

    def retained(self) -> set[int]:
        visible = self.visible()
        return {*visible[: self.retain_newest], *(n for n in visible if n == self.directive.pin)}

    def direct(self, directive: m.Directive) -> None:
        self.directive, self.withdrawn = directive, frozenset(directive.withdrawn)
        self.directive_checksum = m.directive_checksum(directive)

    def floor(self, seen: int) -> int:
        """The version below which whoever has seen this one does not go: none, if it was withdrawn."""
        return 0 if seen in self.withdrawn else seen

    def version_infos(self) -> tuple[VersionInfo, ...]:
        infos = []
        for number, version in sorted(self.versions.items()):
            layouts: dict[str, list[str]] = {}
            for (layout, _), by_shard in version.holdings.items():
                names = layouts.setdefault(layout, [])
                for holders in by_shard.values():
                    names.extend(h.worker.name for h in holders.values() if h.complete and h.worker.name not in names)
            infos.append(VersionInfo(number, version.visible, {k: tuple(sorted(v)) for k, v in layouts.items()}))
        return tuple(infos)


Timed: TypeAlias = Worker | Lease | Pending | Claim | None  # what has a deadline; None: the hub's own recovery
