"""A process on a host of its own, which does what it is told: one JSON object a line, one line of answer each."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

VARIABLES = ("TENSORHUB_ADVERTISE", "TENSORHUB_INTERFACE", "TENSORHUB_PORTS")


def forward(near: tuple[str, int], far: tuple[str, int]) -> None:
    """Stand for a translated address: what comes to `near` goes on to `far`, from here, as docker-proxy does it."""
    listener = socket.create_server(near)

    def pass_on(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        while True:
            one, _ = listener.accept()
            other = socket.create_connection(far)
            for pair in ((one, other), (other, one)):
                threading.Thread(target=pass_on, args=pair, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()


class Host:
    """The hubs and clients of one host."""

    def __init__(self) -> None:
        self._kept: list[Any] = []
        self._logged: list[str] = []
        self._publishers: dict[str, Any] = {}
        handler = logging.Handler()
        handler.emit = lambda record: self._logged.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("tensorhub").addHandler(handler)

    def hub(self, address: str) -> str:
        from tensorhub_plugins.core import HubLimits, start_server

        self._kept.append(start_server(address, limits=HubLimits(grace_s=0.0), insecure=True))
        return str(self._kept[-1].address)

    def everywhere(self, port: int) -> str:
        """Where `tensorhub server` listens on its own."""
        from tensorhub_plugins.core.protocol.address import of_all_interfaces

        return of_all_interfaces(port)

    def forward(self, near: list[Any], far: list[Any]) -> str:
        forward(tuple(near), tuple(far))  # type: ignore[arg-type]
        return ""

    def publish(
        self, hub: str, run: str, environment: dict[str, str] | None = None, version: int = 1, count: int = 1000
    ) -> str:
        """The endpoint that is told to readers."""
        import torch

        from tensorhub_plugins.core.cli import fetch_status

        if version == 1:
            self._publishers[run] = self._client(hub, run, "trainer", environment or {})
        self._publishers[run].publish(version, {"w": torch.arange(count)})
        model = next(each for each in fetch_status(hub)["models"] if each["run"] == run)
        return next(str(each["endpoints"]["tcp"]) for each in model["workers"] if each["worker"] == "trainer/0")

    def fetch(self, hub: str, run: str, timeout_s: float = 20.0, version: int = 1, count: int = 1000) -> str:
        """ "" if it has come, or why not."""
        import torch

        from tensorhub_plugins.core import TensorHubError

        client = self._client(hub, run, "rollout", {})
        try:
            fetched = client.fetch(version, timeout_s=timeout_s, serve=False)
            assert torch.equal(fetched.tensors()["w"], torch.arange(count))
            return ""
        except TensorHubError as error:
            return str(error)

    def unreached(self, hub: str, run: str) -> str:
        """What the status says of the trainer."""
        from tensorhub_plugins.core.cli import fetch_status

        model = next(each for each in fetch_status(hub)["models"] if each["run"] == run)
        return next(str(each["unreached"]) for each in model["workers"] if each["worker"] == "trainer/0")

    def facing(self, hub: str) -> list[str]:
        """The addresses of this host that face a hub."""
        from tensorhub_plugins.core import Deadline
        from tensorhub_plugins.core.protocol.address import addresses_towards

        return addresses_towards(hub, Deadline.after(20.0))

    def logged(self) -> list[str]:
        return self._logged

    def _client(self, hub: str, run: str, replica: str, environment: dict[str, str]) -> Any:
        from tensorhub_plugins.core import Client, Location, TransferLimits

        for name in VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(environment)
        names = {"run": run, "model": "m", "replica": replica, "location": Location(host=os.environ["ON_HOST"])}
        client = Client(hub, **names, transports=("tcp",), limits=TransferLimits(open_s=1.0))  # type: ignore[arg-type]
        self._kept.append(client)
        return client


def main() -> None:
    """Answer until stdin ends."""
    host = Host()
    for line in sys.stdin:
        name, arguments = json.loads(line)
        does: Callable[..., Any] = getattr(host, name)
        try:
            answer = {"is": does(**arguments)}
        except Exception as error:
            answer = {"error": repr(error)}
        print(json.dumps(answer), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
