"""Public calls are carried out by another thread, which nothing interrupts; the caller only waits.

KeyboardInterrupt (Ctrl-C, `ray.cancel`), the SystemExit of a signal's handler, or what PyThreadState_SetAsyncExc raises
may come between any two instructions of the calling thread. There it would leave locks held, a version announced to the
hub and not served, or memory that is never released. So the work of a call happens in another thread, with the caller's
device, streams, cores, modes and context variables. When the caller is interrupted, that thread is notified where it
waits (`result`, `check`): `Interrupted` is raised there, and ends the call as any error does. A call that had done its
work by then is undone (`undone_by`). Our own threads carry their calls out themselves, as they are not interrupted.

The caller's side consists of atomic steps: a call is put into a queue, a lock is acquired, and the thread that takes
the only token of a deque has decided. An interrupt before, between or after them finds the call not begun, in progress,
or done. Blocking signals instead would replace the process's handlers, which are asyncio's, Ray's and vLLM's.

One thread always waits for the next call: handing one over takes 20 us, starting a thread each time took up to 1 ms.
"""

from __future__ import annotations

import _thread
import logging
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from contextvars import copy_context
from functools import partial, wraps
from types import FunctionType
from typing import Any, Generic, ParamSpec, TypeVar

from tensorhub_plugins.core.machine import affinity
from tensorhub_plugins.core.threads import Thread

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger("tensorhub.client")

OURS = "tensorhub"  # the names of our own threads begin so
POLL_S = 0.2  # an asynchronous exception is raised at the next bytecode instruction, and a blocked lock runs none
BEGIN_S = 5.0  # for a thread to begin the call: where none can be started, the caller carries it out
UNDO_S = 1.0  # an interrupted caller waits so long; what takes longer goes on without it
IDLE_MAX = 4  # threads that wait for the next call

_mine = threading.local()


class Interrupted(BaseException):
    """The caller has been interrupted: end the call, and undo what it has begun."""


class _Threads:
    """The threads that carry calls out. One that takes a call makes sure that another one waits for the next."""

    def __init__(self) -> None:
        self.pid = os.getpid()  # a forked child has none of them
        self.actions: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0

    def put(self, action: Callable[[], None]) -> None:
        """Have it carried out soon. Safe to interrupt. Raise RuntimeError where no thread can be started, as at the
        interpreter's exit."""
        if not self._idle:
            _thread.start_new_thread(self._begin, (True,))  # it starts one that `threading` registers
        self.actions.put(action)

    def _begin(self, or_serves: bool = False) -> None:
        with self._lock:
            if self._idle:
                return
            self._idle += 1
        try:
            Thread(target=self._run, name="tensorhub-call").start()
        except RuntimeError:
            if or_serves:
                return self._run()
            with self._lock:
                self._idle -= 1

    def _run(self) -> None:
        while True:
            action = self.actions.get()
            with self._lock:
                self._idle -= 1
            self._begin()
            action()
            del action  # and the memory that it refers to
            with self._lock:
                if self._idle >= IDLE_MAX:
                    return
                self._idle += 1


_threads = _Threads()


def _threads_here() -> _Threads:
    global _threads
    if _threads.pid != os.getpid():
        _threads = _Threads()
    return _threads


