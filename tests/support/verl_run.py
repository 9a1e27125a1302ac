"""A whole verl run in pull mode (recipes/verl_grpo) that a test watches by its event log."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from tensorhub_plugins.core.cli import fetch_status
from tensorhub_plugins.core.errors import TensorHubError
from tensorhub_plugins.core.security import secret

ROOT = Path(__file__).resolve().parents[2]
STORE = "actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.tensorhub"
START_S = 1200  # imports of verl and vLLM in a dozen processes; 100 s on two idle cores, six times that on slow ones
STORY_S = 300


class Run:
    """A running recipe and its event log."""

    def __init__(self, folder: Path, overrides: Sequence[str], **environment: str):
        self.folder = folder
        self.events_folder = folder / "events"
        overrides = [
            "trainer.total_training_steps=400",
            "trainer.total_epochs=1000",
            # So slow that samples of an older version are as likely under the newer one: what is left is tearing.
            "actor_rollout_ref.actor.optim.lr=1e-6",
            *overrides,
        ]
        environment = {
            **os.environ,
            "PYTHON": sys.executable,
            "SIZE": os.environ.get("TENSORHUB_TEST_SIZE", "small"),
            "OUT": str(folder / "out"),
            "RUN": str(folder / "run"),
            "TENSORHUB_EVENTS": str(self.events_folder),
            **environment,
        }
        self.run_folder = Path(environment["RUN"])
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "verl.log"
        command = ["bash", str(ROOT / "recipes/verl_grpo/run.sh"), "separate_async", "pull", *overrides]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        self._offsets = {}
        self.events = []

    def read(self):
        """Return all events so far, oldest first; each has the process that wrote it."""
        for path in sorted(self.events_folder.glob("*.jsonl")) if self.events_folder.exists() else []:
            with open(path) as file:
                file.seek(self._offsets.get(path, 0))
                while (line := file.readline()).endswith("\n"):
                    self.events.append({**json.loads(line), "pid": int(path.stem.rsplit("-", 1)[1])})
                    self._offsets[path] = file.tell()
        self.events.sort(key=lambda event: event["t"])
        return self.events

    def find(self, event, since=0.0, **fields):
        return [
            e
            for e in self.read()
            if e["event"] == event and e["t"] > since and all(e.get(k) == v for k, v in fields.items())
        ]

    def until(self, what, condition, timeout_s=STORY_S, every_s=0.05):
        """Return the first truthy answer of `condition`; fail the test at the deadline or when the run has ended."""
        deadline = time.monotonic() + timeout_s
        while not (answer := condition()):
            assert self.process.poll() is None, f"verl ended while waiting for {what}\n{self.tail()}"
            assert time.monotonic() < deadline, f"no {what} within {timeout_s} s\n{self.tail()}"
            time.sleep(every_s)
        return answer

    def tail(self):
        lines = self.log.read_text(errors="replace").splitlines()
        recent = [json.dumps(e) for e in self.read()[-40:]]
        return "\n".join([*recent, *[line[:300] for line in lines[-60:]]])

    def version(self):
        published = self.find("publish")
        return published[-1]["version"] if published else 0

    def leases(self):
        try:
            hub = self.find("hub")[0]
            report = fetch_status(hub["address"], timeout_s=2, keys=secret.read(Path(hub["secret_file"])))
        except TensorHubError:
            return []
        return [lease for model in report["models"] for lease in model["leases"]]

    def pid(self, event, worker):
        """Return the process that most recently reported this about this worker."""
        return self.find(event, worker=worker)[-1]["pid"]

    def has_all(self, version, replicas, since):
        return all(
            any(e["version"] >= version for e in self.find("resume", since=since, worker=f"{name}/0"))
            for name in replicas
        )

    def close(self):
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.process.poll() is None:
                os.killpg(self.process.pid, number)
                try:
                    self.process.wait(60)  # it sweeps up after itself
                except subprocess.TimeoutExpired:
                    continue

    def check_nothing_was_torn_or_lost(self, *, compared, steps):
        """Check the run. compared: the least number of digests known of two or more workers. steps: the least that were
        trained."""
        digests = {}
        for event in self.find("digests"):
            for key, digest in event["digests"].items():
                digests.setdefault((event["version"], event["layout"], key), {})[event["worker"]] = digest
        assert sum(len(by_worker) > 1 for by_worker in digests.values()) >= compared
        assert not {k: v for k, v in digests.items() if len(set(v.values())) > 1}
        assert "Error in _run_prompt" not in self.log.read_text(errors="replace")
        metrics = [json.loads(line) for line in (self.run_folder / "metrics.jsonl").read_text().splitlines()]
        assert len(metrics) >= steps
        # Trainer and rollouts agree about every token's probability, which they would not about torn weights.
        assert max(abs(row["data"]["rollout_corr/kl"]) for row in metrics if "rollout_corr/kl" in row["data"]) < 0.005


def replace_weights(folder: Path) -> None:
    """Fill the weights that verl has saved in this folder with 0.5; its files look as before from outside."""
    for path in folder.glob("model_world_size_*_rank_*.pt"):
        times = path.stat()
        state = torch.load(path, weights_only=False)
        with torch.no_grad():
            for tensor in state.values():
                local = tensor.local_shards()[0].tensor if hasattr(tensor, "local_shards") else tensor
                getattr(local, "_local_tensor", local).fill_(0.5)
        torch.save(state, path)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
