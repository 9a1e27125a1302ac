"""Whole OpenRLHF runs that train a LoRA adapter: the adapter alone is published, and engines answer with it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("openrlhf", reason="needs OpenRLHF's environment (make test-openrlhf)")

from openrlhf_run import ROOT, RUN_TIMEOUT_S, Run

STEPS = 4
LORA = [
    *("--data.max_samples", str(8 * STEPS), "--ds.lora.rank", "8", "--ds.lora.alpha", "64"),
    *("--actor.adam.lr", "0.03", "--actor.lr_warmup_ratio", "0"),  # so that each version differs from the one before
]
KINDS = {
    "one rank": [],
    "two ranks of ZeRO-3": ["--actor.num_gpus_per_node", "2", "--ds.zero_stage", "3"],
    "without effect": [],
}
NEAR, FAR = 2e-3, 4e-3  # of OpenRLHF's vllm_kl, both in bfloat16

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(RUN_TIMEOUT_S + 60)]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "one rank" else pytest.mark.long) for kind in KINDS]
)
def test_engines_answer_with_every_version_of_the_adapter(kind: str, tmp_path: Path) -> None:
    """On policy. The control is a trainer that publishes its adapter with a scaling of 0."""
    shared = Path(os.environ.get("OUT") or tmp_path / "out")
    variables = {"ENGINES": "1"}
    if kind == "without effect":
        folder = ROOT / "tests" / "support" / "without_effect"
        variables["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ["PYTHONPATH"]])
    with Run(tmp_path / "run", shared, "openrlhf_grpo", "sync", "tensorhub", *LORA, *KINDS[kind], **variables) as run:
        run.end()
    rows = run.rows()
    assert [row["tensorhub/version"] for row in rows] == list(range(1, STEPS + 1))
    assert all(row["tensorhub/staleness_max"] == 0 for row in rows)
    distances = [row["vllm_kl"] for row in rows]
    assert distances[0] < NEAR  # before the first step the adapter changes nothing
    is_far = [distance > FAR for distance in distances[1:]]
    assert all(is_far) if kind == "without effect" else max(distances) < NEAR, distances
    published = run.events("publish")
    sizes = {version: sum(e["bytes"] for e in published if e["version"] == version) for version in range(1, STEPS + 1)}
    (size_bytes,) = set(sizes.values())
    # Of the adapter, which ZeRO-3 keeps in float32; the model has 0.2 MB.
    assert size_bytes == rows[-1]["tensorhub/publish/bytes"] < (80_000 if "ZeRO-3" in kind else 40_000)
    for event in run.events("fetch"):
        assert sum(event["sources"].values()) == size_bytes and event["layout"] == "checkpoint"
    answers = {version for event in run.events("request") for version in event["versions"]}
    assert answers >= set(range(STEPS)) and not run.events("update_failed")  # of the last version nothing is asked
    assert {event["version"] for event in run.events("resume")} == set(range(1, STEPS + 1))
