"""The client's connection to the hub: one thread and one socket around the pure `Session`.

Callers in any thread `ask` and get a future; the thread sends, receives, sends heartbeats, and a new Hello when the hub
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
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout  # the built-in one only since Python 3.11
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import msgspec
import zmq
from typing_extensions import assert_never

from tensorhub_plugins.core import resources, work
from tensorhub_plugins.core.client import calls, session
from tensorhub_plugins.core.deadline import Deadline, aside, bounded
from tensorhub_plugins.core.errors import HubUnreachable, ProtocolError, TensorHubError, UsageError, refusal
from tensorhub_plugins.core.process_lifetime import close_at_exit
from tensorhub_plugins.core.protocol import messages
from tensorhub_plugins.core.protocol.address import (
    check_route,
    hub_addresses,
    lookup,
    new_session,
    no_way,
    parse_address,
)
from tensorhub_plugins.core.protocol.directive import Directive
from tensorhub_plugins.core.protocol.fields import COUNT_MAX
from tensorhub_plugins.core.security import curve
from tensorhub_plugins.core.security.keys import Keys
from tensorhub_plugins.core.security.leases import Gate
from tensorhub_plugins.core.threads import Thread
from tensorhub_plugins.core.transfer.unreached import Unreached
from tensorhub_plugins.core.types import ShardKey, attempt_of, printable

if TYPE_CHECKING:
    from tensorhub_plugins.core.client.requested_copies import Copies

log = logging.getLogger("tensorhub.client")
SaidT = TypeVar("SaidT", messages.Hello, session.Request)

RECONNECT_FIRST_MS = 50
RECONNECT_MAX_MS = 1000
LINK_HEARTBEAT_MS, LINK_TIMEOUT_MS = 2000, 10_000  # answered by the hub's socket, also while the hub is busy
CONNECT_TIMEOUT_MS = 2000
BYE_LINGER_MS = 200  # for the Bye to leave this process; without it the hub would wait for the session to expire
REFUSED_AGAIN_S = 0.5  # when all addresses have refused: the hub may be about to start
LOOK_UP_EVERY_S = 1.0  # for the hub's name, while the hub is silent: it may have moved
FAR_S = 0.03  # a round trip: to another continent; a hub that is near answers in a millisecond, or a few
QUIET_HEARTBEATS = 2  # without a message: the hub is silent
TERM_S = 2 * BYE_LINGER_MS / 1000
HASTY_S = 1.0  # a hub that is there may need longer for its first answer
CLOSE_S = 2.0  # the thread needs at most so long to send its Bye, where all is well


def _dealer(context: zmq.Context[zmq.Socket[bytes]], session: bytes, keys: Keys | None) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    curve.guard_client(socket, keys)
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.MAXMSGSIZE, messages.FROM_HUB_SIZE_BYTES_MAX),
        (zmq.IMMEDIATE, 1),  # queue nothing for a hub that is away: the session machine resends what matters
        # No end: ZeroMQ aborts the process where a hub that it has stopped to read is reset before the next heartbeat.
        (zmq.RCVHWM, 0),
        (zmq.RECONNECT_IVL, RECONNECT_FIRST_MS),
        (zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS),
        # After a cut link TCP retransmits with exponential backoff. A new connection takes only seconds.
        (zmq.HEARTBEAT_IVL, LINK_HEARTBEAT_MS),
        (zmq.HEARTBEAT_TIMEOUT, LINK_TIMEOUT_MS),
        (zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS),
    ):
        socket.setsockopt(option, value)
    socket.setsockopt(zmq.IDENTITY, session)
    return socket


def end_context(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """Terminate it, which takes as long as ZeroMQ's own thread; the caller waits only for the Bye to be sent."""
    with contextlib.suppress(FutureTimeout, OSError):
        aside(context.term).result(TERM_S)


class Answer(Future[messages.Reply]):
    """The answer to a request, which may still be on its way."""

    def __init__(self, request: session.Request) -> None:
        super().__init__()
        self.request, self.asked_at = request, time.monotonic()


