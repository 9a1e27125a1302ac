"""The picture of the benchmark: how long engines paused (above), and when, in the first round (below)."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

from recipes.bench.workloads.report import GOALS, JOINER, PATHS, TITLES, Report, window  # noqa: E402

COLOURS = {
    "store": "#2ca02c",
    "spare": "#98df8a",
    "deltas": "#1f77b4",
    "star": "#ff9f1c",
    "stock": "#d62728",
    "restart": "#7f1d1d",
}
STARTING = "#c6b8dc"
NOTHING_S = 1e-3  # where a bar ends that stands for no stall at all: the axis is logarithmic
LABEL_WIDTH = 18  # characters
# Seconds a mark is wide at least, as a part of the lane: a pause of 50 ms must be seen.
WIDTH_MIN = 1 / 300


def draw(reports: Sequence[Report], plays: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    figure, axes = plt.subplots(2, len(reports), figsize=(5.2 * len(reports), 8), squeeze=False, layout="constrained")
    for column, report in enumerate(reports):
        _draw_bars(axes[0][column], report)
        _draw_lanes(axes[1][column], plays[report.workload])
    figure.savefig(path, dpi=80)
    plt.close(figure)


def _draw_bars(axes: Any, report: Report) -> None:
    lines = [line for line in report.lines if line.counts]
    for number, line in enumerate(lines):
        width = 0.8 / len(line.values)
        for place, (path, value) in enumerate(line.values.items()):
            at = number + width * (place - (len(line.values) - 1) / 2)
            axes.bar(at, max(value, NOTHING_S), 0.9 * width, color=COLOURS[path], label=path if number == 0 else None)
            text = f"{1000 * value:.0f} ms" if 0 < value < 1 else f"{value:.1f} s" if value else "none"
            axes.annotate(text, (at, max(value, NOTHING_S)), ha="center", va="bottom", fontsize=8)
    axes.axhline(report.memcpy_s, color="grey", linestyle=":", label="one memcpy of the model")
    axes.axhline(report.stream_s, color="grey", linestyle="--", label="one bare stream over the link")
    axes.set_yscale("log")
    axes.set_ylim(NOTHING_S, 60 * max(value for line in lines for value in line.values.values()))
    axes.set_xticks(range(len(lines)), [textwrap.fill(line.what, LABEL_WIDTH) for line in lines], fontsize=8)
    least, aim = GOALS[report.workload]
    verdict = "reached" if report.reached else "not reached"
    axes.set(ylabel="seconds", title=f"{TITLES[report.workload]}\ngoal {least:g} times (aim {aim:g}): {verdict}")
    axes.legend(loc="upper left", fontsize=8, ncols=2)


def _draw_lanes(axes: Any, plays: Sequence[Mapping[str, Any]]) -> None:
    names, row = [], 0
    longest = max(play["ended"] - window(play)[0] for play in plays if play["round"] == 1)
    for path in PATHS[plays[0]["workload"]]:
        play = next(play for play in plays if play["path"] == path and play["round"] == 1)
        start = window(play)[0]
        for engine in sorted(play["engines"], key=lambda engine: engine["name"]):
            marks = [
                (pause["began"] - start, max(pause["ended"] - pause["began"], WIDTH_MIN * longest))
                for pause in engine["pauses"]
                if pause["began"] >= start
            ]
            axes.broken_barh([(0, play["ended"] - start)], (row - 0.35, 0.7), color="#e5f5e0")
            if engine["name"] == JOINER:
                axes.broken_barh([(0, play["join"]["token"] - start)], (row - 0.35, 0.7), color=STARTING)
            else:
                axes.broken_barh(marks, (row - 0.35, 0.7), color=COLOURS["stock"])
            names.append(f"{path}: {engine['name']}" + (" (remote)" if engine["data_center"] == "west" else ""))
            row += 1
    axes.set_yticks(range(row), names, fontsize=8)
    axes.set_ylim(row - 0.4, -0.6)  # the first lane on top
    axes.set_xlim(0, longest)
    newcomer = "; violet: from asking to the first token" if any(play["join"] for play in plays) else ""
    axes.set(xlabel="seconds", title=f"red: stands still{newcomer}")
