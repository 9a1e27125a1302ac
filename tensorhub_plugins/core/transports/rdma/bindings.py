"""The verbs that rdma needs, and their providers: libibverbs by ctypes, or the distribution's pyverbs.

Both use the system's own libibverbs.so.1; verbs.py and everything above it know only what is declared here. A binding's
exceptions are translated there: OSError with verbs' error number, or whatever pyverbs raises.

ctypes comes first: it needs no package beyond the library that NCCL needs too, runs in any Python, and releases the GIL
where a call takes long (registering 1 GiB: 0.1 to 0.3 s in which an engine launches no kernel). pyverbs is for systems
where that does not work, and for comparison. TENSORHUB_RDMA_BINDING=ctypes or pyverbs selects one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple, Protocol

from tensorhub_plugins.core.errors import UsageError

BINDING_VARIABLE = "TENSORHUB_RDMA_BINDING"
BINDINGS = {  # in this order
    "ctypes": "tensorhub_plugins.core.transports.rdma.libibverbs",
    "pyverbs": "tensorhub_plugins.core.transports.rdma.pyverbs_binding",
}

# verbs.h. These numbers are libibverbs' binary interface and do not change.
ACCESS_LOCAL_WRITE, ACCESS_REMOTE_READ = 1 << 0, 1 << 2
RELIABLE_CONNECTION = 2
STATE_INIT, STATE_READY_TO_RECEIVE, STATE_READY_TO_SEND, STATE_ERROR = 1, 2, 3, 6
QP_STATE = 1 << 0
RDMA_READ = 4
SEND_SIGNALED = 1 << 1
SUCCESS = 0

ACCESS = ACCESS_LOCAL_WRITE | ACCESS_REMOTE_READ
TIMEOUT = 15  # 4.096 us x 2^15 = 0.13 s until a packet is sent again
RETRIES = 6  # 0.9 s to 3.8 s until a dead peer is abandoned; 7 would be for ever
RNR_RETRIES = 6
MIN_RNR_TIMER = 12
HOP_LIMIT = 64


class VerbsError(Exception):
    """Verbs refused an operation, or a read failed; the message says why."""


class Limits(NamedTuple):
    """The limits that a device and its port report."""

    lid: int
    mtu: int  # verbs' number for it: 5 is 4096 bytes
    message_size_bytes_max: int
    requests_max: int  # of one queue pair
    completions_max: int  # of one queue
    reads_started_max: int  # by one queue pair, at the same time
    reads_served_max: int

    @classmethod
    def of(cls, port: Any, device: Any) -> Limits:
        """Return the limits that verbs report for a port and its device: both bindings name them as verbs do."""
        return cls(
            port.lid,
            port.active_mtu,
            port.max_msg_sz,
            device.max_qp_wr,
            device.max_cqe,
            device.max_qp_init_rd_atom,
            device.max_qp_rd_atom,
        )


class Way(NamedTuple):
    """The path from a queue pair to a peer's."""

    queue_pair: int
    gid: str
    lid: int
    mtu: int
    their_packet_number: int
    our_packet_number: int
    gid_index: int  # of ours
    reads_started: int
    reads_served: int


class Read(NamedTuple):
    """One read request. signaled: whether it generates a completion, which has this number."""

    number: int
    signaled: bool
    remote: int
    remote_key: int
    local: int
    local_key: int
    size_bytes: int


class Region(Protocol):
    """Registered memory, for as long as this object lives. address: the address of its first byte in reads."""

    address: int
    lkey: int
    rkey: int

    def close(self) -> None: ...


class Queue(Protocol):
    """A completion queue. fd: becomes readable with the next completion after `arm`; -1: it has no events."""

    fd: int

    def poll(self, limit: int) -> list[tuple[int, int]]:
        """Return (number, status) of at most so many completions, in their order."""

    def arm(self) -> None:
        """Have the next completion generate an event."""

    def take_event(self) -> None:
        """Consume the event after `fd` was readable."""

    def close(self) -> None: ...


class Pair(Protocol):
    """A queue pair of a reliable connection."""

    number: int

    def connect(self, way: Way) -> None: ...

    def abort(self) -> None:
        """Move it to the error state."""

    def post(self, reads: Sequence[Read]) -> None:
        """Post all of them, in this order. The objects are only read here, and may be reused."""

    def close(self) -> None: ...


class Card(Protocol):
    """An opened device, for one of its ports."""

    limits: Limits

    def register(self, address: int, size_bytes: int) -> Region: ...

    def register_dma_buf(self, fd: int, offset: int, size_bytes: int, address: int) -> Region:
        """Register a part of a dma-buf, which may be closed afterwards. address: its address in device memory."""

    def make_queue(self, depth: int, *, events: bool) -> Queue:
        """Make a queue for so many completions. events: `arm` will be called."""

    def make_pair(self, queue: Any, depth: int) -> Pair:
        """Make a queue pair. queue: this card's, for its completions. depth: how many reads may be posted at once."""

    def close(self) -> None:
        """Close it, and everything that was made from it."""


class Binding(Protocol):
    """The interface of a module that binds verbs."""

    def load(self) -> object:
        """Load the library. Raise VerbsError that says why it cannot be used here."""

    def open_card(self, device: str, port: int) -> Card:
        """Open one port of the device of this name."""


def usable() -> list[Binding]:
    """Return the usable bindings, best first. VerbsError with the reasons if there are none; UsageError: bad name."""
    chosen = os.environ.get(BINDING_VARIABLE, "")
    if chosen and chosen not in BINDINGS:
        raise UsageError(f"{BINDING_VARIABLE}={chosen!r:.80}: one of {', '.join(BINDINGS)}, or none for the best")
    found, problems = [], []
    for name in [chosen] if chosen else BINDINGS:
        binding: Any = import_module(BINDINGS[name])
        try:
            binding.load()
            found.append(binding)
        except VerbsError as error:
            problems.append(str(error))
    if not found:
        raise VerbsError("; ".join(problems))
    return found
