"""`tensorhub fleet ...` as the user of a running job types it, and where that job's Ray cluster is."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

COMMAND_TIMEOUT_S = 300


def address_below(folder: Path) -> str:
    """Return the address of the Ray cluster whose files are there, as its raylet got it."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # ended meanwhile
            words = path.read_text(errors="replace").split("\0")
            if str(folder) in " ".join(words):
                for word in words:
                    if word.startswith("--gcs-address="):
                        return word.partition("=")[2]
    raise AssertionError(f"no Ray cluster below {folder}")


class Fleet:
    """The commands, to the job on the Ray cluster whose files are below `ray_folder`. environment: more of it."""

    def __init__(self, ray_folder: Path, **environment: str) -> None:
        self.ray_folder, self.environment = ray_folder, environment

    def __call__(self, *arguments: str) -> str:
        """Run the command, check that it succeeded, and return its output."""
        call = [sys.executable, "-m", "tensorhub_plugins.core.cli", "fleet", *arguments]
        call += ["--address", address_below(self.ray_folder)]
        environment = {**os.environ, **self.environment}
        done = subprocess.run(call, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def row(self, name: str) -> list[str]:
        """Return the words of this member in `tensorhub fleet list`: name, kind, state...; none after it has left."""
        rows = [line.split() for line in self("list").splitlines()]
        return next((row for row in rows if row[:1] == [name] and row[2] != "gone"), [])
