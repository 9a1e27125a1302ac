"""The ways to move the tensors. Each has a source (rank 0) and readers; `run` ends when this process is done."""

from __future__ import annotations

import importlib.util
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from tensorhub_plugins.core import Client, Location, spec_of
from tensorhub_plugins.core.digests import Algorithm
from tensorhub_plugins.core.security import secret

IOV_MAX = 512
TIMEOUT_S = 60.0
WARM_UP = 2  # times that do not count: the store maps memory that it meets again, and others register theirs
KEYS = secret.generate()  # all processes are forked from the one that has made it
TIMES = WARM_UP + 3  # that every process moves the tensors


@dataclass
class Place:
    rank: int
    readers: int
    hub: str
    barrier: Any
    board: Any  # what ranks tell each other while they set up, where `needs_board`

    def tell(self, name: str, value: Any) -> None:
        self.board[name] = value

    def meet(self) -> None:
        self.barrier.wait(TIMEOUT_S)


@dataclass
class Method:
    place: Place
    tensors: list[torch.Tensor]
    notes: dict[str, Any] = field(default_factory=dict)
    needs_board: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self.set_up()

    @staticmethod
    def missing() -> str | None:
        return None

    def set_up(self) -> None: ...

    def prepare(self, round_: int) -> None:
        """Prepare before the clock starts."""

    def run(self, round_: int) -> None:
        raise NotImplementedError

    def close(self) -> None: ...


# --- the store ---


@dataclass
class Store(Method):
    """The store. transports, verify, digest: as for Client. live: the source's tensors lie in memory that it shares.
    secret: the run has one, so hub and sources admit only workers that prove it."""

    transports: tuple[str, ...] = ("shm", "tcp")
    verify: bool = True
    digest: Algorithm = "xxh3_128"
    live: bool = False
    secret: bool = False

    def set_up(self) -> None:
        name = f"rank-{self.place.rank}"
        where = Location(host="loopback")
        options: dict[str, Any] = {"transports": self.transports, "verify": self.verify, "digest": self.digest}
        options["keys"] = KEYS if self.secret else None
        self.client = Client(self.place.hub, run="bench", model="m", replica=name, location=where, **options)
        self.named = {f"t{index:05}": tensor for index, tensor in enumerate(self.tensors)}
        if self.place.rank == 0:
            self.client.retain(0)
            if self.live:
                self.slab = self.client.allocate([spec_of(name, tensor) for name, tensor in self.named.items()])
                self.named = self.slab.tensors()
                self.tensors = list(self.named.values())

    def prepare(self, round_: int) -> None:
        if round_ > 1:
            self.client.unpublish(round_ - 1)
        if self.place.rank == 0 and self.live:
            self.slab.mark_written()

    def run(self, round_: int) -> None:
        if self.place.rank:
            report = self.client.replicate(self.named, round_, timeout_s=TIMEOUT_S)
            self.notes = {"sources": report.sources, "transports": report.transports, "phases": report.seconds}
        elif self.live:
            self.client.publish(round_, self.slab)
        else:
            self.client.publish(round_, self.named, copy=False)

    def close(self) -> None:
        self.client.close()


# --- the bare means ---


