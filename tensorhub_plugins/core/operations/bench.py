"""`tensorhub bench`: how fast the store reads from another host, beside one bare TCP stream from there.

`tensorhub bench --serve` on that host is a hub, a worker that has published, and a port that sends bytes. `tensorhub
bench HOST` reads the version as a rollout does, with digests and by the transport that the two find, and the same
number of bytes by the stream, in turns, each into memory that was touched before. The port and the token of the stream
come through the store: without the secret no byte of either is to be had.
"""

from __future__ import annotations

import json
import secrets
import socket
import statistics
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import torch

from tensorhub_plugins.core import transports
from tensorhub_plugins.core.client.client import Client
from tensorhub_plugins.core.deadline import Deadline
from tensorhub_plugins.core.errors import DeadlineExceeded, HubUnreachable, NotPublished, TensorHubError, UsageError
from tensorhub_plugins.core.hub.limits import HubLimits
from tensorhub_plugins.core.hub.server import Server
from tensorhub_plugins.core.machine import Room
from tensorhub_plugins.core.operations.machine import BENCH_PORT, answer_peers, server_at
from tensorhub_plugins.core.operations.status import fetch_status
from tensorhub_plugins.core.protocol import advertised
from tensorhub_plugins.core.protocol.address import (
    ELSEWHERE,
    addresses_towards,
    connected,
    host_and_port,
    new_session,
    parse_address,
)
from tensorhub_plugins.core.protocol.reach import format_address, is_of_one_host
from tensorhub_plugins.core.security.keys import Keys
from tensorhub_plugins.core.transfer.report import ReplicateReport
from tensorhub_plugins.core.types import HOSTS_MAX

RUN, SERVED, ABOUT, ABOUT_BYTES = "tensorhub-bench", "served", "about", 256
BLOCK_BYTES = 8 << 20  # of one tensor: over a slow link fewer of them are read
SIZE_MB, SIZE_MB_MAX, MB = 256, 65_536, 1e6
CONNECT_S = 10.0
SAY_S = 5.0  # for a reader of the stream to say what it wants
STALL_S = 60.0  # for it to take more
SHARE = 0.25
FASTER = ("shm", "rdma")  # than tcp


class Result(NamedTuple):
    """What was measured: seconds of each round. taken: transport -> bytes. not_taken: faster transports -> why."""

    size_bytes: int
    bare_s: list[float]
    store_s: list[float]
    taken: dict[str, int]
    not_taken: dict[str, str]
    notes: list[str]

    @property
    def ratio(self) -> float:
        """Return how many times as fast as the bare stream the store was, by the medians."""
        return statistics.median(self.bare_s) / statistics.median(self.store_s)


def text(result: Result, host: str) -> str:
    """Return the result for people."""
    megabytes = result.size_bytes / MB
    lines = [f"{megabytes:.1f} MB from {host}, {len(result.bare_s)} rounds in turns, medians", *result.notes]
    for name, seconds in (("one bare tcp stream", result.bare_s), ("the store, verified", result.store_s)):
        median, least, most = statistics.median(seconds), min(seconds), max(seconds)
        lines.append(f"{name}: {median:.4f} s ({least:.4f} to {most:.4f}), {megabytes / median:.0f} MB/s")
    by_round = ", ".join(f"{bare / store:.2f}" for bare, store in zip(result.bare_s, result.store_s, strict=True))
    lines.append(f"the store is {result.ratio:.2f} times as fast as the stream (by round: {by_round})")
    lines.append("it was read over " + ", ".join(f"{name}: {size / MB:.1f} MB" for name, size in result.taken.items()))
    return "\n".join([*lines, *(f"not over {name}, which is faster: {why}" for name, why in result.not_taken.items())])


# --- the host that is read from ---


