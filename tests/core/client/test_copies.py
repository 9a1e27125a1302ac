"""Copies that a worker makes because the hub asks it to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from client_processes import hold_back, let_go, same_bytes, tensors_of
from client_stage import SOON_S, Stage, holders, until

from tensorhub_plugins.core import (
    CHECKPOINT,
    Client,
    Location,
    NotPublished,
    ShardKey,
    UsageError,
    VersionGone,
    start_server,
)
from tensorhub_plugins.core.cli import fetch_status, status_text
from tensorhub_plugins.core.client.requested_copies import Copies, has_whole
from tensorhub_plugins.core.client.shelf import Entry
from tensorhub_plugins.core.hub.limits import HubLimits
from tensorhub_plugins.core.machine import available_bytes
from tensorhub_plugins.core.transports import Offer

AT = {name: Location("dc", "rack", name) for name in "abc"}


def test_who_has_all_of_it_has_no_copy_to_make() -> None:
    """The hub may ask before it knows what has come: who has it alone would wait for somebody to read it from."""
    mine = [ShardKey(7, CHECKPOINT, shard, 3) for shard in range(3)]
    assert has_whole(mine, 7) and has_whole([ShardKey(7, CHECKPOINT)], 7)
    others = [ShardKey(8, CHECKPOINT), ShardKey(7, "runtime:5eed"), ShardKey(7, CHECKPOINT, 1, 2)]
    assert not has_whole([*mine[:2], *others], 7)


@pytest.fixture
def quick_stage(small_segments: None, request: pytest.FixtureRequest) -> Iterator[Stage]:
    """At a hub that soon takes a silent worker for dead."""
    with start_server(limits=HubLimits(grace_s=0.2, heartbeat_s=0.1, session_timeout_s=3.0)) as server:
        stage = Stage(server.address, request.node.name[:200])
        yield stage
        stage.close()


@pytest.mark.slow
@pytest.mark.parametrize("domains", [2, 1])
def test_a_version_outlives_the_host_of_the_trainer(quick_stage: Stage, domains: int) -> None:
    """Nobody has asked for a copy but the hub. The control: with one domain it dies with its trainer."""
    stage = quick_stage
    trainer = stage.worker("trainer", location=AT["a"])
    stage.worker("spot", location=AT["b"], preemptible=True)
    stage.worker("idle", location=AT["c"])
    operator = stage.client("operator", location=AT["a"])
    operator.retain(1, domains=domains)
    trainer.call("publish", 1, 7)
    if domains == 2:
        until(lambda: holders(operator, 1) == ("idle/0", "trainer/0"))
        until(lambda: fetch_status(stage.address)["models"][0]["bytes_retained"])
    trainer.kill()
    until(lambda: "trainer/0" not in holders(operator, 1))
    if domains == 2:
        assert same_bytes(operator.fetch(1).tensors(), tensors_of(7))
    else:
        with pytest.raises((VersionGone, NotPublished)):
            operator.fetch(1, timeout_s=0.5)


def test_a_copy_goes_when_it_is_needed_no_more(stage: Stage) -> None:
    trainer, idle = stage.client("trainer", location=AT["a"]), stage.client("idle", location=AT["b"])
    trainer.retain(1, domains=2)
    trainer.publish(1, {"w": torch.ones(1000)})
    until(lambda: idle.serving() == [ShardKey(1, CHECKPOINT)])
    trainer.publish(2, {"w": torch.zeros(1000)})
    until(lambda: idle.serving() == [ShardKey(2, CHECKPOINT)])
    assert idle.wait(newer_than=1) == 2  # what it holds for others is nothing that it has seen
    assert torch.equal(idle.fetch("latest").tensors()["w"], torch.zeros(1000))


def test_who_leaves_has_its_last_copy_made_by_one_who_has_not_asked(stage: Stage) -> None:
    leaver, idle = stage.client("rollout-0", location=AT["a"]), stage.client("rollout-1", location=AT["a"])
    leaver.publish(1, {"w": torch.ones(1000)})
    assert leaver.hand_over(20.0)
    assert idle.serving() == [ShardKey(1, CHECKPOINT)]


def test_what_its_owner_has_published_stays_its_owners(stage: Stage) -> None:
    """Who has one shard and is asked for all gives up the other one only."""
    halves = [stage.client("trainer", shard=i, shard_count=2, location=AT["a"]) for i in (0, 1)]
    twin = stage.client("twin", shard=0, shard_count=2, location=AT["b"])
    halves[0].retain(1, domains=2)
    for client in (*halves, twin):
        client.publish(1, {f"w{client.shard}": torch.full((1000,), float(client.shard))}, copy=False)
    mine, other = (ShardKey(1, CHECKPOINT, i, 2) for i in (0, 1))
    entries = twin._serving._shelf.entries
    until(lambda: other in entries and entries[other].is_retained)
    assert not entries[mine].is_retained and entries[mine].offer.slab.kind == "adopted"


def test_a_worker_without_room_is_named_in_the_status(stage: Stage) -> None:
    trainer = stage.client("trainer", location=AT["a"])
    full = stage.client("full", location=AT["b"], memory_budget_bytes=3999)
    trainer.retain(1, domains=2)
    trainer.publish(1, {"w": torch.ones(1000)})
    said = until(
        lambda: [line for line in status_text(fetch_status(stage.address)).splitlines() if "full/0 has" in line]
    )
    assert len(said) == 1 and "version 1 is safe in 1 of 2 hosts (held by trainer/0)" in said[0]
    assert full.serving() == []


def held_by(client: Client, version: int) -> list[Entry[Offer]]:
    return [entry for key, entry in client._serving._shelf.entries.items() if key.version == version]


def test_what_its_owner_reads_meanwhile_is_not_given_up(stage: Stage) -> None:
    """The memory of what it has fetched would be used again while it still looks at it."""
    trainer, idle = stage.client("trainer", location=AT["a"]), stage.client("idle", location=AT["b"])
    trainer.publish(1, {"w": torch.ones(1000)})
    mine = []

    def read(version: int) -> None:
        mine.append(idle.fetch(version, serve=True))
        idle._copy(version)

    copies = Copies(idle._serving, read)
    copies.hold(1)
    copies.join()
    idle._serving._background.submit(lambda: None).result(SOON_S)  # what was given up is
    (entry,) = held_by(idle, 1)
    assert not entry.is_retained and not entry.is_for_others
    trainer.publish(2, {"w": torch.zeros(1000)})
    idle.fetch(2)
    assert torch.equal(mine[0].tensors()["w"], torch.ones(1000))


@pytest.mark.parametrize("arrives", [True, False])
def test_a_trainer_that_resumes_publishes_what_it_was_asked_to_hold(stage: Stage, arrives: bool) -> None:
    """The hub asks whoever has room, before its own loop is there."""
    holder, trainer = stage.client("holder", location=AT["a"]), stage.client("trainer", location=AT["b"])
    weights = tensors_of(7)
    holder.retain(1, domains=2)
    holder.publish(1, weights)
    if arrives:
        hold_back(holder, 1, 3)
    trainer._copies.hold(1)
    until(lambda: [entry for entry in held_by(trainer, 1) if (entry.is_arriving if arrives else entry.is_retained)])
    trainer.unpublish(1)  # what is not its own; nothing happens while it arrives
    trainer.publish(1, weights, copy=False)
    (entry,) = held_by(trainer, 1)
    assert entry.offer.slab.kind == "adopted" and not entry.is_for_others
    let_go(holder, 1)
    trainer._copies.join()
    assert held_by(trainer, 1) == [entry]
    reader = stage.client("reader", location=AT["b"])
    assert same_bytes(reader.fetch(1).tensors(), weights)


def test_a_copy_for_others_takes_no_more_than_there_is_room_for(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """The room may be gone since the hub was told of it. And what it takes is not missing when its owner publishes."""
    trainer = stage.client("trainer", location=AT["a"])
    trainer.retain(2, domains=2)
    trainer.publish(1, {"w": torch.ones(1000)})
    small = stage.client("small", location=AT["b"], memory_budget_bytes=7999, over_budget="refuse")
    small._copies.hold(1)
    until(lambda: [entry for entry in held_by(small, 1) if entry.is_retained])
    small.publish(5, {"w": torch.ones(1000)})
    with pytest.raises(UsageError, match="above its budget"):
        small.publish(6, {"w": torch.ones(1000)})
    trainer.publish(2, {"w": torch.ones(1000)})
    small._copies.hold(2)
    small._copies.join()
    assert "has no copy of version 2 for others: a copy of 0.0 MB, and room for 0.0 MB is left" in caplog.text
    assert held_by(small, 2) == []


def test_a_copy_that_fails_for_any_reason_is_said_and_another_can_be_made(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    def read(version: int) -> None:
        raise MemoryError("there is none left")

    copies = Copies(stage.client("idle")._serving, read)
    copies.hold(1)
    copies.join()
    assert "idle/0: has no copy of version 1 for others: there is none left" in caplog.text
    assert copies._threads == {}


def test_the_room_is_what_can_be_had(stage: Stage) -> None:
    client = stage.client("rollout-0", memory_budget_bytes=1 << 60)
    assert 0 < client._serving.room_bytes() <= available_bytes()
