"""The hub on the network: a ZeroMQ ROUTER around the pure `Hub`. One thread, no state of its own.

Who may talk: anybody who can reach the port, so every frame is decoded strictly, sizes are bounded before memory is
taken, and what is not a message of this protocol gets a typed refusal and a (rate-limited) line in the log. What is
larger than any message is not even received: ZeroMQ closes that connection.

A fault of ours must not end a run: when the machine fails over an event, that event is dropped and a new machine takes
its place, as if the hub had been restarted, and the workers tell it all they know (rule 6).
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable

import zmq

from tensorhub_plugins.core.errors import ProtocolError, UsageError
from tensorhub_plugins.core.hub import hub
from tensorhub_plugins.core.hub.limits import HubLimits
from tensorhub_plugins.core.protocol import messages
from tensorhub_plugins.core.protocol.address import check_address, new_session

log = logging.getLogger("tensorhub.hub")

SEND_QUEUE_MESSAGES_MAX = 10_000  # per worker; beyond that the worker does not read and its messages are dropped
BACKLOG = 4096  # thousands of workers connect at once when a job starts; Linux' own limit
RECEIVE_BURST_MAX = 1_000  # messages handled before the clock is looked at again
REFUSALS_LOGGED_PER_S = 10
NOBLOCK, MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)  # to combine two enums costs as much as to send


def _router() -> tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes]]:
    """A ROUTER whose ZeroMQ thread does not interrupt ours on the same core.

    It would for every second message of a busy hub with one core, to send just that one: with SCHED_BATCH thousands of
    workers are served in three quarters of the time (recipes/bench/hub). A wish, no more: who refuses it is slower.
    """
    before = _threads()
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    for thread in _threads() - before:
        with contextlib.suppress(OSError):
            if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
    return context, socket


def _threads() -> set[int]:
    """Of this process; none where the system does not tell (it is not Linux)."""
    try:
        return set(map(int, os.listdir("/proc/self/task")))
    except OSError:
        return set()


class Server:
    """A running hub.

    address: "tcp://host:port"; port 0 takes a free one. The address it got is in `.address`. limits: times and numbers,
    see there. clock: seconds, steady. Raise UsageError when the address cannot be bound.
    """

    def __init__(
        self,
        address: str = "tcp://127.0.0.1:0",
        *,
        limits: HubLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_address(address)
        self._clock = clock
        self._limits = HubLimits() if limits is None else limits
        self._hub = self._new_hub(clock())
        self._context, self._socket = _router()
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, messages.MESSAGE_SIZE_BYTES_MAX)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a worker that reconnects keeps its identity at once
        self._socket.setsockopt(zmq.BACKLOG, BACKLOG)
        self._socket.setsockopt(zmq.SNDHWM, SEND_QUEUE_MESSAGES_MAX)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._socket.close()
            self._context.term()
            raise UsageError(f"the hub cannot listen on {address}: {error}; choose another address or port") from error
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._stop = threading.Event()
        self._refused_at = [0.0] * REFUSALS_LOGGED_PER_S
        self._thread = threading.Thread(target=self._run, name="tensorhub-hub", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; closing twice is fine."""
        self._stop.set()
        self._thread.join()

    def is_alive(self) -> bool:
        """Whether it still serves."""
        return self._thread.is_alive()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _new_hub(self, now: float) -> hub.Hub:
        return hub.Hub(new_session(), now, self._limits)

    def _run(self) -> None:
        log.info("hub %s listens on %s", self._hub.session.hex()[:8], self.address)
        next_tick = self._clock()
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        try:
            while not self._stop.is_set():
                now = self._clock()
                if now >= next_tick:
                    self._handle(hub.Tick(), now)
                    next_tick = self._hub.next_deadline(now)
                if poller.poll(int(1000 * min(0.1, max(0.0, next_tick - now)))):
                    self._receive_burst()
        except Exception:
            log.exception("the hub has failed")
            raise
        finally:
            self._socket.close()
            self._context.term()

    def _receive_burst(self) -> None:
        for _ in range(RECEIVE_BURST_MAX):
            try:
                session, frame = self._socket.recv(NOBLOCK), self._socket.recv(NOBLOCK)
            except zmq.Again:
                return
            more = self._drain() if self._socket.getsockopt(zmq.RCVMORE) else 0
            try:
                if more or len(session) != 16:
                    raise ProtocolError("not a tensorhub client: is something else talking to this port?")
                message = messages.decode_from_client(frame)
            except ProtocolError as error:
                self._log_refusal(session, error)
                self._send(session, messages.Refused(0, "ProtocolError", str(error)))
                continue
            self._handle(hub.Received(session, message), self._clock())

    def _drain(self) -> int:
        """The rest of a message of several frames, which none of ours is."""
        frames = 0
        while self._socket.getsockopt(zmq.RCVMORE):
            self._socket.recv(NOBLOCK)
            frames += 1
        return frames

    def _handle(self, event: hub.Event, now: float) -> None:
        try:
            effects = self._hub.handle(event, now)
        except Exception:
            log.exception("the hub has failed over %.1000r and starts afresh: please report this", event)
            self._hub = self._new_hub(now)
            if isinstance(event, hub.Received):  # or it would ask again, and again
                hello = isinstance(event.message, messages.Hello)  # a refused Hello answers no request
                request_id = 0 if hello else getattr(event.message, "request_id", 0)
                refusal = messages.Refused(request_id, "ProtocolError", "the hub failed over this: its log says why")
                self._send(event.session, refusal)
            return
        self._carry_out(effects)

    def _carry_out(self, effects: list[hub.Effect]) -> None:
        for effect in effects:
            match effect:
                case hub.Send(session, message):
                    self._send(session, message)
                case hub.Log(text):
                    log.info("%s", text)

    def _send(self, session: bytes, message: messages.HubMessage) -> None:
        try:
            self._socket.send(session, MORE)
            self._socket.send(messages.encode(message), NOBLOCK)
        except zmq.ZMQError as error:  # a full queue or a peer that is gone: it asks again, or is given up
            log.debug("message to %s dropped: %s", session.hex()[:8], error)

    def _log_refusal(self, session: bytes, error: ProtocolError) -> None:
        now = self._clock()
        if now - self._refused_at[0] > 1.0:
            self._refused_at = [*self._refused_at[1:], now]
            log.warning("refused a message from %s: %s", session.hex()[:8], error)


def start_server(address: str = "tcp://127.0.0.1:0", *, limits: HubLimits | None = None) -> Server:
    """A hub in a thread of this process, for adapters that bring their own and for tests."""
    return Server(address, limits=limits)
