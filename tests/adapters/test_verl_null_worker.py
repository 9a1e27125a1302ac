"""verl's validation is answered by the weights of its step: when an update is held up, and for how long."""

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("verl", reason="the adapter registers with verl when it is imported")

from omegaconf import OmegaConf  # noqa: E402

from tensorhub_plugins.verl.null_worker import NullWorker, Validation, validation_of  # noqa: E402


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


class Router:
    def __init__(self, behind=()):
        self.asked, self.behind, self.arrived = [], list(behind), asyncio.Event()
        self.wait_for_version = SimpleNamespace(remote=self._wait)

    async def _wait(self, version, timeout_s):
        self.asked.append((version, timeout_s))
        await self.arrived.wait()
        return self.behind


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
        router.behind = ["rollout-1/0 has 2"]
        await worker.update_weights(4)

    asyncio.run(asyncio.wait_for(story(), 30))
    (said,) = [record.getMessage() for record in caplog.records]
    assert "validation of step 4 is answered in part by older weights: after 5 s rollout-1/0 has 2" in said