class _Call(Generic[T]):
    """One call: what its caller waits for, and the thread's side of it."""

    def __init__(self, body: Callable[[], T]) -> None:
        context = copy_context()
        self._body: Callable[[], T] = lambda: context.run(body)
        from tensorhub_plugins.core.device import devices  # imports torch, which a hub and its commands do not need

        self._take_over, self._cores = devices.carried(), affinity()
        # Tokens: their takers begin the call, end it, or abandon it.
        self._unbegun, self._open, self._kept = deque([None]), deque([None]), deque([None])
        self._over, self._undone = _thread.allocate_lock(), _thread.allocate_lock()
        self._over.acquire()
        self._undone.acquire()
        self._outcome: tuple[list[T], BaseException | None] = [], None
        self.interrupted: Future[None] = Future()
        self.undo: list[Callable[[], object]] = []

    # --- in the caller's thread ---

    def wait(self) -> tuple[list[T], BaseException | None]:
        """Wait for the end; return the result, in a list, and the error. Neither is kept here."""
        begun_by = time.monotonic() + BEGIN_S
        try:
            _threads_here().put(self._run)
        except RuntimeError:
            self._run()
        while not self._over.acquire(timeout=POLL_S):
            if self._unbegun and time.monotonic() > begun_by:
                self._run()
        outcome, self._outcome = self._outcome, ([], None)
        return outcome

    def interrupt(self) -> None:
        """Abandon it, and wait for that, but not long."""
        try:
            _threads_here().put(self.abandon)
        except RuntimeError:
            self.abandon()
        self._undone.acquire(timeout=UNDO_S)

    # --- in others ---

    def _run(self) -> None:
        if not _took(self._unbegun):
            return
        _mine.call = self
        result: list[T] = []
        error = None
        try:
            if affinity() != self._cores:
                with suppress(OSError):  # of cores that were taken away meanwhile, or in a sandbox
                    os.sched_setaffinity(0, self._cores)
            with self._take_over():
                result.append(self._body())
        except BaseException as raised:
            error = raised
            self.undo.clear()  # it has undone its work itself
        finally:
            _mine.call = None
            del self._body  # and the memory that it refers to
        self._outcome = result, error
        del result, error  # the frames of its traceback keep their variables alive
        if not _took(self._open):
            self._undo()
        self._over.release()

    def abandon(self) -> None:
        """End it, or undo it, as its caller was interrupted. Idempotent."""
        if not _took(self._kept):
            return
        if _took(self._unbegun):
            self._undone.release()
        elif _took(self._open):
            self.interrupted.set_result(None)
        else:
            self._undo()

    def _undo(self) -> None:
        try:
            while self.undo:
                self.undo.pop()()
        except Exception:
            log.exception("what an interrupted call had done was not undone")
        finally:
            self._undone.release()


def _took(token: deque[None]) -> bool:
    try:
        token.pop()
    except IndexError:
        return False
    return True


def run(body: Callable[[], T]) -> T:
    """Carry this out where nothing interrupts it. Within a call it is part of that call."""
    is_ours = getattr(_mine, "call", None) is not None or threading.current_thread().name.startswith(OURS)
    if is_ours or sys.is_finalizing():  # at exit no other thread runs any more
        return body()
    call = _Call(body)
    put = _threads_here().actions.put
    try:
        result, error = call.wait()
        if error is None:
            return result.pop()
    except BaseException:
        put(call.abandon)  # in C: of two signals that have come the second one is raised after it, not instead of it
        call.interrupt()
        del call  # as above
        raise
    try:
        raise error
    finally:
        del error, call


def public(method: Callable[P, T]) -> Callable[P, T]:
    """Make every call of this method a `run`."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return run(partial(method, *args, **kwargs))

    return call


def all_public(cls: type[T]) -> type[T]:
    """Make every call of this class's methods a `run`: of `__init__`, and of those without a leading underscore."""
    for name, method in list(vars(cls).items()):
        if isinstance(method, FunctionType) and (name == "__init__" or not name.startswith("_")):
            setattr(cls, name, public(method))
    return cls


def wait_for(
    future: Future[Any], *, timeout_s: float | None = None, abandon: Callable[[], object] = lambda: None
) -> None:
    """Wait until it is done, or for so long. If the caller is interrupted before, call `abandon`, raise Interrupted."""
    call: _Call[Any] | None = getattr(_mine, "call", None)
    either = (future,) if call is None else (future, call.interrupted)
    wait(either, timeout_s, FIRST_COMPLETED)
    if call is not None and call.interrupted.done() and not future.done():
        abandon()
        raise Interrupted


def result(future: Future[T], *, timeout_s: float | None = None, abandon: Callable[[], object] = lambda: None) -> T:
    """Return the result of this future, as in `wait_for`."""
    wait_for(future, timeout_s=timeout_s, abandon=abandon)
    return future.result(0.0)


def check() -> None:
    """Raise Interrupted when the caller was interrupted."""
    call: _Call[Any] | None = getattr(_mine, "call", None)
    if call is not None and call.interrupted.done():
        raise Interrupted


def when_interrupted(action: Callable[[], object]) -> None:
    """Do this, in another thread, when the caller is interrupted."""
    call: _Call[Any] | None = getattr(_mine, "call", None)
    if call is not None:
        call.interrupted.add_done_callback(lambda _: action())


def undone_by(step: Callable[[], object]) -> None:
    """Do this if the caller is interrupted although the call does its work."""
    call: _Call[Any] | None = getattr(_mine, "call", None)
    if call is not None:
        call.undo.append(step)


def stays() -> None:
    """Keep what the call has done so far, even if it is interrupted later."""
    call: _Call[Any] | None = getattr(_mine, "call", None)
    if call is not None:
        call.undo.clear()
