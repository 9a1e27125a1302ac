"""Copies in several failure domains (rule 4): which are needed, and which worker is asked to make a missing one. PURE.

`retain(domains=2)` keeps every retained version in that many hosts (racks, data centres). A copy counts while its
worker is neither preemptible nor leaving. Readers bring copies anyway, so the hub waits a little; then it asks one
worker of another domain that has free memory to read the checkpoint layout and to hold it (`Alive.hold`). That worker
reads it as any reader does, serves it, and unpublishes it at once: the hub answers that it must be retained, as for
every last copy of a domain, and sends MayRelease when it is not needed any more. When a worker leaves (`hand_over`),
its last copies are made elsewhere in the same way, even with one domain.

Only the checkpoint layout is copied: every worker can read it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tensorhub_plugins.core.hub.outbox import Outbox
from tensorhub_plugins.core.hub.registry import Registry
from tensorhub_plugins.core.hub.state import History, Holding, Missing, Version, Worker
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.types import CHECKPOINT, domain, version_text

LOOK_EVERY_S = 1.0
PATIENCE_S = 3.0  # before a copy is asked for: engines that read the version anyway often bring it
PATIENCE_BEATS = 3  # or so many heartbeats, where workers report more often than once a second
BEGIN_S = 10.0  # a worker that was asked has begun to read by then, or another one is asked
COPY_S = 600.0  # and has read it by then: a client's own limit for such reads; a malicious one might read for ever
TRIED_MAX = 4  # versions for which all workers are checked, each time
AGAIN_S = 60.0  # before a worker that did not read it is asked once more
NAMED_MAX = 3  # workers that a log line names

Domain = tuple[str, ...]
WORDS = {"host": "hosts", "rack": "racks", "data_center": "data centres"}


def is_safe(worker: Worker) -> bool:
    """Return whether what this worker holds counts as safe: it is not known to be about to leave."""
    return not (worker.hello.preemptible or worker.is_leaving)


def needs_its_domain(holding: Holding) -> bool:
    """Return whether this copy is in one of the wanted failure domains, and no other safe copy is there."""
    worker, key = holding.worker, holding.key
    history = worker.history
    version = history.versions[key.version]
    if worker.hello.preemptible or (key.layout != CHECKPOINT and version.copies.has_whole(CHECKPOINT)):
        return False
    across = history.retain_across
    others = [o for o in version.holders(key).values() if o.worker is not worker and o.counted.stays]
    safe = {domain(o.worker.hello.location, across) for o in others if is_safe(o.worker)}
    return len(safe) < history.retain_domains and domain(worker.hello.location, across) not in safe


@dataclass
class Spread:
    """Where one version's shards are safe, for the shard count of its checkpoint layout that is in the most domains."""

    shard_count: int
    size_bytes: int
    domains: int  # the number of domains that each have every shard
    holders: list[Worker]
    alone: set[bytes] = field(default_factory=set)  # the holders without which a shard has no source
    short: int = 0  # shards that are in too few domains
    present: Counter[Domain] = field(default_factory=Counter)  # how many of the short shards are in this domain
    on_the_way: set[Domain] = field(default_factory=set)  # domains where a worker reads it, or was just asked to

    def lacks(self, place: Domain) -> bool:
        """Return whether a copy there helps."""
        return self.present[place] < self.short


