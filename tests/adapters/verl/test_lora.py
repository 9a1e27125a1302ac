"""Whole verl runs that train a LoRA adapter: the adapter alone is published, and engines answer with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="this is about verl")
pytest.importorskip("vllm", reason="the rollouts are vLLM engines")

from verl_run import START_S, Run

STEPS = 3
OVERRIDES = [
    f"trainer.total_training_steps={STEPS}",
    "actor_rollout_ref.model.lora_rank=8",
    "actor_rollout_ref.model.lora_alpha=64",
    "actor_rollout_ref.actor.optim.lr=0.03",  # so that each version differs from the one before, and from no adapter
    # Every sample is of the version that is trained: validation waits for all engines, and nothing is sampled before.
    "trainer.v1.separate_async.num_warmup_batches=0",
    "trainer.test_freq=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",  # one engine; the parts of several ranks: test_parts.py
    "++ray_kwargs.ray_init.num_gpus=2",
]
KINDS = {
    "fsdp2": [],
    "fsdp": ["actor_rollout_ref.actor.strategy=fsdp"],
    "without effect": [],
}
NEAR, FAR = 1e-4, 1e-3  # of the mean k3 divergence between trainer and engines

pytestmark = [pytest.mark.heavy, pytest.mark.long, pytest.mark.timeout(START_S + 60)]


@pytest.mark.parametrize("kind", KINDS)
def test_engines_answer_with_every_version_of_the_adapter(kind: str, tmp_path: Path) -> None:
    """The control is a trainer that publishes its adapter with a scaling of 0."""
    environment = {"SIZE": "tiny"}
    if kind == "without effect":
        environment["VERL_USE_EXTERNAL_MODULES"] = "lora_without_effect"
    run = Run(tmp_path, [*OVERRIDES, *KINDS[kind]], **environment)
    try:
        assert run.process.wait(START_S) == 0, run.tail()
    finally:
        run.close()
    rows = [json.loads(line)["data"] for line in (run.run_folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "rollout_corr/k3_kl" in row]
    assert [row["training/off_policy/trajectory_staleness_worst/max"] for row in rows] == [0] * STEPS
    distances = [row["rollout_corr/k3_kl"] for row in rows]
    assert distances[0] < NEAR  # before the first step the adapter changes nothing
    assert all((distance > FAR) if kind == "without effect" else (distance < NEAR) for distance in distances[1:])
    published = run.find("publish")
    assert {event["version"] for event in published} == set(range(1, STEPS + 2))
    of_adapter = [sum(e["bytes"] for e in published if e["version"] == version) for version in range(1, STEPS + 2)]
    assert max(of_adapter) < 60_000, "the adapter's bytes; the model has 0.2 MB"
    fetched = {e["version"]: sum(e["sources"].values()) for e in run.find("fetch")}
    assert set(fetched) == set(range(1, STEPS + 2)) and set(fetched.values()) == {of_adapter[0]}
    asked = [e["versions"] for e in run.find("request", outcome="stop")]
    assert {version for first, last in asked for version in (first, last)} >= set(range(1, STEPS + 1))
    assert "Error in _run_prompt" not in run.log.read_text(errors="replace")
