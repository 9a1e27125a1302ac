"""A `vllm serve` that nobody's framework has started joins a real OpenRLHF job, takes part, and leaves by drain.

By the command line, as its owner would: the job is not told of it before, and the server outlives its part in the job.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openrlhf", reason="needs OpenRLHF's environment (make test-openrlhf)")
pytest.importorskip("requests")

from fleet_commands import Fleet  # noqa: E402
from openrlhf_run import RUN_TIMEOUT_S, Run  # noqa: E402
from vllm_servers import serving  # noqa: E402

from recipes.openrlhf_grpo import make_data  # noqa: E402
from tensorhub_plugins.core import start_server  # noqa: E402

NAME = "external-0"
PROMPTS_A_STEP, SAMPLES = 8, 4
PROMPT = [10, 11, 12]
EVALUATED = 8  # prompts
JOB = ["--data.max_len", "256", "--rollout.max_new_tokens", "192", "--data.max_samples", "40000"]

pytestmark = [pytest.mark.heavy, pytest.mark.long, pytest.mark.timeout(2 * RUN_TIMEOUT_S)]


@pytest.fixture
def job(tmp_path: Path, shared: Path) -> Iterator[Run]:
    """One engine of OpenRLHF's own, and its hub, which is given so that the server can be told it."""
    short = Path(tempfile.mkdtemp(prefix="th"))  # Ray puts sockets below it, whose paths have 107 characters at most
    with start_server() as hub:
        told = f"tensorhub{hub.address.removeprefix('tcp')}?run=mine&verify=1"
        more = {"ENGINES": "1", "TMPDIR": str(short)}
        make_data.main([str(tmp_path / "evaluation.jsonl"), "--count", str(EVALUATED)])
        evaluates = ["--eval.dataset", str(tmp_path / "evaluation.jsonl"), "--eval.steps", "3"]
        job = [*JOB, *evaluates, "--eval.n_samples_per_prompt", str(SAMPLES)]
        with Run(tmp_path / "job", shared, "openrlhf_grpo", "partial", "tensorhub", *job, hub=told, **more) as run:
            run.hub, run.fleet = hub.address, Fleet(short)
            yield run
    shutil.rmtree(short, ignore_errors=True)


def newest(run: Run) -> int:
    return max((event["version"] for event in run.events("publish")), default=0)


def answers(run: Run, since: float) -> list[dict[str, Any]]:
    found = (event for event in run.events("request") if event["worker"] == f"{NAME}/0" and event["t"] >= since)
    return [event for event in found if event["outcome"] != "error"]


def test_a_server_joins_takes_part_and_leaves(
    job: Run, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.wait_for(lambda: job.events("prompt"))
    monkeypatch.setenv("TENSORHUB_EVENTS", str(job.folder / "events"))  # its digests are compared with the others', too
    told = {"hub": job.hub, "run": "mine", "model": "actor", "replica": "served", "follow": "now", "may_be_held": True}
    options = ["--dtype", "bfloat16", "--logprobs-mode", "processed_logprobs", "--max-model-len", "256"]
    with serving(shared / "models" / "tiny-openrlhf", tmp_path, told, *options) as server:
        assert job.fleet.row("rollout-0") and not job.fleet.row(NAME)
        began = time.time()
        assert f"{server.url} joins as {NAME}" in job.fleet("add", "--url", server.url)
        job.wait_for(lambda: job.fleet.row(NAME)[1:3] == ["external", "ready"])
        version = newest(job)
        # It takes part: whole answers, of versions that came after it had joined, and its versions go on.
        job.wait_for(lambda: [a for a in answers(job, began) if a["versions"][0] > version])
        # It takes part in an evaluation, too, and stays with its version, though the trainer publishes others.
        job.wait_for(lambda: "on 2 engines" in job.log.read_text(errors="replace"))
        assert "drains" in job.fleet("drain", NAME, "--timeout", "60")
        job.wait_for(lambda: not job.fleet.row(NAME))
        left, version = time.time(), newest(job)
        job.wait_for(lambda: newest(job) > version + 1)
        assert not answers(job, left) and server.running() == 0
        # Nobody ends a server that was not theirs: it answers on, and follows on.
        assert server.complete(PROMPT, 4).ok
    versions = [(a["versions"][0], a["versions"][-1]) for a in answers(job, began)]
    assert all(first <= last for first, last in versions) and len({last for _, last in versions}) > 1
    assert not [event for event in job.events("replica_lost") if event["worker"] == f"{NAME}/0"]
    assert not job.events("update_failed")
    together = 0
    for evaluation in job.events("evaluate"):
        asked = [
            event for event in job.events("request") if event["t"] > evaluation["t"] and event["outcome"] != "error"
        ]
        asked = asked[: EVALUATED * SAMPLES]  # nothing else is generated meanwhile
        if {event["worker"] for event in asked} == {"rollout-0/0", f"{NAME}/0"}:
            together += 1
            assert {tuple(event["versions"]) for event in asked} == {(evaluation["version"],) * 2}
    assert together
    # It followed the very bytes that the trainer has published.
    assert len({event["version"] for event in job.events("digests") if event["worker"] == "served/0"}) > 1
    assert len(job.check_digests()) > 1
    job.check_answered_once(PROMPTS_A_STEP, SAMPLES)
