"""The fleet's actor with real Ray: engines without vLLM join, drain, are killed and come back."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray")

from fleet_run import Run, cluster, pid_of, wait  # noqa: E402

from tensorhub_plugins.core import UsageError  # noqa: E402
from tensorhub_plugins.vllm.ray import preemption  # noqa: E402
from tensorhub_plugins.vllm.ray.fleet import handle as fleet  # noqa: E402
from tensorhub_plugins.vllm.ray.fleet.commands import text  # noqa: E402

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300)]


def members_of(events: Path) -> list[tuple[str, str]]:
    lines = [json.loads(line) for file in sorted(events.glob("*.jsonl")) for line in file.read_text().splitlines()]
    lines.sort(key=lambda line: line["t"])
    return [(line["worker"], line["state"]) for line in lines if line["event"] == "member"]


@pytest.mark.smoke
def test_members_join_and_leave_and_the_fleet_is_killed(one_node: Any, events: Path, tmp_path: Path) -> None:
    run = Run(1, str(tmp_path / "failures"), fleet_max=4)
    run.until(rollout_0="ready")
    assert run.fleet.add(2) == "the target is 3, it was 1; starting rollout-1, rollout-2"
    run.until(rollout_0="ready", rollout_1="ready", rollout_2="ready")
    with pytest.raises(UsageError, match="the target is 3, and 2 more are above fleet_max, 4"):
        run.fleet.add(2)
    # Drained under load: what it has is answered there, nothing is asked twice.
    asked = [run.dispatcher.ask.remote(prompt, 1.0) for prompt in range(12)]
    wait(lambda: run.numbers()["in_flight"].get("rollout-2", 0) > 0, lambda: str(run.numbers()))
    assert "rollout-2 drains" in run.fleet.drain("rollout-2", timeout_s=60)
    more = [run.dispatcher.ask.remote(prompt, 0.1) for prompt in range(12, 20)]
    assert "rollout-2" in ray.get(asked) and run.numbers()["again"] == 0
    ray.get(more)
    run.until(rollout_0="ready", rollout_1="ready")
    # Killed, it comes back with all it knew, and what it had started is still there.
    before = run.pid("rollout-1")
    os.kill(pid_of(run.actor), signal.SIGKILL)
    run.until(rollout_0="ready", rollout_1="ready")
    assert run.pid("rollout-1") == before and run.member("rollout-1").kind == "joined"
    assert run.fleet.list().target == 2
    # An engine that is killed is started again by Ray, and not replaced.
    os.kill(before, signal.SIGKILL)
    wait(lambda: run.states().get("rollout-1") == "lost", lambda: str(run.states()))
    run.until(rollout_0="ready", rollout_1="ready")
    assert run.pid("rollout-1") != before
    # Once more, and Ray gives it up: another one takes its place.
    os.kill(run.pid("rollout-1"), signal.SIGKILL)
    run.until(rollout_0="ready", rollout_3="ready")
    assert "Ray does not start it again" in run.member("rollout-1").why
    assert ray.available_resources()["engine"] == 3.0  # of five, two are in use: the rest was given back
    numbers = run.numbers()
    assert numbers["answered"] == {prompt: prompt * prompt for prompt in range(20)}
    told = [state for worker, state in members_of(events) if worker == "rollout-2/0"]
    assert told[-3:] == ["draining", "stopping", "gone"] and told[0] == "starting" and "ready" in told


@pytest.mark.long
def test_requests_that_take_too_long_go_elsewhere(one_node: Any, tmp_path: Path) -> None:
    run = Run(2, str(tmp_path / "failures"))
    run.until(rollout_0="ready", rollout_1="ready")
    asked = [run.dispatcher.ask.remote(prompt, 4.0) for prompt in range(4)]
    wait(lambda: run.numbers()["in_flight"] == {"rollout-0": 2, "rollout-1": 2}, lambda: str(run.numbers()))
    run.fleet.drain("rollout-1", timeout_s=0.5)
    assert set(ray.get(asked)) == {"rollout-0"}
    run.until(rollout_0="ready")
    assert run.numbers()["again"] == 2 and len(run.numbers()["answered"]) == 4
    # One that cannot start is no matter for the others, and the next one does.
    (tmp_path / "failures").touch()
    run.fleet.add(1)
    wait(lambda: "rollout-2" in [one.name for one in run.fleet.list().gone], lambda: str(run.fleet.list()))
    assert run.member("rollout-2").why == "the engine cannot start"
    run.until(rollout_0="ready", rollout_3="ready")
    # What owns the joined ones is killed, and they with it: others take their places.
    os.kill(pid_of(ray.get_actor(f"{fleet.STARTER}{run.fleet.job}")), signal.SIGKILL)
    run.until(rollout_0="ready", rollout_4="ready")
    wait(lambda: ray.available_resources()["engine"] == 3.0, lambda: str(ray.available_resources()))


@pytest.mark.long
def test_nodes_are_lost_and_come_back(events: Path, tmp_path: Path) -> None:
    with cluster(2) as made:
        notice = tmp_path / "notice"
        added = {"num_cpus": 2, "resources": {"engine": 3}, "env_vars": {preemption.VARIABLE: str(notice)}}
        second = made.add_node(**added)
        run = Run(1, str(tmp_path / "failures"), fleet_target=4)
        run.until(rollout_0="ready", rollout_1="ready", rollout_2="ready", rollout_3="ready")
        nodes = [ray.get(ray.get_actor(f"engine-rollout-{n}").tensorhub_heartbeat.remote())["node"] for n in range(4)]
        away = [number for number in range(4) if nodes[number] == second.node_id]
        assert len(away) >= 2 and 0 not in away
        asked = [run.dispatcher.ask.remote(prompt, 3.0) for prompt in range(16)]
        made.remove_node(second, allow_graceful=False)  # SIGKILL of its raylet
        here = {f"rollout_{number}": "ready" for number in range(4) if number not in away}
        while len(here) < 2:
            here["rollout_4"] = "ready"  # the head has room for one more
        run.until(**here)
        assert len(ray.get(asked)) == 16
        assert all("is lost" in run.member(f"rollout-{number}").why for number in away)
        assert "there is no room now" in run.fleet.add(1)
        run.fleet.target(4)
        made.add_node(**added)
        wait(lambda: run.fleet.list().count("ready") == 4, lambda: str(run.fleet.list()))
        # A spot notice: its members leave, and come back where there is room.
        leaving = [one.name for one in run.fleet.list().members if one.name.replace("-", "_") not in here]
        notice.write_text("20")
        wait(lambda: run.fleet.list().count("ready") == 2, lambda: str(run.fleet.list()))
        assert {run.member(name).why for name in leaving} == {preemption.WHY}
        assert run.fleet.list().slots == 0  # that node has room, and is not to be used
        made.add_node(num_cpus=2, resources={"engine": 3}, env_vars={preemption.VARIABLE: ""})
        wait(lambda: run.fleet.list().count("ready") == 4, lambda: str(run.fleet.list()))
        assert len(run.numbers()["answered"]) == 16


@pytest.mark.long
def test_spares_join_are_replaced_and_give_their_places_up(one_node: Any, tmp_path: Path) -> None:
    run = Run(1, str(tmp_path / "failures"), fleet_spares=1)
    run.until(rollout_0="ready", rollout_1="spare")
    spare = run.pid("rollout-1")
    assert run.fleet.list().count("starting", "ready") == 1
    assert "target 1, 1 ready, 1 of 1 spares; " in text(run.fleet.list())
    assert {ray.get(run.dispatcher.ask.remote(prompt, 0.0)) for prompt in range(10)} == {"rollout-0"}
    assert run.fleet.add(1) == "the target is 2, it was 1; rollout-1 joins, a spare"
    run.until(rollout_0="ready", rollout_1="ready", rollout_2="spare")
    assert run.pid("rollout-1") == spare and run.member("rollout-1").kind == "joined"
    asked = [run.dispatcher.ask.remote(prompt, 0.1) for prompt in range(10, 20)]
    assert set(ray.get(asked)) == {"rollout-0", "rollout-1"}
    # Ray starts it again, as a spare, and it joins again; given up by Ray, the spare takes its place.
    os.kill(spare, signal.SIGKILL)
    wait(lambda: run.states().get("rollout-1") == "lost", lambda: str(run.states()))
    run.until(rollout_0="ready", rollout_1="ready", rollout_2="spare")
    os.kill(run.pid("rollout-1"), signal.SIGKILL)
    run.until(rollout_0="ready", rollout_2="ready", rollout_3="spare")
    # A spare that is killed is replaced, and its fleet's actor knows it after it was killed itself.
    os.kill(pid_of(run.actor), signal.SIGKILL)
    run.until(rollout_0="ready", rollout_2="ready", rollout_3="spare")
    os.kill(run.pid("rollout-3"), signal.SIGKILL)
    run.until(rollout_0="ready", rollout_2="ready", rollout_4="spare")
    # Five places, three are in use. What waits for three more gets the spare's.
    group = ray.util.placement_group([{"engine": 1.0}] * 3)
    ray.get(group.ready(), timeout=60)
    assert "something else waits for resources" in run.member("rollout-4").why
    run.until(rollout_0="ready", rollout_2="ready")
    wait(lambda: run.fleet.list().slots == 0, lambda: str(run.fleet.list()))
    assert "1 more will be started later: there is no room now" in run.fleet.add(1)
    ray.util.remove_placement_group(group)
    run.until(rollout_0="ready", rollout_2="ready", rollout_5="ready")
    assert ray.available_resources()["engine"] == 2.0 and len(run.numbers()["answered"]) == 20
