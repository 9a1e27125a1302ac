"""A real GRPO run learns as well with a fleet that grows and shrinks as with one that stays as it is."""

import json
import shutil
import tempfile
from pathlib import Path
from statistics import mean

import pytest

pytest.importorskip("verl", reason="this is about verl")
pytest.importorskip("vllm", reason="the rollouts are vLLM engines")

from fleet_commands import Fleet  # noqa: E402
from verl_run import START_S, STORE, Run  # noqa: E402

from recipes.demo.openrlhf import DIFFERENCE_MAX, GAIN_MIN  # noqa: E402

LEARNS = "actor_rollout_ref.actor.optim.lr=1e-3"  # OpenRLHF's recipe has it, too; the demo's is for comparing digests
STEPS_MIN = 40
AFTER = 10  # steps with one engine again

pytestmark = [pytest.mark.heavy, pytest.mark.long, pytest.mark.timeout(3 * START_S)]


def rewards(run: Run) -> list[float]:
    path = run.run_folder / "metrics.jsonl"
    rows = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(row)["data"]["critic/score/mean"] for row in rows]


def change(folder: Path) -> Run:
    """One engine, then two, then one: the run as it was when it had done so many steps with each."""
    short = Path(tempfile.mkdtemp(prefix="th"))  # Ray puts sockets below it, whose paths have 107 characters at most
    overrides = [
        LEARNS,
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
        "++ray_kwargs.ray_init.num_gpus=3",
        f"+{STORE}.replica_timeout_s=20",
    ]
    run = Run(folder, overrides, SIZE="tiny", TMPDIR=str(short))
    fleet = Fleet(short, RAY_AUTH_MODE="token")  # Ray uses its token at an address only when asked to
    try:
        run.until("a version", lambda: run.find("resume"), START_S, every_s=0.5)
        fleet("add", "1")
        run.until("work of the new one", lambda: run.find("request", worker="rollout-1/0"), START_S)
        joined = len(rewards(run))
        run.until("steps with two", lambda: len(rewards(run)) >= joined + AFTER, every_s=0.5)
        fleet("drain", "rollout-0", "--timeout", "5")
        run.until("its end", lambda: not fleet.row("rollout-0"), every_s=0.5)
        left = len(rewards(run))
        enough = max(left + AFTER, STEPS_MIN)
        run.until("steps with one", lambda: len(rewards(run)) >= enough, every_s=0.5)
    finally:
        run.close()
        shutil.rmtree(short, ignore_errors=True)
    return run


def stay(folder: Path, steps: int) -> Run:
    run = Run(folder, [LEARNS, "actor_rollout_ref.rollout.n_gpus_per_node=1"], SIZE="tiny")
    try:
        run.until("as many steps", lambda: len(rewards(run)) >= steps, 2 * START_S, every_s=0.5)
    finally:
        run.close()
    return run


def test_a_fleet_that_changes_learns_as_a_fixed_one(tmp_path):
    elastic = change(tmp_path / "elastic")
    steps = len(rewards(elastic))
    fixed = stay(tmp_path / "fixed", steps)
    part = steps // 4
    curves = {"elastic": rewards(elastic)[:steps], "fixed": rewards(fixed)[:steps]}
    first = {name: mean(curve[:part]) for name, curve in curves.items()}
    last = {name: mean(curve[-part:]) for name, curve in curves.items()}
    print(f"{steps} steps, the first and the last quarter: {first}, {last}")
    assert all(last[name] - first[name] >= GAIN_MIN for name in curves), (first, last)
    assert abs(last["elastic"] - last["fixed"]) <= DIFFERENCE_MAX, (first, last)
