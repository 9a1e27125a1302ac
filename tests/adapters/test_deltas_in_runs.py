"""Real runs of verl and OpenRLHF whose rollouts take deltas from each other, between hosts, through all that happens.

One rollout joins after the other, one misses versions, the hub starts again, and so does the run, from its checkpoint.
Every digest is the trainer's at every version. Needs root, `ip`, `tc`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from recipes.bench import network
from recipes.demo.elastic_report import digests_equal
from recipes.demo.report import replica_of
from tensorhub_plugins.core import attempt_of, step_of

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.long,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(bool(network.missing()), reason=network.missing() or ""),
]

FRAMEWORKS = ("verl", "openrlhf")
MISSED = 3  # versions, by one rollout
SMALL, USUAL = 0.3, 0.1  # of a version: what a read by deltas costs at lr 1e-6, most; 0.015 were seen
WATCHED = 4  # versions, in each part of the story


@pytest.fixture(params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> str:
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed here")
    return str(request.param)


def reads(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what rollouts have read over tcp."""
    return [e for e in events if e["event"] == "fetch" and set(e["transports"]) == {"tcp"}]


def check_digests(events: list[dict[str, Any]]) -> None:
    """Every version that a rollout ran has been compared with the trainer's, and is the same everywhere."""
    claim = digests_equal(events)
    assert claim.holds, claim.detail
    held: dict[tuple[int, str, str], set[str]] = {}
    for event in events:
        for key in event["digests"] if event["event"] == "digests" else ():
            held.setdefault((event["version"], event["layout"], key), set()).add(replica_of(event["worker"]))
    compared = {version for (version, _, _), names in held.items() if "trainer" in names and len(names) > 1}
    ran = {e["version"] for e in events if e["event"] == "resume"}
    published = {e["version"] for e in events if e["event"] == "publish"}
    assert ran & published <= compared and len(compared) > WATCHED


def check_deltas(events: list[dict[str, Any]]) -> None:
    """Rollouts took them from each other. (Whether one pays off from the trainer, whose link takes all of so small a
    version at once, changes from read to read; that the keeper took them of it is in its log.)"""
    small = [e for e in reads(events) if e["wire_bytes"] < SMALL * e["bytes"]]
    from_peers = [e for e in small if all(replica_of(name).startswith("rollout") for name in e["sources"])]
    assert from_peers, [(e["worker"], e["version"], e["wire_bytes"], e["sources"]) for e in reads(events)]
    usual = median(e["wire_bytes"] / e["bytes"] for e in small)
    print(
        f"{len(small)} of {len(reads(events))} reads over tcp by deltas, {len(from_peers)} of them from a peer; "
        f"median {usual:.4f} of a version"
    )
    assert usual < USUAL


def test_rollouts_take_deltas_from_each_other_through_all_that_happens(framework: str, tmp_path: Path) -> None:
    from delta_story import Stage

    with Stage(tmp_path, framework) as stage:
        with stage.life("first") as life:
            life.begin()
            life.everywhere(WATCHED)
            west = life.joined()
            stage.restart_hub()
            life.everywhere(WATCHED)
            had, newest = life.misses(west[-1], west[:-1], MISSED)
            (back,) = [e for e in life.of(west[-1], "fetch") if e["version"] == newest]
            print(f"{west[-1]} had version {had} and read {newest}: {back['wire_bytes']} of {back['bytes']} bytes")
            assert newest - had > MISSED
            life.everywhere(WATCHED)
            life.run.until("a checkpoint", lambda: step_of(max(stage.kept(), default=0)) >= life.saved() > 0)
            events = life.run.events()
        check_digests(events)
        check_deltas(events)
        resumed = life.saved()
        with stage.life("second", resumes=True) as life:
            life.begin()
            life.everywhere(WATCHED)
            events = life.run.events()
        check_digests(events)
        check_deltas(events)
        log = stage.keeper.call("log")
    check_keeper(log, events, resumed)


def check_keeper(log: list[dict[str, Any]], events: list[dict[str, Any]], resumed: int) -> None:
    """It took deltas of both lives, and its twin none, and both have the same bytes."""
    by_delta = [read for read in log if read["delta"] == "auto" and read["by_delta"]]
    assert {attempt_of(read["version"]) for read in by_delta} == {0, 1}
    assert all(read["wire"] == read["bytes"] and not read["by_delta"] for read in log if read["delta"] == "off")
    roots = {version: {r["root"] for r in log if r["version"] == version} for version in {r["version"] for r in log}}
    assert all(len(each) == 1 for each in roots.values())
    first = min(e["version"] for e in events if e["event"] == "publish")
    again = [read["wire"] for read in log if read["delta"] == "auto" and read["version"] == first]
    print(
        f"the second life began with step {step_of(first)}, of the checkpoint {resumed}; the keeper read {again} bytes"
    )


def test_the_control_takes_no_deltas(framework: str, tmp_path: Path) -> None:
    """The same with delta="off": every read is a whole version."""
    from delta_story import Stage

    with Stage(tmp_path, framework) as stage:
        with stage.life("first", delta="off") as life:
            life.begin()
            life.everywhere(2)
            events = life.run.events()
        check_digests(events)
        found = reads(events)
        assert len(found) > 2 and all(e["wire_bytes"] == e["bytes"] for e in found)
        with pytest.raises(AssertionError):
            check_deltas(events)


def test_the_check_sees_that_all_is_read_whole_and_that_peers_give_nothing() -> None:
    read = {"event": "fetch", "worker": "rollout-1/0", "version": 2, "layout": "checkpoint", "bytes": 1000}
    read |= {"wire_bytes": 15, "transports": {"tcp": 1000}, "sources": {"trainer/0": 1000}}
    peer = {**read, "worker": "rollout-2/0", "sources": {"rollout-1/0": 1000}}
    check_deltas([read, peer])
    for bad in ([read, read], [{**read, "wire_bytes": 1000}, {**peer, "wire_bytes": 1000}]):
        with pytest.raises(AssertionError):
            check_deltas(bad)
