"""The store's figures of one server, in vLLM's own `/metrics`: docs/metrics.md has them.

They are gauges of prometheus_client's registry, which are written to files where vLLM runs several API servers
(PROMETHEUS_MULTIPROC_DIR): each sets those of the same engine, and the last one counts.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from typing import Any

from tensorhub_plugins.core import step_of
from tensorhub_plugins.vllm.engine.status import Following, lag_of, why_refused

PREFIX = "tensorhub_engine_"
# vLLM's own (from 0.32 on, of its routes for weights, which an engine that follows does not use): here of each install.
DURATION = "vllm:rl_weight_update_operation_duration_seconds"
IN_FLIGHT = "vllm:rl_weight_update_operations_in_flight"
BUCKETS_S = (0.01, 0.1, 1, 10, 30, 60, 120, 300, 600)
FIGURES = {
    "answers": "1 if the engine has said how it does; else the others are what it said before",
    "step": "step of the version that is installed; 0: none of the store's",
    "lag_steps": "steps by which that is behind the newest version that the engine has heard of",
    "behind_seconds": "seconds for which there has been a newer version than the installed one",
    "install_age_seconds": "seconds since a version was installed",
    "refusing": "1 while a newer version cannot be installed in this engine",
    "failing": "1 while its last try to install a version has failed",
    "broken": "1 while its weights are not whole, and it holds its requests",
    "paused": "1 while another client has paused it, or put it to sleep: its requests wait",
    "hub_silent_seconds": "seconds for which the hub has not answered",
    "pull_seconds": "seconds that the last version took to arrive, beside generation",
    "pause_seconds": "seconds for which no request was served while it was installed",
}


class Figures:
    """The gauges, made once a process."""

    def __init__(self) -> None:
        from prometheus_client import Gauge

        labels = ("run", "model")
        self._gauges: dict[str, Any] = {
            name: Gauge(PREFIX + name, text, labels, multiprocess_mode="mostrecent") for name, text in FIGURES.items()
        }
        self._labels: tuple[str, str] | None = None
        self._duration, self._in_flight = _of_vllm()

    def renew(self, said: Following | None, updates: Iterable[tuple[float, float]] = ()) -> None:
        """Take what the engine says of itself; None: it does not follow, and has no figures. updates: seconds of pull
        and of pause of each that no scrape has seen."""
        if said is None:
            return
        self._labels = said["run"], said["model"]
        last = said.get("last", {})
        values = {
            "answers": 1.0,
            "step": step_of(said["version"]),
            "lag_steps": lag_of(said),
            "behind_seconds": said.get("behind_s", 0.0),
            "install_age_seconds": said.get("installed_s", 0.0),
            "refusing": why_refused(said) is not None,
            "failing": bool(said.get("failure")),
            "broken": said["broken"],
            "paused": said.get("paused", False),
            "hub_silent_seconds": said["hub_silent_s"],
            "pull_seconds": last.get("pull_s", 0.0),
            "pause_seconds": last.get("pause_s", 0.0),
        }
        for name, value in values.items():
            self._gauges[name].labels(*self._labels).set(float(value))
        for pull_s, pause_s in updates:
            self._duration.labels("update").observe(pull_s)
            self._duration.labels("finish").observe(pause_s)
        if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:  # there those of all API servers are added up
            self._in_flight.labels("update").set(float(said.get("updating", False)))

    def missed(self) -> None:
        """Say that the engine has not answered in time."""
        if self._labels is not None:
            self._gauges["answers"].labels(*self._labels).set(0.0)


def _of_vllm() -> tuple[Any, Any]:
    """Return vLLM's own two, or such as it has from 0.32 on. A name may be registered once."""
    try:
        own = import_module("vllm.entrypoints.rl.online.metrics").weight_operation_metrics()
        return own.duration, own.in_flight
    except (ImportError, AttributeError):
        from prometheus_client import Gauge, Histogram

        words = "Duration of one weight-transfer operation.", "Weight-transfer operations currently awaited."
        of = ["operation"]
        return Histogram(DURATION, words[0], of, buckets=BUCKETS_S), Gauge(
            IN_FLIGHT, words[1], of, multiprocess_mode="livesum"
        )


@cache
def figures() -> Figures:
    return Figures()
