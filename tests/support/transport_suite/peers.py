"""The other ends of the conformance suite: shelves, sources, readers and impostors, in this process or another."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
from processes import Another, answering, forkserver

from tensorhub_plugins.core.errors import SourceLost
from tensorhub_plugins.core.manifest import Manifest
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.memory.tensors import spec_of
from tensorhub_plugins.core.protocol.address import parse_address
from tensorhub_plugins.core.protocol.reach import format_address
from tensorhub_plugins.core.transports import Link, Offer, Transport
from tensorhub_plugins.core.types import ShardKey
from transport_suite.material import FAR_S, SEGMENT_SIZE_BYTES, far, make_tensor, read_equal

MakeTransport = Callable[[], Transport]
Adopt = Callable[[dict[str, torch.Tensor]], Slab]


class SimpleShelf:
    """A shelf of offers by shard, in a dictionary. The client has its own; this one is for tests and examples."""

    def __init__(self, *offers: Offer) -> None:
        self._offers = {offer.key: offer for offer in offers}
        self._changed = threading.Condition()
        self._expected: set[ShardKey] = set()
        self.waiting = 0  # threads that wait in `await_offer`

    def put(self, offer: Offer) -> Offer:
        """Offer this from now on; returns it."""
        with self._changed:
            self._offers[offer.key] = offer
            self._expected.discard(offer.key)
            self._changed.notify_all()
        return offer

    def announce(self, key: ShardKey) -> None:
        """Announce that an offer of this shard is about to be `put`."""
        self._expected.add(key)

    def find(self, key: ShardKey) -> Offer | None:
        offer = self._offers.get(key)
        return None if offer is None or offer.withdrawn else offer

    def await_offer(self, key: ShardKey, as_of: int, deadline: float) -> Offer | None:
        with self._changed:
            self.waiting += 1
            self._changed.wait_for(lambda: key not in self._expected, deadline - time.monotonic())
            self.waiting -= 1
            return self.find(key)


@dataclass(frozen=True)
class Address:
    """A stream socket behind an endpoint. fresh: where an impostor may listen."""

    family: socket.AddressFamily
    name: Any
    fresh: Any
    endpoint: Callable[[Any], str]


def address_of(endpoint: str) -> Address:
    """Return where a plain connection reaches this endpoint."""
    scheme, _, rest = endpoint.partition("://")
    if scheme in ("tcp", "tls", "rdma"):
        host, port = parse_address(endpoint, scheme)
        return Address(socket.AF_INET, (host, port), (host, 0), lambda name: format_address(scheme, *name))
    fresh = f"\0conformance-{os.getpid()}-{time.monotonic_ns()}"
    return Address(socket.AF_UNIX, "\0" + rest, fresh, lambda name: f"{scheme}://" + bytes(name[1:]).decode())


class Source:
    """A serving transport of this process and its offers."""

    def __init__(self, transport: Transport, slabs: str, adopt: Adopt = Slab.adopt) -> None:
        self.transport = transport
        self.slabs = slabs
        self._adopt = adopt
        self.shelf = SimpleShelf()
        self.endpoint = transport.serve(self.shelf)
        self.offers: list[Offer] = []

    def offer(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        key: ShardKey | None = None,
        version: int = 1,
        kind: str | None = None,
        ready: bool = True,
        segment_size_bytes: int = SEGMENT_SIZE_BYTES,
    ) -> Offer:
        """Offer these tensors; returns the offer."""
        if (kind or self.slabs) == "adopted":
            slab = self._adopt(dict(tensors))
        else:
            slab = Slab.allocate([spec_of(name, tensor) for name, tensor in tensors.items()])
            for name, tensor in tensors.items():
                slab.write(name, tensor)
        key = key or ShardKey(version, "checkpoint")
        offer = self.shelf.put(Offer(key, slab.manifest(segment_size_bytes), slab, epoch=len(self.offers)))
        self.offers.append(offer)
        if ready:
            offer.mark_all_ready()
        return offer


class Victim:
    """A reader in a thread of its own, which signals when it has more than `count` segments or can get no more."""

    def __init__(self, link: Link, manifest: Manifest, slab: Slab, count: int) -> None:
        self.reached = threading.Event()
        self.got: list[int] = []
        self.torn: list[int] = []
        self.thread = threading.Thread(target=self._run, args=(link, manifest, slab, count), daemon=True)
        self.thread.start()

    def _run(self, link: Link, manifest: Manifest, slab: Slab, count: int) -> None:
        try:
            for segment in read_equal(link, range(manifest.segment_count), slab, deadline=far()):
                self.got.append(segment)
                if link.digest(segment) != manifest.digest(segment):
                    self.torn.append(segment)
                if len(self.got) > count:
                    self.reached.set()
        except SourceLost:
            pass
        finally:
            self.reached.set()


class Peer(Another):
    """Another process that serves or reads as it is asked."""

    def __init__(self, method: str = "forkserver") -> None:
        """Start the process. method: a fork of a process with threads may hang; without threads it is quicker."""
        context: Any = forkserver() if method == "forkserver" else multiprocessing.get_context(method)
        super().__init__(context, _peer_main)


@dataclass
class Remote:
    """A source in another process, with the first half of its segments ready."""

    peer: Peer
    make: MakeTransport
    slabs: str
    adopt: Adopt
    key: ShardKey = field(default=ShardKey(7, "checkpoint"))
    endpoint: str = ""

    def __enter__(self) -> Remote:
        self.endpoint = self.peer.ask("serve", self.make, self.slabs, self.adopt, self.key)
        return self

    def __exit__(self, *_: object) -> None:
        if self.peer.alive():
            self.peer.ask("end")

    def open(self, reader: Transport) -> tuple[Link, Manifest, dict[str, torch.Tensor]]:
        link = reader.connect(self.endpoint, deadline=far())
        return link, link.open(self.key, 1, deadline=far()), remote_tensors()


def remote_tensors() -> dict[str, torch.Tensor]:
    """Return what a source in another process offers."""
    return {"a": make_tensor("uint8", (8 * SEGMENT_SIZE_BYTES,), seed=26)}


def open_at(reader: Transport, endpoint: str, key: ShardKey, deadline: float) -> None:
    """Connect and open: a frozen process' kernel may still accept the connection."""
    with contextlib.closing(reader.connect(endpoint, deadline=deadline)) as link:
        link.open(key, 1, deadline=deadline)


