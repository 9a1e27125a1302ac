"""`tensorhub completion`: a function for bash, made from the parser, that completes commands and options."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

SCRIPT = """_tensorhub() {
  local path="tensorhub" word words
  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
    case "$path $word" in %(paths)s) path="$path $word" ;; esac
  done
  case "$path" in
%(cases)s
  esac
  COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o default -F _tensorhub tensorhub"""


def script(parser: argparse.ArgumentParser) -> str:
    """Return the function, as bash reads it. Where it knows no word, files are completed."""
    found = dict(_commands(parser, "tensorhub"))
    cases = [f'    "{path}") words="{" ".join(words)}" ;;' for path, words in found.items()]
    return SCRIPT % {"paths": " | ".join(f'"{path}"' for path in found), "cases": "\n".join(cases)}


def _commands(parser: argparse.ArgumentParser, path: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each command, as it is written, and the words that may follow it."""
    words = [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
    within = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    yield path, [*(name for action in within for name in action.choices), *words]
    for action in within:
        for name, command in action.choices.items():
            yield from _commands(command, f"{path} {name}")
