"""Sources that this client could not connect to: behind a firewall, or at an address that is only local to them.

Each attempt costs `open_s`. Such a source is asked only where there is no other, until it may have come into reach. The
hub hears of it with the heartbeats, and says it to the source's host.
"""

from __future__ import annotations

import threading

from tensorhub_plugins.core.protocol.messages import UNREACHED_MAX

REMEMBERED_S = 60.0


class Unreached:
    """The sessions of such sources, for all transfers of a client and any of its threads."""

    def __init__(self) -> None:
        self._until: dict[bytes, float] = {}
        self._lock = threading.Lock()

    def add(self, session: bytes, now: float) -> None:
        """Remember this one from `now` on, seconds of a monotonic clock."""
        with self._lock:
            self._until.pop(session, None)
            self._until[session] = now + REMEMBERED_S
            if len(self._until) > UNREACHED_MAX:
                del self._until[next(iter(self._until))]

    def sessions(self, now: float) -> tuple[bytes, ...]:
        """Return those that are still remembered."""
        with self._lock:
            self._until = {session: until for session, until in self._until.items() if until > now}
            return tuple(self._until)
