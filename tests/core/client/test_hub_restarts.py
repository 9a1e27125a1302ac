"""Hubs that are killed and started again in the middle; and what a client leaves behind."""

from __future__ import annotations

import gc
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from client_processes import SEGMENTS, SIZE, hold_back, let_go, same_bytes, tensors_of, zeros_like
from client_stage import FAR, HELD, LATE_S, SOON_S, holders, leases, until, what_is_there

from tensorhub_plugins.core import (
    CHECKPOINT,
    Client,
    HubUnreachable,
    NotPublished,
    ShardKey,
    UsageError,
    VersionGone,
    start_server,
)
from tensorhub_plugins.core.cli import fetch_status

# --- the hub is killed ---


def test_the_hub_is_killed_in_the_middle_and_comes_back(stage, progress):
    hub = stage.hub("tcp://127.0.0.1:0")
    stage.address = hub.call("address")
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    trainer.publish(1, tensors_of(1))
    hold_back(trainer, 1, HELD)
    reading = stage.begin(rollout.fetch, serve=True)
    progress.wait("rollout", HELD)
    hub.kill()
    assert len(progress.of("rollout")) == HELD < SEGMENTS  # it hit in the middle
    let_go(trainer, 1)
    fetched = reading.result(SOON_S)  # there is no hub yet
    assert same_bytes(fetched.tensors(), tensors_of(1)) and fetched.report.losses == ()
    assert fetched.report.sources == {"trainer/0": SIZE}
    with pytest.raises(HubUnreachable):
        rollout.versions(timeout_s=0.1)
    stage.hub(stage.address)
    until(lambda: holders(rollout, 1) == ("rollout/0", "trainer/0"))  # rebuilt from what they say
    trainer.publish(2, tensors_of(2))
    assert same_bytes(rollout.fetch(newest := 2).tensors(), tensors_of(2)) and rollout.wait() == newest
    with pytest.raises(UsageError, match="other bytes are already published"):  # the roots are known again too
        stage.client("other").publish(1, tensors_of(5))


@pytest.mark.slow
@pytest.mark.parametrize("announced", [True, False], ids=["announced", "control"])
def test_unpublish_right_after_the_hubs_restart_waits_for_who_reads(stage, progress, announced):
    """The lease is in the reader's Hello. The control forgets it, and the reader is cut off."""
    hub = stage.hub("tcp://127.0.0.1:0")
    stage.address = hub.call("address")
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    trainer.publish(1, tensors_of(1))
    hold_back(trainer, 1, HELD)
    reading = stage.begin(rollout.fetch, timeout_s=SOON_S)
    progress.wait("rollout", HELD)
    trainer.publish(2, tensors_of(2))
    hub.kill()
    if not announced:
        rollout._hub._machine.leases.clear()
    leaving = stage.begin(trainer.unpublish, 1, timeout_s=SOON_S)
    stage.hub(stage.address, grace_s=3.0)
    if announced:
        until(lambda: fetch_status(stage.address)["up_s"] > 3.5)  # past its grace, and a tick
        assert [x["reader"] for x in leases(stage)] == ["rollout/0"] and not leaving.done()
        let_go(trainer, 1)
        fetched = reading.result(SOON_S)
        assert fetched.report.losses == () and same_bytes(fetched.tensors(), tensors_of(1))
        assert leaving.result(SOON_S).cut_off == ()
    else:
        assert leaving.result(SOON_S).cut_off == ()
        with pytest.raises(VersionGone, match="trainer/0"):
            reading.result(SOON_S)


def test_without_a_hub_every_call_ends_by_its_deadline_and_nothing_is_published(stage):
    server = start_server()
    stage.address = server.address
    client = stage.client("a")
    client.publish(1, {"w": torch.ones(10)}, copy=False)
    server.close()
    began = time.monotonic()
    calls: list[Callable[[], Any]] = [
        lambda: client.publish(2, tensors_of(1), timeout_s=0.3),
        lambda: client.replicate(zeros_like(tensors_of(1)), timeout_s=0.3),
        lambda: client.fetch(timeout_s=0.3),
        lambda: client.wait(9, timeout_s=0.3),
        lambda: client.target(9, timeout_s=0.3),
        lambda: client.pin(9, timeout_s=0.3),
        lambda: client.withdraw(9, timeout_s=0.3),
        lambda: client.versions(timeout_s=0.3),
    ]
    futures = [stage.begin(call) for call in calls]
    for future in futures:
        with pytest.raises(HubUnreachable, match="hub"):
            future.result(SOON_S)
    assert client.unpublish(1, timeout_s=0.3).kept  # it may be the last copy: nobody can say
    assert time.monotonic() - began < 3 * LATE_S
    assert client.serving() == [ShardKey(1, CHECKPOINT)]


# --- what is left behind ---


def a_busy_life(address: str, run: str) -> None:
    options = {"run": run, "model": "actor", "transports": ("shm", "tcp")}
    trainer = Client(address, replica="trainer", **options)
    rollout = Client(address, replica="rollout", **options)
    trainer.publish(1, tensors_of(1))
    rollout.replicate(zeros_like(tensors_of(1)))
    trainer.publish(2, tensors_of(2), copy=False)
    fetched = rollout.fetch(serve=True)
    with pytest.raises(UsageError):
        rollout.replicate({"no such": torch.zeros(1)}, 2)
    with pytest.raises(NotPublished):
        rollout.fetch(9, timeout_s=0.1)
    trainer.unpublish(1)
    trainer.unpublish(2)
    fetched.release()
    rollout.close()
    trainer.close()


def test_nothing_is_left_after_close(module_hub):
    a_busy_life(module_hub.address, "warm up")  # what is made once stays
    gc.collect()
    before = what_is_there()
    a_busy_life(module_hub.address, "counted")
    gc.collect()
    until(lambda: what_is_there() == before)
    left = Client(module_hub.address, run="control", model="m", replica="r", transports=("tcp",))
    assert what_is_there() != before
    left.close()
    until(lambda: what_is_there() == before)


def test_a_refused_client_leaves_nothing(module_hub):
    before = what_is_there()
    for _ in range(3):
        with pytest.raises(HubUnreachable):
            Client("tcp://127.0.0.1:1", run="r", model="m", replica="x", connect_timeout_s=0.05)
        with pytest.raises(UsageError):
            Client(module_hub.address, run="r", model="m", replica="x", transports=("none",))
    gc.collect()  # what the test before this one left may go meanwhile
    until(lambda: not any(Counter(now) - Counter(then) for now, then in zip(what_is_there(), before, strict=True)))


def test_a_transfer_says_in_the_log_what_it_lost(stage, progress, caplog):
    caplog.set_level(logging.WARNING, "tensorhub.client")
    near, far, rollout = stage.client("near"), stage.client("far", location=FAR), stage.client("rollout")
    for client in (near, far):
        client.publish(1, tensors_of(1))
    hold_back(near, 1, HELD)
    reading = stage.begin(rollout.fetch)
    progress.wait("rollout", HELD)
    near.close()
    reading.result(SOON_S)
    assert any("rollout/0: version 1: lost shard 0 from near/0" in record.getMessage() for record in caplog.records)
