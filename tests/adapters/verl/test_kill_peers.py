"""kill -9 in a real GRPO run of the peer that a replica pulls from, and a freeze of a replica. See test_verl_kill."""

import os
import signal
import time

import pytest

pytest.importorskip("verl", reason="this is about verl")
pytest.importorskip("vllm", reason="the rollouts are vLLM engines")

from verl_kills import caught, others, resume, started, stop, wait_for_versions  # noqa: E402

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(3000)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    yield from started(tmp_path_factory.mktemp("kill"))


def test_1_the_run_starts_and_its_versions_arrive(run):
    wait_for_versions(run)


def test_2_the_peer_that_is_read_from_dies(run):
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


def test_3_a_frozen_replica_delays_nobody_and_gets_no_requests(run):
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


def test_4_nothing_torn_was_served_and_no_sample_lost(run):
    assert run.find("request_retried")
    run.check_nothing_was_torn_or_lost(compared=8, steps=7)
