"""The report of two sites, and whether they did what we claim. PURE: events in, claims out.

Events are those of core/run_log.py; `cut`, `mend` and `kill` are written by __main__.py. Replicas that join the run are
in the west, those there from the start in the east. A claim about something that the log does not show fails.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from recipes.demo.elastic_report import digests_equal
from recipes.demo.report import Claim, replica_of

Event = Mapping[str, Any]
ONE_SEED = "each version crosses the link once: one replica of the west reads it from the east, the others from it"
BESIDE = "replicas stand still for a part of what a version takes to arrive"
STOPS = "a site that is cut off takes no more work after its staleness, and says so"
BACK = "with the link back it takes work again, and skips the versions that nobody needs"
ON = "the trainer goes on during the cut"
SEED = "a seed that is killed is replaced: the others go on with new versions, and it comes back"
PAUSE_MAX = 0.5  # of the time that the fetch took


def claims_of(events: Sequence[Event], *, staleness_s: float) -> list[Claim]:
    """Return the claims. events: by time."""
    joined = {replica_of(e["worker"]) for e in events if e["event"] == "member" and e["kind"] == "joined"}
    cut = next((e["t"] for e in events if e["event"] == "cut"), None)
    mend = next((e["t"] for e in events if e["event"] == "mend"), None)
    ready = _ready_at(events, joined)
    claims = [_one_seed(events, joined, ready, cut), _beside(events, joined), digests_equal(events)]
    if cut is None or mend is None:
        return [*claims, *(Claim(text, False, "there was no cut") for text in (STOPS, ON, BACK))]
    return [
        *claims,
        _stops(events, joined, cut, mend, staleness_s),
        _on(events, cut, mend),
        _back(events, joined, mend),
        _seed_dies(events, joined),
    ]


def seed_of(events: Sequence[Event]) -> str:
    """Return the western replica that has last read from the east; "": none."""
    west = {replica_of(e["worker"]) for e in events if e["event"] == "member" and e["kind"] == "joined"}
    return next((replica_of(e["worker"]) for e in reversed(events) if _is_from_afar(e, west)), "")


def _is_from_afar(event: Event, west: set[str]) -> bool:
    return (
        event["event"] == "fetch"
        and replica_of(event["worker"]) in west
        and any(n for who, n in event["sources"].items() if replica_of(who) not in west)
    )


def _ready_at(events: Sequence[Event], joined: set[str]) -> float:
    """Return when all of the west served for the first time."""
    first = {
        replica_of(e["worker"]): e["t"] for e in reversed(events) if e["event"] == "member" and e["state"] == "ready"
    }
    return max((first.get(name, float("inf")) for name in joined), default=float("inf"))


def _one_seed(events: Sequence[Event], west: set[str], since: float, until: float | None) -> Claim:
    """Check quiet times: from when all serve to the cut."""
    fetched: dict[int, dict[str, Event]] = defaultdict(dict)
    for event in events:
        name = replica_of(event["worker"])
        if event["event"] == "fetch" and name in west and since < event["t"] < (until or float("inf")):
            fetched[event["version"]][name] = event
    whole = {version: by for version, by in fetched.items() if set(by) == west}
    wrong = []
    for version, by in sorted(whole.items()):
        afar = [name for name, event in by.items() if _is_from_afar(event, west)]
        wrong += [f"version {version}: {', '.join(sorted(afar)) or 'nobody'}"] if len(afar) != 1 else []
    detail = "; ".join(wrong) or f"{len(whole)} versions, {len(west)} replicas"
    return Claim(ONE_SEED, bool(whole) and len(west) > 1 and not wrong, detail)


def _beside(events: Sequence[Event], west: set[str]) -> Claim:
    """Compare the pause with the fetch, of those that read from afar or from a peer."""
    fetch = {(replica_of(e["worker"]), e["version"]): e["seconds"] for e in events if e["event"] == "fetch"}
    pairs = [
        (e["seconds"], fetch[replica_of(e["worker"]), e["version"]])
        for e in events
        if e["event"] == "resume"
        and replica_of(e["worker"]) in west
        and (replica_of(e["worker"]), e["version"]) in fetch
    ]
    pause, whole = (sum(pair[at] for pair in pairs) for at in (0, 1))
    detail = f"{len(pairs)} updates in the west: fetched in {whole:.1f} s, stood still for {pause:.1f} s"
    return Claim(BESIDE, bool(pairs) and pause < PAUSE_MAX * whole, detail)


def _stops(events: Sequence[Event], west: set[str], cut: float, mend: float, staleness_s: float) -> Claim:
    said = {replica_of(e["worker"]): e for e in events if e["event"] == "cut_off" and cut <= e["t"] < mend}
    late = [name for name in west if name in said and said[name]["seconds"] >= staleness_s]
    detail = ", ".join(f"{name} after {said[name]['t'] - cut:.1f} s" for name in sorted(late)) or "nobody said so"
    others = set(said) - west
    return Claim(STOPS, bool(west) and set(late) == west and not others, detail + f"; east: {len(others)}")


def _on(events: Sequence[Event], cut: float, mend: float) -> Claim:
    versions = [e["version"] for e in events if e["event"] == "publish" and cut < e["t"] < mend]
    return Claim(ON, bool(versions), f"versions published meanwhile: {len(set(versions))}")


def _back(events: Sequence[Event], west: set[str], mend: float) -> Claim:
    newest = max((e["version"] for e in events if e["event"] == "publish" and e["t"] <= mend), default=0)
    over = {replica_of(e["worker"]) for e in events if e["event"] == "cut_off_over" and e["t"] >= mend}
    first: dict[str, Event] = {}
    for event in events:
        if event["event"] == "resume" and replica_of(event["worker"]) in west and event["t"] > mend:
            first.setdefault(replica_of(event["worker"]), event)
    wrong = [f"{name} did not come back" for name in sorted(west - over)]
    wrong += [
        f"{name} went to version {e['version']}, not {newest}" for name, e in first.items() if e["version"] < newest
    ]
    wrong += [f"{name} took no version" for name in sorted(west - first.keys())]
    detail = ", ".join(
        f"{name}: version {e['version']} {e['t'] - mend:.1f} s later" for name, e in sorted(first.items())
    )
    return Claim(BACK, bool(west) and not wrong, "; ".join(wrong) or detail)


def _seed_dies(events: Sequence[Event], west: set[str]) -> Claim:
    killed = next((e for e in events if e["event"] == "kill"), None)
    if killed is None:
        return Claim(SEED, False, "nobody was killed")
    victim = replica_of(killed["worker"])
    newest = max((e["version"] for e in events if e["event"] == "publish" and e["t"] <= killed["t"]), default=0)
    first: dict[str, Event] = {}
    for event in events:
        if event["event"] == "resume" and event["t"] > killed["t"] and event["version"] > newest:
            first.setdefault(replica_of(event["worker"]), event)
    was_seed = any(
        _is_from_afar(e, west) and replica_of(e["worker"]) == victim for e in events if e["t"] <= killed["t"]
    )
    wrong = [] if was_seed else [f"{victim} was no seed"]
    wrong += [f"{name} took no new version" for name in sorted(west - first.keys())]
    detail = ", ".join(
        f"{name}: version {e['version']} {e['t'] - killed['t']:.1f} s later" for name, e in sorted(first.items())
    )
    return Claim(SEED, victim in west and not wrong, "; ".join(wrong) or f"{victim} killed; {detail}")
