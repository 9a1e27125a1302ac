"""Workers and hubs in processes of their own, to be killed, frozen and started again; and tensors to move."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import zmq
from processes import Another, answering, forkserver

from tensorhub_plugins.core import CHECKPOINT, Client, ShardKey, process_lifetime, start_server
from tensorhub_plugins.core.client import connection
from tensorhub_plugins.core.hub.limits import HubLimits
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.protocol.directive import NO_DIRECTIVE
from tensorhub_plugins.core.threads import Thread

SEGMENT = 1 << 16  # bytes; small, so that a little data is many segments
SEGMENTS = 16  # of `tensors_of`
SIZE = SEGMENT * SEGMENTS
RUNTIME = "runtime:f"


def tensors_of(seed: int) -> dict[str, torch.Tensor]:
    """SIZE bytes in tensors of many kinds."""
    make = torch.Generator().manual_seed(seed)

    def raw(count: int) -> torch.Tensor:
        return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=make)

    tensors = {
        "embed": raw(SIZE // 2).view(torch.bfloat16).view(-1, 64),
        "empty": torch.empty(0, 7),
        "norm.scale": raw(4).view(torch.float32)[0],
        "packed": raw(SEGMENT + 3).view(torch.float8_e4m3fn),
        "mask": raw(1000) < 128,
    }
    rest = SIZE - sum(t.numel() * t.element_size() for t in tensors.values())
    tensors["rest"] = raw(rest)
    return tensors


def zeros_like(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(t) for name, t in tensors.items()}


def same_bytes(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
        for a, b in ((one[name], other[name]) for name in one)
    )


def hold_back(client: Client, version: int, start: int, layout: str = CHECKPOINT) -> None:
    """Serve only the first `start` segments of this shard from now on, as if the others still arrived."""
    offer = client.find(ShardKey(version, layout, client.shard, client.shard_count))
    assert offer is not None and not offer.active_readers
    with offer._changed:
        offer._ready[start:] = bytes(len(offer._ready) - start)


def let_go(client: Client, version: int, layout: str = CHECKPOINT) -> None:
    """End `hold_back`."""
    offer = client.find(ShardKey(version, layout, client.shard, client.shard_count))
    assert offer is not None
    offer.mark_all_ready()


class Worker:
    """A client, called from another process."""

    def __init__(self, address: str, replica: str, **options: Any) -> None:
        Slab.manifest.__defaults__ = (SEGMENT,)
        self.client = Client(address, run=options.pop("run"), model="actor", replica=replica, **options)
        self.version = 0  # that it runs

    def publish(self, version: int, seed: int, hold_from: int | None = None) -> None:
        self.client.publish(version, tensors_of(seed))
        if hold_from is not None:
            hold_back(self.client, version, hold_from)

    def begin(self, step: int, **options: Any) -> int:
        return self.client.begin(step, **options)

    def unpublish(self, version: int) -> None:
        self.client.unpublish(version)

    def let_go(self, version: int) -> None:
        let_go(self.client, version)

    def follow(self, timeout_s: float) -> tuple[int, bool]:
        """Go to the version that this worker is to run: which it is, and whether its bytes are those of that seed."""
        version = self.client.target(self.version, timeout_s=timeout_s)
        fetched = self.client.fetch(version, serve=True, timeout_s=timeout_s)
        self.version = version
        return version, same_bytes(fetched.tensors(), tensors_of(version))

    def fork(self, until_written: str, *, keeps_sockets: bool = False) -> int:
        """Fork a child that outlives this process, until that FIFO is written to, and return its pid."""
        if keeps_sockets:
            process_lifetime._in_children.clear()
        child = os.fork()
        if not child:
            try:
                with open(until_written, "rb") as fifo:
                    fifo.read()
            finally:
                os._exit(0)
        return child

    def direct(self, what: str, *version: int) -> None:
        getattr(self.client, what)(*version)

    def forget_directive(self) -> None:
        """Behave as a worker that never keeps what operators decide."""
        self.client._hub._machine.directive = NO_DIRECTIVE

    def fetch(self, layouts: tuple[str, ...], timeout_s: float) -> str | None:
        """Fetch a version, and return which layout this worker is to convert to."""
        return self.client.fetch(layouts=layouts, timeout_s=timeout_s).converts


class Borrower(Worker):
    """A worker that keeps what it has fetched, as an engine does that has not installed it yet."""

    def publish_runtime(self, version: int, hold_from: int | None = None) -> None:
        self.client.publish(version, tensors_of(version), RUNTIME)
        if hold_from is not None:
            hold_back(self.client, version, hold_from, RUNTIME)

    def borrow(self, version: int) -> str:
        self.fetched = self.client.fetch(version, (RUNTIME,), serve=True, borrow=True, timeout_s=30)
        return self.fetched.slab.kind

    def is_right(self, version: int) -> bool:
        return same_bytes(self.fetched.tensors(), tensors_of(version))


class Hub:
    def __init__(self, address: str, grace_s: float) -> None:
        self.server = start_server(address, limits=HubLimits(grace_s=grace_s))

    def address(self) -> str:
        return self.server.address


class HubOfFewFiles(Hub):
    """A hub that may have so many files more than it has at its start."""

    def __init__(self, files: int) -> None:
        most = files + len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        super().__init__("tcp://127.0.0.1:0", 0.0)


class Router:
    """ZeroMQ's end of a hub, with so many messages of a connection in its queue, beyond which it does not read."""

    def __init__(self, queue_max: int) -> None:
        self._socket = zmq.Context().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.RCVHWM, queue_max)
        self._port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        Thread(target=self._receive, name="router").start()

    def address(self) -> str:
        return f"tcp://127.0.0.1:{self._port}"

    def _receive(self) -> None:
        while True:
            self._socket.recv()


class Dealer:
    """A worker's socket at a hub without a secret, whose owner has no time to read. queue_max: None: as a worker's."""

    def __init__(self, port: int, queue_max: int | None) -> None:
        self._socket = connection._dealer(zmq.Context(), b"s" * 16, None)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 200)
        if queue_max is not None:
            self._socket.setsockopt(zmq.RCVHWM, queue_max)
        self._socket.connect(f"tcp://127.0.0.1:{port}")


class Process(Another):
    """A `kind(*arguments)` in another process; `call` its methods. Its errors are RuntimeErrors that name them."""

    def __init__(self, kind: type, *arguments: Any, **options: Any) -> None:
        super().__init__(forkserver(), _serve, kind, arguments, options)
        self._answer()

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        return self.ask(method, arguments, options)


def _serve(pipe: Connection, kind: type, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    def tried(call: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        try:
            return call(*arguments, **options)
        except Exception as error:
            raise RuntimeError(f"{type(error).__name__}: {error}") from None

    try:
        subject = tried(kind, arguments, options)
    except RuntimeError as error:
        pipe.send(error)
        return
    pipe.send(None)
    answering(pipe, lambda method, arguments, options: tried(getattr(subject, method), arguments, options))
    os._exit(0)  # the parent is gone
