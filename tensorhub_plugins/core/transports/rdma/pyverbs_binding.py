"""The binding to pyverbs, where a distribution has it for this Python.

Facts about pyverbs (measured on version 44 with soft-RoCE)
    It never releases the GIL: calls are short, or cut into short ones (registration), and nothing waits inside.
    Work requests and scatter entries leak when made anew: every queue pair has one, used for each read in turn.
    Before version 45 it does not expose a channel's descriptor: it is the one that is new.
    Reads address a dma-buf's region by offset.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import threading
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

from tensorhub_plugins.core.transports.rdma import bindings
from tensorhub_plugins.core.transports.rdma.bindings import Limits, Read, VerbsError, Way

CHANNEL_TRIES_MAX = 10  # other users of verbs (NCCL) may open devices at the same time

_descriptors = threading.Lock()  # an opened device has a descriptor that looks like a channel's


@cache
def load() -> SimpleNamespace:
    """Return everything that is used of pyverbs. Raise VerbsError if it is missing or does not fit the system."""
    if importlib.util.find_spec("pyverbs") is None:
        raise VerbsError(
            "pyverbs is not installed: take the distribution's (python3-pyverbs), it matches its rdma-core"
        )
    names = {
        "device": ("Context",),
        "pd": ("PD",),
        "mr": ("MR", "DmaBufMR"),
        "cq": ("CQ", "CompChannel"),
        "qp": ("QP", "QPCap", "QPInitAttr", "QPAttr"),
        "addr": ("GID", "GlobalRoute", "AHAttr"),
        "wr": ("SGE", "SendWR"),
    }
    found = SimpleNamespace()
    try:
        for module, attributes in names.items():
            loaded: Any = importlib.import_module(f"pyverbs.{module}")
            for attribute in attributes:
                setattr(found, attribute, getattr(loaded, attribute))
    except (ImportError, AttributeError) as error:
        raise VerbsError(
            f"pyverbs does not fit this Python or this system's rdma-core ({error}): take the distribution's package"
        ) from error
    return found


def open_card(device: str, port: int) -> Card:
    """Open one port of the device of this name."""
    return Card(load(), device, port)


class Card:
    """The `bindings.Card` of pyverbs."""

    def __init__(self, pyverbs: Any, device: str, port: int) -> None:
        self.pyverbs, self.port = pyverbs, port
        with _descriptors:
            self.context = pyverbs.Context(name=device)
        try:
            attributes, limits = self.context.query_port(port), self.context.query_device()
            self.limits = Limits.of(attributes, limits)
            self.domain = pyverbs.PD(self.context)
        except BaseException:
            self.context.close()
            raise

    def register(self, address: int, size_bytes: int) -> Region:
        return Region(self.pyverbs.MR(self.domain, size_bytes, bindings.ACCESS, address=address), address)

    def register_dma_buf(self, fd: int, offset: int, size_bytes: int, address: int) -> Region:
        made = self.pyverbs.DmaBufMR(self.domain, size_bytes, bindings.ACCESS, dmabuf=fd, offset=offset)
        return Region(made, offset)

    def make_queue(self, depth: int, *, events: bool) -> Queue:
        return Queue(self, depth, events=events)

    def make_pair(self, queue: Queue, depth: int) -> Pair:
        return Pair(self, queue, depth)

    def close(self) -> None:
        self.context.close()


class Region:
    """The `bindings.Region` of pyverbs."""

    def __init__(self, region: Any, address: int) -> None:
        self._region = region
        self.address, self.lkey, self.rkey = address, int(region.lkey), int(region.rkey)

    def close(self) -> None:
        self._region.close()


class Queue:
    """The `bindings.Queue` of pyverbs."""

    def __init__(self, card: Card, depth: int, *, events: bool) -> None:
        channel: tuple[Any, int] = _make_channel(card) if events else (None, -1)
        self._channel, self.fd = channel
        self.queue = card.pyverbs.CQ(card.context, depth, None, self._channel, 0)

    def poll(self, limit: int) -> list[tuple[int, int]]:
        _, completions = self.queue.poll(limit)
        return [(found.wr_id, found.status) for found in completions]

    def arm(self) -> None:
        self.queue.req_notify()

    def take_event(self) -> None:
        self._channel.get_cq_event(self.queue)
        self.queue.ack_events(1)

    def close(self) -> None:
        for resource in (self.queue, self._channel):
            if resource is not None:
                resource.close()


class Pair:
    """The `bindings.Pair` of pyverbs."""

    def __init__(self, card: Card, queue: Queue, depth: int) -> None:
        self._pyverbs = v = card.pyverbs
        self._port = card.port
        capacity = v.QPCap(max_send_wr=depth, max_recv_wr=1, max_send_sge=1, max_recv_sge=1, max_inline_data=0)
        kind = bindings.RELIABLE_CONNECTION
        initial = v.QPInitAttr(qp_type=kind, scq=queue.queue, rcq=queue.queue, cap=capacity, sq_sig_all=0)
        self._qp = v.QP(card.domain, initial)
        self.number = int(self._qp.qp_num)
        self._entry = v.SGE(0, 0, 0)
        self._request = v.SendWR(opcode=bindings.RDMA_READ, num_sge=1, sg=[self._entry], send_flags=0)
        self._request.sg_list = self._entry  # the entry itself and not the copy that pyverbs made

    def connect(self, way: Way) -> None:
        v = self._pyverbs
        route = v.GlobalRoute(dgid=v.GID(way.gid), sgid_index=way.gid_index, hop_limit=bindings.HOP_LIMIT)
        a = v.QPAttr(port_num=self._port)
        a.qp_access_flags = bindings.ACCESS_REMOTE_READ
        a.ah_attr = v.AHAttr(dlid=way.lid, is_global=1, gr=route, port_num=self._port)
        a.path_mtu, a.dest_qp_num = way.mtu, way.queue_pair
        a.rq_psn, a.sq_psn = way.their_packet_number, way.our_packet_number
        a.min_rnr_timer = bindings.MIN_RNR_TIMER
        a.max_dest_rd_atomic, a.max_rd_atomic = way.reads_served, way.reads_started
        a.timeout, a.retry_cnt, a.rnr_retry = bindings.TIMEOUT, bindings.RETRIES, bindings.RNR_RETRIES
        self._qp.to_rts(a)

    def abort(self) -> None:
        a = self._pyverbs.QPAttr()
        a.qp_state = bindings.STATE_ERROR
        self._qp.modify(a, bindings.QP_STATE)

    def post(self, reads: Sequence[Read]) -> None:
        request, entry = self._request, self._entry
        for read in reads:
            entry.addr, entry.lkey, entry.length = read.local, read.local_key, read.size_bytes
            request.set_wr_rdma(read.remote_key, read.remote)
            request.wr_id = read.number
            request.send_flags = bindings.SEND_SIGNALED if read.signaled else 0
            self._qp.post_send(request)

    def close(self) -> None:
        self._qp.close()


def _make_channel(card: Card) -> tuple[Any, int]:
    with _descriptors:
        for _ in range(CHANNEL_TRIES_MAX):
            before = _event_descriptors()
            channel = card.pyverbs.CompChannel(card.context)
            fds = {channel.fd} if hasattr(channel, "fd") else _event_descriptors() - before
            if len(fds) == 1:
                fd = fds.pop()
                os.set_blocking(fd, False)
                return channel, fd
            channel.close()
    raise VerbsError("cannot tell which file descriptor a completion channel has: others come and go")


def _event_descriptors() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if "[infinibandevent]" in os.readlink(f"/proc/self/fd/{name}"):
                found.add(int(name))
    return found
