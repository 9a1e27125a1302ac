"""A real GRPO run whose fleet of rollouts grows, shrinks, loses an engine and a whole node, in front of your eyes.

    python -m recipes.demo.elastic [--framework verl|openrlhf] [--size small|tiny] [--out FOLDER]

It starts with one replica on a Ray node of this machine; two nodes join. `tensorhub fleet` makes it four replicas, then
two; an engine is killed (SIGKILL) and comes back, and one more starts beside it; then the raylet of a node is killed,
and the replica that was there comes back elsewhere. Training goes on all the time. Ends with a table and what was
claimed, checked; leaves report.json, timeline.html and the logs in FOLDER. Returns 0 if every claim holds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from recipes.demo import elastic_report as reports
from recipes.demo.__main__ import JOB, ROOT, STORE
from recipes.demo.fleet_shell import Shell
from recipes.demo.report import read_events, read_metrics, replica_of
from recipes.demo.watch import end_cleanly_when_told, end_group, page_of

GPUS = "2 2 2"  # of the head (one for the trainer) and of two more nodes
PROMPTS, ANSWERS = 8, 4  # of a step, and to each
POLL_S = 1.0  # every time all events are read, and there are two cores; the times of the report are of the events
START_TIMEOUT_S = 600.0  # of the run, and of a replica: imports of verl and vLLM, mostly
VERSIONS_AFTER = 1  # that everybody takes at the end


# On two cores all would wait for each other; on a cluster a new one has a machine of its own. So a serving engine
# when another one is started leaves it nine tenths of a core that both want.
STEPS_BACK = 10  # of nice
BESIDE = {"RAY_worker_niceness": "0"}
# Worker and engine in one process: a third of what an engine's start takes here, imports mostly, is saved. vLLM's CPU
# build has them so only when it is told that no process is bound to cores.
ONE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
ONE_PROCESS = "+actor_rollout_ref.rollout.engine_kwargs.vllm.distributed_executor_backend=uni"
AT_ONCE = "actor_rollout_ref.rollout.max_num_seqs=4"  # answers of a replica: two cores generate for all of them
LONG_ANSWERS = ("--data.max_len", "256", "--rollout.max_new_tokens", "192")  # one is under way at every moment


def _for_verl(folder: Path) -> tuple[str, ...]:
    options = ("verify=true", "replica_timeout_s=8")
    store = (f"+{STORE}.{option}" for option in options)
    return *JOB, AT_ONCE, *store, ONE_PROCESS, f"trainer.rollout_data_dir={folder / 'samples'}"


class Failed(Exception):
    """The run ended, or something did not happen in time."""


class Run:
    """A run on several Ray nodes, its events so far, and the commands of its user."""

    def __init__(
        self,
        folder: Path,
        size: str,
        framework: str = "verl",
        *,
        recipe: str | None = None,
        nodes: str = GPUS,
        inside: Sequence[str] = (),
        arguments: Sequence[str] = (),
        **environment: str,
    ) -> None:
        """Prepare a run. recipe: of this framework; inside: the prefix of its commands, e.g. for a namespace;
        arguments: of the framework, after the others."""
        self.folder, self._inside = folder, inside
        self.log = folder / f"{framework}.log"
        self._shell: Shell | None = None
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._environment = {
            **os.environ,
            "PYTHON": sys.executable,
            "SIZE": size,
            "NODES": nodes,
            "RUN": str(folder),
            "OUT": str(folder.parent),
            "TENSORHUB_EVENTS": str(folder / "events"),
            "HUB": "tensorhub:?verify=1",  # OpenRLHF's; verl's options are arguments
            **BESIDE,
            **(ONE if framework == "verl" else {}),
            **environment,
        }
        script = ROOT / f"recipes/{recipe or f'{framework}_grpo_elastic'}/run.sh"
        own = _for_verl(folder) if framework == "verl" else LONG_ANSWERS
        command = [*inside, str(script), *own, *arguments]
        self.started = time.monotonic()
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=self._environment, start_new_session=True
            )

    def events(self) -> list[dict[str, Any]]:
        folder = self.folder / "events"
        return read_events(folder) if folder.exists() else []

    def cluster(self) -> dict[str, Any]:
        """Return what ../cluster.py reports about the nodes."""
        return dict(json.loads((self.folder / "nodes.json").read_text()))

    def pid(self, event: str, name: str) -> int:
        """Return the process that last reported this event of this replica."""
        said = [
            (float(line["t"]), int(path.stem.rpartition("-")[2]))
            for path in (self.folder / "events").glob("*-*.jsonl")
            for line in map(json.loads, path.read_text().split("\n")[:-1])
            if line["event"] == event and replica_of(line["worker"]) == name
        ]
        return max(said)[1]

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.started:5.0f} s] {text}", flush=True)

    def until(self, what: str, condition: Callable[[], Any], timeout_s: float = START_TIMEOUT_S) -> Any:
        deadline = time.monotonic() + timeout_s
        while not (answer := condition()):
            if self.process.poll() is not None:
                raise Failed(f"the run ended while it was waited for {what}; see {self.log}")
            if time.monotonic() > deadline:
                raise Failed(f"no {what} within {timeout_s:.0f} s; see {self.log}")
            time.sleep(POLL_S)
        return answer

    def begin(self) -> None:
        """Wait until it has answered, and published what joining replicas read: OpenRLHF's first step comes before
        that."""
        self.until("Ray cluster", (self.folder / "nodes.json").exists)
        self._shell = Shell(self.cluster(), self.folder / "fleet.log", self._inside)  # while the run itself starts
        first = {"request", "publish"}
        self.until("first answer", lambda: self.ready() == 1 and first <= {e["event"] for e in self.events()})

    def fleet(self, *arguments: str) -> None:
        """Run `tensorhub fleet ...`, as the run's user types it."""
        assert self._shell is not None
        status, said = self._shell(*arguments)
        if status != 0:
            raise Failed(
                f"tensorhub fleet {' '.join(arguments)}: {' '.join(said)[-500:]}; see {self.folder / 'fleet.log'}"
            )
        for line in said:
            self.say(f"    {line}")

    def ready(self) -> int:
        return reports.ready_at(self.events(), time.time())

    def act(self, what: str, goal: int, do: Callable[[], None], *, leaves: str | None = None) -> None:
        """Do something to the fleet, and wait until it has `goal` replicas that serve. leaves: the killed one."""
        self.say(what)
        self._step_back()
        began = time.time()
        with open(self.folder / "events" / "story.jsonl", "a") as story:
            line = {"t": began, "event": "act", "worker": "", "what": what, "goal": goal, "leaves": leaves}
            story.write(json.dumps(line) + "\n")
        do()
        if leaves is not None:
            self.until(f"loss of {leaves}", lambda: self.is_lost(leaves, began))
        self.until(f"fleet of {goal}", lambda: self.ready() == goal)
        self.say(f"{goal} replicas serve, {time.time() - began:.0f} s later")

    def _step_back(self) -> None:
        """Lower the priority of running processes, so that starting ones go first."""
        for node in self.cluster()["nodes"]:
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in psutil.Process(node["raylet"]).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.nice(max(process.nice(), STEPS_BACK))

    def is_lost(self, name: str, since: float) -> bool:
        """Return whether the fleet has noticed the loss. For a ready one it reports every version."""
        members = [e for e in self.events() if e["event"] == "member" and e["t"] > since]
        return any(replica_of(e["worker"]) == name and e["state"] != "ready" for e in members)

    def close(self) -> None:
        if self._shell is not None:
            self._shell.close()
        end_group(self.process)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m recipes.demo.elastic", description=__doc__.splitlines()[0])
    parser.add_argument("--framework", choices=("verl", "openrlhf"), default="verl")
    parser.add_argument("--size", choices=("tiny", "small"), default="small", help="of the model")
    parser.add_argument("--out", type=Path, help="default: out/demo-elastic, or demo-elastic-openrlhf")
    parser.add_argument("--report-only", action="store_true", help="of the run that FOLDER already holds")
    arguments = parser.parse_args()
    framework = arguments.framework
    name = "demo-elastic" + ("" if framework == "verl" else f"-{framework}")
    folder = (arguments.out or Path(os.environ.get("OUT", ROOT / "out")) / name).resolve()
    if arguments.report_only:
        return show(folder, framework)
    end_cleanly_when_told()
    print(f"{framework} GRPO on three Ray nodes: one trainer, one replica, a {arguments.size} model")
    print("starting Ray, the trainer and the engine (imports, mostly: one to two minutes) ...", flush=True)
    run = Run(folder, arguments.size, framework)
    try:
        tell(run)
        return show(folder, framework)
    except Failed as error:
        print(f"elastic: {error}", file=sys.stderr)
        return 1
    finally:
        run.close()


