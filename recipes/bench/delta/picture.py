"""The picture of the benchmark: how many times smaller a version is by density, and how long it takes over a link."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "delta"})  # the same file of the same figures

Row = dict[str, Any]
KINDS = {"uniform": ("#2ca02c", "o"), "clustered": ("#1f77b4", "s"), "real": ("#d62728", "*")}
OTHERS = ("#555555", "#888888", "#bbbbbb")
LINKS = ("#9467bd", "#8c564b", "#17becf", "#e377c2")


def draw(options: argparse.Namespace) -> None:
    """Draw what the other commands have saved as JSON."""
    rows = [row for path in options.files for row in json.loads(path.read_text())["rows"]]
    by_codec, by_link = ([row for row in rows if name in row] for name in ("ratio", "link"))
    count = 1 + any("speeds" in row for row in by_codec) + bool(by_link)
    figure, axes = plt.subplots(1, count, figsize=(5.2 * count, 4.4), squeeze=False, layout="constrained")
    drawn = iter(axes[0])
    draw_ratios(next(drawn), by_codec)
    if any("speeds" in row for row in by_codec):
        draw_speeds(next(drawn), [row for row in by_codec if row["kind"] == "uniform"])
    if by_link:
        draw_links(next(drawn), by_link)
    for each in axes[0]:
        each.set_xscale("log")
        each.set_xlabel("changed elements, %")
        each.grid(alpha=0.2, which="both")
        each.legend(fontsize=7)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out, format="svg", metadata={"Date": None})
    plt.close(figure)
    print(options.out)


def draw_ratios(axes: Any, rows: Sequence[Row]) -> None:
    for kind, (colour, marker) in KINDS.items():
        own = [row for row in rows if row["kind"] == kind]
        line = "" if kind == "real" else "-"
        _line(axes, own, lambda row: row["ratio"], color=colour, marker=marker, linestyle=line, label=f"deltas, {kind}")
    uniform = [row for row in rows if row["kind"] == "uniform" and row["of_bound"]]
    _line(axes, uniform, lambda row: row["ratio"] / row["of_bound"], color="black", linestyle=":", label="the bound")
    for number, name in enumerate(rows[0]["others"] if rows else ()):
        own = [row for row in rows if row["kind"] == "uniform"]
        _line(axes, own, lambda row, name=name: row["others"][name], color=OTHERS[number], linestyle="--", label=name)
    axes.set_yscale("log")
    axes.set(ylabel="times smaller than the version", title="ratio")


def draw_speeds(axes: Any, rows: Sequence[Row]) -> None:
    """Draw times as multiples of a memcpy of the same segments, which is in every round."""
    for what in (name for name in rows[0]["speeds"] if name != "memcpy"):
        own = [row for row in rows if what in row["speeds"]]
        style = "-" if "native" in what else "--"
        colour = KINDS["uniform" if "encode" in what else "real"][0]
        _line(axes, own, lambda row, what=what: 1 / row["speeds"][what][1], color=colour, linestyle=style, label=what)
    axes.axhline(1.0, color="grey", linestyle=":", label="memcpy")
    axes.set_yscale("log")
    axes.set(ylabel="times as long as memcpy, one core", title="time to encode and to apply")


def draw_links(axes: Any, rows: Sequence[Row]) -> None:
    for colour, link in zip(LINKS, dict.fromkeys(row["link"] for row in rows), strict=False):
        own = [row for row in rows if row["link"] == link]
        what = "free loopback" if link == "free" else "{} Mbit/s, {} ms".format(*link.split("/"))
        _line(axes, own, lambda row: row["whole_s"], color=colour, linestyle="--", label=f"{what}: whole")
        _line(axes, own, lambda row: row["delta_s"], color=colour, marker="o", label=f"{what}: deltas")
    axes.set_yscale("log")
    axes.set(ylabel="seconds until a reader has it", title="time of a pull")


def _line(axes: Any, rows: Iterable[Row], value: Any, **how: Any) -> None:
    points = sorted((row["percent"], value(row)) for row in rows if row["percent"])
    if points:
        axes.plot(*zip(*points, strict=True), markersize=5, linewidth=1.3, **how)
