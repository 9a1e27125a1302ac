"""The reader's end of deltas on one stream: names what is here, makes segments of what comes, asks again if wrong."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tensorhub_plugins.core.deltas.codec import WORTH
from tensorhub_plugins.core.deltas.frame import CHAIN_MAX, HEAD
from tensorhub_plugins.core.errors import ProtocolError
from tensorhub_plugins.core.manifest import Manifest
from tensorhub_plugins.core.transports.interface import Bases, LinkProgress
from tensorhub_plugins.core.transports.read_plan import ReadPlan, runs_of
from tensorhub_plugins.core.transports.stream.channel import Channel
from tensorhub_plugins.core.transports.stream.messages import BASED_SEGMENTS_MAX, BASES_MAX, NO_BASE, StreamRead


class Patches:
    """The deltas of one read over one connection, of which the plan computes digests."""

    def __init__(
        self,
        bases: Bases,
        channel: Channel,
        manifest: Manifest,
        plan: ReadPlan,
        progress: LinkProgress,
        deadline: float,
    ) -> None:
        self._bases, self._channel, self._deadline = bases, channel, deadline
        self._manifest, self._plan, self._progress = manifest, plan, progress
        self._frame: bytearray | None = None  # what came instead of the next segment
        self._wrong: set[int] = set()  # segments whose delta did not make what was published
        self._again: list[int] = []  # of these, those that are to be asked for anew
        self._pace = bases.pace(channel.peer)
        self._takes = self._pace.takes_deltas()
        self._began, self._ended = time.monotonic(), 0.0  # the last segment
        self._size_bytes = self._delta_size_bytes = 0  # of what came, and of it by deltas

    def request(self, segments: Sequence[int]) -> None:
        """Ask for these segments, and name what is here of each."""
        for at in range(0, len(segments), BASED_SEGMENTS_MAX):
            some = segments[at : at + BASED_SEGMENTS_MAX]
            named = [self._bases.named(s) if self._takes and s not in self._wrong else () for s in some]
            filled = [(*digests, *[NO_BASE] * BASES_MAX)[:BASES_MAX] for digests in named]
            joined = tuple(each for each in map(b"".join, zip(*filled, strict=True)) if any(each))
            left_s = max(0.0, self._deadline - time.monotonic())
            self._channel.send_message(StreamRead(runs_of(some), left_s, joined, self._pace.whole), self._deadline)

    def again(self) -> list[int]:
        again, self._again = self._again, []
        return again

    def receive(self, segment: int, length: int) -> None:
        """Receive the delta of this segment, whose header has come. Raise ProtocolError for one that may not come."""
        if segment in self._wrong:
            raise ProtocolError(f"segment {segment} was asked for whole, the source sends a delta")
        start, stop = self._manifest.segment_range(segment)
        limit = int(WORTH * (stop - start)) + CHAIN_MAX * HEAD.size
        self._frame = self._channel.receive_body(length, limit, self._deadline)

    def make(self, segment: int) -> list[int] | None:
        """Make the segment of the delta that has come; return it, or nothing if it is wrong. None: none has come."""
        if self._frame is None:
            self._bases.forget(segment)  # about to be overwritten
            return None
        frame, self._frame = memoryview(self._frame), None
        with self._plan.receiving(segment) as views:
            steps = self._bases.patch(segment, frame, views)
        is_right = steps is not None and self._plan.digest(segment) == self._manifest.digest(segment)
        self._bases.patched(segment, steps if is_right else None)
        if not is_right:
            self._wrong.add(segment)
            self._again.append(segment)
            return []
        self._progress.deltas[segment] = len(frame)
        start, stop = self._manifest.segment_range(segment)
        self._delta_size_bytes += stop - start
        self._came(stop - start)
        return [segment]

    def came_whole(self, views: Sequence[memoryview]) -> None:
        """Note that a segment came whole."""
        self._came(sum(map(len, views)))

    def _came(self, size_bytes: int) -> None:
        self._size_bytes, self._ended = self._size_bytes + size_bytes, time.monotonic()

    def close(self) -> None:
        """Note how fast the read was, unless the source has waited for bytes itself."""
        if self._size_bytes and not self._progress.delayed_segments:
            self._pace.read(self._size_bytes, self._delta_size_bytes, self._ended - self._began)