class FailureDomains:
    """The part of the hub that keeps retained versions in as many failure domains as are wanted."""

    def __init__(self, registry: Registry, outbox: Outbox) -> None:
        self._registry, self._outbox = registry, outbox

    def look(self, history: History, now: float) -> None:
        """Find what lacks a copy and ask for it. Called at every heartbeat; effective once a second, or once a beat."""
        every_s = min(LOOK_EVERY_S, self._registry.limits.heartbeat_s)
        if now < history.looked_at + every_s or self._registry.recovering(now):
            return
        history.looked_at = now
        found = {number: self._short(history, number) for number in sorted(history.retained())}
        for number in [n for n in history.missing if found.get(n) is None]:
            del history.missing[number]
        short = {number: spread for number, spread in found.items() if spread is not None}
        for number in short:
            missing = history.missing.setdefault(number, Missing(now))
            missing.asked = {s: at for s, at in missing.asked.items() if s in history.workers}
        promised = _promised_bytes(history, now)
        untried = [n for n, spread in short.items() if self._lacks(history, n, spread, now)]
        # The newest first, a few at a time and all in turn: there may be a thousand, and thousands of workers.
        for number in sorted(untried, key=lambda n: (history.missing[n].tried_at, -n))[:TRIED_MAX]:
            history.missing[number].tried_at = now
            history.missing[number].why = self._ask(history, number, short[number], promised, now)
        self._say_once(history)

    def _short(self, history: History, number: int) -> Spread | None:
        """Return where this version is safe; None: it is in enough domains."""
        version, wanted = history.versions[number], history.retain_domains
        holders = (h for shards in version.holdings.values() for held in shards.values() for h in held.values())
        if wanted == 1 and not any(h.worker.is_leaving for h in holders if h.counted.stays):
            return None
        spreads = [
            _spread(history, version, count, wanted)
            for layout, count in version.layouts()
            if layout == CHECKPOINT and len(version.holdings[layout, count]) == count
        ]
        best = max(spreads, key=lambda spread: spread.domains, default=Spread(1, 0, 0, []))
        return best if best.domains < wanted else None

    def _lacks(self, history: History, number: int, spread: Spread, now: float) -> bool:
        """Return whether a worker has to be asked: the copies on their way do not suffice, and were waited for."""
        missing, across = history.missing[number], history.retain_across
        coming = [w for w in map(history.workers.__getitem__, missing.asked) if _is_coming(w, number, missing, now)]
        for worker in coming:
            if now > missing.asked[worker.session] and not _reads(worker, number):
                self._outbox.send(worker.session, m.Alive(hold=number))  # the first message may have been lost
        spread.on_the_way = {domain(w.hello.location, across) for w in coming if is_safe(w)}
        is_urgent = any(worker.is_leaving for worker in spread.holders)
        enough = spread.domains + sum(map(spread.lacks, spread.on_the_way)) >= history.retain_domains
        patience_s = min(PATIENCE_S, PATIENCE_BEATS * self._registry.limits.heartbeat_s)
        lacks = not enough and (is_urgent or now >= missing.since + patience_s)
        if coming or not lacks:
            missing.why = ""
        return lacks

    def _ask(self, history: History, number: int, spread: Spread, promised: Counter[bytes], now: float) -> str:
        """Ask a worker for a copy; else return why none can be. promised: bytes of its free memory, by session."""
        if not spread.holders:
            return "no worker holds its checkpoint layout any more, and no other is copied"
        missing, across = history.missing[number], history.retain_across
        near = {holder.hello.location.data_center for holder in spread.holders}
        best: tuple[bool, bool, int, Worker] | None = None
        reasons: list[str] = []
        for worker in history.workers.values():
            place = domain(worker.hello.location, across)
            if not spread.lacks(place) or place in spread.on_the_way:
                continue
            room = worker.room_bytes - promised[worker.session]
            reason = _refusal(worker, room, spread, missing, now)
            if reason:
                reasons.append(reason if len(reasons) >= NAMED_MAX else f"{worker.name} {reason}")
                continue
            is_new = worker.session not in missing.asked  # a worker that was asked before comes after all others
            rank = is_new, worker.hello.location.data_center in near, room
            if best is None or rank > best[:3]:
                best = *rank, worker
        if best is not None:
            worker = best[3]
            missing.asked[worker.session] = now
            promised[worker.session] += spread.size_bytes
            self._outbox.send(worker.session, m.Alive(hold=number))
            self._outbox.log(f"{history.name}: {worker.name} is asked to hold a copy of version {version_text(number)}")
            return ""
        return "" if spread.on_the_way else _no_worker(history, spread, reasons)

    def _say_once(self, history: History) -> None:
        """Warn once that no worker can hold what is short, until all of it was held again."""
        why = next((missing.why for missing in history.missing.values() if missing.why), "")
        was_said, history.is_short = history.is_short, bool(why) or (history.is_short and bool(history.missing))
        if why and not was_said:
            number = next(n for n, missing in history.missing.items() if missing.why)
            self._outbox.warn(f"{history.name}: version {version_text(number)}: {why}")


