"""The verl adapter's decisions, which need no engine: options, spans, health."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.types import version_of

pytest.importorskip("verl", reason="the adapter registers with verl when it is imported")

from tensorhub_plugins.verl import config, health, versions  # noqa: E402
from tensorhub_plugins.vllm.ray import figures  # noqa: E402
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
    assert config.spans_of("auto", verl_config(**root)) == spans
    assert config.spans_of("oldest", verl_config(**root)) == "oldest"


# --- versions of a sample ---------------------------------------------------------------------------------------------


def test_verls_steps_and_the_stores_versions():
    assert versions.version_of_step(0) == 1
    assert all(versions.step_of_version(versions.version_of_step(s)) == s for s in range(10))


def test_a_version_of_a_former_life_takes_no_work():
    former, newest = version_of(0, 7), version_of(1, 6)
    assert versions.waits_for_trainer(former, 1) == "has version 7, and waits for the first of attempt 1"
    assert versions.waits_for_trainer(newest, 2).startswith("has version 6 of attempt 1, and waits")
    assert not versions.waits_for_trainer(newest, 1) and not versions.waits_for_trainer(former, 0)


def test_a_request_across_two_switches():
    ledger = versions.Ledger()
    ledger.switched(4, {"a": 3, "b": 0})
    ledger.switched(5, {"a": 3, "b": 2})  # a produced nothing between them
    assert ledger.finished("a", 7, 6) == (versions.Span(4, 3), versions.Span(6, 4))
    assert ledger.finished("b", 2, 6) == (versions.Span(5, 2),)
    assert ledger.finished("c", 5, 6) == (versions.Span(6, 5),)
    assert ledger.finished("d", 0, 6) == ()
    assert not ledger._closed


@given(st.lists(st.integers(0, 5), min_size=1, max_size=20))
def test_spans_hold_every_token_once_in_order(tokens_per_step):
    ledger, total = versions.Ledger(), 0
    for step, tokens in enumerate(tokens_per_step[:-1]):
        total += tokens
        ledger.switched(step, {"r": total})
    total += tokens_per_step[-1]
    spans = ledger.finished("r", total, len(tokens_per_step) - 1)
    assert {s.step: s.tokens for s in spans} == {i: t for i, t in enumerate(tokens_per_step) if t}
    assert [s.step for s in spans] == sorted(s.step for s in spans)
    assert sum(span.tokens for span in spans) == total


# --- health -----------------------------------------------------------------------------------------------------------


def _watch():
    watch = health.Watch(timeout_s=10)
    for name in ("a", "b"):
        watch.add(name, 0)
        watch.heard(name, 1, ready=True, version=5)
    return watch


def test_a_replica_without_weights_gets_no_requests():
    watch = health.Watch(timeout_s=10)
    watch.add("a", 0)
    assert not watch.in_rotation("a")
    watch.heard("a", 1, ready=False, version=0)
    assert not watch.in_rotation("a")
    watch.heard("a", 2, ready=True, version=1)
    assert watch.in_rotation("a")


def test_a_silent_replica_is_out_until_it_has_caught_up():
    watch = _watch()
    watch.heard("b", 11, ready=True, version=7)
    assert watch.silent(11) == []  # exactly the timeout is still well
    assert watch.silent(11.5) == ["a"]
    assert watch.silent(12) == []  # told once
    assert not watch.in_rotation("a") and watch.in_rotation("b")
    assert not watch.is_same_life("a", 0) and watch.is_same_life("b", 0)
    watch.heard("b", 30, ready=True, version=9)
    assert not watch.heard("a", 30, ready=True, version=5)  # awake, but its first answers would be stale
    assert not watch.in_rotation("a")
    watch.heard("b", 31, ready=True, version=10)
    assert watch.heard("a", 31, ready=True, version=9)  # what the others had when it woke is enough
    assert watch.in_rotation("a")
    assert not watch.is_same_life("a", 0)  # its old requests are with others


def test_a_failed_replica_comes_back_ready():
    watch = _watch()
    assert watch.failed("a", 2)
    assert not watch.failed("a", 2)
    assert not watch.heard("a", 3, ready=False, version=0)  # started again, no weights yet
    assert watch.heard("a", 60, ready=True, version=5)
    assert watch.in_rotation("a")


def test_a_failed_replica_catches_up_with_what_the_others_have_when_it_answers_again():
    watch = _watch()
    assert watch.failed("a", 2)
    watch.heard("b", 5, ready=True, version=9)
    assert not watch.heard("a", 6, ready=True, version=5)  # within the timeout, and stale all the same
    assert watch.heard("a", 7, ready=True, version=9)


@pytest.mark.parametrize(("others", "comes_back"), [(4, True), (9, False)], ids=["they went back", "control"])
def test_a_replica_catches_up_no_further_than_the_others_are(others, comes_back):
    watch = _watch()
    assert watch.failed("a", 2)
    watch.heard("b", 5, ready=True, version=9)
    assert not watch.heard("a", 6, ready=True, version=0)
    watch.heard("b", 7, ready=True, version=others)  # an older version was pinned meanwhile
    assert watch.heard("a", 8, ready=True, version=4) is comes_back


def test_the_last_one_standing_is_never_kept_out():
    watch = _watch()
    assert watch.silent(20) == []  # both at once: it was the machine that stood still
    assert watch.in_rotation("a") and watch.in_rotation("b")
    watch.heard("b", 21, ready=True, version=6)
    assert watch.silent(21) == ["a"]
    assert watch.failed("b", 22)  # its process ended
    assert watch.newest() == 0
    assert watch.heard("a", 33, ready=True, version=5)  # as stale as it is, there is no better one
    assert watch.in_rotation("a")


def _hung(watch, seconds):
    """When it is found, if looked for once a second; None: never."""
    for now in range(2, seconds):
        watch.look(now)
        watch.silent(now)
        if found := watch.hung(now):
            return found, now
    return None


def _alone(**heard):
    watch = health.Watch(timeout_s=10)
    watch.add("a", 0)
    watch.heard("a", 1, **{"ready": True, "version": 1, "hangs_after_s": 60, **heard})
    return watch


def test_one_that_hangs_is_found_when_nobody_else_is_heard_either():
    watch = _alone()
    assert _hung(watch, 3600) == (["a"], 62)
    assert watch.failed("a", 62) and not watch.in_rotation("a") and not watch.is_same_life("a", 0)
    watch.heard("a", 70, ready=False, version=0, hangs_after_s=60)  # started again, and loading
    assert _hung(watch, 3600) is None
    two = _watch()  # all at once
    for name in ("a", "b"):
        two.heard(name, 1, ready=True, version=5, hangs_after_s=60)
    assert _hung(two, 3600) == (["a", "b"], 62)


def test_what_does_not_hang_is_not_taken_for_it():
    assert _hung(_alone(ready=False), 3600) is None  # it loads for the first time
    assert _hung(_alone(hangs_after_s=math.inf), 3600) is None  # nobody here could start it again
    watch = _alone()
    watch.drain("a")
    assert _hung(watch, 3600) is None  # it is ended when its time is up
    watch = _alone()
    for now in range(2, 50):  # it answers heartbeats, however long its requests are
        watch.look(now)
        watch.heard("a", now, ready=True, version=1, hangs_after_s=60)
    assert watch.hung(105) == []
    # Whoever listens was frozen for an hour: what they answered is read a moment later.
    watch.look(3650)
    assert watch.hung(3650) == [] and watch.silent(3650) == []
    for now in range(3651, 3706):
        watch.look(now)
        assert watch.hung(now) == []
    watch.look(3706)
    assert watch.hung(3706) == ["a"]


def test_who_is_heard_before_the_router_finds_that_it_stood_still_is_not_heard_in_the_future():
    watch = _watch()
    watch.look(2)
    watch.heard("a", 3602, ready=True, version=5)
    watch.look(3602)
    assert watch.silent(3602) == []
    for now in range(3603, 3614):
        watch.look(now)
        watch.heard("b", now, ready=True, version=5)
    assert watch.silent(3613) == ["a"]


def test_what_verl_takes_away_is_not_put_back():
    watch = _watch()
    watch.remove("a")
    assert not watch.heard("a", 2, ready=True, version=5)
    assert not watch.in_rotation("a")


def test_one_that_joins_gets_requests_when_it_has_what_the_others_have():
    watch = _watch()
    watch.add("c", 2, joins=True)
    watch.heard("c", 3, ready=False, version=0)
    watch.heard("a", 4, ready=True, version=7)
    assert not watch.heard("c", 5, ready=True, version=5)
    assert not watch.in_rotation("c")
    assert not watch.heard("c", 6, ready=True, version=7)  # it was never lost, so it does not come back
    assert watch.in_rotation("c")
    alone = health.Watch(timeout_s=10)
    alone.add("a", 0, joins=True)
    alone.heard("a", 1, ready=True, version=1)
    assert alone.in_rotation("a")


def test_one_that_is_drained_gets_no_requests_and_is_not_lost():
    watch = _watch()
    watch.drain("a")
    watch.heard("a", 2, ready=True, version=9)
    assert not watch.in_rotation("a") and watch.newest() == 5
    assert watch.is_same_life("a", 0)  # its requests end there
    watch.drain("a", False)
    assert watch.in_rotation("a")


def test_who_is_behind():
    watch = _watch()
    assert watch.behind(5) == [] and watch.behind(6) == ["a", "b"]
    watch.add("new", 1)  # at the start: it will be asked as soon as it is ready
    assert watch.behind(5) == ["new"]
    watch.heard("b", 2, ready=True, version=5, stays=True)
    assert watch.behind(6) == ["a", "new"]
    watch.failed("a", 3)
    assert watch.behind(6) == ["new"]


def _lag_and_age(watch: health.Watch, now: float, published: int = 0) -> tuple[float, float, float]:
    """The largest and the mean lag, and the oldest age, for the trainer's log."""
    told = figures.of_replicas(watch.serving(), lost=0, refused=0, published=published, now=now)
    return told["tensorhub/version_lag/max"], told["tensorhub/version_lag/mean"], told["tensorhub/last_pull_age_s"]


