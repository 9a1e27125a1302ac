"""Where a process is, and its cluster: environment, Ray's node labels, options, the cloud's zone; in this order."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

pytest.importorskip("ray")

import ray

from tensorhub_plugins.core import UsageError
from tensorhub_plugins.core.options import TrainingOptions
from tensorhub_plugins.vllm import config as vllm_config
from tensorhub_plugins.vllm.config import WorkerConfig
from tensorhub_plugins.vllm.ray import config, hub
from tensorhub_plugins.vllm.ray.config import location_of, preemptible_by
from tensorhub_plugins.vllm.ray.fleet import handle as fleet

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


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        ({}, None),
        (OWN, None),
        ({"ray.io/market-type": "spot"}, True),
        ({"ray.io/market-type": "on-demand"}, False),
        ({"tensorhub.io/preemptible": "true", "ray.io/market-type": "on-demand"}, True),
        ({"tensorhub.io/preemptible": "false", "ray.io/market-type": "spot"}, False),
    ],
)
def test_a_nodes_labels_say_whether_it_may_be_taken_away(labels: dict[str, str], says: bool | None) -> None:
    assert preemptible_by(labels) is says


def test_another_word_is_refused() -> None:
    with pytest.raises(UsageError, match="tensorhub.io/preemptible=yes: true, or false"):
        preemptible_by({"tensorhub.io/preemptible": "yes"})


def test_clients_and_workers_say_what_the_node_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment comes before the labels; the control is a node that says nothing."""
    monkeypatch.setattr(config, "node_address", lambda: "127.0.0.1")
    given = TrainingOptions(hub="tcp://127.0.0.1:1", run="r", model="m")
    for labels, environment, expected in (
        ({"ray.io/market-type": "spot"}, None, True),
        ({"ray.io/market-type": "spot"}, "0", None),
        ({}, None, None),
    ):
        monkeypatch.setattr(config, "node_labels", lambda labels=labels: labels)
        monkeypatch.delenv("TENSORHUB_PREEMPTIBLE", raising=False)
        if environment is not None:
            monkeypatch.setenv("TENSORHUB_PREEMPTIBLE", environment)
        said: list[object] = []
        monkeypatch.setattr(vllm_config, "Client", lambda *_, said=said, **had: said.append(had["preemptible"]))
        config.connect(given, replica="trainer")
        assert said == [expected]
        assert WorkerConfig.parse(config.worker_config(given, replica="rollout-0")).preemptible is expected


def test_the_network_of_the_options_reaches_clients_and_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As each node has it: Ray's address is what it says without."""
    monkeypatch.setattr(config, "node_address", lambda: "10.0.0.5")
    for given in (TrainingOptions(interface="ib0,eth1", ports="7100-7163"), TrainingOptions()):
        given = msgspec.structs.replace(given, hub="tcp://10.0.0.1:1", run="r")
        said: dict[str, object] = {}
        worker = WorkerConfig.parse(config.worker_config(given, replica="rollout-0"))
        monkeypatch.setattr(vllm_config, "Client", lambda *_, said=said, **options: said.update(options))
        for connect in (lambda given=given: config.connect(given, replica="trainer"), worker.connect):
            connect()
            assert (said["interface"], said["ports"]) == (given.interface, given.ports)
            assert said.pop("advertise_host") == "10.0.0.5"


def test_a_hub_of_the_run_takes_the_last_port_of_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "node_address", lambda: "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert hub._free_address(f"{port - 1}-{port}") == ("127.0.0.1", port - 1)
        with pytest.raises(UsageError, match="TENSORHUB_PORTS.*: Address already in use"):
            hub._free_address(f"{port}-{port}")
    assert hub._free_address(None)[1] > 0
    monkeypatch.setattr(hub, "node_address", lambda: "192.0.2.1")  # no address of this machine: no port was taken
    with pytest.raises(UsageError, match="on 192.0.2.1, .*: Cannot assign requested address"):
        hub._free_address("7100-7102")


def test_a_name_of_the_cluster_that_is_never_answered_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    numeric = socket.getaddrinfo

    def never_answers(host: str, *more: Any, flags: int = 0, **named: Any) -> Any:
        if flags & socket.AI_NUMERICHOST:  # asks no resolver
            return numeric(host, *more, flags=flags, **named)
        goes_on.wait(60)
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(fleet, "CONNECT_TIMEOUT_S", 0.1)
    monkeypatch.setattr(socket, "getaddrinfo", never_answers)
    with pytest.raises(UsageError, match="'head' was not looked up in time: the resolver does not answer"):
        fleet._connect("head:6379")
    goes_on.set()


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
