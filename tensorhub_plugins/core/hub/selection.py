"""Which source a reader is given. PURE: questions and answers, and no question changes anything.

For each candidate, in the order of its cost (candidates.py), the first rule of `Question.judge` that applies gives the
verdict. `UplinkBudget` counts what crosses into a data centre: a lease is counted when it is granted, and a model
is recorded as waiting after the decision, see `reading.Reading`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec

from tensorhub_plugins.core.hub.candidates import Choice, Verdict
from tensorhub_plugins.core.hub.state import Version, Worker
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.types import CHECKPOINT, FAR, ShardKey, distance

Model = tuple[str, str]  # run and model
LEASES_PER_SOURCE_MAX = 4  # of one reader: for a version or two, and their converted layouts
KEPT_FOR_THE_RUN = 4  # one in so many of a source's slots, for workers that have the run's secret


class Question(msgspec.Struct, frozen=True):
    """A request for the source of one shard for one reader, and what the rules look at."""

    reader: Worker
    acquire: m.Acquire
    key: ShardKey
    workers: Mapping[bytes, Worker]
    uplink: UplinkBudget
    readers_per_source_max: int

    def judge(self, session: bytes, far: int) -> Verdict:
        """Return the verdict on this source, at this distance from the reader: that of the first rule that applies."""
        source, reader, acquire = self.workers[session], self.reader, self.acquire
        # One that it excludes for good, or one that it reads from already.
        if session in acquire.exclude or session in acquire.beside:
            return Verdict.NEVER
        # The reader itself: a copy that the hub has asked it to hold may be the last one when its user wants it.
        if source is reader:
            return Verdict.LAST_RESORT if self._has_read(reader) else Verdict.NEVER
        # A source that still reads, and so depends on the reader, over any number of steps: rule 3.
        if not self.is_complete(source) and reads_from(source, reader, self.workers):
            return Verdict.NEVER
        # None but an idle source that has the whole shard will do where the reader has fast enough ones.
        is_for_idle = bool(acquire.beside) and not acquire.urgent
        if is_for_idle and (source.readers or not self.is_complete(source)):
            return Verdict.NEVER
        # Across the WAN, while the reader has a nearby source, or no slow one.
        if far == FAR and (is_for_idle or self._has_nearby_source()):
            return Verdict.NEVER
        # As many leases cross into the reader's data centre as may: rule 7.
        if far == FAR and not self.uplink.has_room(reader.hello.location.data_center, reader.history.id):
            return Verdict.UPLINK_FULL
        # One more reader would make all of them slow; or this reader has its share of the source's slots.
        if len(source.readers) >= self.readers_per_source_max:
            return Verdict.FULL
        if reader.sources.get(session, 0) >= LEASES_PER_SOURCE_MAX:
            return Verdict.FULL
        if reader.role == "reader":  # readers' keys, which can open any number of sessions, may not have all slots
            taken = sum(lease.reader.role == "reader" for lease in source.readers.values())
            if taken >= self.readers_per_source_max - self.readers_per_source_max // KEPT_FOR_THE_RUN:
                return Verdict.FULL
        # It failed this reader, or failed another one and has not been heard since.
        return Verdict.LAST_RESORT if session in acquire.avoid or source.suspect else Verdict.GOOD

    def is_complete(self, source: Worker) -> bool:
        """Return whether this source has the whole shard."""
        held = source.holdings.get(self.key)
        return held is not None and held.complete

    def _has_read(self, reader: Worker) -> bool:
        """Return whether the reader offers a whole copy that it has read, and not published."""
        was_read = self.is_complete(reader) and reader.holdings[self.key].origin == "replicated"
        return was_read and self.key.layout == CHECKPOINT

    def _has_nearby_source(self) -> bool:
        known = [self.workers[session].hello.location for session in self.acquire.beside if session in self.workers]
        return any(distance(self.reader.hello.location, location) < FAR for location in known)


def choose(question: Question, version: Version) -> Choice:
    """Return the best source of this shard for this reader."""
    sources = version.sources.get(question.key)
    if sources is None:
        return Choice(None)
    return sources.best(question.reader.hello.location, question.judge)


def reads_from(worker: Worker, reader: Worker, workers: Mapping[bytes, Worker]) -> bool:
    """Return whether worker's own reading depends on reader, over any number of steps, as far as the hub can see.

    A source that has not sent its Hello since the hub's restart may depend on any reader."""
    if not reader.readers and not reader.history.leases_on_unknown_sources:
        return False
    seen: set[bytes] = set()
    todo = [worker]
    while todo:
        for lease in todo.pop().leases.values():
            for session in lease.sources.values():
                if session == reader.session:
                    return True
                source = workers.get(session)
                if source is None:
                    return True
                if session not in seen:
                    seen.add(session)
                    todo.append(source)
    return False


# --- what crosses between data centres ---


class UplinkBudget:
    """Leases that cross into each data centre, by model; in equal shares when several models want to cross."""

    def __init__(self, readers_max: int) -> None:
        self._readers_max = readers_max
        self._crossing: dict[str, Counter[Model]] = {}
        self._waiting: dict[str, dict[Model, None]] = {}

    def has_room(self, data_center: str, model: Model) -> bool:
        """Return whether one more lease of this model may cross into the data centre."""
        crossing = self._crossing.get(data_center)
        used, used_by_model = (crossing.total(), crossing[model]) if crossing else (0, 0)
        others = sum(waiting != model for waiting in self._waiting.get(data_center, ()))
        share = max(1, self._readers_max // (1 + others))
        return used < self._readers_max and used_by_model < share

    def wait(self, data_center: str, model: Model) -> None:
        """Note that a reader of this model found the uplink full: other models then leave it its share."""
        self._waiting.setdefault(data_center, {})[model] = None

    def reserve(self, data_center: str, model: Model) -> None:
        """Count a lease of this model that crosses into the data centre from now on."""
        self._crossing.setdefault(data_center, Counter())[model] += 1

    def release(self, data_center: str, model: Model) -> list[Model]:
        """Count a lease that has ended; return the models that are to try again."""
        crossing = self._crossing.get(data_center, Counter())
        crossing[model] -= 1
        if crossing[model] <= 0:  # below: a worker has sent a Hello from another location
            del crossing[model]
        if not crossing:
            self._crossing.pop(data_center, None)
        return list(self._waiting.pop(data_center, {}))

    def total(self) -> int:
        """Return the number of leases that cross, into any data centre."""
        return sum(crossing.total() for crossing in self._crossing.values())

    def validate(self) -> None:
        """Assert its invariants. For tests."""
        for data_center, crossing in self._crossing.items():
            if min(crossing.values(), default=1) <= 0:
                raise AssertionError(data_center)
