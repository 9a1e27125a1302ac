"""How fast one source is read, whole and by deltas: whether these save time, from end to end. No clock."""

from __future__ import annotations

WEIGHT = 0.5  # of the last read, in a moving average
SLOWER, SLOWER_S = 1.05, 0.005  # than whole segments, from there on: less is chance
TRIED_AGAIN_AFTER, TRIED_AGAIN_AFTER_MAX = 16, 1024  # reads: twice as many after each try in vain
CLEARLY = 4.0  # times faster than the first whole read, which may have been slow for its new memory and connection


class Pace:
    """The rates of one source, in bytes of segments a second; 0: unknown."""

    def __init__(self) -> None:
        self.whole = self.by_delta = 0.0
        self._left, self._pause, self._wholes = 0, TRIED_AGAIN_AFTER, 0

    def takes_deltas(self) -> bool:
        """Return whether the next read is to take deltas: they were not slower, or have not been tried for long."""
        if self._left:
            self._left -= 1
        return not self._left

    def read(self, size_bytes: int, delta_size_bytes: int, seconds: float) -> None:
        """Note how long a read has taken, and as how many of its bytes deltas came; mixtures say nothing."""
        rate = size_bytes / max(seconds, 1e-9)
        if not delta_size_bytes:
            self.whole = rate if self._wholes < 2 else (1 - WEIGHT) * self.whole + WEIGHT * rate
            self._wholes += 1
        elif 2 * delta_size_bytes > size_bytes:
            self.by_delta = rate
            if self.whole and seconds > SLOWER * size_bytes / self.whole + SLOWER_S:
                self._left, self._pause = self._pause, min(2 * self._pause, TRIED_AGAIN_AFTER_MAX)
            else:
                self._pause = TRIED_AGAIN_AFTER
                if self._wholes < 2 and rate < CLEARLY * self.whole:
                    self._left = 2  # the next one whole
