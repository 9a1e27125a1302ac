"""The effects of the hub's answer to one event. PURE: the server carries them out."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from tensorhub_plugins.core.hub.state import Worker, drop
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.protocol.fields import TEXT_LENGTH_MAX

REPLIES_KEPT_MAX = 256  # per session, for requests that are sent again
REPLIES_KEPT_BYTES_MAX = 1 << 20  # of them together, about; but the last one is always kept


class Send(msgspec.Struct, frozen=True, gc=False):
    """A message for the worker whose session (its public name) this is."""

    session: bytes
    message: m.HubMessage


class Log(msgspec.Struct, frozen=True, gc=False):
    """A line for the log."""

    text: str
    is_warning: bool = False  # an operator has to repair something


Effect: TypeAlias = Send | Log


class Outbox:
    """The effects of the event that is being handled, in order."""

    def __init__(self) -> None:
        self._effects: list[Effect] = []

    def drain(self) -> list[Effect]:
        """Return the effects so far, and forget them."""
        effects, self._effects = self._effects, []
        return effects

    def send(self, session: bytes, message: m.HubMessage) -> None:
        """Send this to the worker of that session."""
        if isinstance(message, m.Refused):  # it may quote names of others, and is to be decoded
            message = msgspec.structs.replace(message, message=message.message[:TEXT_LENGTH_MAX])
        self._effects.append(Send(session, message))

    def log(self, text: str) -> None:
        """Add a line for the log."""
        self._effects.append(Log(text))

    def warn(self, text: str) -> None:
        """Add a warning about something that an operator has to repair."""
        self._effects.append(Log(text, is_warning=True))

    def reply(self, worker: Worker, message: m.Reply) -> None:
        """Answer a request, and remember the answer: the request may be sent again."""
        self.remember(worker, message)
        self.send(worker.session, message)

    def remember(self, worker: Worker, message: m.Reply) -> None:
        """Keep this answer in case the request is sent again: the last ones of a session are kept."""
        replies = worker.replies
        before = replies.pop(message.request_id, None)
        worker.replies_size_bytes += _size_bytes(message) - (_size_bytes(before) if before is not None else 0)
        replies[message.request_id] = message
        while len(replies) > REPLIES_KEPT_MAX or (
            worker.replies_size_bytes > REPLIES_KEPT_BYTES_MAX and len(replies) > 1
        ):
            worker.replies_size_bytes -= _size_bytes(replies.pop(next(iter(replies))))

    def settle(self, worker: Worker, heartbeat: m.Heartbeat) -> None:
        """Forget what was kept in case a request is sent again, or comes late: its sender has the answer. Every version
        would leave some hundred bytes with each worker."""
        last = heartbeat.last_request_id
        if last < worker.settled:
            return  # delayed on the way
        asked, before = set(heartbeat.pending), set(worker.asked)
        if asked != before or last != worker.settled:
            worker.asked = tuple(each for each in asked if each > worker.settled or each in before)
            worker.settled = last
        if not (worker.replies or worker.lease_bounds or worker.withdrawn):
            return
        for request_id in [each for each in worker.replies if each <= last and each not in asked]:
            worker.replies_size_bytes -= _size_bytes(worker.replies[request_id])
            drop(worker.replies, request_id)
        reads = asked | heartbeat.leases.keys() | worker.leases.keys()
        for request_id in [each for each in worker.lease_bounds if each <= last and each not in reads]:
            drop(worker.lease_bounds, request_id)
        first = min(asked, default=last + 1)
        for key in [key for key, unpublish in worker.withdrawn.items() if unpublish < first]:
            drop(worker.withdrawn, key)

    def answer_again(self, worker: Worker, request_id: int) -> bool:
        """Return whether this request was answered before, and send the same reply once more if so."""
        if (reply := worker.replies.get(request_id)) is None:
            return False
        self.send(worker.session, reply)
        return True

    def refuse(self, worker: Worker, request_id: int, error: m.ErrorCode, text: str) -> None:
        """Answer with an error. error: the name of its class (errors.py); text: what to do."""
        self.log(f"{worker.name}: refused: {text}")
        self.reply(worker, m.Refused(request_id, error, text))

    def refuse_session(self, session: bytes, text: str) -> None:
        """Refuse a session that is not known as a worker."""
        self.log(f"refused: {text}")
        self.send(session, m.Refused(0, "UsageError", text))


def _size_bytes(reply: m.Reply) -> int:
    """Return about what it takes to keep this reply; what it shares with the records does not count."""
    match reply:
        case m.Granted():
            return 256 + 384 * len(reply.grants)
        case m.Versions():
            return 256 + 64 * sum(1 + len(names) for info in reply.versions for names in info.layouts.values())
        case m.Unpublished():
            return 256 + 64 * len(reply.cut_off)
        case m.Refused():
            return 256 + len(reply.message)
        case _:
            return 256
