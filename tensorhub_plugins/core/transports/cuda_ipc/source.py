"""The source's end of cuda_ipc: it sends readers the location of its slab, and announces segments that are ready."""

from __future__ import annotations

import socket

from tensorhub_plugins.core.errors import SourceLost
from tensorhub_plugins.core.transports.cuda_ipc.driver import Ipc, NotShareable
from tensorhub_plugins.core.transports.cuda_ipc.memory import Exports
from tensorhub_plugins.core.transports.offer import Offer
from tensorhub_plugins.core.transports.stream.channel import Channel
from tensorhub_plugins.core.transports.stream.source import SourceBackend
from tensorhub_plugins.core.transports.stream.unix_socket import check_owner

READY_MAX = 4096  # segments in one message of the source


class CudaIpcSource(SourceBackend):
    """A backend that serves slabs on a device."""

    name = "cuda_ipc"

    def __init__(self, ipc: Ipc) -> None:
        self._exports = Exports(ipc)

    def accept_peer(self, sock: socket.socket) -> str:
        return f"pid {check_owner(sock)}"

    def refusal(self, offer: Offer) -> str | None:
        try:
            self._exports.of(offer.slab)
        except NotShareable as error:
            return str(error)
        return None

    def send_memory(self, channel: Channel, offer: Offer, deadline: float, *, lends: bool = False) -> None:
        try:
            exported = self._exports.of(offer.slab)
        except NotShareable as error:  # it has been moved or closed since
            raise SourceLost(str(error), version=offer.version) from error
        channel.send_message(exported.memory, deadline)
        channel.send_descriptors([exported.owner_liveness_fd], deadline)

    def ready_batch_max(self, channel: Channel) -> int:
        return READY_MAX

    def on_reader_done(self, channel: Channel, *, ended: bool) -> None:
        if ended:
            channel.cut()  # before its memory is reused: a reader that still copies from it detects that
