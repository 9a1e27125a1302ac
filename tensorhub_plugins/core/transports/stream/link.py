"""The reader's end of the socket transports."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from tensorhub_plugins.core.errors import ProtocolError, SourceLost, TensorHubError, UsageError, VersionGone
from tensorhub_plugins.core.manifest import Manifest
from tensorhub_plugins.core.memory.loans import Borrowed
from tensorhub_plugins.core.memory.moves import Move
from tensorhub_plugins.core.memory.slab import Slab
from tensorhub_plugins.core.protocol.messages import Ticket
from tensorhub_plugins.core.security.leases import prove
from tensorhub_plugins.core.transports.interface import Bases, LinkProgress, More, NotServable
from tensorhub_plugins.core.transports.read_plan import ReadPlan, check_segments, runs_of
from tensorhub_plugins.core.transports.stream import messages as m
from tensorhub_plugins.core.transports.stream.channel import Channel, Disconnected, Full, Silent
from tensorhub_plugins.core.types import ShardKey

REST_S = 1.0  # to send one message, where nothing else is on its way

_Expected = TypeVar("_Expected", m.StreamOpened, m.StreamFinished)


def greet(
    sock: socket.socket, peer: str, *, stall_s: float, deadline: float, make: Callable[..., Channel] = Channel
) -> Channel:
    """Introduce this side on a connected socket, which is closed if that fails. Raise SourceLost or ProtocolError."""
    channel = make(sock, peer, stall_s=stall_s)
    try:
        with translated(peer, None, "connect", deadline):
            try:
                channel.send([m.HELLO.pack(m.MAGIC, m.PROTOCOL, 0, b"")], deadline)
            except Disconnected as error:  # of a UNIX socket: a full source has closed already, and said so before
                if not isinstance(error.__cause__, BrokenPipeError):
                    raise
            greeting = bytearray(m.HELLO.size)
            channel.fill([memoryview(greeting)], deadline)
            if m.check_hello(greeting) == m.FULL:
                raise Full("admits no more readers from here now")
            channel.nonce = bytes(greeting[-m.NONCE_SIZE_BYTES :])
    except BaseException:
        channel.close()
        raise
    return channel


@contextlib.contextmanager
def translated(peer: str, version: int | None, phase: str, deadline: float) -> Iterator[None]:
    """Translate what happens to a connection into SourceLost, with all that is known about it. This is the seam."""
    try:
        yield
    except Full as error:
        raise SourceLost(f"the source {error}", version=version, peer=peer, phase=phase) from error
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


class Connection:
    """The channels of a link, which the next link to the same source may use."""

    def __init__(self, channels: Sequence[Channel]) -> None:
        self.channels = list(channels)
        self.has_served = False

    def close(self) -> None:
        for channel in self.channels:
            channel.close()


class SocketLink:
    """The common part of the links of tcp, shm and rdma. The first channel is opened in full, the others follow it.

    keep: takes the connection when the link has ended well; None: it is closed."""

    def __init__(self, connection: Connection, keep: Callable[[Connection], None] | None = None) -> None:
        self._connection, self._keep = connection, keep
        self._channels = connection.channels
        self.peer = self._channels[0].peer
        self._rested = False  # the last offer ended properly: another link may use the connection
        self._version: int | None = None
        self._manifest: Manifest | None = None
        self._plan: ReadPlan | None = None
        self.progress = LinkProgress(is_kept=connection.has_served)
        connection.has_served = True
        self.digests = True
        self.ticket: Ticket | None = None
        self.borrows = False
        self.bases: Bases | None = None
        self.wants_deltas = False
        self._by_address = False
        self._more: More | None = None
        self._guard = threading.Lock()
        self._in_use = False
        self._closed = False

    def open(self, key: ShardKey, as_of: int, *, deadline: float) -> Manifest:
        self._manifest = self._plan = None
        self._version, self._rested = key.version, False
        with self._using("open", deadline):
            self._manifest = self._open(key, as_of, deadline)
        return self._manifest

    def _open(self, key: ShardKey, as_of: int, deadline: float) -> Manifest:
        channel = self._channels[0]
        for each in self._channels:
            each.send_message(self._opening(each, key, as_of), deadline)
        try:
            first = self._reply(channel, m.StreamOpened, deadline)
        except (VersionGone, NotServable):
            for other in self._channels[1:]:  # they get the same answer, which must be received before the next request
                with contextlib.suppress(VersionGone, NotServable):
                    self._reply(other, m.StreamOpened, deadline)
            raise
        if bytes(first.manifest) == m.NO_MANIFEST:
            raise ProtocolError("the source opened without a manifest")
        manifest = Manifest.decode(bytes(first.manifest))
        self._keep = self._keep if first.keeps else None
        self._receive_memory(channel, manifest, first, deadline)
        for other in self._channels[1:]:
            if self._reply(other, m.StreamOpened, deadline).epoch != first.epoch:
                raise SourceLost("the source published anew while it was opened")
        return manifest

    def _opening(self, channel: Channel, key: ShardKey, as_of: int) -> m.StreamOpen:
        is_first = channel is self._channels[0]
        ticket = self.ticket
        lease = None if ticket is None else (ticket.claim, prove(ticket.key, channel.nonce))
        by_address, borrows = self._by_address and is_first, self.borrows and is_first
        return m.StreamOpen(key, as_of, not is_first, by_address, lease, borrows, self.wants_deltas)

    def read(
        self, segments: Sequence[int], target: Slab, moves: Sequence[Move], *, deadline: float, more: More | None = None
    ) -> Iterator[int]:
        if self._closed:
            raise SourceLost("the link is closed", version=self._version, peer=self.peer, phase="read")
        if self._manifest is None:
            raise UsageError("open a version before reading it")
        check_segments(self._manifest, segments)
        self._plan = ReadPlan(self._manifest, target, moves, digests=self.digests)
        self.progress.begin_read()
        self._more = more
        return self._read(self._manifest, self._plan, list(segments), deadline)

    def _additional(self, due: int = 0) -> list[int]:
        """Return the further segments wanted by now."""
        segments = list(self._more()) if self._more is not None else []
        if segments:
            assert self._manifest is not None
            check_segments(self._manifest, segments)
        return segments

    def _read(self, manifest: Manifest, plan: ReadPlan, segments: list[int], deadline: float) -> Iterator[int]:
        if segments:
            with self._using("read", deadline):
                yield from self._transfer(manifest, plan, segments, deadline)

    def _transfer(self, manifest: Manifest, plan: ReadPlan, segments: list[int], deadline: float) -> Iterator[int]:
        raise NotImplementedError

    def _receive_memory(self, channel: Channel, manifest: Manifest, opened: m.StreamOpened, deadline: float) -> None:
        """Receive what `SourceBackend.send_memory` sends after StreamOpened, unless that contained addresses."""

    def take_loan(self) -> Borrowed | None:
        return None

    def digest(self, segment: int) -> bytes:
        if self._plan is None:
            raise UsageError("nothing has been read")
        return self._plan.digest(segment)

    def check(self, *, deadline: float, waits: bool = True) -> bool:
        if self._closed or self._manifest is None:
            return False
        self._manifest = None
        try:
            with self._using("check", deadline):
                for channel in self._channels:
                    self._finish(channel, deadline)
                replies = self._channels if waits else ()
                self._rested = all([self._reply(channel, m.StreamFinished, deadline).current for channel in replies])
                return self._rested
        except SourceLost as error:
            if isinstance(error.__cause__, Disconnected):
                return False  # a withdrawal closes the connection
            raise

    def _finish(self, channel: Channel, deadline: float) -> None:
        channel.send_message(m.StreamFinish(), deadline)
        channel.is_due = True

    def cut(self) -> None:
        """Cut the connection, from any thread, unless another link has it: the thread that uses it gets SourceLost."""
        for channel in self._channels:
            channel.cut()

    def close(self) -> None:
        """Close the link, from any thread: one that uses it gets SourceLost, and then disposes of it."""
        with self._guard:
            is_ours = not self._in_use
            keep = self._keep if is_ours and not self._closed else None
            self._closed, self._in_use = True, self._in_use or keep is not None  # no other thread begins or disposes
        if keep is not None and self._is_at_rest():
            self._channels = []
            keep(self._connection)
        self.cut()
        if is_ours:
            self._dispose()

    def _is_at_rest(self) -> bool:
        """Return whether another link may use the connection; end the offer if this one has asked for nothing."""
        if self._plan is not None or self._manifest is None:
            return self._rested
        try:
            for channel in self._channels:
                self._finish(channel, time.monotonic() + REST_S)
        except (Disconnected, Silent):
            return False
        return True

    @contextlib.contextmanager
    def _using(self, phase: str, deadline: float) -> Iterator[None]:
        """Keep the sockets and files open while a thread is in this block.

        An error costs the link, and so does an abandoned read: bytes still in flight cannot be told from later ones.
        But a source may refuse to open."""
        with self._guard:
            if self._closed:
                raise SourceLost("the link is closed", version=self._version, peer=self.peer, phase=phase)
            self._in_use = True
        try:
            with translated(self.peer, self._version, phase, deadline):
                yield
        except BaseException as error:
            if phase != "open" or not isinstance(error, (VersionGone, NotServable)):
                self.close()
            raise
        finally:
            with self._guard:
                self._in_use = False
                closed = self._closed
            if closed:
                self._dispose()

    def _dispose(self) -> None:
        self._more = None  # it leads back to the reader of this link: a cycle, which would keep what was read into
        for channel in self._channels:
            channel.abandon()  # the source may be sending

    def _request(self, channel: Channel, segments: Sequence[int], deadline: float) -> None:
        channel.send_message(m.StreamRead(runs_of(segments), max(0.0, deadline - time.monotonic())), deadline)

    def _announced(
        self, channel: Channel, kind: int, segment: int, deadline: float, or_else: int | None = None
    ) -> int | None:
        """Take one frame: a sign of life (None), or the header of this kind for this segment; return its length.
        or_else: another kind that may come instead, see `Channel.kind`.

        Everything that a source sends during a read passes here, so `progress` sees it for all transports."""
        got_kind, got, length = channel.receive_header(deadline)
        self.progress.heard()
        if got_kind == m.ALIVE:
            self.progress.waiting()
            return None
        if got_kind == m.CONTROL:
            self._reply(channel, m.StreamOpened, deadline, length)  # a refusal, which this raises
        if got_kind not in (kind, or_else) or got != segment:
            raise ProtocolError(f"segment {segment} was due, there came kind {got_kind}, segment {got}")
        if channel.waited:
            self.progress.delayed_segments.add(segment)
        return length

    def _reply(self, channel: Channel, kind: type[_Expected], deadline: float, length: int | None = None) -> _Expected:
        """Return the next message (length: if its header was received already), after the answer to the last
        StreamFinish, if that is due. Raise the error of a refusal."""
        is_due, channel.is_due = channel.is_due, False
        if is_due and kind is not m.StreamFinished:
            self._reply(channel, m.StreamFinished, deadline)
        if length is None:
            reply = channel.receive_message(m.reply_decoder, m.REPLY_SIZE_BYTES_MAX, deadline)
        else:
            reply = channel.receive_rest(m.reply_decoder, length, m.REPLY_SIZE_BYTES_MAX, deadline)
        if isinstance(reply, m.StreamRefused):
            error_type = {"gone": VersionGone, "not servable": NotServable, "late": SourceLost}[reply.reason]
            raise error_type(reply.message)
        if not isinstance(reply, kind):
            raise ProtocolError(f"{type(reply).__name__} where {kind.__name__} should be")
        return reply
