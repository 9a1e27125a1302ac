"""A worker whose weights are not in their memory, with the real store and a toy model: nothing reads them there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm_toys import Engines, conversion, engines, toy_checkpoint, update, wait_until

from tensorhub_plugins.core import UsageError
from tensorhub_plugins.vllm.worker import extension, weights
from tensorhub_plugins.vllm.worker.extension import external_change

__all__ = ["conversion", "engines"]  # fixtures
pytestmark = pytest.mark.usefixtures("conversion")


@pytest.mark.parametrize("how", ["sleeps on", "is woken", "falls asleep"])
def test_what_others_do_while_an_engine_sleeps_reads_no_weights(
    how: str, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their memory is not mapped: to compare its bytes ended the process. What a call does that wakes the engine, or
    has it sleep, is not known, so that its weights are of no version."""
    updater = engines("first", serve_from="live")
    alone = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1))
    tensors = weights.tensors

    def mapped(model: Any) -> Any:
        assert not updater.is_asleep, "the process ends"
        return tensors(model)

    monkeypatch.setattr(weights, "tensors", mapped)
    with engines.trainer() as trainer:
        trainer.publish(1, toy_checkpoint(1.0))
        update(updater, 1)
        if how != "falls asleep":
            updater.fall_asleep()
            with pytest.raises(UsageError, match="wake it up first"):
                updater.digests()
        with external_change(updater, "a function", alone, is_certain=False):
            {"is woken": updater.wake_up, "falls asleep": updater.fall_asleep}.get(how, lambda: None)()
        if how != "is woken":
            updater.wake_up()
        wait_until(lambda: not updater.poll()["serving"])
        assert updater.poll()["version"] == (1 if how == "sleeps on" else 0)
        assert [key.version for key in updater._client.serving()] == ([1] if how == "sleeps on" else [])
        assert updater.poll()["broken"] is None


@pytest.mark.parametrize("tags", [("weights",), ("kv_cache",)])
def test_weights_that_were_discarded_are_not_read_until_their_memory_is_back(
    tags: tuple[str, ...], engines: Engines
) -> None:
    updater = engines("first", serve_from="live")
    worker = SimpleNamespace(model_runner=SimpleNamespace(model=updater.model, get_model=lambda: updater.model))
    vars(updater.model)["tensorhub_updater"] = updater
    with engines.trainer() as trainer:
        trainer.publish(1, toy_checkpoint(1.0))
        update(updater, 1)
        extension._discard(lambda tags: None, worker, tags)
        assert updater.is_asleep == bool(updater.poll()["broken"]) == (tags == ("weights",))
        extension._wake_up(lambda tags: None, worker, [*tags])
        assert not updater.is_asleep
        assert tags != ("weights",) or update(updater, 1)["installed"]
