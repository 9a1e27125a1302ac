"""The client's connection to the hub: one thread and one socket around the pure `Session`.

Callers in any thread `ask` and get a future; the thread sends, receives, sends heartbeats, and Hello again when the hub
was restarted. Losing the hub loses nothing: requests wait for it until their own deadlines.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout  # the built-in one only since Python 3.11

import zmq
from typing_extensions import assert_never

from tensorhub_plugins.core.client import session
from tensorhub_plugins.core.errors import HubUnreachable, ProtocolError, UsageError, refusal
from tensorhub_plugins.core.protocol import messages
from tensorhub_plugins.core.protocol.address import (
    check_address,
    new_session,
)

log = logging.getLogger("tensorhub.client")

RECONNECT_FIRST_MS = 50
RECONNECT_MAX_MS = 1000
LINK_HEARTBEAT_MS, LINK_TIMEOUT_MS = 2000, 10_000  # answered by the hub's socket, also while the hub is busy
CONNECT_TIMEOUT_MS = 2000
BYE_LINGER_MS = 200  # for the last word to leave this process; without it the hub would miss us for a session timeout


def _dealer(context: zmq.Context[zmq.Socket[bytes]], session: bytes) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.MAXMSGSIZE, messages.MESSAGE_SIZE_BYTES_MAX),
        (zmq.IMMEDIATE, 1),  # queue nothing for a hub that is away: the session machine sends again what matters
        (zmq.RECONNECT_IVL, RECONNECT_FIRST_MS),
        (zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS),
        # A link that was cut: TCP asks again after as long as it has asked already. A new connection takes seconds.
        (zmq.HEARTBEAT_IVL, LINK_HEARTBEAT_MS),
        (zmq.HEARTBEAT_TIMEOUT, LINK_TIMEOUT_MS),
        (zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS),
    ):
        socket.setsockopt(option, value)
    socket.setsockopt(zmq.IDENTITY, session)
    return socket


class HubLink:
    """A session with the hub at `address`.

    on_source_gone, on_may_release, on_directive: called in the link's thread, must not block. Raise UsageError for a
    malformed address, HubUnreachable when no hub answers within connect_timeout_s.
    """

    def __init__(
        self,
        address: str,
        identity: messages.Hello,
        *,
        connect_timeout_s: float,
        on_source_gone: Callable[[bytes], None],
        on_may_release: Callable[[session.MayRelease], None],
        on_directive: Callable[[messages.Directive], None] = lambda directive: None,
    ) -> None:
        self.address = check_address(address)
        self.session = new_session()
        self._name = f"{identity.replica}/{identity.shard}"
        self._on_source_gone = on_source_gone
        self._on_may_release = on_may_release
        self._on_directive = on_directive
        self._machine = session.Session(identity, time.monotonic())
        self._lock = threading.RLock()
        self._futures: dict[int, Future[messages.Reply]] = {}
        self._outbox: deque[bytes] = deque()
        self._welcomed: Future[None] = Future()
        self._closing = False
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._context = zmq.Context()
        self._socket = _dealer(self._context, self.session)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self._free()
            raise UsageError(f"{address!r} is no hub address: use tcp://host:port") from error
        self._thread = threading.Thread(target=self._run, name="tensorhub-hublink", daemon=True)
        self._thread.start()
        try:
            self._welcomed.result(timeout=connect_timeout_s)
        except FutureTimeout:
            self.close()
            raise HubUnreachable(
                f"no hub answers at {address}: start one with `tensorhub server`, or correct the address",
                peer=address,
                phase="connect",
                timeout_s=connect_timeout_s,
            ) from None
        except BaseException:
            self.close()
            raise

    # --- for callers in any thread ---

    @property
    def last_request_id(self) -> int:
        """The last request number that was used."""
        return self._machine.last_request_id

    @property
    def silent_s(self) -> float:
        """Seconds since the hub was heard; it answers a heartbeat every second."""
        return time.monotonic() - self._machine.heard_at

    @property
    def directive(self) -> messages.Directive:
        """What operators have decided, as far as this worker has heard."""
        return self._machine.directive

    def ask(self, make: Callable[[int], session.Request], deadline: float) -> Future[messages.Reply]:
        """Send the request that `make` builds from its number. deadline: on time.monotonic().

        The future holds the reply (never Refused), or raises what the hub refused with, or HubUnreachable.
        """
        future: Future[messages.Reply] = Future()
        with self._lock:
            if self._closing:
                raise UsageError("the client is closed")
            number = self._machine.next_request_id()
            self._futures[number] = future
            self._carry_out(self._machine.handle(session.Ask(make(number), deadline), time.monotonic()))
        self._wake()
        return future

    def end_lease(self, request: int, shard: int | None = None, *, lost: bool = False) -> None:
        """Tell the hub that nothing more is read under this grant. Returns at once; it is sent again until the hub
        knows.

        shard: None for all of them. lost: the source failed, so that the hub stops offering it to others.
        """
        with self._lock:
            if self._closing:
                return
            self._carry_out(self._machine.handle(session.EndLease(request, shard, lost), time.monotonic()))
        self._wake()

    def close(self) -> None:
        """Say Bye and stop; closing twice is fine."""
        with self._lock:
            if not self._closing:
                self._closing = True
                self._outbox.append(messages.encode(messages.Bye()))
        self._wake()
        self._thread.join()

    # --- the thread ---

    def _run(self) -> None:
        poller = select.poll()
        zmq_fd = int(self._socket.getsockopt(zmq.FD))
        poller.register(zmq_fd, select.POLLIN)
        poller.register(self._wake_read, select.POLLIN)
        try:
            while True:
                self._flush()
                if self._closing:
                    return
                self._receive_all()
                with self._lock:
                    self._carry_out(self._machine.handle(session.Tick(), time.monotonic()))
                    wait_s = self._machine.next_deadline() - time.monotonic()
                self._flush()
                if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                    continue  # the descriptor is edge triggered: nothing may be left when it is waited for
                poller.poll(max(1.0, min(1000.0, wait_s * 1000)))
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
        except Exception:
            log.exception("%s: the connection to the hub has failed", self._name)
        finally:
            with self._lock:
                self._closing = True
                futures = list(self._futures.values())
                self._futures.clear()
            for future in futures:
                future.set_exception(UsageError("the client was closed while it waited for the hub"))
            self._free()

    def _receive_all(self) -> None:
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = messages.decode_from_hub(frame)
            except ProtocolError as error:
                log.warning("%s: the hub at %s sent what it should not: %s", self._name, self.address, error)
                if not self._welcomed.done():
                    self._welcomed.set_exception(error)
                continue
            with self._lock:
                self._carry_out(self._machine.handle(session.Heard(message), time.monotonic()))
            if isinstance(message, messages.Welcome) and not self._welcomed.done():
                self._welcomed.set_result(None)

    def _carry_out(self, effects: list[session.Effect]) -> None:
        for effect in effects:
            match effect:
                case session.Send(message):
                    self._outbox.append(messages.encode(message))
                case session.Answered(request, reply):
                    self._resolve(request, reply)
                case session.Expired(request, hub_silent):
                    self._expire(request, hub_silent=hub_silent)
                case session.SourceGone(gone):
                    self._on_source_gone(gone)
                case session.MayRelease():
                    self._on_may_release(effect)
                case session.Directed(directive):
                    self._on_directive(directive)
                case session.HubAway(silent_s):
                    log.warning("%s: no word from the hub at %s for %.0f s", self._name, self.address, silent_s)
                case session.HubBack(restarted):
                    log.info("%s: the hub is back%s", self._name, ", restarted: told it all" if restarted else "")
                case _:
                    assert_never(effect)

    def _resolve(self, request: int, reply: messages.Reply) -> None:
        future = self._futures.pop(request, None)
        if future is not None and isinstance(reply, messages.Refused):
            future.set_exception(refusal(reply.error, reply.message))
        elif future is not None:
            future.set_result(reply)
        elif request == 0:  # the hub refuses us altogether
            assert isinstance(reply, messages.Refused)
            if self._welcomed.done():
                log.error("%s: the hub refuses this worker: %s", self._name, reply.message)
            else:
                self._welcomed.set_exception(refusal(reply.error, reply.message, phase="connect"))

    def _expire(self, request: int, *, hub_silent: bool) -> None:
        future = self._futures.pop(request, None)
        if future is not None:
            why = "the hub does not answer" if hub_silent else "the hub did not decide in time"
            future.set_exception(HubUnreachable(why, peer=self.address, phase="hub"))

    def _flush(self) -> None:
        while self._outbox:
            try:
                self._socket.send(self._outbox[0], zmq.NOBLOCK)
            except zmq.Again:
                # No hub. The last word waits for it, mostly a Hello, so that it is said as soon as one listens; what
                # else it has missed the heartbeat finds out.
                while len(self._outbox) > 1:
                    self._outbox.popleft()
                return
            self._outbox.popleft()

    def _wake(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):
            if self._wake_write >= 0:
                os.write(self._wake_write, b"x")

    def _free(self) -> None:
        self._socket.close(linger=BYE_LINGER_MS)
        self._context.term()
        with self._lock:
            os.close(self._wake_read)
            os.close(self._wake_write)
            self._wake_read = self._wake_write = -1
