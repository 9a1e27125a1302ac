"""The report of a run, from its event log and the trainer's metrics, and whether it did what we claim.

PURE but for `read_events` and `read_metrics`: events and metrics in, a Report out. Each claim names the rows that break
it. A claim about something the log does not show fails: no evidence is not a pass.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

CONTROL_FACTOR_MIN = 3.0  # with pulling off, KL must leave what it was by at least this factor
TRAINER = "trainer"
DETAIL_MAX = 400  # characters of why a claim failed, in a summary


@dataclass(frozen=True)
class Trainer:
    """The way in which a framework counts, and its names for things."""

    reward: str
    kl: str
    kl_max: float  # of a step whose samples come from the version they should
    staleness: str
    first_version: int  # of the weights before training; 0: they have none, and the first step publishes version 1
    lag: int  # steps from the last one that is pulled to the first whose samples can miss a version
    keeps_requests: bool  # updates meet answers in flight


# Step s trains on what was generated while step s - 1 was being trained, so with the weights of step s - 2.
VERL = Trainer(
    reward="critic/score/mean",
    kl="rollout_corr/k3_kl",
    kl_max=1e-3,
    staleness="training/off_policy/trajectory_staleness/mean",
    first_version=1,
    lag=3,
    keeps_requests=True,
)
# Generates and trains in turns: step s trains on what the weights of step s - 1 have generated.
OPENRLHF_SYNC = Trainer(
    reward="reward",
    kl="vllm_kl",
    kl_max=1e-2,  # trainer and vLLM both compute in bfloat16
    staleness="tensorhub/staleness_mean",
    first_version=0,
    lag=2,
    keeps_requests=False,
)


@dataclass
class Pull:
    """One replica taking one version."""

    replica: str
    version: int
    pull_s: float = 0.0  # bytes on their way, engine generating; the slowest worker of the replica
    pause_s: float | None = None  # the engine stood still; None: it never resumed with this version
    bytes_from_trainer: int = 0
    bytes_from_peers: int = 0
    sources: list[str] = field(default_factory=list)
    transports: list[str] = field(default_factory=list)
    kept: int = 0
    lost: int = 0


@dataclass
class Version:
    version: int
    bytes: int
    publish_wait_s: float
    pulls: list[Pull]
    digests_equal: bool
    digests: str  # what was compared, or what is wrong

    @property
    def trainer_bytes(self) -> int:
        return sum(pull.bytes_from_trainer for pull in self.pulls)

    @property
    def peer_bytes(self) -> int:
        return sum(pull.bytes_from_peers for pull in self.pulls)


@dataclass
class Step:
    step: int
    reward: float
    kl: float | None
    staleness: float
    pulling: bool


@dataclass
class Claim:
    claim: str
    holds: bool
    detail: str


@dataclass
class Report:
    replicas: list[str]
    pulled_until: int  # the last version that replicas were to take; later ones are the negative control
    versions: list[Version]
    steps: list[Step]
    requests: dict[str, int]  # outcome -> count
    failures: list[str]
    claims: list[Claim]

    @property
    def holds(self) -> bool:
        return all(claim.holds for claim in self.claims)

    def to_json(self) -> str:
        fields = asdict(self)
        for plain, version in zip(fields["versions"], self.versions, strict=True):
            plain.update(trainer_bytes=version.trainer_bytes, peer_bytes=version.peer_bytes)
        return json.dumps({"holds": self.holds, **fields}, indent=1)


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Return all processes' events by time. A last line cut off by a kill is dropped; any other broken line is an
    error."""
    events = []
    for path in sorted(folder.glob("*.jsonl")):
        lines = path.read_text().split("\n")
        events += [json.loads(line) for line in lines[:-1]]
    return sorted(events, key=lambda event: event["t"])


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read verl's file logger: one {"step": n, "data": {...}} a line."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def replica_of(worker: str) -> str:
    return worker.rpartition("/")[0]