def test_replicas_that_all_stand_still_are_behind_what_was_published():
    watch = _watch()
    assert _lag_and_age(watch, 31) == (0.0, 0.0, 30.0)  # the newest of them says nothing of the trainer
    assert _lag_and_age(watch, 31, 5) == (0.0, 0.0, 30.0) and _lag_and_age(watch, 31, 9) == (4.0, 4.0, 30.0)
    watch.heard("a", 32, ready=True, version=9)
    assert _lag_and_age(watch, 33, 9) == (4.0, 2.0, 32.0)
    assert [replica.installed_at for replica in watch.serving()] == [32, 1]


def test_replicas_are_stuck_when_all_refuse_and_none_has_another_version():
    watch = health.Watch(timeout_s=10)
    for name in ("a", "b"):
        watch.add(name, 0)
        watch.heard(name, 1, ready=False, version=0, refused=1)
        assert watch.is_stuck() is (name == "b" or len(watch.replicas) == 1)
    assert watch.refusing(1) == ["a", "b"] and watch.is_stuck(1)
    assert watch.refusing(2) == [] and not watch.is_stuck(2)  # they may take that one
    watch.heard("b", 2, ready=False, version=0)  # it was started again, and is asked again
    assert not watch.is_stuck(1)
    watch.heard("b", 3, ready=True, version=1)
    assert watch.refusing(1) == ["a"] and not watch.is_stuck(1)
    watch.heard("b", 4, ready=True, version=1, refused=2)
    watch.heard("a", 4, ready=False, version=0, refused=2)
    assert watch.refusing(2) == ["a", "b"] and not watch.is_stuck(2)  # one goes on with version 1
    watch.failed("b", 5, gone=True)
    assert watch.is_stuck(2)


def test_requests_are_counted_once():
    load = health.Load()
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
