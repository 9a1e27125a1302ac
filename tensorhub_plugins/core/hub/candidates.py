"""Which sources there are for one shard, and the cheapest of them for a reader. PURE: no clock, no randomness.

Near before far
    Same host, then same data centre, then the rest, because distance is what a job pays for (rule 7). Across data
    centres there is one reader for each shard, the seed; `selection` sees to that. Rack locality only breaks ties:
    another rack costs half a reader.

Over the network: chains
    A source's link is the scarce thing, and one reader uses all of it. So the next reader is given the source with the
    fewest readers, even one whose own bytes are still arriving: readers form a chain through which the bytes flow, and
    K of them finish in little more than the time of one. Every hop delays by one segment, of which a shard has about
    256; `HOPS_PER_READER` hops are as bad as a second reader, and then a second branch is begun. At equal distance a
    reader that became a source comes before the publisher, whose training step needs its link.

Within a host: stars
    There the memory is shared and a hop only adds a copy: a source that has all of the shard comes first, then the
    least busy one.

`Sources` keeps candidates in heaps by area, so that one question costs the logarithm of their number and not a scan.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator
from enum import Enum
from functools import lru_cache
from typing import TypeVar, cast

import msgspec

from tensorhub_plugins.core.protocol.messages import Origin
from tensorhub_plugins.core.types import Location, distance

Word = TypeVar("Word", bound=Hashable)
HOPS_PER_READER = 64  # a chain of 64 takes 1.25 times as long as one reader, with 256 segments
RACK_READERS = 0.5  # what another rack costs
STALE_MAX = 256  # stale heap entries; each candidate has up to four current ones
LOCATIONS_CACHED = 8192  # hosts of one hub
WORDS_CACHED = 16_384  # and names of replicas, whose workers join at about the same time


class Verdict(Enum):
    """The verdict on one candidate for one reader, see `selection.Question.judge`."""

    GOOD = 0
    LAST_RESORT = 1  # it failed this reader, or looks dead
    FULL = 2  # it has as many readers as it may have: worth waiting for
    UPLINK_FULL = 3  # as many readers cross into the data centre as may cross
    NEVER = 4


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A worker that could serve a shard. readers: on other hosts. depth: hops to a worker that has all of it."""

    location: Location
    depth: int
    readers: int
    origin: Origin


class Choice(msgspec.Struct, frozen=True):
    """The result of a search. session: the best source; None: none, or waiting is better. uplink_full: one waits."""

    session: bytes | None
    uplink_full: bool = False


