"""Which session may send Hello under the name of a worker that is known already. PURE.

With a secret, only the next incarnation of a worker takes its name. `Hello.job` distinguishes it from other processes:
all processes of one job have it in common, and those of another job have not.

- Of the same job, with the secret: admitted at once. Its former incarnation is removed, and refused when it comes back.
- Without a job, of another job (a plain loop that was killed, and started again on this host or another), or with
  a reader's key, whose owners need not trust each other: admitted once the name has been silent for
  SILENT_HEARTBEATS; refused when its owner is heard meanwhile.
- With a reader's key, but known by that name to a previous hub, which has signed it (`prove`): admitted at once.
  After a restart of the hub a stranger could take the name of a worker that is about to send Hello.
- A reader cannot have the name of a worker with the secret, and loses it when one sends Hello under it (hub.py).
- Trainers are not removed here, as others may need what they hold: which one counts is decided when they begin
  (attempts.py). One whose name another process has taken, and that goes on, changes nothing any more; without a secret
  the hub only warns of it.
"""

from __future__ import annotations

import hashlib
import hmac

import msgspec

from tensorhub_plugins.core.hub.attempts import is_trainer
from tensorhub_plugins.core.hub.candidates import the_same
from tensorhub_plugins.core.hub.outbox import Outbox
from tensorhub_plugins.core.hub.registry import Registry
from tensorhub_plugins.core.hub.state import Worker
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.protocol.directive import NO_DIRECTIVE
from tensorhub_plugins.core.types import Role

SILENT_HEARTBEATS = 5  # as many as a client waits for before it reports that the hub is away
WAITING_MAX = 1024  # sessions that wait for a name; beyond that the oldest begins to wait anew


class Namesakes:
    """The check of names. lease_key: from the run's secret, in all its hubs; b"": any process may take any name."""

    def __init__(self, registry: Registry, outbox: Outbox, lease_key: bytes) -> None:
        self._lease_key, self._is_on = lease_key, lease_key != b""
        self._registry, self._outbox = registry, outbox
        self._warned: set[bytes] = set()  # sessions
        self._waiting: dict[bytes, float] = {}  # session -> when its first Hello came

    def problem(self, session: bytes, hello: m.Hello, role: Role, now: float) -> str | None:
        """Return why this new session is not admitted; "": it has to wait; None: it is admitted."""
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
        ends = (self._registry.silent_after(o.last_heard, SILENT_HEARTBEATS * o.beat_s) for o in others)
        return "" if any(now <= silent for silent in ends) else None

    def former_lives(self, worker: Worker) -> list[Worker]:
        """Return the earlier incarnations whose name this worker, which was admitted, has taken."""
        self._waiting.pop(worker.session, None)
        others = self._others(worker.session, worker.hello) if self._is_on else []
        return [other for other in others if not is_trainer(other)]

    def has_proved(self, session: bytes, hello: m.Hello) -> bool:
        """Return whether a hub has admitted this session under this name."""
        return self._is_on and hmac.compare_digest(self._proof(session, hello), hello.name_proof)

    def prove(self, worker: Worker, now: float) -> bytes:
        """Return the proof to show to the next hub; b"": others may still claim this name."""
        worker.has_proved_name |= self._is_on and not self._registry.recovering(now)
        return self._proof(worker.session, worker.hello) if worker.has_proved_name else b""

    def _proof(self, session: bytes, hello: m.Hello) -> bytes:
        said = msgspec.msgpack.encode(("name", session, hello.run, hello.model, hello.replica, hello.shard))
        return hmac.digest(self._lease_key, said, hashlib.sha256)[:16]

    def taken(self, worker: Worker) -> str | None:
        """Return why a worker that was replaced has lost its name to another one; None: it still has it."""
        if all(other.is_replaced for other in self._others(worker.session, worker.hello)):
            return None
        if not self._is_on and worker.session not in self._warned:
            self._warned = {worker.session, *(self._warned & self._registry.workers.keys())}
            self._outbox.warn(
                f"two processes publish as {worker.name} in {worker.history.name}, and readers get the versions of "
                "both: end one. Where a trainer calls Client.begin, or the hub has a secret, the other one is refused"
            )
        return _taken(worker.name) if self._is_on else None

    def _others(self, session: bytes, hello: m.Hello) -> list[Worker]:
        """Return the other processes of this name."""
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
    """Return the part of a Hello that is kept as it was sent, with words that others have sent as the same objects: the
    rest is in the registry, or over."""
    return msgspec.structs.replace(
        hello,
        run=the_same(hello.run),
        model=the_same(hello.model),
        replica=the_same(hello.replica),
        location=the_same(hello.location),
        holdings=(),
        leases=(),
        claims=(),
        directive=NO_DIRECTIVE,
    )


def is_same(hello: m.Hello, other: m.Hello) -> bool:
    """Return whether both come from one worker at one location, which the indexes and signed leases rely on."""
    names = ("run", "model", "replica", "shard", "shard_count", "location", "endpoints", "job")
    return all(getattr(hello, name) == getattr(other, name) for name in names)
