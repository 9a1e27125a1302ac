"""Real OpenRLHF runs on the CPU, two vLLM engines, a tiny model: the recipes, and what their event logs say."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import defaultdict
from pathlib import Path

import pytest

pytest.importorskip("openrlhf", reason="needs OpenRLHF's environment (make test-openrlhf)")

from openrlhf_run import RUN_TIMEOUT_S, Run  # noqa: E402

from recipes.demo.report import replica_of  # noqa: E402
from recipes.openrlhf_grpo import make_data  # noqa: E402
from tensorhub_plugins.core import start_server  # noqa: E402

STEPS = 4
KL_MAX = 1e-2  # token log-probabilities of vLLM and of the trainer, both in bfloat16

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(RUN_TIMEOUT_S + 60)]


def check_versions(run: Run, *, engines: int, trainers: int = 1, steps: int = STEPS) -> None:
    """Every version was published by every rank, and what the engines then held is what was published."""
    published = defaultdict(set)
    for event in run.events("publish"):
        published[event["version"]].add(event["worker"])
    ranks = {f"trainer/{rank}" for rank in range(trainers)}
    assert dict(published) == {version: ranks for version in range(1, steps + 1)}
    compared = run.check_digests()
    installed = defaultdict(set)
    for event in run.events("resume"):
        installed[replica_of(event["worker"])].add(event["version"])
    assert len(installed) == engines
    assert compared == set.union(*installed.values()), "some version was never compared with the trainer's"
    assert not run.events("update_failed")


def check_steps(run: Run, *, steps: int = STEPS) -> list[dict[str, float]]:
    rows = run.rows()
    assert len(rows) == steps
    assert [row["tensorhub/version"] for row in rows] == list(range(1, steps + 1))
    return rows


def test_sync_grpo_is_on_policy(tmp_path: Path, shared: Path) -> None:
    with Run(tmp_path, shared, "openrlhf_grpo", "sync", "tensorhub", "--data.max_samples", str(8 * STEPS)) as run:
        run.end()
    check_versions(run, engines=2)
    rows = check_steps(run)
    assert all(row["tensorhub/staleness_max"] == 0 for row in rows)
    assert all(row["vllm_kl"] < KL_MAX for row in rows), [row["vllm_kl"] for row in rows]
    sources = {source for event in run.events("fetch") for source in event["sources"]}
    assert any(source.startswith("rollout-") for source in sources), "no engine has read from a peer"


def test_async_by_openrlhfs_own_command_line_and_an_evaluation_sees_one_version(tmp_path: Path, shared: Path) -> None:
    """With another estimator, too: REINFORCE++-baseline."""
    prompts, samples = 8 * STEPS, 4
    make_data.main([str(tmp_path / "evaluation.jsonl"), "--count", str(prompts)])
    arguments = ["--data.max_samples", str(prompts), "--algo.advantage.estimator", "reinforce_baseline"]
    arguments += ["--eval.dataset", str(tmp_path / "evaluation.jsonl"), "--eval.steps", "2"]
    arguments += ["--eval.n_samples_per_prompt", str(samples)]
    with Run(tmp_path / "run", shared, "openrlhf_grpo", "async", "hook", *arguments) as run:
        run.end()
    check_versions(run, engines=2)
    rows = check_steps(run)
    assert all(row["tensorhub/samples_of_several_versions"] == 0 for row in rows)
    assert max(row["tensorhub/staleness_max"] for row in rows) > 0  # it is asynchronous
    assert {event["lost"] for event in run.events("resume")} == {0}
    (evaluation,) = run.events("evaluate")
    # Nothing else is generated meanwhile, so the next that end are the evaluation's.
    answers = [event for event in run.events("request") if event["t"] > evaluation["t"]][: prompts * samples]
    assert {tuple(event["versions"]) for event in answers} == {(evaluation["version"],) * 2}
    assert {replica_of(event["worker"]) for event in answers} == {"rollout-0", "rollout-1"}


def test_a_hub_that_goes_away_at_start_ends_the_run_with_one_sentence(tmp_path: Path, shared: Path) -> None:
    with start_server() as server:
        address = server.address
        hub = f"tensorhub{address.removeprefix('tcp')}"
        with Run(tmp_path, shared, "openrlhf_grpo", "sync", "tensorhub", hub=hub) as run:
            run.wait_for(lambda: f"tensorhub: hub {address}" in run.log.read_text(errors="replace"))
            server.close()
            assert run.process.wait(RUN_TIMEOUT_S) != 0
    (said,) = [line for line in run.log.read_text(errors="replace").splitlines() if line.startswith("tensorhub: ")][1:]
    assert address in said


def test_partial_rollout_goes_on_when_an_engine_is_killed_in_the_middle(tmp_path: Path, shared: Path) -> None:
    arguments = ["--data.max_samples", str(8 * 2 * STEPS), "--data.max_len", "256", "--rollout.max_new_tokens", "192"]
    with Run(tmp_path, shared, "openrlhf_grpo", "partial", "tensorhub", *arguments) as run:
        name = run.wait_for(lambda: half_answered(run))
        os.kill(run.wait_for(lambda: run.pid_of(name)), signal.SIGKILL)
        run.end()
    assert run.events("replica_lost") and run.events("request_retried"), "the kill did not hit in the middle"
    check_steps(run, steps=2 * STEPS)
    assert any(event["in_flight"] for event in run.events("resume"))
    assert any(event["versions"][0] < event["versions"][1] for event in run.events("request"))


@pytest.mark.long
def test_an_engine_whose_vllm_was_killed_comes_back_with_the_newest_version(tmp_path: Path, shared: Path) -> None:
    """Then the other one is killed, and the training goes on with the one that came back."""
    arguments = ["--data.max_samples", "4000", "--data.max_len", "256", "--rollout.max_new_tokens", "192"]
    with Run(tmp_path, shared, "openrlhf_grpo", "partial", "tensorhub", *arguments) as run:
        core, other = (run.wait_for(lambda name=name: run.pid_of(name)) for name in ("rollout-1", "rollout-0"))
        os.kill(child_of(core), signal.SIGKILL)
        run.wait_for(lambda: [e for e in run.events("replica_lost") if e["worker"] == "rollout-1/0"])
        newest = max([event["version"] for event in run.events("publish")], default=0)
        (back,) = run.wait_for(lambda: run.events("replica_back"))
        assert back["worker"] == "rollout-1/0" and back["version"] >= newest
        os.kill(other, signal.SIGKILL)
        killed_at = time.time()
        answered = run.wait_for(
            lambda: [
                e for e in run.events("request") if e["worker"] == "rollout-1/0" and e["t"] > max(killed_at, back["t"])
            ]
        )
        assert answered[0]["versions"][0] >= newest  # never the weights that the engine was started with
        run.wait_for(lambda: [e for e in run.events("publish") if e["t"] > answered[-1]["t"]])
    assert {event["worker"] for event in run.events("replica_lost")} == {"rollout-0/0", "rollout-1/0"}


def child_of(actor: int) -> int:
    """vLLM's engine core, which the actor started."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended meanwhile
            name, status = (process / "cmdline").read_bytes(), (process / "status").read_text()
            if b"EngineCore" in name and f"\nPPid:\t{actor}\n" in status:
                return int(process.name)
    raise AssertionError(f"process {actor} has no engine core")


