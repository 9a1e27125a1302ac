"""One more replica of a running job: what it is made with, what belongs to it, how many samples it makes room for."""

import asyncio
import pickle
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("verl", reason="it makes verl's replicas")

from omegaconf import OmegaConf  # noqa: E402

from tensorhub_plugins.core import TensorHubError  # noqa: E402
from tensorhub_plugins.verl import config, launcher  # noqa: E402
from tensorhub_plugins.verl.launcher import VerlLauncher  # noqa: E402


def root():
    rollout = {
        "n_gpus_per_node": 2,
        "tensor_model_parallel_size": 2,
        "data_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "load_format": "auto",
        "gpu_memory_utilization": 0.3,
        "standalone_gpu_memory_utilization": 0.8,
        "checkpoint_engine": {"engine_kwargs": {"tensorhub": {"keep": 3}}},
    }
    tree = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout, "model": {"path": "m"}}})
    OmegaConf.set_struct(tree, True)  # as Hydra leaves it
    return tree


class Replica:
    fails = None
    made = []

    def __init__(self, *arguments, groups, spare):
        self.arguments, self.groups, self.servers, self.spare = arguments, groups, ["server"], spare
        self.made.append(self)

    async def init_standalone(self):
        if self.fails:
            raise RuntimeError(f"Traceback\n  many lines\n{self.fails}")


@pytest.fixture
def made(monkeypatch):
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    async def find(options):
        return "tcp://10.0.0.1:7"

    monkeypatch.setattr(launcher.hub, "find", find)
    monkeypatch.setattr(launcher.hub, "run_name", lambda options: "verl-1")
    monkeypatch.setattr(launcher.placement, "slots", lambda bundles, avoid: 0 if "full" in avoid else 1)
    monkeypatch.setattr(
        launcher.placement,
        "reserve_all",
        lambda names, bundles, **how: [(name, bundles, how) for name in names],
    )
    monkeypatch.setattr(RolloutReplicaRegistry, "get", lambda name: Replica)
    monkeypatch.setattr(Replica, "made", [])
    monkeypatch.setattr(Replica, "fails", None)
    return Replica.made


def test_it_is_told_the_hub_and_reads_no_disk(made):
    given = root()
    handle = asyncio.run(VerlLauncher(given, config.Options()).start("rollout-3", 3, ("draining",)))
    (replica,) = made
    rank, rollout, model, gpus = replica.arguments
    assert (handle, rank, gpus, model.path) == ("server", 3, 2, "m")
    place = {"avoid": ("draining",), "strategy": "STRICT_PACK"}
    assert replica.groups == [("rollout_pool_3verl_group_2:0", [{"CPU": 2, "GPU": 1}] * 2, place)]
    assert launcher.is_group_of("rollout-3", replica.groups[0][0])
    assert rollout.load_format == "dummy" and rollout.gpu_memory_utilization == 0.8
    assert rollout.checkpoint_engine.engine_kwargs.tensorhub == {"keep": 3, "hub": "tcp://10.0.0.1:7", "run": "verl-1"}
    assert rollout._get_root().actor_rollout_ref.rollout == rollout  # where the options of the trainer are looked up
    assert given == root()  # the next one begins with the same


async def test_a_replica_of_several_nodes_takes_them_together_and_one_after_the_other(made, monkeypatch):
    """Two that begin at once: the second asks when the first has all it needs, or has given up."""
    asked, at_once = [], []

    def reserve_all(names, bundles, **how):
        at_once.append(len(asked))
        asked.append(list(names))
        time.sleep(0)  # another thread may come in between
        at_once.append(-len(asked))
        return names

    monkeypatch.setattr(launcher.placement, "reserve_all", reserve_all)
    monkeypatch.setattr(launcher.placement, "slots", lambda bundles, avoid: 4)
    given = root()
    given.actor_rollout_ref.rollout.tensor_model_parallel_size = 4  # of nodes with two
    owner = VerlLauncher(given, config.Options())
    await asyncio.gather(owner.start("rollout-3", 3, ()), owner.start("rollout-4", 4, ()))
    assert asked == [[f"rollout_pool_{rank}verl_group_2_2:{node}" for node in range(2)] for rank in (3, 4)]
    assert at_once == [0, -1, 1, -2]


def test_what_nobody_wants_any_more_is_given_back_once_it_is_reserved(made, monkeypatch):
    given_back = []
    monkeypatch.setattr(launcher, "give_back", given_back.append)
    owner = VerlLauncher(root(), config.Options())
    owner._reserve("rollout-3", 3, ())
    assert given_back == []  # the control
    owner._unwanted.add("rollout-3")
    owner._reserve("rollout-3", 3, ())
    assert given_back == ["rollout-3"]


def test_it_is_sent_to_its_owner_by_value(made):
    assert pickle.loads(pickle.dumps(VerlLauncher(root(), config.Options())))._reserving.locked() is False


