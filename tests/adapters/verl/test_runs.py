"""Whole verl runs over the store, a few steps each: both ways in every trainer that is supported, and PPO.

Two minutes each, most of it imports. Pull mode with GRPO, and what kills and freezes do to it: test_verl_kill*.py.
"""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="this is about verl")
pytest.importorskip("vllm", reason="the rollouts are vLLM engines")

ROOT = Path(__file__).resolve().parents[3]
RUN_S = 600

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(RUN_S + 60)]

TWO_RANKS = ["trainer.n_gpus_per_node=2", "++ray_kwargs.ray_init.num_gpus=4"]
STEPS = ["trainer.total_training_steps=3"]
CASES = {
    "drop-in, separate_async": ("separate_async", "dropin", "verl_grpo/grpo.args", STEPS, 4),
    "drop-in, one_step_off": ("one_step_off", "dropin", "verl_grpo/grpo.args", STEPS, 4),
    "drop-in, fully_async": ("fully_async", "dropin", "verl_grpo/grpo.args", ["rollout.total_rollout_steps=32"], 4),
    "pull, one_step_off": ("one_step_off", "pull", "verl_grpo/grpo.args", STEPS, 4),
    "pull, fully_async": ("fully_async", "pull", "verl_grpo/grpo.args", ["rollout.total_rollout_steps=32"], 4),
    "pull, separate_async, PPO with critic, two FSDP1 ranks in bf16": (
        "separate_async",
        "pull",
        "verl_ppo/ppo.args",
        [
            *STEPS,
            *TWO_RANKS,
            "actor_rollout_ref.actor.strategy=fsdp",
            "critic.strategy=fsdp",
            "actor_rollout_ref.actor.fsdp_config.model_dtype=bfloat16",
        ],
        4,
    ),
}


@pytest.fixture
def run(tmp_path):
    started = []

    def start(mode, store, algorithm, overrides):
        environment = {
            **os.environ,
            "PYTHON": sys.executable,
            "SIZE": "tiny",
            "OUT": str(tmp_path / "out"),
            "RUN": str(tmp_path / "run"),
            "TENSORHUB_EVENTS": str(tmp_path / "events"),
            "ALGORITHM": str(ROOT / "recipes" / algorithm),
        }
        command = ["bash", str(ROOT / "recipes/verl_grpo/run.sh"), mode, store, *overrides]
        with open(tmp_path / "verl.log", "wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        started.append(process)
        return process.wait(RUN_S), (tmp_path / "verl.log").read_text(errors="replace")

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


BRIEF = "drop-in, separate_async"


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case == BRIEF else pytest.mark.long) for case in CASES]
)
def test_a_run_over_the_store(case, run, tmp_path):
    mode, store, algorithm, overrides, versions = CASES[case]
    code, log = run(mode, store, algorithm, overrides)
    assert code == 0, log[-6000:]
    assert "Error in _run_prompt" not in log
    events = [json.loads(line) for path in (tmp_path / "events").glob("*.jsonl") for line in path.open()]
    published = {e["version"] for e in events if e["event"] == "publish"}
    published_by = {e["worker"] for e in events if e["event"] == "publish"}
    assert len(published) >= versions
    fetched, read = {}, Counter()
    for event in events:
        if event["event"] == "fetch":
            assert sum(event["sources"].values()) == event["bytes"]
            read[event["version"]] += event["bytes"]
            fetched.setdefault(event["worker"], set()).add(event["version"])
    assert len(fetched) == 2  # replicas
    assert all(read[version] for version in set().union(*fetched.values()))  # by one; another may borrow what it has
    for worker, got in fetched.items():
        if store == "dropin":
            assert got == published, worker  # verl's manager moves every version to everybody
        else:
            assert min(published) in got and max(got) > min(published), worker  # and each its own pace in pull mode
    metrics = [json.loads(line)["data"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    differences = [abs(row["rollout_corr/kl"]) for row in metrics if "rollout_corr/kl" in row]
    assert all(difference < 0.02 for difference in differences)
    if mode == "separate_async":
        assert differences
    same = {}
    for event in events:
        if event["event"] == "digests":
            for key, digest in event["digests"].items():
                same.setdefault((event["version"], event["layout"], key), {})[event["worker"]] = digest
    assert all(len(set(digests.values())) == 1 for digests in same.values())
    if store == "pull":  # every trainer rank's own part has been compared with what an engine has received
        ranks = {worker for worker in published_by if worker.startswith("trainer/")}
        assert ranks <= {worker for digests in same.values() if len(digests) > 1 for worker in digests}
