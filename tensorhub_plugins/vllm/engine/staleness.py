"""Whether an engine may still be given work: for how long it has not heard of the hub.

An engine that is cut off from the hub goes on with what it has, and cannot know how many versions it misses: only how
long the silence is. After `limit_s` of it the engine asks for no more work, and says so once; what it has begun it
ends. When the hub is heard again it takes work again, and its follower goes to the newest version, past those that
came and went meanwhile. A dispatcher that can still reach it knows the newest version, and may stop sooner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tensorhub_plugins.core import record
from tensorhub_plugins.core.log import get_logger

logger = get_logger(__name__)

LOOK_INTERVAL_S = 1.0


class Staleness:
    """silent_s: seconds since the hub was heard. limit_s: None for ever."""

    def __init__(self, silent_s: Callable[[], float], limit_s: float | None, *, worker: str) -> None:
        self._silent_s, self.limit_s, self._worker = silent_s, limit_s, worker
        self._said = False

    @property
    def is_cut_off(self) -> bool:
        return self.limit_s is not None and self._silent_s() > self.limit_s

    def why_not(self) -> str:
        """Return why an engine gets no new work, in words; "": it may."""
        if not self.is_cut_off:
            return ""
        return f"{self._worker} has not heard of the hub for {self._silent_s():.0f} s (staleness_s is {self.limit_s:g})"

    async def watch(self) -> None:
        """Say it when it changes. Runs as long as the engine; the hub that it is cut off from cannot ask."""
        while True:
            why_not = self.why_not()
            if why_not and not self._said:
                logger.warning("no more work is taken until the hub is heard again: %s", why_not)
                record("cut_off", worker=self._worker, seconds=self._silent_s())
            elif self._said and not why_not:
                logger.info("%s hears the hub again, and takes work", self._worker)
                record("cut_off_over", worker=self._worker)
            self._said = bool(why_not)
            await asyncio.sleep(LOOK_INTERVAL_S)
