"""The way of a version: publish, replicate, fetch, wait, unpublish; groups that agree, and who converts."""

from __future__ import annotations

import socket
import time

import pytest
import torch
from client_processes import SIZE, hold_back, let_go, same_bytes, tensors_of, zeros_like
from client_stage import HELD, LATE_S, RUNTIME, SOON_S, holders, until

from tensorhub_plugins.core import (
    CHECKPOINT,
    LATEST,
    Client,
    DeadlineExceeded,
    NotPublished,
    Part,
    ShardKey,
    UsageError,
    VersionGone,
    spec_of,
    start_server,
)
from tensorhub_plugins.core.cli import fetch_status
from tensorhub_plugins.core.hub.limits import HubLimits
from tensorhub_plugins.core.security.keys import Keys
from tensorhub_plugins.core.transfer.runner import Transfer
from tensorhub_plugins.core.transports.shm import process_memory as _process

# --- publish, replicate, fetch, wait, versions, unpublish ---


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_version_from_trainer_to_rollout(stage, transport):
    trainer, rollout = (stage.client(name, transports=(transport,)) for name in ("trainer", "rollout"))
    published, expected = trainer.publish(3, tensors_of(1)), tensors_of(1)
    assert (published.version, published.size_bytes, published.layout) == (3, SIZE, CHECKPOINT)
    assert set(published.seconds) == {"copy", "digest", "announce"}

    mine = zeros_like(expected)
    report = rollout.replicate(mine)
    assert same_bytes(mine, expected)
    assert (report.version, report.layout, report.size_bytes) == (3, CHECKPOINT, SIZE)
    assert report.sources == {"trainer/0": SIZE} and report.transports == {transport: SIZE} and report.losses == ()
    assert report.roots == {0: published.manifest.root().hex()} and set(report.seconds) == {"find", "read"}
    assert holders(trainer, 3) == ("rollout/0", "trainer/0") and rollout.serving() == [ShardKey(3, CHECKPOINT)]

    assert rollout.wait() == rollout.wait(3) == trainer.wait(newer_than=2) == 3
    assert not trainer.unpublish(3).kept and trainer.serving() == []
    assert holders(rollout, 3) == ("rollout/0",)


def test_a_version_is_fetched_into_memory_of_its_own_and_the_memory_is_used_again(stage):
    trainer, rollout = stage.client("trainer", transports=("shm",)), stage.client("rollout", transports=("shm",))
    trainer.publish(1, tensors_of(1))
    fetched = rollout.fetch()
    assert (fetched.version, fetched.layout, fetched.converts) == (1, CHECKPOINT, None)
    assert same_bytes(fetched.tensors(), tensors_of(1)) and rollout.serving() == []
    slab = fetched.slab
    rollout.publish(1, slab, RUNTIME)
    fetched.release()  # it stays with what is published
    assert rollout.fetch().slab is not slab
    rollout.unpublish(1, RUNTIME)
    fetched.release()
    trainer.publish(2, tensors_of(2))
    again = rollout.fetch()
    assert again.slab is slab and same_bytes(again.tensors(), tensors_of(2))
    fetched.release()  # it is not the old one's any more
    third = rollout.fetch()
    assert third.slab is not slab and same_bytes(again.tensors(), tensors_of(2))


@pytest.mark.parametrize("way", ["served", "published", "superseded"])
@pytest.mark.parametrize("releases", [False, True])
def test_what_was_not_released_keeps_its_bytes_whatever_is_unpublished(stage, way, releases):
    """The control: its memory is used again when it was released, too."""
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    trainer.retain(0)
    for version in (1, 2, 3):
        trainer.publish(version, tensors_of(version))
    fetched = rollout.fetch(1, serve=way != "published")
    tensors, slab = fetched.tensors(), fetched.slab
    if way == "published":
        rollout.publish(1, slab, RUNTIME)
    if way == "superseded":
        rollout._serving._carry_out(rollout._serving._shelf.supersede(lambda version: version == 1))
    else:
        rollout.unpublish(1)
    if releases:
        fetched.release()
    later = [rollout.fetch(version).slab for version in (2, 3)]
    assert rollout.serving() == []
    assert (slab in later) == releases and same_bytes(tensors, tensors_of(1)) != releases


