"""A worker that leaves for good: its readers finish, and a version that only it has is first copied elsewhere."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from tensorhub_plugins.core.deadline import Deadline
from tensorhub_plugins.core.errors import TensorHubError, UsageError

if TYPE_CHECKING:
    from tensorhub_plugins.core.client.client import Client

logger = logging.getLogger("tensorhub.client")

POLL_INTERVAL_S = 0.05
LAST_S = 0.1  # that an unpublish is given at least


def hand_over(client: Client, timeout_s: float) -> bool:
    """Prepare to leave, as `Client.hand_over`."""
    deadline = Deadline.after(timeout_s)
    problems: dict[int, TensorHubError | None] = {}  # for each version that was unpublished
    while True:
        for version in _versions(client):
            if version in problems and not isinstance(problems[version], UsageError):
                continue
            if problems and deadline.remaining() < LAST_S:  # an absent hub's answer is waited for each time
                break
            problems[version] = None
            try:
                client.unpublish(version, timeout_s=max(LAST_S, deadline.remaining()))
            except TensorHubError as error:  # UsageError: it is still being read here
                problems[version] = error
        left = _versions(client)
        waits = [version for version in left if isinstance(problems.get(version), UsageError | None)]
        if not waits or deadline.expired:
            break
        time.sleep(POLL_INTERVAL_S)
    for version in left:
        not_taken = f"it is the last copy, and no worker took it within {timeout_s:.0f} s"
        why = problems[version] or not_taken if version in problems else "there was no time left to unpublish it"
        logger.warning("leaving with version %d: %s", version, why)
    return not left


def _versions(client: Client) -> list[int]:
    return sorted({key.version for key in client.serving()}, reverse=True)
