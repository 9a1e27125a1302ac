"""The first version is planned before any byte of it is here."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from vllm_toys import LAYOUT, TIMEOUT_S, Engines, conversion, engines, fetch, toy_checkpoint, update, value, wait_until

from tensorhub_plugins.core import ShardKey
from tensorhub_plugins.vllm.worker import checkpoint_contract
from tensorhub_plugins.vllm.worker import updater as updater_module
from tensorhub_plugins.vllm.worker.plan import Plan, Region

__all__ = ["conversion", "engines"]  # fixtures
pytestmark = pytest.mark.usefixtures("conversion")


def planned(needed: dict[str, Any]) -> Any:
    """Stands in for a rehearsal that has seen the loaders take these rows."""

    def rehearse(model: Any, vllm_config: Any, tensors: Any) -> checkpoint_contract.Rehearsal:
        threads.append(threading.current_thread())
        shapes = checkpoint_contract.shapes_of(tensors)
        regions = {name: (Region((0, 0), (rows, 1000)),) for name, rows in needed.items()}
        return checkpoint_contract.Rehearsal(
            shapes, frozenset(tensors), plan=Plan(shapes, (), regions, frozenset({""}))
        )

    threads: list[threading.Thread] = []
    rehearse.threads = threads  # type: ignore[attr-defined]
    return rehearse


def big_checkpoint(value: float) -> dict[str, torch.Tensor]:
    """With a tensor that a worker of this engine does not use, and several segments."""
    return {**toy_checkpoint(value), "unused": torch.full((400, 1000), value)}


@pytest.mark.parametrize(
    ("needed", "is_enough"),
    [({"a": 2, "b": 4}, True), ({"a": 2, "b": 3}, False), ({"a": 2}, False)],
    ids=["a right plan", "one that lacks a row", "one that lacks a tensor"],
)
@pytest.mark.parametrize("how", ["polled", "at once"])
def test_of_the_first_version_only_what_is_needed_is_read(
    needed: dict[str, int], is_enough: bool, how: str, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    rehearse = planned(needed)
    monkeypatch.setattr(checkpoint_contract, "rehearse", rehearse)
    updater = engines("first", shards=2, gather=lambda vote: [vote, vote])
    with engines.trainer() as trainer:
        for version in (1, 2):
            trainer.publish(version, big_checkpoint(float(version)))
            result = updater.update(version, TIMEOUT_S) if how == "at once" else update(updater, version)
            assert result["installed"] and value(updater) == version
            wait_until(lambda: not updater.poll()["serving"])
            size_bytes = sum(tensor.nbytes for tensor in big_checkpoint(0.0).values())
            assert (sum(result["report"]["sources"].values()) < size_bytes / 2) == is_enough
            # The first one, as others may be about to start; then only what another asks for.
            assert (ShardKey(version, LAYOUT, 0, 2) in updater._client.serving()) == (version == 1)
        assert rehearse.threads == [threading.main_thread()]  # where the model does not compute


def test_who_is_not_polled_reads_the_first_version_whole(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_contract, "rehearse", planned({"a": 2, "b": 4}))
    monkeypatch.setattr(updater_module, "PLAN_AHEAD_S", 0.05)
    updater = engines("first", shards=2, gather=lambda vote: [vote, vote])
    with engines.trainer() as trainer:
        trainer.publish(1, big_checkpoint(1.0))
        updater.start_fetch(1, TIMEOUT_S)
        assert updater._fetching is not None
        updater._fetching.result(TIMEOUT_S)
        result = updater.install(1, TIMEOUT_S)
        assert result["installed"] and value(updater) == 1.0
        assert sum(result["report"]["sources"].values()) == sum(t.nbytes for t in big_checkpoint(0.0).values())


def test_a_worker_of_one_needs_all_and_plans_nothing(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    rehearse = planned({"a": 2, "b": 4})
    monkeypatch.setattr(checkpoint_contract, "rehearse", rehearse)
    updater = engines("first")
    with engines.trainer() as trainer:
        trainer.publish(1, big_checkpoint(1.0))
        assert fetch(updater, 1) == "ready" and rehearse.threads == []
