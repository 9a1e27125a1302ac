"""The deltas that one worker has made or received, by what they turn into what. Any thread may call.

A delta is named by two digests: of the bytes that it starts from, and of those that it makes. It has no version and no
history: a worker that holds the first and wants the second can use it, whichever worker made it, and when.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

from tensorhub_plugins.core.deltas.frame import CHAIN_MAX, Step, links_of

SIZE_BYTES_MAX = 256 << 20  # of all deltas; more, where the shards are large:
SHARE_OF_SHARD = 8  # an eighth of the largest shard that is read or served
ENTRY_SIZE_BYTES = 640  # of an entry beside the delta: keys and dictionaries, as measured
TRIED_AGAIN_AFTER = 32  # refusals: what was not worth it may be so by now
WEIGHT = 0.25  # of the last one, in a moving average


class Deltas:
    """A cache of bounded size, the last used ones, and the one place where a delta is made."""

    def __init__(self, size_bytes_max: int = SIZE_BYTES_MAX) -> None:
        self._size_bytes_max, self._size_bytes = size_bytes_max, 0
        self._left = sys.maxsize  # of a budget, see `limit`
        self._lock = threading.Condition()
        self._kept: OrderedDict[tuple[bytes, bytes], bytes] = OrderedDict()  # b"": it is not worth it
        self._bases: dict[bytes, dict[bytes, None]] = {}  # by what is made
        self._making: set[tuple[bytes, bytes]] = set()
        self._worth = _Worth()

    @property
    def size_bytes(self) -> int:
        """Return the memory that is taken, in bytes."""
        return self._size_bytes

    def fit(self, shard_size_bytes: int) -> None:
        """Make room for the deltas of a shard of this size."""
        self._size_bytes_max = max(self._size_bytes_max, shard_size_bytes // SHARE_OF_SHARD)

    def limit(self, size_bytes: int) -> None:
        """Take no more than what a budget has left: whatever else needs the memory comes first."""
        with self._lock:
            self._left = max(0, size_bytes)
            self._make_room()

    def put(self, base: bytes, made: bytes, delta: bytes) -> None:
        """Keep a delta; the oldest ones make room for it."""
        with self._lock:
            self._drop(base, made)
            self._kept[base, made] = delta
            self._bases.setdefault(made, {})[base] = None
            self._size_bytes += len(delta) + ENTRY_SIZE_BYTES
            self._make_room()

    def drop(self, base: bytes, made: bytes) -> None:
        """Forget a delta: it did not make what it should. Nothing, if it is not there."""
        with self._lock:
            self._drop(base, made)

    def chain(
        self, bases: Sequence[bytes], wanted: bytes, size_bytes_max: int, count_max: int = CHAIN_MAX
    ) -> list[Step] | None:
        """Return the shortest chain of deltas from one of these to what is wanted, of at most so many bytes and deltas,
        none where it is one of these; None: there is none."""
        if wanted in bases:
            return []
        with self._lock:
            paths: list[tuple[bytes, list[Step]]] = [(wanted, [])]
            seen = {wanted}  # each is visited once, however many ways lead there
            for _ in range(count_max):
                further: list[tuple[bytes, list[Step]]] = []
                for digest, steps in paths:
                    for base in self._bases.get(digest, ()):
                        delta = self._kept[base, digest]
                        path = [Step(base, delta), *steps]
                        if base in seen or not delta or sum(len(step.delta) for step in path) > size_bytes_max:
                            continue
                        if base in bases:
                            for link in links_of(path, wanted):
                                self._kept.move_to_end(link)
                            return path
                        seen.add(base)
                        further.append((base, path))
                paths = further
        return None

    def made(self, base: bytes, wanted: bytes, make: Callable[[], bytes | None], *, rate: float) -> bytes | None:
        """Return this delta, which is made once, however many ask for it; None: it is not worth it. make: makes it, or
        returns None. rate: bytes a second at which the segment would be sent whole; 0: unknown. The caller measures
        the time, see `took`."""
        key = base, wanted
        with self._lock:
            while key in self._making:
                self._lock.wait()
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key] or None
            if not self._worth.is_worth(rate):
                return None
            self._making.add(key)
        delta = None
        try:
            delta = make()
            self.put(base, wanted, delta or b"")
        finally:
            with self._lock:
                self._making.discard(key)
                self._lock.notify_all()
        return delta

    def is_worth(self, rate: float) -> bool:
        """Return whether to make a delta that no reader has requested; rate: as of `made`."""
        with self._lock:
            return self._worth.is_worth(rate)

    def took(self, size_bytes: int, seconds: float, delta: bytes | None) -> None:
        """Note how long it took to make a delta of a segment of this size."""
        with self._lock:
            self._worth.took(size_bytes, seconds, delta)

    def _make_room(self) -> None:
        while self._size_bytes > min(self._size_bytes_max, self._left):
            self._drop(*next(iter(self._kept)))

    def _drop(self, base: bytes, made: bytes) -> None:
        delta = self._kept.pop((base, made), None)
        if delta is None:
            return
        self._size_bytes -= len(delta) + ENTRY_SIZE_BYTES
        del self._bases[made][base]
        if not self._bases[made]:
            del self._bases[made]


class _Worth:
    """Whether deltas are made faster than the bytes that they save are sent, by those that were made last."""

    def __init__(self) -> None:
        self.rate = 0.0  # bytes of segments a second
        self.saved = 1.0  # share of their bytes
        self.refused = 0

    def took(self, size_bytes: int, seconds: float, delta: bytes | None) -> None:
        rate, saved = size_bytes / max(seconds, 1e-9), 1.0 - (size_bytes if delta is None else len(delta)) / size_bytes
        self.rate = rate if not self.rate else (1 - WEIGHT) * self.rate + WEIGHT * rate
        self.saved = (1 - WEIGHT) * self.saved + WEIGHT * saved

    def is_worth(self, rate: float) -> bool:
        if not self.rate or (rate < self.rate * self.saved and self.saved > WEIGHT):
            return True
        self.refused += 1
        return self.refused % TRIED_AGAIN_AFTER == 0
