"""A `vllm serve` that nobody's framework has started joins a real verl job, takes part, and leaves by drain.

By the command line, as its owner would: the job is not told of it before, and the server outlives its part in the job.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="this is about verl")
pytest.importorskip("vllm", reason="the rollouts are vLLM engines")
pytest.importorskip("requests")

from fleet_commands import Fleet  # noqa: E402
from verl_run import START_S, STORE, Run  # noqa: E402
from vllm_servers import serving  # noqa: E402

from tensorhub_plugins.core import start_server  # noqa: E402

NAME = "external-0"
PROMPT = [10, 11, 12]

pytestmark = [pytest.mark.heavy, pytest.mark.long, pytest.mark.timeout(2 * START_S)]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Run]:
    """One engine of verl's own, and its hub, which is given so that the server can be told it."""
    short = Path(tempfile.mkdtemp(prefix="th"))  # Ray puts sockets below it, whose paths have 107 characters at most
    with start_server() as hub:
        overrides = [
            "actor_rollout_ref.rollout.n_gpus_per_node=1",
            "++ray_kwargs.ray_init.num_gpus=2",
            f"+{STORE}.hub={hub.address}",
            f"+{STORE}.run=mine",
            f"+{STORE}.replica_timeout_s=30",
            "trainer.total_training_steps=4000",  # longer than this test takes
        ]
        run = Run(tmp_path / "job", overrides, SIZE="tiny", TMPDIR=str(short))
        run.hub = hub.address
        run.fleet = Fleet(short, RAY_AUTH_MODE="token")  # Ray uses its token at an address only when asked to
        try:
            yield run
        finally:
            run.close()
            shutil.rmtree(short, ignore_errors=True)


def answers(run: Run, since: float) -> list[dict]:
    return [event for event in run.find("request", since=since, worker=f"{NAME}/0") if event["outcome"] != "error"]


def test_a_server_joins_takes_part_and_leaves(job: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job.until("a version", lambda: job.find("resume"), START_S, every_s=0.5)
    monkeypatch.setenv("TENSORHUB_EVENTS", str(job.events_folder))  # its digests are compared with the others', too
    told = {"hub": job.hub, "run": "mine", "model": "actor", "replica": "served", "follow": "now"}
    options = ["--dtype", "bfloat16", "--logprobs-mode", "processed_logprobs"]
    model = job.folder / "out" / "models" / "tiny"
    with serving(model, tmp_path, told, *options) as server:
        assert job.fleet.row("rollout-0") and not job.fleet.row(NAME)
        began = time.time()
        assert f"{server.url} joins as {NAME}" in job.fleet("add", "--url", server.url)
        job.until("it in rotation", lambda: job.fleet.row(NAME)[1:3] == ["external", "ready"], every_s=0.5)
        newest = job.version()
        # It takes part: whole answers, of versions that came after it had joined, and its versions go on.
        job.until("new answers", lambda: [a for a in answers(job, began) if a["versions"][0] > newest])
        assert "drains" in job.fleet("drain", NAME, "--timeout", "60")
        job.until("its end", lambda: not job.fleet.row(NAME), every_s=0.5)
        left = time.time()
        newest = job.version()
        job.until("versions without it", lambda: job.version() > newest + 1)
        assert not answers(job, left) and server.running() == 0
        # Nobody ends a server that was not theirs: it answers on, and follows on.
        assert server.complete(PROMPT, 4).ok
    versions = [(a["versions"][0], a["versions"][-1]) for a in answers(job, began)]
    assert all(first <= last for first, last in versions) and len({last for _, last in versions}) > 1
    assert not job.find("replica_lost") and not job.find("update_failed")
    # It followed the very bytes that the trainer has published.
    held = {key for event in job.find("digests", worker="served/0") for key in [event["version"]]}
    assert len(held) > 1
    job.check_nothing_was_torn_or_lost(compared=2, steps=4)
