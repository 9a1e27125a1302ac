"""The same where the checkpoint is on another host, behind a link of so many Mbit/s (network namespaces; needs root).

The checkpoint's file is sent over one TCP connection into the trainer's memory, at the rate of the link, and loaded
from there. The store reads from a worker beside the checkpoint, over the same link, or from one beside the trainer.
"""

from __future__ import annotations

import argparse
import io
import socket
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

from recipes.bench import network
from recipes.bench.recovery import trainer
from recipes.bench.recovery.trainer import TIMEOUT_S
from recipes.bench.workers import HubWorker
from tensorhub_plugins.core import Client, Location


class Rank:
    """A trainer, or a worker that holds a version: whatever process has weights. All have the same."""

    def __init__(self, hub: str, site: str, host: str, mb: int) -> None:
        torch.manual_seed(1)
        torch.set_num_threads(1)
        self._hub, self._host, self._location = hub, host, Location(site, "", host)
        self._weights = trainer.made(mb)
        self._parameters = {name: torch.zeros_like(tensor) for name, tensor in self._weights.items()}
        self._clients: list[Client] = []

    def publish(self, model: str, folder: str) -> None:
        """Publish version 1 of this history, and leave a checkpoint and its note."""
        torch.save(self._weights, Path(folder, "model.pt"))
        client = self._client(model)
        client.publish(1, self._weights)
        trainer.recovery(client, self._weights).note(folder)

    def listen(self) -> int:
        self._listener = socket.create_server((self._host, 0))
        return int(self._listener.getsockname()[1])

    def send(self, folder: str) -> None:
        """Send the file of the checkpoint to whoever connects next."""
        connection, _ = self._listener.accept()
        with connection, Path(folder, "model.pt").open("rb") as file:
            connection.sendfile(file)

    def load(self, host: str, port: int) -> float:
        """Return the seconds until the weights of the checkpoint there are in the parameters."""
        self._clear()
        began = time.perf_counter()
        with socket.create_connection((host, port)) as connection, connection.makefile("rb") as stream:
            trainer.load(io.BytesIO(stream.read()), self._parameters)
        return self._since(began)

    def resume(self, model: str, folder: str) -> float:
        """Return the seconds until the same weights of this history are there."""
        self._clear()
        client = self._client(model)
        began = time.perf_counter()
        if not trainer.recovery(client, self._parameters).resume(folder, TIMEOUT_S):
            raise RuntimeError("the weights did not come from the store")
        return self._since(began)

    def copy(self) -> float:
        began = time.perf_counter()
        trainer.copy(self._weights, self._parameters)
        return self._since(began)

    def close(self) -> None:
        for client in self._clients:
            client.close()

    def _client(self, model: str) -> Client:
        name, where = f"{self._host}-{len(self._clients)}", {"location": self._location, "advertise_host": self._host}
        self._clients.append(Client(self._hub, run="r", model=model, replica=name, transports=["tcp"], **where))
        return self._clients[-1]

    def _clear(self) -> None:
        for tensor in self._parameters.values():
            tensor.zero_()

    def _since(self, began: float) -> float:
        seconds = time.perf_counter() - began
        if not all(torch.equal(tensor, self._weights[name]) for name, tensor in self._parameters.items()):
            raise RuntimeError("other weights than were saved")
        return seconds


def measure(mbit: float, options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds of each way, one a round."""
    network.require()
    seconds: dict[str, list[float]] = {}
    with network.Network() as wires, tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for site in ("here", "there"):
            wires.site(site)
        wires.join("here", "there", mbit)
        hosts = [wires.host(site, None) for site in ("there", "there", "here", "here")]
        hub, far, near, own = hosts
        with network.stopping(own, near, far, hub):
            hub.start(partial(HubWorker, hub.address))
            address = hub.call("address")
            for host, site in ((far, "there"), (near, "here"), (own, "here")):
                host.start(partial(Rank, address, site, host.address, options.mb))
            near.call("publish", "near", folder)
            far.call("publish", "far", folder)
            port = far.call("listen")
            for _ in range(options.rounds):
                seconds.setdefault("one copy", []).append(own.call("copy"))
                far.tell("send", folder)
                seconds.setdefault("checkpoint", []).append(own.call("load", far.address, port))
                far.answer()
                for model in ("far", "near"):
                    seconds.setdefault(f"store, {model}", []).append(own.call("resume", model, folder))
    least = options.mb * 8 / mbit
    checkpoint = statistics.median(seconds["checkpoint"])
    print(f"a link of {mbit:g} Mbit/s, which the bytes take {least:.2f} s to cross")
    for way, taken in seconds.items():
        median = statistics.median(taken)
        print(
            f"{way:25} {median:6.2f} s ({min(taken):.2f} to {max(taken):.2f})  {checkpoint / median:5.2f} times as fast"
        )
    return seconds
