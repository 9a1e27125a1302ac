"""What a worker has asked of the hub, and reads with its leave. PURE records of session.py."""

from __future__ import annotations

from dataclasses import dataclass

from tensorhub_plugins.core.protocol import messages as m


@dataclass
class Asked:
    """A request that the hub has not answered."""

    message: m.Request
    deadline: float
    asked_at: float
    announced: bool = False  # Publish: this shard was announced to the hub before
    was_sent: bool = False


@dataclass
class Read:
    """A lease under which this worker reads."""

    version: int
    layout: str
    sources: dict[int, bytes]
    deadline: float
    shard_count: int
    progress: int = 0
