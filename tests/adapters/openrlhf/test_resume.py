"""A real OpenRLHF run is stopped and resumes from its own checkpoint, while somebody still holds what it had published.

In partial rollout, in which prompts are answered by whatever version an engine has.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("openrlhf", reason="needs OpenRLHF's environment (make test-openrlhf)")

from openrlhf_run import RUN_TIMEOUT_S, Run  # noqa: E402

from tensorhub_plugins.core import Client, attempt_of, start_server, version_of  # noqa: E402

SAVE_EVERY = 4  # steps
BEYOND = 2  # steps of the first life that its last checkpoint has not
ENGINES = ("rollout-0/0", "rollout-1/0")
TAG = "global_step"  # a checkpoint's name begins so

pytestmark = [pytest.mark.heavy, pytest.mark.long, pytest.mark.timeout(2 * RUN_TIMEOUT_S)]


def life(folder: Path, model: Path, hub: str, *more: str) -> Run:
    arguments = ["--data.max_samples", "4000", "--ckpt.save_steps", str(SAVE_EVERY), *more]
    hub = f"tensorhub{hub.removeprefix('tcp')}?run=mine&verify=1"
    return Run(folder, model, "openrlhf_grpo", "partial", "tensorhub", *arguments, hub=hub)


def latest(checkpoints: Path) -> Path:
    """Where DeepSpeed says which checkpoint is whole."""
    return checkpoints / "_actor" / "latest"


def saved(checkpoints: Path) -> int:
    """The step that OpenRLHF resumes from."""
    said = latest(checkpoints)
    return int(said.read_text().removeprefix(TAG)) if said.exists() else 0


def newest(run: Run) -> int:
    return max([event["version"] for event in run.events("publish")], default=0)


def ran(run: Run, engine: str) -> list[int]:
    return [event["version"] for event in run.events("resume") if event["worker"] == engine]


def test_a_run_that_resumes_begins_at_its_checkpoint(tmp_path: Path) -> None:
    shared = Path(os.environ.get("OUT") or tmp_path / "out")  # model, prompts and compiled extensions
    checkpoints = tmp_path / "first" / "checkpoints"
    with start_server() as server, Client(server.address, run="mine", model="actor", replica="keeper") as keeper:
        with life(tmp_path / "first", shared, server.address) as first:
            first.wait_for(lambda: newest(first))
            past = keeper.fetch(serve=True).version
            step = first.wait_for(lambda: saved(checkpoints))
            first.wait_for(lambda: newest(first) >= step + BEYOND)
            future = keeper.fetch(serve=True).version
        resumed = step
        latest(checkpoints).write_text(f"{TAG}{resumed}")  # a quick run may have saved once more before it was ended
        assert past < resumed < future and not attempt_of(future)
        again = ("--ckpt.load_enable", "--ckpt.path", str(checkpoints))
        with life(tmp_path / "second", shared, server.address, *again) as second:
            new = version_of(1, resumed)
            second.wait_for(lambda: all(ran(second, name)[-1:] >= [new + BEYOND] for name in ENGINES))
            assert not second.events("update_failed")  # later, the end of the run may be one
            # The former life's future is over for who holds it; its past is not.
            assert keeper.attempt == 1
            assert [key.version for key in keeper.serving()] == [past]
    check_second_life(second, new)


def check_second_life(run: Run, new: int) -> None:
    published = [event["version"] for event in run.events("publish")]
    assert published == list(range(new, new + len(published)))
    answers = run.events("request")
    assert {event["worker"] for event in answers} == set(ENGINES)
    assert min(event["versions"][0] for event in answers) >= new, "an answer of the former life, or of the disk's model"
    for name in ENGINES:
        own = [version for version in ran(run, name) if attempt_of(version)]
        assert own == sorted(own) == ran(run, name)[-len(own) :]