def make_report(
    events: Sequence[dict[str, Any]],
    metrics: Sequence[dict[str, Any]],
    *,
    replicas: int,
    steps: int,
    control_steps: int,
    trainer: Trainer = VERL,
) -> Report:
    """Make the report. replicas: how many should be there. steps: trained with pulling on, control_steps: off after
    them.

    Step s publishes version s + trainer.first_version.
    """
    pulled_until = steps + trainer.first_version
    by_version: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        by_version[event.get("version", 0)].append(event)
    versions = [_version(version, found) for version, found in sorted(by_version.items()) if _named(found, "publish")]
    names = sorted({pull.replica for version in versions for pull in version.pulls})
    requests: dict[str, int] = defaultdict(int)
    for event in _named(events, "request"):
        requests[event.get("outcome", "unknown")] += 1
    failures = [f"{e['worker']}, version {e.get('version')}: {e.get('error')}" for e in _named(events, "update_failed")]
    rows = [_step(row, steps, trainer) for row in metrics]
    report = Report(names, pulled_until, versions, rows, dict(requests), failures, [])
    report.claims = [
        _all_pulled(report, replicas),
        _peers_serve(report),
        _digests_equal(report),
        _no_request_lost(report, trainer),
        _log_probs_agree(report, steps, trainer.kl_max),
        _control_diverges(report, control_steps),
    ]
    return report


