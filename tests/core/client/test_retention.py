"""The last copy of a retained version, and what operators pin and withdraw."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading

import pytest
import torch
from client_processes import hold_back, let_go, same_bytes, tensors_of
from client_stage import HELD, RUNTIME, SOON_S, holders, leases, until

from tensorhub_plugins.core import CHECKPOINT, Client, NotPublished, ShardKey, UsageError, VersionGone, start_server
from tensorhub_plugins.core.cli import fetch_status
from tensorhub_plugins.core.client import arguments
from tensorhub_plugins.core.client.serving import sample
from tensorhub_plugins.core.hub.limits import HubLimits
from tensorhub_plugins.core.process_lifetime import machine
from tensorhub_plugins.core.protocol.directive import NO_DIRECTIVE

# --- the last copy ---


def is_open(inode: int) -> bool:
    """Whether this process has that file open: the descriptor itself, or the one behind a mapping."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            if os.stat(f"/proc/self/fd/{name}").st_ino == inode:
                return True
    return False


PROGRAM = """
import os, sys, torch
from tensorhub_plugins.core import Client
_, address, path, cut = sys.argv
size = os.path.getsize(path)
file = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
with Client(address, run=path[-200:], model="actor", replica="trainer", transports=("tcp",)) as trainer:
    segments = trainer.publish(2, {"a": file[: size // 2], "b": file[size // 2 :]}, copy=False).manifest.segment_count
    os.truncate(path, size - int(cut))
    found = trainer.unpublish(2)
    print(segments, found.kept, found.damaged, len(trainer.serving()))
"""


@pytest.mark.parametrize("cut", [0, 4096], ids=["control", "cut off"])
def test_a_last_copy_whose_file_was_cut_off_ends_no_trainer(stage, tmp_path, cut):
    """Between the segments that an unpublish samples: who copies the rest to host memory is ended by SIGBUS."""
    path = tmp_path / "file"
    path.write_bytes(bytes(4 << 20))
    command = [sys.executable, "-c", PROGRAM, stage.address, str(path), str(cut)]
    said = subprocess.run(command, timeout=4 * SOON_S, stdout=subprocess.PIPE, text=True).stdout.split(maxsplit=1)
    assert int(said[0]) - 1 not in sample(int(said[0]), 2)
    assert said[1].strip() == ("False ('b',) 0" if cut else "True () 1")


def test_a_release_that_comes_late_leaves_alone_what_was_published_since(stage):
    trainer, tensors, held_up = stage.client("trainer"), tensors_of(1), threading.Event()
    serving, key = trainer._serving, ShardKey(1, CHECKPOINT)
    trainer.retain(0)
    trainer.publish(1, tensors)
    serving._background.submit(held_up.wait, SOON_S)  # another release, whose readers take their time
    serving.may_release([key])
    trainer.unpublish(1)
    trainer.publish(1, tensors)
    held_up.set()
    serving._background.submit(int).result(SOON_S)
    assert trainer.serving() == [key]
    serving.may_release([key])  # the control: now it is meant
    serving._background.submit(int).result(SOON_S)
    assert trainer.serving() == []


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
def test_the_last_copy_is_kept_in_host_memory_until_there_is_a_newer_version(stage, strided):
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    live = {"w": torch.randn(300, 400)}
    if strided:
        live["w"] = live["w"].t()
    published = {"w": live["w"].clone(memory_format=torch.preserve_format)}
    trainer.publish(1, live, copy=False)
    report = trainer.unpublish(1)
    assert report.kept and holders(rollout, 1) == ("trainer/0",)
    copy = os.fstat(trainer.find(ShardKey(1, CHECKPOINT)).slab.shared_fd).st_ino
    assert is_open(copy)
    live["w"].zero_()  # it is the caller's again
    mine = {"w": torch.empty_like(published["w"])}
    rollout.replicate(mine, serve=False)
    assert torch.equal(mine["w"], published["w"])
    live["w"].fill_(2.0)
    trainer.publish(2, live, copy=False)
    assert until(lambda: holders(rollout, 1) == ())
    assert until(lambda: [k.version for k in trainer.serving()] == [2])  # the hub knows a moment earlier
    assert until(lambda: not is_open(copy))  # its memory is given back
    with pytest.raises(VersionGone):
        rollout.fetch(1)


