"""What a worker asks the hub about the versions of its history, and what it decides about them. No weights move."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from tensorhub_plugins.core import resources, types
from tensorhub_plugins.core.client import arguments, calls, session
from tensorhub_plugins.core.client.connection import HubLink
from tensorhub_plugins.core.client.serving import Serving
from tensorhub_plugins.core.deadline import Deadline, bounded
from tensorhub_plugins.core.errors import UsageError
from tensorhub_plugins.core.process_lifetime import OfThisProcess, check_not_forked, is_gone
from tensorhub_plugins.core.protocol import messages

log = logging.getLogger("tensorhub.client")


@calls.all_public
@resources.in_each_call
class History(OfThisProcess):
    """The versions of one run and model: the half of a `Client` that asks for them, waits for them and judges them."""

    _hub: HubLink
    _serving: Serving
    _closed: bool
    _pid: int

    def wait(self, version: int | str = types.LATEST, *, newer_than: int = 0, timeout_s: float = 60.0) -> int:
        """Wait until a version is visible, and return its number: this one, or the newest that is above newer_than.

        Raise NotPublished after timeout_s, VersionGone for a version that was visible and is not any more."""
        number = 0 if version == types.LATEST else types.check_version(version)
        arguments.check_installed("newer_than", newer_than)
        reply = self._ask(lambda n: messages.Wait(n, number, newer_than, timeout_s), timeout_s)
        assert isinstance(reply, messages.Visible)
        return reply.version

    def target(
        self,
        installed: int = 0,
        *,
        refused: Iterable[int] = (),
        pins: bool = True,
        failure: str = "",
        timeout_s: float = 60.0,
    ) -> int:
        """Return the version that this worker is to run, once that is not `installed` (0: none is).

        It is the pinned version (unless pins=False); else the newest visible one that is not in `refused`: those that
        this worker could not install, which may map to why. `tensorhub status` shows that, and `failure`: why the last
        try failed. It is older than what is installed only if that was withdrawn, or if it is pinned, and in `refused`
        only if it is pinned anew. Raise NotPublished at the deadline (with nothing installed, DeadlineExceeded from a
        hub that has just been started: workers may still report versions), or VersionGone if what is pinned, or
        installed and withdrawn, has nothing to be run instead."""
        versions, why = arguments.check_target(installed, refused, pins=pins)
        failed = arguments.check_failure(failure)
        serial = self._hub.directive.serial
        reply = self._ask(
            lambda n: messages.Target(n, installed, timeout_s, versions, serial, bool(pins), why, failed), timeout_s
        )
        assert isinstance(reply, messages.Visible)
        return reply.version

    @property
    def pinned(self) -> int | None:
        """Return the version at which operators keep all followers, as last reported; None: they run the newest."""
        return self._hub.directive.pin or None

    def pin(self, version: int, *, timeout_s: float = 10.0) -> None:
        """Make all followers of this run and model go to this version and stay there, until `unpin`.

        "latest" is the pinned version meanwhile, and its last copy is retained. Raise UsageError if no worker holds it.
        """
        number = types.check_version(version)
        self._ask(lambda n: messages.Pin(n, number, timeout_s), timeout_s)

    def unpin(self, *, timeout_s: float = 10.0) -> None:
        """Let all followers go on to the newest version."""
        self._ask(lambda n: messages.Pin(n, 0, timeout_s), timeout_s)

    def withdraw(self, version: int, *, timeout_s: float = 10.0) -> None:
        """Withdraw a bad version: no reader gets it any more, and reads of it are stopped (VersionGone).

        Followers that run it return to the newest other one that is held. So keep two, with `retain(newest=2)`. It
        stays withdrawn; good weights need another number. One of which some shards are still to come never appears.
        Raise UsageError if there never was any of such a version."""
        number = types.check_version(version)
        self._ask(lambda n: messages.Withdraw(n, number, timeout_s), timeout_s)

    def begin(self, step: int = 0, *, launch_id: str = "", timeout_s: float = 60.0) -> int:
        """Begin an attempt: a trainer starts, or resumes from `step` (0: none). Return its number, for `version_of`.

        Versions of former attempts above that step are superseded: they are not read or run any more. What this
        attempt publishes is newer than all before, whatever its steps. The first attempt of all is 0, whose versions
        are plain steps; so are those of a trainer that never begins. Every shard of this replica calls it, with the
        same step and launch_id, which the ranks of one launch share, and those of another launch do not.

        A former trainer that was killed is waited for until its session expires, or not at all when its process was on
        this host. Raise UsageError when it is alive; DeadlineExceeded with what was missing, after timeout_s;
        Superseded when another process has replaced this one. From then on processes of a former attempt can publish,
        unpublish and retain nothing: Superseded."""
        types.version_of(0, step)
        arguments.check_word("launch_id", launch_id)
        timeout_s = bounded(timeout_s)
        deadline = Deadline.after(timeout_s)
        reply = self._ask(lambda n: messages.Begin(n, step, timeout_s, launch_id), timeout_s)
        if isinstance(reply, messages.Rivals):
            gone = tuple(process for process in reply.processes if is_gone(process))
            left_s = deadline.remaining()
            reply = self._ask(lambda n: messages.Begin(n, step, left_s, launch_id, gone, waits=True), left_s)
        assert isinstance(reply, messages.Begun)
        return reply.attempt.number

    @property
    def attempt(self) -> int:
        """Return the trainer's newest attempt, as far as this worker knows; 0: the first, or none was begun."""
        return max((each.number for each in self._hub.directive.attempts), default=0)

    def origin(self, version: int) -> str:
        """Return the run, the model, and the start of the trainer that a version is from: the same at every worker.
        UsageError for what is no version."""
        return self._hub.origin(types.check_version(version))

    def versions(self, *, timeout_s: float = 10.0) -> list[types.VersionInfo]:
        """Return the versions that the hub knows, oldest first, and which workers hold them in which layout."""
        reply = self._ask(messages.AskVersions, timeout_s)
        assert isinstance(reply, messages.Versions)
        if reply.left_out:
            log.warning("of the versions' layouts and workers %d are left out: there are too many", reply.left_out)
        return list(reply.versions)

    def retain(
        self, newest: int = 1, *, domains: int = 1, across: types.Across = "host", also: int = 0, timeout_s: float = 10
    ) -> None:
        """Keep the last copy of this many newest versions (of this run and model) when it is unpublished.

        newest: 0 to 1024; by default the newest one. also: one more version; 0: none. domains: the last copy in each of
        so many hosts (across="rack", "data_center": racks, data centres) stays, as far as there are copies. Those of
        preemptible workers do not count. Where there are too few, a worker of another domain with free memory
        (memory_budget_bytes) is asked to read the checkpoint layout and hold it; the hub's status says if none has."""
        arguments.check_retain(newest, domains, across, also)
        self._ask(lambda number: messages.Retain(number, newest, domains, across, also=also), timeout_s)

    @property
    def hub_silent_s(self) -> float:
        """Return the seconds since the hub was heard: about one while it is there."""
        return self._hub.silent_s

    # --- inside ---

    def _ask(self, make: Callable[[int], session.Request], timeout_s: float) -> messages.Reply:
        self._check_open()
        return self._hub.answer(make, Deadline.after(timeout_s))

    def _check_open(self) -> None:
        check_not_forked(self._pid, "client")
        if problem := UsageError("the client is closed") if self._closed else self._serving.take_disowned():
            raise problem
