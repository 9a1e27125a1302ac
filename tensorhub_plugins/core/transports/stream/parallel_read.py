"""One read over several connections to the same source, for links that one stream does not fill.

The streams take their segments from one queue, so that they end together.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from tensorhub_plugins.core.threads import Thread
from tensorhub_plugins.core.transports.interface import More
from tensorhub_plugins.core.transports.pump import SegmentStream, pump
from tensorhub_plugins.core.transports.stream.channel import Channel

STREAM_SEGMENTS = 4  # that one of several streams takes at a time: few, so that all end together


def connect_all(connect: Callable[[str], Channel], endpoint: str, count: int) -> list[Channel]:
    """Open so many connections, or raise the first error. In parallel: over a long way each takes two round trips; but
    of several endpoints all lead to the one that lets the first of them in."""
    channels = [connect(endpoint)] if count == 1 or "," in endpoint else []
    if len(channels) < count:
        where = channels[0].peer if channels else endpoint
        with ThreadPoolExecutor(count) as pool:
            futures = [pool.submit(connect, where) for _ in range(count - len(channels))]
        channels += [future.result() for future in futures if future.exception() is None]
        if len(channels) < count:
            for channel in channels:
                channel.close()
            raise next(error for error in (future.exception() for future in futures) if error is not None)
    return channels


class RepeatingStream(SegmentStream, Protocol):
    """A stream that may have to ask for some of its segments again."""

    def again(self) -> list[int]:
        """Return the segments that are to be asked for again, each once."""


def pump_all(
    streams: Sequence[RepeatingStream], segments: list[int], more: More | None, cut: Callable[[], None]
) -> Iterator[int]:
    """Do as `pump` over all of these streams, each in its own thread. cut: ends them when the read is abandoned."""
    # Entries of `arrived`: a segment that has arrived, or the exception or None that ended a stream.
    arrived: queue.SimpleQueue[int | BaseException | None] = queue.SimpleQueue()
    running = len(streams)
    todo = SegmentQueue(segments, more, running)

    def run(stream: RepeatingStream) -> None:
        try:
            for segment in pump(stream, [], lambda due: stream.again() or todo.take(due)):
                arrived.put(segment)
            arrived.put(None)
        except BaseException as error:
            arrived.put(error)

    threads = [Thread(target=run, args=(stream,)) for stream in streams]
    try:
        for thread in threads:
            thread.start()
        while running:
            item = arrived.get()  # a stream ends by its deadline, and always reports it
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        if running:
            cut()
        todo.end()
        for thread in threads:  # none may write into the target after this read
            if thread.ident is not None:  # the system may have refused to start it
                thread.join()


class SegmentQueue:
    """The segments that several streams still have to read. All are done when no stream has any left, and there are no
    more; a stream that runs out earlier waits for what others are given."""

    def __init__(self, segments: list[int], more: More | None, streams: int) -> None:
        self._todo = deque(segments)
        self._more, self._streams = more, streams
        self._idle = 0
        self._ended = False
        self._changed = threading.Condition()

    def take(self, due: int) -> list[int]:
        """Return the next ones for a stream that still waits for `due` of them, perhaps none; for one that waits for
        none: wait until there are some, and return none when all is done."""
        with self._changed:
            while not self._ended:
                if not self._todo and self._more is not None:
                    self._todo.extend(self._more())
                share = -(-len(self._todo) // self._streams)  # the last ones are shared, so that all end together
                batch = [self._todo.popleft() for _ in range(max(0, min(STREAM_SEGMENTS - due, share)))]
                if self._todo:
                    self._changed.notify()
                if batch or due:
                    return batch
                self._idle += 1
                if self._idle == self._streams:
                    self._end()
                else:
                    self._changed.wait()
                self._idle -= 1
            return []

    def end(self) -> None:
        """End the read, whatever is left."""
        with self._changed:
            self._end()

    def _end(self) -> None:
        self._ended = True
        self._changed.notify_all()