def test_without_room_nothing_is_begun(made):
    with pytest.raises(TensorHubError, match="no node has room"):
        asyncio.run(VerlLauncher(root(), config.Options()).start("rollout-3", 3, ("full",)))
    assert not made


@pytest.mark.parametrize(
    ("trainer", "spans"),
    [
        ({"trainer": {"v1": {"trainer_mode": "separate_async"}}}, "split"),
        ({"rollout": {"nnodes": 1}, "trainer": {}}, "oldest"),  # one_step_off, whose client takes a part for the whole
        ({"async_training": {"partial_rollout": True}}, "split"),
        ({"async_training": {"partial_rollout": False}}, "oldest"),
    ],
)
def test_a_server_that_joins_answers_as_verls_client_understands_it(made, monkeypatch, trainer, spans):
    tree = root()
    OmegaConf.set_struct(tree, False)
    tree.merge_with(trainer)
    started = []

    async def start(name, url, options, rollout, expected):
        started.append((name, url, options.hub, options.run, options.spans, rollout, expected))
        return "actor"

    monkeypatch.setattr(launcher.external.ExternalServer, "start", start)
    monkeypatch.setattr(VerlLauncher, "_expected", lambda self: ("rollout", "expected"))
    assert asyncio.run(VerlLauncher(tree, config.Options()).start_external("external-0", "http://h:1")) == "actor"
    assert started == [("external-0", "http://h:1", "tcp://10.0.0.1:7", "verl-1", spans, "rollout", "expected")]


def test_an_engine_that_does_not_start_is_one_sentence(made, monkeypatch):
    monkeypatch.setattr(Replica, "fails", "CUDA out of memory")
    with pytest.raises(TensorHubError) as error:
        asyncio.run(VerlLauncher(root(), config.Options()).start("rollout-3", 3, ()))
    assert error.value.message == "the engine did not start: CUDA out of memory"


def test_what_belongs_to_a_replica():
    actors = [
        "vllm_tensorhub_server_1_0",
        "vllm_tensorhub_server_1_1",
        "vllm_tensorhub_server_11_0",
        "rollout_standalone_1CheckpointEngineWorker_0:0",
        "rollout_standalone_1_abCheckpointEngineWorker_1:3",
        "vllm_tensorhub_place_1_0",
        "rollout_standalone_11CheckpointEngineWorker_0:0",
        "vllm_tensorhub_place_11_0",
        "vllm_tensorhub_server_reward_1_0",
        "rollout_reward_standalone_1CheckpointEngineWorker_0:0",
        "rollout_teacher_standalone_1_abCheckpointEngineWorker_0:0",
        "tensorhub_null_worker",
    ]
    mine = [actor for actor in actors if launcher.is_actor_of("rollout-1", actor)]
    assert mine == [*actors[:2], *actors[3:6]]
    groups = ["rollout_pool_1verl_group_2:0", "rollout_pool_11verl_group_2:0", "rollout_pool_reward_1verl_group_2:0"]
    assert [group for group in groups if launcher.is_group_of("rollout-1", group)] == groups[:1]


def test_an_external_server_ends_no_replica_of_the_same_number(monkeypatch):
    ended = []

    async def leave():
        ended.append("leave")

    monkeypatch.setattr(launcher, "give_back", ended.append)
    monkeypatch.setattr(launcher.ray, "kill", lambda handle: ended.append("kill"))
    handle = SimpleNamespace(tensorhub_leave=SimpleNamespace(remote=leave))
    asyncio.run(VerlLauncher(root(), config.Options()).stop("external-0", handle))
    assert ended == ["leave", "kill"]


async def test_a_spare_makes_no_room_for_samples_before_it_joins(made, monkeypatch):
    more, told = [], []

    async def call(function, joined, left, known):
        more.append(joined)

    async def note(*what):
        told.append(what)

    monkeypatch.setattr(launcher, "give_back", lambda name: None)
    monkeypatch.setattr(launcher.ray, "kill", lambda handle: None)
    calls = {name: SimpleNamespace(remote=note) for name in ("tensorhub_leave", "tensorhub_join")}
    handle = SimpleNamespace(**calls)
    owner = VerlLauncher(root(), config.Options(), SimpleNamespace(__ray_call__=SimpleNamespace(remote=call)))
    for rank in (1, 2):
        await owner.start(f"rollout-{rank}", rank, (), spare=True)
    assert [replica.spare for replica in made] == [True, True] and more == []
    await owner.join("rollout-1", handle)
    await owner.join("rollout-1", handle)  # again, after Ray has started it again
    await owner.stop("rollout-2", handle)  # which never joined
    await owner.stop("rollout-1", handle)
    assert more == [1, 1, 1, 0] and len(told) == 4


