"""The transport over RDMA: the reader's network card reads the source's registered memory, the source's CPU is idle.

The messages are those of tcp (stream/), on a TCP connection of its own, with segment headers that mean "ready" and no
bytes behind them. After StreamOpened the two ends agree on their queue pairs and on memory:

    reader                              source
                                <-      Rails(its ports, its memory with keys)
    Dial(queue pairs)           ->                                      none when the connection has some already
                                <-      Dialed(queue pairs)

Then the reader reads, one-sided, straight into the target slab's memory. Many reads are in flight, on all rails.

Cutting readers off
    A withdrawn offer shuts the TCP connection down. The source's serving thread destroys its queue pairs *before* it
    detaches from the offer, and `Offer.withdraw` returns after that: no read that succeeds can have seen memory its
    owner has touched since. A reader notices the closed connection at once, without waiting for retries to run out.

Reuse
    A slab is registered once and stays so while it lives. A link that ended well leaves its connection, with its queue
    pairs, to the next link to that source; the source closes the oldest idle connections when there are many.

Fallbacks
    Memory that cannot be registered at the source (a device's without peer memory and dma-buf, more than may be locked)
    passes through a ring of registered host memory there: the header of a segment contains its slot in the ring,
    and the reader sends Taken. What cannot be registered at the reader is read into such memory and copied from
    there; so is device memory, by way of the slab's own pinned buffers. Where not even a ring can be
    registered `open` raises NotServable. A source that no rail reaches is remembered for a minute. The log says so.

Configuration: TENSORHUB_RDMA_DEVICES ("mlx5_0,mlx5_1:1", in order; default: the fastest, nearest to the current CUDA
device), TENSORHUB_RDMA_GID_INDEX (default: RoCEv2 with an IPv4 address). Arguments override them.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Sequence

from tensorhub_plugins.core.device.drivers import pci_address
from tensorhub_plugins.core.errors import SourceLost, UsageError
from tensorhub_plugins.core.protocol.advertised import hosts_of
from tensorhub_plugins.core.protocol.reach import format_address
from tensorhub_plugins.core.security.leases import Gate
from tensorhub_plugins.core.transports.limits import DEFAULT_LIMITS, TransportLimits
from tensorhub_plugins.core.transports.rdma.bindings import VerbsError
from tensorhub_plugins.core.transports.rdma.link import RailConnection, RdmaLink
from tensorhub_plugins.core.transports.rdma.rails import choose_ports, find_ports, has_link
from tensorhub_plugins.core.transports.rdma.registration import Registry
from tensorhub_plugins.core.transports.rdma.source import RdmaSource
from tensorhub_plugins.core.transports.rdma.verbs import Nic, open_nics, why_not
from tensorhub_plugins.core.transports.stream.sockets import SocketTransport
from tensorhub_plugins.core.transports.stream.tcp_socket import LOOPBACK, connect, listen

DEVICES_VARIABLE = "TENSORHUB_RDMA_DEVICES"
GID_INDEX_VARIABLE = "TENSORHUB_RDMA_GID_INDEX"

_log = logging.getLogger(__name__)


class RdmaTransport(SocketTransport):
    """A transport over RDMA. advertise_host, ports: as for tcp, for the control connection. devices, gid_index: None:
    from the environment, else chosen here. limits: as for tcp; stall_s also for a read that does not complete."""

    name = "rdma"

    def __init__(
        self,
        advertise_host: str | None = None,
        *,
        ports: range | None = None,
        devices: Sequence[str] | None = None,
        gid_index: int | None = None,
        limits: TransportLimits = DEFAULT_LIMITS,
        gate: Gate | None = None,
    ) -> None:
        """Open the cards. Raise UsageError when the devices named are not usable; VerbsError stays inside."""
        super().__init__(limits, gate)
        self._hosts = hosts_of(LOOPBACK if advertise_host is None else advertise_host)
        self._ports = ports
        found, reasons = find_ports(gid_index=_configured_gid_index() if gid_index is None else gid_index)
        wanted = _configured_devices() if devices is None else devices
        chosen = choose_ports(found, wanted, _sysfs_of_device())
        try:
            self._nics = open_nics(chosen)
        except VerbsError as error:
            raise UsageError(f"no RDMA device can be used: {'; '.join([str(error), *reasons])}") from error
        _log.info("rdma: using %s", ", ".join(str(nic.port) for nic in self._nics))
        self._memory = Registry(self._nics)
        self._source = RdmaSource(self._nics, self._memory, limits)
        self._guard = threading.Lock()
        self._unreachable: dict[str, tuple[float, str]] = {}

    @staticmethod
    def available() -> str | None:
        reason = why_not()
        if reason is not None:
            return reason
        ports, reasons = find_ports(gid_index=_configured_gid_index())
        for port in choose_ports(ports, _configured_devices(), _sysfs_of_device()):
            try:
                Nic(port).close()  # a container may show a card that cannot be opened
                return None
            except VerbsError as error:
                reasons.append(str(error))
        return "; ".join(reasons) or "no device has a port"

    @staticmethod
    def expected() -> bool:
        """Return whether a card here has a link: if it is not used, that is worth a warning."""
        return has_link()

    def _listen(self) -> tuple[list[socket.socket], str]:
        listeners = listen(self._hosts, self._ports)
        return listeners, format_address(self.name, self._hosts[0], listeners[0].getsockname()[1])

    def connect(self, endpoint: str, *, deadline: float, far: bool = False) -> RdmaLink:
        endpoints = endpoint.split(",")
        with self._guard:
            self._check_open()
            until, reason = max(self._unreachable.get(each, (0.0, "")) for each in endpoints)
        if time.monotonic() < until:
            raise SourceLost(f"not reached over rdma a moment ago: {reason}", peer=endpoint, phase="connect")
        connection = self._take(endpoints)
        if connection is None:
            connection = RailConnection(connect(endpoint, self.name, stall_s=self._limits.stall_s, deadline=deadline))
        assert isinstance(connection, RailConnection)
        link = RdmaLink(self, connection, self._limits.stall_s, self._keep)
        self._add(link)
        return link

    def close(self) -> None:
        super().close()
        self._memory.clear()
        for nic in self._nics:
            nic.close()  # takes effect once the links that were cut have released it

    # --- for links ---

    @property
    def nics(self) -> list[Nic]:
        """Return the network cards in use."""
        return self._nics

    @property
    def memory(self) -> Registry:
        """Return the registrations with them."""
        return self._memory

    def unreachable(self, endpoint: str, reason: str) -> None:
        """Do not try this endpoint for `unreachable_s`: other transports are tried at once."""
        pause_s = self._limits.unreachable_s
        _log.warning("rdma: %s is not tried for %g s, other transports go on: %s", endpoint, pause_s, reason)
        with self._guard:
            self._unreachable[endpoint] = (time.monotonic() + pause_s, reason)


def _configured_devices() -> list[str] | None:
    names = [name.strip() for name in os.environ.get(DEVICES_VARIABLE, "").split(",")]
    return [name for name in names if name] or None


def _configured_gid_index() -> int | None:
    text = os.environ.get(GID_INDEX_VARIABLE, "").strip()
    if not text:
        return None
    if not text.isdecimal():
        raise UsageError(f"{GID_INDEX_VARIABLE}={text!r} is no index of a GID table")
    return int(text)


def _sysfs_of_device() -> str:
    """Return this thread's CUDA device in sysfs; "" when CUDA is not in use: nothing is initialized for this."""
    address = pci_address()
    return os.path.realpath(f"/sys/bus/pci/devices/{address}") if address else ""