def test_parts_that_were_not_released_keep_their_bytes(stage):
    rollout = stage.client("rollout")
    trainers = [
        Client(stage.address, run=stage.run, model="actor", replica="ranks", shard=rank, shard_count=2)
        for rank in range(2)
    ]
    try:
        for version in (1, 2, 3):
            for rank, each in enumerate(trainers):
                part = {"w": Part((2000,), (1000 * rank,))}
                each.publish(version, {"w": torch.full((1000,), float(version))}, parts=part)
        fetched = rollout.fetch(1, serve=True)
        tensors = fetched.tensors()
        rollout.retain(0)
        rollout.unpublish(1)
        kept = [rollout.fetch(version) for version in (2, 3)]
        assert set(tensors["w"].tolist()) == {1.0} and [set(k.tensors()["w"].tolist()) for k in kept] == [{2.0}, {3.0}]
    finally:
        for each in trainers:
            each.close()


def test_a_slab_under_two_layouts_is_used_again_when_both_are_gone(stage):
    client = stage.client("trainer")
    slab = client.allocate([spec_of("w", torch.ones(10))])
    slab.write("w", torch.ones(10))
    client.publish(1, slab, CHECKPOINT)
    client.publish(1, slab, RUNTIME)
    client.unpublish(1, RUNTIME)
    assert client.allocate(slab.specs) is not slab
    client.publish(2, {"w": torch.zeros(10)})
    client.unpublish(1)
    assert client.allocate(slab.specs) is slab
    slab.write("w", torch.ones(10))
    client.publish(3, slab)
    client.unpublish(2)
    client.publish(4, slab, "x")  # by its owner, who has it still
    assert client.allocate(slab.specs) is not slab


@pytest.mark.parametrize(
    ("version", "layout", "origin"),
    [(1, CHECKPOINT, "replicated"), (2, CHECKPOINT, "published"), (1, RUNTIME, "published")],
)
def test_a_fetched_slab_is_read_from_others_only_as_what_it_was(stage, monkeypatch, version, layout, origin):
    """As another version it is new: one that is taken for read is visible before its other shards are there."""
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    trainer.publish(1, {"w": torch.ones(100)})
    (slab,) = rollout.fetch(1).slabs.values()
    origins, ask = [], rollout._serving.hub.ask
    monkeypatch.setattr(
        rollout._serving.hub,
        "ask",
        lambda make, deadline: origins.append(make(1).holding.origin) or ask(make, deadline),
    )
    rollout.publish(version, slab, layout)
    assert origins == [origin]
    monkeypatch.undo()


def test_a_published_slab_is_not_copied_and_adopted_tensors_are_served_in_place(stage):
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    live = tensors_of(1)
    slab = trainer.allocate([spec_of(name, t) for name, t in live.items()])
    with pytest.raises(UsageError, match=r"6 tensors of the slab were never written, first \['embed'"):
        trainer.publish(1, slab)
    for name, tensor in live.items():
        slab.write(name, tensor)
    trainer.publish(1, slab)
    assert trainer.find(ShardKey(1, CHECKPOINT)).slab is slab
    trainer.publish(2, live, copy=False)
    assert trainer.find(ShardKey(2, CHECKPOINT)).slab.tensors()["rest"] is live["rest"]
    assert same_bytes(rollout.fetch(2).tensors(), live)


def test_what_is_adopted_travels_over_tcp_when_shared_memory_cannot(stage, monkeypatch):
    trainer, rollout = stage.client("trainer", transports=("shm", "tcp")), stage.client("r", transports=("shm", "tcp"))
    trainer.publish(1, tensors_of(1), copy=False)
    assert rollout.fetch().report.transports == {"shm": SIZE}  # by its address
    monkeypatch.setattr(_process, "available", lambda: False)
    rollout = stage.client("other", transports=("shm", "tcp"))
    assert rollout.fetch().report.transports == {"tcp": SIZE}
    trainer.publish(2, tensors_of(2))
    report = rollout.fetch().report
    assert report.transports == {"shm": SIZE} and report.losses == ()


