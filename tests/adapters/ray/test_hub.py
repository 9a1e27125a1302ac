"""The hub that a run brings along, as an actor of a real Ray."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch

ray = pytest.importorskip("ray")

from tensorhub_plugins.core import Client  # noqa: E402
from tensorhub_plugins.vllm.ray import hub, secret  # noqa: E402


@pytest.mark.heavy
def test_a_hub_that_has_failed_is_started_again_at_the_same_address(
    events: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its actor went on without it, so that the whole run stood still."""
    monkeypatch.delenv("TENSORHUB_SECRET", raising=False)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        actor, address = hub.start()
        secret.learn()

        def fail(self: Any) -> int:
            import os

            self.server._check_files = None  # its thread calls this
            return os.getpid()

        with Client(address, run="r", model="actor", replica="trainer", transports=("tcp",)) as client:
            client.publish(1, {"w": torch.ones(3)})
            failed = ray.get(actor.__ray_call__.remote(fail), timeout=60)
            ray.get(actor.address.remote(), timeout=60)
            again = failed
            while again == failed:
                again = ray.get(actor.__ray_call__.remote(lambda self: __import__("os").getpid()), timeout=60)
            client.publish(2, {"w": torch.ones(3)}, timeout_s=60)
            assert [info.version for info in client.versions(timeout_s=60)] == [1, 2]
            assert hub.address_of(actor) == address
    finally:
        ray.shutdown()


@pytest.mark.heavy
def test_a_hub_whose_port_is_taken_meanwhile_comes_back_when_it_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its actor was gone for good: Ray does not start one again whose constructor raises."""
    monkeypatch.delenv("TENSORHUB_SECRET", raising=False)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        actor, address = hub.start()
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        ray.kill(actor, no_restart=False)
        with taken(host, int(port)), pytest.raises(ray.exceptions.GetTimeoutError):
            ray.get(actor.address.remote(), timeout=10)
        assert hub.address_of(actor) == address
    finally:
        ray.shutdown()


def taken(host: str, port: int) -> socket.socket:
    """Return a socket that listens there, as soon as nothing else does."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return socket.create_server((host, port))
        except OSError:
            assert time.monotonic() < deadline, "the hub still has its port"
            time.sleep(0.01)
