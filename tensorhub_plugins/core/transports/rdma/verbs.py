"""Memory, queue pairs and reads over whichever binding to verbs is available (bindings.py).

Facts about reliable connections
    An error anywhere moves the queue pair to its error state for good, and everything behind it is flushed.
    retry_cnt 7 means for ever in soft-RoCE. A peer that is gone shows as RETRY_EXC_ERR after `TIMEOUT` x retries.
    Destroying a queue pair is synchronous: afterwards it neither writes into our memory nor serves it to a peer.
    A memory region does not keep its memory alive: `Registration` does.
    Nothing waits inside verbs. A waiting thread polls the completion channel's file descriptor.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from tensorhub_plugins.core.device.devices import Device
from tensorhub_plugins.core.process_lifetime import limits_of
from tensorhub_plugins.core.transports.rdma import bindings
from tensorhub_plugins.core.transports.rdma.bindings import Card, Queue, Read, VerbsError, Way
from tensorhub_plugins.core.transports.rdma.bindings import Region as Registered
from tensorhub_plugins.core.transports.rdma.rails import SYSFS, Port

RING_DEPTH = 128  # reads of at most READ_SIZE_BYTES_MAX in flight on one queue pair
READ_SIZE_BYTES_MAX = 1 << 20  # several in flight keep a wire busy; one lost packet repeats no more than this
COMPLETIONS_PER_POLL = 32
READS_OUTSTANDING_MAX = 16  # what current network cards allow a queue pair; the field holds 255

_log = logging.getLogger(__name__)
Token = TypeVar("Token")

# enum ibv_wc_status
STATUSES = (
    "SUCCESS", "LOC_LEN_ERR", "LOC_QP_OP_ERR", "LOC_EEC_OP_ERR", "LOC_PROT_ERR", "WR_FLUSH_ERR", "MW_BIND_ERR",
    "BAD_RESP_ERR", "LOC_ACCESS_ERR", "REM_INV_REQ_ERR", "REM_ACCESS_ERR", "REM_OP_ERR", "RETRY_EXC_ERR",
    "RNR_RETRY_EXC_ERR", "LOC_RDD_VIOL_ERR", "REM_INV_RD_REQ_ERR", "REM_ABORT_ERR", "INV_EECN_ERR",
    "INV_EEC_STATE_ERR", "FATAL_ERR", "RESP_TIMEOUT_ERR", "GENERAL_ERR",
)  # fmt: skip
_MEANING = {
    "REM_ACCESS_ERR": " (the source has closed that memory, or never offered it)",
    "RETRY_EXC_ERR": " (the source does not answer any more)",
    "WR_FLUSH_ERR": " (the queue pair was moved to its error state)",
    "LOC_PROT_ERR": " (our own memory is not registered)",
}


class ReadFailed(VerbsError):
    """A completion with an error, after which the queue pair is unusable. status: verbs' name for it."""

    def __init__(self, status: str) -> None:
        super().__init__(f"a read ended with {status}{_MEANING.get(status, '')}")
        self.status = status


class Endpoint(msgspec.Struct, frozen=True, array_like=True):
    """The data that the other end of a queue pair needs to connect to it."""

    queue_pair: int
    packet_number: int
    gid: str
    lid: int
    mtu: int
    reads_served: int  # outstanding reads it can answer


# --- is it there? ---


def why_not(sysfs: Path = SYSFS) -> str | None:
    """Return None where verbs can be used; else the reason. Nothing is loaded where there is no device."""
    if not sysfs.is_dir() or not any(sysfs.iterdir()):
        return f"there is no RDMA device ({sysfs} is missing or empty)"
    try:
        bindings.usable()
    except VerbsError as error:
        return str(error)
    return None


def status_name(status: int) -> str:
    """Return verbs' name for a request's completion status."""
    return STATUSES[status] if 0 <= status < len(STATUSES) else f"status {status}"


@contextlib.contextmanager
def _translated(doing: str) -> Iterator[None]:
    try:
        yield
    except VerbsError:
        raise
    except Exception as error:  # OSError; pyverbs also raises its own class, and sometimes ValueError and TypeError
        # Without its cause: what verbs refuse is no lack of this process (resources.refusal), other transports go on.
        raise VerbsError(f"cannot {doing}: {_in_words(error)}") from None


def _in_words(error: Exception) -> str:
    code = getattr(error, "error_code", None) or getattr(error, "errno", None)
    text = getattr(error, "strerror", None) or (str(error).splitlines() or [type(error).__name__])[0]
    if code == errno.ENOMEM or "Cannot allocate memory" in text:
        limit = limits_of(resource.RLIMIT_MEMLOCK)[0]
        if limit != resource.RLIM_INFINITY:
            text += (
                f"; this process may lock {limit >> 10} KiB of memory: raise `ulimit -l` (in a container, its memlock)"
            )
    return text


# --- memory ---


