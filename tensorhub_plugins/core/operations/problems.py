"""What is wrong, by a hub's report: each problem in a line, with what to do. PURE.

`tensorhub status` and `top` show them, and end with 1 where there is one. A follower is late when it has had a newer
version to install for `late_s`, and has installed none; a trainer, when its next version takes five times as long as
any of the last ones. A report of an older hub lacks some entries, and shows no problem that needs them.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tensorhub_plugins.core.types import COMPILED, RECENT_S, version_label

LATE_S = 60.0
PACE_TIMES = 5  # as long as the last ones a trainer's next version may take
CONNECTIONS_FEW = 256  # that a hub can still accept
NAMES_MAX = 3  # of workers in one line
HUB = "the hub"
DOCTOR = "`tensorhub doctor machine`"

Report = Mapping[str, Any]


class Problem(NamedTuple):
    """Something that keeps a model, or the hub, from what it is to do."""

    of: str  # "run/model", or the hub
    kind: str  # for machines; docs/operate.md has all of them
    what: str
    to_do: str


def find(report: Report, *, hub: str = "", late_s: float = LATE_S) -> list[Problem]:
    """Return all that is wrong, the worst of each model first. hub: its address, for the commands that help."""
    problems = [problem for model in report["models"] for problem in _of_model(model, hub, late_s)]
    if (room := report.get("connections_left", CONNECTIONS_FEW)) < CONNECTIONS_FEW:
        what = f"room for {room} more connections"
        problems.append(Problem(HUB, "connections", what, "raise the hub's limit of open files (ulimit -Hn)"))
    if report.get("was_restarted") and report["up_s"] < RECENT_S:
        what = f"it was started again {ago(report['up_s'])} ago, while workers were connected; they are again"
        if (times := report.get("restarts", 1)) > 1:
            what = f"{what}: {times} times in ten minutes, at least"
        problems.append(Problem(HUB, "restarted", what, "the end of the log before says why it ended"))
    refused = report.get("refused_hosts", ())
    for each in refused[:NAMES_MAX]:
        more = f", as {len(refused) - NAMES_MAX} other hosts were" if len(refused) > NAMES_MAX else ""
        what = (
            f"it has refused {each['count']} handshakes of {each['host']}, the last one {ago(each['seconds_ago'])} "
            f"ago: another secret than the run's, or none{more}"
        )
        to_do = f"{DOCTOR} there says which it uses; give it the run's (TENSORHUB_SECRET_FILE)"
        problems.append(Problem(HUB, "refused_handshakes", what, to_do))
    return problems


def _of_model(model: Report, hub: str, late_s: float) -> Iterator[Problem]:
    name = f"{model['run']}/{model['model']}"
    for problems in (_versions, _followers, _workers, _copies):
        for kind, what, to_do in problems(model, hub, late_s):
            yield Problem(name, kind, what, to_do)


Found = Iterator[tuple[str, str, str]]


def _versions(model: Report, hub: str, late_s: float) -> Found:
    newest, pin = model["newest"], model.get("pinned")
    visible = {version["version"] for version in model["versions"] if version["visible"]}
    age_s, pace_s = model.get("newest_age_s", 0.0), model.get("pace_s", 0.0)
    is_complete = not model.get("left_out")
    if pin and pin not in visible and is_complete:
        what = f"version {version_label(pin)} is pinned, but no worker holds it"
        yield "pin_lost", what, f"{command('unpin', model, hub)}, or pin another"
    elif pin and newest > pin:
        what = f"version {version_label(pin)} is pinned, and the newest is {version_label(newest)}"
        yield "pinned", what, f"{command('unpin', model, hub)}, when the pin has done its work"
    if COMPILED in model["model"]:  # an engine publishes what it had to compile, and may leave
        return
    if is_complete and newest and not any(worker["bytes_published"] for worker in model["workers"]):
        what = f"no trainer is connected; the newest version, {version_label(newest)}, is of {ago(age_s)} ago"
        yield "no_trainer", what, "if the run has not ended: see the trainer's log"
    elif (part := model.get("unfinished")) and part["seconds"] > max(late_s, PACE_TIMES * pace_s):
        names = ", ".join(part["missing"][:NAMES_MAX])
        more = f" and {left} more" if (left := part["missing_count"] - NAMES_MAX) > 0 else ""
        what = (
            f"version {version_label(part['version'])} is not whole for {ago(part['seconds'])}: without {names}{more}"
        )
        yield "unfinished", what, "see the log of that rank: engines get a version that all ranks have published"
    elif pace_s and age_s > max(late_s, PACE_TIMES * pace_s):
        what = f"the trainer has published nothing for {ago(age_s)}; each version before took at most {ago(pace_s)}"
        yield "trainer_late", what, "see its log, and how long it waits for rollouts"


def _followers(model: Report, hub: str, late_s: float) -> Found:
    """Yield followers that refuse a version, fail at it, or do not go on though nothing holds them."""
    followers = [worker for worker in model["workers"] if worker.get("follows")]
    refusing = [worker for worker in model["workers"] if worker.get("refuses")]
    for number in sorted({worker["refuses"]["version"] for worker in refusing}):
        those = [worker for worker in refusing if worker["refuses"]["version"] == number]
        why = those[0]["refuses"]["why"] or "its log says why"
        what = f"{_names(those)} cannot install version {version_label(number)}: {why}"
        bad = command("withdraw", model, hub, version_label(number))
        yield "refused", what, f"publish one that fits its engine; `tensorhub doctor check-sync` tries one; bad: {bad}"
    over = [worker for worker in followers if worker["follows"]["version"] in model.get("withdrawn", ())]
    if over:
        yield "withdrawn", f"{_names(over)} runs a version that was withdrawn", "publish another, or see its log"
    at_pin = {model.get("pinned")} - {None}
    late = [
        worker
        for worker in followers
        if worker["follows"]["behind_s"] > late_s
        and worker["follows"]["version"] not in at_pin
        and worker not in refusing
        and not worker.get("silent")
    ]
    if late:
        behind = [worker["follows"] for worker in late]
        steps, seconds = max(each["lag_steps"] for each in behind), max(each["behind_s"] for each in behind)
        causes = [f"; it says: {worker['fails']}" for worker in late if worker.get("fails")][:1]
        to_do = "see the log of that engine, or `tensorhub fleet list`"
        replicas = {_replica(worker["worker"]) for worker in late}
        for lease in [each for each in model["leases"] if _replica(each["reader"]) in replicas][:1]:
            sources = ", ".join(set(lease["sources"].values()))
            causes.append(f"; {lease['reader']} reads from {sources}{rate_text(lease)}")
            to_do = f"if that is slow for this link, `tensorhub bench` measures it; else {to_do}"
        waiting = (worker for worker in model["workers"] if worker.get("waits"))
        for worker in [each for each in waiting if _replica(each["worker"]) in replicas][:1]:
            causes.append(f"; {worker['worker']} {waits_text(worker)}")
            if other := worker["waits"]["converter"]:
                to_do = f"see the log of {other['worker']}"
        what = (
            f"{len(late)} of {len(followers)} followers install nothing newer: {_names(late)}, up to {steps} steps "
            f"behind, for {ago(seconds)}{''.join(causes)}"
        )
        yield "late", what, to_do


def waits_text(worker: Report) -> str:
    """Return what it waits for before it can read, and how that goes on; "": it waits for nothing."""
    if not (waits := worker.get("waits")):
        return ""
    version, other = version_label(waits["version"]), waits["converter"]
    if other is None:
        return f"has waited {ago(waits['waits_s'])} for a source of version {version}"
    does = "converts it" if other["converts"] else "has it, or reads it, and has no room for more readers"
    if other["converts"] and other["worked_s"] is not None:
        does = f"{does} (last piece of work {ago(other['worked_s'])} ago)"
    return f"has waited {ago(waits['waits_s'])} for version {version} from {_name(other)}, which {does}"


def _replica(worker: str) -> str:
    """Return the replica of this worker: an engine follows under its name and "-follow"."""
    return worker.partition("/")[0].removesuffix("-follow")


def _workers(model: Report, hub: str, late_s: float) -> Found:
    silent = [worker for worker in model["workers"] if worker.get("silent")]
    if silent:
        what = f"{_names(silent, at_hosts=True)} not heard for {ago(max(worker['last_heard_s'] for worker in silent))}"
        yield "silent", what, "a killed or frozen process, or a cut link: see that node"
    if lost := model.get("lost"):
        what = f"{_names(lost, at_hosts=True)} lost, {ago(min(worker['seconds_ago'] for worker in lost))} ago"
        yield "lost", what, "see its node and its log; `tensorhub fleet list` shows what has replaced it"
    for worker in model["workers"]:
        if worker.get("lacks"):
            yield "lacks", f"{_name(worker)}: {worker['lacks']}", f"give it more there; {DOCTOR} shows what it may have"
        if worker.get("unreached"):
            yield "unreached", worker["unreached"], ""
        if corrupt := worker.get("corrupt_segments"):
            what = f"readers got {corrupt} corrupt segments from {worker['worker']}"
            host = worker["location"]["host"] or "its host"
            yield "corrupt", what, f"drain it: {host} may have bad memory, or a bad card; see its log and theirs"


def _copies(model: Report, hub: str, late_s: float) -> Found:
    for missing in model.get("missing_copies", ()):
        what = f"version {version_label(missing['version'])} {missing['why']}"
        yield "missing_copies", what, "free memory, or let another host join"
    if model.get("over_budget"):
        names = (f"{x['worker']} {x['bytes'] / 1e6:.1f} MB of {x['versions']} versions" for x in model["over_budget"])
        published, budget = model["bytes_published"] / 1e6, model["budget_bytes"] / 1e6
        what = f"published {published:.1f} MB, above the budget of {budget:.1f} MB: {', '.join(names)}"
        yield "budget", what, "unpublish older versions, or raise --published-bytes-max"


def _names(workers: Sequence[Report], *, at_hosts: bool = False) -> str:
    more = f" and {len(workers) - NAMES_MAX} more" if len(workers) > NAMES_MAX else ""
    return ", ".join(_name(each) if at_hosts else each["worker"] for each in workers[:NAMES_MAX]) + more


def _name(worker: Report) -> str:
    """Return its name, and its host where that is known."""
    host = worker.get("location", worker).get("host")
    return f"{worker['worker']} on {host}" if host else str(worker["worker"])


def command(name: str, model: Report, hub: str, version: str = "") -> str:
    """Return a command that a shell takes as it is, whatever the run's name."""
    words = ["tensorhub", name, *([version] if version else []), f"--run={model['run']}", f"--model={model['model']}"]
    return f"`{shlex.join([*words, '--hub', hub] if hub else words)}`"


def rate_text(lease: Report) -> str:
    """Return at what rate a lease reads: " at 812 MB/s"; "": that is not known, or nothing comes."""
    return f" at {rate / 1e6:.3g} MB/s" if (rate := lease.get("bytes_per_s", 0)) >= 1000 else ""


def ago(seconds: float) -> str:
    """Return a time as people say it: "41 s", "12 min", "3.5 h"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
