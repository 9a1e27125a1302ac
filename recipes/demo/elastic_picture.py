"""The picture of a fleet: how many replicas serve, which version each of them holds, and when each was paused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

from recipes.demo.elastic_report import Report, ready_over_time  # noqa: E402
from recipes.demo.report import replica_of  # noqa: E402

STATES = {"starting": "#fdd0a2", "ready": "#c7e9c0", "lost": "#fcae91", "draining": "#bdd7e7", "stopping": "#6baed6"}
PAUSE = "#d62728"
WIDTH_MIN = 1 / 400  # of the whole run: a pause of 50 ms must be seen on a picture of minutes


def draw(report: Report, events: list[dict[str, Any]], path: Path) -> None:
    start = min(event["t"] for event in events)
    stop = max(event["t"] for event in events)
    figure, (count, lanes, versions) = plt.subplots(
        3, 1, figsize=(12, 9), height_ratios=[1, 2, 2], sharex=True, layout="constrained"
    )
    changes = [*ready_over_time(events)]
    times = [t - start for t, _ in changes] + [stop - start]
    count.step(times, [n for _, n in changes] + [changes[-1][1] if changes else 0], where="post", color="#238b45")
    count.set(ylabel="replicas that serve", ylim=(0, None))
    for act in report.acts:
        for axes in (count, lanes, versions):
            axes.axvline(act.began - start, color="grey", linestyle=":", zorder=1)
        count.annotate(act.what, (act.began - start, 0.1), rotation=90, fontsize=7, ha="right", va="bottom")
    _draw_states(lanes, events, start, stop)
    _draw_versions(versions, events, start, stop)
    versions.set(xlabel="seconds")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_states(axes: Any, events: list[dict[str, Any]], start: float, stop: float) -> None:
    """Draw one lane a replica: its states, and over them the seconds in which it paused for an update."""
    lives: dict[str, list[tuple[float, str]]] = {}
    for event in events:
        if event["event"] == "member":
            lives.setdefault(replica_of(event["worker"]), []).append((event["t"], event["state"]))
    names = sorted(lives)
    for row, name in enumerate(names):
        for (began, state), (ended, _) in zip(lives[name], [*lives[name][1:], (stop, "")], strict=True):
            if state in STATES:
                axes.broken_barh([(began - start, ended - began)], (row - 0.4, 0.8), color=STATES[state], zorder=2)
        pauses = [e for e in events if e["event"] == "resume" and replica_of(e["worker"]) == name]
        narrowest = (stop - start) * WIDTH_MIN
        bars = [(e["t"] - e["seconds"] - start, max(e["seconds"], narrowest)) for e in pauses]
        axes.broken_barh(bars, (row - 0.4, 0.8), color=PAUSE, zorder=3)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -1.2)
    colours = {**STATES, "stands still": PAUSE}
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
    axes.legend(handles, colours, loc="upper right", ncols=len(colours), fontsize=8)


def _draw_versions(axes: Any, events: list[dict[str, Any]], start: float, stop: float) -> None:
    published = [(e["t"] - start, e["version"]) for e in events if e["event"] == "publish"]
    axes.step(*zip(*published, strict=True), where="post", color="black", linestyle="--", label="published")
    held: dict[str, list[tuple[float, int]]] = {}
    for event in events:
        if event["event"] == "resume":
            held.setdefault(replica_of(event["worker"]), []).append((event["t"] - start, event["version"]))
    for name, points in sorted(held.items()):
        axes.step(*zip(*points, strict=True), where="post", marker=".", label=name)
    axes.set(ylabel="version", xlim=(0, stop - start))
    axes.legend(loc="upper left", fontsize=8)
