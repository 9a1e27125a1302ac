"""What a fleet did while it grew and shrank, and whether it did what we claim. PURE: events and metrics in, Report out.

Events are those of core/run_log.py; `act` is written by elastic.py, `member` by the run's fleet. Each claim names what
breaks it; a claim about something that the log does not show fails.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from recipes.demo.report import Claim, replica_of

Event = Mapping[str, Any]
WORKING = "ready"
SAME_BYTES = "everybody has the same bytes of every version"
SHOWN = 5  # things that are wrong


@dataclass
class Act:
    """One action on the fleet, and its outcome."""

    what: str
    began: float  # Unix seconds
    goal: int  # replicas that shall be ready in the end
    ready_before: int
    ready_after: int
    seconds: float | None  # until the goal was reached; None: never
    version: int  # the newest published by then
    pause_max_s: float  # the longest that any replica stood still meanwhile
    joined: list[str] = field(default_factory=list)  # replicas that became ready, and the sources of their weights


@dataclass
class Report:
    acts: list[Act]
    versions: int
    samples: int
    retried: int
    claims: list[Claim]

    @property
    def holds(self) -> bool:
        return all(claim.holds for claim in self.claims)

    def to_json(self) -> str:
        return json.dumps({"holds": self.holds, **asdict(self)}, indent=1)


def make_report(
    events: Sequence[Event],
    samples: Mapping[int, Sequence[str]],
    *,
    steps: int,
    prompts_per_step: int,
    answers: int,
    counts: Sequence[float] = (),
) -> Report:
    """Make the report. events: by time. samples: by step, what it was trained on, as "prompt_answer_part". steps: as
    reported by the trainer. answers: to a prompt. counts: of samples, by step, where the trainer reports that too."""
    marks = [event for event in events if event["event"] == "act"]
    ends = [*(event["t"] for event in marks[1:]), float("inf")][: len(marks)]
    acts = [_act(mark, end, events) for mark, end in zip(marks, ends, strict=True)]
    published = {event["version"] for event in events if event["event"] == "publish"}
    retried = sum(event["event"] == "request_retried" for event in events)
    report = Report(acts, len(published), sum(map(len, samples.values())), retried, [])
    report.claims = [
        _reached(acts),
        _joined_from_the_store(acts, events),
        digests_equal(events),
        _every_sample_once(samples, steps, counts, prompts_per_step, answers),
        _pauses_short(events, acts),
    ]
    return report


def ready_over_time(events: Sequence[Event]) -> list[tuple[float, int]]:
    """Return when the number of replicas that serve changed, and to what."""
    states: dict[str, str] = {}
    changes: list[tuple[float, int]] = []
    for event in events:
        if event["event"] == "member":
            states[replica_of(event["worker"])] = event["state"]
            ready = sum(state == WORKING for state in states.values())
            if not changes or changes[-1][1] != ready:
                changes.append((event["t"], ready))
    return changes


def ready_at(events: Sequence[Event], t: float) -> int:
    """Return the number of replicas that served then."""
    return next((ready for since, ready in reversed(ready_over_time(events)) if since <= t), 0)


def _act(mark: Event, end: float, events: Sequence[Event]) -> Act:
    began, goal = mark["t"], mark["goal"]
    after = [(t, ready) for t, ready in ready_over_time(events) if t >= began and t < end]
    left = mark.get("leaves")  # something was killed: the goal counts from when that was noticed
    reached = None
    noticed = left is None
    for t, ready in after:
        noticed = noticed or ready < goal
        if noticed and ready == goal:
            reached = t
    until = end if reached is None else reached
    meanwhile = [e for e in events if began <= e["t"] <= until]
    pauses = [e["seconds"] for e in meanwhile if e["event"] == "resume"]
    joined = [name for t, name in _arrivals(events) if began <= t <= until]
    versions = [e["version"] for e in events if e["event"] == "publish" and e["t"] <= until]
    return Act(
        what=mark["what"],
        began=began,
        goal=goal,
        ready_before=ready_at(events, began),
        ready_after=ready_at(events, until),
        seconds=None if reached is None else reached - began,
        version=max(versions, default=0),
        pause_max_s=max(pauses, default=0.0),
        joined=[f"{name} (from {_first_source(events, name)})" for name in dict.fromkeys(joined)],
    )


def _arrivals(events: Sequence[Event]) -> list[tuple[float, str]]:
    """Return when which replica began to serve, or did so again."""
    states: dict[str, str] = {}
    found = []
    for event in events:
        if event["event"] == "member":
            name = replica_of(event["worker"])
            if event["state"] == WORKING != states.get(name):
                found.append((event["t"], name))
            states[name] = event["state"]
    return found


def _first_source(events: Sequence[Event], name: str) -> str:
    """Return the source of a replica in its present incarnation: of its last first version."""
    fetched = [e for e in events if e["event"] == "fetch" and replica_of(e["worker"]) == name]
    sources = {replica_of(source) for e in fetched[:1] for source, count in e.get("sources", {}).items() if count}
    return " and ".join(sorted(sources)) or "nobody"


def _reached(acts: Sequence[Act]) -> Claim:
    wrong = [f"{act.what}: {act.ready_after} of {act.goal} replicas" for act in acts if act.seconds is None]
    detail = "; ".join(wrong) or " -> ".join(str(act.goal) for act in acts) + " replicas"
    return Claim("the fleet becomes as large as it is told to be", bool(acts) and not wrong, detail)


def _joined_from_the_store(acts: Sequence[Act], events: Sequence[Event]) -> Claim:
    first = {replica_of(e["worker"]) for e in events if e["event"] == "member" and e["kind"] == "first"}
    joiners = {replica_of(e["worker"]) for e in events if e["event"] == "member" and e["state"] == WORKING} - first
    sources = {name: _first_source(events, name) for name in sorted(joiners)}
    wrong = [f"{name} had its first weights from nobody" for name, source in sources.items() if source == "nobody"]
    detail = "; ".join(wrong) or ", ".join(f"{name} from {source}" for name, source in sources.items())
    return Claim(
        "a joiner has its first weights from the store", bool(joiners) and not wrong, detail or "nobody joined"
    )


def digests_equal(events: Sequence[Event]) -> Claim:
    seen: dict[tuple[int, str, str], dict[str, str]] = defaultdict(dict)
    for event in events:
        if event["event"] == "digests":
            for key, digest in event["digests"].items():
                seen[event["version"], event["layout"], key][event["worker"]] = digest
    compared = [workers for workers in seen.values() if len(workers) > 1]
    wrong = [
        f"version {version}, {layout}: {', '.join(f'{w} {d[:8]}' for w, d in sorted(workers.items()))}"
        for (version, layout, _), workers in seen.items()
        if len(set(workers.values())) > 1
    ]
    detail = "; ".join(wrong) or f"{sum(map(len, compared))} digests in {len(compared)} groups"
    return Claim(SAME_BYTES, bool(compared) and not wrong, detail)


def samples_of(row: Mapping[str, Any]) -> float:
    """Return the answers that a step of verl was trained on, by its log: tokens, by tokens in a mean one."""
    tokens = row.get("perf/total_num_tokens", 0.0)
    return float(tokens / (row["prompt_length/mean"] + row["response_length/mean"])) if tokens else 0.0


def samples_claim(prompts: int, answers: int) -> str:
    return (
        f"every step is trained on {answers} answers to each of its {prompts} prompts: none is lost, none comes twice"
    )


def _every_sample_once(
    samples: Mapping[int, Sequence[str]], steps: int, counts: Sequence[float], prompts: int, answers: int
) -> Claim:
    """Check the name of each sample, over all steps: a duplicate in place of another would leave all counts as they
    are."""
    wrong = []
    trained: Counter[str] = Counter(name for names in samples.values() for name in names)
    wrong += [f"{name} {count} times" for name, count in sorted(trained.items()) if count > 1]
    for step, names in sorted(samples.items()):
        found: dict[str, set[int]] = defaultdict(set)
        for name in names:
            prompt, answer, _ = name.rsplit("_", 2)
            found[prompt].add(int(answer))
        wrong += [
            f"step {step}: answers {sorted(numbers)} to {prompt}"
            for prompt, numbers in sorted(found.items())
            if numbers != set(range(answers))
        ]
        wrong += [f"step {step}: {len(found)} prompts"] if len(found) != prompts else []
    expected = prompts * answers
    wrong += [f"step {n}: {count:.2f} in the log" for n, count in enumerate(counts, 1) if abs(count - expected) > 0.01]
    missing = sorted(set(range(1, steps + 1)) - samples.keys())
    wrong += [f"step {step}: not known on what" for step in missing]
    detail = "; ".join(wrong[:SHOWN]) or f"{len(trained)} samples in {len(samples)} steps"
    return Claim(samples_claim(prompts, answers), bool(samples) and steps > 0 and not wrong, detail)


def _pauses_short(events: Sequence[Event], acts: Sequence[Act]) -> Claim:
    """Check that a replica pauses no longer while others join and leave than in quiet times."""
    busy = [(act.began, act.began + act.seconds) for act in acts if act.seconds is not None]
    inside = [e["seconds"] for e in events if e["event"] == "resume" and any(a <= e["t"] <= b for a, b in busy)]
    detail = f"{len(inside)} updates meanwhile, the longest pause {1000 * max(inside, default=0.0):.0f} ms"
    lost = sum(e.get("lost", 0) for e in events if e["event"] == "resume")
    return Claim("nobody's answers are lost in an update", bool(inside) and not lost, f"{detail}; {lost} lost")


def table(report: Report) -> str:
    """Format the report for the terminal."""
    rows = [["what was done", "ready", "after", "version", "longest pause", "who came, from whom it had its weights"]]
    for act in report.acts:
        rows.append(
            [
                act.what,
                f"{act.ready_before} -> {act.ready_after}",
                "never" if act.seconds is None else f"{act.seconds:.1f} s",
                str(act.version),
                f"{1000 * act.pause_max_s:.0f} ms",
                ", ".join(act.joined) or "-",
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])
