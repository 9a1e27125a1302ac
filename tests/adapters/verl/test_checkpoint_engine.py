"""verl's checkpoint engine without verl's manager, against a real hub."""

from threading import Timer

import pytest
import torch

pytest.importorskip("verl", reason="the adapter registers with verl when it is imported")

from hub_limits import AT_ONCE  # noqa: E402

from tensorhub_plugins.core import Deadline, UsageError, start_server  # noqa: E402


@pytest.fixture
def address():
    with start_server(limits=AT_ONCE) as server:
        yield server.address


def weights(seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((64, 32), (7,), (128, 64), (), (3, 3, 3))
    return {f"layer.{i}": torch.randn(shape, generator=generator) for i, shape in enumerate(shapes)}


def assert_equal(a, b):
    assert sorted(a) == sorted(b)
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=0)


@pytest.mark.slow
def test_a_hub_that_does_not_answer_is_refused_at_start(monkeypatch):
    from tensorhub_plugins.verl import trainer as checkpoint_engine

    real = checkpoint_engine.Client
    monkeypatch.setattr(checkpoint_engine, "Client", lambda *a, **k: real(*a, **k, connect_timeout_s=0.3))
    with pytest.raises(UsageError) as refusal:
        checkpoint_engine.TensorHubCheckpointEngine(1 << 20, is_master=True, hub="tcp://127.0.0.1:9", run="r")
    assert "no hub answers at tcp://127.0.0.1:9: start one with `tensorhub server" in str(refusal.value)
    with pytest.raises(UsageError, match="no option 'hup'"):
        checkpoint_engine.TensorHubCheckpointEngine(1 << 20, is_master=True, hup="tcp://127.0.0.1:9")


@pytest.mark.slow
@pytest.mark.parametrize("is_master", [True, None], ids=["trainer", "rollout"])
def test_the_runs_own_hub_may_be_started_again_as_the_run_begins(monkeypatch, is_master):
    """An update has asked it for its address, and it does not answer for longer than a wrong address is tried."""
    from tensorhub_plugins.core import Client
    from tensorhub_plugins.verl import trainer as checkpoint_engine
    from tensorhub_plugins.vllm import config

    def quicker(*args, connect_timeout_s, **given):
        patience_s = connect_timeout_s / 20
        started.append(Timer(1.0, lambda: hubs.append(start_server(address))))
        started[-1].start()
        return Client(*args, connect_timeout_s=patience_s, **given)

    monkeypatch.setattr(config, "Client", quicker)
    monkeypatch.setattr(checkpoint_engine.hub, "run_name", lambda options: "r")
    monkeypatch.setattr(checkpoint_engine, "_actor_name", lambda: "rollout_standalone_0CheckpointEngineWorker_0:0")
    hubs, started = [], []
    with start_server() as server:
        address = server.address
    engine = checkpoint_engine.TensorHubCheckpointEngine(1 << 20, is_master=is_master)
    try:
        engine.init_process_group(address)
        assert engine._client.versions() == []
        engine._client.close()
    finally:
        started[0].join()
        hubs[0].close()


