"""The figures of a run's replicas as metrics of Ray, whose agents serve them to Prometheus: `ray_tensorhub_...`.

The same as in the trainer's log (replica_metrics.py), but set each second by the dispatcher: they go on when the
trainer stands still. "/" is "_" in their names; the label `job` is Ray's id of the job.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensorhub_plugins.core.log import get_logger

logger = get_logger(__name__)


def name_of(figure: str) -> str:
    """Return the name of a figure as Ray takes it."""
    return figure.replace("/", "_")


class Gauges:
    """Ray's gauges of one process, each made when its figure is first set."""

    def __init__(self) -> None:
        self._gauges: dict[str, Any] = {}
        self._is_off = False

    def set(self, figures: Mapping[str, float]) -> None:
        """Set them all. A Ray that takes none is said once, and left alone."""
        if self._is_off:
            return
        try:
            import ray
            from ray.util.metrics import Gauge

            job = ray.get_runtime_context().get_job_id()
            for figure, value in figures.items():
                if figure not in self._gauges:
                    self._gauges[figure] = Gauge(name_of(figure), f"{figure} of the trainer's log", ("job",))
                self._gauges[figure].set(float(value), {"job": job})
        except Exception as error:  # whatever a version of Ray has against it: the dispatcher goes on
            logger.warning("no figures for Ray's metrics: %r", error)
            self._is_off = True
