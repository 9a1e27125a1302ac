"""What the hub measures, for Prometheus: a figure for each way in which a run can stand still. PURE.

docs/metrics.md has all of them, with what to look for. The labels are a run's and a model's names, never a worker's:
`tensorhub status` names the workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Literal, NamedTuple, TypeAlias

from tensorhub_plugins.core.hub import unreached
from tensorhub_plugins.core.hub.registry import Registry
from tensorhub_plugins.core.hub.state import History, Worker
from tensorhub_plugins.core.types import attempt_of, step_of, steps_behind

MODELS_MAX = 100  # each is about twenty series; those with a trainer come first
SILENT_HEARTBEATS = 5

Labels: TypeAlias = tuple[tuple[str, str], ...]
Kind: TypeAlias = Literal["gauge", "counter"]


class Metric(NamedTuple):
    """A figure of Prometheus: its name, kind and help text, and a value for each set of labels."""

    name: str
    kind: Kind
    help: str
    values: list[tuple[Labels, float]]


class _Tally:
    """One model, as it is now: counted in one pass, as there may be thousands of workers."""

    def __init__(self, registry: Registry, history: History, now: float) -> None:
        """Count its workers."""
        self.history, self.now, self.newest = history, now, history.newest_visible
        self.trainers = self.silent = self.refusing = self.transfers = self.retained_bytes = 0
        self.followers = self.behind = self.lag_max = 0
        self.install_age_s_max = 0.0
        silent_s = SILENT_HEARTBEATS * registry.limits.heartbeat_s
        for worker in history.workers.values():
            self.trainers += worker.published_size_bytes > 0
            self.silent += now - worker.last_heard > silent_s
            self.refusing += bool(worker.refusal[0])
            self.transfers += len(worker.leases)
            self.retained_bytes += sum(h.size_bytes for h in worker.holdings.values() if h.must_retain)
            if worker.installed is not None:
                self._add_follower(worker, worker.installed)

    def _add_follower(self, worker: Worker, installed: int) -> None:
        """Count a follower; one that has installed nothing yet is behind by all steps."""
        lag = steps_behind(installed, self.newest) if installed else step_of(self.newest)
        self.followers += 1
        self.lag_max = max(self.lag_max, lag)
        if lag > 0:
            self.behind += 1
            self.install_age_s_max = max(self.install_age_s_max, self.now - worker.installed_at)

    @property
    def whole_replicas(self) -> int:
        newest = self.history.versions.get(self.newest)
        return 0 if newest is None else newest.copies.whole_replicas()


OF_MODELS: tuple[tuple[str, Kind, str, Callable[[_Tally], float]], ...] = (
    ("newest_step", "gauge", "step of the newest version", lambda m: step_of(m.newest)),
    ("newest_attempt", "gauge", "attempt of the newest version", lambda m: attempt_of(m.newest)),
    (
        "newest_age_seconds",
        "gauge",
        "seconds since the newest version was published; 0 before the first one",
        lambda m: m.now - m.history.newest_at if m.newest else 0.0,
    ),
    (
        "newest_replicas",
        "gauge",
        "replicas of which each has all of the newest version, trainers included",
        lambda m: m.whole_replicas,
    ),
    (
        "missing_copies",
        "gauge",
        "versions with fewer copies, or in fewer hosts, than asked for",
        lambda m: sum(bool(missing.why) for missing in m.history.missing.values()),
    ),
    ("trainers", "gauge", "workers that have published, and hold it", lambda m: m.trainers),
    ("workers", "gauge", "workers that are connected, trainers included", lambda m: len(m.history.workers)),
    ("silent_workers", "gauge", "workers that were not heard for five heartbeats", lambda m: m.silent),
    ("followers", "gauge", "replicas that ask for the newest version", lambda m: m.followers),
    ("followers_behind", "gauge", "followers that have not installed the newest version", lambda m: m.behind),
    (
        "follower_lag_steps_max",
        "gauge",
        "steps by which the last follower is behind the newest version",
        lambda m: m.lag_max,
    ),
    (
        "follower_install_age_seconds_max",
        "gauge",
        "longest time since a follower that is behind has installed anything",
        lambda m: m.install_age_s_max,
    ),
    ("followers_refusing", "gauge", "workers that cannot install a version newer than theirs", lambda m: m.refusing),
    ("pinned", "gauge", "1 while all followers are held at one version", lambda m: bool(m.history.directive.pin)),
    ("withdrawn_versions", "gauge", "versions that were withdrawn", lambda m: len(m.history.withdrawn)),
    ("transfers", "gauge", "reads that are going on, each of one worker", lambda m: m.transfers),
    (
        "waiting_requests",
        "gauge",
        "requests without an answer yet: of followers, and of readers without a source",
        lambda m: len(m.history.waiting),
    ),
    ("published_bytes", "gauge", "bytes that trainers hold published", lambda m: m.history.published_size_bytes),
    ("retained_bytes", "gauge", "bytes of last copies, which their holders would free", lambda m: m.retained_bytes),
    (
        "unreached_sources",
        "gauge",
        "workers to which another one cannot connect",
        lambda m: len(unreached.readers_of(m.history)),
    ),
    (
        "corrupt_segments_total",
        "counter",
        "segments that arrived with other bytes than were published",
        lambda m: m.history.corrupt_segments,
    ),
)


def metrics(registry: Registry, now: float) -> Iterator[Metric]:
    """Yield all figures, as they are now."""
    histories = sorted(registry.histories.values(), key=lambda history: not history.published_size_bytes)
    tallies = [_Tally(registry, history, now) for history in islice(histories, MODELS_MAX)]
    for name, kind, text, value in OF_MODELS:
        values = [(_labels(tally.history), float(value(tally))) for tally in tallies]
        yield Metric(f"tensorhub_{name}", kind, text, values)
    of_hub = (
        ("hub_up_seconds", "seconds since the hub has started", now - registry.started),
        ("hub_sessions", "workers, followers and commands that are connected", len(registry.workers)),
        ("hub_models", "models of all runs", len(histories)),
    )
    for name, text, number in of_hub:
        yield hub_figure(f"tensorhub_{name}", text, number)


def hub_figure(name: str, text: str, value: float) -> Metric:
    """Return a gauge of the hub itself."""
    return Metric(name, "gauge", text, [((), float(value))])


def _labels(history: History) -> Labels:
    return ("run", history.run), ("model", history.model)