def test_retaining_more_keeps_more_and_nothing_keeps_nothing(stage):
    trainer = stage.client("trainer")
    trainer.retain(2)
    for version in (1, 2, 3):
        trainer.publish(version, tensors_of(version))
    assert [trainer.unpublish(version).kept for version in (1, 2, 3)] == [False, True, True]
    trainer.retain(0)
    assert until(lambda: not trainer.versions() or not any(info.visible for info in trainer.versions()))
    assert until(lambda: trainer.serving() == [])


def test_a_kept_copy_is_let_go_when_another_has_it(stage):
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    trainer.publish(1, tensors_of(1))
    assert trainer.unpublish(1).kept
    rollout.fetch(serve=True)
    assert until(lambda: holders(rollout, 1) == ("rollout/0",)) and until(lambda: trainer.serving() == [])


# --- operators pin and withdraw ---


def test_a_fleet_goes_back_to_what_is_pinned_and_on_when_it_is_not(stage):
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    trainer.retain(newest=3)
    for version in (1, 2):
        trainer.publish(version, tensors_of(version))
    assert rollout.fetch().version == rollout.target() == 2
    following = stage.begin(rollout.target, 2, timeout_s=SOON_S)
    trainer.pin(1)
    assert following.result(SOON_S) == 1 and same_bytes(rollout.fetch().tensors(), tensors_of(1))
    trainer.publish(3, tensors_of(3))
    with pytest.raises(NotPublished):
        rollout.target(1, timeout_s=0.1)
    assert rollout.wait() == 1 and rollout.wait(3) == 3  # by its number it can be had
    with pytest.raises(NotPublished):
        rollout.wait(newer_than=1, timeout_s=0.1)
    assert rollout.target(1, pins=False) == 3
    following = stage.begin(rollout.target, 1, timeout_s=SOON_S)
    trainer.unpin()
    assert following.result(SOON_S) == rollout.fetch().version == 3
    with pytest.raises(UsageError, match=r"no worker holds it; held: \[1, 2, 3\]"):
        rollout.pin(4)


def test_a_withdrawn_version_is_bad_for_everybody(stage):
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    trainer.retain(newest=2)
    for version in (1, 2):
        trainer.publish(version, tensors_of(version))
    assert rollout.fetch(serve=True).version == 2
    rollout.withdraw(2)
    assert rollout.target(2) == rollout.fetch().version == 1
    for call in (rollout.fetch, rollout.wait):
        with pytest.raises(VersionGone, match="version 2 was withdrawn"):
            call(2)
    trainer.unpublish(2)
    with pytest.raises(UsageError, match="publish under a higher number"):
        trainer.publish(2, tensors_of(2))
    assert [info.visible for info in trainer.versions()] == [True, False]  # the rollout still has it, for itself
    assert not rollout.unpublish(2).kept
    trainer.publish(3, tensors_of(3))
    assert rollout.target(2) == 3


def test_who_returns_may_publish_what_it_returned_to(stage):
    engine = stage.client("engine")
    for version in (1, 2):
        engine.publish(version, tensors_of(version), RUNTIME)
        engine.unpublish(1, RUNTIME)
    with pytest.raises(UsageError, match="versions only grow"):  # the control
        engine.publish(1, tensors_of(1), RUNTIME)
    engine.withdraw(2)
    engine.publish(1, tensors_of(1), RUNTIME)
    assert engine.wait() == 1


