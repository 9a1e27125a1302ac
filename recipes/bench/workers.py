"""The processes of the benchmarks: a hub, workers of the store, and the bare stream to compare with."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

import numpy
import torch
import xxhash

from recipes.bench.network import Host, now
from tensorhub_plugins.core import Client, Location, Server

TENSOR_SIZE_BYTES = 8 << 20
TIMEOUT_S = 120.0


class HubWorker:
    def __init__(self, host: str) -> None:
        self._server = Server(f"tcp://{host}:0", insecure=True)  # in a network of its own

    def address(self) -> str:
        return self._server.address

    def close(self) -> None:
        self._server.close()


class Stream:
    """One end of a bare TCP connection that carries `tensors`."""

    tensors: dict[str, torch.Tensor]

    def listen(self, host: str) -> int:
        self._listener = socket.create_server((host, 0))
        return int(self._listener.getsockname()[1])

    def receive(self) -> float:
        sock, _ = self._listener.accept()
        with sock:
            for tensor in self.tensors.values():
                view = memoryview(tensor.view(torch.uint8).view(-1).numpy())
                at = 0
                while at < len(view):
                    count = sock.recv_into(view[at:], 0, socket.MSG_WAITALL)
                    if not count:
                        raise ConnectionError("the stream ended early")
                    at += count
        return now()

    def send(self, host: str, port: int) -> float:
        with socket.create_connection((host, port)) as sock:
            began = now()
            for tensor in self.tensors.values():
                sock.sendall(memoryview(tensor.view(torch.uint8).view(-1).numpy()))
        return began


class Worker(Stream):
    """A trainer or a reader with `size_bytes` of tensors."""

    def __init__(
        self, hub: str, name: str, host: str, size_bytes: int, *, data_center: str = "dc", **options: Any
    ) -> None:
        torch.set_num_threads(1)
        location = Location(data_center, "", name)
        self.name = name
        self.client = Client(
            hub,
            run="bench",
            model="m",
            replica=name,
            location=location,
            advertise_host=host,
            transports=("tcp",),
            **options,
        )
        count = -(-size_bytes // TENSOR_SIZE_BYTES)
        self.tensors = {f"w{i:04}": torch.ones(size_bytes // count, dtype=torch.uint8) for i in range(count)}

    # --- the store ---

    def fill(self, seed: int) -> str:
        """Fresh bytes; returns their digest."""
        noise = torch.from_numpy(numpy.random.default_rng(seed).integers(0, 256, 1 << 20, dtype=numpy.uint8))
        for index, tensor in enumerate(self.tensors.values()):
            for at in range(0, tensor.numel(), noise.numel()):
                part = tensor[at : at + noise.numel()]
                part.copy_(noise[: part.numel()])
            tensor[: min(8, tensor.numel())] = index % 251
        return self.digest()

    def digest(self) -> str:
        digester = xxhash.xxh3_128()
        for tensor in self.tensors.values():
            digester.update(memoryview(tensor.numpy()))
        return digester.hexdigest()

    def retain(self, newest: int) -> None:
        self.client.retain(newest)

    def publish(self, version: int) -> float:
        began = now()
        self.client.publish(version, self.tensors, copy=False)
        return began

    def read(self, version: int) -> dict[str, Any]:
        report = self.client.replicate(self.tensors, version, timeout_s=TIMEOUT_S)
        return {
            "ended": now(),
            "sources": report.sources,
            "losses": list(report.losses),
            "seconds": report.seconds,
        }

    def unpublish(self, version: int) -> None:
        self.client.unpublish(version)

    def cpu_s(self) -> float:
        times = os.times()
        return times.user + times.system

    def close(self) -> None:
        self.client.close()


# --- what a benchmark asks of them ---


def bare_stream(source: Host, reader: Host) -> float:
    """Return the seconds that all bytes take over one TCP connection."""
    port = reader.call("listen", reader.address)
    reader.tell("receive")
    began: float = source.call("send", reader.address, port)
    ended: float = reader.answer()
    return ended - began


def read_at_once(
    version: int, source: Host, readers: Sequence[Host], read: str = "read", publish: str = "publish"
) -> tuple[float, list[dict[str, Any]]]:
    """Publish to readers that wait; return when it was published, and each reader's answer. read, publish: their
    methods."""
    for reader in readers:
        reader.tell(read, version)
    began: float = source.call(publish, version)
    return began, [reader.answer() for reader in readers]


def check_and_withdraw(version: int, truth: str, source: Host, readers: Sequence[Host]) -> None:
    """RuntimeError if a reader has other bytes than the source had."""
    for reader in readers:
        if reader.call("digest") != truth:
            raise RuntimeError(f"{reader.name} has other bytes than were published")
        reader.call("unpublish", version)
    source.call("unpublish", version)
