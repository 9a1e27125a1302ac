"""A real verl GRPO run whose rollouts get every new policy from the store, in front of your eyes.

    python -m recipes.demo [--size small|tiny] [--steps 8] [--control-steps 7] [--out FOLDER]

One trainer, two vLLM replicas, pull mode. After --steps steps the replicas stop pulling (the negative control) while
training goes on for --control-steps more: trainer and rollouts must then drift apart. Ends with a table, the reward
curve and what was claimed, checked; leaves report.json, run.png, timeline.html and the logs in FOLDER. Returns 0 if
every claim holds.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from pathlib import Path

from recipes.demo import report as reports
from recipes.demo.watch import Watcher, end_cleanly_when_told, page_of, watch

ROOT = Path(__file__).resolve().parents[2]
REPLICAS = 2
# The job, where it differs from the recipe's. Samples are one step old when they are trained on, so the policy must
# move little in a step for the log-probabilities of trainer and rollout to agree. A replica generates one answer at a
# time, so that generating takes longer than training and updates meet answers in flight.
JOB = (
    "actor_rollout_ref.actor.optim.lr=5e-6",
    "actor_rollout_ref.rollout.max_num_seqs=1",
)
# What verl's log says first, and what that means.
STAGES = (
    ("", "Ray starts"),
    ("Started a local Ray instance", "Ray runs; verl is imported"),
    ("WorkerDict", "the trainer starts"),
    ("CheckpointEngineWorker", "the trainer has the model; the replicas start"),
    ("EngineCore pid=", "the engines load the model"),
    ("AgentLoopWorker", "the engines are up"),
)
STORE = "actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.tensorhub"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m recipes.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=("tiny", "small"), default="small", help="of the model")
    parser.add_argument("--steps", type=int, default=8, help="of training with pulling on")
    parser.add_argument("--control-steps", type=int, default=7, help="of training after it was switched off")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ROOT / "out")) / "demo")
    parser.add_argument("--timeout-s", type=float, default=900.0, help="for the whole run")
    parser.add_argument("--report-only", action="store_true", help="of the run that FOLDER already holds")
    parser.add_argument("overrides", nargs="*", help="for verl's configuration, e.g. data.max_response_length=64")
    return parser


def main() -> int:
    arguments = make_parser().parse_args()
    run = arguments.out.resolve()
    if not arguments.report_only:
        end_cleanly_when_told()
        code = train(run, arguments)
        if code != 0:
            print(f"verl ended with {code}; its log is {run / 'verl.log'}, and ends like this:", file=sys.stderr)
            print("\n".join((run / "verl.log").read_text(errors="replace").splitlines()[-30:]), file=sys.stderr)
            return 1
    return show(run, arguments)


def _agreeing() -> tuple[str, ...]:
    """Return what lets trainer and rollouts compute the same: without a GPU the trainer computes in float32."""
    import torch

    return () if torch.cuda.is_available() else ("actor_rollout_ref.rollout.dtype=float32",)


def train(run: Path, arguments: argparse.Namespace) -> int:
    """Start the recipe and tell what happens until it has ended; its exit status."""
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    command = [
        str(ROOT / "recipes/verl_grpo/run.sh"),
        "separate_async",
        "pull",
        f"trainer.total_training_steps={arguments.steps + arguments.control_steps}",
        *JOB,
        # verl's step 0 is the model before training.
        f"+{STORE}.pull_until={arguments.steps}",
        f"+{STORE}.verify=true",
        *_agreeing(),
        *arguments.overrides,
    ]
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "SIZE": arguments.size,
        "RUN": str(run),
        "OUT": str(run.parent),
        "TENSORHUB_EVENTS": str(run / "events"),
    }
    print(f"verl GRPO: one trainer, {REPLICAS} vLLM replicas, a {arguments.size} model; log: {run / 'verl.log'}")
    print("starting Ray, the trainer and the engines (imports, mostly: one to two minutes) ...", flush=True)
    return watch(command, environment, Progress(run, time.monotonic()), arguments.timeout_s)


class Progress(Watcher):
    """A printer of what is new in the event log and in verl's metrics, too."""

    def __init__(self, run: Path, started: float) -> None:
        super().__init__(run / "verl.log", STAGES, started)
        self.run, self.steps = run, 0
        self.pulled: set[tuple[str, int]] = set()
        self.fetched: dict[tuple[str, int], str] = {}

    def news(self, lines: list[str]) -> None:
        events = reports.read_events(self.run / "events") if (self.run / "events").exists() else []
        for event in events:
            key = (reports.replica_of(event["worker"]), event.get("version", 0))
            if event["event"] == "fetch":
                sources = sorted({reports.replica_of(source) for source in event["sources"]})
                self.fetched[key] = f"from {' and '.join(sources)} in {1000 * event['seconds']:.0f} ms"
            if event["event"] == "resume" and key not in self.pulled:
                self.pulled.add(key)
                how = self.fetched.get(key, "")
                self.say(f"{key[0]} has version {key[1]} {how}, stood still for {1000 * event['seconds']:.0f} ms")
        for row in reports.read_metrics(self.run / "metrics.jsonl")[self.steps :]:
            self.steps += 1
            data = row["data"]
            self.begin(f"step {row['step'] + 1}")
            self.say(
                f"step {row['step']}: reward {data.get('critic/score/mean', float('nan')):.3f}, "
                f"KL {data.get('rollout_corr/k3_kl', float('nan')):.1e}, "
                f"trainer waited {1000 * data.get('timing_s/update_weights', float('nan')):.0f} ms in update_weights"
            )


def show(run: Path, arguments: argparse.Namespace) -> int:
    from recipes.demo.picture import draw

    events = reports.read_events(run / "events")
    report = reports.make_report(
        events,
        reports.read_metrics(run / "metrics.jsonl"),
        replicas=REPLICAS,
        steps=arguments.steps,
        control_steps=arguments.control_steps,
    )
    (run / "report.json").write_text(report.to_json())
    draw(report, run / "run.png")
    print("\n" + reports.table(report))
    print("\n" + reports.reward_curve(report))
    print("\n" + reports.claims(report))
    print(f"\n{run / 'report.json'}\n{run / 'run.png'}\n{page_of(run)}")
    return 0 if report.holds else 1


if __name__ == "__main__":
    sys.exit(main())
