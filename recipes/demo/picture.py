"""The picture of a run: one lane a worker (publish, pull, pause, generate), the reward, and the KL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

from recipes.demo.report import TRAINER, Report, replica_of  # noqa: E402

COLOURS = {"publish": "#1f77b4", "generate": "#c7e9c0", "pull": "#ff9f1c", "pause": "#d62728"}
# Seconds a bar is wide at least, as a part of the run: a pause of 50 ms must be seen on a picture of two minutes.
WIDTH_MIN = 1 / 400
TICKS_MAX = 30  # numbers of steps below an axis


def draw(
    report: Report,
    events: list[dict[str, Any]],
    path: Path,
    *,
    kl_max: float = 1e-3,
    beside: Mapping[str, Sequence[float]] | None = None,
) -> None:
    """Draw the picture. kl_max: the line that KL should stay below. beside: rewards of other runs, step by step."""
    figure, (lanes, reward, kl) = plt.subplots(3, 1, figsize=(12, 8), height_ratios=[2, 1, 1], layout="constrained")
    _draw_lanes(lanes, events)
    numbers = [step.step for step in report.steps]
    reward.plot(numbers, [step.reward for step in report.steps], marker="o", color="#2ca02c", label="tensorhub")
    for name, rewards in (beside or {}).items():
        reward.plot(range(1, 1 + len(rewards)), rewards, color="grey", label=name)
    ticks = numbers if len(numbers) <= TICKS_MAX else numbers[:: -(-len(numbers) // TICKS_MAX)]
    reward.set(ylabel="mean reward", xticks=ticks)
    with_kl = [step for step in report.steps if step.kl is not None]
    kl.semilogy([s.step for s in with_kl], [max(s.kl, 1e-9) for s in with_kl], marker="o", color="#9467bd")
    kl.axhline(kl_max, color="grey", linestyle=":", label=f"{kl_max:g}")
    kl.set(ylabel="KL(rollout, trainer)", xlabel="training step", xticks=ticks)
    control = [step.step for step in report.steps if not step.pulling]
    if control:
        for axes in (reward, kl):
            axes.axvspan(control[0] - 0.5, control[-1] + 0.5, color="#eeeeee", label="pulling off")
    kl.legend(loc="upper left")
    if beside:
        reward.legend(loc="upper left")
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
