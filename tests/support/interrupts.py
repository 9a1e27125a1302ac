"""Interrupts at a chosen line of core, of the calling thread or of the one that carries its call out: deterministic."""

from __future__ import annotations

import ctypes
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
from tensorhub_plugins.core.client import calls
from tensorhub_plugins.core.device.graph_capture import acting

KIND = os.environ.get("KIND", "line")
CORE = str(Path(tensorhub_plugins.core.__file__).parent)
Where = Literal["caller", "call"]
SIGNALS = signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2


def at_once(count: int) -> None:
    """Have so many signals come between two instructions: each is raised at the first check after the one before. By
    libc, which handles none itself, as `signal.pthread_sigmask` does."""
    libc, signals = ctypes.CDLL(None), (ctypes.c_ulong * 16)()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS[:count])
    for each in SIGNALS[:count]:
        libc.sigaddset(signals, int(each))
        signal.pthread_kill(threading.get_ident(), each)
    libc.pthread_sigmask(signal.SIG_UNBLOCK, signals, None)


def _raise(_: int, frame: FrameType | None) -> None:
    while frame is not None and not frame.f_code.co_filename.startswith(CORE):
        frame = frame.f_back
    if frame is not None:  # a later signal than core's last instruction is of no interest
        raise KeyboardInterrupt


class Interrupt:
    """A KeyboardInterrupt in the calling thread at the `at`-th line (None: never) that core runs in it, or in the
    thread of its call, which then waits until the interrupt has been delivered. within: only a function's lines.
    signals: so many at once."""

    def __init__(self, where: Where, at: int | None, within: str = "", signals: int = 1) -> None:
        self.where, self.at, self.within, self.signals = where, at, within, signals
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

        before = [signal.signal(each, _raise) for each in SIGNALS]
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
            list(map(signal.signal, SIGNALS, before))

    def _is_due(self, event: str) -> bool:
        self.lines += event == "line"
        return event == "line" and self.lines == self.at

    def _in_caller(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(CORE):
            return None
        if self.within in ("", frame.f_code.co_name) and self._is_due(event):
            at_once(self.signals)
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
