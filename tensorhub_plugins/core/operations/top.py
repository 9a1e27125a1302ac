"""`tensorhub top`: the state of a hub's runs, live in a terminal, else once as plain text.

It shows what `tensorhub status` does, fetched again and again: what is wrong, and a line for each worker, those with a
problem first. `frame` decides, `plain` and `watch` show it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tensorhub_plugins.core.deadline import bounded
from tensorhub_plugins.core.errors import HubUnreachable, TensorHubError
from tensorhub_plugins.core.operations.problems import Problem, ago, rate_text
from tensorhub_plugins.core.operations.status import at, escaped
from tensorhub_plugins.core.types import version_label

Report = Mapping[str, Any]
HEADINGS = ("WORKER", "HOST", "RUNS", "LAG", "HOLDS", "MB", "READS FROM", "STATE")
VERSIONS_MAX = 3  # that a worker holds, in its line


class Model(NamedTuple):
    """One model: its headline, and a row of cells for each worker."""

    headline: str
    rows: list[tuple[str, ...]]
    is_bad: list[bool]  # by row


class Frame(NamedTuple):
    """What is shown at one moment."""

    headline: str
    problems: list[Problem]
    models: list[Model]


def frame(report: Report, problems: Sequence[Problem]) -> Frame:
    """Return what is to be shown of a report."""
    report = escaped(report)
    count = f"{len(problems)} problem{'s' * (len(problems) != 1)}" if problems else "nothing is wrong"
    headline = f"hub {report['hub'][:8]}{at(report)}, up {ago(report['up_s'])}: {count}"
    return Frame(headline, [Problem(*escaped(list(each))) for each in problems], [*map(_model, report["models"])])


def _model(model: Report) -> Model:
    age = f", published {ago(model['newest_age_s'])} ago" if model["newest"] and "newest_age_s" in model else ""
    newest = version_label(model["newest"]) if model["newest"] else "none"
    counts = f"{len(model['workers'])} workers, {len(model['leases'])} transfers"
    headline = f"{model['run']}/{model['model']}: newest {newest}{age}, {counts}"
    reads, rates = dict[str, set[str]](), Counter[str]()
    for lease in model["leases"]:
        reads.setdefault(lease["reader"], set()).update(lease["sources"].values())
        rates[lease["reader"]] += lease.get("bytes_per_s", 0)
    for each in model["workers"]:
        if other := (each.get("waits") or {}).get("converter"):
            reads.setdefault(each["worker"], {f"waits for {other['worker']}"})
    workers = sorted(((each, _state(each)) for each in model["workers"]), key=_order)
    sources = {
        name: f"{' '.join(sorted(names))}{rate_text({'bytes_per_s': rates[name]})}" for name, names in reads.items()
    }
    cells = [_cells(worker, sources.get(worker["worker"], ""), state) for worker, state in workers]
    return Model(headline, cells, [bool(state) for _, state in workers])


def _order(one: tuple[Report, str]) -> tuple[bool, int, str]:
    """Return a key that sorts workers with a problem first, then those that are the furthest behind."""
    worker, state = one
    return not state, -(worker.get("follows") or {"lag_steps": 0})["lag_steps"], worker["worker"]


def _state(worker: Report) -> str:
    """Return what is wrong with it, in a word; "": nothing is known to be."""
    words = {
        "silent": worker.get("silent"),
        "refuses": worker.get("refuses"),
        "fails": worker.get("fails"),
        "corrupt": worker.get("corrupt_segments"),
        "unreached": worker.get("unreached"),
        "lacks": worker.get("lacks"),
    }
    return " ".join(word for word, is_so in words.items() if is_so)


def _cells(worker: Report, sources: str, state: str) -> tuple[str, ...]:
    follows, held = worker.get("follows"), [version_label(number) for number in worker["holds"][-VERSIONS_MAX:]]
    runs = lag = ""
    if follows:
        runs = version_label(follows["version"]) if follows["version"] else "none"
        lag = f"{follows['lag_steps']}, {ago(follows['behind_s'])}" if follows["lag_steps"] else "0"
    size = f"{worker['bytes_held'] / 1e6:.0f}" if worker["bytes_held"] else ""
    return worker["worker"], worker["location"]["host"], runs, lag, " ".join(held), size, sources, state


def plain(shown: Frame) -> str:
    """Return it as text of any width, for a pipe."""
    lines = [shown.headline]
    for problem in shown.problems:
        lines += [f"! {problem.of}: {problem.what}", *([f"    {problem.to_do}"] if problem.to_do else [])]
    for model in shown.models:
        lines += ["", model.headline]
        table = [HEADINGS, *model.rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines += ["  ".join(f"{cell:{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join(lines)


def drawn(shown: Frame, note: str, console: Any) -> Any:
    """Return it for rich's console. Lines are cut at its width, and workers are left out that do not fit its height."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    def line(text: str, style: str = "") -> Any:
        return Text(text, style=style, no_wrap=True, overflow="ellipsis")

    # A problem takes what it needs: one that is cut could lack what helps.
    lines = [line(shown.headline, "bold"), *([line(note, "bold red")] if note else [])]
    for problem in shown.problems:
        lines.append(Text(f"! {problem.of}: {problem.what}", style="red"))
        lines += [Text(f"  {problem.to_do}", style="yellow")] if problem.to_do else []
    left = console.height - sum(len(each.wrap(console, console.width)) for each in lines)
    for model in shown.models:
        lines += [line(""), line(model.headline, "bold")]
        kept = model.rows[: max(1, left // len(shown.models) - 4)]
        table = Table(*HEADINGS, box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
        for column, heading in zip(table.columns, HEADINGS, strict=True):
            column.no_wrap, column.overflow = True, "ellipsis"
            column.justify = "right" if heading == "MB" else "left"
        for row, is_bad in zip(kept, model.is_bad, strict=False):
            table.add_row(*map(line, row), style="red" if is_bad else "")
        lines += [table, *([line(f"and {more} more workers", "dim")] if (more := len(model.rows) - len(kept)) else [])]
    return Group(*lines)


def can_draw() -> bool:
    """Return whether this terminal can do more than write lines."""
    from rich.console import Console

    return not Console().is_dumb_terminal


def watch(fetch: Callable[[], tuple[Report, list[Problem]]], interval_s: float) -> int:
    """Show it in this terminal until Ctrl-C. Return 0, 1 or 2 as `tensorhub status` would have at the end.

    A hub that does not answer any more does not end it: it says for how long, over the last that was known."""
    from rich.console import Console
    from rich.live import Live

    none = Frame("no hub has answered yet", [], [])
    console, shown, status, heard_at = Console(), none, 2, time.monotonic()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            at_terminal = console.is_terminal
            while console.is_terminal == at_terminal:  # rich draws nothing where it has gone
                note = ""
                try:
                    report, problems = fetch()
                    shown, status, heard_at = frame(report, problems), int(bool(problems)), time.monotonic()
                except TensorHubError as error:
                    if shown is none and not isinstance(error, HubUnreachable):
                        raise  # what is asked for is wrong; later its name, say, may be gone for a while
                    note, status = f"no answer for {ago(time.monotonic() - heard_at)}: {error}", 2
                live.update(drawn(shown, note, console), refresh=True)
                time.sleep(bounded(interval_s))
        except KeyboardInterrupt:
            pass
    return status
