"""A run in the foreground: its phase, by its log, what a demo has to say of it, and a page of it at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from recipes.sweep import kill_group
from tensorhub_plugins.core.cli import write_timeline

TICK_S = 0.5
QUIET_S = 20.0  # without news, say what it does, and then after twice that time
STOP_S = 120.0  # what verl and Ray get to end by themselves, node after node, and run.sh to sweep up after them


class Watcher:
    """A printer of what is new in a run's log. stages: what the log says first, and what that means, in order; the last
    one that is there counts."""

    def __init__(self, log: Path, stages: Sequence[tuple[str, str]], started: float) -> None:
        self.log, self.started = log, started
        (_, self.stage), *self.stages = stages
        self._offset, self._rest = 0, ""
        self._told_at = self._since = started
        self._quiet_s = QUIET_S

    def tell(self) -> None:
        with open(self.log, errors="replace") as log:
            log.seek(self._offset)
            *lines, self._rest = (self._rest + log.read()).split("\n")
            self._offset = log.tell()
        reached = [number for number, (sign, _) in enumerate(self.stages) if any(sign in line for line in lines)]
        if reached:
            self.say(self.stages[reached[-1]][1])
            self.begin(self.stages[reached[-1]][1], self.stages[reached[-1] + 1 :])
        self.news(lines)
        now = time.monotonic()
        if now - self._told_at > self._quiet_s:
            quiet_s = 2 * self._quiet_s
            self.say(f"{self.stage}: for {now - self._since:.0f} s so far")
            self._quiet_s = quiet_s

    def begin(self, stage: str, then: Sequence[tuple[str, str]] = ()) -> None:
        """Note what it does from now on, and what may follow."""
        self.stage, self.stages, self._since = stage, list(then), time.monotonic()

    def news(self, lines: list[str]) -> None:
        """Say what is new. lines: of the log."""

    def say(self, text: str) -> None:
        self._told_at, self._quiet_s = time.monotonic(), QUIET_S
        print(f"[{self._told_at - self.started:5.0f} s] {text}", flush=True)


def watch(command: Sequence[str], environment: Mapping[str, str], watcher: Watcher, timeout_s: float) -> int:
    """Run this command, and tell what happens until it has ended; its exit status."""
    with open(watcher.log, "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        try:
            while process.poll() is None:
                watcher.tell()
                if time.monotonic() - watcher.started > timeout_s:
                    print(f"not finished after {timeout_s:.0f} s: giving up", file=sys.stderr)
                    return 124
                time.sleep(TICK_S)
            watcher.tell()
        finally:
            end_group(process)
    return process.returncode


def page_of(run: Path) -> Path:
    """Write `tensorhub timeline` of a run's events; return its page."""
    write_timeline([run / "events"], run / "timeline")
    return run / "timeline.html"


def end_cleanly_when_told() -> None:
    """SIGTERM ends Python at once, and what it has started would go on."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def end_group(process: subprocess.Popen) -> None:
    """End the process group that we started, and only that; Ray's daemons leave when their driver does, and processes
    of the group that do not are killed."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            break
        os.killpg(process.pid, number)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            continue
    kill_group(process.pid)
