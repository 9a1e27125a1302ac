"""PURE: from what happened in each run (stage.play) to medians, ratios, and what was reached."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

PATHS = {  # stock cannot take in an engine: its users make a larger group with everybody stopped, or restart the job
    "standalone": ("store", "deltas", "star", "stock"),
    "elastic": ("store", "spare", "star", "stock", "restart"),
    "cross": ("store", "deltas", "star", "stock"),
}
CHANGED_PERCENT = 1.0  # of the elements of a version, on the path "deltas"; on all others everything changes
JOINER = "joiner"
RATIO_SHOWN_MAX = 1000  # beyond it a ratio only says how little the smaller number is
WARM_UP = 2  # versions of each run that do not count: connections, first allocations
# How many times better than stock; the paper's figures on GPUs, and what is aimed at.
GOALS = {"standalone": (6.7, 15.0), "elastic": (4.8, 10.0), "cross": (19.0, 40.0)}
TITLES = {
    "standalone": "standalone rollouts",
    "elastic": "an engine joins",
    "cross": "two sites",
}
Play = Mapping[str, Any]


@dataclass(frozen=True)
class Pause:
    """A pause of one engine, in seconds of the machine's clock."""

    began: float  # its last step had ended
    ended: float  # the next one might begin
    silent_s: float  # from its last token to its next one: answers in flight are computed anew in between


def pauses(notes: Iterable[Mapping[str, Any]]) -> list[Pause]:
    """Return the pauses in one engine's notes, in order. One without tokens before it is the start and does not count;
    one without tokens after it is a ValueError: its length is unknown."""
    notes = list(notes)
    tokens = [note["at"] for note in notes if note["what"] == "tokens"]
    found: list[Pause] = []
    began = None
    for note in notes:
        if note["what"] == "stop" and began is None:
            began = note["at"]
        elif note["what"] == "go" and began is not None:
            before, after = bisect_left(tokens, began) - 1, bisect_left(tokens, note["at"])
            if after == len(tokens):
                raise ValueError("an engine gave no token after its last pause")
            if before >= 0:
                found.append(Pause(began, note["at"], tokens[after] - tokens[before]))
            began = None
    return found


# --- what is measured in one run ---


def counted(play: Play) -> list[Mapping[str, Any]]:
    """Return the updates that count."""
    return list(play["updates"][WARM_UP:])


def window(play: Play) -> tuple[float, float]:
    """Return the first and the last moment that count."""
    if play["join"] is not None:
        return play["join"]["asked"], play["ended"]
    return counted(play)[0]["began"], play["ended"]


def stalls(play: Play, place: str | None = None) -> list[list[Pause]]:
    """Return the pauses of each engine (or each of one site) that was there before, within the window.

    Raises ValueError unless each engine paused once for every version, as something else was measured then."""
    began, _ = window(play)
    found = []
    for engine in play["engines"]:
        if engine["name"] == JOINER or place not in (None, engine["data_center"]):
            continue
        own = [Pause(**pause) for pause in engine["pauses"] if pause["began"] >= began]
        if play["join"] is None and len(own) != len(counted(play)):
            raise ValueError(
                f"{play['workload']}, {play['path']}: {engine['name']} stood still {len(own)} times for "
                f"{len(counted(play))} versions"
            )
        found.append(own)
    return found


def _versions(play: Play) -> int:
    return 1 if play["join"] is not None else len(counted(play))


def stall_s(place: str | None = None) -> Callable[[Play], float]:
    """Return a measure: the pauses for one version, summed over the engines; the mean of the versions."""

    def mean(play: Play) -> float:
        return sum(pause.ended - pause.began for own in stalls(play, place) for pause in own) / _versions(play)

    return mean


def usual_stall_s(place: str | None = None) -> Callable[[Play], float]:
    """Return the same for the median version: an engine's first conversion, for one, happens only once."""

    def middle(play: Play) -> float:
        versions = zip(*stalls(play, place), strict=True)
        return median(sum(pause.ended - pause.began for pause in together) for together in versions)

    return middle


def silent_s(play: Play) -> float:
    return sum(pause.silent_s for own in stalls(play) for pause in own) / _versions(play)


def trainer_s(play: Play) -> float:
    if play["join"] is not None:
        return float(play["join"]["trainer_s"])
    return median(update["trainer_s"] for update in counted(play))


