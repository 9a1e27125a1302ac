"""What the hub measures, for Prometheus: a figure for each way in which a run can stand still. PURE.

docs/metrics.md has all of them, with what to look for. The labels are a run's and a model's names, never a worker's:
`tensorhub status` names the workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple, TypeAlias

from tensorhub_plugins.core.hub import standing, unreached
from tensorhub_plugins.core.hub.registry import Registry
from tensorhub_plugins.core.hub.state import History
from tensorhub_plugins.core.types import COMPILED, attempt_of, step_of

MODELS_MAX = 100  # each is about twenty series; those with a trainer come first, what engines compile last

Labels: TypeAlias = tuple[tuple[str, str], ...]


class Metric(NamedTuple):
    """A figure of Prometheus: its name, help text, and a value for each set of labels."""

    name: str
    help: str
    values: list[tuple[Labels, float]]

    @property
    def is_counter(self) -> bool:
        """Return whether it only grows, as Prometheus has it in the name; else it is a gauge."""
        return self.name.endswith("_total")


class _Tally:
    """One model, as it is now: counted in one pass, as there may be thousands of workers."""

    def __init__(self, registry: Registry, history: History, now: float) -> None:
        self.history, self.now, self.newest = history, now, history.newest_visible
        self.trainers = self.silent = self.lacking = self.refusing = self.failing = 0
        self.transfers = self.retained_bytes = 0
        self.followers = self.behind = self.lag_max = 0
        self.behind_s_max = self.install_age_s_max = 0.0
        self.room_min = min((worker.room_bytes for worker in history.workers.values() if worker.holdings), default=0)
        for worker in history.workers.values():
            self.trainers += worker.published_size_bytes > 0
            self.silent += standing.is_silent(worker, now)
            self.lacking += bool(worker.lacks)
            self.refusing += bool(standing.refusal_of(worker)[0])
            self.failing += bool(worker.failure)
            self.transfers += len(worker.leases)
            self.retained_bytes += sum(h.size_bytes for h in worker.holdings.values() if h.must_retain)
            if (lag := standing.lag_of(worker, now)) is not None:
                self.followers += 1
                self.behind += lag.steps > 0
                self.lag_max, self.behind_s_max = max(self.lag_max, lag.steps), max(self.behind_s_max, lag.behind_s)
                if lag.steps and worker.installed != history.directive.pin:
                    self.install_age_s_max = max(self.install_age_s_max, now - worker.installed_at)


OF_MODELS: tuple[tuple[str, str, Callable[[_Tally], float]], ...] = (
    ("newest_step", "step of the newest version", lambda m: step_of(m.newest)),
    ("newest_attempt", "attempt of the newest version", lambda m: attempt_of(m.newest)),
    (
        "newest_age_seconds",
        "seconds since the newest version was published; 0 before the first one",
        lambda m: standing.newest_age_s(m.history, m.now),
    ),
    ("newest_replicas", "replicas that have all of the newest version", lambda m: standing.newest_replicas(m.history)),
    (
        "missing_copies",
        "versions with fewer copies, or in fewer hosts, than asked for",
        lambda m: sum(bool(missing.why) for missing in m.history.missing.values()),
    ),
    ("trainers", "workers that have published, and hold it", lambda m: m.trainers),
    ("workers", "workers that are connected, trainers included", lambda m: len(m.history.workers)),
    ("silent_workers", "workers that were not heard for five heartbeats", lambda m: m.silent),
    (
        "lost_workers",
        "workers that were declared dead in the last ten minutes, and have not come back",
        lambda m: len(standing.lost(m.history, m.now)),
    ),
    (
        "lacking_workers",
        "workers that the system has refused memory, threads, files or space on a disk, or that offered more than "
        "their budget, in the last ten minutes",
        lambda m: m.lacking,
    ),
    ("followers", "replicas that ask for the newest version", lambda m: m.followers),
    ("followers_behind", "followers that have not installed the newest version", lambda m: m.behind),
    ("follower_lag_steps_max", "steps by which the last follower is behind the newest version", lambda m: m.lag_max),
    (
        "follower_install_age_seconds_max",
        "longest time since a follower that is behind has installed anything; those that run the pinned version apart",
        lambda m: m.install_age_s_max,
    ),
    (
        "follower_behind_seconds_max",
        "longest time for which a follower has not installed any of the newer versions that there are",
        lambda m: m.behind_s_max,
    ),
    ("followers_refusing", "workers that cannot install a version newer than theirs", lambda m: m.refusing),
    ("followers_failing", "followers whose last try to install a version has failed", lambda m: m.failing),
    ("pinned", "1 while all followers are held at one version", lambda m: bool(m.history.directive.pin)),
    ("withdrawn_versions", "versions that were withdrawn", lambda m: len(m.history.withdrawn)),
    ("transfers", "reads that are going on, each of one worker", lambda m: m.transfers),
    (
        "waiting_requests",
        "requests without an answer yet: of followers, and of readers without a source",
        lambda m: len(m.history.waiting),
    ),
    ("published_bytes", "bytes that trainers hold published", lambda m: m.history.published_size_bytes),
    ("over_budget", "1 while these are more than --published-bytes-max", lambda m: m.history.is_over_budget),
    ("room_bytes_min", "least bytes that a holder's budget and host have left for more", lambda m: m.room_min),
    ("retained_bytes", "bytes of last copies, which their holders would free", lambda m: m.retained_bytes),
    (
        "unreached_sources",
        "workers to which another one cannot connect",
        lambda m: len(unreached.readers_of(m.history)),
    ),
    (
        "corrupt_segments_total",
        "segments that arrived with other bytes than were published",
        lambda m: m.history.corrupt_segments,
    ),
    ("wire_bytes_total", "bytes that were sent for what was read", lambda m: m.history.wire_bytes),
)


def metrics(registry: Registry, now: float) -> Iterator[Metric]:
    """Yield all figures, as they are now."""
    histories = sorted(registry.histories.values(), key=lambda h: (COMPILED in h.model, not h.published_size_bytes))
    tallies = [_Tally(registry, history, now) for history in islice(histories, MODELS_MAX)]
    for name, text, value in OF_MODELS:
        values = [(_labels(tally.history), float(value(tally))) for tally in tallies]
        yield Metric(f"tensorhub_{name}", text, values)
    read = [
        ((*_labels(tally.history), ("distance", way.split()[0]), ("transport", way.split()[1])), float(size_bytes))
        for tally in tallies
        for way, size_bytes in sorted(tally.history.read_bytes.items())
    ]
    yield Metric("tensorhub_read_bytes_total", "bytes that workers have read, when the read has ended", read)
    of_hub = (
        ("hub_up_seconds", "seconds since the hub has started", now - registry.started),
        ("hub_sessions", "workers, followers and commands that are connected", len(registry.workers)),
        ("hub_models", "models of all runs", len(histories)),
    )
    for name, text, number in of_hub:
        yield hub_figure(f"tensorhub_{name}", text, number)


def hub_figure(name: str, text: str, value: float) -> Metric:
    """Return a gauge of the hub itself."""
    return Metric(name, text, [((), float(value))])


def _labels(history: History) -> Labels:
    return ("run", history.run), ("model", history.model)
