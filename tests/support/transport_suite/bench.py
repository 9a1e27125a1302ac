"""The fixtures of the conformance suite's cases: sources, links, and waits that end."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch

from tensorhub_plugins.core.errors import SourceLost, TensorHubError
from tensorhub_plugins.core.manifest import Manifest
from tensorhub_plugins.core.memory.moves import Move
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.transports import Link, Offer
from tensorhub_plugins.core.types import ShardKey
from transport_suite.material import SEGMENT_SIZE_BYTES, ConformanceError, far, moves_to, require, resources
from transport_suite.peers import Adopt, MakeTransport, Peer, Source

T = TypeVar("T")


class Bench:
    """A factory for the transports of one suite; the options are those of `TransportSuite`."""

    def __init__(
        self,
        make: MakeTransport,
        make_source: MakeTransport,
        *,
        garbage: Sequence[bytes],
        slabs: str,
        patience_s: float,
        make_peer: Callable[[], Peer],
        adopt: Adopt = Slab.adopt,
        adopt_in_peers: Adopt = Slab.adopt,
        held: Callable[[], tuple[int, ...]] = tuple,
    ) -> None:
        self.make = make
        self.make_source = make_source
        self.garbage = garbage
        self.slabs = slabs
        self.patience_s = patience_s
        self.make_peer = make_peer
        self.adopt = adopt
        self.adopt_in_peers = adopt_in_peers
        self._held = held
        self._peer: Peer | None = None

    def close(self) -> None:
        if self._peer is not None:
            self._peer.kill()

    @contextlib.contextmanager
    def source(self) -> Iterator[Source]:
        """Yield a source of its own for one case, closed at the end."""
        source = Source(self.make_source(), self.slabs, self.adopt)
        try:
            yield source
        finally:
            for offer in source.offers:
                offer.withdraw()
            source.transport.close()
            for offer in source.offers:
                offer.slab.close()

    @contextlib.contextmanager
    def link(self, source: Source) -> Iterator[Link]:
        """Yield a link to this source, closed at the end."""
        with (
            contextlib.closing(self.make()) as reader,
            contextlib.closing(reader.connect(source.endpoint, deadline=far())) as link,
        ):
            yield link

    @contextlib.contextmanager
    def reading(
        self, tensors: Mapping[str, torch.Tensor] | None = None, segment_size_bytes: int = SEGMENT_SIZE_BYTES
    ) -> Iterator[tuple[Offer, Source, Link]]:
        """Yield a source of these tensors and a link that has opened them."""
        with self.source() as source:
            offer = source.offer({} if tensors is None else tensors, segment_size_bytes=segment_size_bytes)
            with self.link(source) as link:
                self.open(link, offer.key)
                yield offer, source, link

    def process(self) -> Peer:
        """Return a source in another process, ended at the end."""
        if self._peer is None or not self._peer.alive():
            self._peer = self.make_peer()
        return self._peer

    def open(self, link: Link, key: ShardKey) -> Manifest:
        return link.open(key, 1, deadline=far())

    def read_all(self, link: Link, manifest: Manifest, target: Slab, moves: Sequence[Move] | None = None) -> list[int]:
        """Read and verify all segments. moves: None for a target with the source's layout."""
        moves = moves_to(manifest, manifest.offsets) if moves is None else moves
        segments = []
        for segment in link.read(range(manifest.segment_count), target, moves, deadline=far()):
            require(link.digest(segment) == manifest.digest(segment), f"digest() of segment {segment} differs")
            segments.append(segment)
        require(
            sorted(segments) == list(range(manifest.segment_count)),
            f"each of {manifest.segment_count} segments must be yielded once, not {segments}",
        )
        return segments

    def finish(self, reading: Iterator[int]) -> None:
        """Exhaust a reading."""
        rest = self.soon(lambda: list(reading), "end the iteration after the last segment")
        require(not rest, f"segments {rest} were yielded twice")

    def soon(self, call: Callable[[], T], what: str) -> T:
        """Do what must happen within our patience, though its own deadline may be far."""
        outcome: list[T] = []
        problem: list[BaseException] = []

        def run() -> None:
            try:
                outcome.append(call())
            except BaseException as error:
                problem.append(error)

        thread = threading.Thread(target=run, daemon=True, name="conformance")
        thread.start()
        thread.join(self.patience_s)
        if thread.is_alive():
            raise ConformanceError(f"it did not {what} within {self.patience_s:g} s")
        if problem:
            raise problem[0]
        return outcome[0]

    def lost_soon(self, call: Callable[[], object], what: str) -> SourceLost:
        """SourceLost well before a far deadline."""
        began = time.monotonic()
        try:
            self.soon(call, f"give up ({what})")
        except SourceLost as error:
            return error
        raise ConformanceError(f"SourceLost was due: {what} ({time.monotonic() - began:.1f} s)")

    def lost_by(
        self,
        deadline: float,
        call: Callable[[], object],
        what: str,
        expected: tuple[type[TensorHubError], ...] = (SourceLost,),
    ) -> None:
        """SourceLost at the deadline or before, give or take our patience with a busy machine."""
        began = time.monotonic()
        try:
            self.soon_after(deadline, call, what)
        except expected:
            return
        raise ConformanceError(f"{expected[0].__name__} was due: {what} ({time.monotonic() - began:.1f} s)")

    def soon_after(self, deadline: float, call: Callable[[], object], what: str) -> None:
        """Run this, and require that it ends soon after the deadline."""
        patience, self.patience_s = self.patience_s, max(0.0, deadline - time.monotonic()) + self.patience_s
        try:
            self.soon(call, f"keep its deadline ({what})")
        finally:
            self.patience_s = patience

    def resources(self) -> tuple[int, ...]:
        """What this process has of the system; see `is_given_back`."""
        return (*resources(), *self._held())

    def is_given_back(self, before: tuple[int, ...]) -> None:
        """Require that it soon has no more than before: what was let go of in the background may end just now."""

        def is_as_before() -> bool:
            return all(now <= was for now, was in zip(self.resources(), before, strict=True))

        what = "threads, descriptors, bytes of shared memory, and what the transport counts"
        self.until(is_as_before, lambda: f"{before} ({what}) became {self.resources()}")

    def until(self, condition: Callable[[], bool], problem: Callable[[], str]) -> None:
        """Wait until this is so. ConformanceError that says the problem, if that takes too long."""
        deadline = time.monotonic() + self.patience_s
        while not condition():
            if time.monotonic() > deadline:
                raise ConformanceError(problem())
            time.sleep(0.005)

    def no_readers(self, offer: Offer, what: str) -> None:
        """Require that all readers of this offer have left soon."""
        gone = offer.wait_no_readers(time.monotonic() + self.patience_s)
        require(gone, f"the source still counts {offer.active_readers} readers after {what}")
