"""A real GRPO run that grows, shrinks and loses an engine: 1 -> 2 -> 1, killed, and back. No sample is lost."""

import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="this is about verl")
pytest.importorskip("vllm", reason="the rollouts are vLLM engines")
ray = pytest.importorskip("ray")

from fleet_commands import address_below  # noqa: E402
from ray._raylet import Config  # noqa: E402
from verl_run import START_S, STORE, Run  # noqa: E402

from tensorhub_plugins.vllm.ray import fleet  # noqa: E402

pytestmark = [pytest.mark.heavy, pytest.mark.long, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module")
def token():
    """Ray's own, without which nobody is let into a cluster. At an address it is used only when asked for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        Config.initialize("")
        yield
    Config.initialize("")


@pytest.fixture(scope="module")
def run(tmp_path_factory, token):
    short = Path(tempfile.mkdtemp(prefix="th"))  # Ray puts sockets below it, whose paths have 107 characters at most
    overrides = [
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
        "++ray_kwargs.ray_init.num_gpus=3",  # the trainer's, the first engine's, and room for one more
        f"+{STORE}.replica_timeout_s=20",
    ]
    run = Run(tmp_path_factory.mktemp("elastic"), overrides, TMPDIR=str(short))
    try:
        run.until("a version", lambda: run.find("resume"), START_S, every_s=0.5)
        run.fleet = fleet.find(address=address_below(short))
        yield run
    finally:
        if ray.is_initialized():
            ray.shutdown()
        run.close()
        shutil.rmtree(short, ignore_errors=True)


def states(run):
    return {member.name: member.state for member in run.fleet.list().members}


def test_1_one_joins_without_a_disk_and_works_at_once(run):
    run.until("the first one", lambda: states(run) == {"rollout-0": "ready"}, START_S)
    began = time.time()
    assert "starting rollout-1" in run.fleet.add(1)
    run.until("the new one", lambda: states(run) == {"rollout-0": "ready", "rollout-1": "ready"}, START_S)
    first = run.find("fetch", worker="rollout-1/0")[0]
    assert set(first["sources"]) == {"rollout-0/0"} and first["layout"] != "checkpoint"
    request = run.until("its first answer", lambda: run.find("request", worker="rollout-1/0"))[0]
    before = [event for event in run.find("publish") if event["t"] < first["t"] - first["seconds"]]
    assert request["versions"][0] >= before[-1]["version"]  # as new as the others' when it came
    print(f"joined in {first['t'] - began:.0f} s, its weights in {first['seconds']:.2f} s")
    newest = run.version()
    run.until("versions for both", lambda: run.has_all(newest + 2, ["rollout-0", "rollout-1"], began))


def test_2_the_first_one_leaves_under_load(run):
    run.until("its load", lambda: any(m.in_flight for m in run.fleet.list().members if m.name == "rollout-0"))
    began = time.time()
    run.fleet.drain("rollout-0", timeout_s=0.2)
    run.until("its end", lambda: states(run) == {"rollout-1": "ready"})
    left = run.find("replica_left", since=began, worker="rollout-0/0") or run.find("member", since=began)
    assert left
    free = ray.available_resources().get("GPU", 0)
    assert free == 1  # of three: it was given back
    newest = run.version()
    run.until("versions without it", lambda: run.has_all(newest + 2, ["rollout-1"], began))
    assert not run.find("request", since=began + 20, worker="rollout-0/0")


def test_3_the_joined_one_is_killed_and_comes_back(run):
    began = time.time()
    os.kill(run.pid("request", "rollout-1/0"), signal.SIGKILL)
    run.until("its loss", lambda: states(run).get("rollout-1") == "lost")
    run.until("its return", lambda: states(run) == {"rollout-1": "ready"}, START_S)
    newest = run.version()
    run.until("versions after it", lambda: run.has_all(newest + 2, ["rollout-1"], began), START_S)


def test_4_nothing_torn_was_served_and_no_sample_lost(run):
    run.check_nothing_was_torn_or_lost(compared=5, steps=8)
