"""Where a process is: environment, Ray's node labels, options, the cloud's zone; in this order."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("ray")

import ray

from tensorhub_plugins.core.options import TrainingOptions
from tensorhub_plugins.vllm.ray import config
from tensorhub_plugins.vllm.ray.config import location_of

ZONE = {"ray.io/availability-region": "eu-west", "ray.io/availability-zone": "eu-west-1a"}
OWN = {"tensorhub.io/data-center": "paris", "tensorhub.io/rack": "r7"}
BARE = TrainingOptions()
GIVEN = TrainingOptions(location={"data_center": "lyon", "rack": "r1"})


@pytest.fixture
def where(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, str]]:
    def find(options: TrainingOptions, labels: dict[str, str], **environment: str) -> tuple[str, str]:
        for name in ("TENSORHUB_DATA_CENTER", "TENSORHUB_RACK"):
            monkeypatch.setenv(name, environment.get(name, ""))
        monkeypatch.setattr(config, "node_labels", lambda: labels)
        found = location_of(options)
        return found.data_center, found.rack

    return find


def test_what_is_nearer_to_the_node_comes_first(where: Callable[..., tuple[str, str]]) -> None:
    assert where(BARE, {}) == ("", "")
    assert where(BARE, ZONE) == ("eu-west/eu-west-1a", "")
    assert where(BARE, {"ray.io/availability-zone": "z"}) == ("z", "")
    assert where(GIVEN, ZONE) == ("lyon", "r1")
    assert where(GIVEN, {**ZONE, **OWN}) == ("paris", "r7")
    assert where(GIVEN, {**ZONE, **OWN}, TENSORHUB_DATA_CENTER="here") == ("here", "r7")


@pytest.mark.heavy  # Ray
def test_labels_are_those_of_the_actors_node() -> None:
    assert config.node_labels() == {}  # Ray has not started this process
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, labels=OWN)
    try:

        @ray.remote(num_cpus=0)
        def find() -> tuple[str, str]:
            found = location_of(BARE)
            return found.data_center, found.rack

        assert ray.get(find.remote()) == ("paris", "r7")
    finally:
        ray.shutdown()
