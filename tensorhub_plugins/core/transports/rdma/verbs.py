"""The seam to pyverbs: its names, its leaks, its numbers, and nothing of ours beyond memory, queue pairs and reads.

What has to be known about pyverbs (measured on version 44 with soft-RoCE)
    It never lets go of the GIL. Calls here are short, or cut into short ones (registration); nothing waits inside
    verbs. Whoever waits polls the completion channel's file descriptor.
    Work requests and scatter entries leak when made anew, so every queue pair has a ring of them, made once.
    A memory region does not keep its memory alive: `Memory` does.
    The names of the numbers moved from `pyverbs.enums` to `pyverbs.libibverbs_enums` after 44.

What has to be known about reliable connections
    An error anywhere moves the queue pair to its error state for good, and everything behind it is flushed.
    retry_cnt 7 means for ever in soft-RoCE. A peer that is gone shows as RETRY_EXC_ERR after `TIMEOUT` x retries.
    Destroying a queue pair is synchronous: afterwards it neither writes into our memory nor serves it to a peer.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import importlib.util
import logging
import os
import resource
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import msgspec

from tensorhub_plugins.core.transports.rdma.rails import PAGE_SIZE_BYTES, SYSFS, Port

RING_DEPTH = 128  # reads of at most READ_SIZE_BYTES_MAX in flight on one queue pair
READ_SIZE_BYTES_MAX = 1 << 20  # several in flight keep a wire busy; one lost packet repeats no more than this
COMPLETIONS_PER_POLL = 32
READS_OUTSTANDING_MAX = 16  # what current network cards allow a queue pair; the field holds 255
TIMEOUT = 15  # 4.096 us x 2^15 = 0.13 s until a packet is sent again
RETRIES = 6  # 0.9 s to 3.8 s until a dead peer is given up; 7 would be for ever
RNR_RETRIES = 6
CHANNEL_TRIES_MAX = 10  # somebody else's verbs (NCCL's) may open devices at the same time
MIN_RNR_TIMER = 12
HOP_LIMIT = 64
CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD = 1  # cuda.h

# pyverbs 44 does not tell a channel's descriptor: it is the one that is new. An opened device has one that looks alike.
_descriptors = threading.Lock()

_log = logging.getLogger(__name__)
Token = TypeVar("Token")


class VerbsError(Exception):
    """Something that verbs refused or a read that failed, in words."""


class ReadFailed(VerbsError):
    """A completion with an error. The queue pair is of no use any more. status: verbs' name for it."""

    def __init__(self, status: str) -> None:
        super().__init__(f"a read ended with {status}{_MEANING.get(status, '')}")
        self.status = status


_MEANING = {
    "REM_ACCESS_ERR": " (the source has closed that memory, or never offered it)",
    "RETRY_EXC_ERR": " (the source does not answer any more)",
    "WR_FLUSH_ERR": " (the queue pair was moved to its error state)",
    "LOC_PROT_ERR": " (our own memory is not registered)",
}


class Endpoint(msgspec.Struct, frozen=True, array_like=True):
    """What the other end of a queue pair must know to connect to it."""

    queue_pair: int
    packet_number: int
    gid: str
    lid: int
    mtu: int
    reads_served: int  # outstanding reads it can answer


# --- is it there? ---


def why_not(sysfs: Path = SYSFS) -> str | None:
    """None where verbs can be used; else the reason. Nothing is imported where there is no device."""
    if not sysfs.is_dir() or not any(sysfs.iterdir()):
        return f"there is no RDMA device ({sysfs} is missing or empty)"
    try:
        _pyverbs()
    except VerbsError as error:
        return str(error)
    return None


