"""Commands of `tensorhub fleet`, one a line, in one process: to join a busy Ray cluster takes many seconds."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensorhub_plugins.core.cli import main

DONE = "status"  # the line after what a command has said


class Shell:
    """The process that runs them, on a cluster that ../cluster.py has made. It joins at once, which may take most of a
    minute. log: the file for Ray's own output; inside: the prefix of its command."""

    def __init__(self, cluster: dict[str, Any], log: Path, inside: Sequence[str] = ()) -> None:
        environment = {
            **os.environ,
            "RAY_ADDRESS": cluster["address"],
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": cluster["token_path"],
        }
        with open(log, "wb") as file:
            self._process = subprocess.Popen(
                [*inside, sys.executable, "-m", "recipes.demo.fleet_shell"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env=environment,
            )

    def __call__(self, *arguments: str) -> tuple[int, list[str]]:
        """Run the command, and return its status and output."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(" ".join(arguments) + "\n")
        self._process.stdin.flush()
        said = []
        for line in self._process.stdout:
            if line.startswith(f"{DONE} "):
                return int(line.split()[1]), said
            said.append(line.rstrip())
        return 1, said

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class _Said(io.TextIOBase):
    """An output stream: a command's lines go to our reader; what Ray's own threads print meanwhile, into the log."""

    def write(self, text: str) -> int:
        to = sys.__stdout__ if threading.current_thread() is threading.main_thread() else sys.__stderr__
        assert to is not None
        return to.write(text)


if __name__ == "__main__":
    import ray

    ray.init(address="auto", log_to_driver=False, logging_level="ERROR", configure_logging=False)
    sys.stdout = sys.stderr = _Said()
    for command in sys.stdin:
        status = main(["fleet", *command.split()])
        print(f"{DONE} {status}")
        sys.__stdout__.flush()
