"""Command lines of the frameworks' own examples, and how they are taken from there: command_lines.py capture.

    python tests/support/command_lines.py capture verl ~/verl examples/grpo_trainer/run_qwen3_8b_fsdp.sh ...
    python tests/support/command_lines.py happens          what verl's real command does with each line of the table

Captured are arguments only: a script is run in an empty folder, with executables that do nothing but write down how
they were called. Scripts that end processes are left out. The table is tests/adapters/command_lines.json.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parents[1] / "adapters" / "command_lines.json"
MODULES = ("verl.trainer.main_ppo", "one_step_off_policy.main_ppo", "fully_async_main", "openrlhf.cli.train_ppo_ray")
STUBS = "python python3 uv ray pip pip3 nvidia-smi npu-smi hf huggingface-cli wget curl ssh sudo apt git docker"
STUBS += " rm sleep date"
STUB = """#!{python}
import json, os, sys
with open(os.environ["CALLS"], "a") as calls:
    calls.write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + chr(10))
if sys.argv[0].endswith("date"):
    print("DATE")
sys.exit("-c" in sys.argv[1:2])
"""


def captured(checkout: Path, script: str, **environment: str) -> str | None:
    """The command line that starts the training, as a shell would take it; None where the script starts none."""
    if "kill" in (text := (checkout / script).read_text()) or "srun" in text:
        return None
    with tempfile.TemporaryDirectory() as folder:
        for name in STUBS.split():
            stub = Path(folder, name)
            stub.write_text(STUB.format(python=sys.executable))
            stub.chmod(0o755)
        calls = Path(folder, "calls")
        calls.touch()
        given = {
            "PATH": f"{folder}:/usr/bin:/bin",
            "HOME": f"{folder}/home",
            "CALLS": str(calls),
            "USER": "user",
            **environment,
        }
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                ["bash", str(checkout / script)], env=given, cwd=folder, capture_output=True, timeout=60, check=False
            )
        for call in calls.read_text().splitlines():
            words = [
                word.replace(f"{folder}/home", "$HOME").replace(folder, "$PWD").replace(str(checkout), "$CHECKOUT")
                for word in json.loads(call)
            ]
            if any(word.endswith(MODULES) for word in words):
                return shlex.join(words)
    return None


def table() -> dict[str, Any]:
    return dict(json.loads(TABLE.read_text()))


def write(rows: dict[str, Any]) -> None:
    TABLE.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    rows = table() if TABLE.exists() else {}
    if sys.argv[1] == "capture":
        framework, checkout = sys.argv[2], Path(sys.argv[3]).absolute()
        for script in sys.argv[4:]:
            line = captured(checkout, script)
            print(script, "no line" if line is None else f"{len(line)} characters")
            if line is not None:
                rows.setdefault(framework, {})[script] = line
        write(rows)
