"""The segments of one read on their way, for all transports: announced > started > finished, in a window.

    due        asked for; the source has not said yet that they may be read
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
    """How one transport moves the segments of one read. window: how many may be in flight. batch: how many announced
    ones are collected, as far as that takes no waiting, before they are started together."""

    window: int
    batch: int

    @property
    def in_flight(self) -> int:
        """How many were started and not handed out by `finished`."""
        ...

    def request(self, segments: Sequence[int]) -> None:
        """Ask the source for these, without waiting for what was asked for before."""
        ...

    def has_input(self) -> bool:
        """Whether `announced` would return at once."""
        ...

    def announced(self, due: deque[int]) -> list[int]:
        """Take one message of the source, and off `due` the segments that it announces, perhaps none."""
        ...

    def start(self, ready: deque[int]) -> bool:
        """Start the first of these, taken off `ready`. False: not before something in flight has finished."""
        ...

    def finished(self, *, wait: bool) -> list[int]:
        """Segments whose bytes are in place. wait: for one of them, or for input; else what has finished by now."""
        ...

    def close(self) -> None:
        """The read has ended, whatever is in flight: returns when nothing writes into the target any more."""
        ...


def pump(stream: SegmentStream, segments: Sequence[int], additional: Callable[[int], Sequence[int]]) -> Iterator[int]:
    """Yield each of `segments` once its bytes are in place, and what `additional` asks for.

    additional: called with the number of those due, whenever there may be more; ends the read by saying that there is
    none when nothing is on its way."""
    due = deque(segments)
    ready: deque[int] = deque()
    blocked = False  # what is ready has to wait for what is in flight
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
    """What other threads do for a stream, each time for some segments; handed out in the order it was begun."""

    def __init__(self) -> None:
        self._futures: deque[Future[list[int]]] = deque()

    def __len__(self) -> int:
        return len(self._futures)

    def add(self, future: Future[list[int]]) -> None:
        """Work that was begun; its segments are taken in this order."""
        self._futures.append(future)

    def take(self, *, wait: bool) -> list[int]:
        """The segments of the oldest work, once it has ended; raises what it raised."""
        if not self._futures or not (wait or self._futures[0].done()):
            return []
        return self._futures.popleft().result()

    def close(self) -> None:
        """Drop what has not begun, and wait for the rest."""
        for future in self._futures:
            future.cancel()
        wait(self._futures)
        self._futures.clear()
