"""Which versions a sample's tokens came from, and how old they are when they are trained on.

An engine that keeps its requests while its weights change gives samples whose tokens come from several versions.
"""

from __future__ import annotations

import contextvars
from collections.abc import Mapping
from typing import Any

from tensorhub_plugins.core import step_of
from tensorhub_plugins.openrlhf import partial_answers

FIRST, LAST = "tensorhub_version_first", "tensorhub_version_last"  # of a sample's tokens; in Experience.info

# What the dispatcher knows of the engines, in Experience.info, too: health.py.
FIGURES = tuple(
    f"tensorhub/{name}"
    for name in ("replicas/", "version_lag/", "last_pull_age_s", "pull/", "pause/", "validation_wait/")
)
LESS_IS_WORSE = ("tensorhub/replicas/ready", "tensorhub/pull/share_from_peers")

_of_sample: contextvars.ContextVar[list[int]] = contextvars.ContextVar("versions of the sample being made")


class Versioned:
    """An agent executor whose samples say which versions their tokens came from."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self._being_made: list[list[int]] = []  # the versions of each sample

    async def execute(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        versions: list[int] = []
        journals = partial_answers.of_prompt.get()
        if journals is not None:
            journals.begin()
        _of_sample.set(versions)  # every sample is made in a task of its own, and a task has its own context
        self._being_made.append(versions)
        try:
            response: dict[str, Any] = await self._executor.execute(*args, **kwargs)
        finally:
            self._being_made = [each for each in self._being_made if each is not versions]
        if versions:
            logs = response.get("extra_logs") or {}
            response["extra_logs"] = {**logs, FIRST: min(versions), LAST: max(versions)}
        return response

    def came_from(self, *versions: int) -> None:
        """Note that the tokens just made, of the sample that this task makes, or is begun by, are of these versions. Of
        all that are being made where that has ended, or there is none, as with `BrokenOff.note`."""
        own = [each for each in self._being_made if each is _of_sample.get(None)]
        for seen in own or self._being_made:
            seen.extend(step_of(version) for version in versions)


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
