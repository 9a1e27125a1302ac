"""What this worker offers to others. PURE: events go in, effects come out; no clock, thread or torch.

A shard on the shelf is
    arriving   it is being read, and what has come of it is served already (rule 3 of the design);
    whole      published, or read to its end;
    retained   whole, and the hub wants it kept: it may be the last copy of a retained version (rule 4).
A shard that is not there may be
    expected   this worker has asked for sources, or is about to read it, so the hub may have sent a peer here for it.
A copy that the hub has asked this worker to hold for others (requested_copies.py) does not block its owner: a publish
replaces it.

    publish ------------------------------> whole  --unpublish--> asked --unpublished--> gone, or retained
    begin_read -> grant -> prepare -> arriving  --complete--> whole
                                          \\--drop--> gone

The order is essential: a shard is on the shelf before the hub is notified of it, and it is off the shelf, with all its
readers disconnected, before its memory is reused. Every time that a shard is put on the shelf counts as another
offering: requests about an earlier one do not apply to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.manifest import Manifest
from tensorhub_plugins.core.types import ShardKey

# What the shell serves a shard from: `transports.Offer`, or a simulation's equivalent.
OfferT = TypeVar("OfferT")

# --- effects ---


@dataclass(frozen=True)
class Announce(Generic[OfferT]):
    """Notify the hub that this shard is here. is_whole: all of it. was_read: it came from others."""

    offer: OfferT
    is_whole: bool
    was_read: bool


@dataclass(frozen=True)
class MarkReady(Generic[OfferT]):
    """Serve this segment from now on; None: all."""

    offer: OfferT
    segment: int | None


@dataclass(frozen=True)
class Retract:
    """Notify the hub, until it has answered, that these shards will never be whole here."""

    keys: tuple[ShardKey, ...]


@dataclass(frozen=True)
class Withdraw(Generic[OfferT]):
    """Disconnect its readers. When they have left, its memory may be reused."""

    key: ShardKey
    offer: OfferT


@dataclass(frozen=True)
class GiveWay(Generic[OfferT]):
    """Disconnect the readers of a copy for others: its owner has put the same shard here. is_arriving: it is still
    read, into memory that its read will return."""

    key: ShardKey
    offer: OfferT
    is_arriving: bool


@dataclass(frozen=True)
class Retain(Generic[OfferT]):
    """Serve it from memory that its owner does not touch; `replace` records where that is."""

    key: ShardKey
    offer: OfferT


Effect: TypeAlias = (
    "Announce[OfferT] | MarkReady[OfferT] | Retract | Withdraw[OfferT] | GiveWay[OfferT] | Retain[OfferT]"
)

# --- the machine ---

Ticket: TypeAlias = dict[ShardKey, int]  # shards, each with the offering that it refers to


@dataclass
class Entry(Generic[OfferT]):
    """One shard on the shelf. offering: counts everything that this worker has ever put on its shelf."""

    offer: OfferT
    offering: int
    is_arriving: bool = False
    is_retained: bool = False
    is_for_others: bool = False  # a copy that the hub has asked for
    is_known: bool = False  # the hub knew of a copy here before


@dataclass
class Reading:
    """One read that serves what arrives. created_after: the number of the last request to the hub before it.

    granted: the shards that it is to read; None: not yet known. anew: those of which it has dropped what had come, with
    the number of the last request before that."""

    created_after: int
    granted: set[ShardKey] | None = None
    is_for_others: bool = False
    arriving: set[ShardKey] = field(default_factory=set)
    anew: dict[ShardKey, int] = field(default_factory=dict)

    def since(self, key: ShardKey) -> int:
        """Return the request after which this shard is new: readers sent here before it mean earlier data."""
        return self.anew.get(key, self.created_after)


@dataclass(frozen=True)
class Published:
    """The newest version that was published here in one layout."""

    version: int
    manifest: Manifest


@dataclass
class Shelf(Generic[OfferT]):
    """What this worker offers, by shard, and what is about to be offered."""

    entries: dict[ShardKey, Entry[OfferT]] = field(default_factory=dict)
    readings: dict[int, Reading] = field(default_factory=dict)
    published: dict[str, Published] = field(default_factory=dict)  # by layout
    offerings: int = 0
    closed: bool = False

    # --- requests of readers ---

    def find(self, key: ShardKey) -> OfferT | None:
        """Return the offer of this shard; None: there is none."""
        entry = self.entries.get(key)
        return entry.offer if entry is not None else None

    def is_expected(self, key: ShardKey, request_id: int) -> bool:
        """Return whether a read that had begun when the hub received request `request_id` may put this shard here."""
        return not self.closed and any(
            reading.since(key) <= request_id and (reading.granted is None or key in reading.granted)
            for reading in self.readings.values()
        )

    # --- publish and unpublish ---

    def check(self, key: ShardKey, *, returns: bool) -> None:
        """Raise UsageError when this may not be published now, whatever its bytes.

        returns: operators make the fleet go back to this version from the newest one."""
        if self.closed:
            raise UsageError("the client is closed")
        if key in self.entries and not self.entries[key].is_for_others:
            raise UsageError("this version is published here already: unpublish it first", version=key.version)
        last = self.published.get(key.layout)
        if last is not None and key.version < last.version and not returns:
            raise UsageError(
                f"version {last.version} of layout {key.layout} was published here before: versions only grow"
            )

    def publish(
        self, key: ShardKey, manifest: Manifest, offer: OfferT, *, returns: bool, was_read: bool
    ) -> list[Effect[OfferT]]:
        """Offer a whole shard; call `announced` or `refused` by the hub's answer. Raise UsageError as `check` does, or
        for other bytes than before."""
        self.check(key, returns=returns)
        last = self.published.get(key.layout)
        if last is not None and key.version == last.version and manifest.root() != last.manifest.root():
            raise UsageError(
                f"version {last.version} of layout {key.layout} was published here before with other bytes"
            )
        copy = self.entries.pop(key, None)
        self._put(key, offer).is_known = copy is not None
        for reading in self.readings.values():
            reading.arriving.discard(key)
        way = [] if copy is None else [GiveWay(key, copy.offer, copy.is_arriving)]
        return [*way, Announce(offer, True, was_read)]

    def announced(self, key: ShardKey, manifest: Manifest) -> None:
        """Record that the hub knows of what was published."""
        self.published[key.layout] = Published(key.version, manifest)

    def refused(self, key: ShardKey, offer: OfferT, *, left: bool = False) -> list[Effect[OfferT]]:
        """Withdraw what the hub has refused, or not answered in time: nothing was published. left: its answer was not
        waited for."""
        keys = [key] if self.find(key) is offer else []
        return self._take_back(keys) if keys and (left or self.entries[key].is_known) else self._remove(keys)

    def unpublish(self, version: int, layout: str | None = None) -> Ticket:
        """Return what to ask of the hub in order to unpublish this version (layout None: in every layout).

        Raise UsageError while its owner still reads it here; what arrives for others is unpublished when it is here."""
        meant = {k: e for k, e in self.entries.items() if k.version == version and layout in (None, k.layout)}
        keys = [key for key, entry in meant.items() if not (entry.is_arriving and entry.is_for_others)]
        if any(self.entries[key].is_arriving for key in keys):
            raise UsageError("it is still being read here: let replicate or fetch return first", version=version)
        return self._ticket(keys)

    def may_release(self, keys: Iterable[ShardKey]) -> Ticket:
        """Return what to ask about these shards, which, as the hub says, need not be kept any more."""
        return self._ticket(key for key in keys if key in self.entries and not self.entries[key].is_arriving)

    def copies(self, version: int) -> Ticket:
        """Return the copies of this version held for others, without what its owner has put here."""
        keys = [key for key, entry in self.entries.items() if key.version == version and entry.is_for_others]
        return self.may_release(keys)

    def still_meant(self, ticket: Ticket) -> Ticket:
        """Return the ticket without what has gone, or was put here anew, since it was made."""
        # Two threads may unpublish the same, and one may read it again before the other has its answer.
        meant = {key: offering for key, offering in ticket.items() if key in self.entries}
        return {key: offering for key, offering in meant.items() if self.entries[key].offering == offering}

    def unpublished(self, ticket: Ticket, *, keep: bool) -> list[Effect[OfferT]]:
        """Apply the hub's answer, or keep=True when there is none: it may be the last copy."""
        keys = self.still_meant(ticket)
        if not keep:
            return self._remove(keys)
        for key in keys:
            self.entries[key].is_retained = True
        return [Retain(key, self.entries[key].offer) for key in keys]

    def offering(self, key: ShardKey) -> Ticket:
        """Return the current offering of this shard, for `damaged`; empty: there is none."""
        return self._ticket(key for key in (key,) if key in self.entries)

    def damaged(self, ticket: Ticket) -> list[Effect[OfferT]]:
        """Withdraw what no longer has the published bytes: it must not be read, and does not count as a copy."""
        return self._take_back(list(self.still_meant(ticket)))

    def take_back(self, keys: Iterable[ShardKey]) -> list[Effect[OfferT]]:
        """Withdraw these, of which their owner does not know."""
        return self._take_back([key for key in keys if key in self.entries])

    def supersede(self, is_over: Callable[[int], bool]) -> list[Effect[OfferT]]:
        """Withdraw versions that are over, and must not be read. What still arrives ends with its read."""
        keys = [key for key, entry in self.entries.items() if is_over(key.version) and not entry.is_arriving]
        return self._take_back(keys)

    def _take_back(self, keys: list[ShardKey]) -> list[Effect[OfferT]]:
        """Withdraw these, and notify the hub."""
        return [Retract(tuple(keys)), *self._remove(keys)] if keys else []

    def replace(self, key: ShardKey, old: OfferT, new: OfferT) -> bool:
        """Serve the same bytes from other memory; return False if the old offer was withdrawn meanwhile."""
        entry = self.entries.get(key)
        if entry is None or entry.offer is not old:
            return False
        entry.offer = new
        return True

    # --- serve what is being read ---

    def begin_read(self, created_after: int, *, is_for_others: bool = False) -> int:
        """Begin a read, which asks for sources. Return the number by which it is named below."""
        self.offerings += 1
        self.readings[self.offerings] = Reading(created_after, is_for_others=is_for_others)
        return self.offerings

    def grant(self, read: int, key: ShardKey) -> list[Effect[OfferT]]:
        """Note that this shard is about to be read: readers may be sent here for it, and wait."""
        reading = self.readings[read]
        reading.granted = {*(reading.granted or ()), key}
        return []

    def prepare(self, read: int, key: ShardKey, offer: OfferT) -> list[Effect[OfferT]]:
        """Offer a shard that has memory, and nothing in it yet. One that is here already stays, and is complete."""
        if key in self.entries or self.closed:
            return []
        reading, entry = self.readings[read], self._put(key, offer)
        entry.is_arriving, entry.is_for_others = True, reading.is_for_others
        reading.arriving.add(key)
        return [Announce(offer, False, True)]

    def verified(self, read: int, key: ShardKey, segment: int) -> list[Effect[OfferT]]:
        """Serve a segment that is in place and verified."""
        if key not in self.readings[read].arriving or key not in self.entries:
            return []
        return [MarkReady(self.entries[key].offer, segment)]

    def arriving(self, read: int) -> list[OfferT]:
        """Return what this read serves so far."""
        return [self.entries[key].offer for key in self._arriving(self.readings[read])]

    def complete(self, read: int) -> list[Effect[OfferT]]:
        """Finish a read: everything is here."""
        effects: list[Effect[OfferT]] = []
        for key in self._arriving(self.readings.pop(read)):
            entry = self.entries[key]
            entry.is_arriving = False
            effects += [MarkReady(entry.offer, None), Announce(entry.offer, True, True)]
        return effects

    def drop(self, read: int, *, restarts_after: int | None) -> list[Effect[OfferT]]:
        """Drop what has come, which is useless. restarts_after: the read goes on, after this request; None: it is over.

        A reader that was directed to the dropped data is rejected. The hub ends its lease when it is notified: else it
        would not know the readers of the new data, and could direct this very read to one of them."""
        reading = self.readings.pop(read, None) if restarts_after is None else self.readings.get(read)
        if reading is None:  # it was complete already
            return []
        keys = self._arriving(reading)
        if restarts_after is not None:
            reading.anew.update(dict.fromkeys(keys, restarts_after))
        reading.granted, reading.arriving = None, set()
        return self._take_back(keys)

    def close(self) -> list[Effect[OfferT]]:
        """Withdraw everything, and offer nothing any more. The hub is notified by the Bye."""
        self.closed = True
        return self._remove(list(self.entries))

    # --- inside ---

    def _put(self, key: ShardKey, offer: OfferT) -> Entry[OfferT]:
        self.offerings += 1
        self.entries[key] = Entry(offer, self.offerings)
        return self.entries[key]

    def _remove(self, keys: Iterable[ShardKey]) -> list[Effect[OfferT]]:
        return [Withdraw(key, self.entries.pop(key).offer) for key in keys]

    def _ticket(self, keys: Iterable[ShardKey]) -> Ticket:
        return {key: self.entries[key].offering for key in keys}

    def _arriving(self, reading: Reading) -> list[ShardKey]:
        """Return its shards in the order of their keys, without those that went when the shelf was closed."""
        return sorted(key for key in reading.arriving if key in self.entries)