@contextlib.contextmanager
def impostor(listener: socket.socket, greeting: bytes | None) -> Iterator[None]:
    """Send each connection this and then nothing more (None: nothing at all; empty: disconnect it)."""
    done = threading.Event()

    def answer() -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(greeting or b"")
            if greeting != b"":
                done.wait(FAR_S)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _peer_main(pipe: Connection) -> None:
    """Serve or read as asked until the pipe closes."""
    transports: list[Transport] = []
    kept: list[object] = []

    def serve(make: MakeTransport, slabs: str, adopt: Adopt, key: ShardKey) -> str:
        source = Source(make(), slabs, adopt)
        kept.append(source)
        offer = source.offer(remote_tensors(), key=key, ready=False)
        for segment in range(offer.manifest.segment_count // 2):
            offer.mark_ready(segment)
        transports.append(source.transport)
        return source.endpoint

    def read(make: MakeTransport, endpoint: str, key: ShardKey, count: int) -> list[int]:
        reader = make()
        transports.append(reader)
        link = reader.connect(endpoint, deadline=far())
        manifest = link.open(key, 1, deadline=far())
        slab = Slab.allocate(manifest.tensors)
        reading = read_equal(link, range(manifest.segment_count), slab, deadline=far())
        kept.extend((link, reading, slab))  # and stay in the middle
        return [next(reading) for _ in range(count)]

    def end() -> None:
        for transport in transports:
            transport.close()
        transports.clear()
        kept.clear()

    known = {"serve": serve, "read": read, "end": end}
    answering(pipe, lambda what, *arguments: known[what](*arguments))
