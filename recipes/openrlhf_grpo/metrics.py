"""OpenRLHF's TensorBoard log of every step: read_metrics(folder) -> [{"step": n, "data": {name: value}}]."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

TRAIN = "train/"


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Read the metrics. folder: --logger.tensorboard_dir. Names are OpenRLHF's own, without "train/"."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rows: dict[int, dict[str, float]] = defaultdict(dict)
    for file in sorted(folder.rglob("events.out.tfevents.*")):
        log = EventAccumulator(str(file), size_guidance={"scalars": 0})
        log.Reload()
        for name in log.Tags()["scalars"]:
            for event in log.Scalars(name):
                if name.startswith(TRAIN):
                    rows[event.step][name.removeprefix(TRAIN)] = event.value
    return [{"step": step, "data": data} for step, data in sorted(rows.items())]
