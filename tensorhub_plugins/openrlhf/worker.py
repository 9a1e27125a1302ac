"""What runs inside every vLLM worker process: the store's extension, which here also sees to it that no engine is left
behind.

When an engine's actor is killed, no exit handler runs and vLLM's own processes do not notice: they would keep the GPU's
memory from the engine that Ray starts in their place. So the workers watch the actor, and end with it.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from typing import Any

from tensorhub_plugins.vllm.worker import TensorHubWorkerExtension

ACTOR_PID = "TENSORHUB_ENGINE_PID"  # environment of an engine's actor, inherited by vLLM's processes


class TensorHubOpenRLHFWorkerExtension(TensorHubWorkerExtension):
    """vLLM mixes this class into its worker; no attribute may be named as one of the worker's."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        worker = super().__new__(cls, *args, **kwargs)
        end_with_actor()
        return worker


def end_with_actor() -> None:
    actor = int(os.environ.get(ACTOR_PID, 0))
    try:
        descriptor = os.pidfd_open(actor) if actor else -1
    except (ProcessLookupError, OSError, AttributeError):  # gone already, another host's, or a kernel before 5.3
        return
    if descriptor < 0:
        return
    parent = os.getppid()  # the actor, or vLLM's engine core between the two

    def watch() -> None:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)  # readable when the process has ended
        poll.poll()
        if parent != actor and os.getppid() == parent:  # not whoever adopts orphans, which may be Ray's own daemon
            os.kill(parent, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name="tensorhub-actor-watch", daemon=True).start()
