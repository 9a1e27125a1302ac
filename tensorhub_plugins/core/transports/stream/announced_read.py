"""A read whose segments the source announces and the reader's own threads copy: shm, cuda_ipc.

A cut-off source cannot take its memory back. It closes the connection before its owner touches the memory, so a reader
that finds its connection open after copying a segment has copied the published bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from tensorhub_plugins.core import resources
from tensorhub_plugins.core.errors import ProtocolError
from tensorhub_plugins.core.transports.pump import OrderedWork
from tensorhub_plugins.core.transports.stream.channel import Disconnected
from tensorhub_plugins.core.transports.stream.link import SocketLink
from tensorhub_plugins.core.transports.stream.messages import READY

WINDOW = 8  # copies under way or waiting to be yielded; an abandoned read still has to wait for them


class AnnouncedStream:
    """A `SegmentStream` over the link's one connection. copy: copies some segments, in a thread of the pool; batch: how
    many at most."""

    window = WINDOW

    def __init__(
        self,
        link: SocketLink,
        pool: ThreadPoolExecutor,
        copy: Callable[[list[int]], list[int]],
        *,
        batch: int,
        deadline: float,
    ) -> None:
        self._link = link
        self._channel = link._channels[0]
        self._pool, self._copy, self._deadline = pool, copy, deadline
        self._copying = OrderedWork()
        self.batch = batch

    @property
    def in_flight(self) -> int:
        return len(self._copying)

    def request(self, segments: Sequence[int]) -> None:
        self._link._request(self._channel, segments, self._deadline)

    def has_input(self) -> bool:
        return self._channel.has_input()

    def announced(self, due: deque[int]) -> list[int]:
        first = due[0]
        count = self._link._announced(self._channel, READY, first, self._deadline)
        if count is None:
            return []
        segments = [due.popleft() for _ in range(min(count, len(due)))]
        if len(segments) != count or segments != list(range(first, first + len(segments))) or not segments:
            raise ProtocolError(f"{count} segments from {first} on are said to be ready, due are {segments}")
        return segments

    def start(self, ready: deque[int]) -> bool:
        segments = [ready.popleft() for _ in range(min(self.batch, len(ready)))]
        try:
            self._copying.add(self._pool.submit(self._copy, segments))
        except RuntimeError as error:
            if (refused := resources.refusal(error)) is not None:
                raise refused from error
            raise Disconnected("cannot be read any more: this side's transport was closed") from error
        return True

    def finished(self, *, wait: bool) -> list[int]:
        try:
            segments = self._copying.take(wait=wait)  # a copy takes milliseconds; it waits for no peer
        except OSError as error:
            raise Disconnected(f"its memory cannot be read any more: {error}") from error
        if segments and self._channel.is_cut():
            raise Disconnected("cut the connection while its memory was copied")
        return segments

    def close(self) -> None:
        self._copying.close()