@dataclass
class Stream(Method):
    """A plain TCP stream to each reader, one thread each, straight from and into the tensors.

    congestion: the congestion control; None is the system's, which on some paces its bytes even within a host."""

    congestion: str | None = None
    needs_board: ClassVar[bool] = True

    def set_up(self) -> None:
        if self.place.rank == 0:
            listener = socket.create_server(("127.0.0.1", 0))
            self.place.tell("port", listener.getsockname()[1])
            self.place.meet()
            self.socks = [listener.accept()[0] for _ in range(self.place.readers)]
        else:
            self.place.meet()
            self.socks = [socket.create_connection(("127.0.0.1", self.place.board["port"]))]
        for sock in self.socks:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.congestion is not None:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, self.congestion.encode())

    def run(self, round_: int) -> None:
        if self.place.rank:
            for batch in _batches(self.tensors):
                while batch:
                    count = self.socks[0].recvmsg_into(batch, 0, socket.MSG_WAITALL)[0]
                    batch = _rest(batch, count)
            return
        threads = [threading.Thread(target=self._send, args=(sock,)) for sock in self.socks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _send(self, sock: socket.socket) -> None:
        for batch in _batches(self.tensors):
            while batch:
                batch = _rest(batch, sock.sendmsg(batch))


def _batches(tensors: list[torch.Tensor], size_bytes: int = 4 << 20) -> Iterator[list[memoryview]]:
    """Yield all bytes in batches of about this size; one call for each large tensor would be a weaker stream."""
    batch: list[memoryview] = []
    room = size_bytes
    for tensor in tensors:
        view = memoryview(tensor.view(torch.uint8).view(-1).numpy())
        while len(view):
            part, view = view[:room], view[room:]
            batch.append(part)
            room -= len(part)
            if not room or len(batch) == IOV_MAX:
                yield batch
                batch, room = [], size_bytes
    if batch:
        yield batch


def _rest(batch: list[memoryview], count: int) -> list[memoryview]:
    if not count:
        raise ConnectionError("the stream ended early")
    done = 0
    while done < len(batch) and count >= len(batch[done]):
        count -= len(batch[done])
        done += 1
    left = batch[done:]
    if left and count:
        left[0] = left[0][count:]
    return left


# --- peers ---


@dataclass
class Gloo(Method):
    """torch.distributed's broadcast, tensor by tensor or through buckets."""

    bucket_bytes: int = 0
    needs_board: ClassVar[bool] = True

    def set_up(self) -> None:
        import torch.distributed as dist

        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if self.place.rank == 0:
            with socket.create_server(("127.0.0.1", 0)) as probe:
                self.place.tell("port", probe.getsockname()[1])
        self.place.meet()
        where = f"tcp://127.0.0.1:{self.place.board['port']}"
        dist.init_process_group("gloo", init_method=where, rank=self.place.rank, world_size=self.place.readers + 1)
        self.dist = dist
        self.buckets: list[list[torch.Tensor]] = [[]]
        for tensor in self.tensors:
            if self.buckets[-1] and sum(2 * t.numel() for t in self.buckets[-1]) >= self.bucket_bytes:
                self.buckets.append([])
            self.buckets[-1].append(tensor)
        self.buffer = torch.zeros(max(sum(2 * t.numel() for t in b) for b in self.buckets), dtype=torch.uint8)

    def run(self, round_: int) -> None:
        if not self.bucket_bytes:
            for tensor in self.tensors:
                self.dist.broadcast(tensor, 0)
            return
        for bucket in self.buckets:
            views, at = [], 0
            for tensor in bucket:
                flat = tensor.view(torch.uint8).view(-1)
                views.append((self.buffer[at : at + flat.numel()], flat))
                at += flat.numel()
            if self.place.rank == 0:
                for part, flat in views:
                    part.copy_(flat)
            self.dist.broadcast(self.buffer[:at], 0)
            if self.place.rank:
                for part, flat in views:
                    flat.copy_(part)


@dataclass
class Safetensors(Method):
    """A file in shared memory: save_file, load_file, copy."""

    needs_board: ClassVar[bool] = True

    @staticmethod
    def missing() -> str | None:
        return None if importlib.util.find_spec("safetensors") else "pip install safetensors"

    def set_up(self) -> None:
        if self.place.rank == 0:
            self.place.tell("path", f"/dev/shm/tensorhub-bench-{os.getpid()}.safetensors")
        self.place.meet()
        self.path = Path(self.place.board["path"])

    def run(self, round_: int) -> None:
        from safetensors.torch import load_file, save_file

        if self.place.rank == 0:
            save_file({str(index): tensor for index, tensor in enumerate(self.tensors)}, self.path)
            self.place.meet()
            return
        self.place.meet()
        loaded = load_file(self.path)
        for index, tensor in enumerate(self.tensors):
            tensor.copy_(loaded[str(index)])

    def close(self) -> None:
        if self.place.rank == 0:
            self.path.unlink(missing_ok=True)


@dataclass
class Nixl(Method):
    """NIXL's READ over UCX; `pip install nixl nixl-cu12 --no-deps` works without CUDA."""

    needs_board: ClassVar[bool] = True

    @staticmethod
    def missing() -> str | None:
        return None if importlib.util.find_spec("nixl") else "pip install --no-deps nixl nixl-cu12"

    def set_up(self) -> None:
        os.environ["NIXL_LOG_LEVEL"] = "ERROR"
        os.environ.update(UCX_TLS="tcp", UCX_TCP_TX_SEG_SIZE="256k", UCX_TCP_RX_SEG_SIZE="256k")
        from nixl._api import nixl_agent, nixl_agent_config

        agent = nixl_agent(f"n{self.place.rank}", nixl_agent_config(enable_prog_thread=True, backends=["UCX"]))
        self.agent, self.registered = agent, agent.register_memory(self.tensors)
        mine = agent.get_xfer_descs(self.tensors)
        if self.place.rank == 0:
            self.place.tell("source", (agent.get_agent_metadata(), agent.get_serialized_descs(mine)))
        self.place.meet()
        if self.place.rank:
            metadata, theirs = self.place.board["source"]
            peer = agent.add_remote_agent(metadata)
            peer = peer.decode() if isinstance(peer, bytes) else peer
            self.handle = agent.initialize_xfer("READ", mine, agent.deserialize_descs(theirs), peer)

    def run(self, round_: int) -> None:
        import time

        if self.place.rank == 0:
            return
        state = self.agent.transfer(self.handle)
        while state != "DONE":
            if "ERR" in state:
                raise RuntimeError(f"nixl: {state}")
            time.sleep(0.0002)
            state = self.agent.check_xfer_state(self.handle)


@dataclass
class Mooncake(Method):
    """Mooncake's transfer engine over tcp; `pip install mooncake-transfer-engine-non-cuda`."""

    needs_board: ClassVar[bool] = True

    @staticmethod
    def missing() -> str | None:
        found = importlib.util.find_spec("mooncake")
        return None if found else "pip install mooncake-transfer-engine-non-cuda"

    def set_up(self) -> None:
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        os.environ.setdefault("MC_TCP_ENABLE_CONNECTION_POOL", "1")
        from mooncake.engine import TransferEngine

        self.engine = TransferEngine()
        if self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError("mooncake does not start")
        self.at = [tensor.data_ptr() for tensor in self.tensors]
        self.sizes = [2 * tensor.numel() for tensor in self.tensors]
        if self.engine.batch_register_memory(self.at, self.sizes):
            raise RuntimeError("mooncake does not register the memory")
        if self.place.rank == 0:
            self.place.tell("source", (f"127.0.0.1:{self.engine.get_rpc_port()}", self.at))
        self.place.meet()
        self.peer, self.there = self.place.board["source"]

    def run(self, round_: int) -> None:
        if self.place.rank:
            for i in range(0, len(self.at), 512):  # a batch of 5,000 is refused
                part = slice(i, i + 512)
                if self.engine.batch_transfer_sync_read(self.peer, self.at[part], self.there[part], self.sizes[part]):
                    raise RuntimeError("mooncake: the read failed")


@dataclass
class Ray(Method):
    """Ray's object store: put of the dict, get, copy."""

    needs_board: ClassVar[bool] = True

    @staticmethod
    def missing() -> str | None:
        return None if importlib.util.find_spec("ray") else "pip install ray"

    def set_up(self) -> None:
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # a token is made for each cluster; these live for seconds
        import ray

        self.ray = ray
        store_bytes = (TIMES + 1) * sum(2 * tensor.numel() for tensor in self.tensors) + (256 << 20)  # none is freed
        quiet: dict[str, Any] = {"log_to_driver": False, "include_dashboard": False, "logging_level": "ERROR"}
        if self.place.rank == 0:
            context = ray.init(num_cpus=1, object_store_memory=store_bytes, **quiet)
            self.place.tell("address", context.address_info["address"])
            self.place.meet()
        else:
            self.place.meet()
            ray.init(address=self.place.board["address"], namespace="bench", log_to_driver=False, logging_level="ERROR")

    def run(self, round_: int) -> None:
        from ray import cloudpickle

        if self.place.rank == 0:
            arrays = [tensor.view(torch.int16).numpy() for tensor in self.tensors]
            self.reference = self.ray.put(arrays)
            self.place.tell("reference", cloudpickle.dumps(self.reference))
            self.place.meet()
            return
        self.place.meet()
        arrays = self.ray.get(cloudpickle.loads(self.place.board["reference"]))
        for tensor, array in zip(self.tensors, arrays, strict=True):
            tensor.view(torch.int16).numpy()[...] = array

    def close(self) -> None:
        with suppress(Exception):
            self.ray.shutdown()


class _Made:
    """A method with some of its fields given."""

    def __init__(self, kind: type[Method], **fields: Any) -> None:
        self.missing, self.needs_board = kind.missing, kind.needs_board
        self.secret = bool(fields.get("secret"))
        self._make = partial(kind, **fields)

    def __call__(self, place: Place, tensors: list[torch.Tensor]) -> Method:
        return self._make(place, tensors)


METHODS: dict[str, _Made] = {
    "stream": _Made(Stream),
    "stream-reno": _Made(Stream, congestion="reno"),  # as the store's own within a host
    "store": _Made(Store),  # adopted tensors, as a trainer has them; the transports that Client picks
    "store-tcp": _Made(Store, transports=("tcp",)),
    "store-tcp-bare": _Made(Store, transports=("tcp",), verify=False),
    "store-tcp-blake3": _Made(Store, transports=("tcp",), digest="blake3"),
    "store-shm": _Made(Store, transports=("shm",), live=True),
    "store-secret": _Made(Store, secret=True),  # everything on
    "store-tcp-secret": _Made(Store, transports=("tcp",), secret=True),
    "store-shm-bare": _Made(Store, transports=("shm",), live=True, verify=False),
    "gloo": _Made(Gloo),
    "gloo-buckets": _Made(Gloo, bucket_bytes=256 << 20),
    "ray": _Made(Ray),
    "safetensors": _Made(Safetensors),
    "nixl": _Made(Nixl),
    "mooncake": _Made(Mooncake),
}
