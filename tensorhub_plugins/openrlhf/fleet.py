"""The generator's side of the fleet (../vllm/ray/fleet_types.py): it reports what it knows of every engine, once a
second, and uses the engines that the fleet says.

From a thread of its own: the generator is one actor inside one call, and in sync training silent for minutes while the
trainer works. It never depends on the fleet: without an answer it goes on with what it has.
"""

from __future__ import annotations

import threading
from typing import Any

import ray

from tensorhub_plugins.core.log import get_logger
from tensorhub_plugins.openrlhf.health import Engines
from tensorhub_plugins.vllm.ray.fleet import of_this_job
from tensorhub_plugins.vllm.ray.handles import opened, sealed

logger = get_logger(__name__)

REPORT_INTERVAL_S = 1.0
ANSWER_TIMEOUT_S = 10.0  # the fleet's actor may be starting again


class Reporter:
    def __init__(self, engines: Engines) -> None:
        self.engines = engines
        self.fleet: Any = None
        self._said = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tensorhub-fleet", daemon=True)

    def start(self) -> None:
        """It ends with this process, or with Ray in it."""
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(REPORT_INTERVAL_S) and ray.is_initialized():
            try:
                self.report()
                self._said = ""
            except Exception as error:  # whatever it is, the next round may go well
                words = (str(error).splitlines() or [type(error).__name__])[0]
                if words != self._said:  # once, not every second
                    logger.warning("the fleet does not answer, going on with the engines there are: %s", words)
                self._said, self.fleet = words, None

    def report(self) -> None:
        """One round: look, tell, and take in the roster."""
        self.engines.check(wait_s=0.0)
        self.fleet = self.fleet or of_this_job()
        if self.fleet is not None:
            answer = self.fleet.report.remote(sealed(self.engines.seen()), self.engines.waiting)
            self.engines.take(opened(ray.get(answer, timeout=ANSWER_TIMEOUT_S)))
