"""PURE: from the probe's notes and the trainer's metrics to how long everybody stood still."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

CLOSED = "(b) a rollout cannot generate"
# The engine is open again, and computes the answers in flight anew under the new weights, the same work on both paths:
# on a CPU that takes longer than all the rest.
SILENT = "    until its next token"


@dataclass
class Stall:
    """One update of one replica."""

    closed_s: float  # from the call that stops the engine to the return of the call that lets it go on
    silent_s: float  # from the last token before to the first token after
    requests: int  # that were in flight


@dataclass
class Round:
    """The figures of one run."""

    path: str  # "stock" or "pull"
    waits_s: list[float] = field(default_factory=list)  # of the trainer for an update, one a step
    stalls: list[Stall] = field(default_factory=list)
    memcpy_s: float = 0.0  # one copy of the model's bytes, measured beside it


def find_stalls(notes: Iterable[dict[str, Any]], skip: int = 0) -> list[Stall]:
    """Return the stalls of one engine's notes, in order. A stall counts if answers were in flight and tokens came
    before and after: then the replica had something to generate, and did not. skip: the first updates, which count in
    no case."""
    notes, updates = list(notes), 0
    tokens = [note["at"] for note in notes if note["what"] == "tokens"]
    stalls, stop = [], None
    for note in notes:
        if note["what"] == "stop" and stop is None:
            stop = note
        elif note["what"] == "go" and stop is not None:
            updates += 1
            after = bisect_left(tokens, note["at"])
            # Tokens of the step under way may still come out after the call that stops the engine.
            before = bisect_left(tokens, note["at"]) - 1
            if updates > skip and stop["requests"] and before >= 0 and after < len(tokens):
                silent_s = tokens[after] - tokens[before]
                stalls.append(Stall(note["at"] - stop["at"], silent_s, stop["requests"]))
            stop = None
    return stalls


def read_round(path: str, folder: Path, skip_steps: int) -> Round:
    """Read what one run left in `folder`. The first `skip_steps` updates are warm-up: connections, allocations."""
    found = Round(path)
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["step"] > skip_steps and "timing_s/update_weights" in row["data"]:
            found.waits_s.append(row["data"]["timing_s/update_weights"])
    for file in sorted((folder / "probe").glob("*.jsonl")):
        notes = [json.loads(line) for line in file.read_text().split("\n")[:-1]]
        found.stalls += find_stalls(notes, skip_steps)
    return found


@dataclass
class Line:
    what: str
    stock_s: float
    ours_s: float
    counts: bool  # for the target; the rest explains

    @property
    def ratio(self) -> float:
        return self.stock_s / self.ours_s


def compare(rounds: Sequence[Round], wait: str) -> list[Line]:
    """Return the medians over all updates of all rounds. wait: what the trainer waits in. Raises ValueError when one
    side has nothing measured."""
    measures = {
        f"(a) the trainer waits in {wait}": lambda r: r.waits_s,
        CLOSED: lambda r: [stall.closed_s for stall in r.stalls],
        SILENT: lambda r: [stall.silent_s for stall in r.stalls],
    }
    lines = []
    for what, values in measures.items():
        sides = {path: [v for r in rounds if r.path == path for v in values(r)] for path in ("stock", "pull")}
        for path, found in sides.items():
            if not found:
                raise ValueError(f"{path}: nothing measured for {what!r} (no answers in flight during an update?)")
        lines.append(Line(what, median(sides["stock"]), median(sides["pull"]), counts=what != SILENT))
    return lines
