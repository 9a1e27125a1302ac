"""What follows from verl's configuration: for how many workers matrices are cut, and how long a version may take."""

from __future__ import annotations

import pytest

pytest.importorskip("verl", reason="the adapter registers with verl when it is imported")
omegaconf = pytest.importorskip("omegaconf")

from tensorhub_plugins.core import UsageError  # noqa: E402
from tensorhub_plugins.verl import config, driver  # noqa: E402
from tensorhub_plugins.vllm.outlook import Model  # noqa: E402


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [(config.ROLLOUT, {}, (4, True)), (config.ROLLOUT, {"slices": 2}, (2, True)), ("vllm", {}, (None, None))],
    ids=["pull", "given", "drop-in"],
)
def test_slices_are_as_many_as_the_workers_of_a_replica_that_pulls(name, given, expected):
    engine = {"engine_kwargs": {config.BACKEND: given}}
    rollout = {"name": name, "tensor_model_parallel_size": 4, "checkpoint_engine": engine}
    root = omegaconf.OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})
    driver.settle(root, None)
    kwargs = root.actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs
    found = config.parse(kwargs[config.BACKEND])
    assert (found.slices, found.slices_experts) == expected


@pytest.mark.parametrize(("given", "expected"), [({}, False), ({"slices_experts": True}, True)], ids=["", "given"])
def test_experts_are_not_cut_for_expert_parallel_replicas(given, expected):
    engine = {"engine_kwargs": {config.BACKEND: given}}
    sizes = {"tensor_model_parallel_size": 4, "expert_parallel_size": 4}
    rollout = {"name": config.ROLLOUT, **sizes, "checkpoint_engine": engine}
    root = omegaconf.OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})
    driver.settle(root, None)
    kwargs = root.actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs
    assert config.parse(kwargs[config.BACKEND]).slices_experts == expected


def test_a_size_that_no_replica_has_is_refused():
    with pytest.raises(UsageError, match="slices"):
        config.parse({"slices": 0})


@pytest.mark.parametrize(
    ("given", "model", "expected"),
    [
        ({}, None, 120.0),
        ({"dtype": "bfloat16"}, Model(1_000_000), 120.0),
        ({"dtype": "bfloat16"}, Model(70_500_000_000), 120.0 + 282.0),
        ({}, Model(70_500_000_000), 120.0 + 564.0),
        ({"dtype": "bfloat16", "timeout_s": 120}, Model(70_500_000_000), 120.0),
    ],
    ids=["unknown", "tiny", "70B", "70B in float32", "given"],
)
def test_a_version_of_a_large_model_may_take_longer(given, model, expected):
    rollout = {"checkpoint_engine": {"engine_kwargs": {config.BACKEND: given}}}
    root = omegaconf.OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})
    driver.settle(root, model)
    kwargs = root.actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs
    assert config.parse(kwargs[config.BACKEND]).timeout_s == expected
