"""`tensorhub completion`: what bash itself makes of it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable

import pytest

from tensorhub_plugins.core.cli import main

ASK = """
{script}
COMP_WORDS=({words} "{last}"); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_tensorhub; echo "${{COMPREPLY[@]}}"
"""


@pytest.fixture
def completed(capsys: pytest.CaptureFixture[str]) -> Callable[[str, str], list[str]]:
    if (bash := shutil.which("bash")) is None:
        pytest.skip("bash is not installed")
    assert main(["completion"]) == 0
    script = capsys.readouterr().out

    def ask(words: str, last: str) -> list[str]:
        program = ASK.format(script=script, words=words, last=last)
        return subprocess.run([bash, "-c", program], capture_output=True, text=True, check=True).stdout.split()

    return ask


def test_commands_and_their_options(completed: Callable[[str, str], list[str]]) -> None:
    ask = completed
    assert ask("tensorhub", "s") == ["server", "status"]
    assert ask("tensorhub doctor", "ma") == ["machine"]
    assert ask("tensorhub fleet", "u") == ["undrain"]
    assert ask("tensorhub status --hub tcp://h:1", "--la") == ["--late"]
    assert ask("tensorhub fleet drain rollout-1", "--n") == ["--node", "--now"]
    assert ask("tensorhub withdraw 7 --model status", "--r") == ["--run"]
    assert ask("tensorhub status", "./file") == []  # bash completes files itself


def test_it_has_every_command_that_the_help_has(completed: Callable[[str, str], list[str]]) -> None:
    words = [sys.executable, "-m", "tensorhub_plugins.core.cli", "--help"]
    known = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    found = re.search(r"\{([\w,]+)\}", known)
    assert found and set(found[1].split(",")) < set(completed("tensorhub", ""))
