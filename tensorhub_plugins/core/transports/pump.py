"""The states of a read's segments, for all transports: announced > started > finished, in a window.

    due        asked for; the source has not announced yet that they may be read
    ready      the source has announced them; they are not started
    in flight  started: their bytes travel, or are digested; `window` at most
    finished   in place: yielded

What has finished is yielded before the source is waited for: another reader may be waiting for it in turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Protocol


class SegmentStream(Protocol):
    """The way in which one transport moves the segments of one read. window: the maximum in flight. batch: how many
    announced ones are collected, as far as that takes no waiting, before they are started together."""

    window: int
    batch: int

    @property
    def in_flight(self) -> int:
        """Return how many were started and not yet returned by `finished`."""

    def request(self, segments: Sequence[int]) -> None:
        """Ask the source for these, without waiting for earlier requests."""

    def has_input(self) -> bool:
        """Return whether `announced` would return at once."""

    def announced(self, due: deque[int]) -> list[int]:
        """Take one message of the source; remove from `due`, and return, the segments that it announces."""

    def start(self, ready: deque[int]) -> bool:
        """Start the first of these, removed from `ready`. Return False if something in flight must finish first."""

    def finished(self, *, wait: bool) -> list[int]:
        """Return segments whose bytes are in place. wait: wait for one of them, or for input."""

    def close(self) -> None:
        """End the read, whatever is in flight; return when nothing writes into the target any more."""


def pump(stream: SegmentStream, segments: Sequence[int], additional: Callable[[int], Sequence[int]]) -> Iterator[int]:
    """Yield each of `segments`, and of those that `additional` asks for, once its bytes are in place.

    additional: called with the number of those due, whenever there may be more; ends the read by returning none when
    nothing is in flight."""
    due = deque(segments)
    ready: deque[int] = deque()
    blocked = False  # the ready ones have to wait for something in flight
    try:
        if due:
            stream.request(segments)
        while True:
            while stream.in_flight:
                done = stream.finished(wait=False)
                if not done:
                    has_work = (ready and not blocked) or (due and stream.has_input())
                    if has_work and stream.in_flight < stream.window:
                        break
                    done = stream.finished(wait=True)
                blocked = blocked and not done
                yield from done
            more = additional(len(due))
            if more:
                stream.request(more)
                due.extend(more)
            if not (due or ready or stream.in_flight):
                return
            while due and len(ready) < stream.batch and (not (ready or stream.in_flight) or stream.has_input()):
                ready.extend(stream.announced(due))
            if ready:
                blocked = not stream.start(ready)
    finally:
        stream.close()


class OrderedWork:
    """Work of other threads for a stream, each item for some segments; returned in the order in which it was begun."""

    def __init__(self) -> None:
        self._futures: deque[Future[list[int]]] = deque()

    def __len__(self) -> int:
        return len(self._futures)

    def add(self, future: Future[list[int]]) -> None:
        """Add work that was begun; its segments are taken in this order."""
        self._futures.append(future)

    def take(self, *, wait: bool) -> list[int]:
        """Return the segments of the oldest work, once it has ended; raise what it raised."""
        if not self._futures or not (wait or self._futures[0].done()):
            return []
        return self._futures.popleft().result()

    def close(self) -> None:
        """Cancel work that has not begun, and wait for the rest."""
        for future in self._futures:
            future.cancel()
        wait(self._futures)
        self._futures.clear()
