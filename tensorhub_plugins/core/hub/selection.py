"""Which source a reader is given. PURE: questions and answers, and no question changes anything.

`RULES` is the table: for each candidate, in the order of its cost (candidates.py), the first rule that applies gives
the verdict. `UplinkBudget` counts what crosses into a data centre: a lease is counted when it is granted, and a model
is recorded as waiting after the decision, see `reading.Reading`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import msgspec

from tensorhub_plugins.core.hub.candidates import Choice, Verdict
from tensorhub_plugins.core.hub.state import Version, Worker
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.types import FAR, ShardKey, distance

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
        """Return the verdict of the rules on this source, at this distance from the reader."""
        source = self.workers[session]
        for applies, verdict in RULES:
            if applies(self, source, far):
                return verdict
        return Verdict.GOOD

    def is_complete(self, source: Worker) -> bool:
        """Return whether this source has the whole shard."""
        held = source.holdings.get(self.key)
        return held is not None and held.complete

    @property
    def is_for_idle(self) -> bool:
        """Return whether the reader has fast enough sources, so that a further one must be idle."""
        return bool(self.acquire.beside) and not self.acquire.urgent


def choose(question: Question, version: Version) -> Choice:
    """Return the best source of this shard for this reader."""
    sources = version.sources.get(question.key)
    if sources is None:
        return Choice(None)
    return sources.best(question.reader.hello.location, question.judge)


# --- the rules ---


def is_excluded(question: Question, source: Worker, far: int) -> bool:
    """Return whether it is the reader itself, one that it excludes for good, or one that it reads from already."""
    acquire = question.acquire
    return source is question.reader or source.session in acquire.exclude or source.session in acquire.beside


def would_close_a_circle(question: Question, source: Worker, far: int) -> bool:
    """Return whether the source still reads and so depends on the reader, over any number of steps (rule 3)."""
    return not question.is_complete(source) and reads_from(source, question.reader, question.workers)


def is_not_idle(question: Question, source: Worker, far: int) -> bool:
    """Return whether only idle sources that have the whole shard will do, and this is none."""
    return question.is_for_idle and (bool(source.readers) or not question.is_complete(source))


def is_far_without_need(question: Question, source: Worker, far: int) -> bool:
    """Return whether it is across the WAN while the reader has a nearby source, or no slow one."""
    return far == FAR and (question.is_for_idle or _has_nearby_source(question))


def uplink_is_full(question: Question, source: Worker, far: int) -> bool:
    """Return whether as many leases cross into the reader's data centre as may (rule 7)."""
    reader = question.reader
    return far == FAR and not question.uplink.has_room(reader.hello.location.data_center, reader.history.id)


def serves_as_many_as_it_may(question: Question, source: Worker, far: int) -> bool:
    """Return whether it has so many readers that one more would make all of them slow."""
    return len(source.readers) >= question.readers_per_source_max


def serves_this_reader_often_enough(question: Question, source: Worker, far: int) -> bool:
    """Return whether this reader has its share of the source's slots."""
    return question.reader.sources.get(source.session, 0) >= LEASES_PER_SOURCE_MAX


def serves_readers_keys_often_enough(question: Question, source: Worker, far: int) -> bool:
    """Return whether readers' keys, which can open any number of sessions, have all slots they may have."""
    if question.reader.role != "reader":
        return False
    taken = sum(lease.reader.role == "reader" for lease in source.readers.values())
    return taken >= question.readers_per_source_max - question.readers_per_source_max // KEPT_FOR_THE_RUN


def has_failed(question: Question, source: Worker, far: int) -> bool:
    """Return whether it failed this reader, or failed another one and has not been heard since."""
    return source.session in question.acquire.avoid or source.suspect


RULES: tuple[tuple[Callable[[Question, Worker, int], bool], Verdict], ...] = (
    (is_excluded, Verdict.NEVER),
    (would_close_a_circle, Verdict.NEVER),
    (is_not_idle, Verdict.NEVER),
    (is_far_without_need, Verdict.NEVER),
    (uplink_is_full, Verdict.UPLINK_FULL),
    (serves_as_many_as_it_may, Verdict.FULL),
    (serves_this_reader_often_enough, Verdict.FULL),
    (serves_readers_keys_often_enough, Verdict.FULL),
    (has_failed, Verdict.LAST_RESORT),
)


def _has_nearby_source(question: Question) -> bool:
    here, workers = question.reader.hello.location, question.workers
    known = [workers[session].hello.location for session in question.acquire.beside if session in workers]
    return any(distance(here, location) < FAR for location in known)


def reads_from(worker: Worker, reader: Worker, workers: Mapping[bytes, Worker]) -> bool:
    """Return whether worker's own reading depends on reader, over any number of steps, as far as the hub can see.

    A source that has not sent its Hello since the hub's restart may depend on any reader.
    """
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
