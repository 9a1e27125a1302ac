"""The verl adapter's decisions, which need no engine: options, spans, requests."""

import msgspec
import pytest

from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.types import version_of

pytest.importorskip("verl", reason="the adapter registers with verl when it is imported")

from tensorhub_plugins.verl import config, versions  # noqa: E402
from tensorhub_plugins.verl.request_counts import Load  # noqa: E402
from tensorhub_plugins.vllm.ray.config import location_of  # noqa: E402

# --- options ----------------------------------------------------------------------------------------------------------


def test_no_options_are_fine():
    assert config.parse(None) == config.parse({}) == config.Options()


def test_options_arrive_from_a_command_line_as_text():
    options = config.parse({"keep": "3", "timeout_s": "5", "transports": ["tcp"], "verify": "true"})
    assert (options.keep, options.timeout_s, options.transports, options.verify) == (3, 5.0, ("tcp",), True)


@pytest.mark.parametrize(
    ("given_options", "says"),
    [
        ({"kepp": 3}, "no option 'kepp': did you mean 'keep'?"),
        ({"zzz": 3}, "the options are hub, run"),
        ({"keep": "many"}, "keep"),
        ({"keep": 0}, "keep is 0: choose a number from 1 to 64"),
        ({"timeout_s": -1}, "timeout_s is -1"),
        ({"hub": "localhost:7000"}, "give the address `tensorhub server` prints"),
        ({"transports": []}, "name at least one"),
        ({"dtype": "int8"}, "choose one of bfloat16"),
        ({"pause_mode": "drain"}, "pause_mode"),
        ({"location": {"planet": "x"}}, "location"),
        ({"location": {"host": "x"}}, "set TENSORHUB_HOST on each instead"),
        ({"run": ""}, "run is empty"),
        ({"fleet_target": 4, "fleet_max": 2}, "fleet_target is 4"),
    ],
)
def test_a_wrong_option_is_refused_with_what_to_change(given_options, says):
    with pytest.raises(UsageError) as refusal:
        config.parse(given_options)
    assert says in str(refusal.value)
    assert config.WHERE in str(refusal.value)


def test_untested_versions_are_refused_unless_allowed(monkeypatch):
    config.check_verl(config.parse({}))
    for version in ("0.9.2", "0.91", "1.0"):
        monkeypatch.setattr(config.metadata, "version", lambda name, version=version: version)
        with pytest.raises(UsageError, match="was not tested with this adapter: install verl 0.9.1"):
            config.check_verl(config.parse({}))
        config.check_verl(config.parse({"allow_untested": "true"}))


def test_a_nodes_environment_says_where_it_is(monkeypatch):
    options = config.parse({"location": {"data_center": "a", "rack": "r1"}})
    assert location_of(options).rack == "r1"
    monkeypatch.setenv("TENSORHUB_RACK", "r2")
    assert (location_of(options).data_center, location_of(options).rack) == ("a", "r2")


def test_options_survive_rays_pickle():
    import pickle

    options = config.parse({"keep": 3, "location": {"rack": "r"}})
    assert pickle.loads(pickle.dumps(options)) == options
    assert msgspec.to_builtins(options)["keep"] == 3


def verl_config(**root):
    from omegaconf import OmegaConf

    tree = OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "vllm_tensorhub"}}, **root})
    OmegaConf.set_struct(tree, True)  # as Hydra leaves it
    return tree.actor_rollout_ref.rollout


def test_verl_is_pointed_at_our_router_unless_the_user_has_one():
    from omegaconf import OmegaConf

    from tensorhub_plugins.verl.routing import TensorHubRouter

    rollout = verl_config()
    assert config.use_our_router(rollout) and config.use_our_router(rollout)
    path = rollout.router_config_path
    module, name = OmegaConf.load(path).router_class.rsplit(".", 1)
    assert (module, name) == (TensorHubRouter.__module__, TensorHubRouter.__name__)
    rollout.router_config_path = "mine.yaml"
    assert not config.use_our_router(rollout) and rollout.router_config_path == "mine.yaml"


@pytest.mark.parametrize(
    ("root", "spans"),
    [
        ({"trainer": {"use_v1": True, "v1": {"trainer_mode": "separate_async"}}}, "split"),
        ({"trainer": {"use_v1": True, "v1": {"trainer_mode": "sync"}}}, "oldest"),
        ({"trainer": {"use_v1": False, "v1": {"trainer_mode": "separate_async"}}}, "oldest"),  # one_step_off
        ({"trainer": {"use_v1": False}, "async_training": {"partial_rollout": True}}, "split"),
        ({"trainer": {"use_v1": False}, "async_training": {"partial_rollout": False}}, "oldest"),
    ],
)
def test_samples_are_split_only_where_verls_client_comes_back_for_the_rest(root, spans):
    assert versions.reported_as("auto", verl_config(**root)) == spans
    assert versions.reported_as("oldest", verl_config(**root)) == "oldest"


TAKES_PIECES = [
    {"trainer": {"use_v1": True, "v1": {"trainer_mode": "separate_async"}}},
    {"trainer": {"use_v1": False}, "async_training": {"partial_rollout": True}},
]
TAKES_NONE = [{"trainer": {"use_v1": False}}, {"trainer": {"use_v1": False}, "async_training": {}}]


@pytest.mark.parametrize("given", [{"pause_mode": "abort"}, {"spans": "split"}])
def test_no_client_of_verls_gets_pieces_that_it_takes_for_the_whole(given):
    for root in TAKES_NONE:
        with pytest.raises(UsageError, match=f"{next(iter(given))}=.* takes such a part for the whole answer: leave"):
            versions.check_pieces(config.parse(given), verl_config(**root))
        versions.check_pieces(config.parse({"pause_mode": "wait", "spans": "oldest"}), verl_config(**root))
    for root in TAKES_PIECES:
        versions.check_pieces(config.parse(given), verl_config(**root))


# --- versions of a sample ---------------------------------------------------------------------------------------------


def test_verls_steps_and_the_stores_versions():
    assert versions.version_of_step(0) == 1
    assert all(versions.step_of_version(versions.version_of_step(s)) == s for s in range(10))


def test_an_answer_says_its_steps_and_the_oldest_is_verls_one():
    spans = ((version_of(0, 7), 3), (version_of(1, 6), 2))  # a trainer that has started again
    said = versions.told(spans, split=True)
    assert said == {"global_steps": 5, "tensorhub_spans": [(6, 3), (5, 2)], "tensorhub_split": True}


# --- requests ---------------------------------------------------------------------------------------------------------


def test_requests_are_counted_once():
    load = Load()
    for session in ("r", "r", "s"):
        load.acquire("a", session)
    load.release("a", "s")
    load.release("a", "s")
    load.release("b", "r")
    assert (load.count("a"), load.count("b")) == (2, 0)
    assert load.forget("a") == 2
    load.acquire("a", "t")
    load.release("a", "r")  # of a life that is over
    assert load.count("a") == 1


# --- names ------------------------------------------------------------------------------------------------------------


def test_verls_names_of_rollout_workers():
    from tensorhub_plugins.verl.trainer import replica_name

    assert replica_name("rollout_standalone_1CheckpointEngineWorker_0:0") == "rollout-1.0.0"
    assert replica_name("rollout_standalone_12_abCheckpointEngineWorker_1:7") == "rollout-12.1.7"
    assert replica_name("something else") == "rollout-something else"
