"""The figures of a run's replicas as metrics of Ray; the page has all of them."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

import ray  # noqa: E402
import ray.util.metrics  # noqa: E402

from tensorhub_plugins.vllm.ray import replica_metrics  # noqa: E402
from tensorhub_plugins.vllm.ray.gauges import Gauges, name_of  # noqa: E402

PAGE = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"
ALONE = "tensorhub/validation_wait/seconds"  # of a dispatcher's own, see worker_stub.py and openrlhf/generation.py


class Gauge:
    made: list[str] = []

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        assert re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", name) and tag_keys == ("job",)
        self.made.append(name)
        self.name = name

    def set(self, value: float, tags: dict[str, str]) -> None:
        SET[self.name] = value, tags["job"]


SET: dict[str, tuple[float, str]] = {}


def names() -> set[str]:
    none: set[str] = set(replica_metrics.of_replicas((), lost=0, refused=0, published=0, now=0.0))
    return none | set(replica_metrics.of_updates((), "trainer"))


def test_each_figure_is_a_gauge_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray.util.metrics, "Gauge", Gauge)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_job_id=lambda: "07000000"))
    gauges = Gauges()
    gauges.set({"tensorhub/version_lag/max": 7, "tensorhub/replicas/ready": 2.0})
    gauges.set({"tensorhub/version_lag/max": 0.0})
    assert SET == {"tensorhub_version_lag_max": (0.0, "07000000"), "tensorhub_replicas_ready": (2.0, "07000000")}
    assert sorted(Gauge.made) == ["tensorhub_replicas_ready", "tensorhub_version_lag_max"]


def test_a_ray_that_takes_none_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    asked: list[int] = []

    def fails() -> None:
        asked.append(1)
        raise RuntimeError("no metrics here")

    monkeypatch.setattr(ray, "get_runtime_context", fails)
    gauges = Gauges()
    for _ in range(3):
        gauges.set({"tensorhub/replicas/ready": 2.0})
    assert len(asked) == 1


def test_the_page_has_every_key_of_the_log_and_its_name_in_ray() -> None:
    told = dict(re.findall(r"^\| `(tensorhub/[\w/]+)` \| `ray_(\w+)` \|", PAGE.read_text(), flags=re.MULTILINE))
    assert set(told) == {*names(), ALONE} and told == {key: name_of(key) for key in told}
