"""The binding to libibverbs.so.1 by ctypes: no package is needed, and any Python will do.

Most verbs are functions of the library. Those of the fast path are inline in verbs.h and call the driver by pointers in
`ibv_context.ops`, as here: every program that was ever linked with libibverbs.so.1 has the layout of these structs
compiled in, so that it cannot change without another name for the library. A test compares it with verbs.h, and a
context whose first and last fields are not as expected is refused.

The GIL
    Functions of the library release it: registering, closing and connecting take long. Posting, polling and arming
    hold it: each takes a microsecond, and reacquiring the GIL could take five milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import ipaddress
import os
import stat
import weakref
from collections.abc import Callable, Sequence
from ctypes import byref, c_int, c_size_t, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import Any

from tensorhub_plugins.core.transports.rdma import bindings
from tensorhub_plugins.core.transports.rdma.bindings import Limits, Read, VerbsError, Way

LIBRARY = "libibverbs.so.1"
PACKAGES = "libibverbs1 ibverbs-providers (Debian, Ubuntu) or rdma-core (Fedora, RHEL)"
POSTED_AT_ONCE_MAX = POLLED_AT_ONCE_MAX = 32  # requests or completions in one call of the driver

# --- verbs.h ---

STRUCTS: dict[str, Any] = {}  # by their names there
_TYPES: dict[str, Any] = {
    "u8": c_uint8, "u16": c_uint16, "u32": c_uint32, "u64": c_uint64, "int": c_int, "size": c_size_t, "ptr": c_void_p,
}  # fmt: skip


def _struct(name: str, declaration: str) -> Any:
    """Declare a struct, as "u32 length lkey; u8 raw[16]". Last fields may be missing if the library allocates it."""
    fields = []
    for part in declaration.split(";"):
        kind, *names = part.split()
        for field in names:
            field, _, count = field.rstrip("]").partition("[")
            fields.append((field, _TYPES[kind] * int(count) if count else _TYPES[kind]))
    _TYPES[name] = STRUCTS[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return STRUCTS[name]


POLL_CQ, REQ_NOTIFY_CQ, POST_SEND = 11, 12, 25  # places in ibv_context_ops
DeviceAttributes = _struct(
    "ibv_device_attr",
    "u8 fw_ver[64]; u64 node_guid sys_image_guid max_mr_size page_size_cap; u32 vendor_id vendor_part_id hw_ver;"
    "int max_qp max_qp_wr device_cap_flags max_sge max_sge_rd max_cq max_cqe max_mr max_pd max_qp_rd_atom"
    " max_ee_rd_atom max_res_rd_atom max_qp_init_rd_atom max_ee_init_rd_atom atomic_cap max_ee max_rdd max_mw"
    " max_raw_ipv6_qp max_raw_ethy_qp max_mcast_grp max_mcast_qp_attach max_total_mcast_qp_attach max_ah max_fmr"
    " max_map_per_fmr max_srq max_srq_wr max_srq_sge; u16 max_pkeys; u8 local_ca_ack_delay phys_port_cnt",
)
PortAttributes = _struct(
    "ibv_port_attr",
    "int state max_mtu active_mtu gid_tbl_len; u32 port_cap_flags max_msg_sz bad_pkey_cntr qkey_viol_cntr;"
    "u16 pkey_tbl_len lid sm_lid; u8 lmc max_vl_num sm_sl subnet_timeout init_type_reply active_width active_speed"
    " phys_state link_layer flags; u16 port_cap_flags2",
)
Context = _struct("ibv_context", "ptr device ops[32]; int cmd_fd async_fd num_comp_vectors")
MemoryRegion = _struct("ibv_mr", "ptr context pd addr; size length; u32 handle lkey rkey")
Channel = _struct("ibv_comp_channel", "ptr context; int fd refcnt")
CompletionQueue = _struct("ibv_cq", "ptr context channel cq_context; u32 handle; int cqe")
QueuePair = _struct("ibv_qp", "ptr context qp_context pd send_cq recv_cq srq; u32 handle qp_num")
Capacity = _struct("ibv_qp_cap", "u32 max_send_wr max_recv_wr max_send_sge max_recv_sge max_inline_data")
PairInitial = _struct("ibv_qp_init_attr", "ptr qp_context send_cq recv_cq srq; ibv_qp_cap cap; int qp_type sq_sig_all")
Route = _struct("ibv_global_route", "u64 dgid[2]; u32 flow_label; u8 sgid_index hop_limit traffic_class")
Address = _struct("ibv_ah_attr", "ibv_global_route grh; u16 dlid; u8 sl src_path_bits static_rate is_global port_num")
PairAttributes = _struct(
    "ibv_qp_attr",
    "int qp_state cur_qp_state path_mtu path_mig_state; u32 qkey rq_psn sq_psn dest_qp_num qp_access_flags;"
    "ibv_qp_cap cap; ibv_ah_attr ah_attr alt_ah_attr; u16 pkey_index alt_pkey_index; u8 en_sqd_async_notify"
    " sq_draining max_rd_atomic max_dest_rd_atomic min_rnr_timer port_num timeout retry_cnt rnr_retry alt_port_num"
    " alt_timeout; u32 rate_limit",
)
Entry = _struct("ibv_sge", "u64 addr; u32 length lkey")
Request = _struct(  # its unions as an RDMA read uses them
    "ibv_send_wr",
    "u64 wr_id; ptr next sg_list; int num_sge opcode; u32 send_flags imm_data; u64 remote_addr; u32 rkey;"
    "u32 _unions[19]",
)
Completion = _struct(
    "ibv_wc",
    "u64 wr_id; int status opcode; u32 vendor_err byte_len imm_data qp_num src_qp wc_flags; u16 pkey_index slid;"
    "u8 sl dlid_path_bits",
)

TO_INIT = 1 << 0 | 1 << 3 | 1 << 4 | 1 << 5  # STATE, ACCESS_FLAGS, PKEY_INDEX, PORT
# STATE, AV, PATH_MTU, RQ_PSN, MIN_RNR_TIMER, MAX_DEST_RD_ATOMIC, DEST_QPN
TO_RECEIVE = 1 << 0 | 1 << 7 | 1 << 8 | 1 << 12 | 1 << 15 | 1 << 17 | 1 << 20
TO_SEND = 1 << 0 | 1 << 9 | 1 << 10 | 1 << 11 | 1 << 13 | 1 << 16  # STATE, TIMEOUT, both retries, RD_ATOMIC, SQ_PSN

_FUNCTIONS: dict[str, tuple[Any, ...]] = {  # return type, then argument types
    "ibv_get_device_list": (c_void_p, c_void_p),
    "ibv_free_device_list": (None, c_void_p),
    "ibv_get_device_name": (ctypes.c_char_p, c_void_p),
    "ibv_open_device": (c_void_p, c_void_p),
    "ibv_close_device": (c_int, c_void_p),
    "ibv_query_device": (c_int, c_void_p, c_void_p),
    "ibv_query_port": (c_int, c_void_p, c_uint8, c_void_p),
    "ibv_alloc_pd": (c_void_p, c_void_p),
    "ibv_dealloc_pd": (c_int, c_void_p),
    "ibv_reg_mr": (c_void_p, c_void_p, c_void_p, c_size_t, c_int),
    "ibv_dereg_mr": (c_int, c_void_p),
    "ibv_create_comp_channel": (c_void_p, c_void_p),
    "ibv_destroy_comp_channel": (c_int, c_void_p),
    "ibv_create_cq": (c_void_p, c_void_p, c_int, c_void_p, c_void_p, c_int),
    "ibv_destroy_cq": (c_int, c_void_p),
    "ibv_get_cq_event": (c_int, c_void_p, c_void_p, c_void_p),
    "ibv_ack_cq_events": (None, c_void_p, ctypes.c_uint),
    "ibv_create_qp": (c_void_p, c_void_p, c_void_p),
    "ibv_modify_qp": (c_int, c_void_p, c_void_p, c_int),
    "ibv_destroy_qp": (c_int, c_void_p),
}
_DMA_BUF = "ibv_reg_dmabuf_mr", (c_void_p, c_void_p, c_uint64, c_size_t, c_uint64, c_int, c_int)  # since version 34
_post_send = ctypes.PYFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p)
_poll_cq = ctypes.PYFUNCTYPE(c_int, c_void_p, c_int, c_void_p)
_req_notify_cq = ctypes.PYFUNCTYPE(c_int, c_void_p, c_int)


@cache
def load(name: str | None = LIBRARY) -> Any:
    """Return the library. Raise VerbsError if it is missing, or is a different one."""
    try:
        library = ctypes.CDLL(name, use_errno=True)
    except OSError as error:
        raise VerbsError(f"{name} cannot be loaded ({error}): install {PACKAGES}") from error
    try:
        for verb, (returns, *takes) in _FUNCTIONS.items():
            function = getattr(library, verb)
            function.restype, function.argtypes = returns, takes
        verb, (returns, *takes) = _DMA_BUF
        with contextlib.suppress(AttributeError):
            function = getattr(library, verb)
            function.restype, function.argtypes = returns, takes
    except AttributeError as error:
        raise VerbsError(f"{LIBRARY} does not have what every one has ({error}): install {PACKAGES}") from error
    return library


def open_card(device: str, port: int) -> Card:
    """Open one port of the device of this name. Raise OSError or VerbsError."""
    return Card(load(), device, port)


def _made(name: str, *arguments: Any) -> int:
    """Call this function and return the pointer to what it makes. Raise OSError."""
    found: int | None = getattr(load(), name)(*arguments)
    if not found:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return found


def _done(name: str, code: int) -> None:
    """Raise OSError unless a verb returned 0. Most return an error number, some return -1 and set errno."""
    if code:
        code = code if code > 0 else ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def _call(name: str, *arguments: Any) -> None:
    _done(name, getattr(load(), name)(*arguments))


class _Resource:
    """An object that the library has allocated, destroyed once: by `close`, or with this object."""

    def __init__(self, card: Card, pointer: int, *destroy: tuple[str, int]) -> None:
        """Take the pointer over. destroy: functions, with their arguments. The card is kept alive meanwhile."""
        self.pointer = pointer
        self._destroy = weakref.finalize(self, _destroy_all, card, destroy)
        self._destroy.atexit = False  # the system releases everything
        card.children[type(self)].add(self)

    def close(self) -> None:
        self._destroy()

    def _check_open(self) -> None:
        if not self._destroy.alive:
            raise OSError(errno.EBADF, f"this {type(self).__name__.lower()} is closed")


def _destroy_all(card: Card, functions: Sequence[tuple[str, int]]) -> None:
    for name, pointer in functions:
        _call(name, pointer)


class Card:
    """The `bindings.Card` of libibverbs."""

    def __init__(self, library: Any, device: str, port: int) -> None:
        self.port = port
        self.context = _open(library, device)
        self._close = weakref.finalize(self, _call, "ibv_close_device", self.context)
        self._close.atexit = False
        try:
            _check_layout(Context.from_address(self.context))
            attributes, limits = PortAttributes(), DeviceAttributes()
            _call("ibv_query_port", self.context, port, byref(attributes))
            _call("ibv_query_device", self.context, byref(limits))
            self.limits = Limits.of(attributes, limits)
            self.domain = _made("ibv_alloc_pd", self.context)
        except BaseException:
            self._close()
            raise
        self.children: dict[type, weakref.WeakSet[_Resource]] = {
            kind: weakref.WeakSet() for kind in (Pair, Queue, Region)
        }

    def register(self, address: int, size_bytes: int) -> Region:
        made = _made("ibv_reg_mr", self.domain, address, size_bytes, bindings.ACCESS)
        return Region(self, made, address)

    def register_dma_buf(self, fd: int, offset: int, size_bytes: int, address: int) -> Region:
        if not hasattr(load(), _DMA_BUF[0]):
            raise OSError(errno.ENOTSUP, f"this {LIBRARY} has no {_DMA_BUF[0]}: rdma-core 34 has")
        made = _made(_DMA_BUF[0], self.domain, offset, size_bytes, address, fd, bindings.ACCESS)
        return Region(self, made, address)

    def make_queue(self, depth: int, *, events: bool) -> Queue:
        return Queue(self, depth, events=events)

    def make_pair(self, queue: Queue, depth: int) -> Pair:
        return Pair(self, queue, depth)

    def close(self) -> None:
        for made in self.children.values():
            for child in list(made):
                with contextlib.suppress(OSError):
                    child.close()
        if self._close.alive:
            _call("ibv_dealloc_pd", self.domain)
            self._close()


def _open(library: Any, name: str) -> int:
    count = c_int()
    devices = _made("ibv_get_device_list", byref(count))
    try:
        known = {}
        for index in range(count.value):
            device = c_void_p.from_address(devices + index * ctypes.sizeof(c_void_p)).value
            known[library.ibv_get_device_name(device).decode()] = device
        if name not in known:
            raise VerbsError(
                f"libibverbs knows {sorted(known) or 'no device'}: its driver is missing, install {PACKAGES}"
            )
        return _made("ibv_open_device", known[name])
    finally:
        library.ibv_free_device_list(devices)


def _check_layout(context: Any) -> None:
    """Raise VerbsError unless the operations and the descriptor after them are where they are expected."""
    try:
        os.fstat(context.async_fd)
        is_device = stat.S_ISCHR(os.fstat(context.cmd_fd).st_mode)
    except OSError:
        is_device = False
    if not (is_device and context.device and all(context.ops[at] for at in (POLL_CQ, REQ_NOTIFY_CQ, POST_SEND))):
        raise VerbsError(f"this {LIBRARY} is laid out otherwise than rdma-core's: {PACKAGES} has the right one")


def _operation(context: int, place: int, kind: Callable[[int], Any]) -> Any:
    return kind(Context.from_address(context).ops[place])


class Region(_Resource):
    """The `bindings.Region` of libibverbs."""

    def __init__(self, card: Card, pointer: int, address: int) -> None:
        super().__init__(card, pointer, ("ibv_dereg_mr", pointer))
        region = MemoryRegion.from_address(pointer)
        self.address, self.lkey, self.rkey = address, int(region.lkey), int(region.rkey)


class Queue(_Resource):
    """The `bindings.Queue` of libibverbs."""

    def __init__(self, card: Card, depth: int, *, events: bool) -> None:
        self._channel = _made("ibv_create_comp_channel", card.context) if events else None
        channel = [("ibv_destroy_comp_channel", self._channel)] if self._channel else []
        self.fd = -1
        try:
            if self._channel:
                self.fd = int(Channel.from_address(self._channel).fd)
                os.set_blocking(self.fd, False)
            pointer = _made("ibv_create_cq", card.context, depth, None, self._channel, 0)
        except BaseException:
            _destroy_all(card, channel)
            raise
        super().__init__(card, pointer, ("ibv_destroy_cq", pointer), *channel)
        context = CompletionQueue.from_address(pointer).context
        self._poll = _operation(context, POLL_CQ, _poll_cq)
        self._notify = _operation(context, REQ_NOTIFY_CQ, _req_notify_cq)
        self._block = (Completion * POLLED_AT_ONCE_MAX)()
        self._completions = list(self._block)  # made once: each access would make a new object over the same memory

    def poll(self, limit: int) -> list[tuple[int, int]]:
        self._check_open()
        count = self._poll(self.pointer, min(limit, POLLED_AT_ONCE_MAX), ctypes.addressof(self._block))
        if count < 0:
            raise OSError(-count, "ibv_poll_cq failed")
        return [(found.wr_id, found.status) for found in self._completions[:count]]

    def arm(self) -> None:
        self._check_open()
        _done("ibv_req_notify_cq", self._notify(self.pointer, 0))

    def take_event(self) -> None:
        self._check_open()
        queue, context = c_void_p(), c_void_p()
        _call("ibv_get_cq_event", self._channel, byref(queue), byref(context))
        load().ibv_ack_cq_events(queue, 1)


class Pair(_Resource):
    """The `bindings.Pair` of libibverbs."""

    def __init__(self, card: Card, queue: Queue, depth: int) -> None:
        wanted = PairInitial(send_cq=queue.pointer, recv_cq=queue.pointer, qp_type=bindings.RELIABLE_CONNECTION)
        wanted.cap = Capacity(max_send_wr=depth, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
        pointer = _made("ibv_create_qp", card.domain, byref(wanted))
        super().__init__(card, pointer, ("ibv_destroy_qp", pointer))
        self._queue = queue  # kept alive
        self._port = card.port
        pair = QueuePair.from_address(pointer)
        self.number = int(pair.qp_num)
        self._post = _operation(pair.context, POST_SEND, _post_send)
        count = min(depth, POSTED_AT_ONCE_MAX)
        self._block, entries = (Request * count)(), (Entry * count)()
        self._requests, self._entries = list(self._block), list(entries)
        for index, (request, entry) in enumerate(zip(self._requests, self._entries, strict=True)):
            request.sg_list, request.num_sge, request.opcode = ctypes.addressof(entry), 1, bindings.RDMA_READ
            if index:
                self._requests[index - 1].next = ctypes.addressof(request)

    def connect(self, way: Way) -> None:
        a = PairAttributes(qp_state=bindings.STATE_INIT, port_num=self._port)
        a.qp_access_flags = bindings.ACCESS_REMOTE_READ
        self._modify(a, TO_INIT)
        gid = (c_uint64 * 2).from_buffer_copy(ipaddress.IPv6Address(way.gid).packed)
        route = Route(dgid=gid, sgid_index=way.gid_index, hop_limit=bindings.HOP_LIMIT)
        a = PairAttributes(qp_state=bindings.STATE_READY_TO_RECEIVE, path_mtu=way.mtu, dest_qp_num=way.queue_pair)
        a.ah_attr = Address(grh=route, dlid=way.lid, is_global=1, port_num=self._port)
        a.rq_psn, a.min_rnr_timer, a.max_dest_rd_atomic = (
            way.their_packet_number,
            bindings.MIN_RNR_TIMER,
            way.reads_served,
        )
        self._modify(a, TO_RECEIVE)
        a = PairAttributes(qp_state=bindings.STATE_READY_TO_SEND, sq_psn=way.our_packet_number)
        a.timeout, a.retry_cnt, a.rnr_retry = bindings.TIMEOUT, bindings.RETRIES, bindings.RNR_RETRIES
        a.max_rd_atomic = way.reads_started
        self._modify(a, TO_SEND)

    def abort(self) -> None:
        self._modify(PairAttributes(qp_state=bindings.STATE_ERROR), bindings.QP_STATE)

    def post(self, reads: Sequence[Read]) -> None:
        self._check_open()
        for start in range(0, len(reads), len(self._requests)):
            self._post_some(reads[start : start + len(self._requests)])

    def _post_some(self, reads: Sequence[Read]) -> None:
        for read, request, entry in zip(reads, self._requests, self._entries, strict=False):
            request.wr_id, request.send_flags = read.number, bindings.SEND_SIGNALED if read.signaled else 0
            request.remote_addr, request.rkey = read.remote, read.remote_key
            entry.addr, entry.lkey, entry.length = read.local, read.local_key, read.size_bytes
        last, failed = self._requests[len(reads) - 1], c_void_p()
        behind, last.next = last.next, None
        code = self._post(self.pointer, ctypes.addressof(self._block), ctypes.addressof(failed))
        last.next = behind
        _done("ibv_post_send", code)

    def _modify(self, attributes: Any, mask: int) -> None:
        self._check_open()
        _call("ibv_modify_qp", self.pointer, byref(attributes), mask)