def _named(events: Iterable[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == name]


def _version(version: int, events: list[dict[str, Any]]) -> Version:
    published = _named(events, "publish")
    pulls: dict[str, Pull] = {}
    for event in _named(events, "fetch"):
        name = replica_of(event["worker"])
        pull = pulls.setdefault(name, Pull(name, version))
        pull.pull_s = max(pull.pull_s, event["seconds"])
        for source, count in event.get("sources", {}).items():
            if replica_of(source) == TRAINER:
                pull.bytes_from_trainer += count
            else:
                pull.bytes_from_peers += count
            if count and source not in pull.sources:
                pull.sources.append(source)
        pull.transports += [t for t, count in event.get("transports", {}).items() if count and t not in pull.transports]
    for event in _named(events, "resume"):
        name = replica_of(event["worker"])
        pull = pulls.setdefault(name, Pull(name, version))
        pull.pause_s = event["seconds"]
        pull.kept, pull.lost = event.get("in_flight", 0), event.get("lost", 0)
    equal, text = _compare_digests(_named(events, "digests"))
    return Version(
        version=version,
        bytes=sum(event["bytes"] for event in published),
        publish_wait_s=max(event["seconds"] for event in published),
        pulls=[pulls[name] for name in sorted(pulls)],
        digests_equal=equal,
        digests=text,
    )


def _compare_digests(events: list[dict[str, Any]]) -> tuple[bool, str]:
    """Equal where layout and key are; the trainer must be among those compared, and so must every engine seen."""
    seen: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for event in events:
        for key, digest in event.get("digests", {}).items():
            seen[event["layout"], key][event["worker"]] = digest
    for (layout, key), workers in seen.items():
        if len(set(workers.values())) > 1:
            return False, f"{layout} {key}: " + ", ".join(f"{w} {d[:8]}" for w, d in sorted(workers.items()))
    together = [sorted(workers) for workers in seen.values() if len(workers) > 1]
    if not any(replica_of(worker) == TRAINER for group in together for worker in group):
        return False, "nobody's digest can be compared with the trainer's"
    return True, "; ".join(" = ".join(group) for group in together)


def _step(row: dict[str, Any], steps: int, trainer: Trainer) -> Step:
    data = row["data"]
    return Step(
        step=row["step"],
        reward=data.get(trainer.reward, float("nan")),
        kl=data.get(trainer.kl),
        staleness=data.get(trainer.staleness, float("nan")),
        pulling=row["step"] < steps + trainer.lag,
    )


def _all_pulled(report: Report, replicas: int) -> Claim:
    name = f"every replica takes every version up to {report.pulled_until}, and none after it"
    wrong = []
    if len(report.replicas) != replicas:
        wrong.append(f"{len(report.replicas)} replicas pulled, not {replicas}")
    done = {version.version: {p.replica for p in version.pulls if p.pause_s is not None} for version in report.versions}
    for version in range(1, report.pulled_until + 1):
        missing = [replica for replica in report.replicas if replica not in done.get(version, set())]
        wrong += [f"{replica} did not install version {version}" for replica in missing]
    late = sorted(version for version, who in done.items() if version > report.pulled_until and who)
    wrong += [f"version {version} was installed though pulling was off" for version in late]
    wrong += report.failures
    done_text = f"{len(report.replicas)} replicas, {report.pulled_until} versions"
    return Claim(name, not wrong, "; ".join(wrong) or done_text)


def _peers_serve(report: Report) -> Claim:
    name = "from the second version on the trainer serves one replica, the others pull from peers"
    wrong, count = [], 0
    for version in report.versions:
        if not 2 <= version.version <= report.pulled_until:
            continue
        count += 1
        served = [p.replica for p in version.pulls if p.bytes_from_trainer]
        mixed = [p.replica for p in version.pulls if p.bytes_from_trainer and p.bytes_from_peers]
        from_peers = [p.replica for p in version.pulls if p.bytes_from_peers and not p.bytes_from_trainer]
        if len(served) != 1 or mixed or len(from_peers) != len(report.replicas) - 1:
            sources = ", ".join(f"{p.replica} <- {' + '.join(p.sources) or 'nobody'}" for p in version.pulls)
            wrong.append(f"version {version.version}: {sources or 'not pulled'}")
    return Claim(name, count > 0 and not wrong, "; ".join(wrong) or f"{count} versions")


def _digests_equal(report: Report) -> Claim:
    versions = [version for version in report.versions if version.version <= report.pulled_until]
    wrong = [f"version {version.version}: {version.digests}" for version in versions if not version.digests_equal]
    for version in versions:
        wrong += [
            f"version {version.version}: no digest of {replica}"
            for replica in report.replicas
            if version.digests_equal and f"{replica}/" not in version.digests
        ]
    detail = "; ".join(wrong) or f"{len(versions)} versions, e.g. {versions[-1].digests}" if versions else "no version"
    return Claim("the digests of trainer and engines are equal", bool(versions) and not wrong, detail)


def _no_request_lost(report: Report, trainer: Trainer) -> Claim:
    pulls = [pull for version in report.versions for pull in version.pulls]
    kept, lost = sum(pull.kept for pull in pulls), sum(pull.lost for pull in pulls)
    broken = {outcome: count for outcome, count in report.requests.items() if outcome not in ("stop", "length")}
    ended = sum(report.requests.values())
    detail = f"{ended} requests, {kept} in flight during an update and kept, {lost} lost"
    if broken:
        detail += f", ended as {broken}"
    shown = bool(ended and (kept or not trainer.keeps_requests))
    if ended and not shown:
        detail += ": no update met a request in flight, so nothing was shown"
    return Claim("no request is lost", shown and not lost and not broken, detail)


def _log_probs_agree(report: Report, steps: int, kl_max: float) -> Claim:
    values = [step.kl for step in report.steps if step.pulling and step.kl is not None]
    complete = sum(step.step <= steps and step.kl is not None for step in report.steps) == steps
    worst = max(values, default=float("nan"))
    return Claim(
        f"trainer and rollout log-probabilities agree (KL below {kl_max:g})",
        complete and worst < kl_max,
        f"largest KL {worst:.2g} in {len(values)} steps" + ("" if complete else f", of {steps} or more expected"),
    )


def _control_diverges(report: Report, control_steps: int) -> Claim:
    pulled = [step.kl for step in report.steps if step.pulling and step.kl is not None]
    control = [step.kl for step in report.steps if not step.pulling and step.kl is not None]
    name = "negative control: with pulling off the KL grows"
    if len(control) < 2 or not pulled:
        return Claim(name, False, f"{len(control)} steps with KL after pulling went off: too few to see anything")
    part = max(1, len(control) // 3)  # one step may say anything: a KL is an estimate from its few samples
    first, last = mean(control[:part]), mean(control[-part:])
    factor = last / max(pulled)
    grows = last > first and factor >= CONTROL_FACTOR_MIN
    detail = f"{first:.2g} -> {last:.2g} in {len(control)} steps, {factor:.1f} times the largest before"
    return Claim(name, grows, detail)


def table(report: Report) -> str:
    """Format the report as text. Seconds in milliseconds, bytes in MB (10^6)."""
    head = ["version", "MB from trainer", "MB from peers", "publish wait"]
    for replica in report.replicas:
        head += [f"{replica} from", "pull", "pause", "kept/lost"]
    head.append("digests")
    rows = [head]
    for version in report.versions:
        row = [
            str(version.version),
            f"{version.trainer_bytes / 1e6:.1f}",
            f"{version.peer_bytes / 1e6:.1f}",
            _milliseconds(version.publish_wait_s),
        ]
        pulls = {pull.replica: pull for pull in version.pulls}
        for replica in report.replicas:
            pull = pulls.get(replica)
            if pull is None:
                row += ["-", "-", "-", "-"]
                continue
            row += [
                " + ".join(sorted({replica_of(source) for source in pull.sources})) or "-",
                _milliseconds(pull.pull_s),
                _milliseconds(pull.pause_s),
                f"{pull.kept}/{pull.lost}",
            ]
        off = version.version > report.pulled_until
        row.append("pulling off" if off else "equal" if version.digests_equal else "DIFFER")
        rows.append(row)
    return "\n".join(_aligned(rows))


def reward_curve(report: Report, width: int = 40) -> str:
    """Return one bar a step, with the KL next to it."""
    top = max((step.reward for step in report.steps), default=0.0) or 1.0
    lines = []
    for step in report.steps:
        bar = "#" * round(width * max(step.reward, 0.0) / top)
        kl = f"{step.kl:.1e}" if step.kl is not None else "-"
        note = "" if step.pulling else "  pulling off"
        lines.append(f"step {step.step:3d}  reward {step.reward:6.3f}  {bar:<{width}}  KL {kl}{note}")
    return "\n".join(lines)


def some(items: Sequence[int], count: int | None, *, always: Iterable[int] = ()) -> list[int]:
    """Return about `count` of them, evenly, with the first, the last and those of `always` among them; None: all."""
    if count is None or len(items) <= count:
        return list(items)
    evenly = {items[round(place * (len(items) - 1) / (count - 1))] for place in range(count)}
    return sorted(evenly | set(always).intersection(items))


def short_table(report: Report, count: int) -> str:
    """Format for a terminal of 100 columns: about `count` versions, no requests, and what the numbers do not show."""
    head = ["version", "MB trainer", "MB peers", "publish"]
    for replica in report.replicas:
        head += [replica, "pull", "pause"]
    rows = [[*head, "digests"]]
    by_number = {version.version: version for version in report.versions}
    last = report.pulled_until
    for number in some(list(by_number), count, always=(1, 2, last, last + 1)):
        version = by_number[number]
        row = [str(number), f"{version.trainer_bytes / 1e6:.1f}", f"{version.peer_bytes / 1e6:.1f}"]
        row.append(_milliseconds(version.publish_wait_s))
        pulls = {pull.replica: pull for pull in version.pulls}
        for replica in report.replicas:
            pull = pulls.get(replica)
            sources = {replica_of(source) for source in pull.sources} if pull else set()
            row.append(" + ".join(sorted(sources)) or "-")
            row += [_milliseconds(pull.pull_s), _milliseconds(pull.pause_s)] if pull else ["-", "-"]
        row.append("off" if number > last else "equal" if version.digests_equal else "DIFFER")
        rows.append(row)
    lines = _aligned(rows)
    if any(version.peer_bytes > version.trainer_bytes > 0 for version in report.versions):
        lines.append(
            "A peer hands on what its engine runs, in that layout: some tensors more than the trainer's checkpoint\n"
            "has (tables of the rotary embedding), which shows when the model is as small as this one."
        )
    return "\n".join(lines)


def _aligned(rows: list[list[str]]) -> list[str]:
    """Align the rows; the first one is the head, and gets a line below it."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    lines.insert(1, "-" * len(lines[0]))
    return lines


def claims(report: Report, *, brief: bool = False) -> str:
    """Format the claims. brief: a claim that holds is one line, and one that fails gives the reason in a few."""
    lines = []
    for claim in report.claims:
        lines.append(f"{'ok  ' if claim.holds else 'FAIL'}  {claim.claim}")
        if not (brief and claim.holds):
            lines += [f"        {claim.detail[:DETAIL_MAX]}"] if brief else [f"        {claim.detail}"]
    return "\n".join(lines)


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.0f} ms"
