"""Which versions a sample's tokens came from, and how old they are when they are trained on.

An engine that keeps its requests while its weights change gives samples whose tokens come from several versions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FIRST, LAST = "tensorhub_version_first", "tensorhub_version_last"  # of a sample's tokens; in Experience.info

# What the dispatcher knows of the engines, in Experience.info, too: health.py.
FIGURES = tuple(
    f"tensorhub/{name}"
    for name in ("replicas/", "version_lag/", "last_pull_age_s", "pull/", "pause/", "validation_wait/")
)
LESS_IS_WORSE = ("tensorhub/replicas/ready", "tensorhub/pull/share_from_peers")


def with_logs(response: dict[str, Any], logs: Mapping[str, float]) -> dict[str, Any]:
    """Return the same sample, which says this, too, as far as it says nothing else."""
    return {**response, "extra_logs": {**logs, **(response.get("extra_logs") or {})}}


def figures_of(samples: Any) -> dict[str, float]:
    """Return how the engines did while the samples of a step were made: the worst that any of them says."""
    told: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in sample.info.items():
            if name.startswith(FIGURES):
                told.setdefault(name, []).append(float(value.max()))
    return {name: min(values) if name in LESS_IS_WORSE else max(values) for name, values in told.items()}


def staleness(samples: Any, global_step: int) -> dict[str, float]:
    """Return how many versions old the samples of a step are that is about to train version `global_step`."""
    ages, spans = [], []
    for sample in samples:
        if FIRST in sample.info:
            first, last = float(sample.info[FIRST].min()), float(sample.info[LAST].max())
            ages.append(global_step - first)
            spans.append(last - first)
    if not ages:
        return {}
    return {
        "tensorhub/staleness_mean": sum(ages) / len(ages),
        "tensorhub/staleness_max": max(ages),
        "tensorhub/samples_of_several_versions": sum(span > 0 for span in spans) / len(spans),
    }
