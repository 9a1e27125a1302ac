"""What others do to a worker's weights, with the store and a toy model: it may fail, or give them another form."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_toys import Engines, Party, conversion, engines, toy_checkpoint, update, value, wait_until

from tensorhub_plugins.core import DeadlineExceeded
from tensorhub_plugins.vllm.worker.extension import external_change
from tensorhub_plugins.vllm.worker.updater import Updater

__all__ = ["conversion", "engines"]  # fixtures
pytestmark = pytest.mark.usefixtures("conversion")


ALONE = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1))


def two(engines: Engines) -> list[Updater]:
    """Make the two workers of one engine."""
    party = Party(2)
    return [engines("e", shard=k, shards=2, gather=party.of(k), serve_from="live") for k in range(2)]


@pytest.mark.parametrize("how", ["fewer bytes", "none", "on two devices"])
def test_weights_that_others_gave_another_form_are_of_no_version(how: str, engines: Engines) -> None:
    """They could not be compared: the call failed for that, they went on under the version's number, and the engine's
    other workers waited for this one."""
    updater = engines("first", serve_from="live")
    fused: Any = updater.model.fused
    with engines.trainer() as trainer:
        trainer.publish(1, toy_checkpoint(1.0))
        update(updater, 1)
        with external_change(updater, "a function", ALONE, is_certain=False):
            if how == "on two devices":
                updater.model.register_buffer("beside", torch.zeros(3))
            else:
                fused.data = fused.data[: how == "fewer bytes"].clone()
        assert (updater.poll()["version"], list(updater._client.serving())) == (0, [])


@pytest.mark.parametrize("fails", ["in another form", "in it"])
def test_a_change_by_others_that_fails_in_one_worker_holds_up_no_other(fails: str, engines: Engines) -> None:
    workers = two(engines)

    def change(worker: Updater) -> None:
        with suppress(DeadlineExceeded), external_change(worker, "reload_weights", ALONE):
            fused: Any = worker.model.fused
            if worker is workers[0] and fails == "in it":
                raise DeadlineExceeded("readers are still there")
            fused.data = fused.data[: 1 if worker is workers[0] and fails == "in another form" else 6] * 7.0

    with engines.trainer() as trainer, ThreadPoolExecutor(2) as threads:
        trainer.publish(1, toy_checkpoint(1.0))
        list(threads.map(lambda worker: update(worker, 1), workers))
        list(threads.map(change, workers))
        broken = [bool(worker.poll()["broken"]) for worker in workers]
        assert broken == [fails != "in another form"] * 2
        assert [worker.poll()["version"] for worker in workers] == [0 if fails == "in another form" else 1] * 2


def test_a_change_that_one_worker_cannot_begin_is_begun_by_none(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose readers could not be disconnected in time had the others change, wait for it in any step that they do
    together, and all of them lost their weights."""
    workers, begun = two(engines), []

    def stay(*_: Any) -> None:
        raise DeadlineExceeded("readers are still there")

    def change(worker: Updater) -> str:
        try:
            with external_change(worker, "reload_weights", ALONE):
                begun.append(worker)
        except Exception as error:
            return str(error)
        return ""

    with engines.trainer() as trainer, ThreadPoolExecutor(2) as threads:
        trainer.publish(1, toy_checkpoint(1.0))
        list(threads.map(lambda worker: update(worker, 1), workers))
        with monkeypatch.context() as patched:
            patched.setattr(workers[0], "before_external_change", stay)
            said = list(threads.map(change, workers))
        assert not begun and "readers are still there" in said[0] and "another worker of this engine" in said[1]
        for worker in workers:
            wait_until(lambda worker=worker: worker.poll()["served_version"] == 1)
            assert (worker.poll()["version"], worker.poll()["broken"]) == (1, None)
        list(threads.map(change, workers))  # the control
        assert len(begun) == 2 and [worker.poll()["version"] for worker in workers] == [0, 0]


