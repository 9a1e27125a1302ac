"""A worker that leaves for good: its readers finish, and a version that nobody else has goes to somebody first."""

from __future__ import annotations

import logging
import time
from typing import Any, Protocol

from tensorhub_plugins.core.deadline import Deadline
from tensorhub_plugins.core.errors import TensorHubError
from tensorhub_plugins.core.types import ShardKey

logger = logging.getLogger("tensorhub.client")

POLL_INTERVAL_S = 0.05


class Leaving(Protocol):
    """A client."""

    def serving(self) -> list[ShardKey]:
        """What it offers."""

    def unpublish(self, version: int, layout: str | None = None, *, timeout_s: float) -> Any:
        """Take a version back."""


def hand_over(client: Leaving, timeout_s: float) -> bool:
    """As `Client.hand_over`."""
    deadline = Deadline.after(timeout_s)
    try:
        for version in sorted({key.version for key in client.serving()}, reverse=True):
            client.unpublish(version, timeout_s=max(0.1, deadline.remaining()))
        while client.serving() and deadline.remaining() > 0:
            time.sleep(POLL_INTERVAL_S)
    except TensorHubError as error:
        logger.warning("leaving without handing over: %s", error)
        return False
    left = sorted({key.version for key in client.serving()})
    if left:
        logger.warning("leaving with the last copy of version %s: nobody took it within %.0f s", left, timeout_s)
    return not left
