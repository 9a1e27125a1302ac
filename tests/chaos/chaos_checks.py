"""What must have held, whatever was killed, cut or forged: judged from what the processes wrote down. Pure.

wrong bytes   what a call handed over is, byte for byte, what a trainer published under that version
late          a call returned by its deadline and `MARGIN_S`; times in which the process could not run do not count
hangs         a call had not returned by then when its process was killed, or at the end
backwards     one process was given an older version than before
untyped       a call ended with an error that is not one of the store's
wedged        once the faults had stopped, a worker did not come to the last version
stranger      somebody without a right got something
traceback     a process wrote one: an error that nobody had expected
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

MARGIN_S = 0.5
HANG_S = 3.0  # how long its process was starved is not known of a call that did not come back
TYPED = (
    "NotPublished",
    "VersionGone",
    "DeadlineExceeded",
    "HubUnreachable",
    "SourceLost",
    "CorruptBytes",
)


@dataclass(frozen=True)
class Call:
    """One call of one process. Instants are of the machine's steady clock; ended None: it did not come back."""

    who: str
    life: int
    call: str
    began: float
    timeout_s: float
    ended: float | None = None
    starved_s: float = 0.0  # its threads were ready to run, and no core was free
    error: str = ""  # the class
    text: str = ""
    version: int = 0  # 0: none
    step: int = 0  # of a publish
    digest: str = ""  # of all that was handed over


@dataclass
class Evidence:
    """Everything that a run leaves behind."""

    calls: list[Call] = field(default_factory=list)
    stopped: dict[tuple[str, int], list[tuple[float, float]]] = field(default_factory=dict)  # SIGSTOP to SIGCONT
    killed: dict[tuple[str, int], float] = field(default_factory=dict)  # when
    final_version: int = 0
    arrived: dict[str, int] = field(default_factory=dict)  # worker -> the version that it had at the end
    expected: tuple[str, ...] = ()  # the workers that must arrive
    intrusions: list[str] = field(default_factory=list)
    tracebacks: list[str] = field(default_factory=list)


def violations(evidence: Evidence, truth: Callable[[int, int], str], step_of: Callable[[int], int]) -> list[str]:
    """One line each; empty: all held. truth(life, step): digest of what that life of the trainer publishes there."""
    return [
        *_wrong_bytes(evidence.calls, truth, step_of),
        *_late(evidence),
        *_backwards(evidence.calls),
        *(f"untyped: {_name(c)}: {c.error}: {c.text}" for c in evidence.calls if c.error and c.error not in TYPED),
        *_wedged(evidence),
        *(f"stranger: {text}" for text in evidence.intrusions),
        *(f"traceback: {text}" for text in evidence.tracebacks),
    ]


def _name(call: Call) -> str:
    return f"{call.who} (life {call.life}) {call.call}"


def _wrong_bytes(calls: Iterable[Call], truth: Callable[[int, int], str], step_of: Callable[[int], int]) -> list[str]:
    calls = list(calls)
    lives: dict[int, set[int]] = {}  # version -> the trainers' lives that have published it for certain
    begun: dict[int, set[int]] = {}  # step -> those that have tried to
    for call in calls:
        if call.call == "publish":
            begun.setdefault(call.step, set()).add(call.life)
            if call.version:
                lives.setdefault(call.version, set()).add(call.life)
    found, seen = [], {}
    for call in calls:
        if not call.digest or call.call == "publish":
            continue
        candidates = lives.get(call.version) or begun.get(step_of(call.version), set())
        if call.digest not in {truth(life, step_of(call.version)) for life in candidates}:
            found.append(
                f"wrong bytes: {_name(call)}: version {call.version}, which lives {sorted(candidates)} published"
            )
        elif seen.setdefault(call.version, call.digest) != call.digest:
            found.append(f"wrong bytes: {_name(call)}: version {call.version} has two contents")
    return found


def _late(evidence: Evidence) -> list[str]:
    found = []
    for call in evidence.calls:
        life = (call.who, call.life)
        ended = evidence.killed.get(life, call.began) if call.ended is None else call.ended
        stopped_s = sum(
            max(0.0, min(ended, thawed) - max(call.began, frozen)) for frozen, thawed in evidence.stopped.get(life, ())
        )
        late_s = ended - call.began - stopped_s - call.starved_s - call.timeout_s
        if late_s > (MARGIN_S if call.ended else HANG_S):
            what = "hangs" if call.ended is None else "late"
            found.append(f"{what}: {_name(call)} by {late_s:.2f} s of {call.timeout_s} s: {call.error} {call.text}")
    return found


def _backwards(calls: Iterable[Call]) -> list[str]:
    found = []
    newest: dict[tuple[str, int], int] = {}
    for call in calls:
        if call.call == "publish" or not call.version:
            continue
        if call.version < newest.setdefault((call.who, call.life), call.version):
            found.append(f"backwards: {_name(call)}: {call.version} after {newest[call.who, call.life]}")
        newest[call.who, call.life] = max(newest[call.who, call.life], call.version)
    return found


def _wedged(evidence: Evidence) -> list[str]:
    return [
        f"wedged: {who} has version {evidence.arrived.get(who, 0)}, the last one is {evidence.final_version}"
        for who in evidence.expected
        if evidence.arrived.get(who, 0) != evidence.final_version
    ]


def summary(evidence: Evidence) -> Mapping[str, int]:
    """How much was done: a run in which nothing happened proves nothing."""
    good = [c for c in evidence.calls if c.ended is not None and not c.error]
    return {
        "published": len({c.version for c in good if c.call == "publish"}),
        "read": sum(1 for c in good if c.digest and c.call != "publish"),
        "failed": sum(1 for c in evidence.calls if c.error),
        "killed": len(evidence.killed),
        "stopped": sum(len(times) for times in evidence.stopped.values()),
    }