def test_verls_engine_from_trainer_to_rollouts(address, monkeypatch):
    """The engine as verl's manager calls it, without verl's manager: two rollouts, the second may read the first."""
    import asyncio

    from tensorhub_plugins.verl import trainer as checkpoint_engine

    names = iter(["rollout_standalone_0CheckpointEngineWorker_0:0", "rollout_standalone_1CheckpointEngineWorker_0:0"])
    monkeypatch.setattr(checkpoint_engine, "_actor_name", lambda: next(names))
    engine = checkpoint_engine.TensorHubCheckpointEngine
    trainer = engine(1 << 20, is_master=True, hub=address, run="r")
    rollouts = [engine(1 << 20, hub=address, run="r") for _ in range(2)]
    metadata = [trainer.prepare(), *(rollout.prepare() for rollout in rollouts)]
    to_trainer, to_rollouts = engine.build_topology(1, 2, metadata)
    trainer.init_process_group(**{key: value[0] for key, value in to_trainer.items()})
    for index, rollout in enumerate(rollouts):
        rollout.init_process_group(**{key: value[index] for key, value in to_rollouts.items()})

    async def receive(rollout, step):
        return {name: tensor.clone() async for name, tensor in rollout.receive_weights(global_steps=step)}

    async def update(step):
        sent = trainer.send_weights(iter(weights(step).items()), global_steps=step)
        return await asyncio.gather(sent, *(receive(rollout, step) for rollout in rollouts))

    for step in range(3):  # verl's first step is 0
        metrics, *received = asyncio.run(asyncio.wait_for(update(step), 30))
        assert metrics["tensorhub/publish/bytes"] == sum(t.nbytes for t in weights(step).values())
        for tensors in received:
            assert_equal(tensors, weights(step))
        trainer.finalize()
    for made in (trainer, *rollouts):
        made._client.close()


def test_workers_of_a_host_have_one_copy_and_say_what_it_takes(address, monkeypatch, caplog):
    """N7: eight of them took eight copies, without a word. The control: the first has memory of its own."""
    import asyncio

    from tensorhub_plugins.verl import trainer as checkpoint_engine

    names = iter(f"rollout_standalone_{k}CheckpointEngineWorker_0:0" for k in range(3))
    monkeypatch.setattr(checkpoint_engine, "_actor_name", lambda: next(names))
    engine = checkpoint_engine.TensorHubCheckpointEngine
    trainer = engine(1 << 20, is_master=True, hub=address, run="r", location={"rack": "far"})
    rollouts = [engine(1 << 20, hub=address, run="r") for _ in range(3)]
    for each in (trainer, *rollouts):
        each.init_process_group(address)

    async def receive(rollout, step):
        return {name: tensor.clone() async for name, tensor in rollout.receive_weights(global_steps=step)}

    with caplog.at_level("INFO"):
        for step in range(3):
            asyncio.run(trainer.send_weights(iter(weights(step).items()), global_steps=step))
            for rollout in rollouts:
                assert_equal(asyncio.run(receive(rollout, step)), weights(step))
            kinds = [slab.kind for rollout in rollouts for slab in rollout._received.slabs.values()]
            assert kinds == ["allocated", "borrowed", "borrowed"]
    assert all(f"{rollout._worker} takes up to" in caplog.text for rollout in rollouts)
    for made in (trainer, *rollouts):
        made._client.close()


