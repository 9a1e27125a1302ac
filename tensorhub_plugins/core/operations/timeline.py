"""`tensorhub timeline`: the journals of a run (run_log.py) as a page and as a trace. PURE.

The page (timeline.html) needs no server, and asks none for anything: a lane for each worker, and each version's path
(critical_path.py). The trace is for Perfetto (https://ui.perfetto.dev, chrome://tracing): a process for each replica.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.operations.critical_path import Path, began, replica_of, seconds_of, summary
from tensorhub_plugins.core.types import version_label

Event = Mapping[str, Any]
LANES = {"request": "requests", "prompt": "requests"}  # events in a lane of their own beside the worker's
MICROSECONDS = 1_000_000
DATA = "/*DATA*/null"  # in timeline.html
KINDS = ("request", "publish", "fetch", "pause", "resume", "install", "starting", "lost", "draining", "stopping")
QUIET = ("serve", "digests", "prompt")  # events that the page does not show
T_MAX = 1e11  # Unix seconds: beyond it is no time
NUMBER_MAX = 1 << 63
WORKER_MAX = 512  # characters of a name
JSON = json.JSONDecoder(parse_constant=lambda _: None)  # NaN and its like are no JSON, in the trace neither
TICKS = 10_000  # of the page's times, in a second
BARS_MAX = 600_000  # on the page, which a browser draws at once; the newest are kept
EVENTS_MAX = 300_000  # of a run, likewise: of 64 workers about a thousand versions, 1 GB of memory
LINE_BYTES_MAX = 1 << 20  # of a journal


def parse(lines: Iterable[bytes], name: str) -> Iterator[Event]:
    """Yield the events of a journal. A last line that was cut off is left out, as of a process that was killed. Raise
    UsageError for another file. name: of the file."""
    broken, number = "", 0
    for number, line in enumerate(lines, 1):
        if broken:
            raise UsageError(f"{name}: {broken}: give files of a folder that TENSORHUB_EVENTS has named")
        try:
            event = JSON.decode(line.decode())
            if not isinstance(event["event"], str) or not abs(event["t"]) < T_MAX:
                raise ValueError("event")
            yield _well_formed(event)
        except (ValueError, KeyError, TypeError, RecursionError):
            broken = f"line {number} is no event"
    if broken and number == 1:
        raise UsageError(f"{name}: {broken}: give files of a folder that TENSORHUB_EVENTS has named")


def newest(events: Iterable[Event], most: int = EVENTS_MAX) -> tuple[list[Event], int]:
    """Return the last of these events, in the order of their times, and the number of earlier ones, which are left out:
    a long run has more than fit into memory."""
    kept, count = list[Event](), 0
    for count, event in enumerate(events, 1):  # noqa: B007
        kept.append(event)
        if len(kept) > most + most // 4:
            _keep_newest(kept, most)
    _keep_newest(kept, most)
    return kept, count - len(kept)


def _keep_newest(events: list[Event], most: int) -> None:
    events.sort(key=lambda event: float(event["t"]))
    del events[: max(0, len(events) - most)]


def _well_formed(event: Event) -> Event:
    """Return it without what is not of its form, as a field that does not apply is left out."""
    kept = {name: value for name, value in event.items() if name not in FORMS or FORMS[name](value)}
    return {**kept, "worker": str(event.get("worker") or "")[:WORKER_MAX]}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and 0 <= value < NUMBER_MAX


def _is_read(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))


def _has(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


FORMS: dict[str, Callable[[Any], bool]] = {"sources": _has(_is_number), "reads": _has(_is_read)}
FORMS |= {"seconds": lambda value: _is_number(value) and value < T_MAX}
FORMS |= dict.fromkeys(("find_s", "bytes", "version"), _is_number)


def page(template: str, events: Sequence[Event], paths: Sequence[Path], *, bars_max: int = BARS_MAX) -> str:
    """Return the page, with all of it inside. template: timeline.html. bars_max: of more, the newest are on it, as it
    says."""
    text = json.dumps(page_data(events, paths, bars_max), separators=(",", ":"), default=str)
    return template.replace(DATA, text.replace("<", "\\u003c"))


def page_data(events: Sequence[Event], paths: Sequence[Path], bars_max: int) -> dict[str, Any]:
    """Return what the page shows: times in ticks from the first event on, workers by their lanes' numbers."""
    bars, marks = _bars(events)
    first = min([began(event) for event in events if event["event"] not in QUIET], default=0.0)
    bars.sort(key=lambda bar: bar[2])
    left_out = bars[: max(0, len(bars) - bars_max)]
    since = left_out[-1][2] if left_out else first
    del bars[: len(left_out)]
    paths = [path for path in paths if path.ended >= since]
    trainers = {step.worker for path in paths for step in path.steps if step.kind == "publish"}
    workers = {bar[0] for bar in bars} | {mark[0] for mark in marks} | trainers
    workers |= {step.worker for path in paths for step in path.steps if step.worker.count("/")}
    lanes = sorted(workers, key=lambda worker: (worker not in trainers, *_in_order(worker)))
    number = {lane: place for place, lane in enumerate(lanes)}
    number |= {replica_of(lane): number[lane] for lane in reversed(lanes)}  # what is a replica's is in its first lane
    columns: list[list[int]] = [[] for _ in lanes]
    notes = dict[str, int]()

    def at(t: float) -> int:
        return round((t - first) * TICKS)

    for worker, kind, start, end, note in bars:
        columns[number[worker]] += [at(start), at(end), kind, notes.setdefault(note, len(notes))]
    return {
        "began": first,
        "ticks": TICKS,
        "lanes": lanes,
        "kinds": KINDS,
        "bars": columns,
        "notes": list(notes),
        "marks": [[number[worker], at(t), note] for worker, t, note in marks if t >= since],
        "paths": [_path_data(path, number, at) for path in paths],
        "summary": list(summary(paths)),
        "left_out": len(left_out),
    }


