"""What the hub says in answer to one event. PURE: effects, which the server carries out."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from tensorhub_plugins.core.hub.state import Worker
from tensorhub_plugins.core.protocol import messages as m

REPLIES_KEPT_MAX = 256  # per session, for requests that are sent again


class Send(msgspec.Struct, frozen=True, gc=False):
    """A message for the worker whose session (ZeroMQ identity) this is."""

    session: bytes
    message: m.HubMessage


class Log(msgspec.Struct, frozen=True, gc=False):
    """A line for people."""

    text: str


Effect: TypeAlias = Send | Log


class Outbox:
    """The effects of the event that is being handled, in order."""

    def __init__(self) -> None:
        self._effects: list[Effect] = []

    def take(self) -> list[Effect]:
        """The effects so far, which are then the caller's."""
        effects, self._effects = self._effects, []
        return effects

    def send(self, session: bytes, message: m.HubMessage) -> None:
        """Send this to the worker of that session."""
        self._effects.append(Send(session, message))

    def log(self, text: str) -> None:
        """A line for people."""
        self._effects.append(Log(text))

    def reply(self, worker: Worker, message: m.Reply) -> None:
        """Answer a request, and remember the answer: the request may be sent again."""
        self.remember(worker, message)
        self.send(worker.session, message)

    def remember(self, worker: Worker, message: m.Reply) -> None:
        """Keep this answer for a request that is sent again: the last REPLIES_KEPT_MAX of a session."""
        worker.replies[message.request_id] = message
        while len(worker.replies) > REPLIES_KEPT_MAX:
            del worker.replies[next(iter(worker.replies))]

    def answer_again(self, worker: Worker, request_id: int) -> bool:
        """Whether this request was answered before; the same reply is sent once more."""
        reply = worker.replies.get(request_id)
        if reply is None:
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