@pytest.mark.parametrize("fails", ["before", "in it", "and goes on", "nowhere", "unlike the others"])
def test_a_change_within_a_call_of_others_is_a_part_of_that(fails: str, engines: Engines) -> None:
    """As of a function that calls reload_weights: where one worker did not come to it, or failed before, the other one
    waited for it for good."""
    workers = two(engines)

    def change(worker: Updater) -> None:
        is_first = worker is workers[0]
        with suppress(ValueError), external_change(worker, "a function", ALONE, is_certain=False):
            if is_first and fails in ("before", "unlike the others"):
                if fails == "before":
                    raise ValueError("it does not come to it")
                return
            caught = suppress(ValueError) if fails == "and goes on" else nullcontext()
            with caught, external_change(worker, "reload_weights", ALONE):
                worker.model.fused.data[:3] *= 7.0
                if is_first and fails != "nowhere":
                    raise ValueError("half way")
                worker.model.fused.data[3:] *= 7.0

    with engines.trainer() as trainer, ThreadPoolExecutor(2) as threads:
        trainer.publish(1, toy_checkpoint(1.0))
        list(threads.map(lambda worker: update(worker, 1), workers))
        list(threads.map(change, workers))
        is_whole = fails in ("nowhere", "unlike the others")
        assert [bool(worker.poll()["broken"]) for worker in workers] == [not is_whole] * 2
        assert [worker.poll()["version"] for worker in workers] == [0 if is_whole else 1] * 2
        assert [list(worker._client.serving()) for worker in workers] == [[], []]
        trainer.publish(2, toy_checkpoint(2.0))
        list(threads.map(lambda worker: update(worker, 2), workers))
        assert [worker.poll()["version"] for worker in workers] == [2, 2]


def test_a_part_that_failed_before_it_changed_anything_may_be_tried_again(engines: Engines) -> None:
    """As of a function that knows two places of its weights: they were whole, and counted as broken."""
    workers = two(engines)

    def change(worker: Updater) -> None:
        with external_change(worker, "a function", ALONE, is_certain=False):
            with suppress(ValueError), external_change(worker, "reload_weights", ALONE):
                raise ValueError("there is nothing here")
            with external_change(worker, "reload_weights", ALONE):
                worker.model.fused.data[:] *= 7.0

    with engines.trainer() as trainer, ThreadPoolExecutor(2) as threads:
        trainer.publish(1, toy_checkpoint(1.0))
        list(threads.map(lambda worker: update(worker, 1), workers))
        list(threads.map(change, workers))
        assert [(worker.poll()["version"], worker.poll()["broken"]) for worker in workers] == [(0, None)] * 2


@pytest.mark.parametrize("fails", [False, True])
def test_what_no_checkpoint_fills_is_mended_with_the_weights(fails: bool, engines: Engines) -> None:
    """A rotary table that a function had scaled stayed so, under the number of a version that had never had it."""
    updater, table = engines("first", serve_from="live"), torch.arange(3.0)
    updater.model.register_buffer("table", table.clone())
    if engines.simulation is not None:
        engines.simulation.take(updater.model.table, "first")

    def change(*tensors: Any) -> None:
        with suppress(ValueError), external_change(updater, "a function", ALONE, is_certain=False):
            for tensor in tensors:
                tensor.data *= 7.0
            if fails:
                raise ValueError("half way")

    with engines.trainer() as trainer:
        trainer.publish(1, toy_checkpoint(1.0))
        update(updater, 1)
        change(updater.model.fused)
        change(updater.model.fused, updater.model.table)
        assert torch.equal(updater.model.table, 7.0 * table)  # until then it is what others want it to be
        update(updater, 1)
        assert (value(updater), updater.model.table.tolist()) == (1.0, table.tolist())
        updater.model.table += 1.0  # as a step of the engine's own: no change by others
        trainer.publish(2, toy_checkpoint(2.0))
        update(updater, 2)
        assert (value(updater), updater.model.table.tolist()) == (2.0, (table + 1.0).tolist())


def test_readers_that_stay_after_a_call_in_sleep_hold_up_no_other_worker(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What that worker raised at the end of the call kept it from its vote, for which the other one waited."""
    workers = two(engines)

    def stay(*_: Any) -> None:
        raise DeadlineExceeded("readers are still there")

    def change(worker: Updater) -> None:
        with external_change(worker, "a function", ALONE, is_certain=False):
            worker.wake_up()
            if worker is workers[0]:
                monkeypatch.setattr(worker, "before_external_change", stay)

    with engines.trainer() as trainer, ThreadPoolExecutor(2) as threads:
        trainer.publish(1, toy_checkpoint(1.0))
        list(threads.map(lambda worker: update(worker, 1), workers))
        for worker in workers:
            worker.fall_asleep()
        list(threads.map(change, workers))
        assert all("readers are still there" in worker.poll()["broken"] for worker in workers[:1])
        assert "another worker of this engine failed" in workers[1].poll()["broken"]
