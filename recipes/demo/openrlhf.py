"""A real OpenRLHF GRPO run over the store beside the same job, seeds included, with OpenRLHF's own weight update.

    python -m recipes.demo.openrlhf [--size tiny|small] [--steps 40] [--control-steps 32] [--out FOLDER]

One trainer, two vLLM engines, generating and training in turns. First OpenRLHF's own way for --steps steps, then the
store: the same command line but for --vllm.sync_backend. After --steps steps its engines stop pulling (the negative
control) while training goes on for --control-steps more: trainer and engines must then drift apart. Ends with some
versions, both reward curves and what was claimed, checked; leaves all versions (report.txt, report.json), a picture
(run.png), tensorhub/timeline.html and the logs in FOLDER. Returns 0 if every claim holds.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import time
from pathlib import Path
from statistics import mean
from typing import Any

from recipes.demo import report as reports
from recipes.demo.watch import Watcher, end_cleanly_when_told, page_of, watch
from recipes.openrlhf_grpo.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]
ENGINES = 2
PROMPTS_A_STEP = 8  # ../openrlhf_grpo/common.args
STORES = ("stock", "tensorhub")
# Rewards are shares of digits, 0 to 1. Sampling on two engines never repeats exactly, whichever path moves the weights.
GAIN_MIN = 0.06
DIFFERENCE_MAX = 0.15
# What OpenRLHF's log says first, and what that means; the last one that is there counts.
STAGES = (
    ("", "Ray starts"),
    ("Started a local Ray instance", "Ray runs; the engines start"),
    ("EngineCore pid=", "the engines load the model"),
    ("PolicyModelActor pid=", "the trainer loads the model"),
    ("cpu_adam", "DeepSpeed compiles its optimizer (minutes, the first time; nothing is said meanwhile)"),
    ("Generate samples", "the first samples are generated"),
)
STEP = re.compile(r"Global step (\d+): (.*)")  # OpenRLHF's log; what follows is a dict
REWARD = re.compile(r"'reward': ([-+.e\d]+)")
TOLD = 10  # lines about steps that a run gets
SHOWN = 8  # versions in the table at the end, and steps in the curves


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m recipes.demo.openrlhf", description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=("tiny", "small"), default="tiny", help="of the model")
    parser.add_argument("--steps", type=int, default=40, help="of training with pulling on")
    parser.add_argument("--control-steps", type=int, default=32, help="of training after it was switched off")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ROOT / "out")) / "demo-openrlhf")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="for each of the two runs")
    parser.add_argument("--report-only", action="store_true", help="of the runs that FOLDER already holds")
    parser.add_argument("arguments", nargs="*", help="for OpenRLHF, in both runs")
    return parser


def main() -> int:
    arguments = make_parser().parse_args()
    out = arguments.out.resolve()
    if not arguments.report_only:
        end_cleanly_when_told()
        shutil.rmtree(out, ignore_errors=True)
        for store in STORES:
            code = train(out / store, store, arguments)
            if code != 0:
                log = out / store / "openrlhf.log"
                print(f"OpenRLHF ended with {code}; its log is {log}, and ends like this:", file=sys.stderr)
                print("\n".join(log.read_text(errors="replace").splitlines()[-30:]), file=sys.stderr)
                return 1
    return show(out, arguments)


def train(run: Path, store: str, arguments: argparse.Namespace) -> int:
    """Start the recipe and tell what happens until it has ended; its exit status."""
    run.mkdir(parents=True)
    steps = arguments.steps + (arguments.control_steps if store == "tensorhub" else 0)
    recipe = str(ROOT / "recipes/openrlhf_grpo/run.sh")
    command = [recipe, "sync", store, "--data.max_samples", str(PROMPTS_A_STEP * steps), *arguments.arguments]
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "SIZE": arguments.size,
        "RUN": str(run),
        "OUT": str(run.parents[1]),
        "ENGINES": str(ENGINES),
        "HUB": f"tensorhub:?verify=1&pull_until={arguments.steps}",
        "TENSORHUB_EVENTS": str(run / "events"),
    }
    log_path = run / "openrlhf.log"
    print(f"OpenRLHF GRPO, {store}: one trainer, {ENGINES} vLLM engines, {steps} steps; log: {log_path}", flush=True)
    return watch(command, environment, Progress(run, steps, time.monotonic()), arguments.timeout_s)


class Progress(Watcher):
    """A printer of OpenRLHF's log: the start's phases, then every few steps the reward and the versions."""

    def __init__(self, run: Path, steps: int, started: float) -> None:
        super().__init__(run / "openrlhf.log", STAGES, started)
        self.run, self.steps, self.step = run, steps, 0

    def news(self, lines: list[str]) -> None:
        for found in filter(None, map(STEP.search, lines)):
            self.begin(f"step {int(found[1]) + 1}" if int(found[1]) < self.steps else "the run ends")
            step, status = int(found[1]), found[2]
            if step > self.step and (step == 1 or step % max(1, self.steps // TOLD) == 0 or step == self.steps):
                reward = REWARD.search(status)
                said = [f"step {step} of {self.steps}"] + ([f"reward {float(reward[1]):.3f}"] if reward else [])
                self.say(", ".join(said) + self._version(step))
            self.step = max(self.step, step)

    def _version(self, version: int) -> str:
        """Step N publishes version N; the engines have it a moment later, so the one before is told."""
        events = reports.read_events(self.run / "events") if (self.run / "events").exists() else []
        return version_text(events, max(1, version - 1))


def version_text(events: list[dict[str, Any]], version: int) -> str:
    """Describe one version on its way; "" when it was not published. PURE."""
    found = [event for event in events if event.get("version") == version]
    published = [event["seconds"] for event in found if event["event"] == "publish"]
    if not published:
        return ""
    words = [f"; version {version}: publish {1000 * max(published):.0f} ms"]
    for event in found:
        if event["event"] == "fetch":
            sources = " and ".join(sorted({reports.replica_of(source) for source in event["sources"]}))
            words.append(f"{reports.replica_of(event['worker'])} from {sources} {1000 * event['seconds']:.0f} ms")
    return ", ".join(words)


def show(out: Path, arguments: argparse.Namespace) -> int:
    from recipes.demo.picture import draw

    stock, ours = ([*read_metrics(out / store / "tensorboard")] for store in STORES)
    report = reports.make_report(
        reports.read_events(out / "tensorhub" / "events"),
        ours,
        replicas=ENGINES,
        steps=arguments.steps,
        control_steps=arguments.control_steps,
        trainer=reports.OPENRLHF_SYNC,
    )
    name = reports.OPENRLHF_SYNC.reward
    curves = {store: [row["data"][name] for row in rows] for store, rows in zip(STORES, (stock, ours), strict=True)}
    report.claims.append(learns_alike(curves, arguments.steps))
    (out / "report.json").write_text(json.dumps({**json.loads(report.to_json()), "rewards": curves}, indent=1))
    everything = [reports.table(report), both_curves(curves, arguments.steps), reports.claims(report)]
    (out / "report.txt").write_text("\n\n".join(everything) + "\n")
    draw(
        report,
        out / "run.png",
        kl_max=reports.OPENRLHF_SYNC.kl_max,
        beside={"OpenRLHF's own path": curves["stock"]},
    )
    print("\n" + reports.short_table(report, SHOWN))
    print("\n" + both_curves(curves, arguments.steps, shown=SHOWN))
    print("\n" + reports.claims(report, brief=True))
    print(f"\nall versions and steps: {out / 'report.txt'}, {out / 'report.json'}\n{out / 'run.png'}")
    print(page_of(out / "tensorhub"))
    return 0 if report.holds else 1


def learns_alike(curves: dict[str, list[float]], steps: int) -> reports.Claim:
    """Compare the last quarter of the steps with pulling on with the first. PURE."""
    part = max(1, steps // 4)
    first = {store: mean(curve[:part]) for store, curve in curves.items() if curve}
    last = {store: mean(curve[steps - part : steps]) for store, curve in curves.items() if len(curve) >= steps}
    claim = "the reward is learned as with OpenRLHF's own path, on the same seeds"
    if set(last) != set(STORES):
        return reports.Claim(claim, False, f"{steps} steps were expected of each run")
    gains = {store: last[store] - first[store] for store in STORES}
    difference = abs(last["stock"] - last["tensorhub"])
    text = ", ".join(f"{store} {first[store]:.2f} -> {last[store]:.2f}" for store in STORES)
    return reports.Claim(claim, min(gains.values()) >= GAIN_MIN and difference <= DIFFERENCE_MAX, text)


def both_curves(curves: dict[str, list[float]], steps: int, *, width: int = 20, shown: int | None = None) -> str:
    """Return one line a step, or for `shown` of them: each run's reward, and a bar of it."""
    lines = ["reward    " + "".join(f"{store:<{width + 8}}" for store in STORES).rstrip()]
    numbers = range(max(len(curve) for curve in curves.values()))
    for number in reports.some(numbers, shown, always=(steps - 1, steps)):
        cells = [curves[store][number] if number < len(curves[store]) else None for store in STORES]
        bars = "".join(
            " " * (width + 8) if value is None else f"{value:6.3f}  {'#' * round(width * value):<{width}}"
            for value in cells
        )
        note = "" if number < steps else "pulling off" if number > steps else "the last version pulled"
        lines.append(f"step {number + 1:3d}  {bars}{note}".rstrip())
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