@cache
def _pyverbs() -> SimpleNamespace:
    """Everything that is used of pyverbs. VerbsError when it is missing or does not fit the system's libraries."""
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
        "pyverbs_error": ("PyverbsError",),
    }
    found = SimpleNamespace()
    try:
        for module, attributes in names.items():
            loaded: Any = importlib.import_module(f"pyverbs.{module}")
            for attribute in attributes:
                setattr(found, attribute, getattr(loaded, attribute))
        found.numbers = _numbers()
    except (ImportError, AttributeError) as error:
        raise VerbsError(
            f"pyverbs does not fit this Python or this system's rdma-core ({error}): take the distribution's package"
        ) from error
    return found


def _numbers() -> Any:
    """The module of enumerations, under its new name or its old one."""
    for name in ("pyverbs.libibverbs_enums", "pyverbs.enums"):
        if importlib.util.find_spec(name) is not None:
            return importlib.import_module(name)
    raise ImportError("it has neither libibverbs_enums nor enums")


def status_name(numbers: Any, status: int) -> str:
    """IBV_WC_REM_ACCESS_ERR as REM_ACCESS_ERR. Opcodes share the prefix, but only errors end like one."""
    for name in dir(numbers):
        if name.startswith("IBV_WC_") and name.endswith("_ERR") and getattr(numbers, name) == status:
            return name.removeprefix("IBV_WC_")
    return f"status {status}"


@contextlib.contextmanager
def _translated(doing: str) -> Iterator[None]:
    try:
        yield
    except VerbsError:
        raise
    except Exception as error:  # pyverbs raises its own class, and OSError, ValueError and TypeError here and there
        raise VerbsError(f"cannot {doing}: {_in_words(error)}") from error


def _in_words(error: Exception) -> str:
    code = getattr(error, "error_code", None) or getattr(error, "errno", None)
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    if code == errno.ENOMEM or "Cannot allocate memory" in text:
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        if limit != resource.RLIM_INFINITY:
            text += (
                f"; this process may lock {limit >> 10} KiB of memory: raise `ulimit -l` (in a container, its memlock)"
            )
    return text


# --- memory ---


class Memory:
    """A registered range. address: what reads call its first byte. how: in words, for the log."""

    def __init__(self, region: Any, address: int, how: str) -> None:
        self._region = region
        self.address = address
        self.how = how
        self.lkey, self.rkey = int(region.lkey), int(region.rkey)

    def close(self) -> None:
        self._region.close()


