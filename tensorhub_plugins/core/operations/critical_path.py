"""What a version waited for on its way to the replica that had it last, step by step, by a run's journals. PURE.

The way is followed backwards, from the instant at which that replica had it: whatever ended last before an instant is
what that instant waited for. From a read it goes on at the source if the source did not have the bytes itself: while it
read them, or converted them. It ends where the first trainer rank began to publish. So its steps leave no time
without a name, and shortening any other thing than one of its steps would not have shortened it.

Journals of several hosts are compared by their clocks: what is less than those differ by means nothing.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from tensorhub_plugins.core.options import gigabytes
from tensorhub_plugins.core.types import printable, version_label

Event = Mapping[str, Any]
OF_VERSIONS = ("fetch", "install", "resume")  # what a replica does for a version
ENDS_TOGETHER = 0.1  # of a read: its source had all bytes only in this last part of it
CAUSES_MAX = 5  # lines of the summary
SHORT_S = 0.001  # shorter steps are left out
LONG_S = 3600.0  # what ends so much later is not looked at
SHOWN_MAX = 40  # versions in the text; of more the slowest


class Step(NamedTuple):
    """A time (Unix seconds) in which a version waited for one thing. kind: publish, begin, find, read, serve, hold,
    pause, install or resume. source: the worker that was read from. what: in words, the same of every version. more:
    numbers of this one."""

    began: float
    ended: float
    kind: str
    worker: str
    source: str
    what: str
    more: str = ""

    @property
    def seconds(self) -> float:
        """Return how long it took."""
        return self.ended - self.began


class Path(NamedTuple):
    """The way of a version, from the first rank's begin of its publish to its use at the replica that had it last."""

    version: int
    replica: str
    began: float
    ended: float
    steps: tuple[Step, ...]  # in order, without gaps but for steps that are too short

    @property
    def seconds(self) -> float:
        """Return how long it took."""
        return self.ended - self.began

    def causes(self) -> dict[str, float]:
        """Return the seconds of each thing that it waited for, the most important first."""
        seconds = defaultdict[str, float](float)
        for step in self.steps:
            seconds[step.what] += step.seconds
        return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def began(event: Event) -> float:
    """Return when it began: an event is dated by its end."""
    return float(event["t"]) - seconds_of(event)


def seconds_of(event: Event) -> float:
    """Return its duration; 0 where it has none."""
    seconds = event.get("seconds", 0.0)
    return float(seconds) if isinstance(seconds, (int, float)) and 0 < seconds < float("inf") else 0.0


def replica_of(worker: Any) -> str:
    """Return the replica of a worker ("replica/shard")."""
    return str(worker or "").rpartition("/")[0] or str(worker or "")


def paths(events: Iterable[Event]) -> list[Path]:
    """Return the path of each version that was published and used, in the order of versions."""
    run = _Run(events)
    return [path for version in sorted(run.published) if (path := _path(run, version)) is not None]


class _Run:
    """The events, by what they are looked up by."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.published = defaultdict[int, dict[str, Event]](dict)  # by version and rank, the first time
        self.of = defaultdict[tuple[str, int, str], list[Event]](list)  # by event, version and replica, in order
        self.pauses = defaultdict[str, list[Event]](list)  # by replica
        self.served = dict[tuple[int, str, str], float]()  # by version, worker and layout
        self.replicas = defaultdict[int, set[str]](set)  # that did something for a version
        self.work = defaultdict[str, list[Event]](list)  # by replica: what it did for any version
        self.there_since, self.resumes = dict[str, float](), set[str]()
        for event in sorted(events, key=lambda event: float(event["t"])):
            self._add(event)

    def _add(self, event: Event) -> None:
        name, version, worker = event["event"], event.get("version"), str(event.get("worker") or "")
        replica = replica_of(worker)
        if name not in ("member", "fetch"):  # a replica that has not installed anything was not there to be late
            self.there_since.setdefault(replica, float(event["t"]))
        if name == "pause":
            self.pauses[replica].append(event)
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            return
        if name == "publish":
            self.published[version].setdefault(worker, event)
        elif name == "serve":
            self.served.setdefault((version, worker, str(event.get("layout"))), float(event["t"]))
        elif name in OF_VERSIONS:
            self.of[name, version, replica].append(event)
            self.replicas[version].add(replica)
            self.work[replica].append(event)
            if name == "resume":
                self.resumes.add(replica)

    def last(self, name: str, version: int, replica: str, until: float, worker: str = "") -> Event | None:
        """Return the last of a replica's events that ended by then, or of one of its workers."""
        found = (e for e in reversed(self.of[name, version, replica]) if not worker or e.get("worker") == worker)
        return next((event for event in found if float(event["t"]) <= until + SHORT_S), None)

    def done(self, version: int, replica: str) -> float | None:
        """Return when this replica had the version in use; None: never. Where nothing is paused, when it was there."""
        resumes = self.of["resume", version, replica]
        if resumes or replica in self.resumes:
            return float(resumes[0]["t"]) if resumes else None
        ended = dict[str, float]()  # by worker: the first time
        for event in self.of["install", version, replica] or self.of["fetch", version, replica]:
            ended.setdefault(str(event["worker"]), float(event["t"]))
        return max(ended.values(), default=None)

    def busy_with(self, replica: str, version: int, since: float, until: float) -> int | None:
        """Return the other version for which it did something in most of this time."""
        taken = defaultdict[int, float](float)
        work = self.work[replica]  # by their ends
        for event in work[bisect(work, since, key=lambda event: float(event["t"])) :]:
            if began(event) > until and float(event["t"]) > until + LONG_S:
                break
            if event["version"] != version:
                taken[event["version"]] += max(0.0, min(until, float(event["t"])) - max(since, began(event)))
        return next((other for other in taken if taken[other] > (until - since) / 2), None)