class Memory:
    """A registered range. address: the address of its first byte in reads. how: in words, for the log."""

    def __init__(self, region: Registered, how: str) -> None:
        self._region, self.how = region, how
        self.address, self.lkey, self.rkey = region.address, region.lkey, region.rkey

    def close(self) -> None:
        self._region.close()


# --- one device ---


class Nic:
    """One port of a device, opened, and the domain that its memory and queue pairs live in.

    `close` takes effect when the last queue pair has been closed, so that no thread polls a queue that is gone."""

    def __init__(self, port: Port) -> None:
        """Open the device. Raise VerbsError when that fails."""
        self.port = port
        self._guard = threading.Lock()
        self._users = 0
        self._closing = False
        with _translated(f"open {port.device}"):
            self.card = _open_card(port)
            limits = self.card.limits
            self.lid, self.mtu = limits.lid, limits.mtu
            self.read_size_bytes_max = min(READ_SIZE_BYTES_MAX, limits.message_size_bytes_max)
            self.reads_started = min(READS_OUTSTANDING_MAX, limits.reads_started_max)
            self.reads_served = min(READS_OUTSTANDING_MAX, limits.reads_served_max)
            self.depth = min(RING_DEPTH, limits.requests_max, limits.completions_max - 1)
            try:
                # For queue pairs that only answer: they have no completions, but verbs requires a queue.
                self.idle_queue = self.card.make_queue(1, events=False)
            except BaseException:
                self.card.close()
                raise

    def register(self, address: int, size_bytes: int, owner: Device | None = None) -> Memory:
        """Register memory that peers may read and we may read into. owner: the device it is on. Raise VerbsError.

        Device memory is registered like any other where peer memory is available (nvidia-peermem), else as a dma-buf.
        """
        self.acquire()
        try:
            with _translated(f"register {size_bytes} bytes with {self.port.device}"):
                region = self.card.register(address, size_bytes)
                return Memory(region, "as it is" if owner is None else "by peer memory")
        except VerbsError as error:
            if owner is None:
                raise
            return self._register_dma_buf(address, size_bytes, owner, str(error))
        finally:
            self.release()

    def _register_dma_buf(self, address: int, size_bytes: int, owner: Device, why: str) -> Memory:
        with _translated(f"register {size_bytes} bytes of {owner.name} with {self.port.device}: {why}; as a dma-buf"):
            fd, offset = owner.export_dma_buf(address, size_bytes)
            try:
                region = self.card.register_dma_buf(fd, offset, size_bytes, address)
            finally:
                os.close(fd)  # the region holds the dma-buf itself
            return Memory(region, "through dma-buf")

    def acquire(self) -> None:
        """Keep the card open for one more user. Raise VerbsError when the transport was closed."""
        with self._guard:
            if self._closing:
                raise VerbsError("the transport was closed")
            self._users += 1

    def release(self) -> None:
        """Remove one user; the last one closes the card, if the transport was closed."""
        with self._guard:
            self._users -= 1
            last = self._closing and not self._users
        if last:
            self._close()

    def close(self) -> None:
        """Close the card, once it has no user. Idempotent."""
        with self._guard:
            if self._closing:
                return
            self._closing = True
            last = not self._users
        if last:
            self._close()

    def _close(self) -> None:
        with contextlib.suppress(Exception):
            self.card.close()  # and with it everything made from it


def _open_card(port: Port) -> Card:
    """Open the card by the first binding that can. Raise VerbsError."""
    problems = []
    for binding in bindings.usable():
        try:
            return binding.open_card(port.device, port.number)
        except Exception as error:
            problems.append(_in_words(error))
    raise VerbsError(f"cannot open {port.device}: {'; '.join(problems)}")


class QueuePair:
    """One end of a reliable connection; the source's ends are only this."""

    def __init__(self, nic: Nic, queue: Queue | None = None, depth: int = 1) -> None:
        """Make a queue pair. queue: for completions; None for an end that only answers."""
        self.nic = nic
        self._closed = False
        self._guard = threading.Lock()
        nic.acquire()
        try:
            with _translated(f"make a queue pair on {nic.port.device}"):
                self._pair = nic.card.make_pair(nic.idle_queue if queue is None else queue, depth)
        except BaseException:
            nic.release()
            raise
        packet_number = secrets.randbits(24)
        self.endpoint = Endpoint(self._pair.number, packet_number, nic.port.gid, nic.lid, nic.mtu, nic.reads_served)

    def connect(self, peer: Endpoint) -> None:
        """Make it ready to read from and be read by this peer, which has to do the same. Nothing is sent."""
        nic = self.nic
        way = Way(
            queue_pair=peer.queue_pair,
            gid=peer.gid,
            lid=peer.lid,
            mtu=min(nic.mtu, peer.mtu),
            their_packet_number=peer.packet_number,
            our_packet_number=self.endpoint.packet_number,
            gid_index=nic.port.gid_index,
            reads_started=max(1, min(nic.reads_started, peer.reads_served)),
            reads_served=nic.reads_served,
        )
        with _translated(f"connect a queue pair of {nic.port.device} to {peer.gid}"):
            self._pair.connect(way)

    def post(self, reads: Sequence[Read]) -> None:
        """Begin these reads. Raise VerbsError."""
        with _translated("post reads"):
            self._pair.post(reads)

    def abort(self) -> None:
        """Move it to the error state: nothing is served or received over it any more. From any thread; idempotent."""
        with self._guard:
            if not self._closed:
                with contextlib.suppress(Exception):
                    self._pair.abort()

    def close(self) -> None:
        """Destroy it, by way of the error state: when this returns, the device touches no memory for it. Idempotent."""
        self.abort()
        with self._guard:
            if self._closed:
                return
            self._closed = True
            try:
                with contextlib.suppress(Exception):
                    self._pair.close()
            finally:
                self.nic.release()


