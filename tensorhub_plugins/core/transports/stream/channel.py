"""One connection of a socket transport, either end: buffers, frames, messages and open files, each with a deadline.

The kernel does the waiting: blocking sockets with SO_RCVTIMEO and SO_SNDTIMEO, which let one call move megabytes
without the GIL and without a poll before each piece. Another thread ends such a wait with shutdown().
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Sequence
from typing import TypeVar, cast

import msgspec

from tensorhub_plugins.core.errors import ProtocolError
from tensorhub_plugins.core.process_lifetime import close_in_children
from tensorhub_plugins.core.transports.stream.messages import CONTROL, FULL, HEADER, HELLO, MAGIC, PROTOCOL
from tensorhub_plugins.core.types import DECODE_ERRORS

DESCRIPTOR = b"F"
CHUNK_SIZE_BYTES = 1 << 20  # a control message is allocated as it arrives, not by its announced size
IOV_MAX = 1024  # Linux' limit of buffers in one sendmsg, recvmsg or process_vm_readv

_Buffer = TypeVar("_Buffer", bound=bytes | memoryview)
_Message = TypeVar("_Message")
_encoder = msgspec.msgpack.Encoder()


class Disconnected(Exception):
    """The other side has closed, died, or cut us off."""


class Full(Disconnected):
    """The source has said that it admits no more readers now, before it closed the connection."""


class Stranger(Disconnected):
    """The other side cannot prove that it belongs to the run."""


class Silent(Exception):
    """The other side did nothing in the time it had."""


def remaining_buffers(views: list[_Buffer], count: int) -> list[_Buffer]:
    """Return what is left of these buffers after their first `count` bytes; empty when that is all of them."""
    if count == sum(map(len, views)):  # nearly always, since the kernel waits for all
        return []
    done = 0
    while count >= len(views[done]):
        count -= len(views[done])
        done += 1
    left = views[done:]
    left[0] = cast(_Buffer, memoryview(left[0])[count:])
    return left


class Channel:
    """A connected stream socket that fills and sends lists of buffers, each call with a deadline (None: no end).

    Not thread-safe but for `cut`, which ends any wait of another thread."""

    def __init__(self, sock: socket.socket, peer: str, *, stall_s: float) -> None:
        sock.setblocking(True)
        self.sock, self.peer = sock, peer
        self.nonce = b""  # this connection's, chosen by the source
        self.waited = False  # the source had to wait for the segment of the last header
        self.kind = 0  # of the last header
        self.is_due = False  # at the reader: the answer to the last StreamFinish has not been received
        self.has_offer = False  # at the source: its reader has an offer open
        self.is_given_up = False  # its slot was given to another reader
        self._stall_s = stall_s
        self._allowed: dict[int, tuple[int, int]] = {}  # seconds and microseconds, by option
        self._guard = threading.Lock()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN | getattr(select, "POLLRDHUP", 0))
        weakref.finalize(self, sock.close).atexit = False  # a link that is dropped keeps no descriptor
        close_in_children(sock)  # the other side must notice when we die, even if a forked child lives on

    # both ends

    def send(self, views: Sequence[bytes | memoryview], deadline: float | None) -> None:
        """Send all of these bytes, straight from their memory."""
        at = 0
        while at < len(views):
            batch = list(views[at : at + IOV_MAX])
            at += len(batch)
            while batch:
                self._allow(socket.SO_SNDTIMEO, deadline)
                try:
                    count = self.sock.sendmsg(batch, [], socket.MSG_NOSIGNAL)
                except BlockingIOError:
                    raise Silent("took nothing") from None
                except OSError as error:
                    raise Disconnected(str(error)) from error
                batch = remaining_buffers(batch, count)

    def fill(self, views: Sequence[memoryview], deadline: float | None) -> None:
        """Receive exactly as many bytes as fit, straight into their place."""
        at = 0
        while at < len(views):
            batch = list(views[at : at + IOV_MAX])
            at += len(batch)
            while any(map(len, batch)):
                self._allow(socket.SO_RCVTIMEO, deadline)
                try:
                    count = self.sock.recvmsg_into(batch, 0, socket.MSG_WAITALL)[0]
                except BlockingIOError:
                    raise Silent("sent nothing") from None
                except OSError as error:
                    raise Disconnected(str(error)) from error
                if not count:
                    raise Disconnected("closed the connection")
                batch = remaining_buffers(batch, count)

    def refuse(self) -> None:
        """Say to a reader that this source is full, without waiting for anything, and close."""
        with contextlib.suppress(OSError):
            self.sock.send(HELLO.pack(MAGIC, PROTOCOL, FULL, b""), socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
        self.close()

    def send_descriptors(self, fds: Sequence[int], deadline: float) -> None:
        """Pass open files to the process at the other end of a UNIX socket, with one byte to carry them."""
        self._allow(socket.SO_SNDTIMEO, deadline)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))
        try:
            self.sock.sendmsg([DESCRIPTOR], [rights], socket.MSG_NOSIGNAL)
        except BlockingIOError:
            raise Silent("took nothing") from None
        except OSError as error:
            raise Disconnected(str(error)) from error

    def receive_descriptors(self, count: int, deadline: float) -> list[int]:
        """Receive the files that `send_descriptors` passes; the caller owns them."""
        self._allow(socket.SO_RCVTIMEO, deadline)
        room = socket.CMSG_LEN(count * struct.calcsize("i"))  # the kernel closes what does not fit
        try:
            data, ancillary, flags, _ = self.sock.recvmsg(1, room, getattr(socket, "MSG_CMSG_CLOEXEC", 0))
        except BlockingIOError:
            raise Silent("sent nothing") from None
        except OSError as error:
            raise Disconnected(str(error)) from error
        fds = [
            fd
            for level, kind, content in ancillary
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
            for fd in struct.unpack_from(f"{len(content) // struct.calcsize('i')}i", content)
        ]
        if not data:
            raise Disconnected("closed the connection")
        if data != DESCRIPTOR or len(fds) != count:
            for fd in fds:
                os.close(fd)
            if flags & socket.MSG_CTRUNC and len(fds) < count:  # they were sent, but we have none left
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            raise ProtocolError(f"{len(fds)} files came where {count} should, with the source's memory")
        return fds

    def send_message(self, message: msgspec.Struct, deadline: float | None) -> None:
        """Send one control message. Raise SourceLost at the deadline (None: none), or when the peer is gone."""
        body = _encoder.encode(message)
        self.send([HEADER.pack(CONTROL, 0, 0, len(body)), body], deadline)

    def receive_message(self, decoder: msgspec.msgpack.Decoder[_Message], limit: int, deadline: float) -> _Message:
        """Receive a frame, which must be a control message of at most `limit` bytes. Raise ProtocolError."""
        kind, _, length = self.receive_header(deadline)
        if kind != CONTROL:
            raise ProtocolError(f"a frame of kind {kind} where a message should be")
        return self.receive_rest(decoder, length, limit, deadline)

    def receive_rest(
        self, decoder: msgspec.msgpack.Decoder[_Message], length: int, limit: int, deadline: float
    ) -> _Message:
        """Receive the control message whose header was received already. Raise ProtocolError."""
        try:
            return decoder.decode(self.receive_body(length, limit, deadline))
        except DECODE_ERRORS as error:
            raise ProtocolError(f"a message that does not decode: {error}") from error

    def receive_header(self, deadline: float | None) -> tuple[int, int, int]:
        """Return (kind, segment, length) of the next frame."""
        header = bytearray(HEADER.size)
        self.fill([memoryview(header)], deadline)
        kind, waited, segment, length = HEADER.unpack(header)
        self.kind, self.waited = kind, bool(waited)
        return kind, segment, length

    def receive_request(self, begins_by: float | None, whole_s: float) -> tuple[int, int, int]:
        """Do as `receive_header` for a request that may be long in coming; once begun, it has `whole_s` to arrive."""
        header = bytearray(HEADER.size)
        self.fill([memoryview(header)[:1]], begins_by)
        self.fill([memoryview(header)[1:]], time.monotonic() + whole_s)
        kind, _, segment, length = HEADER.unpack(header)
        return kind, segment, length

    def receive_body(self, length: int, limit: int, deadline: float | None) -> bytearray:
        """Receive the rest of a control message. Bytes that are announced but never sent are never allocated."""
        if length > limit:
            raise ProtocolError(f"a message of {length} bytes is announced, the limit is {limit}")
        body = bytearray()
        while len(body) < length:
            chunk = bytearray(min(length - len(body), CHUNK_SIZE_BYTES))
            self.fill([memoryview(chunk)], deadline)
            body += chunk
        return body

    def has_input(self) -> bool:
        """Return whether reading would return at once."""
        return bool(self._poll.poll(0))

    def is_lost(self) -> bool:
        """Return whether this connection, which is at rest at the reader, is of no use any more, as far as is known."""
        return self.is_cut() or (self.has_input() and not self.is_due)

    def is_cut(self) -> bool:
        """Return whether the other side has shut down, closed or died. Known at once on the same host, whatever is
        still unread. From any thread."""
        if (descriptor := self.sock.fileno()) < 0:  # closed here
            return True
        poll = select.poll()  # its own: a poll object cannot be used by two threads at once
        poll.register(descriptor, getattr(select, "POLLRDHUP", 0))
        gone = select.POLLHUP | select.POLLERR | select.POLLNVAL | getattr(select, "POLLRDHUP", 0)
        return any(event & gone for _, event in poll.poll(0))

    def cut(self) -> None:
        """End the connection from any thread, without waiting."""
        with self._guard, contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._guard:
            self.sock.close()

    def abandon(self) -> None:
        """Close by a reset. An ordinary close with a full receive window would leave the sender waiting for a minute:
        the kernel keeps answering that there is no space."""
        with self._guard:
            with contextlib.suppress(OSError):
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.sock.close()

    def _allow(self, option: int, deadline: float | None) -> None:
        """Set how long the next system call may wait."""
        seconds = 0.0  # for ever
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise Silent("was not done")
            seconds = min(left, self._stall_s)
        whole = int(seconds)
        micros = int((seconds - whole) * 1e6)
        if deadline is not None and not whole:
            micros = max(micros, 1000)  # zero would mean for ever
        if self._allowed.get(option) == (whole, micros):  # usually the peer's whole allowance
            return
        try:
            self.sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", whole, micros))
        except OSError as error:
            raise Disconnected(str(error)) from error
        self._allowed[option] = whole, micros
