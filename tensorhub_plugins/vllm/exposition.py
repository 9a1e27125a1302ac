"""The store's figures of one server, in vLLM's own `/metrics`: docs/metrics.md has them.

They are gauges of prometheus_client's registry, which are written to files where vLLM runs several API servers
(PROMETHEUS_MULTIPROC_DIR): each sets those of the same engine, and the last one counts.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from tensorhub_plugins.core import step_of
from tensorhub_plugins.vllm.engine.core import Following, lag_of, why_refused

PREFIX = "tensorhub_engine_"
FIGURES = {
    "answers": "1 if the engine has said how it does; else the others are what it said before",
    "step": "step of the version that is installed; 0: none of the store's",
    "lag_steps": "steps by which that is behind the newest version that the engine has heard of",
    "behind_seconds": "seconds for which there has been a newer version than the installed one",
    "install_age_seconds": "seconds since a version was installed",
    "refusing": "1 while a newer version cannot be installed in this engine",
    "failing": "1 while its last try to install a version has failed",
    "broken": "1 while its weights are not whole, and it holds its requests",
    "hub_silent_seconds": "seconds for which the hub has not answered",
    "pull_seconds": "seconds that the last version took to arrive, beside generation",
    "pause_seconds": "seconds for which no request was served while it was installed",
}


class Figures:
    """The gauges, made once a process."""

    def __init__(self) -> None:
        """Register them."""
        from prometheus_client import Gauge

        labels = ("run", "model")
        self._gauges: dict[str, Any] = {
            name: Gauge(PREFIX + name, text, labels, multiprocess_mode="mostrecent") for name, text in FIGURES.items()
        }
        self._labels: tuple[str, str] | None = None

    def renew(self, said: Following | None) -> None:
        """Take what the engine says of itself; None: it does not follow, and has no figures."""
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
            "hub_silent_seconds": said["hub_silent_s"],
            "pull_seconds": last.get("pull_s", 0.0),
            "pause_seconds": last.get("pause_s", 0.0),
        }
        for name, value in values.items():
            self._gauges[name].labels(*self._labels).set(float(value))

    def missed(self) -> None:
        """Say that the engine has not answered in time."""
        if self._labels is not None:
            self._gauges["answers"].labels(*self._labels).set(0.0)


@cache
def figures() -> Figures:
    """Return those of this process."""
    return Figures()
