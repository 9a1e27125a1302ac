"""Which version prompts are answered from: the newest one when a batch begins, or a later one; if operators have pinned
a version, then that one, except in sync training, which must be on policy."""

from __future__ import annotations

from contextlib import suppress

from tensorhub_plugins.core import Client, NotPublished, TensorHubError, VersionGone
from tensorhub_plugins.core.log import get_logger
from tensorhub_plugins.openrlhf.config import Options
from tensorhub_plugins.vllm.engine.follower import bounded

logger = get_logger(__name__)


class Target:
    """What the hub says of the versions, as far as it answers; what is known here otherwise."""

    def __init__(self, client: Client, options: Options, *, is_partial: bool, is_sync: bool) -> None:
        self.client, self._options = client, options
        self._is_partial, self._is_sync = is_partial, is_sync
        self.newest = 0  # the version to be run, as far as it is known here
        self.published = 0  # the newest one, whatever is to be run
        self.resumes = False  # from a checkpoint, whose weights are published before anything is generated
        self._first: int | None = None  # the version with which this run began; 0: none, None: not looked for yet

    def look(self) -> None:
        """Learn the version to be run. In partial rollout prompts do not ask for it."""
        if not self._is_partial:
            self.newest = self.instead_of(self.newest)

    def look_for_published(self) -> None:
        with suppress(TensorHubError):  # the hub is away, or knows no newer one
            self.published = self.client.target(self.published, pins=False, timeout_s=0.0)

    def oldest(self) -> int:
        """Return the oldest version that a prompt may be answered from, as of the last `look`."""
        return self._look_for_first() if self._is_partial else self.newest

    def _look_for_first(self) -> int:
        """Return what partial rollout asks for at least: an engine with less has weights of a former incarnation of
        this run. Less only when operators say so."""
        first = 0 if self._first is None else self._first
        if first or self._first is None:
            now = self.instead_of(first)
            self._first = min(first, now) if first else now
        return self._first or 0

    def bounded(self, version: int) -> int:
        return bounded(version, self._options.pull_until)

    def instead_of(self, version: int) -> int:
        """Return what the hub says now; the same one if it says nothing else, 0 when there is nothing to be run.

        The version with which a run resumes is waited for: engines may have what is on their disk, or a former one."""
        timeout_s, self.resumes = 0.0 if version or not self.resumes else self._options.timeout_s, False
        try:
            return self.client.target(version, pins=not self._is_sync, timeout_s=timeout_s)
        except VersionGone as error:
            logger.warning("prompts are answered from whatever the engines have: %s", error)
            return 0
        except TensorHubError as error:
            if timeout_s:
                raise
            if not isinstance(error, NotPublished):
                logger.warning("going on with version %d: %s", version, error)
            return version
