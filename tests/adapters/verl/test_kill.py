"""kill -9 in a real GRPO run: of the hub, and of a replica while it pulls.

One verl run in pull mode, two trainer ranks and three replicas, and one story after another; see verl_kills.py. The
same of a peer that is read from, and a freeze: test_kill_peers.py.
"""

import os
import signal
import time

import pytest

pytest.importorskip("verl", reason="this is about verl")
pytest.importorskip("vllm", reason="the rollouts are vLLM engines")

from verl_kills import caught, lives, others, resume, started, wait_for_versions  # noqa: E402
from verl_run import START_S  # noqa: E402

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(3000)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    yield from started(tmp_path_factory.mktemp("kill"))


def test_1_the_run_starts_and_its_versions_arrive(run):
    wait_for_versions(run)


def test_2_the_hub_dies_while_weights_are_read(run):
    since = time.time()
    published, lease = caught(run, "publish", "trainer/0", lambda reader, _: reader.startswith("rollout-"))
    first = run.pid("hub", "hub")
    os.kill(first, signal.SIGKILL)
    killed_at = time.time()
    resume(run, published["pid"])
    version = published["version"]
    # The transfer under way did not notice: it began before the kill and ended after it, with all its bytes.
    reader = lease["reader"]
    fetch = run.until("its end", lambda: run.find("fetch", since=since, worker=reader, version=version))[0]
    assert fetch["t"] - fetch["seconds"] < killed_at < fetch["t"]
    assert sum(fetch["sources"].values()) == fetch["bytes"]
    # A hub of the same address came back, and versions go on to arrive everywhere; no other process was started again.
    second = run.until("new hub", lambda: run.find("hub", since=killed_at))[0]
    assert second["pid"] != first and second["address"] == run.find("hub")[0]["address"]
    run.until("versions after the kill", lambda: run.has_all(run.version() - 1, others(run), killed_at + 5) or None)
    for name in others(run):
        assert len({e["pid"] for e in run.find("install", worker=f"{name}/0")}) == 1


def test_3_a_replica_dies_while_it_pulls(run):
    published, lease = caught(run, "publish", "trainer/0", lambda reader, _: reader.startswith("rollout-"))
    reader, version = lease["reader"], published["version"]
    victim = reader.split("/")[0]
    pid = run.pid("install", reader)
    os.kill(run.pid("request", reader), signal.SIGKILL)  # the server; the engine's own processes must end with it
    killed_at = time.time()
    run.until("end of the process that pulls", lambda: not lives(pid), 10)
    resume(run, published["pid"])
    assert not run.find("fetch", worker=reader, version=version), "it had finished before the kill"
    run.until("versions for the others", lambda: run.has_all(version + 2, others(run, victim), killed_at))
    run.until("loss of the replica", lambda: run.find("replica_lost", since=killed_at - 1, worker=reader))
    # It comes back by itself, in new processes, with a newer version.
    back = run.until("return of the replica", lambda: run.find("resume", since=killed_at, worker=reader), START_S)[0]
    assert back["version"] > version
    run.until("its place in the rotation", lambda: run.find("replica_back", since=killed_at, worker=reader))
    run.until("requests for it", lambda: run.find("request", since=back["t"], worker=reader))
    assert run.pid("install", reader) != pid


def test_4_nothing_torn_was_served_and_no_sample_lost(run):
    run.check_nothing_was_torn_or_lost(compared=7, steps=6)
