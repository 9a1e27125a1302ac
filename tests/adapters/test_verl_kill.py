"""kill -9 in a real GRPO run: of the hub, of a replica while it pulls, of the peer a replica pulls from; and a freeze.

One verl run in pull mode, two trainer ranks and three replicas, and one story after another. How a kill is known to
hit in the middle: the process that serves is stopped (SIGSTOP) the moment its version appears; the hub's own status
then shows the lease under which the victim reads; only then the kill. What comes after is read from the event log.
"""

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="this is about verl")
pytest.importorskip("vllm", reason="the rollouts are vLLM engines")

from verl_run import START_S, STORE, Run  # noqa: E402

REPLICAS = 3
RANKS = 2  # of the trainer (FSDP2): each serves its half

pytestmark = [pytest.mark.heavy, pytest.mark.smoke, pytest.mark.timeout(3000)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    overrides = [
        f"trainer.n_gpus_per_node={RANKS}",
        f"actor_rollout_ref.rollout.n_gpus_per_node={REPLICAS}",
        f"++ray_kwargs.ray_init.num_gpus={REPLICAS + RANKS}",
        f"+{STORE}.transports=[tcp]",  # the source must be there for every byte, so that it can be stopped
        f"+{STORE}.replica_timeout_s=8",
        f"+{STORE}.engine_timeout_s=600",  # a frozen one is thawed here, and not started again
    ]
    run = Run(tmp_path_factory.mktemp("kill"), overrides)
    stopped = []
    run.stopped = stopped
    try:
        yield run
    finally:
        for pid in stopped:
            resume(run, pid)
        run.close()


def stop(run, pid):
    os.kill(pid, signal.SIGSTOP)
    run.stopped.append(pid)


def resume(run, pid):
    if pid in run.stopped:
        run.stopped.remove(pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def caught(run, source_event, source_worker, reader, *, attempts=20):
    """Stop `source_worker` as it says `source_event` and return (its pid, the lease of a reader on it, version).

    The source stands still, so the reader cannot have finished: it is in the middle for as long as we like."""
    for _ in range(attempts):
        since = time.time()
        appeared = run.until(
            f"{source_event} of a new version",
            lambda since=since: [
                e for e in run.find(source_event, since=since) if source_worker is None or e["worker"] == source_worker
            ],
            every_s=0.001,
        )[-1]
        stop(run, appeared["pid"])
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline:
            for lease in run.leases():
                reads = appeared["worker"] in lease["sources"].values() and lease["version"] == appeared["version"]
                if reads and reader(lease["reader"], appeared["worker"]):
                    return appeared, lease
            time.sleep(0.02)
        resume(run, appeared["pid"])
    raise AssertionError(f"no reader was caught in {attempts} versions\n{run.tail()}")


def others(run, *names):
    return [f"rollout-{i}" for i in range(REPLICAS) if f"rollout-{i}" not in names]


def test_1_the_run_starts_and_its_versions_arrive(run):
    everybody = others(run)
    run.until("third version everywhere", lambda: run.has_all(3, everybody, 0.0), START_S, every_s=0.5)
    run.until("address of the hub", lambda: run.find("hub"))


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


def test_4_the_peer_that_is_read_from_dies(run):
    appeared, lease = caught(run, "serve", None, lambda reader, source: reader != source, attempts=40)
    source, reader, version = appeared["worker"], lease["reader"], appeared["version"]
    os.kill(appeared["pid"], signal.SIGKILL)
    killed_at = time.time()
    resume(run, appeared["pid"])
    assert not run.find("fetch", worker=reader, version=version), "it had finished before the kill"
    # The reader gets that version or a newer one from somebody else.
    fetch = run.until(
        "the reader's next version",
        lambda: [e for e in run.find("fetch", since=killed_at, worker=reader) if e["version"] >= version],
    )[0]
    assert sum(fetch["sources"].values()) == fetch["bytes"]
    everybody = others(run, source.split("/")[0])
    run.until("versions for the others", lambda: run.has_all(version + 2, everybody, killed_at))
    run.until("loss of the source", lambda: run.find("replica_lost", since=killed_at - 1, worker=source))
    run.coming_back = source.split("/")[0]  # a minute of imports, which the next story does not wait for


def test_5_a_frozen_replica_delays_nobody_and_gets_no_requests(run):
    replica, *rest = others(run, run.coming_back)
    victim = f"{replica}/0"
    pid = run.pid("install", victim)
    stop(run, pid)
    frozen_at = time.time()
    lost = run.until("loss of the frozen replica", lambda: run.find("replica_lost", since=frozen_at, worker=victim))[0]
    version = run.version()
    run.until("versions for the others", lambda: run.has_all(version + 3, rest, lost["t"]))
    assert not run.find("request", since=lost["t"] + 1, worker=victim)
    thawed_at = time.time()  # before: this process may be kept waiting, and the replica is back within seconds
    resume(run, pid)
    back = run.until("return of the frozen replica", lambda: run.find("replica_back", since=thawed_at, worker=victim))[
        0
    ]
    assert back["version"] >= version + 3  # not before it had caught up
    run.until("requests for it", lambda: run.find("request", since=back["t"], worker=victim))


def test_6_nothing_torn_was_served_and_no_sample_lost(run):
    assert run.find("request_retried")
    run.check_nothing_was_torn_or_lost(compared=11, steps=11)