# --- reading ---


class Ring(Generic[Token]):
    """The free slots of a queue pair's send queue, and the reads that each completion ends.

    Only some requests ask for a completion: the last of each read that a caller waits for, and one whenever half the
    ring has been posted without. Completions of one queue pair come in order, so one stands for all before it."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._posted = 0
        self._done = 0
        self._silent = 0  # posted since the last one that asks for a completion
        self._ends: deque[tuple[int, Token]] = deque()

    @property
    def room(self) -> int:
        """Return how many more may be posted."""
        return self.depth - (self._posted - self._done)

    @property
    def busy(self) -> bool:
        """Return whether any that was posted has not completed."""
        return self._posted > self._done

    def post(self, token: Token | None) -> tuple[int, bool]:
        """Take a slot; return (number of this request, whether to ask for a completion). token: what ends with it."""
        if not self.room:
            raise AssertionError("the ring is full")
        self._posted += 1
        self._silent += 1
        signaled = token is not None or self._silent >= max(1, self.depth // 2)
        if signaled:
            self._silent = 0
        if token is not None:
            self._ends.append((self._posted, token))
        return self._posted, signaled

    def complete(self, number: int) -> list[Token]:
        """Return the tokens that end with this request and those before it."""
        if not self._done < number <= self._posted:
            raise AssertionError(f"request {number} completed after {self._done}")
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
        nic.acquire()
        try:
            with _translated(f"make a completion queue on {nic.port.device}"):
                self._queue = nic.card.make_queue(nic.depth + 1, events=True)
            self._pair = QueuePair(nic, self._queue, nic.depth)
        except BaseException:
            nic.release()
            raise
        self.fd = self._queue.fd
        self.endpoint = self._pair.endpoint
        self._ring: Ring[Token] = Ring(nic.depth)
        self._waiting: deque[tuple[Iterator[ReadRequest], Token]] = deque()
        self._next: ReadRequest | None = None
        self._armed = False
        self._closed = False

    def connect(self, peer: Endpoint) -> None:
        self._pair.connect(peer)

    @property
    def busy(self) -> bool:
        """Return whether any read has not completed."""
        return bool(self._waiting) or self._ring.busy

    def submit(self, reads: Iterable[ReadRequest], token: Token) -> None:
        """Begin these reads, at least one, as far as the ring has room; `poll` returns the token after the last."""
        self._waiting.append((iter(reads), token))
        self._post()

    def poll(self) -> list[Token]:
        """Return the tokens of reads completed since the last call; post waiting ones. Raise ReadFailed."""
        ended: list[Token] = []
        while True:
            with _translated("poll for completions"):
                completions = self._queue.poll(COMPLETIONS_PER_POLL)
            for number, status in completions:
                if status != bindings.SUCCESS:
                    raise ReadFailed(status_name(status))
                ended += self._ring.complete(number)
            if len(completions) < COMPLETIONS_PER_POLL:
                break
        if self._waiting:
            self._post()
        return ended

    def arm(self) -> bool:
        """Make `fd` readable with the next completion. Return False if that was requested already; True: poll before
        waiting, as the completion may have come before."""
        if self._armed:
            return False
        with _translated("ask for a completion event"):
            self._queue.arm()
        self._armed = True
        return True

    def take_event(self) -> None:
        self._armed = False
        with _translated("take a completion event"):
            self._queue.take_event()

    def close(self) -> None:
        """Close it: when this returns no read arrives any more. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._pair.close()
        with contextlib.suppress(Exception):
            self._queue.close()
        self.nic.release()

    def _post(self) -> None:
        batch: list[Read] = []
        while self._waiting and self._ring.room:
            reads, token = self._waiting[0]
            read = self._next if self._next is not None else next(reads)
            self._next = next(reads, None)
            last = self._next is None
            batch.append(Read(*self._ring.post(token if last else None), *read))
            if last:
                self._waiting.popleft()
        if batch:
            self._pair.post(batch)


def open_nics(ports: Sequence[Port], make: Callable[[Port], Nic] = Nic) -> list[Nic]:
    """Return those of these ports that open. Raise VerbsError when none does."""
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