@pytest.mark.parametrize("told", [True, False], ids=["told", "control"])
def test_a_version_is_withdrawn_in_the_middle_of_a_transfer(stage, progress, monkeypatch, told):
    """The reader is told and stops. One that is not, as in the control, reads on to its end."""
    if not told:
        monkeypatch.setattr(Client, "_directed", lambda self, directive: None)
    trainer, rollout, operator = (stage.client(name) for name in ("trainer", "rollout", "operator"))
    trainer.publish(1, tensors_of(1))
    trainer.publish(2, tensors_of(2))
    hold_back(trainer, 2, HELD)
    reading = stage.begin(rollout.fetch, serve=True)
    progress.wait("rollout", HELD)
    operator.withdraw(2)
    if told:
        with pytest.raises(VersionGone, match="withdrawn while it was read"):
            reading.result(SOON_S)
        assert rollout.serving() == [] and until(lambda: leases(stage) == [])
        assert not trainer.unpublish(2, timeout_s=SOON_S).cut_off
    else:
        let_go(trainer, 2)
        assert reading.result(SOON_S).version == 2


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "control"])
def test_a_pin_and_a_withdrawal_outlive_the_hub(stage, kept):
    """Because the workers tell them to the next one. In the control they have forgotten."""
    hub = stage.hub("tcp://127.0.0.1:0")
    stage.address = hub.call("address")
    trainer = stage.client("trainer")
    workers = [stage.worker(f"rollout-{number}") for number in range(3)]

    def follow() -> set[tuple[int, bool]]:
        return set(stage.threads.map(lambda worker: worker.call("follow", SOON_S), workers))

    trainer.retain(newest=3)
    for version in (1, 2):
        trainer.publish(version, tensors_of(version))
        assert follow() == {(version, True)}
    workers[0].call("direct", "pin", 1)
    assert follow() == {(1, True)}
    trainer.publish(3, tensors_of(3))

    hub.kill()
    if not kept:
        workers[0].call("forget_directive")
        for worker in workers[1:]:
            worker.call("forget_directive")
        trainer._hub._machine.directive = NO_DIRECTIVE
    stage.hub(stage.address)
    until(lambda: sum(len(model["workers"]) for model in fetch_status(stage.address)["models"]) == 4)
    if not kept:
        assert follow() == {(3, True)}
        return
    fresh = stage.client("fresh")
    assert fresh.wait() == 1 and fresh.target() == 1
    for worker in workers:
        with pytest.raises(RuntimeError, match="NotPublished"):
            worker.call("follow", 0.1)

    workers[1].call("direct", "withdraw", 1)  # which ends the pin
    assert follow() == {(3, True)}
    workers[2].call("direct", "withdraw", 3)
    assert follow() == {(2, True)}
    (model,) = fetch_status(stage.address)["models"]
    assert (model["pinned"], model["withdrawn"]) == (None, [1, 3])


def test_two_operators_pin_at_once_and_everybody_agrees(stage):
    trainer, one, other = (stage.client(name) for name in ("trainer", "one", "other"))
    trainer.retain(newest=3)
    for version in (1, 2, 3):
        trainer.publish(version, tensors_of(version))
    for _ in range(10):
        for pinning in [stage.begin(one.pin, 1), stage.begin(other.pin, 2)]:
            pinning.result(SOON_S)
        pinned = next(m for m in fetch_status(stage.address)["models"] if m["run"] == stage.run)["pinned"]
        assert pinned in (1, 2)
        until(lambda pinned=pinned: {c._hub.directive.pin for c in (trainer, one, other)} == {pinned})
        assert {c.wait() for c in (trainer, one, other)} == {pinned}


@pytest.mark.slow
def test_the_only_holder_of_a_pinned_version_is_killed(stage):
    limits = HubLimits(grace_s=0.2, session_timeout_s=0.5, heartbeat_s=0.1)
    with start_server(limits=limits) as server:
        stage.address = server.address
        trainer, rollout, holder = stage.client("trainer"), stage.client("rollout"), stage.worker("holder")
        holder.call("publish", 1, 1)
        trainer.publish(2, tensors_of(2))
        trainer.pin(1)
        holder.kill()
        until(lambda: not any(info.visible for info in trainer.versions() if info.version == 1))
        with pytest.raises(VersionGone, match=r"version 1 is pinned, but no worker holds it: .*; held: \[2\]"):
            rollout.target(2, timeout_s=0.1)
        with pytest.raises(NotPublished, match="version 1, which is pinned,"):
            rollout.fetch(timeout_s=0.1)
        rollout.unpin()
        assert rollout.fetch().version == 2


def test_the_machine_is_said_where_nobody_has_named_the_host(monkeypatch):
    monkeypatch.delenv("TENSORHUB_HOST", raising=False)
    assert arguments.located(arguments.here()).machine == machine() != ""
    monkeypatch.setattr(socket, "gethostname", lambda: "pod-7")
    assert arguments.located(arguments.here()).machine == machine(), "a container of the same machine"
    monkeypatch.setenv("TENSORHUB_HOST", "node7")
    assert arguments.located(arguments.here()).machine == "", "the control"
