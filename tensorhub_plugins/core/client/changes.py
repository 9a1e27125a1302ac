"""What one worker can save its readers and itself: deltas between versions of one stream that it holds.

At the source `Sender` answers for one offer: with a delta that is there, or that is made now from two versions on the
shelf. At the reader `Bases` names what is there of other versions, and makes a segment of it and a delta. Both end in
"send it whole" whatever is missing, late or wrong, and the digest of the result decides.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import prod

import numpy as np
import torch

from tensorhub_plugins.core.client import calls
from tensorhub_plugins.core.deltas import codec, native
from tensorhub_plugins.core.deltas.cache import Deltas
from tensorhub_plugins.core.deltas.codec import Bytes, Span
from tensorhub_plugins.core.deltas.frame import CHAIN_MAX, Step, links_of, steps_of
from tensorhub_plugins.core.deltas.pace import Pace
from tensorhub_plugins.core.device import devices
from tensorhub_plugins.core.digests import XXH3, digest_of
from tensorhub_plugins.core.errors import UsageError, VersionGone
from tensorhub_plugins.core.manifest import Manifest
from tensorhub_plugins.core.memory.contents import is_alike
from tensorhub_plugins.core.memory.copying import copy_views, digests_of_segments
from tensorhub_plugins.core.memory.runs import Runs
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.options import Delta
from tensorhub_plugins.core.transports import Offer
from tensorhub_plugins.core.types import ShardKey

WRONG_MAX = 3  # results of one read that are not what was published: then its bases are not what they are taken for
PEERS_MAX = 256  # whose pace is remembered
AHEAD_FOR = 8  # versions for which deltas are made ahead after a reader could take some


class Changes:
    """The deltas of one worker. offers: returns what is whole on its shelf, the newest first."""

    def __init__(self, offers: Callable[[], list[Offer]], delta: Delta = "auto") -> None:
        self.is_on = delta == "auto"
        self.deltas = Deltas()
        self._paces: OrderedDict[str, Pace] = OrderedDict()
        self._lock = threading.Lock()
        self._offers = offers
        self._ahead = 0  # for so many more versions deltas are made before a reader asks
        self._rate = 0.0  # of the last reader that asked, as of `Deltas.made`
        self._offered: weakref.WeakKeyDictionary[Runs, Manifest] = weakref.WeakKeyDictionary()  # last, in this memory

    def sender(self, offer: Offer) -> Sender | None:
        """Return what answers readers of this offer with deltas; None: there are none."""
        can = self.is_on and offer.manifest.has_digests and offer.slab.device is None
        if can:
            self.deltas.fit(offer.manifest.size_bytes)
            with self._lock:
                self._offered[offer.slab.runs] = offer.manifest
        return Sender(self, offer) if can else None

    def bases(self, key: ShardKey, manifest: Manifest, slab: Slab, was: dict[int, bytes]) -> Bases | None:
        """Return what is here of other versions of what is read into this slab; None: deltas are not wanted. was: the
        digests of what it held itself, by segment."""
        if not self.is_on or slab.device is not None:
            return None
        self.deltas.fit(manifest.size_bytes)
        if slab.runs.is_scattered(0, slab.size_bytes):  # it is not received into: deltas could not start from it
            was = {}
        others = self.alike(key, manifest) if slab.specs == manifest.tensors else []
        return Bases(self, manifest, slab, was, others)

    def alike(self, key: ShardKey, manifest: Manifest) -> list[Offer]:
        """Return the offers of other versions of this stream, the newest first."""
        return [
            offer
            for offer in self._offers()
            if (offer.key.layout, offer.key.shard, offer.key.shard_count) == (key.layout, key.shard, key.shard_count)
            and offer.version != key.version
            and offer.slab.device is None
            and is_alike(offer.manifest, manifest)
        ]

    def pace(self, peer: str) -> Pace:
        """Return how fast this peer was read so far, of those that were read last."""
        native.begin()
        with self._lock:
            found = self._paces.setdefault(peer, Pace())
            self._paces.move_to_end(peer)
            while len(self._paces) > PEERS_MAX:
                self._paces.popitem(last=False)
            return found

    def wanted(self) -> None:
        """Note that there are readers which could take deltas."""
        native.begin()
        self._ahead = AHEAD_FOR

    def asked(self, rate: float) -> None:
        """Note at which rate a reader that takes deltas would be sent whole segments; 0: it does not know."""
        self._rate = rate
        self.wanted()

    def make_ahead(self, version: int, layout: str, is_over: Callable[[], bool] = lambda: False) -> int:
        """Make the deltas from this version to the next one that is here, before its memory is used for another; return
        how many. Nothing where no reader was seen that could take them. is_over: asked between two segments."""
        if self._ahead <= 0 or not self.is_on:
            return 0
        self._ahead -= 1
        count = 0
        for old in [offer for offer in self._offers() if (offer.version, offer.key.layout) == (version, layout)]:
            newer = [offer for offer in self.alike(old.key, old.manifest) if offer.version > version]
            for segment in range(old.manifest.segment_count if newer else 0):
                if is_over() or not self.is_on:
                    return count
                count += self.make(old, newer[-1], segment, 0.0) is not None
        return count

    def overwrite(
        self, slab: Slab, tensors: Mapping[str, torch.Tensor], deadline: float
    ) -> Collection[tuple[str, torch.Tensor]]:
        """Copy these tensors into memory that holds another version of them, as it was offered last, and make the
        deltas between the two meanwhile, segment by segment; return what is left to copy: nothing; or all, where no
        reader takes deltas, or the two are not alike. Raise DeadlineExceeded."""
        is_done = self._ahead > 0 and self.is_on and self._overwrite(slab, tensors, deadline)
        return () if is_done else tensors.items()

    def _overwrite(self, slab: Slab, tensors: Mapping[str, torch.Tensor], deadline: float) -> bool:
        with self._lock:
            old = self._offered.get(slab.runs)
        if old is None or old.tensors != slab.specs:
            return False
        if any(is_alike(offer.manifest, old) for offer in self._offers()):
            return False  # it is newer: deltas that start from it are smaller, and can be made later
        try:
            new = Slab.adopt(tensors, deadline=deadline)
        except UsageError:
            return False  # some are not dense, or they lie on several devices
        if new.specs != slab.specs:
            return False
        self._ahead -= 1
        with self._lock:
            self._offered.pop(slab.runs, None)  # until it is offered again it may be a mixture
        for _ in devices.settled(tensors.items()):
            pass  # what is queued on their devices is done
        size_bytes, algorithm = old.segment_size_bytes, old.digest_algorithm
        interrupted = threading.Event()  # for several threads
        calls.when_interrupted(interrupted.set)

        def overwritten(start: int, stop: int) -> bytes:
            if interrupted.is_set():
                raise calls.Interrupted
            segment, source = start // size_bytes, new.readable(start, stop)
            is_worth = self.deltas.is_worth(self._rate)
            delta = self._difference(old, segment, slab.readable(start, stop), source) if is_worth else None
            with slab.writable(start, stop) as views:
                copy_views(source, views)
                digest = digest_of(views, algorithm)
            if delta is not None and digest != old.digest(segment):
                self.deltas.put(old.digest(segment), digest, delta)
            return digest

        joined = digests_of_segments(overwritten, old.size_bytes, size_bytes, deadline=deadline)
        slab.mark_written()
        if algorithm == XXH3 and size_bytes == slab.segment_size_bytes:
            slab.know_digests(joined)
        return True

    def _difference(
        self, manifest: Manifest, segment: int, old: Sequence[memoryview], new: Sequence[memoryview]
    ) -> bytes | None:
        """Return the delta of one segment; None: it is not worth it."""
        began, before, after = time.monotonic(), _joined(old), _joined(new)
        delta = codec.encode(before, after, spans_of(manifest, segment), native.kernel())
        self.deltas.took(before.size, time.monotonic() - began, delta)
        return delta

    def make(self, old: Offer, new: Offer, segment: int, rate: float) -> bytes | None:
        """Return the delta of one segment between two offers; None: it is not worth it, or one of them is withdrawn."""
        base, wanted = old.manifest.digest(segment), new.manifest.digest(segment)
        if base == wanted:
            return None

        def make() -> bytes | None:
            for offer in (old, new):
                offer.check_memory(segment)
            before, after = (offer.slab.readable(*new.manifest.segment_range(segment)) for offer in (old, new))
            return self._difference(new.manifest, segment, before, after)

        with suppress(VersionGone, UsageError), _reading(old), _reading(new):
            return self.deltas.made(base, wanted, make, rate=rate)
        return None


class Sender:
    """The deltas of one offer, for its readers."""

    def __init__(self, changes: Changes, offer: Offer) -> None:
        self._changes = changes
        self._offer = weakref.ref(offer)  # which has this: a cycle would keep its memory

    def wanted(self) -> None:
        self._changes.wanted()

    def find(self, segment: int, bases: Sequence[bytes], rate: float) -> list[Step] | None:
        if (mine := self._offer()) is None:
            return None
        self._changes.asked(rate)
        manifest, wanted = mine.manifest, mine.manifest.digest(segment)
        start, stop = manifest.segment_range(segment)
        deltas, most = self._changes.deltas, int(codec.WORTH * (stop - start))
        if (found := deltas.chain(bases, wanted, most)) is not None:
            return found or None  # it claims to hold what it asks for
        chains = []  # to other versions here, from which the last delta is made now
        for other in self._changes.alike(mine.key, manifest):
            chain = deltas.chain(bases, other.manifest.digest(segment), most, CHAIN_MAX - 1)
            chains += [] if chain is None else [(chain, other)]
        if not chains:
            return None
        chain, other = min(chains, key=lambda each: len(each[0]))
        if (delta := self._changes.make(other, mine, segment, rate)) is None:
            return None
        chain = [*chain, Step(other.manifest.digest(segment), delta)]
        return chain if sum(len(step.delta) for step in chain) <= most else None

    def refuse(self, links: Sequence[tuple[bytes, bytes]]) -> None:
        for base, made in links:
            self._changes.deltas.drop(base, made)


class Bases:
    """What a reader holds of other versions of the stream that it reads."""

    def __init__(
        self, changes: Changes, manifest: Manifest, slab: Slab, was: dict[int, bytes], others: Sequence[Offer]
    ) -> None:
        self._changes, self._manifest, self._slab = changes, manifest, slab
        self._was = was  # in the memory that is read into itself
        self._others = list(others)
        self._wrong = 0

    @property
    def count(self) -> int:
        return self._manifest.segment_count if self._others else len(self._was)

    def named(self, segment: int) -> tuple[bytes, ...]:
        if self._wrong >= WRONG_MAX:
            return ()
        found = dict.fromkeys(offer.manifest.digest(segment) for offer in self._others[:1])
        if segment in self._was:
            found[self._was[segment]] = None
        return tuple(found)

    def copy_equal(self, segment: int) -> bool:
        """Copy the segment from another version that has the very same one; return whether that was possible."""
        wanted = self._manifest.digest(segment)
        for offer in self._others:
            if offer.manifest.digest(segment) == wanted:
                with self._slab.writable(*self._manifest.segment_range(segment)) as views:
                    copied = self._copy(offer, segment, views)
                    if copied and digest_of(views, self._manifest.digest_algorithm) == wanted:
                        return True
                self.forget(segment)
        return False

    def forget(self, segment: int) -> None:
        self._was.pop(segment, None)

    def patch(self, segment: int, frame: memoryview, views: Sequence[memoryview]) -> list[Step] | None:
        try:
            steps = steps_of(frame)
        except ValueError:
            return None
        if not self._bring(segment, steps[0].base, views):
            return None
        spans, is_whole = spans_of(self._manifest, segment), len(views) == 1
        target = np.frombuffer(views[0], np.uint8) if is_whole else _joined(views)
        try:
            for step in steps:
                codec.apply(target, step.delta, spans, native.kernel())
        except ValueError:
            return None
        if not is_whole:
            copy_views([target.data], views)
        return steps

    def patched(self, segment: int, steps: Sequence[Step] | None) -> None:
        self.forget(segment)
        if steps is None:
            self._wrong += 1
            return
        for step, (base, made) in zip(steps, links_of(steps, self._manifest.digest(segment)), strict=True):
            self._changes.deltas.put(base, made, step.delta)

    def pace(self, peer: str) -> Pace:
        return self._changes.pace(peer)

    def _bring(self, segment: int, base: bytes, views: Sequence[memoryview]) -> bool:
        """Have the bytes of this digest in the slab; return whether they are believed to be there."""
        if self._was.get(segment) == base:
            return True
        found = next((offer for offer in self._others if offer.manifest.digest(segment) == base), None)
        return found is not None and self._copy(found, segment, views)

    def _copy(self, offer: Offer, segment: int, views: Sequence[memoryview]) -> bool:
        with suppress(VersionGone), _reading(offer):
            offer.check_memory(segment)
            copy_views(offer.slab.readable(*self._manifest.segment_range(segment)), views)
            return True
        return False


@contextmanager
def _reading(offer: Offer) -> Iterator[None]:
    """Keep an offer's memory from being reused. Only for moments: a withdrawal waits for them."""
    reader = offer.attach(lambda: None)
    try:
        yield
    finally:
        offer.detach(reader)


def spans_of(manifest: Manifest, segment: int) -> list[Span]:
    """Return the spans of this segment, which follow from its tensors."""
    start, stop = manifest.segment_range(segment)
    table, pieces = manifest.tensors, []
    for spec in manifest.specs_in([segment]):
        offset, count = table.offsets[table.positions[spec.name]] - start, prod(spec.shape)
        size = spec.size_bytes // count if count and spec.size_bytes % count == 0 else 1
        pieces.append((offset, offset + spec.size_bytes, size))
    return codec.spans_of(pieces, stop - start)


def _joined(views: Sequence[memoryview]) -> Bytes:
    arrays = [np.frombuffer(view, np.uint8) for view in views]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
