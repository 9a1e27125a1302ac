"""PURE: which replicas get new requests. `Watch` is told what was heard and when; it never looks at a clock.

A replica is in rotation while it is *ready* (it has installed a version) and has been heard within the timeout. One
that falls silent is taken out at once and put back only when it answers again AND has caught up with the version the
others had when it came back: it may have slept through many, and its first answers would be stale. When the others
go back, because an older version was pinned, that is far enough.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Replica:
    heard_at: float
    ready: bool = False
    version: int = 0
    lost: bool = False  # out of rotation since it fell silent or failed
    catch_up_to: int | None = None  # None: not heard since it was lost
    epoch: int = 0  # counts losses: a request of an earlier epoch is gone


class Watch:
    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.replicas: dict[str, Replica] = {}

    def add(self, name: str, now: float) -> None:
        """A replica that verl registers. It is not ready before it says so."""
        self.replicas.setdefault(name, Replica(heard_at=now))

    def remove(self, name: str) -> None:
        """A replica that verl takes away: not lost, simply not ours to route to any more."""
        self.replicas.pop(name, None)

    def heard(self, name: str, now: float, *, ready: bool, version: int) -> bool:
        """An answer. Returns whether this brings it back into rotation."""
        replica = self.replicas.get(name)
        if replica is None:
            return False
        if replica.lost and (replica.catch_up_to is None or replica.heard_at < now - self.timeout_s):
            replica.catch_up_to = self.newest()  # the first answer after the loss, or after a silence
        replica.heard_at = now
        replica.ready, replica.version = ready, version
        if replica.lost and ready and version >= min(replica.catch_up_to or 0, self.newest()):
            replica.lost = False
            return True
        return False

    def failed(self, name: str, now: float) -> bool:
        """It said, or its process showed, that it cannot serve. Returns whether it was in rotation."""
        replica = self.replicas.get(name)
        if replica is None or replica.lost:
            return False
        replica.ready = False
        replica.heard_at = now
        self._lose(replica)
        return True

    def silent(self, now: float) -> list[str]:
        """Takes out, and returns, those not heard for the timeout while another one was.

        When none is heard it is more likely that this machine or the listener stands still; and their requests
        could go nowhere."""
        late = [n for n, r in self.replicas.items() if not r.lost and now - r.heard_at > self.timeout_s]
        gone = late if any(self.in_rotation(name) for name in self.replicas if name not in late) else []
        for name in gone:
            self._lose(self.replicas[name])
        return gone

    def _lose(self, replica: Replica) -> None:
        replica.lost, replica.catch_up_to = True, None
        replica.epoch += 1

    def in_rotation(self, name: str) -> bool:
        replica = self.replicas.get(name)
        return replica is not None and replica.ready and not replica.lost

    def is_same_life(self, name: str, epoch: int) -> bool:
        """Whether requests given to this replica in `epoch` can still be answered."""
        replica = self.replicas.get(name)
        return replica is not None and replica.epoch == epoch

    def newest(self) -> int:
        """The newest version in rotation; 0 if there is none, so that the last one standing is never kept out."""
        return max((r.version for r in self.replicas.values() if r.ready and not r.lost), default=0)
