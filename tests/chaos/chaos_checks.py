"""What must have held, whatever was killed, cut or forged: judged from what the processes wrote down. Pure.

wrong bytes   what a call handed over is, byte for byte, what a trainer published under that version
late          a call returned by its deadline and `MARGIN_S`; times in which the process could not run do not count
hangs         a call had not returned by then when its process was killed, or at the end
backwards     one process was given an older version than before, by (attempt, step), and that one was not superseded
superseded    a process was given what a later attempt has superseded, of which it had heard
zombie        a trainer of a former attempt has published
untyped       a call ended with an error that is not one of the store's
wedged        once the faults had stopped, a worker did not come to the last version
stranger      somebody without a right got something
traceback     a process wrote one: an error that nobody had expected
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from tensorhub_plugins.core.protocol.lineage import Attempt, Lineage, is_superseded, merged
from tensorhub_plugins.core.types import attempt_of, step_of

MARGIN_S = 0.5
GRACE_S = 15.0  # after a hub's death a former attempt may publish, until the new hub has heard of the later one
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
    asked: int = 0  # of a publish: the version; of a begin: the step
    attempt: int = 0  # the newest that its process had heard of
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


def violations(evidence: Evidence, truth: Callable[[int, int], str]) -> list[str]:
    """One line each; empty: all held. truth(life, step): digest of what that life of the trainer publishes there."""
    return [
        *_wrong_bytes(evidence.calls, truth),
        *_late(evidence),
        *_backwards(evidence.calls),
        *_superseded(evidence.calls),
        *_zombies(evidence),
        *_untyped(evidence.calls),
        *_wedged(evidence),
        *(f"stranger: {text}" for text in evidence.intrusions),
        *(f"traceback: {text}" for text in evidence.tracebacks),
    ]


def _name(call: Call) -> str:
    return f"{call.who} (life {call.life}) {call.call}"


def _wrong_bytes(calls: Iterable[Call], truth: Callable[[int, int], str]) -> list[str]:
    calls = list(calls)
    lives: dict[int, set[int]] = {}  # version -> the trainers' lives that have published it for certain
    begun: dict[int, set[int]] = {}  # version -> those that have tried to
    for call in calls:
        if call.call == "publish":
            begun.setdefault(call.asked, set()).add(call.life)
            if call.version:
                lives.setdefault(call.version, set()).add(call.life)
    found, seen = [], {}
    for call in calls:
        if not call.digest or call.call == "publish":
            continue
        candidates = lives.get(call.version) or begun.get(call.version, set())
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
    calls = list(calls)
    found = []
    newest: dict[tuple[str, int], int] = {}
    for call in calls:
        if call.call in ("publish", "begin") or not call.version:
            continue
        before = newest.get((call.who, call.life), 0)
        if call.version < before and not is_superseded(before, _begun(calls, call.ended or call.began)):
            found.append(f"backwards: {_name(call)}: {call.version} after {before}")
        newest[call.who, call.life] = call.version
    return found


def _superseded(calls: Iterable[Call]) -> list[str]:
    calls = list(calls)
    lineage = _begun((c for c in calls if c.version), float("inf"))
    found = []
    for call in calls:
        heard_of = tuple(attempt for attempt in lineage if attempt.number <= call.attempt)
        if call.call not in ("publish", "begin") and call.version and is_superseded(call.version, heard_of):
            found.append(f"superseded: {_name(call)}: version {call.version}, and it knew of attempt {call.attempt}")
    return found


def _zombies(evidence: Evidence) -> list[str]:
    """What a former life has published after a later one had begun, and every hub since then had heard of that."""
    deaths = [at for (who, _), at in evidence.killed.items() if who == "hub"]
    begins = [c for c in evidence.calls if c.call == "begin" and c.version and c.ended is not None]
    found = []
    for call in evidence.calls:
        if call.call != "publish" or not call.version or any(at < call.began < at + GRACE_S for at in deaths):
            continue
        later = [c for c in begins if c.life > call.life and c.ended is not None and c.ended < call.began]
        if any(attempt_of(c.version) > attempt_of(call.version) for c in later):
            found.append(f"zombie: {_name(call)}: version {call.version}, after life {later[-1].life} had begun")
    return found


def _untyped(calls: Iterable[Call]) -> list[str]:
    """Superseded is for a trainer of which a later life is there. One that begins is refused while its former life
    seems to live: a hub that was stopped hears the dead."""
    calls = list(calls)
    last = max((c.life for c in calls if c.who.startswith("trainer")), default=0)
    return [
        f"untyped: {_name(call)}: {call.error}: {call.text}"
        for call in calls
        if call.error
        and call.error not in TYPED
        and not (call.error == "Superseded" and call.who.startswith("trainer") and call.life < last)
        and not (call.error == "UsageError" and call.call == "begin" and "still sends heartbeats" in call.text)
    ]


def _begun(calls: Iterable[Call], by: float) -> Lineage:
    """The attempts that may have begun by then. One whose answer nobody has heard counts as well, because readers hear
    of it from the hub: its number is above all that had been answered before it was asked for."""
    begins = [c for c in calls if c.call == "begin" and c.began <= by and c.error not in ("UsageError", "Superseded")]
    attempts = []
    for c in begins:
        before = [attempt_of(o.version) for o in begins if o.version and o.ended is not None and o.ended < c.began]
        number = attempt_of(c.version) if c.version else max(before, default=0) + 1
        attempts.append(Attempt(number, c.asked, b""))
    return merged(attempts)


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
        "attempts": len({attempt_of(c.version) for c in good if c.call == "begin"}),
        "zombies refused": sum(1 for c in evidence.calls if c.error == "Superseded"),
        "stopped": sum(len(times) for times in evidence.stopped.values()),
    }
