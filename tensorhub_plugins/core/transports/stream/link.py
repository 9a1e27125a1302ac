"""The conversation that the socket transports (tcp, shm) share, and both its ends.

    reader                              source
    HELLO magic, version        ->
                                <-      HELLO magic, version
    Open(shard)                 ->
                                <-      Opened(epoch, manifest) or Refused(reason); shm: its file, or its addresses
    Read(segment runs, seconds) ->      (any number, without waiting for what was asked for before)
                                <-      for each segment, once it is ready: SEGMENT header, then its bytes; shm, for all
                                        that are ready: READY header (the first of them, how many);
                                        ALIVE now and then while the source itself waits; Refused when it gives up
    Finish()                    ->
                                <-      Finished(current)

Everything after the HELLO is a frame: a 16-byte header (kind, segment, length) and `length` bytes. Control messages are
msgpack arrays whose types msgspec checks. A withdrawn offer has no message: the source shuts the connection down, which
no queue can delay. So does whoever meets something it does not understand.

Waiting is done by the kernel: blocking sockets with SO_RCVTIMEO and SO_SNDTIMEO, which let one call move megabytes
without the GIL and without a poll before each piece. Another thread ends such a wait with shutdown().
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar, Literal, TypeAlias, TypeVar, cast

import msgspec

from tensorhub_plugins.core.errors import ProtocolError, SourceLost, TensorHubError, UsageError, VersionGone
from tensorhub_plugins.core.manifest import (
    Manifest,
)
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.transports.interface import LinkProgress, More, NotServable, Shelf, find_offer
from tensorhub_plugins.core.transports.offer import Offer
from tensorhub_plugins.core.transports.read_plan import Placement, ReadPlan, check_segments, runs_of
from tensorhub_plugins.core.types import (
    ShardKey,
)

MAGIC = b"TENSORHB"
PROTOCOL = 4
HELLO = struct.Struct("!8sHH")  # magic, protocol version, 0
# Kind, 1: the source had to wait for it, segment, length of what follows in bytes (READY: how many segments).
HEADER = struct.Struct("!BBxxIQ")
CONTROL, SEGMENT, ALIVE, READY = 1, 2, 3, 4
DESCRIPTOR = b"F"
NO_MANIFEST = msgspec.msgpack.encode(None)

REQUEST_SIZE_BYTES_MAX = 4 << 20  # every second segment of a 1 TB shard named one by one is 2 MB
REPLY_SIZE_BYTES_MAX = 256 << 20  # a manifest: about 100 bytes a tensor, 16 a segment
CHUNK_SIZE_BYTES = 1 << 20  # a control message is allocated as it arrives, not as it is announced
IOV_MAX = 1024  # Linux' limit of buffers in one sendmsg, recvmsg or process_vm_readv
CONNECTIONS_MAX = 256  # threads of one source; the hub spreads readers long before
BACKLOG = 128
HELLO_S_MAX = 10.0  # a peer introduces itself at once, or is none
READ_S_MAX = 3600.0  # whatever a reader asks for
SEND_STALL_S_MAX = 60.0  # a reader that takes nothing for so long has lost the connection, not only its turn
ALIVE_S = 0.25  # how often a waiting source says that it lives; below what a reader takes for slow
VANISHED_S = 0.25  # how soon a waiting source notices that its reader has gone
STALL_S = 10.0  # default: a source that says nothing for so long is frozen or unreachable
CLOSE_S_MAX = 5.0  # threads that were cut off only have to leave one system call

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]

_log = logging.getLogger(__name__)


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class Open(_Message, frozen=True):
    key: ShardKey
    lease: Count
    brief: bool = False  # a further stream of the same reader has the manifest already
    by_address: bool = False  # shm: it can read this process's memory itself


class Read(_Message, frozen=True):
    runs: Annotated[list[tuple[Count, Count]], msgspec.Meta(max_length=1 << 20)]  # of segments, [start, stop)
    seconds: Annotated[float, msgspec.Meta(ge=0)]  # until the reader's deadline


class Finish(_Message, frozen=True):
    pass


Request: TypeAlias = Open | Read | Finish


class Opened(_Message, frozen=True):
    epoch: Count
    manifest: msgspec.Raw  # Manifest.encoded; NO_MANIFEST: brief
    addresses: bytes | None = None  # shm: where its bytes lie in the source's memory; None: what is handed over follows


class Refused(_Message, frozen=True):
    reason: Literal["gone", "not servable", "late"]
    message: Text


class Finished(_Message, frozen=True):
    current: bool


Reply: TypeAlias = Opened | Refused | Finished
_Expected = TypeVar("_Expected", Opened, Finished)
_Buffer = TypeVar("_Buffer", bound=bytes | memoryview)

_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)


class Disconnected(Exception):
    """The other side has closed, died, or cut us off."""


class Silent(Exception):
    """The other side did nothing in the time it had."""


def rest(views: list[_Buffer], count: int) -> list[_Buffer]:
    """What is left of these buffers after their first `count` bytes; empty when that is all of them."""
    if count == sum(map(len, views)):  # nearly always, since the kernel waits for all
        return []
    done = 0
    while count >= len(views[done]):
        count -= len(views[done])
        done += 1
    left = views[done:]
    left[0] = cast(_Buffer, memoryview(left[0])[count:])
    return left


# --- one connection, either end ---


class Channel:
    """A connected stream socket that fills and sends lists of buffers, each call with a deadline (None: no end).

    Not thread-safe but for `cut`, which ends whatever wait another thread is in.
    """

    def __init__(self, sock: socket.socket, peer: str, *, stall_s: float) -> None:
        sock.setblocking(True)
        self.sock = sock
        self.peer = peer
        self.waited = False  # the source had to wait for the segment whose header came last
        self._stall_s = stall_s
        self._allowed: dict[int, tuple[int, int]] = {}  # seconds and microseconds, by option
        self._guard = threading.Lock()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN | getattr(select, "POLLRDHUP", 0))

    # both ends

    def send(self, views: Sequence[bytes | memoryview], deadline: float | None) -> None:
        """Send all of these bytes, straight from where they are."""
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
                batch = rest(batch, count)

    def fill(self, views: Sequence[memoryview], deadline: float | None) -> None:
        """Receive exactly as many bytes as fit, straight to where they belong."""
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
                batch = rest(batch, count)

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
        """The files that `send_descriptors` passes; the caller owns them."""
        self._allow(socket.SO_RCVTIMEO, deadline)
        room = socket.CMSG_LEN(count * struct.calcsize("i"))  # the kernel closes what does not fit
        try:
            data, ancillary, _, _ = self.sock.recvmsg(1, room, getattr(socket, "MSG_CMSG_CLOEXEC", 0))
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
            raise ProtocolError(f"{len(fds)} files came where {count} should, with the source's memory")
        return fds

    def send_message(self, message: Request | Reply, deadline: float | None) -> None:
        body = _encoder.encode(message)
        self.send([HEADER.pack(CONTROL, 0, 0, len(body)), body], deadline)

    def receive_header(self, deadline: float | None) -> tuple[int, int, int]:
        """(kind, segment, length) of the next frame."""
        header = bytearray(HEADER.size)
        self.fill([memoryview(header)], deadline)
        kind, waited, segment, length = HEADER.unpack(header)
        self.waited = bool(waited)
        return kind, segment, length

    def receive_body(self, length: int, limit: int, deadline: float | None) -> bytearray:
        """The rest of a control message. What a liar announces and does not send is never allocated."""
        if length > limit:
            raise ProtocolError(f"a message of {length} bytes is announced, the limit is {limit}")
        body = bytearray()
        while len(body) < length:
            chunk = bytearray(min(length - len(body), CHUNK_SIZE_BYTES))
            self.fill([memoryview(chunk)], deadline)
            body += chunk
        return body

    def has_input(self) -> bool:
        """Would reading return at once?"""
        return bool(self._poll.poll(0))

    def is_cut(self) -> bool:
        """Has the other side shut down, closed or died? Known at once on the same host, whatever is still unread."""
        gone = select.POLLHUP | select.POLLERR | select.POLLNVAL | getattr(select, "POLLRDHUP", 0)
        return any(event & gone for _, event in self._poll.poll(0))

    def cut(self) -> None:
        """End the connection from any thread, without waiting."""
        with self._guard, contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._guard:
            self.sock.close()

    def _allow(self, option: int, deadline: float | None) -> None:
        """How long the next system call may wait."""
        seconds = 0.0  # for ever
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise Silent("the deadline passed")
            seconds = min(left, self._stall_s)
        whole = int(seconds)
        micros = int((seconds - whole) * 1e6)
        if deadline is not None and not whole:
            micros = max(micros, 1000)  # zero would mean for ever
        if self._allowed.get(option) == (whole, micros):  # usually all that a peer may stay silent
            return
        try:
            self.sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", whole, micros))
        except OSError as error:
            raise Disconnected(str(error)) from error
        self._allowed[option] = whole, micros


# --- the source's end ---


class Dialect:
    """What a transport does its own way at the source."""

    name: ClassVar[str]

    def welcome(self, sock: socket.socket) -> str:
        """Prepare an accepted socket and name the peer; ProtocolError when it is not welcome."""
        raise NotImplementedError

    def refusal(self, offer: Offer) -> str | None:
        """Why this transport cannot serve this offer; None: it can."""
        raise NotImplementedError

    def addresses(self, offer: Offer) -> bytes | None:
        """For a reader that reads this process's memory itself, and then gets nothing else; None: it cannot."""
        return None

    def hand_over(self, channel: Channel, offer: Offer, deadline: float) -> None:
        """What follows an Opened message."""
        raise NotImplementedError

    def payload(self, channel: Channel, offer: Offer, start: int, stop: int, deadline: float) -> list[memoryview]:
        """The bytes that follow a segment's header; what else it takes until a segment is ready, where none do."""
        raise NotImplementedError

    def at_once(self, channel: Channel) -> int:
        """How many segments this reader is told of by one READY; 0: it is sent their bytes."""
        return 0

    def sent(self, channel: Channel, deadline: float) -> None:
        """Everything that was asked for has been sent."""

    def let_go(self, channel: Channel, *, ended: bool) -> None:
        """The reader is done with what was handed over (ended: and with the connection). Memory may change after it."""

    def close(self) -> None:
        """No reader will come any more, and none is left."""


