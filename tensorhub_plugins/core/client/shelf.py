"""What this worker offers to others. PURE: what happens goes in, effects come out; no clock, thread or torch.

A shard on the shelf is
    arriving   it is read here, and what has come of it is served on already (rule 3 of the design);
    whole      published, or read to its end;
    retained   whole, and the hub wants it kept: it may be the last copy of a retained version (rule 4).
A shard that is not there may be
    expected   this worker has asked for sources, or is about to read it, so the hub may have sent a peer here for it.
What the hub has asked this worker to hold for others (copies.py) keeps its owner from nothing: a publish takes its
place.

    publish ------------------------------> whole  --unpublish--> asked --unpublished--> gone, or retained
    begin_read -> grant -> prepare -> arriving  --complete--> whole
                                          \\--drop--> gone

The order that everything rests on: a shard is on the shelf before the hub is told of it, and it is off the shelf, with
all its readers cut off, before its memory is used for anything else. Every time that a shard is put on the shelf counts
as another offering: what was asked about an earlier one says nothing about it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.manifest import Manifest
from tensorhub_plugins.core.types import ShardKey

# What the shell serves a shard from: `transports.Offer`, or what a simulation has instead.
OfferT = TypeVar("OfferT")

# --- effects ---


@dataclass(frozen=True)
class Announce(Generic[OfferT]):
    """Tell the hub that this shard is here. is_whole: all of it. was_read: it came from others."""

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
    """Tell the hub, until it has heard, that these shards will never be whole here."""

    keys: tuple[ShardKey, ...]


@dataclass(frozen=True)
class Withdraw(Generic[OfferT]):
    """Cut its readers off. When they have left, its memory may be used for something else."""

    key: ShardKey
    offer: OfferT


@dataclass(frozen=True)
class GiveWay(Generic[OfferT]):
    """Cut off the readers of a copy for others: its owner has put the same shard here. is_arriving: it is still read,
    into memory that its read gives back."""

    key: ShardKey
    offer: OfferT
    is_arriving: bool


@dataclass(frozen=True)
class Retain(Generic[OfferT]):
    """Serve it on from memory that its owner does not touch; `replace` says where that is."""

    key: ShardKey
    offer: OfferT


Effect: TypeAlias = (
    "Announce[OfferT] | MarkReady[OfferT] | Retract | Withdraw[OfferT] | GiveWay[OfferT] | Retain[OfferT]"
)

# --- the machine ---

Ticket: TypeAlias = dict[ShardKey, int]  # shards, each with the offering that is meant


@dataclass
class Entry(Generic[OfferT]):
    """One shard on the shelf. offering: counts everything that this worker has ever put on its shelf."""

    offer: OfferT
    offering: int
    is_arriving: bool = False
    is_retained: bool = False
    is_for_others: bool = False  # a copy that the hub has asked for
    is_known: bool = False  # the hub knew of such a copy here before


@dataclass
class Reading:
    """One read that serves on what arrives. created_after: the number of the last request to the hub before it.

    granted: the shards that it is to read; None: not yet known. anew: those of which it has dropped what had come, with
    the number of the last request before that.
    """

    created_after: int
    granted: set[ShardKey] | None = None
    is_for_others: bool = False
    arriving: set[ShardKey] = field(default_factory=set)
    anew: dict[ShardKey, int] = field(default_factory=dict)

    def since(self, key: ShardKey) -> int:
        """Whoever was sent here for this shard before that request does not mean what is to come of it."""
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

    # --- what others ask ---

    def find(self, key: ShardKey) -> OfferT | None:
        """The offer of this shard; None: there is none."""
        entry = self.entries.get(key)
        return entry.offer if entry is not None else None

    def is_expected(self, key: ShardKey, request_id: int) -> bool:
        """Whether this shard may be put here soon, by a read that had begun when the hub heard request `request_id`."""
        return not self.closed and any(
            reading.since(key) <= request_id and (reading.granted is None or key in reading.granted)
            for reading in self.readings.values()
        )

    # --- publish and unpublish ---

    def check(self, key: ShardKey, *, returns: bool) -> None:
        """Raise UsageError when this may not be published now, whatever its bytes.

        returns: operators make the fleet go back to this version from the newest one.
        """
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
        """A whole shard; `announced` or `refused` says what the hub has answered. UsageError as from `check`, or for
        other bytes than before."""
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
        """The hub knows of what was published."""
        self.published[key.layout] = Published(key.version, manifest)

    def refused(self, key: ShardKey, offer: OfferT, *, left: bool = False) -> list[Effect[OfferT]]:
        """The hub does not want it, or was not heard in time: nothing was published. left: its answer was not waited
        for."""
        keys = [key] if self.find(key) is offer else []
        return self._take_back(keys) if keys and (left or self.entries[key].is_known) else self._remove(keys)

    def unpublish(self, version: int, layout: str | None = None) -> Ticket:
        """What is to be asked of the hub, in order to give this version up (layout None: in every layout).

        UsageError while it is still being read here, by its owner: what arrives for others is given up when it is here.
        """
        meant = {k: e for k, e in self.entries.items() if k.version == version and layout in (None, k.layout)}
        keys = [key for key, entry in meant.items() if not (entry.is_arriving and entry.is_for_others)]
        if any(self.entries[key].is_arriving for key in keys):
            raise UsageError("it is still being read here: let replicate or fetch return first", version=version)
        return self._ticket(keys)

    def may_release(self, keys: Iterable[ShardKey]) -> Ticket:
        """The hub says that these need not be kept any more: what is to be asked about them."""
        return self._ticket(key for key in keys if key in self.entries and not self.entries[key].is_arriving)

    def copies(self, version: int) -> Ticket:
        """What is here of this version for others, and nothing that its owner has put here."""
        keys = [key for key, entry in self.entries.items() if key.version == version and entry.is_for_others]
        return self.may_release(keys)

    def still_meant(self, ticket: Ticket) -> Ticket:
        """Without what has gone, or was put here anew, since the ticket was made."""
        # Two threads may give up the same, and one of them read it again before the other hears.
        meant = {key: offering for key, offering in ticket.items() if key in self.entries}
        return {key: offering for key, offering in meant.items() if self.entries[key].offering == offering}

    def unpublished(self, ticket: Ticket, *, keep: bool) -> list[Effect[OfferT]]:
        """The hub's answer, or keep=True when there is none: it may be the last copy."""
        keys = self.still_meant(ticket)
        if not keep:
            return self._remove(keys)
        for key in keys:
            self.entries[key].is_retained = True
        return [Retain(key, self.entries[key].offer) for key in keys]

    def offering(self, key: ShardKey) -> Ticket:
        """What is offered of this shard now, to be named in `damaged`; empty: nothing."""
        return self._ticket(key for key in (key,) if key in self.entries)

    def damaged(self, ticket: Ticket) -> list[Effect[OfferT]]:
        """Its bytes are not the published ones any more: nobody is to read it, and it is no copy that counts."""
        return self._take_back(list(self.still_meant(ticket)))

    def take_back(self, keys: Iterable[ShardKey]) -> list[Effect[OfferT]]:
        """Its owner has never heard that these are here."""
        return self._take_back([key for key in keys if key in self.entries])

    def supersede(self, is_over: Callable[[int], bool]) -> list[Effect[OfferT]]:
        """These versions are over, and nobody is to read them. What still arrives ends with its read."""
        keys = [key for key, entry in self.entries.items() if is_over(key.version) and not entry.is_arriving]
        return self._take_back(keys)

    def _take_back(self, keys: list[ShardKey]) -> list[Effect[OfferT]]:
        """Offered no more, and the hub hears of it."""
        return [Retract(tuple(keys)), *self._remove(keys)] if keys else []

    def replace(self, key: ShardKey, old: OfferT, new: OfferT) -> bool:
        """The same bytes are served from other memory; False: the old offer was withdrawn meanwhile."""
        entry = self.entries.get(key)
        if entry is None or entry.offer is not old:
            return False
        entry.offer = new
        return True

    # --- what is read is served on ---

    def begin_read(self, created_after: int, *, is_for_others: bool = False) -> int:
        """Sources are asked for from now on. The number by which the read is named below."""
        self.offerings += 1
        self.readings[self.offerings] = Reading(created_after, is_for_others=is_for_others)
        return self.offerings

    def grant(self, read: int, key: ShardKey) -> None:
        """This shard is about to be read."""
        reading = self.readings[read]
        reading.granted = {*(reading.granted or ()), key}

    def prepare(self, read: int, key: ShardKey, offer: OfferT) -> list[Effect[OfferT]]:
        """There is memory for it, and nothing in it yet. What is here already stays, and is complete."""
        if key in self.entries or self.closed:
            return []
        reading, entry = self.readings[read], self._put(key, offer)
        entry.is_arriving, entry.is_for_others = True, reading.is_for_others
        reading.arriving.add(key)
        return [Announce(offer, False, True)]

    def verified(self, read: int, key: ShardKey, segment: int) -> list[Effect[OfferT]]:
        """A segment is in place, and what was published."""
        if key not in self.readings[read].arriving or key not in self.entries:
            return []
        return [MarkReady(self.entries[key].offer, segment)]

    def arriving(self, read: int) -> list[OfferT]:
        """What this read serves on, so far."""
        return [self.entries[key].offer for key in self._arriving(self.readings[read])]

    def complete(self, read: int) -> list[Effect[OfferT]]:
        """Everything is here. The read is over."""
        effects: list[Effect[OfferT]] = []
        for key in self._arriving(self.readings.pop(read)):
            entry = self.entries[key]
            entry.is_arriving = False
            effects += [MarkReady(entry.offer, None), Announce(entry.offer, True, True)]
        return effects

    def drop(self, read: int, *, restarts_after: int | None) -> list[Effect[OfferT]]:
        """What has come is of no use. restarts_after: the read goes on, after this request; None: it is over.

        Who was sent here for what has come is sent away. The hub ends its lease when it hears of this: it would not see
        who reads what comes instead, and could send this very read there."""
        reading = self.readings.pop(read, None) if restarts_after is None else self.readings.get(read)
        if reading is None:  # it was complete already
            return []
        keys = self._arriving(reading)
        if restarts_after is not None:
            reading.anew.update(dict.fromkeys(keys, restarts_after))
        reading.granted, reading.arriving = None, set()
        return self._take_back(keys)

    def close(self) -> list[Effect[OfferT]]:
        """Nothing is offered any more, and nothing will be. The hub hears of it otherwise."""
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
        """In the order of their keys; without those that went when the shelf was closed."""
        return sorted(key for key in reading.arriving if key in self.entries)
