"""Which models follow an update: try every architecture of the installed vLLM, and make the table of README.md.

python -m recipes.conformance --make [--only NAME,...] [--tp N] [--engine JSON] [--json FILE]
python -m recipes.conformance FILE...       # the table of one or more such runs, with other versions of vLLM, say
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ORDER = ("WRONG", "REFUSED", "ok", "not run", "not made")  # what a reader should see first
WHY_LENGTH_MAX = 140


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    if options.make:
        from recipes.conformance.examine import run

        engine = {"tensor_parallel_size": options.tp, **options.engine}
        return run(options.only, engine, report=options.json)
    if not options.files:
        print(__doc__, file=sys.stderr)
        return 2
    print(table([json.loads(file.read_text()) for file in options.files]))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m recipes.conformance", description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--make", action="store_true", help="try the architectures (20 to 50 minutes on two cores)")
    what.add_argument("files", type=Path, nargs="*", default=[], help="that --json has left: print the table of them")
    parser.add_argument(
        "--only",
        type=lambda names: names.split(","),
        default=[],
        metavar="NAME,...",
        help="of all architectures, these",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="workers of an engine; two engines are started")
    parser.add_argument("--engine", type=json.loads, default={}, metavar="JSON", help="more arguments of vllm.LLM")
    return parser


def table(runs: list[dict[str, Any]]) -> str:
    """Return Markdown: how many of each, what was examined, and what could not be run, by its reason.

    What was not made is only counted.
    """
    rows = [{family["architecture"]: family for family in run["families"]} for run in runs]
    titles = [f"vLLM {run['vllm']}, TP {run.get('engine', {}).get('tensor_parallel_size', 1)}" for run in runs]
    lines = _head("result", titles)
    for result in ORDER:
        counts = [sum(family["result"] == result for family in run.values()) for run in rows]
        lines.append(_line(result, map(str, counts)))
    rows = [{name: family for name, family in run.items() if family["result"] != "not made"} for run in rows]
    names = sorted({name for run in rows for name in run})
    examined = [name for name in names if any(_result(run, name) not in ("not run", "") for run in rows)]
    lines += ["", *_head("architecture", titles)]
    lines += [_line(name, (_cell(run.get(name)) for run in rows)) for name in _wrong_first(examined, rows)]
    lines += ["", *_head("not run", titles)]
    lines += [_line(name, (_cell(run.get(name)) for run in rows)) for name in names if name not in examined]
    return "\n".join(lines)


def _wrong_first(names: list[str], rows: list[dict[str, Any]]) -> list[str]:
    return sorted(names, key=lambda name: (min(ORDER.index(_result(run, name) or "not run") for run in rows), name))


def _result(run: dict[str, Any], name: str) -> str:
    return str(run.get(name, {}).get("result", ""))


def _cell(family: dict[str, Any] | None) -> str:
    if family is None:
        return ""
    if family["result"] == "ok":
        malformed = "" if family["refusals"] == "all" else f"; malformed versions: {family['refusals']}"
        return f"ok, {family['seconds']:.0f} s{malformed}"
    why = family["why"][:WHY_LENGTH_MAX].replace("|", "\\|")
    return why if family["result"] == "not run" else f"{family['result']}: {why}"


def _head(first: str, titles: list[str]) -> list[str]:
    return [_line(first, titles), _line("---", ["---"] * len(titles))]


def _line(first: str, cells: Any) -> str:
    return f"| {' | '.join([first, *cells])} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