def tell(run: Run) -> None:
    """Run the story."""
    run.begin()
    run.say("one replica serves; two more nodes join")
    run.fleet("list")
    (run.folder / "join").touch()
    run.act("tensorhub fleet target 4", 4, lambda: run.fleet("target", "4"))
    run.act("tensorhub fleet target 2", 2, lambda: run.fleet("target", "2"))
    victim = _joined(run)[0]
    run.act(f"SIGKILL of the engine of {victim}; target 3", 3, lambda: kill_and_grow(run, victim), leaves=victim)
    run.fleet("list")
    victim, raylet, node = _on_another_node(run)
    run.act(f"SIGKILL of Ray's {node}, with {victim}", 3, lambda: os.kill(raylet, signal.SIGKILL), leaves=victim)
    version = max(e["version"] for e in run.events() if e["event"] == "publish")
    run.until(f"version {version + VERSIONS_AFTER} everywhere", lambda: everywhere(run, version + VERSIONS_AFTER))
    run.fleet("list")


def _members(run: Run) -> dict[str, dict[str, Any]]:
    """Return the last event of every member that serves."""
    last = {replica_of(e["worker"]): e for e in run.events() if e["event"] == "member"}
    return {name: event for name, event in last.items() if event["state"] == "ready"}


def _joined(run: Run) -> list[str]:
    return [name for name, event in _members(run).items() if event["kind"] == "joined"]


