"""What the cases ask other processes to do, and what all of them need. `kept` is what a process keeps."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import os
import resource
import struct
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transport_suite import SimpleShelf
from transport_suite.material import read_equal

from tensorhub_plugins.core import Client
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.memory.tensors import spec_of
from tensorhub_plugins.core.transfer.limits import TransferLimits
from tensorhub_plugins.core.transports import Offer
from tensorhub_plugins.core.transports import create as create_transport
from tensorhub_plugins.core.transports.rdma.transport import RdmaTransport
from tensorhub_plugins.core.types import ShardKey

SIZE_BYTES = 16 << 20
SEGMENT_SIZE_BYTES = 256 << 10  # 64 of them: more than are in flight at once, and progress even in a guest that crawls
FAR_S = PATIENCE_S = 60.0
CONNECT_S = 120.0  # the other host may still be importing torch
CAPABILITY_VERSION_3, CAP_IPC_LOCK = 0x20080522, 14  # linux/capability.h

kept: dict[str, Any] = {}
KEY = ShardKey(1, "checkpoint")


def make_client(address: str, replica: str, transports: tuple[str, ...], **limits: int) -> Client:
    named = {"run": "vm", "model": "m", "replica": replica, "transports": transports}
    return Client(address, **named, connect_timeout_s=CONNECT_S, limits=TransferLimits(**limits))


def serve_alone(name: str, memlock_size_bytes: int | None = None) -> tuple[str, int]:
    """A source without a hub."""
    if memlock_size_bytes is not None:
        _limit_locked_memory(memlock_size_bytes)
    transport = create_transport(name)
    offer = make_offer()
    kept["alone"] = transport, offer
    endpoint = transport.serve(SimpleShelf(offer))
    return endpoint, offer.manifest.size_bytes


def publish(
    address: str,
    replica: str,
    version: int,
    transports: tuple[str, ...],
    memlock_size_bytes: int | None = None,
    claimed_address: str | None = None,
) -> None:
    if memlock_size_bytes is not None:
        _limit_locked_memory(memlock_size_bytes)
    client = kept["client"] = make_client(address, replica, transports)
    if claimed_address is not None:
        nic = client._transports["rdma"].nics[0]
        mapped = "0000:0000:0000:0000:0000:ffff:{:02x}{:02x}:{:02x}{:02x}"
        nic.port = replaced(nic.port, gid=mapped.format(*map(int, claimed_address.split("."))))
    client.publish(version, {"a": tensor_of(version)})


def join(address: str, replica: str, transports: tuple[str, ...], memlock_size_bytes: int | None = None) -> None:
    if memlock_size_bytes is not None:
        _limit_locked_memory(memlock_size_bytes)
    kept["client"] = make_client(address, replica, transports)


def join_with(address: str, replica: str, transports: tuple[str, ...], limits: dict[str, int]) -> None:
    """limits: of `TransferLimits`."""
    kept["client"] = make_client(address, replica, transports, **limits)


def replicate(version: int, serve: bool) -> dict[str, Any]:
    target = kept["target"] = make_blank()
    report = kept["client"].replicate(target, version, timeout_s=PATIENCE_S, serve=serve)
    assert torch.equal(target["a"], tensor_of(version)), "other bytes arrived"
    return {"transports": report.transports, "sources": report.sources, "losses": report.losses}


def replicate_fails(version: int) -> tuple[str, str, float]:
    began = time.monotonic()
    try:
        replicate(version, False)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "nothing", "it succeeded", time.monotonic() - began


def retain_nothing() -> None:
    kept["client"].retain(0)


def unpublish(version: int, timeout_s: float) -> tuple[float, tuple[str, ...]]:
    report = kept["client"].unpublish(version, timeout_s=timeout_s)
    return report.seconds, report.cut_off


def hold_back(version: int, start: int) -> None:
    """From now on only the first `start` segments are served, as if the others still arrived."""
    offer = kept["client"].find(ShardKey(version, "checkpoint"))
    with offer._changed:
        offer._ready[start:] = bytes(len(offer._ready) - start)


def serve_all(version: int) -> None:
    kept["client"].find(ShardKey(version, "checkpoint")).mark_all_ready()


def readers_of(version: int) -> int:
    offer = kept["client"].find(ShardKey(version, "checkpoint"))
    return 0 if offer is None else offer.active_readers


def _limit_locked_memory(size_bytes: int) -> None:
    """Before there are threads, since capabilities are a thread's: root without CAP_IPC_LOCK is an ordinary user."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (size_bytes, size_bytes))
    libc = ctypes.CDLL(None, use_errno=True)
    head, sets = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(head, sets) == 0, os.strerror(ctypes.get_errno())
    for word in (0, 1):  # effective, permitted
        sets[word] &= ~(1 << CAP_IPC_LOCK)
    assert libc.capset(head, sets) == 0, os.strerror(ctypes.get_errno())


# --- small things ---


@functools.cache
def tensor_of(seed: int) -> torch.Tensor:
    words = torch.arange(SIZE_BYTES // 8, dtype=torch.int64) * 2654435761 + seed
    return words.view(torch.uint8)


def make_blank() -> dict[str, torch.Tensor]:
    return {"a": torch.zeros(SIZE_BYTES, dtype=torch.uint8)}


def make_offer() -> Offer:
    tensor = tensor_of(1)
    slab = Slab.allocate([spec_of("a", tensor)])
    slab.write("a", tensor)
    offer = Offer(KEY, slab.manifest(SEGMENT_SIZE_BYTES), slab)
    offer.mark_all_ready()
    return offer


@contextlib.contextmanager
def pair_of_transports(**options: Any) -> Iterator[tuple[RdmaTransport, Offer, RdmaTransport]]:
    offer = make_offer()
    with (
        contextlib.closing(RdmaTransport(**options)) as source,
        contextlib.closing(RdmaTransport(**options)) as reader,
    ):
        yield source, offer, reader
        offer.withdraw()


def read_it(reader: RdmaTransport, endpoint: str) -> None:
    with contextlib.closing(reader.connect(endpoint, deadline=far())) as link:
        manifest = link.open(KEY, 1, deadline=far())
        target = make_blank()
        got = list(read_equal(link, range(manifest.segment_count), Slab.adopt(target), deadline=far()))
        assert len(got) == manifest.segment_count and torch.equal(target["a"], tensor_of(1))
        assert link.check(deadline=far())


def replaced(struct_: Any, **changes: Any) -> Any:
    import msgspec

    return msgspec.structs.replace(struct_, **changes)


def unread(link: Any) -> int:
    """Bytes of the conversation that have arrived and wait to be read."""
    counted = fcntl.ioctl(link._channels[0].sock, termios.FIONREAD, struct.pack("i", 0))
    return int(struct.unpack("i", counted)[0])


def far() -> float:
    return time.monotonic() + FAR_S


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen: {what}"
        time.sleep(0.02)


def count_tcp_bytes(interface: str = "lo") -> int:
    """What the interface has sent: soft-RoCE talks to itself without it."""
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


def interface_of(device: str) -> str:
    return Path(f"/sys/class/infiniband/{device}/parent").read_text().strip()


def count_packets(device: str) -> int:
    counters = Path(f"/sys/class/infiniband/{device}/ports/1/hw_counters")
    return int((counters / "rcvd_pkts").read_text())


Slab.manifest.__defaults__ = (SEGMENT_SIZE_BYTES,)  # the clients' too
