"""verl's validation is answered by the weights of its step: when an update is held up, and for how long."""

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("verl", reason="the adapter registers with verl when it is imported")

from omegaconf import OmegaConf  # noqa: E402

from tensorhub_plugins.core import VersionRefused, version_of  # noqa: E402
from tensorhub_plugins.verl.worker_stub import NullWorker, Validation, validation_of  # noqa: E402


def test_when_validation_follows():
    validation = Validation(before_train=True, every_steps=3, last_step=7)
    follows = [step for step in range(8) if validation.follows(step, is_first=step == 0)]
    assert follows == [0, 3, 6, 7]
    resumed = [step for step in range(4, 8) if validation.follows(step, is_first=step == 4)]
    assert resumed == [4, 6, 7]
    never = Validation(before_train=False, every_steps=0, last_step=7)
    assert not any(never.follows(step, is_first=step == 0) for step in range(8))


@pytest.mark.parametrize(
    ("trainer", "optimizer_steps", "expected"),
    [
        ({"test_freq": 2, "total_training_steps": 9}, 0, Validation(True, 2, 9)),
        ({"test_freq": -1, "val_before_train": False}, 0, Validation(False, 0, None)),
        (
            {"test_freq": 2, "v1": {"trainer_mode": "separate_async", "separate_async": {"parameter_sync_step": 4}}},
            40,
            Validation(True, 2, 10),
        ),
        ({"test_freq": 2, "use_v1": False}, 40, Validation(True, 2, 40)),
    ],
)
def test_verls_configuration_says_when_it_validates(trainer, optimizer_steps, expected):
    optim = {"total_training_steps": optimizer_steps}
    root = OmegaConf.create({"trainer": trainer, "actor_rollout_ref": {"actor": {"optim": optim}}})
    assert validation_of(root) == expected


def test_fully_async_knows_no_last_step():
    """Else each update after it would wait for all replicas."""
    trainer = {"test_freq": 2, "use_v1": False, "total_training_steps": 8}
    root = OmegaConf.create({"trainer": trainer, "async_training": {"require_batches": 1}})
    assert validation_of(root) == Validation(True, 2, None)


class Router:
    """replicas: whether one is ready."""

    def __init__(self, behind=()):
        self.asked, self.behind, self.arrived, self.refuses = [], list(behind), asyncio.Event(), ""
        self.wait_for_version = SimpleNamespace(remote=self._wait)
        self.wait_for_any = SimpleNamespace(remote=self._wait_for_any)
        self.figures = SimpleNamespace(remote=self._figures)
        self.looked, self.ready = [], True

    async def _wait(self, version, timeout_s):
        self.asked.append((version, timeout_s))
        await self.arrived.wait()
        return self.behind

    async def _wait_for_any(self, version, timeout_s):
        self.looked.append((version, timeout_s))
        if self.refuses:
            raise VersionRefused(self.refuses)
        return self.ready

    async def _figures(self, published):
        return {"tensorhub/version_lag/max": float(published)}


def test_the_first_update_waits_for_a_replica_or_ends_with_the_reason_of_all(caplog):
    async def story():
        router, worker = Router(), NullWorker(Validation(False, 0, None), 5.0)
        await worker.meet(router)
        await worker.update_weights(0)
        await worker.update_weights(1)
        assert router.looked == [(1, 5.0), (2, 0.0)]  # later ones only look
        router.ready = False
        await worker.update_weights(2)  # they may all be on their way back
        assert not caplog.records
        router.refuses = "version 1 cannot be installed in any of 2 replicas"
        with pytest.raises(VersionRefused, match="in any of 2 replicas"):
            await worker.update_weights(3)
        assert await worker.figures(7) == {
            "tensorhub/validation_wait/seconds": 0.0,
            "tensorhub/version_lag/max": 7.0,
        }
        late, alone = Router(), NullWorker(Validation(False, 0, None), 5.0)
        late.ready = False
        await alone.meet(late)
        await alone.update_weights(0)

    asyncio.run(asyncio.wait_for(story(), 30))
    assert [record.getMessage() for record in caplog.records] == ["no replica has version 1 after 5 s"]


def test_an_update_before_validation_ends_when_the_replicas_have_it(caplog):
    async def story():
        router, worker = Router(), NullWorker(Validation(False, 2, None), 5.0)
        await worker.meet(router)
        await worker.update_weights(1)
        assert not router.asked  # the trainer goes on at once
        update = asyncio.ensure_future(worker.update_weights(2))
        while not router.asked:
            await asyncio.sleep(0)
        assert not update.done() and router.asked == [(3, 5.0)]
        router.arrived.set()
        await update
        assert 0.0 < (await worker.figures())["tensorhub/validation_wait/seconds"] < 30.0
        router.behind = ["rollout-1/0 has 2"]
        await worker.update_weights(4)

    asyncio.run(asyncio.wait_for(story(), 30))
    (said,) = [record.getMessage() for record in caplog.records]
    assert "validation of step 4 is answered in part by older weights: after 5 s rollout-1/0 has 2" in said


def test_one_that_was_started_again_waits_for_its_router_and_hears_of_the_attempt(caplog):
    """Else validation would begin at once, with whatever there is: replicas have more than any version of attempt 0."""

    async def story():
        router, again = Router(), NullWorker(Validation(False, 2, None), 5.0, has_router=True)
        update = asyncio.ensure_future(again.update_weights(2))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not update.done()
        router.arrived.set()
        await again.meet(router, published=version_of(3, 2))
        await update
        assert router.asked == [(version_of(3, 3), 5.0)]
        await NullWorker(Validation(False, 2, None), 5.0).update_weights(2)  # the control: with verl's own router

    asyncio.run(asyncio.wait_for(story(), 30))
    assert not caplog.records
