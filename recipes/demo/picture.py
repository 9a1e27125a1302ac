"""The picture of a run: one lane a worker (publish, pull, pause, generate), the reward, and the KL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

from recipes.demo.report import TRAINER, Report, replica_of  # noqa: E402

COLOURS = {"publish": "#1f77b4", "generate": "#c7e9c0", "pull": "#ff9f1c", "pause": "#d62728"}
# Seconds a bar is wide at least, as a part of the run: a pause of 50 ms must be seen on a picture of two minutes.
WIDTH_MIN = 1 / 400


def draw(report: Report, events: list[dict[str, Any]], path: Path) -> None:
    figure, (lanes, reward, kl) = plt.subplots(3, 1, figsize=(12, 8), height_ratios=[2, 1, 1], layout="constrained")
    _draw_lanes(lanes, events)
    numbers = [step.step for step in report.steps]
    reward.plot(numbers, [step.reward for step in report.steps], marker="o", color="#2ca02c")
    reward.set(ylabel="mean reward", xticks=numbers)
    with_kl = [step for step in report.steps if step.kl is not None]
    kl.semilogy([s.step for s in with_kl], [max(s.kl, 1e-9) for s in with_kl], marker="o", color="#9467bd")
    kl.axhline(1e-3, color="grey", linestyle=":", label="1e-3")
    kl.set(ylabel="KL(rollout, trainer)", xlabel="training step", xticks=numbers)
    control = [step.step for step in report.steps if not step.pulling]
    if control:
        for axes in (reward, kl):
            axes.axvspan(control[0] - 0.5, control[-1] + 0.5, color="#eeeeee", label="pulling off")
    kl.legend(loc="upper left")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_lanes(axes: Any, events: list[dict[str, Any]]) -> None:
    start = min((e["t"] - e.get("seconds", 0.0) for e in events), default=0.0)
    stop = max((e["t"] for e in events), default=1.0)
    narrowest = (stop - start) * WIDTH_MIN
    kinds = {"publish": "publish", "request": "generate", "fetch": "pull", "resume": "pause"}
    spans: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for event in events:
        kind = kinds.get(event["event"])
        if kind:
            lane = replica_of(event["worker"])
            began = event["t"] - event["seconds"] - start
            spans.setdefault(lane, {}).setdefault(kind, []).append((began, max(event["seconds"], narrowest)))
    names = sorted(spans, key=lambda name: (name != TRAINER, name))
    for row, name in enumerate(names):
        for order, kind in enumerate(("generate", "publish", "pull", "pause")):
            height = 0.8 if kind in ("generate", "pause") else 0.5
            bars = spans[name].get(kind, [])
            axes.broken_barh(bars, (row - height / 2, height), color=COLOURS[kind], zorder=2 + order)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -1.1)  # the first lane on top, below the legend
    axes.set(xlabel="seconds", title="one lane a worker; a pause is drawn wider than it is if it is too short to see")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    axes.legend(handles, COLOURS, loc="upper right", ncols=len(COLOURS))
