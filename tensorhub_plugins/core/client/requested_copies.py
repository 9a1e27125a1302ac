"""Copies that the hub asks this worker to hold for others, so that a version is in several failure domains."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from tensorhub_plugins.core import resources
from tensorhub_plugins.core.client.serving import Serving
from tensorhub_plugins.core.errors import TensorHubError
from tensorhub_plugins.core.threads import Thread
from tensorhub_plugins.core.types import CHECKPOINT, ShardKey

log = logging.getLogger("tensorhub.client")

READ_TIMEOUT_S = 600.0  # 70 GB at 1 Gbit/s; without progress the lease ends earlier
AT_A_TIME_MAX = 4  # versions; the hub asks again


def has_whole(keys: Iterable[ShardKey], version: int) -> bool:
    """Return whether these are all shards of the checkpoint layout of this version, for any shard count."""
    shards: dict[int, set[int]] = {}
    for key in keys:
        if (key.version, key.layout) == (version, CHECKPOINT):
            shards.setdefault(key.shard_count, set()).add(key.shard)
    return any(len(found) == count for count, found in shards.items())


class Copies:
    """The copies held for others. read: reads a version's checkpoint layout into memory of our own, and serves it."""

    def __init__(self, serving: Serving, read: Callable[[int], None]) -> None:
        self._serving, self._read = serving, read
        self._lock, self._one_at_a_time = threading.Lock(), threading.Lock()
        self._threads: dict[int, threading.Thread] = {}
        self._closed = False

    def hold(self, version: int) -> None:
        """Read it, unless that has begun, and keep it until it is not needed any more. Does not block."""
        with self._lock:
            if self._closed or version in self._threads or len(self._threads) >= AT_A_TIME_MAX:
                return
            thread = Thread(target=self._hold, args=(version,), name="tensorhub-copies")
            try:
                thread.start()
            except RuntimeError as error:  # do not let it end the link's thread; the hub asks again
                log.warning("no copy of version %d is read: %s", version, resources.refusal(error) or error)
                return
            self._threads[version] = thread

    def room_bytes(self) -> int:
        """Return the bytes free for more: what the budget leaves, and at most half of what the machine can give."""
        return self._serving.room_bytes()

    def _hold(self, version: int) -> None:
        """Read it, and unpublish it at once: the hub makes us retain it, and says when it may go, as any last copy."""
        try:
            with self._one_at_a_time:
                if self._closed or has_whole(self._serving.keys(), version):
                    return  # the hub did not know yet that it is here
                self._read(version)
            self._serving.release_copies(version)
        except Exception as error:  # out of memory, for example: the hub asks another worker
            known = isinstance(error, TensorHubError)
            text = "%s: has no copy of version %d for others: %s"
            log.warning(text, self._serving.worker, version, error, exc_info=not known)
        finally:
            with self._lock:
                self._threads.pop(version, None)

    def close(self) -> None:
        """Take no more. Reads in progress end with the connection to the hub."""
        with self._lock:
            self._closed = True

    def join(self) -> None:
        """Wait until nothing is read any more."""
        with self._lock:
            threads = list(self._threads.values())
        for thread in threads:
            thread.join()
