"""Who may say Hello under the name of a worker that is here. PURE.

With a secret, a worker that starts again takes its former life's name, and nobody else does. `Hello.job` tells them
apart: what all processes of one job have in common, and those of another one do not.

- Of the same job, with the secret: let in at once. Its former life is given up, and is refused when it comes back.
- Without such a word, of another job (a plain loop that was killed, and started again on this host or another), or with
  a reader's key, whose owners need not trust each other's word: let in once the name has been silent for
  SILENT_HEARTBEATS; refused when its owner is heard meanwhile.
- With a reader's key, but known by that name to a hub before this one, which has proved it (`prove`): let in at once.
  After a restart of the hub a stranger could take the name of a worker that is about to say Hello.
- A reader has no name that a worker with the secret has, and leaves it when one says Hello under it (hub.py).
- Trainers are not given up here, as others may need what they hold: which one counts is decided when they begin
  (beginning.py). One whose name another process has taken, and that goes on, changes nothing any more; without a secret
  the hub only warns of it.
"""

from __future__ import annotations

import hashlib
import hmac

import msgspec

from tensorhub_plugins.core.hub.beginning import is_trainer
from tensorhub_plugins.core.hub.outbox import Outbox
from tensorhub_plugins.core.hub.registry import Registry
from tensorhub_plugins.core.hub.state import Worker
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.types import Role

SILENT_HEARTBEATS = 5  # as many as a client waits for before it says that the hub is away
WAITING_MAX = 1024  # sessions that wait for a name; the oldest begins to wait anew


class Namesakes:
    """lease_key: what all hubs of a run have of its secret. Without one, b"", anybody may be anybody."""

    def __init__(self, registry: Registry, outbox: Outbox, lease_key: bytes) -> None:
        self._lease_key, self._is_on = lease_key, lease_key != b""
        self._registry = registry
        self._outbox = outbox
        self._warned: set[bytes] = set()  # sessions
        self._waiting: dict[bytes, float] = {}  # session -> when it said Hello first

    def problem(self, session: bytes, hello: m.Hello, role: Role, now: float) -> str | None:
        """Why this new session is not let in; "": it has to wait; None: it is let in."""
        others = [other for other in self._others(session, hello) if other.role == role and self._is_on]
        if not others or (hello.mark and all(map(is_trainer, others))):
            self._waiting.pop(session, None)
            return None
        name = f"{hello.replica}/{hello.shard}"
        if hello.welcomed == self._registry.session:  # it was here before
            return _taken(name)
        if hello.job and role != "reader" and all(other.hello.job == hello.job for other in others):
            return None
        if self.has_proved(session, hello) and not any(other.has_proved_name for other in others):
            return None
        since, beat_s = self._waiting.setdefault(session, now), self._registry.limits.heartbeat_s
        while len(self._waiting) > WAITING_MAX:
            del self._waiting[next(iter(self._waiting))]
        if any(other.last_heard > since + beat_s for other in others):
            return (
                f"{name} is here already, and lives in another process: take another replica name, or end that one. "
                "What belongs to one job, has the run's secret, and may take its place, says so: TENSORHUB_JOB, or "
                "Client(job=...)"
            )
        silent_s = SILENT_HEARTBEATS * beat_s
        return "" if any(now <= self._registry.heard_until(other.last_heard, silent_s) for other in others) else None

    def former_lives(self, worker: Worker) -> list[Worker]:
        """Whose name this worker, which was let in, has taken."""
        self._waiting.pop(worker.session, None)
        others = self._others(worker.session, worker.hello) if self._is_on else []
        return [other for other in others if not is_trainer(other)]

    def has_proved(self, session: bytes, hello: m.Hello) -> bool:
        """Return whether a hub has let this session have this name."""
        return self._is_on and hmac.compare_digest(self._proof(session, hello), hello.name_proof)

    def prove(self, worker: Worker, now: float) -> bytes:
        """Return what this worker is to show the next hub; b"": others may still say that its name is theirs."""
        worker.has_proved_name |= self._is_on and not self._registry.recovering(now)
        return self._proof(worker.session, worker.hello) if worker.has_proved_name else b""

    def _proof(self, session: bytes, hello: m.Hello) -> bytes:
        said = msgspec.msgpack.encode(("name", session, hello.run, hello.model, hello.replica, hello.shard))
        return hmac.digest(self._lease_key, said, hashlib.sha256)[:16]

    def taken(self, worker: Worker) -> str | None:
        """Why this worker is not heard as the one that it was; None: it is still that one."""
        others = self._others(worker.session, worker.hello) if worker.is_replaced else []
        if all(other.is_replaced for other in others):
            return None
        if not self._is_on and worker.session not in self._warned:
            self._warned = {worker.session, *(self._warned & self._registry.workers.keys())}
            self._outbox.warn(
                f"two processes publish as {worker.name} in {worker.history.name}, and readers get the versions of "
                "both: end one. Where a trainer calls Client.begin, or the hub has a secret, the other one is refused"
            )
        return _taken(worker.name) if self._is_on else None

    def _others(self, session: bytes, hello: m.Hello) -> list[Worker]:
        """Other processes of this name."""
        history = self._registry.histories.get((hello.run, hello.model))
        if history is None:
            return []
        return [
            other
            for other in history.replicas.get(hello.replica, {}).values()
            if other.hello.shard == hello.shard
            and other.session != session
            and not (hello.process and hello.process == other.hello.process)
        ]


def _taken(name: str) -> str:
    return f"another process has said Hello as {name} since, and is that worker now: end this one"


def without_records(hello: m.Hello) -> m.Hello:
    """Return the part of a Hello that is kept as it was said: the rest is in the registry, or over."""
    return msgspec.structs.replace(hello, holdings=(), leases=(), claims=(), directive=m.NO_DIRECTIVE)


def is_same(hello: m.Hello, other: m.Hello) -> bool:
    """Return whether both come from one worker at one place, which the indexes and signed leases rely on."""
    names = ("run", "model", "replica", "shard", "shard_count", "location", "endpoints", "job")
    return all(getattr(hello, name) == getattr(other, name) for name in names)
