"""What host memory a worker may take, and will: said before the first byte of it is taken, and refused then.

Memory is taken page by page as versions are written. What does not fit would be found out by the kernel, in the middle
of a run, which ends the process without a word.
"""

from __future__ import annotations

import logging

from tensorhub_plugins.core import machine
from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.options import Need, gigabytes, says_memory

log = logging.getLogger("tensorhub.client")


class Budget:
    """Of one worker ("replica/shard"). size_bytes, refuses: `memory_budget_bytes` and `over_budget` of a client."""

    def __init__(self, worker: str, size_bytes: int | None = None, *, refuses: bool = False) -> None:
        self.worker, self.refuses = worker, refuses
        self.size_bytes = machine.total_bytes() // 2 if size_bytes is None else size_bytes

    def expect(self, need: Need, *, workers: int = 1, mend: str) -> None:
        """Say what this worker is about to take. workers: on this host, which take as much each. mend: what a person
        can do about it. UsageError where the host has less free, or the budget is less and what exceeds it is refused.
        """
        said = says_memory(self.worker, need, workers)
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
