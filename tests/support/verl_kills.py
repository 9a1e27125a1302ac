"""Kills in a real GRPO run: how one is known to hit in the middle.

The process that serves is stopped (SIGSTOP) the moment its version appears; the hub's own status then shows the lease
under which the victim reads; only then the kill. What comes after is read from the event log.
"""

import contextlib
import os
import signal
import time
from pathlib import Path

from verl_run import START_S, STORE, Run

REPLICAS = 3
RANKS = 2  # of the trainer (FSDP2): each serves its half


def started(folder):
    """Yield a verl run in pull mode that is stopped at the end, with all that was stopped in it."""
    overrides = [
        f"trainer.n_gpus_per_node={RANKS}",
        f"actor_rollout_ref.rollout.n_gpus_per_node={REPLICAS}",
        f"++ray_kwargs.ray_init.num_gpus={REPLICAS + RANKS}",
        f"+{STORE}.transports=[tcp]",  # the source must be there for every byte, so that it can be stopped
        f"+{STORE}.replica_timeout_s=8",
        f"+{STORE}.engine_timeout_s=600",  # a frozen one is thawed here, and not started again
    ]
    run = Run(folder, overrides)
    run.stopped = []
    try:
        yield run
    finally:
        for pid in list(run.stopped):
            resume(run, pid)
        run.close()


def wait_for_versions(run):
    """Return when all replicas have had a version that was trained."""
    run.until("third version everywhere", lambda: run.has_all(3, others(run), 0.0), START_S, every_s=0.5)
    run.until("address of the hub", lambda: run.find("hub"))


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
