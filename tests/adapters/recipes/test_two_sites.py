"""The report of two sites: a run that keeps every claim, and one way to break each of them."""

from __future__ import annotations

import pytest

from recipes.verl_grpo_two_sites import report as reports

STALENESS_S = 8.0


def event(t, name, worker="", **fields):
    return {"t": t, "event": name, "worker": worker, **fields}


def version(t, number, *, west=True):
    """From the trainer to the east and to one of the west, from there to the other."""
    ways = [("rollout-0/0", "trainer/0", 0.1)]
    ways += [("rollout-1/0", "trainer/0", 0.3), ("rollout-2/0", "rollout-1/0", 0.4)] if west else []
    events = [event(t, "publish", "trainer/0", version=number), digests(t, "trainer/0", number)]
    for worker, source, after in ways:
        events += [
            event(t + after, "fetch", worker, version=number, sources={source: 100}, seconds=0.3),
            event(t + after + 0.05, "resume", worker, version=number, seconds=0.02, lost=0),
            digests(t + after + 0.05, worker, number),
        ]
    return events


def digests(t, worker, number):
    return event(t, "digests", worker, version=number, layout="checkpoint", digests={"root": f"c{number}"})


def good_run():
    """A cut from 20 to 50; versions 5 and 6 come and go meanwhile. Then the seed is killed, and comes back."""
    kinds = {"rollout-0": "first", "rollout-1": "joined", "rollout-2": "joined"}
    events = [event(1, "member", f"{name}/0", state="ready", kind=kind, version=1) for name, kind in kinds.items()]
    events += [*version(2, 1), *version(4, 2), *version(6, 3), event(20, "cut")]
    events += [*version(30, 4, west=False), *version(35, 5, west=False), *version(40, 6, west=False)]
    for name in ("rollout-1/0", "rollout-2/0"):
        events += [event(29, "cut_off", name, seconds=9.0), event(52, "cut_off_over", name)]
    events += [event(50, "mend"), *(e for e in version(51, 6) if e["worker"] in ("rollout-1/0", "rollout-2/0"))]
    events += [*version(60, 7), event(70, "kill", "rollout-1/0"), *version(80, 8)]
    return sorted(events, key=lambda e: e["t"])


def claims_of(events):
    return {
        claim.claim: claim for claim in reports.claims_of(sorted(events, key=lambda e: e["t"]), staleness_s=STALENESS_S)
    }


def broken(events):
    return [name for name, claim in claims_of(events).items() if not claim.holds]


def changed(which, **fields):
    return lambda events: [{**e, **fields} if which(e) else e for e in events]


def without(which):
    return lambda events: [e for e in events if not which(e)]


def test_a_good_run_keeps_every_claim():
    assert broken(good_run()) == []
    claims = claims_of(good_run())
    assert claims[reports.ONE_SEED].detail == "3 versions, 2 replicas"
    assert claims[reports.BACK].detail == "rollout-1: version 6 1.3 s later, rollout-2: version 6 1.4 s later"


def test_a_replica_that_says_so_again_later_has_said_it_during_the_cut():
    """One that starts on a busy machine may not hear of the hub for a while."""
    assert broken([*good_run(), event(75, "cut_off", "rollout-1/0", seconds=8.5)]) == []


@pytest.mark.parametrize(
    ("spoil", "claim"),
    [
        (
            changed(lambda e: e["event"] == "fetch" and e["worker"] == "rollout-2/0", sources={"trainer/0": 9}),
            "ONE_SEED",
        ),
        (
            changed(lambda e: e["event"] == "fetch" and e["worker"] == "rollout-2/0", sources={"rollout-0/0": 9}),
            "ONE_SEED",
        ),
        (without(lambda e: e["event"] == "fetch" and e["t"] < 20), "ONE_SEED"),
        (changed(lambda e: e["event"] == "resume", seconds=0.3), "BESIDE"),
        (without(lambda e: e["event"] == "cut_off" and e["worker"] == "rollout-2/0"), "STOPS"),
        (changed(lambda e: e["event"] == "cut_off", seconds=STALENESS_S - 1), "STOPS"),
        (changed(lambda e: e["event"] == "cut_off", t=55), "STOPS"),
        (lambda events: [*events, event(30, "cut_off", "rollout-0/0", seconds=9.0)], "STOPS"),
        (without(lambda e: e["event"] == "publish" and 20 < e["t"] < 50), "ON"),
        (changed(lambda e: e["event"] == "resume" and 51 < e["t"] < 52, version=5), "BACK"),
        (without(lambda e: e["event"] == "cut_off_over"), "BACK"),
        (without(lambda e: e["event"] == "resume" and e["t"] > 50 and e["worker"] == "rollout-1/0"), "BACK"),
        (without(lambda e: e["event"] == "cut"), "STOPS"),
        (without(lambda e: e["event"] == "kill"), "SEED"),
        (changed(lambda e: e["event"] == "kill", worker="rollout-2/0"), "SEED"),
        (without(lambda e: e["event"] == "resume" and e["t"] > 70 and e["worker"] == "rollout-1/0"), "SEED"),
        (without(lambda e: e["event"] == "resume" and e["t"] > 70 and e["worker"] == "rollout-2/0"), "SEED"),
    ],
)
def test_what_breaks_a_claim_is_told(spoil, claim):
    assert getattr(reports, claim) in broken(spoil(good_run()))
