"""What a reader keeps of other processes' memory, mapped or opened, for the next version: each as long as its owner has
it.

So that nothing here holds memory its owner has let go of, or died with, a pipe comes with the memory whose other end
only the owner has: when that closes, what was kept goes.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from tensorhub_plugins.core.memory.loans import is_over
from tensorhub_plugins.core.process import close_in_children

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Kept(Generic[Key, Value]):
    """Values by key, at most `count_max`, those that were asked for last. Thread-safe. One that goes is only dropped:
    whoever uses it has it until then."""

    def __init__(self, name: str, count_max: int) -> None:
        self._name = name
        self._count_max = count_max
        self._guard = threading.Lock()
        self._entries: OrderedDict[Key, tuple[int, Value]] = OrderedDict()  # least recently used first; with the pipe
        self._watcher: threading.Thread | None = None
        self._wake_out, self._wake_in = socket.socketpair()
        close_in_children(self._wake_out, self._wake_in)
        self._closed = False

    def values(self) -> list[Value]:
        """All that is kept."""
        with self._guard:
            return [value for _, value in self._entries.values()]

    def keys(self) -> list[Key]:
        """Their keys."""
        with self._guard:
            return list(self._entries)

    def get(self, key: Key, owner_liveness_fd: int, make: Callable[[], Value]) -> Value | None:
        """What is kept under this key, or is made now; None after `close`. Takes `owner_liveness_fd` over, the end of a
        pipe whose other end the owner has."""
        dropped: list[Value] = []
        with self._guard:
            if key in self._entries and is_over(self._entries[key][0]):
                dropped.append(self._drop(key))  # the key was given to other memory since
            if key in self._entries or self._closed:
                os.close(owner_liveness_fd)
            else:
                try:
                    self._entries[key] = owner_liveness_fd, make()
                except BaseException:
                    os.close(owner_liveness_fd)
                    raise
                self._watch()
            if self._closed:
                return None
            self._entries.move_to_end(key)
            found = self._entries[key][1]
            while len(self._entries) > self._count_max:
                dropped.append(self._drop(next(iter(self._entries))))
        return found

    def close(self) -> None:
        """Idempotent."""
        with self._guard:
            self._closed = True
            dropped = [self._drop(key) for key in list(self._entries)]
            watcher, self._watcher = self._watcher, None
            with contextlib.suppress(OSError):  # closed before
                self._wake_in.shutdown(socket.SHUT_WR)  # also where a child that was forked in this moment has it, too
            self._wake_in.close()
        if watcher is not None:
            watcher.join()
        self._wake_out.close()
        dropped.clear()

    def _drop(self, key: Key) -> Value:
        """With the guard. To let go of a value may take long: the caller does so, without the guard."""
        owner_liveness_fd, value = self._entries.pop(key)
        os.close(owner_liveness_fd)
        return value

    def _watch(self) -> None:
        """With the guard: see to it that the watcher looks at what is kept now."""
        if self._watcher is None:
            watcher = threading.Thread(target=self._run, name=self._name, daemon=True)
            watcher.start()
            self._watcher = watcher  # where there can be no thread any more, the next one tries again
        self._wake_in.send(b"x")

    def _run(self) -> None:
        while True:
            poll = select.poll()
            poll.register(self._wake_out, select.POLLIN)
            with self._guard:
                if self._closed:
                    return
                # Their numbers alone: a value that has a name here would stay for as long as is waited.
                for owner_liveness_fd in [fd for fd, _ in self._entries.values()]:
                    poll.register(owner_liveness_fd, 0)  # nothing is ever written: it is over, or it is not
            poll.poll()
            with self._guard:
                if self._closed:
                    return
                with contextlib.suppress(BlockingIOError):
                    self._wake_out.recv(4096, socket.MSG_DONTWAIT)
                dropped = [self._drop(key) for key, (fd, _) in list(self._entries.items()) if is_over(fd)]
            dropped.clear()
