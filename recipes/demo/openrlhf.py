"""A real OpenRLHF GRPO run over the store beside the same job, seeds included, with OpenRLHF's own weight update.

    python -m recipes.demo.openrlhf [--size tiny|small] [--steps 40] [--control-steps 32] [--out FOLDER]

One trainer, two vLLM engines, generating and training in turns. First OpenRLHF's own way for --steps steps, then the
store: the same command line but for --vllm.sync_backend. After --steps steps its engines stop pulling (the negative
control) while training goes on for --control-steps more: trainer and engines must then drift apart. Ends with a table
of every version, both reward curves and what was claimed, checked; leaves report.json and the logs in FOLDER. Returns 0
if every claim holds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean

from recipes.demo import report as reports
from recipes.demo.__main__ import QUIET_S, TICK_S, end_group
from recipes.openrlhf_grpo.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]
ENGINES = 2
PROMPTS_A_STEP = 8  # ../openrlhf_grpo/common.args
STORES = ("stock", "tensorhub")
# Rewards are shares of digits, 0 to 1. Sampling on two engines is not the same twice, whoever moves the weights.
GAIN_MIN = 0.06
DIFFERENCE_MAX = 0.15


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m recipes.demo.openrlhf", description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=("tiny", "small"), default="tiny", help="of the model")
    parser.add_argument("--steps", type=int, default=40, help="of training with pulling on")
    parser.add_argument("--control-steps", type=int, default=32, help="of training after it was switched off")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ROOT / "out")) / "demo-openrlhf")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="for each of the two runs")
    parser.add_argument("--report-only", action="store_true", help="of the runs that FOLDER already holds")
    parser.add_argument("arguments", nargs="*", help="for OpenRLHF, in both runs")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    if not arguments.report_only:
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
    started = told_at = time.monotonic()
    said: set[str] = set()
    with open(log_path, "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        try:
            while process.poll() is None:
                seconds = time.monotonic() - started
                for line in [line for line in news(run) if line not in said]:
                    said.add(line)
                    told_at = time.monotonic()
                    print(f"[{seconds:5.0f} s] {line}", flush=True)
                if time.monotonic() - told_at > QUIET_S:
                    told_at = time.monotonic()
                    print(f"[{seconds:5.0f} s] ...", flush=True)
                if seconds > arguments.timeout_s:
                    print(f"not finished after {arguments.timeout_s:.0f} s: giving up", file=sys.stderr)
                    return 124
                time.sleep(TICK_S)
        finally:
            end_group(process)
    return process.returncode


def news(run: Path) -> list[str]:
    """Everything there is to tell of a run so far."""
    events = reports.read_events(run / "events") if (run / "events").exists() else []
    fetched = {}
    lines = []
    for event in events:
        key = (reports.replica_of(event["worker"]), event.get("version"))
        if event["event"] == "publish":
            lines.append(f"version {key[1]} is published, the trainer waited {1000 * event['seconds']:.0f} ms")
        elif event["event"] == "fetch":
            sources = sorted({reports.replica_of(source) for source in event["sources"]})
            fetched[key] = f"from {' and '.join(sources)} in {1000 * event['seconds']:.0f} ms"
        elif event["event"] == "resume":
            paused = f"stood still for {1000 * event['seconds']:.0f} ms"
            lines.append(f"{key[0]} has version {key[1]} {fetched.get(key, '')}, {paused}")
    return lines


def show(out: Path, arguments: argparse.Namespace) -> int:
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
    print("\n" + reports.table(report))
    print("\n" + both_curves(curves, arguments.steps))
    print("\n" + reports.claims(report))
    print(f"\n{out / 'report.json'}")
    return 0 if report.holds else 1


def learns_alike(curves: dict[str, list[float]], steps: int) -> reports.Claim:
    """PURE. Over the last quarter of the steps with pulling on, against the first."""
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


def both_curves(curves: dict[str, list[float]], steps: int, width: int = 30) -> str:
    """One line a step: each run's reward, and a bar of it."""
    lines = ["reward    " + "".join(f"{store:<{width + 8}}" for store in STORES)]
    for number in range(max(len(curve) for curve in curves.values())):
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
