"""A worker that leaves for good: its readers finish, and a version that nobody else has goes to somebody first."""

from __future__ import annotations

import time

from tensorhub_plugins.core import Client, Deadline, TensorHubError
from tensorhub_plugins.core.log import get_logger

logger = get_logger(__name__)

HAND_OVER_TIMEOUT_S = 5.0  # a node with a spot notice has half a minute; who follows takes the newest version by itself
POLL_INTERVAL_S = 0.05


def hand_over(client: Client, timeout_s: float = HAND_OVER_TIMEOUT_S) -> bool:
    """Take back all that this client serves, newest first, and wait while it has the last copy of a retained version.

    Returns whether nothing was left when the time was up. Never raises: what leaves, leaves.
    """
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