class HubLink:
    """A session with the hub at `address`, or at the one of several (with commas) that answers. keys: None, if it has
    no secret. gate: receives the hub's clock. redial_s: connect anew after so much silence.

    on_source_gone, on_may_release, on_directive, on_doubted, and the methods of copies: called in the link's thread,
    must not block. Raise UsageError for a malformed address and for a hub that does not admit us, HubUnreachable when
    no hub answers within connect_timeout_s."""

    @resources.named()
    def __init__(
        self,
        address: str,
        identity: messages.Hello,
        *,
        connect_timeout_s: float,
        on_source_gone: Callable[[bytes], None],
        on_may_release: Callable[[session.MayRelease], None],
        on_directive: Callable[[Directive], None] = lambda directive: None,
        on_doubted: Callable[[session.Doubted | session.Disowned], None] = lambda effect: None,
        copies: Copies | None = None,
        keys: Keys | None = None,
        gate: Gate | None = None,
        redial_s: float | None = None,
    ) -> None:
        deadline = Deadline.after(bounded(connect_timeout_s, "connect_timeout_s"))
        self._addresses, self._dialed = hub_addresses(address), 0
        self._found: dict[str, tuple[str, ...]] = {}  # address -> its IP addresses
        self.session, self._name = new_session(), f"{identity.replica}/{identity.shard}"
        self._on_source_gone, self._on_may_release = on_source_gone, on_may_release
        self._on_directive, self._on_doubted, self._gate, self._copies = on_directive, on_doubted, gate, copies
        often = session.REDIAL_S if len(self._addresses) == 1 else session.REDIAL_SEVERAL_S
        redial_s = often if redial_s is None else redial_s
        self._machine = session.Session(_checked(identity), time.monotonic(), redial_s=redial_s, gate=gate)
        self._lock, self._outbox, self.unreached = threading.RLock(), deque[bytes](), Unreached()
        self._asked: dict[int, Answer] = {}
        self._answers_in_s = float("inf")  # the shortest time so far: no less than a round trip
        self._welcomed: Future[None] = Future()
        self._closing, self._refused, self._nameless = False, "", ""  # why it does not admit us, or has no address
        resources.try_for_zmq(1)
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._context, self._keys = zmq.Context(), keys
        self._is_to_redial = self._is_stale = False  # stale: the connection, which is to be replaced
        self._thread = Thread(target=self._run, name="tensorhub-hublink")
        self._begin()
        close_at_exit(self)  # with its Bye: else the hub would wait for the session to expire
        try:
            calls.result(self._welcomed, timeout_s=deadline.remaining())
        except FutureTimeout:
            self._close(0.0)
            self._raise_unheard(address, connect_timeout_s)
        except BaseException:
            self._close(CLOSE_S)
            raise

    def _raise_unheard(self, address: str, timeout_s: float) -> NoReturn:
        is_asking = self._lookup is not None and not self._lookup.done()  # an IP address needs no resolver
        if not self._found and (self._nameless or is_asking):
            problem = TimeoutError(self._nameless or "the resolver does not answer")
            raise no_way(address, problem) from problem
        why = f" (its name cannot be looked up: {self._nameless})" if self._nameless else ""
        unheard = self._handshakes.unheard() if len(self._addresses) == 1 else f"no hub answers at {address}"
        hasty = f", or wait for longer than {timeout_s:g} s" if timeout_s < HASTY_S else ""
        raise HubUnreachable(
            f"{unheard}: start one with `tensorhub server`, or correct the address{why}{hasty}",
            peer=address,
            phase="connect",
            timeout_s=timeout_s,
        ) from None

    # --- for callers in any thread ---

    @property
    def last_request_id(self) -> int:
        """Return the last request number that was used."""
        return self._machine.last_request_id

    @property
    def silent_s(self) -> float:
        """Return the seconds since the hub was heard; it answers a heartbeat every second."""
        return time.monotonic() - self._machine.heard_at

    @property
    def is_far(self) -> bool:
        """Return whether no answer was here within FAR_S: no caller should wait for one that it does not need."""
        return self._answers_in_s > FAR_S

    @property
    def directive(self) -> Directive:
        """Return what operators have decided, as far as this worker knows."""
        return self._machine.directive

    def origin(self, version: int) -> str:
        """Return the history, and the mark of the attempt in which this version was published, if one was begun."""
        own, marks = self._machine.identity, {each.number: each.mark.hex() for each in self.directive.attempts}
        return f"{own.run}/{own.model}/{marks.get(attempt_of(version), '')}".removesuffix("/")

    def is_awaited(self, key: ShardKey) -> bool:
        """Return whether others read what this worker is to convert, as far as the hub knew when it chose it."""
        return self._machine.claims.get(key, True)

    def ask(self, make: Callable[[int], session.Request], deadline: float) -> Answer:
        """Send the request that `make` builds from its number. deadline: on time.monotonic().

        The answer is the reply (never Refused), or raises what the hub refused with, or HubUnreachable. Raise
        UsageError for what no hub can read."""
        with self._lock:
            if self._closing:
                raise UsageError("the client is closed")
            answer = Answer(_checked(make(self._machine.next_request_id())))
            self._asked[answer.request.request_id] = answer
            self._carry_out(self._machine.handle(session.Ask(answer.request, deadline), time.monotonic()))
        self._wake()
        return answer

    def answer(self, make: Callable[[int], session.Request], deadline: float) -> messages.Reply:
        """Ask the hub and wait for the answer; the session bounds this by ending every request at its deadline."""
        answer = self.ask(make, deadline)
        return calls.result(answer, abandon=lambda: self.end_lease(messages.Release(answer.request.request_id)))

    def end_lease(self, ended: messages.Release) -> None:
        """Notify the hub that nothing more is read under this grant, or that no caller waits for the answer of this
        request any more. Return at once; it is sent again until the hub knows."""
        with self._lock:
            if self._closing:
                return
            if ended.shard is None:
                self._asked.pop(ended.request_id, None)  # its caller has left, if it has no answer
            self._carry_out(self._machine.handle(ended, time.monotonic()))
        self._wake()

    def renew(self, came: Mapping[int, int]) -> None:
        work.done()
        with self._lock:
            self._machine.renew(came)

    def leave(self) -> None:
        """Notify the hub that what we hold is about to go. Return at once."""
        with self._lock:
            self._machine.leave(time.monotonic())
        self._wake()

    def close(self) -> None:
        """Send a Bye and stop; closing twice is fine."""
        self._close(CLOSE_S)

    def _close(self, timeout_s: float) -> None:
        """Stop the thread, and wait for it so long; it frees what it has even if that takes longer."""
        with self._lock:
            self._closing = True
        self._wake()
        self._thread.join(timeout_s)

    @property
    def address(self) -> str:
        """Return where the hub is, or is looked for now."""
        return self._addresses[self._dialed % len(self._addresses)]

    # --- the thread ---

    def _begin(self) -> None:
        try:
            self._open()
            self._look_up()
            self._thread.start()
        except BaseException:
            self._context.destroy(linger=0)
            self._close_pipe()
            raise

    def _open(self) -> None:
        made = _dealer(self._context, self.session, self._keys)
        try:
            handshakes = curve.Handshakes(made, self.address, self._keys, self._wake)
        except BaseException:
            made.close(linger=0)
            raise
        self._socket, self._handshakes = made, handshakes

    def _look_up(self) -> None:
        """Begin to look up the hub's name. This thread never waits for it: a resolver may never answer."""
        looked_up = lookup(parse_address(self.address, "tcp")[0])
        self._lookup: Future[tuple[str, ...]] | None = looked_up
        self._looked_at = time.monotonic()
        looked_up.add_done_callback(lambda _: self._wake())

    def _connect_if_due(self, poller: select.poll, now: float) -> None:
        """Look up the next address, when that is due, or this one while the hub is silent there; connect."""
        if self._is_to_redial or (self._handshakes.is_refused and self._is_refused(now)):
            self._is_to_redial, self._is_stale = False, True
            self._dialed += 1
            self._look_up()
        is_quiet = now - self._machine.heard_at > QUIET_HEARTBEATS * self._machine.heartbeat_s
        if is_quiet and self._lookup is None and now - self._looked_at > LOOK_UP_EVERY_S:
            self._look_up()
        if self._lookup is not None and self._lookup.done():
            found, self._lookup = self._lookup, None
            self._connect(found, poller)

    def _is_refused(self, now: float) -> bool:
        """Return whether to go on to the next address, as this one has refused: at once until each has been tried."""
        if self._is_stale or self._welcomed.done():
            return False
        choices = len(self._addresses) * max(map(len, self._found.values()), default=1)
        return choices > 1 and (self._dialed < choices - 1 or now - self._looked_at > REFUSED_AGAIN_S)

    def _connect(self, found: Future[tuple[str, ...]], poller: select.poll) -> None:
        """Connect to where the hub's name resolves: at first, when the connection is to be replaced, and when the name
        resolves elsewhere than before. While it cannot be looked up, use the last result."""
        try:
            self._found[self.address], self._nameless = found.result(), ""
        except (OSError, ValueError) as error:
            self._nameless = str(error)
            self._cannot_begin(no_way(self.address, error))
        known, port = self._found.get(self.address, ()), parse_address(self.address, "tcp")[1]
        if not known:
            self._dialed += not self._handshakes.endpoint  # try the next address, at once until each has been tried
            if 0 < self._dialed < len(self._addresses):
                self._look_up()
            return
        if max(len(known), len(self._addresses)) > 1:
            self._machine.redial_s = min(self._machine.redial_s, session.REDIAL_SEVERAL_S)
        if self._handshakes.endpoint:
            if not self._is_stale and self._handshakes.leads_to(known, port):
                return
            if not self._reopen(poller):
                return
        self._is_stale = False
        try:
            check_route(self.address, known)
        except TensorHubError as error:
            self._cannot_begin(error)  # later there may be one again
        try:
            self._handshakes.connect(known[self._dialed // len(self._addresses) % len(known)], port)
        except zmq.ZMQError as error:
            self._cannot_begin(UsageError(f"{self.address!r} is no hub address: use tcp://host:port ({error})"))

    def _cannot_begin(self, error: TensorHubError) -> None:
        """Make the constructor raise this error where there is no other address to try."""
        if len(self._addresses) == 1 and not self._welcomed.done():
            self._welcomed.set_exception(error)

    def _reopen(self, poller: select.poll) -> bool:
        """Return whether a new connection was opened; out of descriptors the old one stays, until the next try."""
        before, handshakes = self._socket, self._handshakes
        say = log.info if self._welcomed.done() else log.debug
        say("%s: connects anew to the hub, at %s", self._name, self.address)
        try:
            self._open()
        except zmq.ZMQError as error:
            log.warning("%s: cannot connect anew: %s", self._name, resources.refusal(error) or error)
            return False
        for each in (before, handshakes.socket):
            poller.unregister(int(each.getsockopt(zmq.FD)))
        handshakes.close()
        before.close(linger=0)
        self._register(poller)
        return True

    def _register(self, poller: select.poll) -> None:
        for each in (self._socket, self._handshakes.socket):
            poller.register(int(each.getsockopt(zmq.FD)), select.POLLIN)

    def _run(self) -> None:
        poller = select.poll()
        self._register(poller)
        poller.register(self._wake_read, select.POLLIN)
        try:
            while True:
                if is_last := self._closing:  # a Hello after it would keep us listed until the session expires
                    self._outbox.append(messages.encode(messages.Bye()))
                self._flush()
                if is_last:
                    return
                self._check_handshakes()
                self._receive_all()
                with self._lock:
                    now = time.monotonic()
                    if self._machine.is_heartbeat_due(now):
                        self._machine.unreached = self.unreached.sessions(now)
                        self._machine.worked, self._machine.lacks = work.count(), resources.lacked()
                    self._carry_out(self._machine.handle(session.Tick(), now))
                    wait_s = self._machine.next_deadline() - time.monotonic()
                self._connect_if_due(poller, time.monotonic())
                self._flush()
                if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                    continue  # the descriptor is edge triggered: read everything before waiting for it
                poller.poll(max(1.0, min(1000.0, wait_s * 1000)))
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
        except Exception:
            log.exception("%s: the connection to the hub has failed", self._name)
        finally:
            with self._lock:
                self._closing = True
                unanswered = list(self._asked.values())
                self._asked.clear()
            for answer in unanswered:
                still = ", which may carry it out until its deadline" if type(answer.request) in FIND_OUT else ""
                answer.set_exception(UsageError(f"the client was closed while it waited for the hub{still}"))
            self._free()

    def _note(self, message: messages.Welcome | messages.Alive) -> None:
        """Act on a Welcome, the hub's clock, an idle reader that lost its lease on us, and a request for a copy."""
        if isinstance(message, messages.Welcome):
            self._refused = ""
            if not self._welcomed.done():
                self._check_handshakes()  # from now on a child may be forked, and must not inherit this connection
            if not self._welcomed.done():
                self._welcomed.set_result(None)
        else:
            if message.idle:
                reader = printable(message.idle)
                log.warning("%s: %s kept a place here without reading, and has lost it", self._name, reader)
            if message.unreached:
                log.warning("%s: %s", self._name, printable(message.unreached))
        if self._copies is not None:
            self._machine.room_bytes = min(self._copies.room_bytes(), COUNT_MAX)
            if isinstance(message, messages.Alive) and message.hold:
                self._copies.hold(message.hold)
        if self._gate is not None and self._machine.hub is not None and message.clock:
            self._gate.hear(self._machine.hub, message.clock, time.monotonic())

    def _check_handshakes(self) -> None:
        problem = self._handshakes.problem(time.monotonic())
        if problem is None:
            return
        if not self._welcomed.done():
            self._welcomed.set_exception(UsageError(problem, peer=self.address, phase="connect"))
        else:
            log.error("%s: %s", self._name, problem)

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
            if isinstance(message, messages.Welcome | messages.Alive):
                self._note(message)

    def _carry_out(self, effects: list[session.Effect]) -> None:
        for effect in effects:
            match effect:
                case session.Send(message):
                    self._outbox.append(messages.encode(message))
                case session.Answered(request, reply):
                    self._resolve(request, reply)
                case session.Expired():
                    self._expire(effect)
                case session.SourceGone(gone):
                    self._on_source_gone(gone)
                case session.MayRelease():
                    self._on_may_release(effect)
                case session.Directed(directive):
                    self._on_directive(directive)
                case session.Doubted() | session.Disowned():
                    self._on_doubted(effect)
                case session.HubAway(silent_s):
                    log.warning("%s: no word from the hub at %s for %.0f s", self._name, self.address, silent_s)
                case session.Redial():
                    self._is_to_redial = True
                case session.HubBack():
                    self._log_back(effect)
                case _:
                    assert_never(effect)

    def _log_back(self, effect: session.HubBack) -> None:
        log.info("%s: the hub is back%s", self._name, ", restarted: told it all" if effect.restarted else "")
        if effect.former:
            log.error("%s: two hubs answer at %s by turns: %s", self._name, self.address, TWO_HUBS)

    def _resolve(self, request: int, reply: messages.Reply) -> None:
        answer = self._asked.pop(request, None)
        if answer is not None:
            self._answers_in_s = min(self._answers_in_s, time.monotonic() - answer.asked_at)
            if isinstance(reply, messages.Refused):
                answer.set_exception(_refused(reply, peer=self.address, **_described(answer.request)))
            else:
                answer.set_result(reply)
        elif request == 0:  # the hub refuses us altogether
            assert isinstance(reply, messages.Refused)
            if self._welcomed.done():
                self._shut_out(printable(reply.message))
            else:
                self._welcomed.set_exception(_refused(reply, phase="connect"))

    def _shut_out(self, why: str) -> None:
        """Keep why the hub refuses us, until we are welcome again: log it once, and answer requests with it."""
        if why != self._refused:
            self._refused = why
            log.error("%s: the hub refuses this worker: %s", self._name, why)

    def _expire(self, expired: session.Expired) -> None:
        answer = self._asked.pop(expired.request_id, None)
        if answer is not None:
            why = "the hub does not answer" if expired.hub_silent else "the hub did not decide in time"
            why = self._handshakes.shut_out or self._refused or why
            why += outcome_text(answer.request, was_sent=expired.was_sent)
            answer.set_exception(HubUnreachable(why, peer=self.address, **_described(answer.request)))

    def _flush(self) -> None:
        while self._outbox:
            try:
                self._socket.send(self._outbox[0], zmq.NOBLOCK)
            except zmq.Again:
                # No hub. Keep only the last message, mostly a Hello, so that it is sent as soon as one listens; the
                # next heartbeat recovers what else was lost.
                while len(self._outbox) > 1:
                    self._outbox.popleft()
                return
            self._outbox.popleft()

    def _wake(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):
            if self._wake_write >= 0:
                os.write(self._wake_write, b"x")

    def _free(self) -> None:
        self._handshakes.close()
        self._socket.close(linger=BYE_LINGER_MS)
        end_context(self._context)
        self._close_pipe()

    def _close_pipe(self) -> None:
        with self._lock:
            os.close(self._wake_read)
            os.close(self._wake_write)
            self._wake_read = self._wake_write = -1


TWO_HUBS = "each knows only its own workers, and versions are not found; end one, or give each an address"
PHASES = {messages.Acquire: "find sources", messages.Target: "wait", messages.AskVersions: "versions"}


# For a request without an answer: how to find out whether it was carried out.
FIND_OUT: dict[type, str] = {
    messages.Publish: "if so it is taken back, and readers may have it: publish the same bytes, or a higher number",
    messages.Pin: "Client.pinned and `tensorhub status` say which version is pinned once the hub is heard",
    messages.Withdraw: "`tensorhub status` says which versions are withdrawn once the hub is heard",
    messages.Begin: "begin again: what this attempt may have ended is over, and the next one is above it",
    messages.Retain: "retain again: the last one counts",
}


def outcome_text(request: session.Request, *, was_sent: bool) -> str:
    """Return what the effect may be of a request that was abandoned and changes something; empty for others."""
    if type(request) not in FIND_OUT:
        return ""
    if not was_sent:
        return "; nothing was changed, as it was not even sent"
    return f"; it may have been carried out before, and will not be from now on: {FIND_OUT[type(request)]}"


def _refused(reply: messages.Refused, **context: Any) -> TensorHubError:
    return refusal(reply.error, printable(reply.message), **context)


def _checked(message: SaidT) -> SaidT:
    """Return a caller's message, or raise UsageError when it cannot be encoded, or the hub would not read it: before it
    is kept and the link's thread sends it again and again."""
    timed: dict[str, float] = {"timeout_s": 0.0} if hasattr(message, "timeout_s") else {}  # sent as seconds left
    try:
        messages.decode_from_client(messages.encode(msgspec.structs.replace(message, **timed)))
    except (ProtocolError, TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"what the hub is told ({type(message).__name__}) has a value of no use: {error}") from error
    return message


def _described(request: session.Request) -> dict[str, Any]:
    """Return what an error says of the failed request: its phase, and the version that it was about."""
    phase = PHASES.get(type(request), type(request).__name__.lower())
    match request:
        case messages.Publish(_, holding):
            version = holding.key.version
        case messages.Unpublish(_, keys):
            version = keys[0].version if keys else 0
        case messages.Abandon(_, key):
            version = key.version
        case messages.Begin():
            version = request.step
        case messages.Acquire() | messages.Wait() | messages.Pin() | messages.Withdraw():
            version = request.version
        case _:
            version = 0
    return {"phase": phase, "version": version or None}
