"""An engine is a family: the actor that owns it -> vLLM's engine core -> vLLM's workers. They live and die as one.

When the actor is killed, no exit handler runs and vLLM's own processes do not notice: they would keep the device's
memory from the engine that is started in its place. So the workers watch the actor, and end with it.
"""

from __future__ import annotations

import os
import select
import signal
import threading

OWNER_PID = "TENSORHUB_OWNER_PID"  # environment of an engine's actor, inherited by vLLM's processes


def own_engines() -> None:
    """In the actor, before it starts an engine: its workers end with this process."""
    os.environ[OWNER_PID] = str(os.getpid())


def end_with_owner() -> None:
    """In a worker."""
    owner = int(os.environ.get(OWNER_PID, 0))
    try:
        descriptor = os.pidfd_open(owner) if owner else -1
    except (ProcessLookupError, OSError, AttributeError):  # gone already, another host's, or a kernel before 5.3
        return
    if descriptor < 0:
        return
    parent = os.getppid()  # the actor, or vLLM's engine core between the two; asked now: orphans are adopted

    def watch() -> None:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)  # readable when the process has ended
        poll.poll()
        if parent not in (1, owner) and os.getppid() == parent:  # not whoever adopts orphans, maybe Ray's own daemon
            os.kill(parent, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name="tensorhub-owner-watch", daemon=True).start()