def everywhere_s(play: Play) -> float:
    """Return the seconds until all engines run it."""
    return median(update["done"] - update["began"] for update in counted(play))


def first_token_s(play: Play) -> float:
    return float(play["join"]["token"] - play["join"]["asked"])


def weights_s(play: Play) -> float:
    """Return how much of it makes the model and gets its weights: with a store in one step, else a start and a
    broadcast."""
    return float(play["join"]["weights_s"])


def everyones_stall_s(play: Play) -> float:
    """Return what the paper counts: the time without weights of the new engine, and the pauses of the others for it."""
    return weights_s(play) + stall_s()(play)


def whole_start_s(play: Play) -> float:
    return first_token_s(play) + float(play["join"]["imports_s"])


def copies_sent(play: Play) -> float:
    """Return the copies of the model that the trainer's host sends for one version; headers included."""
    return float(play["sent_bytes"]) / play["limits"]["size_bytes"] / _versions(play)


def tokens_per_s(play: Play) -> float:
    """Return the tokens per second of all engines that were there before."""
    began, ended = window(play)
    own = [engine for engine in play["engines"] if engine["name"] != JOINER]
    return sum(n for engine in own for at, n in engine["tokens"] if began <= at <= ended) / (ended - began)


# --- what is measured in all runs ---


@dataclass(frozen=True)
class Measure:
    what: str
    value: Callable[[Play], float]
    counts: bool = False  # for the goal; the rest explains
    unit: str = "s"


MEASURES: dict[str, tuple[Measure, ...]] = {
    "standalone": (
        Measure("all rollouts' stall for a version", stall_s(), counts=True),
        Measure("  for the median version", usual_stall_s()),
        Measure("the trainer waits for a version", trainer_s),
        Measure("all rollouts, until their next token", silent_s),
        Measure("until all rollouts run it", everywhere_s),
        Measure("copies of the model that the trainer sends", copies_sent, unit="copies"),
        Measure("tokens of all rollouts in a second", tokens_per_s, unit="/s"),
    ),
    "elastic": (
        Measure("from asking for an engine to its first token", first_token_s, counts=True),
        Measure("the others' stall while it joins", stall_s(), counts=True),
        Measure("everybody's stall, until its weights are there", everyones_stall_s, counts=True),
        Measure("of the first: its model and weights", weights_s),
        Measure("the trainer waits", trainer_s),
        Measure("the same first token with Python's imports", whole_start_s),
        Measure("copies of the model that the trainer sends", copies_sent, unit="copies"),
        Measure("tokens of the others in a second", tokens_per_s, unit="/s"),
    ),
    "cross": (
        Measure("remote rollouts' stall for a version", stall_s("west"), counts=True),
        Measure("  for the median version", usual_stall_s("west")),
        Measure("local rollouts' stall for a version", stall_s("east")),
        Measure("the trainer waits for a version", trainer_s),
        Measure("until all rollouts run it", everywhere_s),
        Measure("copies of the model that the trainer sends", copies_sent, unit="copies"),
    ),
}


@dataclass(frozen=True)
class Line:
    """One measure, with the medians of the rounds."""

    what: str
    unit: str
    counts: bool
    values: dict[str, float]  # by path
    rounds: dict[str, list[float]]

    def ratio(self, other: str) -> float:
        """Return how many times better than this path the store is; infinite if it costs nothing."""
        ours, theirs = self.values["store"], self.values[other]
        if self.unit == "/s":  # more is better
            ours, theirs = theirs, ours
        return theirs / ours if ours else math.inf if theirs else 1.0


