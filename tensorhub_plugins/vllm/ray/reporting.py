"""The dispatcher's side of the fleet (fleet/types.py): once a second it reports what its table of replicas knows
(members.py), and uses the replicas that the fleet says. It never depends on the fleet: without an answer it goes on
with those it has.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import ray

from tensorhub_plugins.core.log import get_logger
from tensorhub_plugins.vllm.ray import fleet
from tensorhub_plugins.vllm.ray.actor_handles import opened, sealed
from tensorhub_plugins.vllm.ray.fleet.events import Reported
from tensorhub_plugins.vllm.ray.fleet.types import Entry
from tensorhub_plugins.vllm.ray.gauges import Gauges
from tensorhub_plugins.vllm.ray.members import JOIN_INTERVAL_S

logger = get_logger(__name__)

REPORT_INTERVAL_S = 1.0
TURNS = round(REPORT_INTERVAL_S / JOIN_INTERVAL_S)  # from one report to the next
ANSWER_TIMEOUT_S = 15.0  # the fleet's actor may be starting again


class Dispatcher(Protocol):
    """verl's router, or OpenRLHF's generator."""

    def seen(self) -> Reported:
        """Return what is to be reported now."""

    def apply(self, told: Collection[str], roster: Sequence[Entry]) -> None:
        """Use the replicas in the roster and no others. told: the names that were reported."""


class Reporter:
    """before: called before each report. figures: of the replicas now, for Ray's metrics. between: called some times
    from one report to the next."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        before: Callable[[], None] = lambda: None,
        figures: Callable[[], Mapping[str, float]] = dict,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        self.dispatcher, self._before, self._figures, self._between = dispatcher, before, figures, between
        self._gauges = Gauges()
        self._said = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self.run()), name="tensorhub-fleet", daemon=True)

    def start(self) -> None:
        """Run in a thread, for a process that is silent for minutes in its own. It ends with the process."""
        self._thread.start()

    def stop(self) -> None:
        """End that thread."""
        self._ended.set()
        self._thread.join()

    async def run(self) -> None:
        """Report until `stop`."""
        for turn in itertools.count():
            if self._ended.is_set():
                return
            try:
                if turn % TURNS:
                    self._between()
                else:
                    await self.report()
                    self._said = ""
            except Exception as error:  # whatever it is, the next round may go well
                if self._said != type(error).__name__:  # once, not every second
                    logger.warning("no answer of the fleet, going on with the replicas there are: %r", error)
                self._said = type(error).__name__
            await asyncio.sleep(REPORT_INTERVAL_S / TURNS)

    async def report(self) -> None:
        """Make one round."""
        if not ray.is_initialized():
            return
        self._before()
        self._gauges.set(self._figures())
        now = self.dispatcher.seen()
        # Also when all have left: others may come.
        actor = fleet.of_this_job() if now.seen or not now.unnamed else None
        if actor is not None:
            asked = actor.report.remote(sealed(now.seen), now.waiting, now.unnamed)
            roster = opened(await asyncio.wait_for(asked, ANSWER_TIMEOUT_S))
            self.dispatcher.apply({one.name for one in now.seen}, roster)