def _path(run: _Run, version: int) -> Path | None:
    ranks = run.published[version]
    visible = max(float(event["t"]) for event in ranks.values())
    done = {replica: at for replica in run.replicas[version] if (at := run.done(version, replica)) is not None}
    done = {name: at for name, at in done.items() if name not in {replica_of(rank) for rank in ranks}}
    there = {name: at for name, at in done.items() if run.there_since.get(name, at) <= visible}
    if not done:
        return None
    replica, ended = max((there or done).items(), key=lambda item: (item[1], item[0]))
    steps = list[Step]()
    since, where = _replica_steps(run, version, replica, ended, steps, {replica})
    if since > visible:
        other = run.busy_with(where, version, visible, since)
        busy = f"{where} is busy with an earlier version" if other is not None else f"{where} does not ask for it yet"
        more = "" if other is None else f"version {version_label(other)}"
        steps.append(Step(visible, since, "begin", where, "", busy, more))
    steps = [step._replace(began=max(visible, step.began)) for step in steps if step.ended > visible]
    slowest = max(ranks, key=lambda rank: float(ranks[rank]["t"]))
    first = min(ranks, key=lambda rank: began(ranks[rank]))
    size = ranks[slowest].get("bytes")
    start, publish = began(ranks[first]), began(ranks[slowest])
    more = gigabytes(size) if isinstance(size, int) else ""
    steps.append(Step(publish, visible, "publish", slowest, "", f"{slowest} publishes it", more))
    steps.append(Step(start, publish, "begin", slowest, "", f"{slowest} begins to publish after other ranks"))
    kept = tuple(step for step in reversed(steps) if step.seconds >= SHORT_S)
    return Path(version, replica, start, max(ended, visible), kept)


def _replica_steps(
    run: _Run, version: int, replica: str, until: float, steps: list[Step], seen: set[str]
) -> tuple[float, str]:
    """Append what this replica did until then, backwards; return the instant before which something else counts, and
    the replica that it is about."""
    found = list[tuple[float, float, str, Event]]()
    for name in ("install", "fetch"):
        if (event := run.last(name, version, replica, until)) is not None:
            found.append((float(event["t"]), began(event), name, event))
    resumes = run.of["resume", version, replica][:1]
    for resume in resumes:
        within = [e for e in run.pauses[replica] if began(resume) - SHORT_S <= float(e["t"]) <= until]
        found += [(float(event["t"]), began(resume), "pause", event) for event in within[-1:]]
    is_last = any(abs(float(resume["t"]) - until) < SHORT_S for resume in resumes)
    at, after = until, "resume" if is_last else "serve"
    found.sort(key=lambda each: each[:3], reverse=True)
    for place, (ended, start, name, event) in enumerate(found):
        if start >= at:
            continue
        for inner_ended, inner_start, *_ in found[place + 1 :]:  # what is read in place is read within an install
            start = max(start, inner_ended) if inner_start >= start - SHORT_S else start
        ended = min(ended, at)
        worker = str(event.get("worker") or replica)
        steps.append(_between(replica, worker, name, after, ended, at))
        if name == "fetch":
            at, where = _read_steps(run, version, worker, event, ended, steps, seen)
            if where != replica:
                return at, where
        else:
            what = f"{worker} installs it" if name == "install" else f"{replica} stops its engine"
            steps.append(Step(start, ended, name, worker, "", what))
            at = start
        after = name
    return at, replica