class Server:
    """Accepts connections and serves a shelf, one thread for each: a slow reader delays nobody else."""

    def __init__(self, listener: socket.socket, shelf: Shelf, dialect: Dialect) -> None:
        self._listener = listener
        self._shelf = shelf
        self._dialect = dialect
        self._guard = threading.Lock()
        self._connections: dict[Channel, threading.Thread] = {}
        self._closing = threading.Event()
        self._wake_out, self._wake_in = socket.socketpair()
        listener.setblocking(False)
        self._acceptor = threading.Thread(target=self._accept, name=f"tensorhub-{dialect.name}-accept", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """Idempotent; returns when all threads have ended."""
        with self._guard:
            if self._closing.is_set():
                return
            self._closing.set()
        self._wake_in.send(b"x")
        self._acceptor.join()
        with self._guard:
            connections = dict(self._connections)
        for channel in connections:
            channel.cut()
        deadline = time.monotonic() + CLOSE_S_MAX
        for thread in connections.values():
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                _log.error("%s: thread %s does not end", self._dialect.name, thread.name)
        for sock in (self._listener, self._wake_in, self._wake_out):
            sock.close()
        self._dialect.close()

    def _accept(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(self._wake_out, select.POLLIN)
        while not self._closing.is_set():
            poll.poll()
            if self._closing.is_set():
                return
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, ConnectionError):
                continue
            except OSError as error:  # out of descriptors, say: it may pass
                _log.error("%s: cannot accept a reader: %s", self._dialect.name, error)
                self._closing.wait(VANISHED_S)
                continue
            self._begin(sock)

    def _begin(self, sock: socket.socket) -> None:
        try:
            peer = self._dialect.welcome(sock)
        except (OSError, ProtocolError) as error:
            _log.warning("%s: refused a connection: %s", self._dialect.name, error)
            sock.close()
            return
        channel = Channel(sock, peer, stall_s=SEND_STALL_S_MAX)
        thread = threading.Thread(
            target=self._serve, args=(channel,), name=f"tensorhub-{self._dialect.name}-{peer}", daemon=True
        )
        with self._guard:
            full = len(self._connections) >= CONNECTIONS_MAX
            if not full:
                self._connections[channel] = thread
        if full:
            _log.warning("%s: refused %s: %d readers are connected", self._dialect.name, peer, CONNECTIONS_MAX)
            channel.close()
            return
        thread.start()

    def _serve(self, channel: Channel) -> None:
        name = self._dialect.name
        try:
            _Conversation(channel, self._shelf, self._dialect).run()
        except Disconnected as reason:
            _log.debug("%s: %s has gone: %s", name, channel.peer, reason)
        except SourceLost as error:  # withdrawn, or late itself
            _log.info("%s: closed the connection of %s: %s", name, channel.peer, error)
        except Silent as reason:
            _log.warning("%s: closed the connection of %s: it %s in time", name, channel.peer, reason)
        except TensorHubError as error:
            _log.warning("%s: closed the connection of %s: %s", name, channel.peer, error)
        except Exception:
            _log.exception("%s: serving %s failed", name, channel.peer)
        finally:
            channel.close()
            with self._guard:
                del self._connections[channel]


class _Conversation:
    """One reader's connection at the source: at most one offer open at a time."""

    def __init__(self, channel: Channel, shelf: Shelf, dialect: Dialect) -> None:
        self._channel = channel
        self._shelf = shelf
        self._dialect = dialect
        self._offer: Offer | None = None
        self._reader = -1

    def run(self) -> None:
        """Answer until the reader goes. Raises what ended it."""
        channel = self._channel
        deadline = time.monotonic() + HELLO_S_MAX
        greeting = bytearray(HELLO.size)
        channel.fill([memoryview(greeting)[: len(MAGIC)]], deadline)
        if greeting[: len(MAGIC)] != MAGIC:  # said before more is awaited: a stranger may have no more to say
            raise ProtocolError(f"its first bytes are {bytes(greeting[: len(MAGIC)])!r}: no reader of ours")
        channel.fill([memoryview(greeting)[len(MAGIC) :]], deadline)
        channel.send([HELLO.pack(MAGIC, PROTOCOL, 0)], deadline)
        check_hello(greeting)
        try:
            while True:
                self._answer(self._receive())
        finally:
            self._release(ended=True)

    def _receive(self) -> Request:
        kind, _, length = self._channel.receive_header(
            None
        )  # between reads a reader may be silent; keepalive finds the dead
        if kind != CONTROL:
            raise ProtocolError(f"a frame of kind {kind} where a request should be")
        body = self._channel.receive_body(length, REQUEST_SIZE_BYTES_MAX, time.monotonic() + HELLO_S_MAX)
        try:
            request: Request = _requests.decode(body)
            return request
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"a request that does not decode: {error}") from error

    def _answer(self, request: Request) -> None:
        deadline = time.monotonic() + SEND_STALL_S_MAX
        match request:
            case Open():
                self._open(request, deadline)
            case Read():
                self._read(request)
            case Finish():
                current = self._offer is not None and not self._offer.withdrawn
                self._release()
                self._channel.send_message(Finished(current), deadline)

    def _open(self, request: Open, deadline: float) -> None:
        self._release()
        try:
            offer, addresses = self._begin(request)
        except VersionGone as error:
            self._channel.send_message(Refused("gone", error.message), deadline)
            return
        except NotServable as error:
            self._channel.send_message(Refused("not servable", error.message), deadline)
            return
        _log.debug("%s: %s opens %s, lease %d", self._dialect.name, self._channel.peer, offer.key, request.lease)
        manifest = NO_MANIFEST if request.brief else offer.manifest.encoded
        self._channel.send_message(Opened(offer.epoch, msgspec.Raw(manifest), addresses), deadline)
        if not request.brief and addresses is None:
            self._dialect.hand_over(self._channel, offer, deadline)

    def _begin(self, request: Open) -> tuple[Offer, bytes | None]:
        """Attach to the offer; its addresses if it is read by them. VersionGone, NotServable."""
        key, lease = request.key, request.lease
        offer = find_offer(self._shelf, key, lease, self._check_reader)
        slab = offer.slab
        addresses = self._dialect.addresses(offer) if request.by_address else None
        reason = self._dialect.refusal(offer) if addresses is None else None
        if reason is not None:
            raise NotServable(reason)
        self._reader = offer.attach(self._channel.cut)
        self._offer = offer
        if addresses is not None and offer.slab is not slab:  # it moved before we were counted among its readers
            addresses = self._dialect.addresses(offer)
        return offer, addresses

    def _check_reader(self) -> None:
        if self._channel.is_cut():
            raise Disconnected("went away while it waited")

    def _read(self, request: Read) -> None:
        offer = self._offer
        if offer is None:
            raise ProtocolError("a read before anything was opened")
        count = offer.manifest.segment_count
        if any(not start < stop <= count for start, stop in request.runs):
            raise ProtocolError(f"a read of segments {request.runs[:4]}..., the shard has {count}")
        deadline = time.monotonic() + min(request.seconds, READ_S_MAX)
        at_once = self._dialect.at_once(self._channel)
        for start, stop in request.runs:
            segment = start
            while segment < stop:
                waited = self._await(offer, segment, deadline)
                payload = self._payload(offer, segment, deadline)
                if not at_once:
                    header = HEADER.pack(SEGMENT, waited, segment, sum(map(len, payload)))
                    self._channel.send([header, *payload], deadline)
                    segment += 1
                    continue
                first, segment = segment, segment + 1
                while segment < min(stop, first + at_once) and offer.poll_ready(segment, 0.0):
                    self._payload(offer, segment, deadline)
                    segment += 1
                self._channel.send([HEADER.pack(READY, waited, first, segment - first)], deadline)
        self._dialect.sent(self._channel, deadline)

    def _payload(self, offer: Offer, segment: int, deadline: float) -> list[memoryview]:
        return self._dialect.payload(self._channel, offer, *offer.manifest.segment_range(segment), deadline)

    def _await(self, offer: Offer, segment: int, deadline: float) -> bool:
        """Until the segment is ready, with a sign of life now and then; whether that took time. SourceLost when
        withdrawn."""
        if offer.poll_ready(segment, 0.0):
            return False
        alive_at = time.monotonic() + ALIVE_S
        while not offer.poll_ready(segment, min(deadline, time.monotonic() + VANISHED_S)):
            now = time.monotonic()
            self._check_reader()
            if now >= deadline:
                message = f"segment {segment} has not reached its source itself"
                self._channel.send_message(Refused("late", message), now + VANISHED_S)
                raise SourceLost(message, version=offer.version, peer=self._channel.peer, phase="wait")
            if now >= alive_at:
                self._channel.send([HEADER.pack(ALIVE, 0, 0, 0)], deadline)
                alive_at = now + ALIVE_S
        return True

    def _release(self, *, ended: bool = False) -> None:
        offer, self._offer = self._offer, None
        try:
            self._dialect.let_go(self._channel, ended=ended)
        finally:
            if offer is not None:
                offer.detach(self._reader)


