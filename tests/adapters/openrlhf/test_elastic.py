"""A real OpenRLHF run whose engines come and go: one, then two, one of them drained, another one, one killed."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

pytest.importorskip("openrlhf", reason="needs OpenRLHF's environment (make test-openrlhf)")
import ray  # noqa: E402
from fleet_commands import address_below  # noqa: E402
from openrlhf_run import RUN_TIMEOUT_S, Run  # noqa: E402

from recipes.demo.openrlhf import DIFFERENCE_MAX  # noqa: E402
from recipes.demo.report import replica_of  # noqa: E402
from tensorhub_plugins.vllm.ray.fleet import Fleet, find  # noqa: E402

STEPS = 30  # of the run with a fixed fleet, and so many of the other are compared with it
PROMPTS_A_STEP = 8
SAMPLES = 4
KL_MAX = 1e-2
# Long answers: something is under way at every moment.
JOB = ["--data.max_len", "256", "--rollout.max_new_tokens", "192"]

pytestmark = [pytest.mark.heavy, pytest.mark.long, pytest.mark.timeout(2 * RUN_TIMEOUT_S + 120)]


@pytest.fixture
def ray_folder() -> Iterator[Path]:
    """Where the recipe has Ray put its files: a short path, for its sockets."""
    folder = Path(tempfile.mkdtemp(prefix="fleet"))
    yield folder
    if ray.is_initialized():
        ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def fleet_of(run: Run, ray_folder: Path) -> Fleet:
    run.wait_for(lambda: run.events("prompt"))  # engines and fleet are there
    return find(address=address_below(ray_folder))


def states(fleet: Fleet) -> dict[str, str]:
    return {member.name: member.state for member in fleet.list().members}


def wait_until(run: Run, fleet: Fleet, expected: dict[str, str]) -> None:
    """Until the fleet is this, and every engine in it has answered since."""
    run.wait_for(lambda: states(fleet) == expected)


def test_a_fleet_that_changes_learns_as_a_fixed_one(tmp_path: Path, shared: Path, ray_folder: Path) -> None:
    more = {"ENGINES": "1", "TMPDIR": str(ray_folder)}
    with Run(
        tmp_path / "elastic",
        shared,
        "openrlhf_grpo",
        "partial",
        "tensorhub",
        *JOB,
        "--data.max_samples",
        "4000",
        **more,
    ) as run:
        fleet = fleet_of(run, ray_folder)
        assert states(fleet) == {"rollout-0": "ready"}
        fleet.add(1)
        wait_until(run, fleet, {"rollout-0": "ready", "rollout-1": "ready"})
        joined = run.wait_for(lambda: of(run, "prompt", "rollout-1"))
        assert first_version(run, "rollout-1") >= 1, "it answered from the model before training"

        # Drained in the middle of long answers: what it has goes on elsewhere.
        run.wait_for(lambda: any(one.in_flight for one in fleet.list().members if one.name == "rollout-0"))
        fleet.drain("rollout-0", timeout_s=0.0)
        wait_until(run, fleet, {"rollout-1": "ready"})
        given_back = of(run, "request_given_back", "rollout-0")
        assert sum(event["tokens"] for event in given_back) > 0, "it had nothing under way"

        fleet.add(1)
        wait_until(run, fleet, {"rollout-1": "ready", "rollout-2": "ready"})
        run.wait_for(lambda: of(run, "prompt", "rollout-2"))
        os.kill(run.pid_of("rollout-2"), signal.SIGKILL)
        run.wait_for(lambda: of(run, "replica_lost", "rollout-2"))
        (back,) = run.wait_for(lambda: of(run, "replica_back", "rollout-2"))
        assert back["version"] > 0
        last = max(event["version"] for event in run.events("publish"))
        run.wait_for(lambda: max(event["version"] for event in run.events("publish")) >= max(last + 2, STEPS))
        ray.shutdown()
    assert joined
    check(run)
    # A joiner reads the weights of a peer or of the trainer, and MODEL's only if nobody has any.
    log = run.log.read_text(errors="replace")
    assert log.count("weights from the store") >= 2, "a joiner has read its weights from disk"

    with Run(
        tmp_path / "fixed",
        shared,
        "openrlhf_grpo",
        "partial",
        "tensorhub",
        *JOB,
        "--data.max_samples",
        str(PROMPTS_A_STEP * STEPS),
    ) as fixed:
        fixed.end()
    check(fixed)
    rewards = [[row["reward"] for row in one.rows()][:STEPS] for one in (run, fixed)]
    assert [len(curve) for curve in rewards] == [STEPS, STEPS]
    ends = [mean(curve[-STEPS // 3 :]) for curve in rewards]
    assert abs(ends[0] - ends[1]) <= DIFFERENCE_MAX, rewards
    assert all(end > mean(curve[: STEPS // 3]) for end, curve in zip(ends, rewards, strict=True)), rewards


def test_a_spare_joins_a_run_and_another_one_takes_its_place(tmp_path: Path, shared: Path, ray_folder: Path) -> None:
    """The control is what has no spare left: it is started, which takes vLLM's whole start."""
    options = {"hub": "tensorhub:?verify=1&fleet_spares=1", "ENGINES": "1", "TMPDIR": str(ray_folder)}
    job = [*JOB, "--data.max_samples", "4000"]
    with Run(tmp_path / "spare", shared, "openrlhf_grpo", "partial", "tensorhub", *job, **options) as run:
        fleet = fleet_of(run, ray_folder)
        wait_until(run, fleet, {"rollout-0": "ready", "rollout-1": "spare"})
        assert fleet.list().count("ready") == 1 and not of(run, "resume", "rollout-1")
        asked = time.time()
        fleet.add(2)
        run.wait_for(lambda: of(run, "prompt", "rollout-1") and of(run, "prompt", "rollout-2"))
        by_spare, started = (of(run, "resume", name)[0]["t"] - asked for name in ("rollout-1", "rollout-2"))
        assert by_spare < started / 4, f"weights after {by_spare:.1f} s with a spare, {started:.1f} s without"
        assert min(first_version(run, name) for name in ("rollout-1", "rollout-2")) >= 1
        run.wait_for(lambda: states(fleet).get("rollout-3") == "spare")
        assert not of(run, "prompt", "rollout-3")
        ray.shutdown()
    check(run)


def of(run: Run, name: str, replica: str) -> list[dict[str, Any]]:
    return [event for event in run.events(name) if replica_of(event["worker"]) == replica]


def first_version(run: Run, replica: str) -> int:
    return min(event["versions"][0] for event in of(run, "request", replica))


def check(run: Run) -> None:
    """Digests are equal at every version, every prompt of every batch is answered once, trainer and engines agree."""
    compared = run.check_digests()
    installed = {event["version"] for event in run.events("resume")}
    assert installed <= compared, f"versions {installed - compared} were compared with nobody"
    assert not run.events("update_failed")
    run.check_answered_once(PROMPTS_A_STEP, SAMPLES)
    rows = run.rows()
    assert rows and all(row["vllm_kl"] < KL_MAX for row in rows), [row["vllm_kl"] for row in rows]