def actors_of(rollouter, monkeypatch):
    """verl's rollouter as an actor, and a server's handle that the launcher can end."""

    async def call(function, *arguments):
        function(rollouter, *arguments)

    async def leave():
        pass

    monkeypatch.setattr(launcher, "give_back", lambda name: None)
    monkeypatch.setattr(launcher.ray, "kill", lambda handle: None)
    actor = SimpleNamespace(__ray_call__=SimpleNamespace(remote=call))
    return actor, SimpleNamespace(tensorhub_leave=SimpleNamespace(remote=leave))


async def test_samples_under_way_grow_and_shrink_with_the_fleet(made, monkeypatch):
    recorded = []
    rollouter = SimpleNamespace(
        max_required_samples=40,
        concurrent_samples_per_replica=16,
        max_concurrent_samples=16,
        llm_server_manager=SimpleNamespace(get_replicas=lambda: [SimpleNamespace(replica_rank=0, follows=True)]),
    )
    rollouter._record_active_count = lambda: recorded.append(rollouter.max_concurrent_samples)

    actor, handle = actors_of(rollouter, monkeypatch)

    async def start(*given):
        return "actor"

    monkeypatch.setattr(launcher.external.ExternalServer, "start", start)
    monkeypatch.setattr(VerlLauncher, "_expected", lambda self: ("rollout", "expected"))
    owner = VerlLauncher(root(), config.Options(), actor)
    await owner.start("rollout-1", 1, ())
    await owner.start("rollout-2", 2, ())
    await owner.stop("rollout-0", handle)  # one of verl's own
    await owner.stop("rollout-2", handle)
    await owner.stop("rollout-2", handle)  # asked for again
    await owner.stop("rollout-3", None)  # never began
    await owner.start_external("external-0", "http://h:1")
    await owner.stop("external-0", handle)
    assert recorded == [32, 40, 32, 16, 16, 16, 32, 16]  # 40: what verl's staleness allows


async def test_what_was_lost_with_its_owner_takes_no_room_of_what_comes_after_it(made, monkeypatch):
    """The owner of what the fleet has started was lost, and all that with it. The next one took each that it was told
    to stop from a count that had not had it: verl made samples for one replica, whatever came. The control: before."""
    own = [SimpleNamespace(replica_rank=rank, follows=True) for rank in (0, 1)]
    rollouter = SimpleNamespace(
        max_required_samples=1000,
        concurrent_samples_per_replica=1,
        llm_server_manager=SimpleNamespace(get_replicas=lambda: own),
        _record_active_count=lambda: None,
    )

    actor, handle = actors_of(rollouter, monkeypatch)
    lost, owner = (VerlLauncher(root(), config.Options(), actor) for _ in range(2))
    lost.settle(["rollout-0", "rollout-1"])
    for rank in (2, 3, 4):
        await lost.start(f"rollout-{rank}", rank, ())
    await lost.stop("rollout-1", handle)  # one of verl's own
    assert rollouter.max_concurrent_samples == 4
    owner.settle(["rollout-0", "rollout-2", "rollout-3", "rollout-4", "rollout-5"])  # what the fleet has, and a spare
    for rank in (2, 3, 4, 5):
        await owner.stop(f"rollout-{rank}", handle)
    assert rollouter.max_concurrent_samples == 1
    for rank in (6, 7, 8):
        await owner.start(f"rollout-{rank}", rank, ())
    assert rollouter.max_concurrent_samples == 4


async def test_replicas_on_the_trainers_gpus_count_beside_the_fleets(made, monkeypatch):
    """verl moves them in and out, and counted its own anew each time: what the fleet had added made no room any more,
    and what had left did. Where the fleet counted while they were in, they made none. verl's own method is called."""
    module = pytest.importorskip("verl.experimental.fully_async_policy.fully_async_rollouter")
    standalone = [SimpleNamespace(replica_rank=rank, follows=True) for rank in (1, 2)]
    there, hybrid = list(standalone), SimpleNamespace(replica_rank=0, follows=False)

    async def change(resource_ids):
        there[:] = standalone if hybrid in there else [*standalone, hybrid]
        return 1

    rollouter = object.__new__(module.FullyAsyncRollouter.__ray_metadata__.modified_class)
    rollouter.max_required_samples, rollouter.concurrent_samples_per_replica = 1000, 1
    rollouter.llm_server_manager = SimpleNamespace(get_replicas=lambda: there, add_replicas=change)
    rollouter.llm_server_manager.remove_replicas = change
    rollouter.max_concurrent_samples, rollouter._record_active_count = 2, lambda: None
    actor, handle = actors_of(rollouter, monkeypatch)
    owner = VerlLauncher(root(), config.Options(), actor)
    owner.settle(["rollout-1", "rollout-2"])
    for rank in (3, 4):
        await owner.start(f"rollout-{rank}", rank, ())
    assert rollouter.max_concurrent_samples == 4
    await rollouter.add_replicas(["hybrid_0"])
    assert rollouter.max_concurrent_samples == 5
    await owner.stop("rollout-1", handle)
    assert rollouter.max_concurrent_samples == 4
    await rollouter.remove_replicas(["hybrid_0"])
    assert rollouter.max_concurrent_samples == 3
