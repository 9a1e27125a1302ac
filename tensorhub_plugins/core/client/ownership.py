"""PURE: which trainer rank keeps which tensor.

All ranks see the same tensors in the same order (gathering each is a collective), so all of them take the same decision
without a word: the rank with the fewest bytes so far, the lowest of equals.
"""

from __future__ import annotations


class Ownership:
    def __init__(self, ranks: int) -> None:
        self.bytes = [0] * ranks

    def give(self, size_bytes: int) -> int:
        """The owner of the next tensor."""
        owner = min(range(len(self.bytes)), key=lambda rank: (self.bytes[rank], rank))
        self.bytes[owner] += size_bytes
        return owner
