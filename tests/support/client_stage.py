"""A stage for tests of the client: clients of one run over real sockets, some of them in processes of their own.

What happens "in the middle" of a transfer is counted, not timed: a source serves its first few segments only, as if the
rest were still on its way to it (`hold_back`), and `progress` counts what its readers have verified.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from client_processes import RUNTIME as RUNTIME
from client_processes import SEGMENT, Hub, Process, Worker

from tensorhub_plugins.core import CHECKPOINT, Client, Location, Server, Slab, start_server
from tensorhub_plugins.core.cli import fetch_status
from tensorhub_plugins.core.client import calls
from tensorhub_plugins.core.client.destinations import Destinations
from tensorhub_plugins.core.hub.limits import HubLimits

NEAR, FAR = Location("dc", "rack", "here"), Location("dc", "other rack", "there")
HELD = 6  # segments that a source held back serves
FIRST_HUB = HubLimits(grace_s=0.0)  # no worker of an earlier one will report, so no answer waits for that
LATE_S = 5.0  # beyond a deadline, on a busy machine
SOON_S = 30.0  # for what happens at once unless something is broken


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slab.manifest, "__defaults__", (SEGMENT,))


@pytest.fixture(scope="module")
def module_hub() -> Iterator[Server]:
    with start_server(limits=HubLimits(grace_s=0.2, heartbeat_s=0.1)) as server:
        yield server


class Stage:
    """The clients of one run, and threads for what blocks."""

    def __init__(self, address: str, run: str) -> None:
        self.address, self.run = address, run
        self.threads = ThreadPoolExecutor(8)
        self.open: list[Client | Process] = []

    def client(self, replica: str, **options: Any) -> Client:
        options = {"transports": ("tcp",), "location": NEAR, **options}
        client = Client(self.address, run=self.run, model="actor", replica=replica, **options)
        self.open.append(client)
        return client

    def worker(self, replica: str, **options: Any) -> Process:
        options = {"transports": ("tcp",), "location": NEAR, **options}
        worker = Process(Worker, self.address, replica, run=self.run, **options)
        self.open.append(worker)
        return worker

    def hub(self, address: str, grace_s: float = 0.3) -> Process:
        hub = Process(Hub, address, grace_s)
        self.open.append(hub)
        return hub

    def begin(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Future[Any]:
        return self.threads.submit(call, *arguments, **options)

    def close(self) -> None:
        while self.open:
            self.open.pop().close()
        self.threads.shutdown()


@pytest.fixture
def stage(small_segments: None, module_hub: Server, request: pytest.FixtureRequest) -> Iterator[Stage]:
    stage = Stage(module_hub.address, request.node.name[:200])
    yield stage
    stage.close()


class Progress:
    """A record of what the readers in this process have verified, in order."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.verified: list[tuple[str, int, int]] = []  # replica, shard, segment

    def of(self, replica: str) -> list[int]:
        return [segment for name, _, segment in self.verified if name == replica]

    def wait(self, replica: str, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.of(replica)) >= count, SOON_S), self.verified


@pytest.fixture
def progress(monkeypatch: pytest.MonkeyPatch) -> Progress:
    progress, verified = Progress(), Destinations.verified

    def count(self, shard: int, segment: int) -> None:
        verified(self, shard, segment)
        with progress.changed:
            progress.verified.append((self.worker.partition("/")[0], shard, segment))
            progress.changed.notify_all()

    monkeypatch.setattr(Destinations, "verified", count)
    return progress


def until(condition: Callable[[], Any]) -> Any:
    """Poll for what another thread or process does; the value."""
    deadline = time.monotonic() + SOON_S
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)
    return value


def holders(client: Client, version: int, layout: str = CHECKPOINT) -> tuple[str, ...]:
    return next((info.layouts.get(layout, ()) for info in client.versions() if info.version == version), ())


def leases(stage: Stage) -> list[dict[str, Any]]:
    return next(x for x in fetch_status(stage.address)["models"] if x["run"] == stage.run)["leases"]


def _threads() -> list[str]:
    """Return the names of the threads. Of those that carry calls out only the busy ones count: how many wait for the
    next call depends on how fast the last one's caller was. One that has answered gets a moment to begin to wait."""
    deadline = time.monotonic() + 1
    while True:
        names = sorted(thread.name for thread in threading.enumerate())
        busy = names.count("tensorhub-call") - calls._threads._idle
        if busy <= 0 or time.monotonic() > deadline:
            return [name for name in names if name != "tensorhub-call"] + ["tensorhub-call"] * busy
        time.sleep(0.001)


def what_is_there() -> tuple[list[str], list[str], list[str]]:
    descriptors = []
    for name in os.listdir("/proc/self/fd"):
        try:
            descriptors.append(os.readlink(f"/proc/self/fd/{name}").split(":")[0])
        except FileNotFoundError:
            continue
    read_now = ("/proc/", "/sys/fs/cgroup/")  # by a heartbeat's thread, which says how much memory is free
    descriptors = [path for path in descriptors if not path.startswith(read_now)]
    ours = ("tensorhub", str(os.getpid()))  # libraries put their process' number into the name; others run here too
    shared = [name for name in os.listdir("/dev/shm") if any(word in name for word in ours)]
    return _threads(), sorted(descriptors), sorted(shared)


@pytest.fixture
def address() -> Iterator[str]:
    """Start a hub, before which there was none, and yield its address."""
    with start_server(limits=FIRST_HUB) as server:
        yield server.address


def client(address: str, replica: str, shard: int = 0, shard_count: int = 1, **options: Any) -> Client:
    """Make a client at that hub: one shard of this replica."""
    return Client(address, run="r", model="actor", replica=replica, shard=shard, shard_count=shard_count, **options)
