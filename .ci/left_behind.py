"""Did a run leave something on the machine? `--before` prints what there is, `--after FILE` names what is new.

Looks at processes that carry the run's mark (TENSORHUB_CI_RUN in their environment), files in shared memory,
network namespaces, and files in the work tree that git neither has nor ignores. Fails when it names anything.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from recipes.sweep import ancestors, processes, read

MARK = "TENSORHUB_CI_RUN"
GRACE_S = 20.0  # Ray's own processes end some seconds after their driver


def main() -> None:
    if sys.argv[1:] == ["--before"]:
        print(json.dumps(things()))
        return
    before = json.loads(Path(sys.argv[2]).read_text())
    deadline = time.monotonic() + GRACE_S
    while left := left_behind(before):
        if time.monotonic() > deadline:
            sys.exit("left behind by the run:\n" + "\n".join(f"  {line}" for line in left))
        time.sleep(0.5)


def left_behind(before: dict[str, list[str]]) -> list[str]:
    now = things()
    new = [f"{kind}: {thing}" for kind in now for thing in now[kind] if thing not in before[kind]]
    return new + [f"process: {line}" for line in our_processes()]


def things() -> dict[str, list[str]]:
    git = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True)
    return {
        "shared memory": [file for file in names("/dev/shm") if not of_a_stranger(f"/dev/shm/{file}")],
        "network namespace": names("/run/netns"),
        "work tree": git.stdout.splitlines(),
    }


def names(folder: str) -> list[str]:
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def of_a_stranger(file: str) -> bool:
    """Somebody else's program on this machine has it mapped, so it is not for us to judge."""
    return any(file in read(process / "maps") for process in processes() if not ours(process))


def our_processes() -> list[str]:
    found = [process for process in processes() if ours(process) and process not in ancestors()]
    return [f"{process.name} {read(process / 'cmdline').replace(chr(0), ' ')[:200]}" for process in found]


def ours(process: Path) -> bool:
    return f"{MARK}={os.environ[MARK]}" in read(process / "environ").split("\0")


if __name__ == "__main__":
    main()