@contextmanager
def served(address: str, keys: Keys | None, size_mb: int = SIZE_MB, *, insecure: bool = False) -> Iterator[str]:
    """Serve what other hosts measure within the block, and yield where the hub listens."""
    if not 1 <= size_mb <= SIZE_MB_MAX:
        raise UsageError(f"{size_mb} MB: from 1 to {SIZE_MB_MAX} can be served")
    Room().take(2 * size_mb * int(MB))  # what is published is a copy
    blocks = torch.randint(-128, 128, (-(-size_mb * int(MB) // BLOCK_BYTES), BLOCK_BYTES), dtype=torch.int8)
    token = secrets.token_hex(16)
    with ExitStack() as stack:
        hub = stack.enter_context(Server(address, keys=keys, insecure=insecure, limits=HubLimits(grace_s=0.0)))
        bare = stack.enter_context(server_at(advertised.Advertised("", advertised.ports_of())))
        host, port = parse_address(hub.address, "tcp")
        own = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        told = None if own == host else ",".join(_all_addresses()) or None
        about = json.dumps({"port": bare.getsockname()[1], "token": token, "blocks": len(blocks)}).encode()
        client = Client(
            format_address("tcp", own, port), run=RUN, model=RUN, replica=SERVED, keys=keys, advertise_host=told
        )
        stack.enter_context(client)
        client.publish(1, {ABOUT: torch.tensor(list(about.ljust(ABOUT_BYTES)), dtype=torch.uint8), **_named(blocks)})
        threading.Thread(target=_send_all, args=(bare, blocks, token), daemon=True).start()
        stack.callback(bare.shutdown, socket.SHUT_RDWR)  # it ends the thread
        yield hub.address


def _all_addresses() -> list[str]:
    """Return those of this host at which another one may reach it, that of the default route first."""
    found = list[str]()
    with suppress(TensorHubError):
        found = addresses_towards(format_address("tcp", ELSEWHERE, BENCH_PORT), Deadline.after(CONNECT_S))
    with suppress(TensorHubError, OSError):
        found += advertised.addresses_of(",".join(name for _, name in socket.if_nameindex()))
    others = [each for each in dict.fromkeys(found) if not is_of_one_host(format_address("tcp", each, BENCH_PORT))]
    return others[:HOSTS_MAX]


def _named(blocks: torch.Tensor | Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"block.{number}": block for number, block in enumerate(blocks)}


def _send_all(server: socket.socket, blocks: torch.Tensor, token: str) -> None:
    """Send as many blocks as each asks for that knows the token, one after the other, until the socket is shut down."""
    memory: Any = memoryview(blocks.view(-1).numpy().data).cast("B")

    def answer(link: socket.socket, _peer: str, asked: Any) -> None:
        if secrets.compare_digest(str(asked["token"]).encode(), token.encode()):
            link.settimeout(STALL_S)
            link.sendall(memory[: max(0, int(asked["blocks"])) * BLOCK_BYTES])

    with suppress(OSError):
        answer_peers(server, answer, timeout_s=SAY_S)


# --- the host that reads ---


def measure(host: str, keys: Keys | None, *, rounds: int = 5, timeout_s: float = 60.0, share: float = SHARE) -> Result:
    """Measure against `tensorhub bench --serve` at HOST, or HOST:PORT. It ends in about timeout_s; what takes longer is
    read in smaller pieces, or fewer rounds, and the result says so. share: of its part of the time one read is to take,
    by what the first block took. Raise TensorHubError with what to do."""
    deadline, (name, port) = Deadline.after(timeout_s), host_and_port(host, BENCH_PORT)
    address, notes = format_address("tcp", name, port), list[str]()
    with _joined(address, keys, f"start `tensorhub bench --serve` there, and open its port {port}", deadline) as (
        client,
        about,
    ):
        models = fetch_status(address, timeout_s=min(CONNECT_S, deadline.remaining()), keys=keys)["models"]
        workers = [each for model in models for each in model["workers"]]
        stream = _Stream(name, about)
        first_s = stream.read(1, deadline)
        count = max(1, min(stream.blocks, int(share * deadline.remaining() / (2 * rounds) / first_s)))
        if count < stream.blocks:
            notes.append(f"of {stream.blocks * BLOCK_BYTES / MB:.0f} MB there so many as the time is for: --timeout")
        Room().take(2 * count * BLOCK_BYTES)  # of the stream and of the store
        reports, bare_s, store_s = list[ReplicateReport](), list[float](), list[float]()
        for number in range(-1, rounds):  # the first one warms up
            if number > 0 and deadline.remaining() < bare_s[-1] + store_s[-1]:
                notes.append(f"the time was over after {number} of {rounds} rounds: --timeout")
                break
            bare = stream.read(count, deadline)
            target = _named([torch.ones(BLOCK_BYTES, dtype=torch.int8) for _ in range(count)])
            began = time.monotonic()
            reports.append(client.replicate(target, 1, timeout_s=deadline.remaining(), serve=False))
            if number >= 0:
                bare_s, store_s = [*bare_s, bare], [*store_s, time.monotonic() - began]
        slower = client._hub.unreached.slower()
    there: dict[str, str] = next((each["endpoints"] for each in workers if each["worker"] == f"{SERVED}/0"), {})
    taken = dict(reports[-1].transports)
    return Result(count * BLOCK_BYTES, bare_s, store_s, taken, _not_taken(taken, there, slower), notes)


@contextmanager
def _joined(
    address: str, keys: Keys | None, remedy: str, deadline: Deadline
) -> Iterator[tuple[Client, dict[str, Any]]]:
    """Be a reader of that host within the block. Yield it, and what the host has published of itself."""
    left_s, reader = min(CONNECT_S, deadline.remaining()), f"reader-{new_session().hex()[:8]}"
    try:
        client = Client(address, run=RUN, model=RUN, replica=reader, keys=keys, connect_timeout_s=left_s)
    except HubUnreachable as error:
        if isinstance(error.__cause__, OSError):  # of the look-up of its name
            raise
        raise HubUnreachable(f"nothing answers at {address}: {remedy}", phase="connect") from error
    with client:
        told = torch.zeros(ABOUT_BYTES, dtype=torch.uint8)
        try:
            client.replicate({ABOUT: told}, 1, timeout_s=min(CONNECT_S, deadline.remaining()), serve=False)
        except NotPublished as error:
            raise UsageError(f"at {address} is the hub of a run, which is not measured: {remedy}") from error
        yield client, json.loads(bytes(told.tolist()))


def _not_taken(taken: Iterable[str], there: dict[str, str], slower: str) -> dict[str, str]:
    """Return why each transport that is faster than those taken was not. there: endpoints of the source."""
    why = dict[str, str]()
    for name in FASTER[: min(FASTER.index(each) if each in FASTER else len(FASTER) for each in taken)]:
        reason = transports.unavailable(name)
        if reason is not None:
            why[name] = f"here {reason}"
        elif name not in there:
            why[name] = "the other host does not serve it (`tensorhub doctor machine` there)"
        else:
            why[name] = slower or "the two are not on one host"
    return why


class _Stream:
    """The bare stream of a host."""

    def __init__(self, host: str, about: dict[str, Any]) -> None:
        self._host, self._port, self._token = host, int(about["port"]), str(about["token"])
        self.blocks = int(about["blocks"])
        self._memory = memoryview(bytearray())

    def read(self, blocks: int, deadline: Deadline) -> float:
        """Read so many blocks; return the seconds from the request to the last byte."""
        size_bytes, come = blocks * BLOCK_BYTES, 0
        if len(self._memory) != size_bytes:
            self._memory = memoryview(bytearray(b"\1") * size_bytes)
        at = format_address("tcp", self._host, self._port)
        try:
            with connected(self._host, self._port, Deadline.after(min(CONNECT_S, deadline.remaining()))) as link:
                began = time.monotonic()
                link.settimeout(max(0.001, deadline.remaining()))
                link.sendall(json.dumps({"token": self._token, "blocks": blocks}).encode() + b"\n")
                while come < size_bytes and (got := link.recv_into(self._memory[come:])):
                    come += got
                    link.settimeout(max(0.001, deadline.remaining()))
        except TimeoutError as error:
            what = f"{come} of {size_bytes} bytes had come" if come else "it does not answer"
            where = f"open that port there, or say by {advertised.PORTS_VARIABLE} which ones are open"
            raise DeadlineExceeded(f"the bare stream from {at}: {what}; {where}", phase="stream") from error
        except OSError as error:
            raise UsageError(f"the bare stream from {at}: {error}; open that port there") from error
        if come < size_bytes:
            raise UsageError(f"the bare stream from {at} ended after {come} of {size_bytes} bytes")
        return time.monotonic() - began
