"""verl repeats an update, skips one, asks for none at first, restarts, resumes, ends in between: in all modes.

verl's own trainers and manager over our engines and a real hub, see tests/support/verl_updates.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("verl", reason="the adapter registers with verl when it is imported")

from omegaconf import OmegaConf  # noqa: E402
from verl_updates import MODES, REFUSAL, DropIn, Policy, Pulls, Run, without_ray  # noqa: E402

from tensorhub_plugins.core import HubLimits, VersionRefused, start_server  # noqa: E402

PUBLISHES = "tensorhub/publish/bytes"


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    numbers = itertools.count()
    without_ray(monkeypatch, lambda: f"rollout_standalone_{next(numbers)}CheckpointEngineWorker_0:0")
    with start_server(limits=HubLimits(grace_s=0.05)) as server:
        yield server.address


def root_of(mode: str, **trainer: Any) -> Any:
    given = {"test_freq": -1, "save_freq": 100, "val_before_train": False, "esi_redundant_time": 0, **trainer}
    tree = {"trainer": {"critic_warmup": 0, "logger": [], **given}, "global_profiler": {"steps": None}}
    if mode == "fully_async":
        tree["async_training"] = {"trigger_parameter_sync_step": 1, "use_trainer_do_validate": False}
    return OmegaConf.create(tree)


def replicas_of(how: str, address: str, root: Any) -> list[Any]:
    return [DropIn(address), DropIn(address)] if how == "drop-in" else [Pulls(address, root)]


def late_by(mode: str) -> int:
    """one_step_off sends the weights of a step before it trains the next, and has none to send at its end."""
    return 1 if mode == "one_step_off" else 0


def close(*closed: Any) -> None:
    for one in closed:
        one.close()


@pytest.mark.parametrize("test_freq", [-1, 2, 3])
@pytest.mark.parametrize("how", ["drop-in", "pull"])
@pytest.mark.parametrize("mode", MODES)
def test_a_run_from_its_first_update_to_its_end(address: str, mode: str, how: str, test_freq: int) -> None:
    """Four steps: of these frequencies some divide that and one does not, and then fully_async asks once more."""
    root = root_of(mode, test_freq=test_freq)
    replicas = replicas_of(how, address, root)
    run = Run(address, root, replicas, Policy())
    assert MODES[mode](run, 4) == 4
    assert run.have() == {4.0 - late_by(mode)}
    assert run.saved == ([4] if mode == "fully_async" else [])
    assert {1, 2, 3, 4} <= set(run.log.steps_with(PUBLISHES))  # in the log of every mode
    close(run.worker, *replicas)


@pytest.mark.parametrize("how", ["drop-in", "pull"])
def test_a_run_that_ends_between_two_updates(address: str, how: str) -> None:
    root = root_of("fully_async", test_freq=2)
    root.async_training.trigger_parameter_sync_step = 2
    replicas = replicas_of(how, address, root)
    run = Run(address, root, replicas, Policy())
    assert MODES["fully_async"](run, 5) == 2  # the fifth is of no version
    assert run.have() == {4.0} and run.saved == [2]
    close(run.worker, *replicas)


@pytest.mark.parametrize("how", ["drop-in", "pull"])
@pytest.mark.parametrize("warmup", [1, 3])
def test_a_critic_that_warms_up_does_not_keep_the_first_weights_back(address: str, how: str, warmup: int) -> None:
    """Then verl's one_step_off makes no update, nor its first one; `generate` of the run asks for weights."""
    root = root_of("one_step_off", critic_warmup=warmup)
    replicas = replicas_of(how, address, root)
    run = Run(address, root, replicas, Policy())
    assert MODES["one_step_off"](run, 4) == 4
    assert run.have() == {3.0}
    close(run.worker, *replicas)


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("how", ["drop-in", "pull"])
@pytest.mark.parametrize("mode", MODES)
def test_a_version_that_all_replicas_refuse_ends_the_run_with_the_reason(
    address: str, mode: str, how: str, after: int
) -> None:
    """The first one, or one of a trainer that was well until then."""
    root = root_of(mode)
    replicas = replicas_of(how, address, root)
    run = Run(address, root, replicas, Policy())
    train = run.policy.train

    def train_and_damage() -> None:
        train()
        for one in replicas:
            one.refuses = run.policy.trained >= after

    run.policy.train = train_and_damage  # type: ignore[method-assign]
    for one in replicas:
        one.refuses = not after
    with pytest.raises(VersionRefused, match=REFUSAL):
        MODES[mode](run, 4)
    assert run.policy.trained == after
    close(run.worker, *replicas)


@pytest.mark.parametrize("are_new", [False, True], ids=["the same replicas", "new replicas"])
@pytest.mark.parametrize("how", ["drop-in", "pull"])
@pytest.mark.parametrize("mode", MODES)
def test_a_trainer_that_starts_again_from_a_checkpoint(address: str, mode: str, how: str, are_new: bool) -> None:
    root = root_of(mode)
    replicas = replicas_of(how, address, root)
    first = Run(address, root, replicas, Policy())
    assert MODES[mode](first, 3) == 3
    first.worker.close()
    if are_new:
        close(*replicas)
        replicas = replicas_of(how, address, root)
    second = Run(address, root, replicas, Policy(trained=2), step=2)
    assert MODES[mode](second, 2) == 4
    assert second.have() == {4.0 - late_by(mode)}
    close(second.worker, *replicas)
