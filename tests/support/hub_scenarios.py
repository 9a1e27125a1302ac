"""A hub and its workers as a story: what workers send, what it answers. Its state is validated after every event."""

from __future__ import annotations

from tensorhub_plugins.core.hub.hub import Event, Hub, Received, Tick
from tensorhub_plugins.core.hub.limits import HubLimits
from tensorhub_plugins.core.hub.outbox import Log
from tensorhub_plugins.core.hub.report import validate
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.types import CHECKPOINT, Location, Role, ShardKey

RUNTIME = "runtime:f"
LIMITS = HubLimits()


class Scenario:
    """A hub and its workers, named like "rollout-0/1" (replica/shard); answers come back as lines of text."""

    def __init__(self, *, recovering: bool = False, limits: HubLimits = LIMITS, secret: bool = False) -> None:
        self.hub = Hub(b"H" * 16, 0.0, limits, b"key" if secret else b"")
        self.now = 0.0 if recovering else limits.grace_s + 1.0
        self.sessions: dict[str, bytes] = {}
        self.requests: dict[str, int] = {}
        self.inbox: dict[str, list[m.HubMessage]] = {}
        self.logged: list[str] = []
        self.warned: list[str] = []  # of them, what people have to mend
        self.roles: dict[str, Role] = {}  # of workers that are no publishers

    def join(self, worker: str, shard_count: int = 1, *, location: Location | None = None, **hello: object) -> None:
        replica, shard = worker.rsplit("/", 1)
        session = self.sessions.setdefault(worker, worker.encode().ljust(16, b"."))
        greeting = m.Hello(
            "run", "actor", replica, int(shard), shard_count, location or Location(), {"tcp": worker[-256:]}, **hello
        )
        self._deliver(Received(session, greeting, self.roles.get(worker, "publisher")))

    def join_all(self, *workers: str, shard_count: int = 1) -> None:
        for worker in workers:
            self.join(worker, shard_count)

    def say(self, worker: str, message: type, **fields: object) -> int:
        number = self.requests[worker] = self.requests.get(worker, 0) + 1
        self.tell(worker, message(request_id=number, **fields))
        return number

    def tell(self, worker: str, message: m.ClientMessage) -> None:
        self._deliver(Received(self.sessions[worker], message, self.roles.get(worker, "publisher")))

    def wait(self, seconds: float) -> None:
        """Time passes; the workers that are not silent send heartbeats."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.5)
            self._deliver(Tick())
            for worker, session in self.sessions.items():
                if session in self.hub.registry.workers and worker not in self.silent:
                    self.hub.registry.workers[session].hear(self.now)

    silent: tuple[str, ...] = ()

    def beat(self, worker: str, **heartbeat: object) -> None:
        """Send a heartbeat that agrees with the hub on everything that the worker holds and reads."""
        leases = {number: len(x.sources) for number, x in self.hub.workers[self.sessions[worker]].leases.items()}
        self.tell(worker, m.Heartbeat(self.hub.session, self.requests.get(worker, 0), leases=leases, **heartbeat))

    def publish(self, worker: str, version: int, layout: str = CHECKPOINT, **holding: object) -> None:
        record = self.hub.registry.workers[self.sessions[worker]].hello
        key = ShardKey(version, layout, record.shard, record.shard_count)
        of = {"root": f"{version}{layout}{record.shard}".encode()[:16].ljust(16, b"-"), "size_bytes": 100, **holding}
        self.say(worker, m.Publish, holding=m.Holding(key, **of))

    def acquire(self, worker: str, version: int = 0, layouts: tuple[str, ...] = (CHECKPOINT,), **more: object) -> int:
        fields: dict[str, object] = {"at_least": 0, "timeout_s": 60.0, **more}
        return self.say(worker, m.Acquire, version=version, layouts=layouts, **fields)

    def unpublish(self, worker: str, version: int, layout: str = CHECKPOINT, timeout_s: float = 30.0) -> int:
        record = self.hub.registry.workers[self.sessions[worker]].hello
        key = ShardKey(version, layout, record.shard, record.shard_count)
        return self.say(worker, m.Unpublish, keys=(key,), timeout_s=timeout_s)

    def heard(self, worker: str) -> list[str]:
        """Return what this worker has received since the last call, as text."""
        return [_text(message) for message in self.inbox.pop(worker, []) if not isinstance(message, m.Welcome | m.Done)]

    def _deliver(self, event: Event) -> None:
        for effect in self.hub.handle(event, self.now):
            if isinstance(effect, Log):
                self.logged.append(effect.text)
                self.warned += [effect.text] if effect.is_warning else []
            else:
                m.decode_from_hub(m.encode(effect.message))  # whatever the hub says can be read
                name = next(w for w, s in self.sessions.items() if s == effect.session)
                self.inbox.setdefault(name, []).append(effect.message)
        validate(self.hub.registry)


def _text(message: m.HubMessage) -> str:
    match message:
        case m.Granted(_, version, layout, _, grants, claim):
            sources = " ".join(f"{g.shard}<-{g.worker}" for g in grants)
            return f"read {version} {layout} {sources}" + (" and convert" if claim else "")
        case m.Unpublished(_, cut_off, must_retain):
            return "keep it" if must_retain else f"unpublished{' cut off ' + ' '.join(cut_off) if cut_off else ''}"
        case m.Visible(_, version):
            return f"visible {version}"
        case m.Begun(_, attempt):
            return f"attempt {attempt.number} at {attempt.step}"
        case m.Rivals(_, workers):
            return f"rivals {' '.join(workers)}"
        case m.Refused(_, error, _):
            return f"refused {error}"
        case m.SourceGone(session):
            return f"gone {session.rstrip(b'.').decode()}"
        case m.MayRelease(keys):
            return f"may release {' '.join(str(k.version) for k in keys)}"
        case m.Alive() if message.hold:
            return f"hold {message.hold}"
        case _:
            return type(message).__name__


def source_of(scenario: Scenario, reader: str) -> str:
    (line,) = scenario.heard(reader)
    return line.rsplit("<-", 1)[1]
