"""PURE: how many requests each replica has."""

from __future__ import annotations

from collections import Counter


class Load:
    """The requests under way at every replica, by session: a second release, or one after a loss, changes nothing."""

    def __init__(self) -> None:
        self._at: dict[str, Counter[str]] = {}

    def acquire(self, name: str, session: str) -> None:
        self._at.setdefault(name, Counter())[session] += 1

    def release(self, name: str, session: str) -> None:
        sessions = self._at.get(name)
        if sessions is None or session not in sessions:
            return
        sessions[session] -= 1
        if not sessions[session]:
            del sessions[session]

    def forget(self, name: str) -> int:
        """Forget a replica that is lost or taken away. Return how many requests it had."""
        return self._at.pop(name, Counter()).total()

    def count(self, name: str) -> int:
        return self._at.get(name, Counter()).total()