class Sources:
    """The candidates for one shard."""

    def __init__(self) -> None:
        self._candidates: dict[bytes, tuple[Candidate, int]] = {}  # and the number of its newest heap entries
        self._heaps: dict[tuple[str, ...], list[_Entry]] = {}
        self._numbers = 0
        self._entries = 0  # upper bound, of all heaps

    def __len__(self) -> int:
        return len(self._candidates)

    def sessions(self) -> list[bytes]:
        """Return the sessions of all candidates, in the order in which they came."""
        return list(self._candidates)

    def get(self, session: bytes) -> Candidate | None:
        """Return the candidate of this session, or None."""
        return self._candidates.get(session, (None, 0))[0]

    def put(self, session: bytes, candidate: Candidate) -> None:
        """Add a candidate, or change what is known of it."""
        if self.get(session) == candidate:
            return
        self._numbers += 1
        self._candidates[session] = candidate, self._numbers
        published = candidate.origin == "published"
        within_host = (candidate.depth, published + candidate.readers / HOPS_PER_READER), self._numbers, session
        over_network = (published, candidate.readers + candidate.depth / HOPS_PER_READER), self._numbers, session
        for area in _areas(candidate.location):
            heapq.heappush(self._heaps.setdefault(area, []), within_host if area[0] == "host" else over_network)
            self._entries += 1
        self._sweep()

    def remove(self, session: bytes) -> None:
        """Remove the candidate of this session, which no longer has the shard."""
        self._candidates.pop(session, None)
        self._sweep()

    def _sweep(self) -> None:
        """Drop stale entries, and areas without candidates, once most entries are stale."""
        if self._entries <= STALE_MAX + 8 * len(self._candidates) and self._candidates:
            return
        current = ((area, [e for e in heap if self._is_current(e)]) for area, heap in self._heaps.items())
        self._heaps = {area: heap for area, heap in current if heap}
        for heap in self._heaps.values():
            heapq.heapify(heap)
        self._entries = sum(map(len, self._heaps.values()))

    def best(self, reader: Location, judge: Callable[[bytes, int], Verdict]) -> Choice:
        """Return the best source for a reader at this location. judge(session, distance) is called in order of cost."""
        last_resort: bytes | None = None
        uplink_full = False
        for wait_if_full, areas in _search_order(reader):
            found: list[tuple[tuple[float, float], bytes]] = []
            full = False
            for area, extra in areas:
                for cost, session in self._in_order(area):
                    verdict = judge(session, distance(self._candidates[session][0].location, reader))
                    if verdict is Verdict.GOOD:
                        found.append(((cost[0], cost[1] + extra), session))
                        break
                    if verdict is Verdict.LAST_RESORT and last_resort is None:
                        last_resort = session
                    full |= verdict is Verdict.FULL
                    uplink_full |= verdict is Verdict.UPLINK_FULL
            if found:
                return Choice(min(found)[1], uplink_full)
            if full and wait_if_full:
                return Choice(None, uplink_full)  # a slot here is free sooner than a distant copy is here
        return Choice(last_resort, uplink_full)

    def _in_order(self, area: tuple[str, ...]) -> Iterator[tuple[tuple[float, float], bytes]]:
        """Yield the candidates of an area, best first. Drop stale entries of its heap, and change nothing else."""
        heap = self._heaps.get(area, [])
        seen = []
        try:
            while heap:
                entry = heap[0]
                heapq.heappop(heap)
                if self._is_current(entry):
                    seen.append(entry)
                    yield entry[0], entry[2]
        finally:
            for entry in seen:
                heapq.heappush(heap, entry)

    def _is_current(self, entry: _Entry) -> bool:
        known = self._candidates.get(entry[2])
        return known is not None and known[1] == entry[1]


_Entry = tuple[tuple[float, float], int, bytes]  # cost, number, session
_Area = tuple[str, ...]


def the_same(word: Word) -> Word:
    """Return one object for all equal locations, names and layouts: workers have them in common."""
    return cast("Word", _cached(word))


@lru_cache(maxsize=WORDS_CACHED)
def _cached(word: Hashable) -> Hashable:
    return word


@lru_cache(maxsize=LOCATIONS_CACHED)
def _areas(location: Location) -> tuple[_Area, ...]:
    """Return the heaps that hold a candidate at this location."""
    areas: list[_Area] = [("all",), ("data centre", location.data_center)]
    if location.rack:
        areas.append(("rack", location.data_center, location.rack))
    if location.host_id:
        areas.append(("host", location.data_center, location.host_id))
    return tuple(areas)


@lru_cache(maxsize=LOCATIONS_CACHED)
def _search_order(reader: Location) -> tuple[tuple[bool, tuple[tuple[_Area, float], ...]], ...]:
    """Return the areas to search, from near to far, and whether a full source there is worth waiting for. Areas of one
    step compete, each with a surcharge on its cost."""
    here: tuple[_Area, ...] = (("host", reader.data_center, reader.host_id),) if reader.host_id else ()
    rack: tuple[_Area, ...] = (("rack", reader.data_center, reader.rack),) if reader.rack else ()
    near = *((area, 0.0) for area in rack), (("data centre", reader.data_center), RACK_READERS if rack else 0.0)
    return *((False, ((area, 0.0),)) for area in here), (True, near), (False, ((("all",), 0.0),))
