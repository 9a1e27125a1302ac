"""PURE: which replicas get new requests, and how many each has. Told what was heard and when; never looks at a clock.

A replica is in rotation while it is *ready* (it has installed a version) and has been heard within the timeout. One
that falls silent is taken out at once and put back only when it answers again AND has caught up with the version the
others had when it came back: it may have slept through many, and its first answers would be stale. When the others
go back, because an older version was pinned, that is far enough. One that joins a run is treated likewise. One that is
drained gets no new requests, and finishes those it has.

One that has served and is not heard for its own longer limit hangs: it is to be ended and started again, even if none
is heard. Silence while whoever listens stood still itself is nobody's.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

STILL_MAX_S = 5.0  # between two looks: whoever looks once a second stood still for the rest


@dataclass
class Replica:
    heard_at: float
    ready: bool = False
    version: int = 0
    installed_at: float = 0.0  # when this version was first heard of
    refused: int = 0  # a newer version, which it cannot install
    stays: bool = False  # it will not go on to a newer version: pinned, or not one that follows
    is_joining: bool = False  # not in rotation yet, because the others are further
    is_draining: bool = False
    lost: bool = False  # out of rotation since it fell silent or failed
    gone: bool = False  # lost, and no process will answer under its name again
    catch_up_to: int | None = None  # None: not heard since it was lost, or not ready since it joined
    has_served: bool = False  # since it was (re)started: before, silence means that it is loading
    hangs_after_s: float = math.inf  # of silence
    epoch: int = 0  # counts losses: a request of an earlier epoch is gone


class Watch:
    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.replicas: dict[str, Replica] = {}
        self._looked_at = math.inf

    def add(self, name: str, now: float, *, joins: bool = False) -> None:
        """A replica that is not ready before it says so. joins: the others are at work already."""
        self.replicas.setdefault(name, Replica(heard_at=now, is_joining=joins))

    def remove(self, name: str) -> None:
        """A replica that is taken away: not lost, simply not ours to route to any more."""
        self.replicas.pop(name, None)

    def drain(self, name: str, draining: bool = True) -> None:
        """No new requests for this one (or again)."""
        if name in self.replicas:
            self.replicas[name].is_draining = draining

    def heard(
        self,
        name: str,
        now: float,
        *,
        ready: bool,
        version: int,
        stays: bool = False,
        refused: int = 0,
        hangs_after_s: float = math.inf,
    ) -> bool:
        """An answer. Returns whether this brings it back into rotation after a loss."""
        replica = self.replicas.get(name)
        if replica is None:
            return False
        if replica.lost and (replica.catch_up_to is None or replica.heard_at < now - self.timeout_s):
            replica.catch_up_to = self.newest()  # the first answer after the loss, or after a silence
        if replica.is_joining and ready and replica.catch_up_to is None:
            replica.catch_up_to = self.newest()  # it has started by now, which took a while
        replica.heard_at = now
        if replica.version != version:
            replica.installed_at = now
        replica.ready, replica.version, replica.stays, replica.refused = ready, version, stays, refused
        replica.has_served, replica.hangs_after_s = replica.has_served or ready, hangs_after_s
        is_out = replica.lost or replica.is_joining
        if is_out and ready and version >= min(replica.catch_up_to or 0, self.newest()):
            was_lost, replica.lost, replica.is_joining = replica.lost, False, False
            return was_lost
        return False

    def failed(self, name: str, now: float, *, gone: bool = False) -> bool:
        """It said, or its process showed, that it cannot serve. Returns whether it was in rotation. gone: for good."""
        replica = self.replicas.get(name)
        if replica is None:
            return False
        replica.gone, replica.has_served = replica.gone or gone, False
        if replica.lost:
            return False
        replica.ready = False
        replica.heard_at = now
        self._lose(replica)
        return True

    def silent(self, now: float) -> list[str]:
        """Takes out, and returns, those not heard for the timeout while another one was.

        When none is heard it is more likely that this machine or the listener stands still; and their requests
        could go nowhere."""
        late = self.late(now)
        gone = late if any(self.in_rotation(name) for name in self.replicas if name not in late) else []
        for name in gone:
            self._lose(self.replicas[name])
        return gone

    def look(self, now: float) -> None:
        """Call once a second: what this took too long for counts as nobody's silence."""
        still_s = max(0.0, now - self._looked_at - STILL_MAX_S)
        for replica in self.replicas.values():
            replica.heard_at = min(now, replica.heard_at + still_s)  # it may have been heard since
        self._looked_at = now

    def late(self, now: float) -> list[str]:
        """Those not heard for the timeout that are not taken out."""
        return [name for name, r in self.replicas.items() if not r.lost and now - r.heard_at > self.timeout_s]

    def hung(self, now: float) -> list[str]:
        """Those to be ended: `failed` is for them, too."""
        here = [(name, r) for name, r in self.replicas.items() if r.has_served and not r.is_draining]
        return [name for name, r in here if now - r.heard_at > r.hangs_after_s]

    def _lose(self, replica: Replica) -> None:
        replica.lost, replica.catch_up_to = True, None
        replica.epoch += 1

    def in_rotation(self, name: str) -> bool:
        replica = self.replicas.get(name)
        return replica is not None and _serves(replica)

    def is_same_life(self, name: str, epoch: int) -> bool:
        """Whether requests given to this replica in `epoch` can still be answered."""
        replica = self.replicas.get(name)
        return replica is not None and replica.epoch == epoch

    def lost(self) -> list[str]:
        """Those that are missed: not one that leaves, nor one that has not begun."""
        return [name for name, r in self.replicas.items() if r.lost and not (r.is_draining or r.is_joining)]

    def newest(self) -> int:
        """The newest version in rotation; 0 if there is none, so that the last one standing is never kept out."""
        return max((replica.version for replica in self.serving()), default=0)

    def behind(self, version: int) -> list[str]:
        """Those that would answer with an older version and will have this one; at the start, those without any."""
        return [
            name
            for name, r in self.replicas.items()
            if (_serves(r) or (r.version == 0 and not _is_out(r))) and r.version < version and not r.stays
        ]

    def serving(self) -> list[Replica]:
        """Those in rotation."""
        return [replica for replica in self.replicas.values() if _serves(replica)]

    def refusing(self, published: int = 0) -> list[str]:
        """Those that cannot install the trainer's newest version. published: that one; 0 where it is not known."""
        return [name for name, r in self.replicas.items() if not r.gone and r.refused >= max(published, 1)]

    def is_stuck(self, published: int = 0) -> bool:
        """Whether all of them refuse that version, and none has another one to go on with."""
        there = [name for name, r in self.replicas.items() if not (r.gone or r.is_draining)]
        return bool(there) and not self.serving() and set(there) <= set(self.refusing(published))


def _serves(replica: Replica) -> bool:
    return replica.ready and not _is_out(replica)


def _is_out(replica: Replica) -> bool:
    return replica.lost or replica.is_joining or replica.is_draining


class Load:
    """The requests under way at every replica, by session: who releases twice, or after a loss, changes nothing."""

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
        """The replica is lost or taken away. Returns how many requests it had."""
        return self._at.pop(name, Counter()).total()

    def count(self, name: str) -> int:
        return self._at.get(name, Counter()).total()
