"""The picture of a run: the reward, and the KL. What its workers did when is on the page of `tensorhub timeline`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

from recipes.demo.report import Report  # noqa: E402

TICKS_MAX = 30  # numbers of steps below an axis


def draw(
    report: Report,
    path: Path,
    *,
    kl_max: float = 1e-3,
    beside: Mapping[str, Sequence[float]] | None = None,
) -> None:
    """Draw the picture. kl_max: the line that KL should stay below. beside: rewards of other runs, step by step."""
    figure, (reward, kl) = plt.subplots(2, 1, figsize=(12, 5), layout="constrained")
    numbers = [step.step for step in report.steps]
    reward.plot(numbers, [step.reward for step in report.steps], marker="o", color="#2ca02c", label="tensorhub")
    for name, rewards in (beside or {}).items():
        reward.plot(range(1, 1 + len(rewards)), rewards, color="grey", label=name)
    ticks = numbers if len(numbers) <= TICKS_MAX else numbers[:: -(-len(numbers) // TICKS_MAX)]
    reward.set(ylabel="mean reward", xticks=ticks)
    with_kl = [step for step in report.steps if step.kl is not None]
    kl.semilogy([s.step for s in with_kl], [max(s.kl, 1e-9) for s in with_kl], marker="o", color="#9467bd")
    kl.axhline(kl_max, color="grey", linestyle=":", label=f"{kl_max:g}")
    kl.set(ylabel="KL(rollout, trainer)", xlabel="training step", xticks=ticks)
    control = [step.step for step in report.steps if not step.pulling]
    if control:
        for axes in (reward, kl):
            axes.axvspan(control[0] - 0.5, control[-1] + 0.5, color="#eeeeee", label="pulling off")
    kl.legend(loc="upper left")
    if beside:
        reward.legend(loc="upper left")
    figure.savefig(path, dpi=110)
    plt.close(figure)
