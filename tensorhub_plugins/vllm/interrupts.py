"""SIGTERM and SIGINT end an engine that starts, within seconds: it may wait for its first version for minutes.

vLLM's own handlers do not: the KeyboardInterrupt that its API server raises at SIGTERM is swallowed by the context of a
socket (`zmq_socket_ctx`), asyncio's for SIGINT cancels a task that awaits nothing, and a core that is killed leaves
workers that wait on. A SystemExit is swallowed by no code, and all that it passes end the processes below.

A core whose API server, or script, was killed (for want of memory, say) ends as at SIGTERM, at whatever stage, and so
do API servers and the coordinator of data parallel ranks whose parent was: vLLM's own do not notice, and would follow
on, under the name, at the address and with the memory of what is started in their place.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from tensorhub_plugins.core.log import get_logger
from tensorhub_plugins.vllm.names import LEAVING_S

logger = get_logger(__name__)

NUMBERS = (signal.SIGTERM, signal.SIGINT)
# How the names of vLLM's processes begin that end with their parents.
OWN = ("EngineCore", "ApiServer_", "APIServer_", "VLLM_DP_Coordinator")


@contextlib.contextmanager
def ends_at_signals(*, interactive: bool = False) -> Iterator[None]:
    """Raise SystemExit where a signal arrives that is to end this process, unless it has a handler of its own.

    interactive: SIGINT ends in a KeyboardInterrupt, as Python's users expect."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python's handlers run in the main thread, and are set there
        return
    is_core = multiprocessing.parent_process() is not None
    arrived: list[signal.Signals] = []

    def end(number: int, frame: FrameType | None) -> None:
        arrived.append(signal.Signals(number))
        if is_core and arrived[1:]:
            return  # from its parent, too: nothing breaks off the end of the workers
        for child in multiprocessing.active_children() if is_core else ():
            child.terminate()  # vLLM waits before it does so, and they do not look for their parent yet
        raise SystemExit(128 + number)

    handlers = {number: signal.getsignal(number) for number in NUMBERS}
    ours = [number for number, handler in handlers.items() if _only_ends(handler)]
    for number in ours:
        signal.signal(number, end)
    try:
        yield
    except BaseException:
        if not arrived:
            raise
        if not is_core:
            logger.warning("%s: the engine ends before it has started", arrived[0].name)
        else:
            leave_garbage()
        if interactive and not is_core and arrived[0] == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise SystemExit(128 + arrived[0]) from None
    finally:
        for number in ours:
            signal.signal(number, handlers[number])


def end_with_parent(drains_s: float = 0.0) -> None:
    """Call in any process of vLLM's: a core, or one of several API servers, ends with what has started it. drains_s:
    what vLLM gives its requests then."""
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None or not multiprocessing.current_process().name.startswith(OWN):
        return

    def end() -> None:
        logger.error("the process that started %s has ended: it ends, too", multiprocessing.current_process().name)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(drains_s + LEAVING_S)
        for child in multiprocessing.active_children():
            child.kill()  # workers that start do not look for their parent yet
        os._exit(1)

    try:
        call_at_end_of(parent.pid, end)
    except ProcessLookupError:  # it has ended already
        threading.Thread(target=end, daemon=True).start()
    except (OSError, AttributeError):
        logger.debug("this kernel does not tell when a process ends")


def coordinate(*args: Any, **kwargs: Any) -> None:
    """Do what vLLM's coordinator of data parallel ranks does, in the process that is started for that, and end with its
    parent: half a GB stayed of each server that was killed."""
    from vllm.v1.engine.coordinator import DPCoordinatorProc

    end_with_parent()
    run = vars(coordinate).get("original")  # where this process was forked from one that has it replaced
    (run or DPCoordinatorProc.run_coordinator)(*args, **kwargs)


def call_at_end_of(pid: int, then: Callable[[], None]) -> None:
    """Call this, in a thread of its own, when that process has ended. Raise ProcessLookupError where it has already, or
    another OSError, or AttributeError, where that cannot be seen: before Linux 5.3."""
    poll = select.poll()
    poll.register(os.pidfd_open(pid), select.POLLIN)  # readable when the process has ended

    def watch() -> None:
        poll.poll()
        then()

    threading.Thread(target=watch, name="tensorhub-end-watch", daemon=True).start()


def leave_garbage() -> None:
    """Do no more for the memory of this process, which ends: vLLM kills one that collects garbage for seconds, and then
    shared memory stays."""
    gc.freeze()


def _only_ends(handler: Any) -> bool:
    """Return whether it is the system's, Python's, asyncio's or vLLM's."""
    module = str(getattr(getattr(handler, "func", handler), "__module__", ""))
    return handler in (signal.SIG_DFL, signal.default_int_handler) or module.split(".")[0] in ("asyncio", "vllm")
