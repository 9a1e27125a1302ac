"""The hub on the network: a ZeroMQ ROUTER around the pure `Hub`. One thread, no state of its own.

Access needs the run's secret, or a role's key made from it (../security); without a secret, every process that can
reach the port has access, and the port is on loopback. Still every frame is decoded strictly, sizes are bounded before
memory is taken, and what is not a message of this protocol gets a typed refusal and a (rate-limited) line in the log.
What is larger than any message is not even received: ZeroMQ closes that connection. The sender of a message is known by
the identity of its connection, which is secret (names.py).

A bug of ours must not end a run: when the state machine fails on a message, it goes on without the session that sent
it. Only when its records are inconsistent (report.validate) is it replaced by a new one, as if the hub had been
restarted, and the workers report to it all they know (rule 6).
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from queue import SimpleQueue
from typing import cast

import zmq

from tensorhub_plugins.core import resources
from tensorhub_plugins.core.deadline import Deadline
from tensorhub_plugins.core.errors import DeadlineExceeded, ProtocolError, TensorHubError, UsageError
from tensorhub_plugins.core.hub import hub
from tensorhub_plugins.core.hub.limits import SESSIONS_MAX, HubLimits
from tensorhub_plugins.core.hub.metrics import Metric, hub_figure, metrics
from tensorhub_plugins.core.hub.names import Names, public_name
from tensorhub_plugins.core.hub.rates import Rates
from tensorhub_plugins.core.hub.unfinished import Unfinished
from tensorhub_plugins.core.process_lifetime import ForeignPort, OfThisProcess, files_left, raise_files_max
from tensorhub_plugins.core.protocol import messages
from tensorhub_plugins.core.protocol.address import check_address, is_loopback, new_session, parse_address, resolve
from tensorhub_plugins.core.protocol.reach import format_address
from tensorhub_plugins.core.run_log import record
from tensorhub_plugins.core.security import curve, secret
from tensorhub_plugins.core.security.keys import Keys
from tensorhub_plugins.core.threads import Thread
from tensorhub_plugins.core.types import Role, printable

log = logging.getLogger("tensorhub.hub")

RECEIVE_QUEUE_MESSAGES_MAX = 0  # no end, per connection: see unfinished.py, which bounds their bytes
SEND_QUEUE_MESSAGES_MAX = 512  # per worker, twice what it may ask at once; more is lost if it does not read
FAILURES_PER_SESSION_MAX = 3  # on messages of one session, before it is barred
BARRED_MAX = 4096  # such sessions
LOOKUP_S = 5.0  # of the name of the address to listen at
BACKLOG = 4096  # thousands of workers connect at once when a job starts; Linux' own limit
FILES_KEPT = 64  # for what is no worker: refused connections, requests for the status, logs
# A connection of a host that has gone without a word would keep its file for ever.
KEEPALIVE = (
    (zmq.TCP_KEEPALIVE, 1),
    (zmq.TCP_KEEPALIVE_IDLE, 60),
    (zmq.TCP_KEEPALIVE_INTVL, 10),
    (zmq.TCP_KEEPALIVE_CNT, 6),
)
FULL_AGAIN_S = 10.0  # that it is full is looked into again
AGAIN_S = 0.1  # to try to listen again
FILES_FREE_MIN = 2  # ZeroMQ needs one to accept a connection, and would only fail silently
FIGURES_TIMEOUT_S = 5.0  # for the hub's thread to say what it measures: it looks ten times a second
DEAF_S_MIN = 1.0  # for which something was left to read, normally a tenth of that: we were stopped, starved or swamped
RECEIVE_BURST_MAX = 1_000  # messages handled before the clock is read again
REFUSALS_LOGGED_PER_S = 10
LOGGED_PER_S = 1000  # lines in all: thousands of workers may come, or be lost, at once
CONNECTIONS_LEFT = "tensorhub_hub_connections_left", "connections that the hub can still accept"
REFUSED_HOSTS = "tensorhub_hub_refused_hosts", "hosts whose handshakes were refused in the last ten minutes"
NOBLOCK, MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)  # combining two enums costs as much as sending


def collect_rarely() -> None:
    """Have Python look for cycles rarely among what lives long, in a process that is a hub and nothing else.

    The hub's records make none that outlive them (tests/core/hub/test_records.py). To look through those of 16,384
    workers takes 0.2 s, in which the hub reads no message, and a sixth of its time while all of them read."""
    gc.freeze()  # what was imported is never garbage
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, 1_000)  # 10 normally


def _router(context: zmq.Context[zmq.Socket[bytes]], where: str) -> zmq.Socket[bytes]:
    """Return a ROUTER to be bound to this address. Its ZeroMQ thread does not preempt ours on one core.

    It would for every second message of a busy hub with one core, to send just that one: with SCHED_BATCH thousands of
    workers are served in three quarters of the time (recipes/bench/hub). Where it is refused, the hub is only slower.
    """
    resources.try_for_zmq(1, resources.CALLS_OF_HUB)
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER and _may_run_in_batches():
        context.set(zmq.THREAD_SCHED_POLICY, os.SCHED_BATCH)  # its threads set it themselves, as they start
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.IPV6, where.startswith("tcp://["))
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # raise when there is no connection
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a worker that reconnects keeps its identity at once
    for option, value in KEEPALIVE:
        socket.setsockopt(option, value)
    return socket


def _where(address: str) -> str:
    """Return the address with an IP address in place of a host name, for which ZeroMQ would wait as long as the
    resolver does. ZeroMQ itself resolves "*" and interfaces."""
    host, port = parse_address(address, "tcp")
    try:
        return format_address("tcp", resolve(host, Deadline.after(LOOKUP_S))[0], port)
    except TimeoutError as error:
        raise UsageError(f"the hub cannot listen on {address}: {error}; choose another address or port") from error
    except (OSError, ValueError):
        return address


def _may_run_in_batches() -> bool:
    """Return whether a thread of this process may set the policy. ZeroMQ aborts the process where it may not."""

    def ask() -> bool:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            return True
        return False

    with ThreadPoolExecutor(1) as thread:  # not this thread, which would keep the policy
        return thread.submit(ask).result()


class Server(OfThisProcess):
    """A running hub.

    address: "tcp://host:port"; port 0 takes a free one; `.address` has the actual one. limits: see `HubLimits`.
    keys: the run's secret; None: the environment's, and if that has none, workers of this host only.
    insecure: without a secret listen where other hosts reach it, too. clock: seconds, steady. Raise UsageError when the
    address cannot be bound, or would be open to everybody."""

    @resources.named()
    def __init__(
        self,
        address: str = "tcp://127.0.0.1:0",
        *,
        limits: HubLimits | None = None,
        keys: Keys | None = None,
        insecure: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_address(address)
        keys = secret.given(keys)
        if keys is None and not (insecure or is_loopback(address)):
            raise UsageError(
                f"without a secret any process that reaches {address} could read and write weights: set "
                f"{secret.FILE_VARIABLE} to one made by `tensorhub keygen`, listen on 127.0.0.1, or say --insecure "
                "(insecure=True)"
            )
        self._lease_key, self._keys = b"" if keys is None else keys.lease_key, keys
        self._clock = clock
        self._limits = HubLimits() if limits is None else limits
        self._files_max, self._is_full = raise_files_max(), False  # full, and logged as such
        self._full_at = -math.inf  # when that was looked into
        self._sessions_max = min(SESSIONS_MAX, max(1, files_left(self._files_max) - FILES_KEPT))
        self._hub, self._is_caught_up, self._caught_up_at = self._new_hub(clock()), True, clock()  # see `_now`
        self._names, self._rates = Names(), Rates(self._limits.messages_per_s_max)
        self._unreachable: list[hub.Received] = []  # Byes for workers that have ended without sending one
        self._failures: dict[bytes, int] = {}  # by session
        self._stop, self._asked = threading.Event(), SimpleQueue[Future[list[Metric]]]()
        self._refused_at = [0.0] * REFUSALS_LOGGED_PER_S
        self._logged_at, self._left_out = deque([float("-inf")] * LOGGED_PER_S, LOGGED_PER_S), 0  # lines
        self._thread = Thread(target=self._run, name="tensorhub-hub")
        try:
            self._listen(address, keys)
            self._thread.start()
        except BaseException:  # an interrupt, too: a context with open sockets would block where it is collected
            if self._thread.ident is not None:
                self.close()
            elif hasattr(self, "_context"):
                self._context.destroy()
            raise

    def _listen(self, address: str, keys: Keys | None) -> None:
        where, self._context = _where(address), zmq.Context()
        self._socket = _router(self._context, where)
        self._strangers = curve.Strangers(self._context, self._socket, self._clock, self._accepted)
        self._doorman = None if keys is None else curve.Doorman(self._context, keys.admitted(), self._strangers.refused)
        if keys is not None:
            curve.guard_hub(self._socket, keys)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, curve.HANDSHAKE_MS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, messages.FROM_CLIENT_SIZE_BYTES_MAX)
        self._socket.setsockopt(zmq.BACKLOG, BACKLOG)
        self._socket.setsockopt(zmq.SNDHWM, SEND_QUEUE_MESSAGES_MAX)
        self._socket.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE_MESSAGES_MAX)
        try:
            self._socket.bind(where)
        except zmq.ZMQError as error:
            raise UsageError(f"the hub cannot listen on {address}: {error}; choose another address or port") from error
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        port = parse_address(self.address, "tcp")[1]
        self._port = ForeignPort(port)  # a child would accept and never serve
        self._unfinished = Unfinished(self._clock(), port)

    def close(self) -> None:
        """Stop the hub; closing twice is fine."""
        self._stop.set()
        self._thread.join()

    def is_alive(self) -> bool:
        """Return whether it still serves."""
        return self._thread.is_alive()

    def figures(self, timeout_s: float = FIGURES_TIMEOUT_S) -> list[Metric]:
        """Return what the hub measures (metrics.py). Any thread may ask. Raise DeadlineExceeded without an answer."""
        asked: Future[list[Metric]] = Future()
        self._asked.put(asked)
        try:
            return asked.result(timeout_s)
        except FutureTimeout:
            raise DeadlineExceeded("the hub's thread does not answer", phase="figures", timeout_s=timeout_s) from None

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _new_hub(self, now: float) -> hub.Hub:
        made = hub.Hub(new_session(), now, self._limits, self._lease_key)
        made.sessions_max = self._sessions_max
        return made

    def _run(self) -> None:
        log.info("hub %s listens on %s, for %d workers", self._hub.session.hex()[:8], self.address, self._sessions_max)
        next_tick = self._clock()
        poller = self._poller()
        try:
            while not self._stop.is_set():
                now = self._now()
                if now >= next_tick:
                    self._handle(hub.Tick(), now)
                    self._check_files()
                    next_tick = self._hub.next_deadline(now)
                if not self._asked.empty():
                    self._say_figures(now)
                ready = dict(poller.poll(int(1000 * min(0.1, max(0.0, next_tick - now)))))
                self._is_caught_up = not ready
                if self._strangers.socket in ready:
                    self._strangers.look()
                if self._doorman is not None and self._doorman.socket in ready:
                    self._doorman.answer()
                if ready:
                    self._receive_burst()
                    next_tick = min(next_tick, self._hub.next_deadline(now))  # a new deadline may be sooner
                self._cut_off(now)
                if why := self._why_anew(now):
                    poller = self._listen_anew(why)
        except Exception:
            log.exception("the hub has failed")
            raise
        finally:
            self._context.destroy()
            self._unfinished.close()

    def _cut_off(self, now: float) -> None:
        for descriptor in self._unfinished.cut(self._strangers.hosts, now, is_all_taken=self._is_caught_up):
            why = "it has sent a message without an end, or more than is taken"
            host = self._strangers.hosts[descriptor] or "an unknown host"
            self._log(logging.WARNING, f"cut off a connection from {host}: {why}")

    def _accepted(self, descriptor: int) -> None:
        self._unfinished.accepted(descriptor, self._clock())

    def _say_figures(self, now: float) -> None:
        """Give the same figures to all threads that have asked."""
        found: list[Metric] = []
        while not self._asked.empty():
            asked = self._asked.get()
            try:
                if not found:
                    left = float(files_left(self._files_max))
                    refused = float(len(self._strangers.report()))
                    found = [*metrics(self._hub.registry, now), hub_figure(*CONNECTIONS_LEFT, left)]
                    found.append(hub_figure(*REFUSED_HOSTS, refused))
                asked.set_result(found)
            except Exception as error:  # it goes on without figures
                asked.set_exception(error)

    def _now(self) -> float:
        """Return the clock's time; notify the hub first when messages may have waited for long until now: this process
        has stood still, or had more to do than it could. `_caught_up_at`: what had come by then was read, or the hub
        knows that it was not."""
        now = self._clock()
        deaf_s = now - self._caught_up_at
        if self._is_caught_up or deaf_s > DEAF_S_MIN:
            self._caught_up_at = now
        if deaf_s > DEAF_S_MIN:
            self._handle(hub.Tick(deaf_s), now)
        return now

    def _check_files(self) -> None:
        """Warn once that no more connections can be accepted, until some can be again."""
        free = files_left(self._files_max)
        if free <= FILES_FREE_MIN and not self._is_full:
            log.warning(
                "no more connections can be accepted: %d files are open, the most that this process may have. Workers "
                "that come now hear nothing. Raise the limit (ulimit -Hn), or see what is connected",
                self._files_max - free,
            )
        self._is_full = free <= (FILES_KEPT if self._is_full else FILES_FREE_MIN)

    def _why_anew(self, now: float) -> str:
        """Return why all connections are to be made anew; "": they stay. ZeroMQ (4.3.5, issue 3238) keeps the file of
        one on which more came when its peer had another one in its place, until the socket is closed; and what has come
        over one that was cut off until it is read."""
        if self._unfinished.has_left_too_much:
            return "too much of what was cut off is still to be read"
        if not self._is_full or now - self._full_at <= FULL_AGAIN_S:
            return ""
        self._full_at, count = now, self._unfinished.count_left(self._strangers.hosts)
        return f"{count} files are of some that are over" if count >= FILES_KEPT else ""

    def _listen_anew(self, why: str) -> zmq.Poller:
        """Make the socket anew: workers connect again, as after a cut link. Return what polls it."""
        self._log(logging.WARNING, f"all connections are made anew: {why}")
        self._context.destroy()
        self._unfinished.close()
        while not self._stop.is_set():
            try:
                self._listen(self.address, self._keys)
                return self._poller()
            except (TensorHubError, zmq.ZMQError, OSError, RuntimeError) as error:
                self._context.destroy()  # others may have had the port, or the files, for a moment
                self._log(logging.WARNING, f"the hub cannot listen, and tries again: {error}")
                self._stop.wait(AGAIN_S)
        return zmq.Poller()

    def _poller(self) -> zmq.Poller:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._strangers.socket, zmq.POLLIN)
        if self._doorman is not None:
            poller.register(self._doorman.socket, zmq.POLLIN)
        return poller

    def _receive_burst(self) -> None:
        for _ in range(RECEIVE_BURST_MAX):
            try:
                identity, frame, role = self._receive_one()
            except zmq.Again:
                self._is_caught_up = True
                return
            more = self._drain() if self._socket.getsockopt(zmq.RCVMORE) else 0
            if not self._listens_to(identity, len(frame)):
                continue
            message = None
            try:
                message = messages.decode_from_client(frame)
                if more or len(identity) != 16:
                    raise ProtocolError("not a tensorhub client: is something else talking to this port?")
            except ProtocolError as error:
                self._refuse(identity, error, is_logged=more > 0 or message is None)
                continue
            self._handle(hub.Received(self._names.public(identity, self._hub.workers), message, role), self._now())

    def _refuse(self, identity: bytes, error: ProtocolError, *, is_logged: bool) -> None:
        # ZeroMQ renames a connection that its worker has replaced, as they do when this process was stopped.
        now = self._clock()
        if is_logged and now - self._refused_at[0] > 1.0:
            self._refused_at = [*self._refused_at[1:], now]
            self._log(logging.WARNING, f"refused a message from {public_name(identity).hex()[:8]}: {error}")
        self._send(identity, messages.Refused(0, "ProtocolError", str(error)))

    def _receive_one(self) -> tuple[bytes, bytes, Role]:
        """Return the connection's identity, a frame, and its role: publisher, where the hub has no secret."""
        identity, frame = self._socket.recv(NOBLOCK), self._receive_frame()
        return identity, frame.bytes, "publisher" if self._doorman is None else cast(Role, frame.get(curve.USER))

    def _receive_frame(self) -> zmq.Frame:
        frame = self._socket.recv(NOBLOCK, copy=False)
        self._unfinished.took(frame)
        return frame

    def _drain(self) -> int:
        """Discard the rest of a message of several frames, which is none of ours; return how many there were."""
        frames = 0
        while self._socket.getsockopt(zmq.RCVMORE):
            self._receive_frame()
            frames += 1
        return frames

    def _handle(self, event: hub.Event, now: float) -> None:
        self._carry_out(self._decide(event, now))
        while self._unreachable:
            self._carry_out(self._decide(self._unreachable.pop(), now))

    def _decide(self, event: hub.Event, now: float) -> list[hub.Effect]:
        try:
            return self._hub.handle(event, now)
        except Exception:
            log.exception("the hub has failed over %.1000r: please report this", event)
            return self._after_failure(event, now)

    def _after_failure(self, event: hub.Event, now: float) -> list[hub.Effect]:
        session = event.session if isinstance(event, hub.Received) else None
        try:
            effects = self._hub.survive(session, now)
        except Exception:
            log.exception("the hub starts afresh: its records were damaged")
            self._hub, effects = self._new_hub(now), []
        if isinstance(event, hub.Received):  # or it would ask again and again
            self._failures[event.session] = self._failures.pop(event.session, 0) + 1
            while len(self._failures) > BARRED_MAX:
                del self._failures[next(iter(self._failures))]
            hello = isinstance(event.message, messages.Hello)  # a refused Hello answers no request
            request_id = 0 if hello else getattr(event.message, "request_id", 0)
            refusal = messages.Refused(request_id, "ProtocolError", "the hub failed over this: its log says why")
            effects = [*effects, hub.Send(event.session, refusal)]
        return effects

    def _listens_to(self, identity: bytes, size_bytes: int) -> bool:
        """Return whether this session is neither over its rate nor barred for failures, before anything is decoded."""
        now = self._clock()
        barred = self._failures and self._failures.get(public_name(identity), 0) >= FAILURES_PER_SESSION_MAX
        if self._rates.admits(identity, size_bytes, now) and not barred:
            return True
        if self._rates.may_notify(identity, now):
            why = "the hub has failed over this session too often: begin another one"
            if not barred:
                why = f"more than {self._limits.messages_per_s_max} messages a second for too long: some were dropped"
            self._send(identity, messages.Refused(0, "UsageError", why))
        return False

    def _carry_out(self, effects: list[hub.Effect]) -> None:
        for effect in effects:
            match effect:
                case hub.Send(session, message):
                    self._notify(session, message)
                case hub.Log(text, is_warning):
                    self._log(logging.WARNING if is_warning else logging.INFO, text)
                    if is_warning:
                        record("hub_warning", worker="hub", what=text)

    def _notify(self, session: bytes, message: messages.HubMessage) -> None:
        identity = self._names.identity(session)
        if identity is None:
            return
        if isinstance(message, messages.Status):
            message.report["connections_left"] = files_left(self._files_max)
            message.report["refused_hosts"] = self._strangers.report()
        if isinstance(message, messages.Status | messages.Versions):  # their cost grows with the records
            self._rates.charge(identity, len(self._hub.workers))
        self._send(identity, message)

    def _send(self, identity: bytes, message: messages.HubMessage) -> None:
        frame = _frame(message)
        try:
            self._socket.send(identity, MORE)
            self._socket.send(frame, NOBLOCK)
        except zmq.ZMQError as error:  # a full queue or a peer that is gone: it asks again, or expires
            self._dropped(public_name(identity), error)

    def _dropped(self, session: bytes, error: zmq.ZMQError) -> None:
        """Handle a message that could not be sent. The kernel closes the connection of a process that ends: if others
        have reported that it has, this confirms it, and stands for the Bye that it did not send."""
        log.debug("message to %s dropped: %s", session.hex()[:8], error)
        worker = self._hub.workers.get(session)
        if error.errno == zmq.EHOSTUNREACH and worker is not None and worker.said_gone:
            self._unreachable.append(hub.Received(session, messages.Bye(), worker.role))

    def _log(self, level: int, text: str) -> None:
        """Log a line of any content; its rate is limited, so that peers cannot fill the disk."""
        now = self._clock()
        if now - self._logged_at[0] <= 1.0:
            self._left_out += 1
            return
        self._logged_at.append(now)
        if self._left_out:
            log.warning("%d lines are left out: there were more than %d in a second", self._left_out, LOGGED_PER_S)
            self._left_out = 0
        log.log(level, "%s", printable(text))


def _frame(message: messages.HubMessage) -> bytes:
    """Return the encoded message, or a refusal in place of an answer that is too large for a client to take."""
    try:
        frame = messages.encode(message)
        if len(frame) <= messages.FROM_HUB_SIZE_BYTES_MAX:
            return frame
        text = f"the answer has {len(frame)} bytes, and none may have more than {messages.FROM_HUB_SIZE_BYTES_MAX}"
    except OverflowError as error:  # a sum of numbers of peers, of 64 bits or more
        text = f"the answer cannot be sent: {error}"
    return messages.encode(messages.Refused(getattr(message, "request_id", 0), "UsageError", text))


def start_server(
    address: str = "tcp://127.0.0.1:0",
    *,
    limits: HubLimits | None = None,
    keys: Keys | None = None,
    insecure: bool = False,
) -> Server:
    """Start a hub in a thread of this process, for adapters that bring their own and for tests."""
    return Server(address, limits=limits, keys=keys, insecure=insecure)
