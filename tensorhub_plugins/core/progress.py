"""What a person sees of something that takes long: a bar of tqdm where one watches and it is installed, else log lines.

Nothing for what ends within FIRST_S, so that a version in every step says nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from tensorhub_plugins.core.log import get_logger

T = TypeVar("T")
logger = get_logger("tensorhub_plugins.progress")  # not core's: vLLM shows it
FIRST_S, BAR_S = 5.0, 0.2
LINE_S, LINE_MAX_S = 10.0, 60.0  # between two lines: at first, and after some


class Progress:
    """Of one thing. total: of its `unit`, "B" or a word; may grow."""

    def __init__(self, what: str, total: float = 0.0, unit: str = "B") -> None:
        """Begin now. what: in words; "": nothing is shown."""
        self.what, self.total = what, total
        self._unit, self._began, self._every_s = unit, time.monotonic(), LINE_S
        self._due = self._began + FIRST_S if what else float("inf")
        self._bar: Any = None

    def note(self, done: float, now: float) -> None:
        """Show that so much is done at `now` (of time.monotonic()), if it is time to."""
        if now >= self._due:
            self._show(done, now)

    def _show(self, done: float, now: float) -> None:
        if self._bar is None and sys.stderr is not None and sys.stderr.isatty() and (tqdm := _tqdm()) is not None:
            self._bar = tqdm(desc=self.what, unit=self._unit, unit_scale=self._unit == "B", leave=False, mininterval=0)
        if self._bar is not None:
            self._due = now + BAR_S
            self._bar.total = max(self.total, done)
            self._bar.update(done - self._bar.n)
            return
        self._due, self._every_s = now + self._every_s, min(2 * self._every_s, LINE_MAX_S)
        rate = done / max(1e-9, now - self._began)
        left = f", about {(self.total - done) / rate:.0f} s left" if rate > 0 and self.total > done else ""
        if self._unit == "B":
            said = f"{done / 1e9:.2f} of {self.total / 1e9:.2f} GB, {rate / 1e6:{'.0f' if rate >= 1e7 else '.2g'}} MB/s"
        else:
            said = f"{done:.0f} of {self.total:.0f} {self._unit}"
        logger.info("%s: %s%s", self.what, said, left)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()


def of(items: Iterable[T], what: str, total: int, unit: str) -> Iterator[T]:
    """Yield these, of which there are `total`, and show how many have been."""
    progress = Progress(what, total, unit)
    try:
        for done, item in enumerate(items):
            progress.note(done, time.monotonic())
            yield item
    finally:
        progress.close()


def _tqdm() -> Any:
    """Return it; None: not installed. It comes with vLLM."""
    try:
        from tqdm import tqdm  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        return None
    return tqdm
