"""How a trainer begins an attempt: it asks, checks whether its former incarnation has ended, and asks again."""

from __future__ import annotations

from collections.abc import Callable

from tensorhub_plugins.core.client import session
from tensorhub_plugins.core.deadline import Deadline
from tensorhub_plugins.core.process import is_gone
from tensorhub_plugins.core.protocol import messages
from tensorhub_plugins.core.protocol.lineage import Attempt

Ask = Callable[[Callable[[int], session.Request], float], messages.Reply]


def begin(ask: Ask, step: int, word: str, timeout_s: float) -> Attempt:
    """Begin an attempt, as `Client.begin`. ask: sends a request, built from its number, and waits so many seconds."""
    deadline = Deadline.after(timeout_s)
    reply = ask(lambda n: messages.Begin(n, step, timeout_s, word), timeout_s)
    if isinstance(reply, messages.Rivals):
        gone = tuple(process for process in reply.processes if is_gone(process))
        left_s = deadline.remaining()
        reply = ask(lambda n: messages.Begin(n, step, left_s, word, gone, waits=True), left_s)
    assert isinstance(reply, messages.Begun)
    return reply.attempt
