"""Sources that this client could not connect to: behind a firewall, or at an address that is only local to them.

Each attempt costs `open_s`. Such a source is asked only where there is no other, until it may have come into reach. The
hub hears of it with the heartbeats, and says it to the source's host.
"""

from __future__ import annotations

import threading

REMEMBERED_S = 60.0
SOURCES_MAX = 64  # of those; the last ones
SLOW_MAX = 1024  # sources that are not warned of a second time
REACHED_MAX = 1024  # sources that were


class Unreached:
    """The sessions of such sources, for all transfers of a client and any of its threads."""

    def __init__(self) -> None:
        self._until: dict[bytes, float] = {}
        self._slow: dict[bytes, str] = {}
        self._reached: dict[bytes, None] = {}
        self._lock = threading.Lock()

    def add(self, session: bytes, now: float) -> None:
        """Remember this one from `now` on, seconds of a monotonic clock."""
        with self._lock:
            self._until.pop(session, None)
            self._until[session] = now + REMEMBERED_S
            if len(self._until) > SOURCES_MAX:
                del self._until[next(iter(self._until))]

    def reached(self, session: bytes) -> None:
        """Note that this one was connected to."""
        with self._lock:
            self._until.pop(session, None)
            self._reached[session] = None
            if len(self._reached) > REACHED_MAX:
                del self._reached[next(iter(self._reached))]

    def was_reached(self, session: bytes) -> bool:
        """Return whether this one was ever connected to."""
        with self._lock:
            return session in self._reached

    def is_first_slow(self, session: bytes, why: str = "") -> bool:
        """Return whether this source, which is read by a slower way than it might be, is one for the first time."""
        with self._lock:
            is_new = session not in self._slow
            self._slow[session] = why
            if len(self._slow) > SLOW_MAX:
                del self._slow[next(iter(self._slow))]
            return is_new

    def slower(self) -> str:
        """Return why they are read by a slower way, as text for users; "": none is."""
        with self._lock:
            return "; ".join(self._slow.values())

    def sessions(self, now: float) -> tuple[bytes, ...]:
        """Return those that are still remembered."""
        with self._lock:
            self._until = {session: until for session, until in self._until.items() if until > now}
            return tuple(self._until)