def half_answered(run: Run) -> str | None:
    """The engine that was generating when it took a version, and has answered some of those requests, but not all. On
    a fast machine there may never be one."""
    for taken in run.events("resume"):
        ended = [
            each
            for each in run.events("request")
            if each["worker"] == taken["worker"] and each["versions"][0] < taken["version"] <= each["versions"][1]
        ]
        if 0 < len(ended) < taken["in_flight"]:
            return str(taken["worker"].partition("/")[0])
    return None


def test_ppo_with_critic_and_zero_3_on_two_ranks(tmp_path: Path, shared: Path) -> None:
    with Run(tmp_path, shared, "openrlhf_ppo", "sync", "tensorhub", "--data.max_samples", str(8 * STEPS)) as run:
        run.end()
    check_versions(run, engines=2, trainers=2)
    check_steps(run)
    shares = {e["worker"]: e["bytes"] for e in run.events("publish") if e["version"] == STEPS}
    assert max(shares.values()) <= 0.51 * sum(shares.values())
    assert "whole tensors are gathered" not in run.log.read_text()


def test_zero_3_gathers_when_told_to(tmp_path: Path, shared: Path) -> None:
    """The control of the test above: the same engines are given the same model, by another way."""
    hub = "tensorhub:?verify=1&parts=0"
    with Run(
        tmp_path, shared, "openrlhf_ppo", "sync", "tensorhub", "--data.max_samples", str(8 * STEPS), hub=hub
    ) as run:
        run.end()
    check_versions(run, engines=2, trainers=2)
    assert "whole tensors are gathered to every trainer rank: parts=false" in run.log.read_text()
