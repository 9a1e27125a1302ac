"""Deltas in a simulated worker: the real cache, senders and bases over simulated memory, and what is done to them.

What a connection does with these is written again here, as in core/transports/stream/patches.py and source.py, without
sockets. Rates are left out, as they are times of this machine: here deltas are always worth it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import xxhash
from checks import SEGMENT_SIZE_BYTES, SEGMENTS, Violation

from tensorhub_plugins.core.client import changes as changes_module
from tensorhub_plugins.core.client.changes import Bases, Changes
from tensorhub_plugins.core.deltas.cache import ENTRY_SIZE_BYTES, Deltas
from tensorhub_plugins.core.deltas.frame import frame_of, links_of
from tensorhub_plugins.core.manifest import Manifest
from tensorhub_plugins.core.transports.stream.messages import NO_BASE
from tensorhub_plugins.core.types import ShardKey

if TYPE_CHECKING:
    from reading import Link, Offer
    from workers import Worker
    from world import World

KEPT_MAX = 12  # deltas of one worker: few, so that old ones make room
SPARE_MAX = 2  # memories that are not in use, of one worker
Kept = tuple[tuple[str, int, int], list[bytes], dict[int, bytes]]


def is_here(data: bytes, digest: bytes) -> bool:
    """Return whether these are the bytes of that digest."""
    return xxhash.xxh3_128_digest(data) == digest


class _InOrder:
    """Where the tensors of simulated memory lie: one after the other, as in memory that is received into."""

    def is_scattered(self, start: int, stop: int) -> bool:
        return False


class Memory:
    """What the real code sees of one shard's buffer, as of a slab: whole segments of it."""

    device = None
    runs = _InOrder()
    size_bytes = SEGMENTS * SEGMENT_SIZE_BYTES

    def __init__(self, buffer: list[bytes], specs: object = None) -> None:
        self._buffer, self.specs = buffer, specs

    def readable(self, start: int, stop: int) -> list[memoryview]:
        return [memoryview(b"".join(self._buffer[start // SEGMENT_SIZE_BYTES : stop // SEGMENT_SIZE_BYTES]))]

    @contextmanager
    def writable(self, start: int, stop: int) -> Iterator[list[memoryview]]:
        segment = start // SEGMENT_SIZE_BYTES
        data = bytearray(self._buffer[segment] or bytes(stop - start))
        yield [memoryview(data)]
        self._buffer[segment] = bytes(data)


class Holder:
    """What one worker has of deltas, and its memory that is not in use."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.changes = Changes(cast(Any, self._whole))
        self.changes.deltas = Deltas(KEPT_MAX * ENTRY_SIZE_BYTES)
        self._spare: list[Kept] = []

    def _whole(self) -> list[Offer]:
        """Return what has arrived and is offered, the newest first."""
        return [offer for _, offer in sorted(self._worker.offers.items(), reverse=True) if offer.complete]

    def wants_deltas(self) -> None:
        """Note that a reader could take some, without the compiler that the real word starts."""
        self.changes._ahead = changes_module.AHEAD_FOR

    # --- memory ---

    def recycle(self, offer: Offer) -> None:
        """Take the memory of what is offered no more. It may be written to by others, and nobody here notices."""
        if offer.is_recycled:
            return
        offer.is_recycled = True
        rng = self._worker.world.harm
        if rng.random() < 0.5:
            offer.reuse()
            return
        stays = range(SEGMENTS) if offer.complete else sorted(offer.ready)
        digests = {segment: offer.manifest.digest(segment) for segment in stays}
        if digests and rng.random() < 0.2:
            offer.buffer[rng.choice(sorted(digests))] = some_other_bytes(rng)
        self._spare = [*self._spare, (stream_of(offer.key), offer.buffer, digests)][-SPARE_MAX:]

    def take(self, key: ShardKey) -> tuple[list[bytes], dict[int, bytes]]:
        """Return memory to read this into, and what is believed to be there, by segment."""
        for at, (stream, buffer, digests) in enumerate(self._spare):
            if stream == stream_of(key):
                del self._spare[at]
                buffer[:] = [data if segment in digests else b"" for segment, data in enumerate(buffer)]
                return buffer, digests
        return [b""] * SEGMENTS, {}

    def prepare(
        self, key: ShardKey, manifest: Manifest, buffer: list[bytes], was: dict[int, bytes]
    ) -> tuple[set[int], Bases | None]:
        """As `Destinations.missing`: return the segments that are in place, and what is here of the others."""
        world = self._worker.world
        here = {k for k, digest in was.items() if digest == manifest.digest(k) and is_here(buffer[k], digest)}
        world.counts["in_place"] += len(here)
        world.counts["hint_was_wrong"] += len([k for k in was if was[k] == manifest.digest(k)]) - len(here)
        rest = {segment: digest for segment, digest in was.items() if segment not in here}
        memory = cast(Any, Memory(buffer, manifest.tensors))
        bases = self.changes.bases(key, manifest, memory, rest) if manifest.has_digests else None
        if bases is None:
            return here, None
        copied = {k for k in range(SEGMENTS) if k not in here and bases.copy_equal(k)}
        world.counts["copied_equal"] += len(copied)
        return here | copied, bases

    # --- what is done to it ---

    def harm(self, rng: random.Random) -> None:
        """Lose what it has of deltas, or poison one: by a flipped bit, or by a flawless one of something else."""
        kept, world = self.changes.deltas._kept, self._worker.world
        here = sorted(key for key, delta in kept.items() if delta)
        if not here:
            return
        if rng.random() < 0.3:
            world.counts["lost_deltas"] += 1
            for base, made in list(kept):
                self.changes.deltas.drop(base, made)
            return
        world.counts["poisoned"] += 1
        for base, made in rng.sample(here, 1 + len(here) // 2):
            delta = kept[base, made]
            other = kept[rng.choice(here)]
            at = rng.randrange(len(delta))
            flipped = delta[:at] + bytes([delta[at] ^ 1 << rng.randrange(8)]) + delta[at + 1 :]
            self.changes.deltas.put(base, made, other if other != delta and rng.random() < 0.5 else flipped)


class Patches:
    """The deltas on one link, at both ends."""

    def __init__(self, link: Link) -> None:
        self._link = link
        here, there = link.grant.location, link.reader.group.location
        self._crosses = (here.data_center, here.host) != (there.data_center, there.host)
        self._named: dict[int, tuple[bytes, ...]] = {}  # on their way to the source
        self._wrong: set[int] = set()
        self._sent: dict[int, list[tuple[bytes, bytes]]] = {}

    def opened(self) -> None:
        if self._crosses:
            self._link.source.deltas.wants_deltas()

    def ask(self, segments: Sequence[int]) -> None:
        """Name what is here of each, as the reader."""
        bases = self._bases if self._crosses else None
        for segment in segments:
            self._named[segment] = () if bases is None or self.knows_as_wrong(segment) else bases.named(segment)

    def knows_as_wrong(self, segment: int) -> bool:
        """Return whether a delta has not made this segment."""
        return segment in self._wrong

    @property
    def _bases(self) -> Bases | None:
        return self._link.transfer.bases.get(self._link.key.shard)

    def answer(self, segment: int) -> bytes | None:
        """Return deltas that make the segment of what the reader holds, as the source; None: it is sent whole."""
        offer, source, world = self._link.offer, self._link.source, self._link.world
        assert offer is not None
        sent, named = self._sent.pop(segment, None), self._named.pop(segment, ())
        if offer.sender is None:
            offer.sender = source.deltas.changes.sender(cast(Any, offer))
        if offer.sender is None:
            return None
        if sent and not named:
            offer.sender.refuse(sent)
            world.counts["deltas_refused"] += 1
        steps = offer.sender.find(segment, named, 0.0) if named else None
        if steps is None:
            return None
        self._sent[segment] = links_of(steps, offer.manifest.digest(segment))
        world.counts["chains"] += len(steps) > 1
        world.counts["deltas_passed_on"] += source.group is not world.trainers
        return b"".join(frame_of(steps))

    def make(self, segment: int, frame: bytes | None, buffer: list[bytes], manifest: Manifest) -> bool:
        """Make the segment, as the reader; return whether it is right."""
        bases, world = self._bases, self._link.world
        if frame is None:
            if bases is not None:
                bases.forget(segment)
            return True
        assert bases is not None
        there = [offer for offer in bases._others if offer.manifest.digest(segment) == frame[: len(NO_BASE)]]
        world.counts["base_was_lost"] += any(offer.withdrawn for offer in there)
        with Memory(buffer).writable(*manifest.segment_range(segment)) as views:
            steps = bases.patch(segment, memoryview(frame), views)
        is_right = steps is not None and is_here(buffer[segment], manifest.digest(segment))
        bases.patched(segment, steps if is_right else None)
        world.counts["by_delta" if is_right else "delta_was_wrong"] += 1
        if not is_right:
            self._wrong.add(segment)
        return is_right


def stream_of(key: ShardKey) -> tuple[str, int, int]:
    return key.layout, key.shard, key.shard_count


def some_other_bytes(rng: random.Random) -> bytes:
    return rng.randbytes(SEGMENT_SIZE_BYTES)


def check_nothing_is_kept(world: World) -> None:
    """Nobody has more deltas than it may, or is still making or reading one."""
    for worker in world.workers.values():
        deltas = worker.deltas.changes.deltas
        size_bytes = sum(len(delta) + ENTRY_SIZE_BYTES for delta in deltas._kept.values())
        listed = {(base, made) for made, bases in deltas._bases.items() for base in bases}
        if size_bytes != deltas.size_bytes or size_bytes > KEPT_MAX * ENTRY_SIZE_BYTES or listed != set(deltas._kept):
            raise Violation("kept", world, f"{worker.name} has {size_bytes} B of deltas, and believes {listed}")
        if deltas._making or any(offer.readers for offer in worker.offers.values()):
            raise Violation("kept", world, f"{worker.name} still makes or reads a delta")