def _spread(history: History, version: Version, count: int, wanted: int) -> Spread:
    holders: dict[bytes, Worker] = {}
    places: list[set[Domain]] = []
    alone: set[bytes] = set()
    for held in version.holdings[CHECKPOINT, count].values():
        staying = [h.worker for h in held.values() if h.counted.stays]
        alone.update(worker.session for worker in staying if len(staying) == 1)
        holders.update((worker.session, worker) for worker in staying)
        places.append({domain(w.hello.location, history.retain_across) for w in staying if is_safe(w)})
    short = [safe for safe in places if len(safe) < wanted]
    return Spread(
        shard_count=count,
        size_bytes=sum(_sizes(version, count)),
        domains=min(map(len, places)),
        holders=list(holders.values()),
        alone=alone,
        short=len(short),
        present=Counter(place for safe in short for place in safe),
    )


def _sizes(version: Version, count: int | None) -> list[int]:
    """Return the sizes of the shards of its checkpoint layout in so many shards; None: in any number."""
    contents = version.contents.items()
    return [size for (layout, of, _), (_, size) in contents if layout == CHECKPOINT and count in (None, of)]


def _reads(worker: Worker, number: int) -> bool:
    return any(key.version == number for key in worker.reading)


def _is_coming(worker: Worker, number: int, missing: Missing, now: float) -> bool:
    """Return whether the copy that this worker was asked for may still come."""
    since = now - missing.asked[worker.session]
    return since < BEGIN_S or (since < COPY_S and _reads(worker, number))


def _promised_bytes(history: History, now: float) -> Counter[bytes]:
    """Return the bytes, by session, that workers were asked to hold and will take from their reported free memory."""
    promised: Counter[bytes] = Counter()
    for number, missing in history.missing.items():
        size = sum(_sizes(history.versions[number], None))
        for session in missing.asked:
            if _is_coming(history.workers[session], number, missing, now):
                promised[session] += size
    return promised


def _refusal(worker: Worker, room_bytes: int, spread: Spread, missing: Missing, now: float) -> str:
    """Return why this worker is not asked; empty: it can be."""
    if worker.hello.preemptible:
        return "is preemptible"
    if worker.is_leaving or worker.is_replaced or worker.is_zombie:
        return "is leaving"
    if worker.session in spread.alone:
        return "alone has a shard of it"  # which it cannot read from any other worker
    if room_bytes < spread.size_bytes:
        return f"has room for {max(0, room_bytes) / 1e6:.1f} MB"
    if worker.suspect or now < missing.asked.get(worker.session, now - AGAIN_S) + AGAIN_S:
        return "was asked, and has not read it"
    return ""


def _no_worker(history: History, spread: Spread, reasons: list[str]) -> str:
    words = WORDS[history.retain_across]
    named = "; ".join(reasons[:NAMED_MAX]) + (f"; and {len(reasons) - NAMED_MAX} more" * (len(reasons) > NAMED_MAX))
    held = ", ".join(worker.name for worker in spread.holders[:NAMED_MAX])
    return (
        f"is safe in {spread.domains} of {history.retain_domains} {words} (held by {held}), and no other worker can "
        f"hold its {spread.size_bytes / 1e6:.1f} MB: {named or f'there is no worker in further {words}'}"
    )