# --- the reader's end ---


def greet(sock: socket.socket, peer: str, *, stall_s: float, deadline: float) -> Channel:
    """Introduce ourselves on a connected socket, which is closed if that fails. SourceLost, ProtocolError."""
    channel = Channel(sock, peer, stall_s=stall_s)
    try:
        with translated(peer, None, "connect", deadline):
            channel.send([HELLO.pack(MAGIC, PROTOCOL, 0)], deadline)
            greeting = bytearray(HELLO.size)
            channel.fill([memoryview(greeting)], deadline)
            check_hello(greeting)
    except BaseException:
        channel.close()
        raise
    return channel


def check_hello(greeting: bytearray) -> None:
    magic, version, _ = HELLO.unpack(greeting)
    if magic != MAGIC:
        raise ProtocolError(f"its first bytes are {magic!r}: this is no weight transfer of ours")
    if version != PROTOCOL:
        raise ProtocolError(
            f"it speaks transfer protocol {version}, this side {PROTOCOL}: install the same release on both"
        )


@contextlib.contextmanager
def translated(peer: str, version: int | None, phase: str, deadline: float) -> Iterator[None]:
    """The seam: what happens to a connection becomes SourceLost, with all that is known about it."""
    try:
        yield
    except Disconnected as error:
        raise SourceLost(f"the source went away: {error}", version=version, peer=peer, phase=phase) from error
    except Silent as error:
        left = deadline - time.monotonic()
        how = "by the deadline" if left <= 0 else "for too long, it is frozen or unreachable"
        raise SourceLost(f"the source {error} {how}", version=version, peer=peer, phase=phase) from error
    except TensorHubError as error:
        if error.peer is None:
            raise type(error)(error.message, version=version, peer=peer, phase=phase) from error
        raise