def _between(replica: str, worker: str, name: str, after: str, began: float, ended: float) -> Step:
    """Return the step between the end of `name` and the begin of `after`."""
    match after:
        case "resume":
            kind, what = "resume", f"{replica} resumes"
        case "serve":
            kind, what = "serve", f"{replica} offers it"
        case "install" if name == "fetch":
            kind, what = "hold", f"{replica} has its bytes, and does not install them yet"
        case "install":
            kind, what = "install", f"{replica} begins to install it"
        case "pause":
            kind, what = "hold", f"{replica} has its bytes, and is not paused yet"
        case _:
            kind, what = "find", f"{worker} is paused, and does not read yet"
    return Step(began, ended, kind, replica, "", what)


def _read_steps(
    run: _Run, version: int, worker: str, event: Event, until: float, steps: list[Step], seen: set[str]
) -> tuple[float, str]:
    """Append a read of this worker, and what its source waited for; return as `_replica_steps`."""
    start, replica = began(event), replica_of(worker)
    found_s = event.get("find_s")
    reading = min(until, start + (float(found_s) if isinstance(found_s, (int, float)) and found_s > 0 else 0.0))
    source, source_s = _last_source(event)
    what, more = _read_text(worker, event, source, until - reading)
    own = replica_of(source)
    if own and own not in seen:
        through = None  # the instant at which the source had the bytes, where that came late
        relay = run.last("fetch", version, own, until, source)
        if relay is not None and relay.get("layout") == event.get("layout"):
            came = float(relay["t"])
            through = came if reading < came <= until and _waits(until - came, until - reading, source_s) else None
        elif (served := run.served.get((version, source, str(event.get("layout"))))) is not None:
            through = served if start < served <= until else None
            relay = None
        if through is not None:
            steps.append(Step(through, until, "read", worker, source, what, more))
            if relay is None:
                return _replica_steps(run, version, own, through, steps, seen | {own})
            return _read_steps(run, version, source, relay, through, steps, seen | {own})
    steps.append(Step(reading, until, "read", worker, source, what, more))
    steps.append(Step(start, reading, "find", worker, "", f"{worker} waits for a source"))
    return start, replica


def _waits(after_s: float, read_s: float, source_s: float | None) -> bool:
    """Return whether a read has waited for its source's own read, not for the link between them: it ended sooner after
    that one than it had stood still for want of bytes. source_s: so long; None: the journal does not say it."""
    return after_s < (ENDS_TOGETHER * read_s if source_s is None else source_s)


def _last_source(event: Event) -> tuple[str, float | None]:
    """Return the source whose last byte came last, and for how many seconds it had no bytes itself; None: unknown."""
    reads = event.get("reads")
    if isinstance(reads, dict) and reads:
        source = max(reads, key=lambda name: float(reads[name][0]))
        return source, float(reads[source][1])
    sources = event.get("sources")
    sources = sources if isinstance(sources, dict) else {}
    return max(sources, key=lambda name: sources[name], default=""), None


def _read_text(worker: str, event: Event, source: str, seconds: float) -> tuple[str, str]:
    """Return what is read from which source, and how much at what rate, as text for users."""
    names = event.get("transports")
    by = f" by {' and '.join(sorted(map(str, names)))}" if isinstance(names, dict) and names else ""
    size, lost = event.get("bytes"), event.get("lost")
    more = gigabytes(size) if isinstance(size, int) else ""
    if isinstance(size, int) and seconds > SHORT_S:
        more += f", {size / seconds / 1e6:.0f} MB/s"
    more += f", {lost} sources lost on the way" if lost else ""
    return f"{worker} reads from {source or 'no worker'}{by}", more


def text(found: Iterable[Path]) -> str:
    """Return a line for each version, and what most of them waited for."""
    found = list(found)
    shown = sorted(sorted(found, key=lambda path: -path.seconds)[:SHOWN_MAX])
    lines = [f"{len(found)} versions, the {SHOWN_MAX} slowest:"] if len(found) > SHOWN_MAX else []
    lines += [
        f"version {version_label(path.version)}: {path.seconds:.2f} s until {path.replica} had it, as the last: "
        + ", ".join(f"{what} {seconds:.2f} s" for what, seconds in list(path.causes().items())[:CAUSES_MAX])
        for path in shown
    ]
    if len(found) > 1:
        lines += ["waited for most:", *(f"  {line}" for line in summary(found))]
    return "\n".join(map(printable, lines)) or "no version was published and used: nothing to compare"


def summary(found: Iterable[Path]) -> Iterator[str]:
    """Yield what cost most in all versions together, a line each."""
    found = list(found)
    seconds, longest = defaultdict[str, float](float), Counter[str]()
    for path in found:
        for what, spent in path.causes().items():
            seconds[what] += spent
        longest.update(list(path.causes())[:1])
    whole = sum(path.seconds for path in found) or 1.0
    for what, spent in sorted(seconds.items(), key=lambda item: -item[1])[:CAUSES_MAX]:
        yield f"{spent / whole:.0%}: {what} ({spent:.2f} s; the most in {longest[what]} of {len(found)} versions)"
