"""One OpenRLHF run of a recipe on the CPU, and what its event log says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from recipes.demo.report import read_events, replica_of
from recipes.openrlhf_grpo.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]
RUN_TIMEOUT_S = 900


class Run:
    """One recipe run. `recipe` is a folder of recipes/."""

    def __init__(
        self,
        folder: Path,
        shared: Path,
        recipe: str,
        mode: str,
        store: str,
        *arguments: str,
        hub: str = "tensorhub:?verify=1",
        **variables: str,
    ) -> None:
        self.folder = folder
        environment = {
            **os.environ,
            "PYTHON": sys.executable,
            "OUT": str(shared),
            "RUN": str(folder),
            "SIZE": "tiny",
            "HUB": hub,
            "TENSORHUB_EVENTS": str(folder / "events"),
            **variables,
        }
        command = [str(ROOT / f"recipes/{recipe}/run.sh"), mode, store, *arguments]
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "openrlhf.log"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)  # Ray's daemons leave when their driver does
            self.process.wait(90)  # it sweeps up after itself, half a minute at most

    def end(self) -> None:
        """Wait for the end, which must be a good one."""
        code = self.process.wait(RUN_TIMEOUT_S)
        assert code == 0, f"{self.tail()}\nOpenRLHF ended with {code}"

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])

    def events(self, name: str) -> list[dict[str, Any]]:
        folder = self.folder / "events"
        return [event for event in read_events(folder) if event["event"] == name] if folder.exists() else []

    def pid_of(self, replica: str) -> int | None:
        """Return the process of the actor that has reported requests: its event log is named after it. None: none."""
        for path in (self.folder / "events").glob("*.jsonl"):
            if f'"event": "request", "worker": "{replica}/0"' in path.read_text():
                return int(path.stem.rpartition("-")[2])
        return None

    def wait_for(self, condition: Any) -> Any:
        """Return the first truthy result of `condition`."""
        deadline = time.monotonic() + RUN_TIMEOUT_S
        while time.monotonic() < deadline:
            found = condition()
            if found:
                return found
            assert self.process.poll() is None, f"{self.tail()}\nthe run ended before what the test waits for"
            time.sleep(0.2)  # reading the logs takes time from what we wait for
        raise AssertionError(f"{self.tail()}\nnothing happened")

    def rows(self) -> list[dict[str, float]]:
        return [row["data"] for row in read_metrics(self.folder / "tensorboard")]

    def check_digests(self) -> set[int]:
        """Check that equal versions had equal bytes everywhere; return the versions compared with the trainer's."""
        digests: dict[tuple[int, str, str], dict[str, str]] = defaultdict(dict)
        for event in self.events("digests"):
            for key, value in event["digests"].items():
                digests[event["version"], event["layout"], key][event["worker"]] = value
        for where, workers in digests.items():
            assert len(set(workers.values())) == 1, f"{where}: {workers}"
        replicas = {where: set(map(replica_of, workers)) for where, workers in digests.items()}
        return {version for (version, _, _), held in replicas.items() if "trainer" in held and len(held) > 1}

    def check_answered_once(self, prompts: int, samples: int) -> None:
        """Check that every prompt of every whole batch was answered so often, and none twice of the last batch."""
        answered = Counter(event["number"] for event in self.events("prompt"))
        assert set(answered.values()) == {1} and {event["samples"] for event in self.events("prompt")} == {samples}
        whole = max(answered) // prompts
        assert set(range(prompts * whole)) <= set(answered), "a prompt is lost"
