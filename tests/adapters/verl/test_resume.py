"""A real verl run is stopped and resumes from its own checkpoint, while somebody still holds what it had published.

The future of the stopped run waits at the hub for the one that resumes: it is given to nobody. What is below the step
of the checkpoint stays, and the trainer can take its weights from there.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="this is about verl")
pytest.importorskip("vllm", reason="the rollouts are vLLM engines")

import torch  # noqa: E402
from verl_run import START_S, STORE, Run, replace_weights  # noqa: E402

from tensorhub_plugins.core import Client, attempt_of, start_server, step_of, version_of  # noqa: E402
from tensorhub_plugins.verl.versions import version_of_step  # noqa: E402

SAVE_EVERY = 4  # steps
BEYOND = 2  # steps of the first life that its last checkpoint has not
REPLICAS = ("rollout-0", "rollout-1")

pytestmark = [pytest.mark.heavy, pytest.mark.long, pytest.mark.timeout(2 * START_S)]


def latest(folder: Path) -> Path:
    """Where verl writes the step that it resumes from."""
    return folder / "checkpoints" / "latest_checkpointed_iteration.txt"


def saved(folder: Path) -> int:
    """The step that verl resumes from."""
    said = latest(folder)
    text = said.read_text().strip() if said.exists() else ""
    return int(text) if text.isdigit() else 0


def life(folder: Path, name: str, hub: str, *more: str) -> Run:
    overrides = [
        *more,
        f"+{STORE}.hub={hub}",
        f"+{STORE}.run=mine",
        f"trainer.save_freq={SAVE_EVERY}",
        "trainer.resume_mode=auto",
    ]
    return Run(folder / name, overrides, SIZE="tiny", OUT=str(folder / "out"), RUN=str(folder / "run"))


def test_a_run_that_resumes_begins_at_its_checkpoint(tmp_path: Path) -> None:
    with start_server() as server, Client(server.address, run="mine", model="actor", replica="keeper") as keeper:
        first = life(tmp_path, "first", server.address)
        try:
            first.until("a version", lambda: first.version() >= version_of_step(0), START_S)
            past = keeper.fetch(serve=True).version
            assert attempt_of(past) == 0
            step = first.until("a checkpoint", lambda: saved(tmp_path / "run"))
            first.until("steps beyond it", lambda: first.version() >= version_of_step(step) + BEYOND)
            future = keeper.fetch(serve=True).version
        finally:
            first.close()
        resumed = step
        latest(tmp_path / "run").write_text(str(resumed))  # a quick run may have saved once more before it was ended
        assert step_of(past) <= resumed < step_of(future) == future
        second = life(tmp_path, "second", server.address)
        try:
            new = version_of(1, version_of_step(resumed))
            second.until("a version of the second life", lambda: second.find("publish"), START_S)
            second.until("work on it", lambda: second.has_all(new + BEYOND, REPLICAS, 0.0) and second.find("request"))
            # The former life's future is over for who holds it; its past is not (with a begin at step 0 it was).
            assert keeper.attempt == 1
            assert [key.version for key in keeper.serving()] == [past]
            assert not second.find("update_failed")  # later, the end of the run may be one
        finally:
            second.close()
    check_second_life(second, new, steps=BEYOND)


def check_second_life(run: Run, new: int, *, steps: int) -> None:
    published = [event["version"] for event in run.find("publish")]
    assert published == list(range(new, new + len(published))) and len(published) > steps
    for name in REPLICAS:
        ran = [event for event in run.find("resume", worker=f"{name}/0")]
        own = [event for event in ran if attempt_of(event["version"])]
        assert ran[len(ran) - len(own) :] == own, "a version of the former life came after one of this one"
        versions = [event["version"] for event in own]
        assert versions == sorted(versions) and versions[0] >= new
        answers = run.find("request", worker=f"{name}/0", outcome="stop")
        begun = [event["t"] - event["seconds"] for event in answers]
        assert begun and min(begun) > own[0]["t"], "an answer was begun before this life's weights were there"
    run.check_nothing_was_torn_or_lost(compared=len(REPLICAS), steps=steps)


def test_a_killed_run_takes_its_weights_from_the_store(tmp_path: Path) -> None:
    """The checkpoint's weights are replaced by others before the second life, which would show in what it publishes."""
    options = [f"+{STORE}.recover_weights=resumed_step", f"+{STORE}.dtype=float32"]
    with start_server() as server, Client(server.address, run="mine", model="actor", replica="keeper") as keeper:

        def weights(version: int) -> dict[str, torch.Tensor]:
            return {name: tensor.clone() for name, tensor in keeper.fetch(version, serve=True).tensors().items()}

        first = life(tmp_path, "first", server.address, *options)
        try:
            step = first.until("a checkpoint", lambda: saved(tmp_path / "run"), START_S)
            expected = weights(version_of_step(step))
            first.until("a step beyond it", lambda: first.version() > version_of_step(step))
            os.kill(first.pid("publish", "trainer/0"), signal.SIGKILL)
            assert first.process.wait(START_S) != 0
        finally:
            first.close()
        latest(tmp_path / "run").write_text(str(step))
        replace_weights(tmp_path / f"run/checkpoints/global_step_{step}/actor")
        second = life(tmp_path, "second", server.address, *options)
        try:
            new = version_of(1, version_of_step(step))
            second.until("a version of the second life", lambda: second.find("publish"), START_S)
            found = weights(new)
            second.until("work on it", lambda: second.has_all(new + BEYOND, REPLICAS, 0.0) and second.find("request"))
            assert [event["version"] for event in second.find("fetch", worker="trainer/0")] == [version_of_step(step)]
        finally:
            second.close()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    check_second_life(second, new, steps=BEYOND)