@dataclass(frozen=True)
class Report:
    workload: str
    lines: list[Line]
    size_bytes: int
    memcpy_s: float
    stream_s: float
    engines: int  # whose stall is summed
    loads: list[float]
    wrong: list[str] = field(default_factory=list)  # why this is no result

    @property
    def worst_ratio(self) -> float:
        """Return the worst ratio to stock among the measures that count."""
        return min(line.ratio("stock") for line in self.lines if line.counts)

    @property
    def reached(self) -> bool:
        return not self.wrong and self.worst_ratio >= GOALS[self.workload][0]

    @property
    def best_collective_s(self) -> float:
        """Return a lower bound of any broadcast to paused engines: one bare stream for each of them."""
        return self.engines * self.stream_s

    def to_dict(self) -> dict[str, Any]:
        least, aim = GOALS[self.workload]
        lines = [
            {
                "what": line.what,
                "unit": line.unit,
                "counts": line.counts,
                "medians": line.values,
                "rounds": line.rounds,
                "times_better_than": {path: _finite(line.ratio(path)) for path in PATHS[self.workload][1:]},
            }
            for line in self.lines
        ]
        return {
            "workload": self.workload,
            "goal": least,
            "aim": aim,
            "reached": self.reached,
            "wrong": self.wrong,
            "size_bytes": self.size_bytes,
            "limits": {
                "memcpy_s": self.memcpy_s,
                "stream_s": self.stream_s,
                "best_collective_s": self.best_collective_s,
            },
            "loads": self.loads,
            "lines": lines,
        }


def make_report(workload: str, plays: Sequence[Play]) -> Report:
    """Make the report. plays: this workload's, on all paths, of all rounds. ValueError if one path was never run."""
    by_path = {path: [play for play in plays if play["path"] == path] for path in PATHS[workload]}
    lacking = [path for path, own in by_path.items() if not own]
    if lacking:
        raise ValueError(f"{workload}: nothing measured for {', '.join(lacking)}")
    lines = []
    for measure in MEASURES[workload]:
        rounds = {path: [measure.value(play) for play in own] for path, own in by_path.items()}
        medians = {path: median(values) for path, values in rounds.items()}
        lines.append(Line(measure.what, measure.unit, measure.counts, medians, rounds))
    places = [engine["data_center"] for engine in plays[0]["engines"] if engine["name"] != JOINER]
    return Report(
        workload,
        lines,
        plays[0]["limits"]["size_bytes"],
        median(play["limits"]["memcpy_s"] for play in plays),
        median(play["limits"]["stream_s"] for play in plays),
        places.count("west") if workload == "cross" else len(places),
        [play["load"] for play in plays],
        [why for play in plays for why in _wrong(play)],
    )


def _wrong(play: Play) -> list[str]:
    where = f"round {play['round']}, {play['path']}:"
    found = [
        f"{where} {engine['name']} has other weights than the trainer"
        for engine in play["engines"]
        if not engine["equal"]
    ]
    readers = len(play["engines"]) if play["join"] is None else 1
    if play["path"] == "star" and copies_sent(play) < readers:
        found.append(f"{where} not everybody has read the trainer, so this was no star")
    return found


def _finite(ratio: float) -> float | None:
    return ratio if math.isfinite(ratio) else None


# --- in words ---


def table(report: Report) -> str:
    least, aim = GOALS[report.workload]
    paths = PATHS[report.workload]
    heads = [*paths, *(f"{path}/store" for path in paths[1:])]
    rows = [f"{TITLES[report.workload]:51}" + "".join(f"{head:>14}" for head in heads)]
    for line in report.lines:
        cells = [_value(line.values[path], line.unit) for path in paths]
        cells += [_times(line.ratio(path)) for path in paths[1:]]
        goal = f"  goal {least:g}, aim {aim:g}" if line.counts else ""
        rows.append(f"{line.what:51}" + "".join(f"{cell:>14}" for cell in cells) + goal)
    rows.append(
        f"limits: memcpy of {report.size_bytes / 1e6:.1f} MB {1000 * report.memcpy_s:.1f} ms; one bare stream "
        f"{report.stream_s:.2f} s, so no collective stops these engines for less than {report.best_collective_s:.2f} s"
    )
    rows.append(f"load {min(report.loads):.1f} to {max(report.loads):.1f}")
    rows += [f"WRONG {wrong}" for wrong in report.wrong]
    verdict = "reached" if report.reached else "NOT reached"
    rows.append(f"{verdict}: {least:g} times better than stock in what counts (least {_times(report.worst_ratio)})")
    return "\n".join(rows)


def _value(value: float, unit: str) -> str:
    if unit != "s":
        return f"{value:.0f}" if unit == "/s" else f"{value:.2f}"
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.2f} s"


def _times(ratio: float) -> str:
    if math.isinf(ratio):
        return "none here"
    return f"{ratio:.1f}x" if ratio < RATIO_SHOWN_MAX else f"over {RATIO_SHOWN_MAX}x"
