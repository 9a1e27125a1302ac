"""How the doctors of frameworks read a command line, and print what they make of it.

python -u -m verl.trainer.main_ppo a=1                          words: what follows the framework's own command
ray job submit --working-dir w -- python -m ... a=1             the same, for nodes that are not this one
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from tensorhub_plugins.core import UsageError
from tensorhub_plugins.vllm.outlook import Outlook

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")  # of a model or a data set on the Hugging Face hub
SUBMIT = ("ray", "job", "submit")


class Words(NamedTuple):
    """A command line of a framework."""

    command: str  # the module
    arguments: list[str]
    is_submitted: bool  # to a Ray cluster: its paths are those of other nodes


def words_of(given: Sequence[str], commands: Collection[str], default: str) -> Words:
    """Return the framework's command and what follows it; `default` where none is named. What starts it (a shell's
    variables, `ray job submit ... --`, `python -u -m`) may stand before it."""
    is_submitted = tuple(Path(word).name for word in given[:3]) == SUBMIT
    files = {f"/{command.replace('.', '/')}.py": command for command in commands}
    for number, word in enumerate(given):
        found = word if word in commands else next((files[file] for file in files if f"/{word}".endswith(file)), None)
        if found is not None:
            return Words(found, list(given[number + 1 :]), is_submitted)
    if is_submitted or "-m" in given:
        raise UsageError(f"this command line starts none of {', '.join(commands)}, which the store knows")
    return Words(default, list(given), False)


def folder_of(package: str, name: str) -> Path:
    """Return the folder of a framework without importing it. Raise UsageError where it is not installed."""
    found = find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise UsageError(f"{name} is not installed: pip install 'tensorhub-plugins[{package}]'")
    return Path(next(iter(found.submodule_search_locations)))


def run(look: Callable[[Outlook, Sequence[str]], None], usage: str | None, arguments: Sequence[str]) -> int:
    """Print what will happen and return 0; or all that is wrong, a line each, and return 1. What was not checked
    is the last line of both. look: asks everything of this command line."""
    if {"--help", "-h"} & set(arguments):
        print(usage)
        return 0
    outlook = Outlook()
    outlook.ask(look, outlook, arguments)
    last = f"I did not look at {'; '.join(outlook.unseen) or 'the rest of it'}"
    if outlook.wrong:
        print(*(f"tensorhub: {sentence}" for sentence in outlook.wrong), last, sep="\n", file=sys.stderr)
        return 1
    print(*outlook.said, last, sep="\n")
    return 0


def check_paths(paths: Iterable[tuple[str, object]], *, is_submitted: bool, unseen: list[str]) -> None:
    """UsageError that names all files and folders which are not there. paths: an option's name and its value; what may
    be a name on the Hugging Face hub, or is somewhere else, is added to `unseen`."""
    missing: list[str] = []
    elsewhere: list[str] = []
    for name, value in paths:
        if not isinstance(value, str) or not value or Path(value).expanduser().exists():
            continue
        is_path = value.startswith(("/", "~", "./", "../")) or HUB_ID.fullmatch(value) is None
        (missing if is_path and "://" not in value and not is_submitted else elsewhere).append(f"{name}={value}")
    if elsewhere:
        unseen.append(f"{', '.join(elsewhere)} (not on this machine)")
    if missing:
        raise UsageError(f"not on this machine: {', '.join(missing)}; correct it, or ask where the job's driver runs")
