"""The host memory that a worker may use, and will: reported before the first byte of it is used, or refused then.

Memory is used page by page as versions are written. If it did not fit, the kernel would notice in the middle of a run,
and kill the process without a message.
"""

from __future__ import annotations

import logging

from tensorhub_plugins.core import machine
from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.options import Need, gigabytes, memory_summary

log = logging.getLogger("tensorhub.client")


class Budget:
    """A worker's memory ("replica/shard"). size_bytes, refuses: the client's `memory_budget_bytes`, `over_budget`."""

    def __init__(self, worker: str, size_bytes: int | None = None, *, refuses: bool = False) -> None:
        self.worker, self.refuses = worker, refuses
        self.size_bytes = machine.total_bytes() // 2 if size_bytes is None else size_bytes

    def check(self, need: Need, *, workers: int = 1, mend: str) -> None:
        """Log what this worker is about to use. workers: on this host, which use as much each. mend: what a user can do
        about it. Raise UsageError where the host has less free, or the budget is less and refuses the excess."""
        said = memory_summary(self.worker, need, workers)
        available = machine.available_bytes()
        if 0 < available < need.size_bytes * workers:
            raise UsageError(f"{said}, and {gigabytes(available)} are free there: {mend}")
        if need.size_bytes <= self.size_bytes:
            log.info("%s", said)
            return
        said = f"{said}, above its budget of {gigabytes(self.size_bytes)}: {mend}, or raise memory_budget_bytes"
        if self.refuses:
            raise UsageError(said)
        log.warning("%s", said)
