"""A replica of pull mode is a family: server actor -> vLLM's engine -> vLLM's workers. They live and die as one."""

from __future__ import annotations

import os
import select
import signal
import threading

from tensorhub_plugins.verl.config import SERVER_PID


def end_with_server() -> None:
    """When the server actor is killed (no exit handler runs), vLLM's engine process does not notice and would keep the
    device's memory from the server that Ray starts in its place. So its workers watch the server, and end it."""
    server = int(os.environ.get(SERVER_PID, 0))
    try:
        descriptor = os.pidfd_open(server) if server else -1
    except (ProcessLookupError, OSError, AttributeError):  # gone already, another host's, or a kernel before 5.3
        descriptor = -1
    if descriptor < 0:
        return

    engine = os.getppid()  # asked now: an orphan's parent is whoever adopts it, which may be Ray's own daemon

    def watch() -> None:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)  # readable when the process has ended
        poll.poll()
        if engine == os.getppid() and engine not in (1, server):
            os.kill(engine, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name="tensorhub-server-watch", daemon=True).start()
