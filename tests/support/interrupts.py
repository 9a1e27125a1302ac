"""Interrupts at a chosen line of core, of the calling thread or of the one that carries its call out: deterministic."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from client_stage import until

import tensorhub_plugins.core
from tensorhub_plugins.core.capturing import acting
from tensorhub_plugins.core.client import calls

KIND = os.environ.get("KIND", "line")
CORE = str(Path(tensorhub_plugins.core.__file__).parent)
Where = Literal["caller", "call"]


class Interrupt:
    """A KeyboardInterrupt in the calling thread at the `at`-th line (None: never) that core runs in it, or in the
    thread of its call, which then waits until the interrupt has been delivered. within: only a function's lines."""

    def __init__(self, where: Where, at: int | None, within: str = "") -> None:
        self.where, self.at, self.within = where, at, within
        self.lines = 0

    @property
    def happened(self) -> bool:
        return self.at is not None and self.lines >= self.at

    def during(self, action: Callable[[], Any]) -> Any:
        """Return the action's result; None if it was interrupted."""
        self._caller = threading.get_ident()
        run = calls._Call._run

        def traced(call: calls._Call[Any]) -> None:
            sys.settrace(self._in_call)
            try:
                run(call)
            finally:
                sys.settrace(None)

        try:
            if self.where == "caller":
                sys.settrace(self._in_caller)
            else:
                calls._Call._run = traced  # type: ignore[method-assign]
            return action()
        except KeyboardInterrupt:
            assert self.happened
            return None
        finally:
            sys.settrace(None)
            calls._Call._run = run  # type: ignore[method-assign]

    def _is_due(self, event: str) -> bool:
        self.lines += event == "line"
        return event == "line" and self.lines == self.at

    def _in_caller(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(CORE):
            return None
        if self.within in ("", frame.f_code.co_name) and self._is_due(event):
            raise KeyboardInterrupt
        return self._in_caller

    def _in_call(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(CORE):
            return None
        call = getattr(calls._mine, "call", None)
        ours = call is not None and call._open and acting() == self._caller  # not of a thread beside it
        if ours and self._is_due(event):
            signal.pthread_kill(self._caller, signal.SIGINT)
            until(call.interrupted.done)
        return self._in_call