def test_the_bytes_of_all_ranks_are_counted_once(address):
    """verl keeps one rank's metrics of every name."""
    import asyncio
    import threading

    from tensorhub_plugins.core import Client, Publisher
    from tensorhub_plugins.verl import trainer as checkpoint_engine

    ranks = []
    for rank in range(2):
        engine = checkpoint_engine.TensorHubCheckpointEngine(1 << 20, is_master=rank == 0)
        client = Client(address, run="r", model="actor", replica="trainer", shard=rank, shard_count=2)
        engine._publisher = Publisher(client, rank=rank, ranks=2, worker=f"trainer/{rank}", keep=1, timeout_s=20)
        ranks.append((engine, client))
    told = {}

    def send(rank):
        told[rank] = asyncio.run(ranks[rank][0].send_weights(iter(weights(0).items()), global_steps=0))

    threads = [threading.Thread(target=send, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    merged = {**told[0], **told[1]}
    assert merged["tensorhub/publish/bytes"] == sum(t.nbytes for t in weights(0).values())
    for _, client in ranks:
        client.close()


@pytest.mark.parametrize("name", ["model.q_proj.base_layer.weight", "model.q_proj.lora_A.default.weight"])
def test_a_lora_run_that_is_not_merged_is_refused(address, name):
    import asyncio

    from tensorhub_plugins.verl import trainer as checkpoint_engine

    engine = checkpoint_engine.TensorHubCheckpointEngine(1 << 20, is_master=True, hub=address, run="r")
    with pytest.raises(UsageError, match="model.lora.merge=true"):
        asyncio.run(engine.send_weights(iter({name: torch.zeros(2)}.items()), global_steps=0))
    engine._client.close()


def test_rollout_workers_that_move_nothing_are_not_seen_at_the_hub(address):
    """In pull mode verl makes them all the same."""
    from tensorhub_plugins.core.cli import fetch_status
    from tensorhub_plugins.verl import trainer as checkpoint_engine

    checkpoint_engine.TensorHubCheckpointEngine(1 << 20, hub=address, run="r")
    assert not [worker for model in fetch_status(address)["models"] for worker in model["workers"]]
    trainer = checkpoint_engine.TensorHubCheckpointEngine(1 << 20, is_master=True, hub=address, run="r")
    assert [worker for model in fetch_status(address)["models"] for worker in model["workers"]]  # the control
    trainer._client.close()


def updates_of(manager, how):
    """Has verl's manager make an update of step 5, in one of the ways in which verl's trainers call it."""
    import asyncio

    async def awaits():
        await manager.update_weights(5)

    def update():
        manager.update_weights(5)

    async def calls():
        update()

    with pytest.raises(Prepared):
        if how == "without a loop":
            update()
        else:
            asyncio.run(awaits() if how == "awaited" else calls())


class Prepared(Exception):
    """The update has come as far as this test looks."""


@pytest.mark.parametrize("how", ["without a loop", "awaited", "in a loop"])
def test_the_step_is_known_before_the_weights_move(monkeypatch, how):
    from verl.checkpoint_engine import base

    import tensorhub_plugins.verl
    from tensorhub_plugins.verl import trainer_hooks

    tensorhub_plugins.verl.register()  # twice is fine
    told = []

    def build_process_group(self, rollout):
        told.append(trainer_hooks.of_update())
        raise Prepared

    monkeypatch.setattr(base.CheckpointEngineManager, "build_process_group", build_process_group)
    monkeypatch.setattr(base, "RayWorkerGroup", lambda **given: None)
    monkeypatch.setattr(base, "RayClassWithInitArgs", lambda **given: None)
    manager = base.CheckpointEngineManager.__new__(base.CheckpointEngineManager)
    manager.backend, manager.replicas, manager.actor_wg = "tensorhub", [], None
    updates_of(manager, how)
    assert told == [5]
    assert trainer_hooks.of_update() == 0  # and no other update takes it for its own


@pytest.mark.parametrize(("resumed", "kept"), [(2, [2]), (0, [])])
def test_a_trainer_that_resumes_begins_at_its_step(address, resumed, kept):
    """Version N + 1 is that of verl's step N: of the former life, versions up to N are read on. From step 0 none is."""
    import asyncio

    from tensorhub_plugins.core import Client, version_of
    from tensorhub_plugins.verl import trainer as checkpoint_engine

    def life(step):
        engine = checkpoint_engine.TensorHubCheckpointEngine(1 << 20, is_master=True, hub=address, run="r")
        engine.init_process_group(address, step)
        return engine

    former, keeper = life(0), Client(address, run="r", model="actor", replica="keeper")
    for step in (1, 3):  # versions 2 and 4
        asyncio.run(former.send_weights(iter(weights(step).items()), global_steps=step))
        assert keeper.fetch(serve=True).version == step + 1
    former._client.close()
    later = life(resumed)
    assert until_drops(keeper, kept) == kept
    asyncio.run(later.send_weights(iter(weights(9).items()), global_steps=resumed))
    fetched = keeper.fetch()
    assert fetched.version == version_of(1, resumed + 1)
    assert_equal(fetched.tensors(), weights(9))
    for client in (keeper, later._client):
        client.close()


def until_drops(client, left):
    """What it still serves, once that is no more than `left`, or after a while."""
    deadline = Deadline.after(10)
    while (now := [key.version for key in client.serving()]) != left and deadline.remaining():
        client.versions()  # an answer of the hub brings what it has to say
    return now
