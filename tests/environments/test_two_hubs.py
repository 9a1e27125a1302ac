"""Two hubs behind one address: a load balancer in between, or another one where the first one was."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Iterator

import pytest
import torch
from client_stage import until

from tensorhub_plugins.core import Client, Server, UsageError, start_server
from tensorhub_plugins.core.hub.limits import HubLimits

SOON_S = 30.0
LIMITS = HubLimits(grace_s=0.0)

pytestmark = pytest.mark.heavy


class Balancer:
    """One address that leads to `target`; `lead_to` cuts all connections, as a balancer does whose backend has gone."""

    def __init__(self, target: str) -> None:
        self._target, self._open = target, list[socket.socket]()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                host, port = self._target.removeprefix("tcp://").rsplit(":", 1)
                far = socket.create_connection((host, int(port)))
                self._open += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        self._cut(source, target)

    def _cut(self, *sockets: socket.socket) -> None:
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def lead_to(self, target: str) -> None:
        self._target = target
        self._cut(*self._open)

    def close(self) -> None:
        self._cut(self._listener, *self._open)
        for each in (self._listener, *self._open):
            each.close()


@pytest.fixture
def hubs() -> Iterator[tuple[Server, Server, Balancer]]:
    with start_server(limits=LIMITS) as first, start_server(limits=LIMITS) as second:
        balancer = Balancer(first.address)
        with contextlib.closing(balancer):
            yield first, second, balancer


def client(address: str, replica: str) -> Client:
    return Client(address, run="r", model="m", replica=replica, transports=("tcp",))


def workers_of(hub: Server) -> list[str]:
    with client(hub.address, "asks") as asks:
        return [worker for info in asks.versions() for worker in info.layouts.get("checkpoint", ())]


def test_what_another_hub_does_not_take_is_said_by_the_next_call_and_offered_no_more(hubs, caplog):
    first, second, balancer = hubs
    with client(balancer.address, "trainer") as trainer, client(second.address, "other") as other:
        trainer.publish(1, {"w": torch.ones(3)})
        trainer.publish(2, {"w": torch.ones(3)})
        other.publish(1, {"w": torch.zeros(3)})
        balancer.lead_to(second.address)
        until(lambda: [key.version for key in trainer.serving()] == [2])
        with pytest.raises(UsageError, match="version 1, checkpoint.* is offered no more: the hub does not take it"):
            trainer.versions()
        assert {info.version for info in trainer.versions()} == {1, 2}  # once; the rest is told, and found there
        assert sorted(workers_of(second)) == ["other/0", "trainer/0"]
        assert "the hub does not take it" in caplog.text


def test_a_restarted_hub_takes_all_and_nothing_is_raised(hubs):
    """The control: another hub to which nobody has said anything else."""
    _, second, balancer = hubs
    with client(balancer.address, "trainer") as trainer:
        trainer.publish(1, {"w": torch.ones(3)})
        balancer.lead_to(second.address)
        until(lambda: workers_of(second) == ["trainer/0"])
        assert [info.version for info in trainer.versions()] == [1]
        assert [key.version for key in trainer.serving()] == [1]


@pytest.mark.smoke
@pytest.mark.parametrize("returns", [True, False], ids=["by turns", "control: once"])
def test_two_hubs_that_answer_by_turns_are_found(hubs, caplog, returns):
    first, second, balancer = hubs
    caplog.set_level(logging.INFO, "tensorhub.client")
    with client(balancer.address, "trainer") as trainer:
        trainer.publish(1, {"w": torch.ones(3)})
        balancer.lead_to(second.address)
        until(lambda: workers_of(second) == ["trainer/0"])
        if returns:
            balancer.lead_to(first.address)
            until(lambda: "two hubs answer" in caplog.text)
        assert ("two hubs answer at" in caplog.text) == returns