def kill_engine(run: Run, name: str) -> None:
    os.kill(run.pid("install", name), signal.SIGKILL)


def kill_and_grow(run: Run, name: str) -> None:
    kill_engine(run, name)
    run.fleet("target", "3")


def _on_another_node(run: Run) -> tuple[str, int, str]:
    """Return a replica on a node that is not the head, the raylet of that node, and its name."""
    raylets = {node["raylet"]: node["name"] for node in run.cluster()["nodes"][1:]}
    for name in reversed(_joined(run)):
        for parent in psutil.Process(run.pid("install", name)).parents():
            if parent.pid in raylets:
                return name, parent.pid, raylets[parent.pid]
    raise Failed("no replica is on a node that may be killed")


def everywhere(run: Run, version: int) -> bool:
    had = {replica_of(e["worker"]) for e in run.events() if e["event"] == "resume" and e["version"] >= version}
    return set(_members(run)) <= had


def read_verl(folder: Path) -> dict[str, Any]:
    """Return what it was trained on, by step. A step that is not in its log may be half written."""
    metrics = read_metrics(folder / "metrics.jsonl")
    steps, folder = len(metrics), folder / "samples"
    samples = {
        step: [json.loads(line)["uid"] for line in (folder / f"{step}.jsonl").read_text().splitlines()]
        for step in range(1, steps + 1)
        if (folder / f"{step}.jsonl").exists()
    }
    return {"samples": samples, "steps": steps, "counts": [reports.samples_of(row["data"]) for row in metrics]}


def read_openrlhf(folder: Path, events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what the generator handed over for each step; prompts are numbered in the order of their requests."""
    from recipes.openrlhf_grpo.metrics import read_metrics

    steps = max((row["step"] for row in read_metrics(folder / "tensorboard")), default=0)
    samples: dict[int, list[str]] = {}
    for event in events:
        if event["event"] == "prompt" and event["number"] < steps * PROMPTS:
            names = [f"{event['number']}_{answer}_0" for answer in range(event["samples"])]
            samples.setdefault(event["number"] // PROMPTS + 1, []).extend(names)
    return {"samples": samples, "steps": steps}


def show(folder: Path, framework: str) -> int:
    events = read_events(folder / "events")
    trained = read_verl(folder) if framework == "verl" else read_openrlhf(folder, events)
    report = reports.make_report(events, **trained, prompts_per_step=PROMPTS, answers=ANSWERS)
    (folder / "report.json").write_text(report.to_json())
    print("\n" + reports.table(report))
    print("\n" + "\n".join(f"{'ok  ' if c.holds else 'FAIL'}  {c.claim}\n        {c.detail}" for c in report.claims))
    print(f"\n{folder / 'report.json'}\n{page_of(folder)}", flush=True)
    return 0 if report.holds else 1


if __name__ == "__main__":
    sys.exit(main())
