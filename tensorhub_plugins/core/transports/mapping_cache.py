"""A cache of other processes' memory, mapped or opened, for the next version; each entry lasts as long as its owner
keeps it.

So that nothing here holds memory that its owner has released, or died with, a pipe comes with the memory whose other
end only the owner has: when that closes, the entry is dropped.
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
from tensorhub_plugins.core.process_lifetime import close_in_children
from tensorhub_plugins.core.threads import Thread

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Kept(Generic[Key, Value]):
    """A cache of at most `count_max` values by key, least recently used first out. Thread-safe. An evicted value is
    only dropped: its users keep it alive."""

    def __init__(self, name: str, count_max: int) -> None:
        self._name, self._count_max = name, count_max
        self._guard = threading.Lock()
        self._entries: OrderedDict[Key, tuple[int, Value]] = OrderedDict()  # least recently used first; with its pipe
        self._watcher: threading.Thread | None = None
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_out.setblocking(False)  # by a default timeout it would wait
        close_in_children(self._wake_out, self._wake_in)
        self._closed = False

    def values(self) -> list[Value]:
        """Return all values."""
        with self._guard:
            return [value for _, value in self._entries.values()]

    def keys(self) -> list[Key]:
        """Return all keys."""
        with self._guard:
            return list(self._entries)

    def get(self, key: Key, owner_liveness_fd: int, make: Callable[[], Value]) -> Value | None:
        """Return the value under this key, made now if there is none; None after `close`. Takes over
        `owner_liveness_fd`, the end of a pipe whose other end the owner has."""
        dropped: list[Value] = []
        with self._guard:
            if key in self._entries and is_over(self._entries[key][0]):
                dropped.append(self._drop(key))  # the key has been reused for other memory since
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
        """Drop all entries and stop the watcher. Idempotent."""
        with self._guard:
            self._closed = True
            dropped = [self._drop(key) for key in list(self._entries)]
            watcher, self._watcher = self._watcher, None
            with contextlib.suppress(OSError):  # closed before
                self._wake_in.shutdown(socket.SHUT_WR)  # also if a child forked at this moment has it, too
            self._wake_in.close()
        if watcher is not None:
            watcher.join()
        self._wake_out.close()
        dropped.clear()

    def _drop(self, key: Key) -> Value:
        """Remove an entry. The caller holds the guard, and frees the value without it, as that may take long."""
        owner_liveness_fd, value = self._entries.pop(key)
        os.close(owner_liveness_fd)
        return value

    def _watch(self) -> None:
        """Have the watcher watch the current entries. The caller holds the guard."""
        if self._watcher is None:
            watcher = Thread(target=self._run, name=self._name)
            watcher.start()
            self._watcher = watcher  # if no thread can be started, the next call tries again
        self._wake_in.send(b"x")

    def _run(self) -> None:
        while True:
            poll = select.poll()
            poll.register(self._wake_out, select.POLLIN)
            with self._guard:
                if self._closed:
                    return
                # Only the descriptors: a value with a name here would live as long as this waits.
                for owner_liveness_fd in [fd for fd, _ in self._entries.values()]:
                    poll.register(owner_liveness_fd, 0)  # nothing is ever written: only a hang-up is reported
            poll.poll()
            with self._guard:
                if self._closed:
                    return
                with contextlib.suppress(BlockingIOError):
                    self._wake_out.recv(4096)
                dropped = [self._drop(key) for key, (fd, _) in list(self._entries.items()) if is_over(fd)]
            dropped.clear()