def _path_data(path: Path, number: Mapping[str, int], at: Callable[[float], int]) -> dict[str, Any]:
    return {
        "version": version_label(path.version),
        "replica": path.replica,
        "span": [at(path.began), at(path.ended)],
        "steps": [
            [number.get(step.worker, 0), at(step.began), at(step.ended), step.what, step.more] for step in path.steps
        ],
    }


def _bars(events: Iterable[Event]) -> tuple[list[tuple[str, int, float, float, str]], list[tuple[str, float, str]]]:
    """Return the bars (worker, kind, begin, end, note) and the marks (worker, instant, note). Requests that are under
    way at once are one bar; of a replica's states all but the usual one are."""
    bars, marks = list[tuple[str, int, float, float, str]](), list[tuple[str, float, str]]()
    requests, states = dict[str, tuple[float, float, int]](), dict[str, tuple[float, str]]()

    def put(worker: str, kind: str, start: float, end: float, note: str) -> None:
        bars.append((worker, KINDS.index(kind), start, end, note))

    last = 0.0
    for event in sorted(events, key=began):
        name, worker, ended = event["event"], str(event.get("worker") or "run"), float(event["t"])
        last = max(last, ended)
        if name == "request":
            start, end, count = requests.get(worker, (began(event), 0.0, 0))
            if count and began(event) > end:
                put(worker, name, start, end, _requests(count))
                start, end, count = began(event), 0.0, 0
            requests[worker] = (start, max(end, ended), count + 1)
        elif name == "member":
            since, state = states.get(worker, (ended, ""))
            if state in KINDS:
                put(worker, state, since, ended, state)
            states[worker] = (ended, str(event.get("state")))
        elif name in KINDS:
            put(worker, name, began(event), ended, f"{label(event)}{_told(event)}")
        elif name not in QUIET:
            marks.append((worker, ended, f"{label(event)}{_told(event)}"))
    for worker, (start, end, count) in requests.items():
        put(worker, "request", start, end, _requests(count))
    for worker, (since, state) in states.items():
        if state in KINDS:
            put(worker, state, since, last, state)
    return bars, marks


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"


def _told(event: Event) -> str:
    """Return what a note says of an event besides its name."""
    named = ("sources", "transports", "by", "in_flight", "lost", "error", "reason", "why", "what", "target", "state")
    told = []
    for name in named:
        value = event.get(name)
        if isinstance(value, dict):
            value = " and ".join(map(str, value))
        told += [f"{name.replace('_', ' ')} {value}"] if value not in (None, "") else []
    return f": {', '.join(told)}" if told else ""


def _in_order(worker: str) -> tuple[Any, ...]:
    """Return a key by which rollout-2 comes before rollout-10."""
    parts = re.split(r"(\d+)", worker)
    return tuple((part.isdecimal(), int(part) if part.isdecimal() else part) for part in parts)


def trace(events: Iterable[Event]) -> dict[str, Any]:
    """Return them in the format of Chrome's traces, which Perfetto reads: times from the first one on."""
    events = sorted(events, key=began)
    first, names = (began(events[0]) if events else 0.0), dict[str, int]()
    lanes, rows = dict[tuple[str, str], int](), list[dict[str, Any]]()
    for event in events:
        worker = str(event.get("worker") or "run")
        replica, lane = replica_of(worker), LANES.get(event["event"], worker)
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
        seconds = seconds_of(event)
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