class SocketLink:
    """What the links of tcp and shm have in common. The first channel is opened in full, the others follow it."""

    def __init__(self, channels: Sequence[Channel]) -> None:
        self._channels = list(channels)
        self._peer = channels[0].peer
        self._version: int | None = None
        self._manifest: Manifest | None = None
        self._plan: ReadPlan | None = None
        self.progress = LinkProgress()
        self.digests = True
        self._by_address = False
        self._more: More | None = None
        self._guard = threading.Lock()
        self._in_use = False
        self._closed = False

    def open(self, key: ShardKey, lease: int, *, deadline: float) -> Manifest:
        self._manifest = self._plan = None
        self._version = key.version
        with self._using("open"):
            try:
                with translated(self._peer, key.version, "open", deadline):
                    self._manifest = self._open(key, lease, deadline)
            except (VersionGone, NotServable):
                raise
            except BaseException:
                self.close()
                raise
        return self._manifest

    def _open(self, key: ShardKey, lease: int, deadline: float) -> Manifest:
        channel = self._channels[0]
        channel.send_message(Open(key, lease, by_address=self._by_address), deadline)
        for further in self._channels[1:]:
            further.send_message(Open(key, lease, brief=True), deadline)
        try:
            first = self._reply(channel, Opened, deadline)
        except (VersionGone, NotServable):
            for further in self._channels[1:]:  # they say the same, and must be heard before anything else is asked
                with contextlib.suppress(VersionGone, NotServable):
                    self._reply(further, Opened, deadline)
            raise
        if bytes(first.manifest) == NO_MANIFEST:
            raise ProtocolError("the source opened without a manifest")
        manifest = Manifest.decode(bytes(first.manifest))
        self._receive_hand_over(channel, manifest, first.addresses, deadline)
        for further in self._channels[1:]:
            if self._reply(further, Opened, deadline).epoch != first.epoch:
                raise SourceLost("the source published anew while it was opened")
        return manifest

    def read(
        self,
        segments: Sequence[int],
        target: Slab,
        placement: Placement,
        *,
        deadline: float,
        more: More | None = None,
    ) -> Iterator[int]:
        if self._closed:
            raise SourceLost("the link is closed", version=self._version, peer=self._peer, phase="read")
        if self._manifest is None:
            raise UsageError("open a version before reading it")
        check_segments(self._manifest, segments)
        self._plan = ReadPlan(self._manifest, target, placement, digests=self.digests)
        self.progress.begin_read()
        self._more = more
        return self._read(self._manifest, self._plan, list(segments), deadline)

    def _further(self, channel: Channel, deadline: float) -> list[int]:
        """Ask for what else is wanted by now, without waiting for what was asked for before."""
        segments = list(self._more()) if self._more is not None else []
        if segments:
            assert self._manifest is not None
            check_segments(self._manifest, segments)
            self._request(channel, segments, deadline)
        return segments

    def _read(self, manifest: Manifest, plan: ReadPlan, segments: list[int], deadline: float) -> Iterator[int]:
        if not segments:
            return
        finished = False
        with self._using("read"):
            try:
                with translated(self._peer, self._version, "read", deadline):
                    yield from self._transfer(manifest, plan, segments, deadline)
                finished = True
            finally:
                if not finished:  # failed, or given up: what is on its way cannot be told from what would come next
                    self.close()

    def _transfer(self, manifest: Manifest, plan: ReadPlan, segments: list[int], deadline: float) -> Iterator[int]:
        raise NotImplementedError

    def _receive_hand_over(
        self, channel: Channel, manifest: Manifest, addresses: bytes | None, deadline: float
    ) -> None:
        """What a transport sends after Opened, unless that told its addresses."""

    def digest(self, segment: int) -> bytes:
        if self._plan is None:
            raise UsageError("nothing has been read")
        return self._plan.digest(segment)

    def check(self, *, deadline: float) -> bool:
        if self._closed or self._manifest is None:
            return False
        self._manifest = None
        with self._using("check"):
            try:
                with translated(self._peer, self._version, "check", deadline):
                    for channel in self._channels:
                        channel.send_message(Finish(), deadline)
                    return all([self._reply(channel, Finished, deadline).current for channel in self._channels])
            except SourceLost as error:
                self.close()
                if isinstance(error.__cause__, Disconnected):
                    return False  # to withdraw is to close the connection
                raise
            except BaseException:
                self.close()
                raise

    def cut(self) -> None:
        """From any thread: whoever uses this link gets SourceLost."""
        for channel in self._channels:
            channel.cut()

    def close(self) -> None:
        """From any thread: one that uses the link gets SourceLost, and then closes it for good."""
        with self._guard:
            self._closed = True
            in_use = self._in_use
        self.cut()
        if not in_use:
            self._dispose()

    @contextlib.contextmanager
    def _using(self, phase: str) -> Iterator[None]:
        """While a thread is in here, nobody else takes the sockets and files away from under it."""
        with self._guard:
            if self._closed:
                raise SourceLost("the link is closed", version=self._version, peer=self._peer, phase=phase)
            self._in_use = True
        try:
            yield
        finally:
            with self._guard:
                self._in_use = False
                closed = self._closed
            if closed:
                self._dispose()

    def _dispose(self) -> None:
        for channel in self._channels:
            channel.close()

    def _request(self, channel: Channel, segments: Sequence[int], deadline: float) -> None:
        channel.send_message(Read(runs_of(segments), max(0.0, deadline - time.monotonic())), deadline)

    def _expect(self, channel: Channel, kind: int, segment: int, deadline: float) -> int:
        """Wait for the header of this kind that begins with this segment; the length it tells."""
        while True:
            got_kind, got, length = channel.receive_header(deadline)
            self.progress.heard()
            if got_kind == ALIVE:
                self.progress.waiting()
                continue
            if got_kind == CONTROL:
                self._reply_body(channel, length, Opened, deadline)  # a refusal, which it raises
            if (got_kind, got) != (kind, segment):
                raise ProtocolError(f"segment {segment} was due, there came kind {got_kind}, segment {got}")
            if channel.waited:
                self.progress.delayed(segment)
            return length

    def _reply(self, channel: Channel, kind: type[_Expected], deadline: float) -> _Expected:
        frame, _, length = channel.receive_header(deadline)
        if frame != CONTROL:
            raise ProtocolError(f"a frame of kind {frame} where a reply should be")
        return self._reply_body(channel, length, kind, deadline)

    def _reply_body(self, channel: Channel, length: int, kind: type[_Expected], deadline: float) -> _Expected:
        body = channel.receive_body(length, REPLY_SIZE_BYTES_MAX, deadline)
        try:
            reply = _replies.decode(body)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"a reply that does not decode: {error}") from error
        if isinstance(reply, Refused):
            error_type = {"gone": VersionGone, "not servable": NotServable, "late": SourceLost}[reply.reason]
            raise error_type(reply.message)
        if not isinstance(reply, kind):
            raise ProtocolError(f"{type(reply).__name__} where {kind.__name__} should be")
        return reply
