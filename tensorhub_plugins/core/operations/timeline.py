"""`tensorhub timeline`: what each version of a run waited for, by its journals (run_log.py), and a trace of all. PURE.

The trace is for Perfetto (https://ui.perfetto.dev, or chrome://tracing): a process for each replica, a lane for each
worker. Journals of several hosts are compared by their clocks: what is less than those differ by means nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.types import printable, version_label

Event = Mapping[str, Any]
LANES = {"request": "requests", "prompt": "requests"}  # events in a lane of their own beside the worker's
MICROSECONDS = 1_000_000
PHASES = ("fetch", "install", "resume")  # of a version at a replica, in this order


class Slowest(NamedTuple):
    """The replica at which a version was in use last, and what took how many seconds on its way there."""

    version: int
    replica: str
    seconds: float  # from the end of its publish
    phases: dict[str, float]
    source: str  # that most bytes of it came from; "": unknown


def parse(lines: Iterable[bytes], name: str) -> Iterator[Event]:
    """Yield the events of a journal. A last line that was cut off is left out, as of a process that was killed. Raise
    UsageError for another file. name: of the file."""
    broken, number = "", 0
    for number, line in enumerate(lines, 1):
        if broken:
            raise UsageError(f"{name}: {broken}: give files of a folder that TENSORHUB_EVENTS has named")
        try:
            event = json.loads(line)
            if not isinstance(event["event"], str) or not isinstance(event["t"], (int, float)):
                raise ValueError("event")
            yield event
        except (ValueError, KeyError, TypeError):
            broken = f"line {number} is no event"
    if broken and number == 1:
        raise UsageError(f"{name}: {broken}: give files of a folder that TENSORHUB_EVENTS has named")


def trace(events: Iterable[Event]) -> dict[str, Any]:
    """Return them in the format of Chrome's traces, which Perfetto reads: times from the first one on."""
    events = sorted(events, key=began)
    first, names = (began(events[0]) if events else 0.0), dict[str, int]()
    lanes, rows = dict[tuple[str, str], int](), list[dict[str, Any]]()
    for event in events:
        worker = str(event.get("worker") or "run")
        replica, lane = worker.partition("/")[0], LANES.get(event["event"], worker)
        process = names.setdefault(replica, len(names) + 1)
        thread = lanes.setdefault((replica, lane), len(lanes) + 1)
        known = {"t", "event", "worker", "seconds"}
        row = {
            "name": label(event),
            "cat": event["event"],
            "pid": process,
            "tid": thread,
            "ts": round((began(event) - first) * MICROSECONDS),
            "args": {name: value for name, value in event.items() if name not in known},
        }
        seconds = _seconds(event)
        rows.append(
            {**row, "ph": "X", "dur": round(seconds * MICROSECONDS)} if seconds else {**row, "ph": "i", "s": "t"}
        )
    named = [_named("process_name", replica, process, 0) for replica, process in names.items()]
    named += [_named("thread_name", lane, names[replica], thread) for (replica, lane), thread in lanes.items()]
    return {"traceEvents": [*named, *rows], "displayTimeUnit": "ms"}


def _named(what: str, name: str, process: int, thread: int) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def label(event: Event) -> str:
    """Return what a slice is called: the event, and the version that it is of."""
    version = event.get("version")
    return f"{event['event']} {version_label(version)}" if isinstance(version, int) and version >= 0 else event["event"]


def _seconds(event: Event) -> float:
    seconds = event.get("seconds", 0.0)
    return float(seconds) if isinstance(seconds, (int, float)) and seconds > 0 else 0.0


def began(event: Event) -> float:
    """Return when it began: an event is dated by its end."""
    return float(event["t"]) - _seconds(event)


def slowest(events: Iterable[Event]) -> list[Slowest]:
    """Return for each version the replica at which it was in use last, of those that have resumed with it."""
    published, resumed = dict[int, float](), dict[int, dict[str, float]]()
    fetches, phases = dict[tuple[int, str], Event](), dict[tuple[int, str], dict[str, float]]()
    for event in sorted(events, key=lambda event: float(event["t"])):
        version, replica = event.get("version"), str(event.get("worker", "")).partition("/")[0]
        if not isinstance(version, int):
            continue
        if event["event"] == "publish":
            published.setdefault(version, float(event["t"]))
        elif event["event"] == "resume":
            resumed.setdefault(version, {}).setdefault(replica, float(event["t"]))
        if event["event"] in PHASES:  # of several workers of a replica the slowest counts
            of = phases.setdefault((version, replica), {})
            of[event["event"]] = max(of.get(event["event"], 0.0), _seconds(event))
        if event["event"] == "fetch":
            before = fetches.get((version, replica))
            fetches[version, replica] = event if before is None or _seconds(event) > _seconds(before) else before
    found = []
    for version in sorted(published.keys() & resumed.keys()):
        replica, at = max(resumed[version].items(), key=lambda item: item[1])
        sources = (fetches.get((version, replica)) or {}).get("sources") or {}
        source = max(sources, key=lambda name: sources[name], default="")
        found.append(Slowest(version, replica, at - published[version], phases.get((version, replica), {}), source))
    return found


def text(found: Iterable[Slowest]) -> str:
    """Return a line for each version: which replica had it last, after how long, and what most of that was."""
    lines = []
    for one in found:
        pause_s, fetch_s = one.phases.get("resume", 0.0), one.phases.get("fetch", 0.0)
        parts = {"the fetch": fetch_s, "the pause": pause_s, "waiting to begin": one.seconds - fetch_s - pause_s}
        worst = max(parts, key=lambda name: parts[name])
        source = f" from {one.source}" if worst == "the fetch" and one.source else ""
        said = ", ".join(f"{name} {max(0.0, seconds):.2f} s" for name, seconds in parts.items())
        lines.append(
            f"version {version_label(one.version)}: last in use at {one.replica}, {one.seconds:.2f} s after its "
            f"publish, most of it {worst}{source} ({said})"
        )
    return "\n".join(map(printable, lines)) or "no version was published and resumed with: nothing to compare"