def test_digests_can_be_switched_off_by_all(stage):
    trainer = stage.client("trainer", verify=False)
    published = trainer.publish(1, tensors_of(1))
    assert not published.manifest.has_digests
    first, second = (stage.client(name, verify=False) for name in ("first", "second"))
    fetched = first.fetch(serve=True)
    assert same_bytes(fetched.tensors(), tensors_of(1))
    trainer.retain(0)
    trainer.unpublish(1)
    again = second.fetch()  # from the first, under the same root
    assert same_bytes(again.tensors(), tensors_of(1)) and list(again.report.sources) == ["first/0"]
    assert again.report.roots == {0: published.manifest.root().hex()}
    with pytest.raises(UsageError, match="published without digests: read with verify=False"):
        stage.client("careful").fetch()
    with pytest.raises(UsageError, match="with other bytes"):  # who can tell?
        trainer.publish(1, tensors_of(1))


def test_a_rank_reads_its_rows_of_what_two_trainer_ranks_hold_in_other_parts(stage):
    whole = torch.arange(4096 * 1024, dtype=torch.int32).reshape(4096, 1024)  # 16 MB, in 64 segments
    for shard in (0, 1):
        rows = slice(2048 * shard, 2048 * (shard + 1))
        trainer = stage.client("trainer", shard=shard, shard_count=2)
        trainer.publish(1, {"w": whole[rows].clone()}, parts={"w": Part((4096, 1024), (2048 * shard, 0))})
    rollout = stage.client("rollout")
    mine = torch.zeros(1024, 1024, dtype=torch.int32)
    report = rollout.replicate({"w": mine}, parts={"w": Part((4096, 1024), (1536, 0))}, serve=False)
    assert torch.equal(mine, whole[1536:2560])
    assert report.sources == {"trainer/0": mine.nbytes // 2, "trainer/1": mine.nbytes // 2}  # and not 16 MB
    columns = torch.zeros(4096, 100, dtype=torch.int32)
    rollout.replicate({"w": columns}, parts={"w": Part((4096, 1024), (0, 7))}, serve=False)
    assert torch.equal(columns, whole[:, 7:107])
    with pytest.raises(UsageError, match="'w' is int32"):
        rollout.replicate({"w": mine}, serve=False)  # not said to be a part


def test_parameters_that_train_and_strided_tensors_arrive_in_place(stage):
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    model, other = torch.nn.Linear(40, 30), torch.nn.Linear(40, 30)
    trainer.publish(1, dict(model.named_parameters()))
    rollout.replicate(dict(other.named_parameters()), serve=False)
    assert torch.equal(model.weight, other.weight) and torch.equal(model.bias, other.bias)
    turned = {"w": torch.randn(30, 40).t()}
    trainer.publish(2, turned, copy=False)
    mine = {"w": torch.zeros(30, 40).t()}
    rollout.replicate(mine, serve=False)
    assert torch.equal(mine["w"], turned["w"])


def test_nothing_to_move_is_a_version_too(stage):
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    trainer.publish(1, {})
    trainer.publish(2, {"empty": torch.empty(0, 3)})
    assert rollout.fetch(1).tensors() == {} and rollout.fetch(2).tensors()["empty"].shape == (0, 3)
    assert rollout.replicate({"empty": torch.empty(0, 3)}, 2).size_bytes == 0


def test_several_source_shards_to_one_reader(stage):
    expected = tensors_of(1)
    names = sorted(expected)
    for shard in range(3):
        trainer = stage.client("trainer", shard=shard, shard_count=3)
        trainer.publish(1, {name: expected[name] for name in names[shard::3]})
        assert [info.visible for info in trainer.versions()] == [shard == 2]
    rollout, other = stage.client("rollout"), stage.client("other")
    mine = zeros_like(expected)
    report = rollout.replicate(mine)
    assert same_bytes(mine, expected) and sum(report.sources.values()) == report.size_bytes == SIZE
    assert set(report.sources) == {"trainer/0", "trainer/1", "trainer/2"}
    assert holders(rollout, 1) == ("rollout/0", "trainer/0", "trainer/1", "trainer/2")
    part = {"rest": torch.zeros_like(expected["rest"]), "embed": torch.zeros_like(expected["embed"])}
    other.replicate(part)
    assert same_bytes(part, {name: expected[name] for name in part})
    assert all("other/0" not in names for names in other.versions()[0].layouts.values())  # a part is no source
    fetched = other.fetch()
    assert same_bytes(fetched.tensors(), expected)
    with pytest.raises(UsageError, match="came in 3 shards"):
        _ = fetched.slab


def test_waiting_for_what_is_not_there_yet(stage):
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    waiting, reading = stage.begin(rollout.wait, newer_than=4), stage.begin(rollout.fetch, 5)
    trainer.publish(4, tensors_of(1))
    trainer.publish(5, tensors_of(2))
    assert waiting.result(SOON_S) == 5 and same_bytes(reading.result(SOON_S).tensors(), tensors_of(2))
    began = time.monotonic()
    for call in (rollout.wait, rollout.fetch):
        with pytest.raises(NotPublished, match="version 9 was not published before the deadline"):
            call(9, timeout_s=0.2)
    assert time.monotonic() - began < LATE_S


@pytest.mark.parametrize("timeout_s", [float("inf"), 1e15])
def test_waiting_for_ever_is_a_deadline_too(stage, timeout_s):
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    reading = stage.begin(rollout.fetch, timeout_s=timeout_s)
    waiting = stage.begin(rollout.wait, timeout_s=timeout_s)
    trainer.publish(1, tensors_of(1), timeout_s=timeout_s)
    assert reading.result(SOON_S).version == waiting.result(SOON_S) == 1
    assert rollout.wait(timeout_s=-1.0) == 1
    assert trainer.unpublish(1, timeout_s=timeout_s).version == 1


def test_a_version_that_is_gone_is_said_to_be_gone(stage):
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    trainer.publish(1, tensors_of(1))
    trainer.publish(2, tensors_of(2))
    trainer.unpublish(1)
    for call in (rollout.wait, rollout.fetch):
        with pytest.raises(VersionGone, match=r"visible now: \[2\]"):
            call(1)


# --- one version for a group, never backwards ---


def test_a_reading_group_agrees_on_one_version_while_a_newer_one_appears(stage, progress):
    trainer = stage.client("trainer")
    group = [stage.client("rollout", shard=shard, shard_count=2) for shard in range(2)]
    trainer.publish(1, tensors_of(1))
    hold_back(trainer, 1, HELD)
    first = stage.begin(group[0].fetch)
    progress.wait("rollout", HELD)
    trainer.publish(2, tensors_of(2))
    second = stage.begin(group[1].fetch)
    progress.wait("rollout", 2 * HELD)  # it reads from the trainer too, which serves no more of version 1
    let_go(trainer, 1)
    assert [first.result(SOON_S).version, second.result(SOON_S).version] == [1, 1]
    assert [client.fetch().version for client in group] == [2, 2]
    alone = stage.client("alone")
    assert alone.fetch().version == 2  # the control: 2 was there to be had


def test_latest_never_goes_backwards_when_the_hub_forgets(stage):
    hub = stage.hub("tcp://127.0.0.1:0")
    stage.address = hub.call("address")
    older, newer, rollout = stage.client("older"), stage.client("newer"), stage.client("rollout")
    older.publish(1, tensors_of(1))
    newer.publish(2, tensors_of(2))
    assert rollout.fetch().version == 2 and rollout.wait() == 2
    hub.kill()
    newer.close()
    stage.hub(stage.address)
    assert [info.version for info in until(older.versions)] == [1]
    fresh = stage.client("fresh")
    assert fresh.fetch().version == 1  # the control: 1 is the latest there is
    for call in (rollout.fetch, rollout.wait):
        with pytest.raises(NotPublished):
            call(LATEST, timeout_s=0.5)
    older.publish(3, tensors_of(3))
    assert rollout.fetch().version == 3


# --- who converts ---


def test_one_converts_and_the_others_wait_for_it(stage):
    trainer = stage.client("trainer")
    rollouts = [stage.client(f"rollout-{index}") for index in range(3)]
    trainer.publish(1, tensors_of(1))
    fetches = [stage.begin(client.fetch, layouts=(RUNTIME, CHECKPOINT)) for client in rollouts]
    converter = until(lambda: next((i for i, f in enumerate(fetches) if f.done()), None) is not None) and next(
        i for i, f in enumerate(fetches) if f.done()
    )
    fetched = fetches[converter].result()
    assert (fetched.converts, fetched.layout) == (RUNTIME, CHECKPOINT)
    assert not any(f.done() for i, f in enumerate(fetches) if i != converter)
    rollouts[converter].publish(1, {"fused": torch.ones(100_000)}, RUNTIME)
    for index, future in enumerate(fetches):
        if index != converter:
            other = future.result(SOON_S)
            assert (other.converts, other.layout) == (None, RUNTIME)
            assert other.report.sources == {f"rollout-{converter}/0": 400_000}
            assert torch.equal(other.tensors()["fused"], torch.ones(100_000))


def test_a_converter_that_gives_up_is_replaced(stage):
    trainer, first, second = (stage.client(name) for name in ("trainer", "first", "second"))
    trainer.publish(1, tensors_of(1))
    assert first.fetch(layouts=(RUNTIME, CHECKPOINT)).converts == RUNTIME
    waiting = stage.begin(second.fetch, layouts=(RUNTIME, CHECKPOINT))
    with pytest.raises(DeadlineExceeded):
        stage.client("third").fetch(layouts=(RUNTIME, CHECKPOINT), timeout_s=0.3)
    assert not waiting.done()
    first.abandon(1, RUNTIME)
    assert waiting.result(SOON_S).converts == RUNTIME
    assert stage.client("fourth").fetch(layouts=(RUNTIME, CHECKPOINT), converts=False).layout == CHECKPOINT


@pytest.mark.slow
def test_a_converter_that_is_killed_is_replaced(stage):
    with start_server(limits=HubLimits(grace_s=0.2, heartbeat_s=0.3, session_timeout_s=3.0)) as server:
        stage.address = server.address
        trainer, second = stage.client("trainer"), stage.client("second")
        trainer.publish(1, tensors_of(1))
        first = stage.worker("first")
        assert first.call("fetch", (RUNTIME, CHECKPOINT), SOON_S) == RUNTIME
        waiting = stage.begin(second.fetch, layouts=(RUNTIME, CHECKPOINT))
        with pytest.raises(DeadlineExceeded):
            stage.client("third").fetch(layouts=(RUNTIME, CHECKPOINT), timeout_s=0.3)
        assert not waiting.done()
        first.kill()
        assert waiting.result(SOON_S).converts == RUNTIME
        stage.close()


def test_a_fetch_that_fails_gives_its_claim_back(stage):
    trainer, first, second = (stage.client(name) for name in ("trainer", "first", "second"))
    trainer.publish(1, tensors_of(1))
    hold_back(trainer, 1, HELD)
    with pytest.raises(DeadlineExceeded, match="10 segments were still missing"):
        first.fetch(layouts=(RUNTIME, CHECKPOINT), timeout_s=0.5)
    let_go(trainer, 1)
    assert second.fetch(layouts=(RUNTIME, CHECKPOINT)).converts == RUNTIME


def test_a_claim_that_came_too_late_is_given_back(stage, monkeypatch):
    """The fetch has ended when its answer is there, and nobody has looked at it."""
    trainer, first = stage.client("trainer"), stage.client("first")
    trainer.publish(1, tensors_of(1))

    def end_when_it_is_answered(transfer: Transfer) -> None:
        until(lambda: first._hub._machine.claims and transfer.claimed)
        raise DeadlineExceeded("just now")

    monkeypatch.setattr(Transfer, "_next_event", end_when_it_is_answered)
    with pytest.raises(DeadlineExceeded):
        first.fetch(layouts=(RUNTIME, CHECKPOINT))
    until(lambda: not first._hub._machine.claims)


@pytest.mark.parametrize("peer_stays", [True, False])
def test_a_layout_read_in_place_gives_way_to_another_when_its_holders_are_gone(stage, progress, peer_stays):
    trainer, peer, reader = (stage.client(name) for name in ("trainer", "peer", "reader"))
    trainer.publish(1, tensors_of(1))
    fused, mine = {"fused": tensors_of(2)["embed"]}, {"fused": torch.zeros_like(tensors_of(2)["embed"])}
    peer.publish(1, fused, RUNTIME)
    hold_back(peer, 1, 2, RUNTIME)
    reading = stage.begin(reader.fetch, layouts=(RUNTIME, CHECKPOINT), into=mine, serve=True, timeout_s=SOON_S)
    progress.wait("reader", 2)
    assert not mine["fused"].eq(0).all() and not reading.done()
    if peer_stays:
        let_go(peer, 1, RUNTIME)
        fetched = reading.result(SOON_S)
        assert (fetched.layout, fetched.slabs, fetched.converts) == (RUNTIME, {}, None)
        assert same_bytes(mine, fused) and holders(trainer, 1, RUNTIME) == ("peer/0", "reader/0")
    else:
        peer.close()
        fetched = reading.result(SOON_S)  # at once, not at the deadline
        assert (fetched.layout, fetched.converts) == (CHECKPOINT, RUNTIME)
        assert same_bytes(fetched.tensors(), tensors_of(1)) and fetched.report.sources == {"trainer/0": SIZE}
        assert not same_bytes(mine, fused)  # the caller converts
        assert reader.serving() == [ShardKey(1, CHECKPOINT)]


@pytest.mark.parametrize("copy", [True, False], ids=["copied", "adopted"])
def test_a_transposed_and_a_channels_last_model_is_read_into_its_twin(stage, copy):
    """Their bytes are the storage's, whichever way they were published."""
    make = torch.Generator().manual_seed(1)
    model = {
        "transposed": torch.randn(6, 4, generator=make).t(),
        "conv": torch.randn(2, 3, 4, 5, generator=make).to(memory_format=torch.channels_last),
        "plain": torch.randn(5, generator=make),
    }
    twin = {name: torch.zeros_like(tensor) for name, tensor in model.items()}
    assert [t.stride() for t in twin.values()] == [t.stride() for t in model.values()]
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    trainer.publish(1, model, copy=copy)
    rollout.replicate(twin)
    assert all(torch.equal(twin[name], model[name]) for name in model)
    fetched = stage.client("other").fetch().tensors()
    assert all(torch.equal(fetched[name], model[name]) for name in model)


def test_what_cannot_keep_its_strides_is_copied_row_by_row(stage):
    """Holes and repeated rows; and parts, which are cut along them."""
    whole = torch.arange(64.0).view(8, 8)
    odd = {"holes": whole[:, ::2], "repeated": whole[:1].expand(3, 8), "part": whole.t()[:4].t()}
    trainer, rollout = stage.client("trainer"), stage.client("rollout")
    trainer.publish(1, odd, parts={"part": Part((8, 8), (0, 0))})
    mine = {"holes": torch.zeros(8, 4), "repeated": torch.zeros(3, 8)}
    rollout.replicate(mine)
    assert torch.equal(mine["holes"], odd["holes"]) and torch.equal(mine["repeated"], odd["repeated"])


def ipv6_problem() -> str:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        return f"no IPv6 loopback here: {error}"
    return ""


@pytest.mark.skipif(bool(ipv6_problem()), reason=ipv6_problem())
@pytest.mark.parametrize("keys", [None, Keys.of(b"secret" * 6)], ids=["no secret", "secret"])
def test_a_hub_and_its_workers_where_only_ipv6_is(stage, keys):
    with start_server("tcp://[::1]:0", limits=HubLimits(grace_s=0.0), keys=keys) as hub:
        assert hub.address.startswith("tcp://[::1]:")
        stage.address = hub.address
        trainer = stage.client("trainer", keys=keys, advertise_host="::1")
        trainer.publish(1, tensors_of(1))
        fetched = stage.client("reader", keys=keys).fetch(1)
        assert same_bytes(fetched.tensors(), tensors_of(1)) and fetched.report.transports == {"tcp": SIZE}
        assert fetch_status(hub.address, keys=keys)["hub"]
        while stage.open:
            stage.open.pop().close()


@pytest.mark.parametrize("reader", ["itself", "control: another"])
def test_who_asks_for_what_nobody_else_holds_is_told_so(stage, reader):
    """As a first try in one process is; the sources that it waits for are other workers."""
    trainer = stage.client("trainer")
    trainer.publish(1, {"w": torch.ones(3)})
    if reader == "itself":
        with pytest.raises(DeadlineExceeded, match="held: checkpoint by this worker itself, and it reads from others"):
            trainer.fetch(1, timeout_s=0.2)
        return
    held = stage.client("other").fetch(1, serve=True)
    assert held.version == 1 and trainer.fetch(1).tensors()["w"].tolist() == [1.0, 1.0, 1.0]