def export_dma_buf(address: int, size_bytes: int) -> tuple[int, int]:
    """(descriptor, offset in it) of whole pages around a range of CUDA's memory. OSError, with CUDA's reason."""
    cuda = ctypes.CDLL("libcuda.so.1")
    start = address // PAGE_SIZE_BYTES * PAGE_SIZE_BYTES
    stop = -(-(address + size_bytes) // PAGE_SIZE_BYTES) * PAGE_SIZE_BYTES
    fd = ctypes.c_int(-1)
    code = cuda.cuMemGetHandleForAddressRange(
        ctypes.byref(fd),
        ctypes.c_uint64(start),
        ctypes.c_size_t(stop - start),
        ctypes.c_int(CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD),
        ctypes.c_uint64(0),
    )
    if code:
        reason = ctypes.c_char_p()
        cuda.cuGetErrorString(ctypes.c_int(code), ctypes.byref(reason))
        raise OSError(f"CUDA does not export it ({(reason.value or b'no reason').decode()})")
    return fd.value, address - start


# --- one device ---


class Nic:
    """One port of a device, opened, and the domain that its memory and queue pairs live in.

    `close` takes effect when the last queue pair has been closed, so that no thread polls what is not there any more.
    """

    def __init__(self, port: Port) -> None:
        """VerbsError when the device cannot be opened."""
        self.port = port
        self._v = _pyverbs()
        self._guard = threading.Lock()
        self._users = 0
        self._closing = False
        with _translated(f"open {port.device}"), _descriptors:
            self.context = self._v.Context(name=port.device)
            try:
                attributes = self.context.query_port(port.number)
                limits = self.context.query_device()
                self.lid: int = attributes.lid
                self.mtu: int = attributes.active_mtu
                self.read_size_bytes_max: int = min(READ_SIZE_BYTES_MAX, attributes.max_msg_sz)
                self.reads_started: int = min(READS_OUTSTANDING_MAX, limits.max_qp_init_rd_atom)
                self.reads_served: int = min(READS_OUTSTANDING_MAX, limits.max_qp_rd_atom)
                self.depth: int = min(RING_DEPTH, limits.max_qp_wr, limits.max_cqe - 1)
                self.domain = self._v.PD(self.context)
                # Completions of queue pairs that only answer: there are none, but verbs wants a queue for them.
                self.idle_queue = self._v.CQ(self.context, 1, None, None, 0)
            except BaseException:
                self.context.close()
                raise

    def register(self, address: int, size_bytes: int, device: str = "cpu") -> Memory:
        """Memory that peers may read and that we may read into. device: its type, as torch says it. VerbsError.

        CUDA's memory is registered like any other where nvidia-peermem is loaded, else as a dma-buf.
        """
        numbers = self._v.numbers
        access = numbers.IBV_ACCESS_LOCAL_WRITE | numbers.IBV_ACCESS_REMOTE_READ
        with self._guard:
            if self._closing:
                raise VerbsError("the transport was closed")
            try:
                with _translated(f"register {size_bytes} bytes with {self.port.device}"):
                    region = self._v.MR(self.domain, size_bytes, access, address=address)
                    return Memory(region, address, "as it is" if device == "cpu" else "by peer memory")
            except VerbsError as error:
                if device != "cuda":
                    raise
                return self._register_dma_buf(address, size_bytes, access, str(error))

    def _register_dma_buf(self, address: int, size_bytes: int, access: int, why: str) -> Memory:
        with _translated(f"register {size_bytes} bytes of a CUDA device with {self.port.device}: {why}; as a dma-buf"):
            fd, offset = export_dma_buf(address, size_bytes)
            try:
                # pyverbs names the region's first byte by its offset.
                region = self._v.DmaBufMR(self.domain, size_bytes, access, dmabuf=fd, offset=offset)
            finally:
                os.close(fd)  # the region holds the dma-buf itself
            return Memory(region, offset, "through dma-buf")

    def acquire(self) -> None:
        """Keep the card open for one more user. VerbsError when the transport was closed."""
        with self._guard:
            if self._closing:
                raise VerbsError("the transport was closed")
            self._users += 1

    def release(self) -> None:
        """One user less; the last one closes the card, if the transport was closed."""
        with self._guard:
            self._users -= 1
            last = self._closing and not self._users
        if last:
            self._close()

    def close(self) -> None:
        """Idempotent."""
        with self._guard:
            if self._closing:
                return
            self._closing = True
            last = not self._users
        if last:
            self._close()

    def _close(self) -> None:
        with contextlib.suppress(Exception):
            self.context.close()  # and with it all that was made of it


class QueuePair:
    """One end of a reliable connection; the source's ends are only this."""

    def __init__(self, nic: Nic, queue: Any = None, depth: int = 1) -> None:
        """queue: for completions; None for an end that only answers."""
        self.nic = nic
        self._v = nic._v
        self._closed = False
        self._guard = threading.Lock()
        nic.acquire()
        try:
            with _translated(f"make a queue pair on {nic.port.device}"):
                capacity = self._v.QPCap(
                    max_send_wr=depth, max_recv_wr=1, max_send_sge=1, max_recv_sge=1, max_inline_data=0
                )
                queue = nic.idle_queue if queue is None else queue
                kind = self._v.numbers.IBV_QPT_RC
                initial = self._v.QPInitAttr(qp_type=kind, scq=queue, rcq=queue, cap=capacity, sq_sig_all=0)
                self.qp = self._v.QP(nic.domain, initial)
        except BaseException:
            nic.release()
            raise
        self.endpoint = Endpoint(self.qp.qp_num, secrets.randbits(24), nic.port.gid, nic.lid, nic.mtu, nic.reads_served)

    def connect(self, peer: Endpoint) -> None:
        """Ready to read from and to be read by this peer, who has to do the same. Local: the peer is not asked."""
        v, nic = self._v, self.nic
        with _translated(f"connect a queue pair of {nic.port.device} to {peer.gid}"):
            route = v.GlobalRoute(dgid=v.GID(peer.gid), sgid_index=nic.port.gid_index, hop_limit=HOP_LIMIT)
            a = v.QPAttr(port_num=nic.port.number)
            a.qp_access_flags = v.numbers.IBV_ACCESS_REMOTE_READ
            a.ah_attr = v.AHAttr(dlid=peer.lid, is_global=1, gr=route, port_num=nic.port.number)
            a.path_mtu = min(nic.mtu, peer.mtu)
            a.dest_qp_num = peer.queue_pair
            a.rq_psn = peer.packet_number
            a.sq_psn = self.endpoint.packet_number
            a.min_rnr_timer = MIN_RNR_TIMER
            a.max_dest_rd_atomic = nic.reads_served
            a.max_rd_atomic = max(1, min(nic.reads_started, peer.reads_served))
            a.timeout, a.retry_cnt, a.rnr_retry = TIMEOUT, RETRIES, RNR_RETRIES
            self.qp.to_rts(a)

    def abort(self) -> None:
        """To the error state: nothing is served or received over it any more. From any thread; idempotent."""
        with self._guard:
            if not self._closed:
                with contextlib.suppress(Exception):
                    a = self._v.QPAttr()
                    a.qp_state = self._v.numbers.IBV_QPS_ERR
                    self.qp.modify(a, self._v.numbers.IBV_QP_STATE)

    def close(self) -> None:
        """To the error state and away: when it returns, the device touches no memory for it. Idempotent."""
        self.abort()
        with self._guard:
            if self._closed:
                return
            self._closed = True
            try:
                with contextlib.suppress(Exception):
                    self.qp.close()
            finally:
                self.nic.release()


# --- reading ---


class Ring(Generic[Token]):
    """Which slots of a queue pair are free, and whose end a completion means.

    Only some requests ask for a completion: the last of each read that somebody waits for, and one whenever half the
    ring has been posted without. Completions of one queue pair come in order, so that one stands for all before it.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._posted = 0
        self._done = 0
        self._silent = 0  # posted since the last that asks for a completion
        self._ends: deque[tuple[int, Token]] = deque()

    @property
    def room(self) -> int:
        """How many more may be posted."""
        return self.depth - (self._posted - self._done)

    @property
    def busy(self) -> bool:
        """Whether any that was posted has not completed."""
        return self._posted > self._done

    def post(self, token: Token | None) -> tuple[int, int, bool]:
        """Take a slot: (slot, number of this request, whether to ask for a completion). token: what ends with it."""
        assert self.room, "the ring is full"
        slot = self._posted % self.depth
        self._posted += 1
        self._silent += 1
        signaled = token is not None or self._silent >= max(1, self.depth // 2)
        if signaled:
            self._silent = 0
        if token is not None:
            self._ends.append((self._posted, token))
        return slot, self._posted, signaled

    def complete(self, number: int) -> list[Token]:
        """What has ended with this request and those before it."""
        assert self._done < number <= self._posted, f"request {number} completed after {self._done}"
        self._done = number
        ended = []
        while self._ends and self._ends[0][0] <= number:
            ended.append(self._ends.popleft()[1])
        return ended


ReadRequest = tuple[int, int, int, int, int]  # remote address, remote key, local address, local key, size in bytes


class ReadQueuePair(Generic[Token]):
    """A queue pair that reads, its ring and its completions. Used by one thread."""

    def __init__(self, nic: Nic) -> None:
        self.nic = nic
        self._v = nic._v
        nic.acquire()
        try:
            with _translated(f"make a completion queue on {nic.port.device}"):
                self._channel, self.fd = self._make_channel()
                self._queue = self._v.CQ(nic.context, nic.depth + 1, None, self._channel, 0)
            self._pair = QueuePair(nic, self._queue, nic.depth)
        except BaseException:
            nic.release()
            raise
        self.endpoint = self._pair.endpoint
        self._entries = [self._v.SGE(0, 0, 0) for _ in range(nic.depth)]
        self._requests = []
        for entry in self._entries:
            request = self._v.SendWR(opcode=self._v.numbers.IBV_WR_RDMA_READ, num_sge=1, sg=[entry], send_flags=0)
            request.sg_list = entry  # the entry itself and not the copy that pyverbs made
            self._requests.append(request)
        self._ring: Ring[Token] = Ring(nic.depth)
        self._waiting: deque[tuple[Iterator[ReadRequest], Token]] = deque()
        self._next: ReadRequest | None = None
        self._armed = False
        self._closed = False

    def connect(self, peer: Endpoint) -> None:
        self._pair.connect(peer)

    @property
    def busy(self) -> bool:
        """Whether any read has not completed."""
        return bool(self._waiting) or self._ring.busy

    def submit(self, reads: Iterable[ReadRequest], token: Token) -> None:
        """Begin these reads, at least one, as far as the ring has room; `poll` returns the token after the last."""
        self._waiting.append((iter(reads), token))
        self._post()

    def poll(self) -> list[Token]:
        """What has been read completely since the last call; posts what waits for room. ReadFailed."""
        ended: list[Token] = []
        success = self._v.numbers.IBV_WC_SUCCESS
        while True:
            with _translated("poll for completions"):
                count, completions = self._queue.poll(COMPLETIONS_PER_POLL)
            for completion in completions:
                if completion.status != success:
                    raise ReadFailed(status_name(self._v.numbers, completion.status))
                ended += self._ring.complete(completion.wr_id)
            if count < COMPLETIONS_PER_POLL:
                break
        if self._waiting:
            self._post()
        return ended

    def arm(self) -> bool:
        """Make `fd` readable with the next completion; False: it was asked to already. True: poll before you wait, as
        the completion may have come before."""
        if self._armed:
            return False
        with _translated("ask for a completion event"):
            self._queue.req_notify()
        self._armed = True
        return True

    def take_event(self) -> None:
        """After `fd` was readable."""
        self._armed = False
        with _translated("take a completion event"):
            self._channel.get_cq_event(self._queue)
            self._queue.ack_events(1)

    def close(self) -> None:
        """No read arrives any more when this returns. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._pair.close()
        for resource_ in (self._queue, self._channel):
            with contextlib.suppress(Exception):
                resource_.close()
        self.nic.release()

    def _post(self) -> None:
        numbers = self._v.numbers
        while self._waiting and self._ring.room:
            reads, token = self._waiting[0]
            read = self._next if self._next is not None else next(reads)
            self._next = next(reads, None)
            last = self._next is None
            slot, number, signaled = self._ring.post(token if last else None)
            entry, request = self._entries[slot], self._requests[slot]
            remote, remote_key, entry.addr, entry.lkey, entry.length = read
            request.set_wr_rdma(remote_key, remote)
            request.wr_id = number
            request.send_flags = numbers.IBV_SEND_SIGNALED if signaled else 0
            with _translated("post a read"):
                self._pair.qp.post_send(request)
            if last:
                self._waiting.popleft()

    def _make_channel(self) -> tuple[Any, int]:
        with _descriptors:
            for _ in range(CHANNEL_TRIES_MAX):
                before = set() if hasattr(self._v.CompChannel, "fd") else _event_descriptors()
                channel = self._v.CompChannel(self.nic.context)
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


def open_nics(ports: Sequence[Port], make: Callable[[Port], Nic] = Nic) -> list[Nic]:
    """Those of these ports that open. VerbsError when none does."""
    nics, problems = [], []
    for port in ports:
        try:
            nics.append(make(port))
        except VerbsError as error:
            problems.append(str(error))
            _log.warning("rdma: %s is left out: %s", port, error)
    if not nics:
        raise VerbsError("; ".join(problems) or "no port was chosen")
    return nics
